"""What was sent and is kept: through many hands at once, under an owner without privileges, for any caller."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import databases

MESSAGES = 3_000

Connection = psycopg.Connection[tuple[Any, ...]]


def settle_one_batch(db: Connection, batch: int = 100) -> int:
    token = uuid.uuid4()
    ids = [row[0] for row in db.execute("select id from outbox.claim_batch(%s, %s)", [token, batch])]
    if ids:
        db.execute("select outbox.mark_sent(%s, %s)", [token, ids])
    return len(ids)


def count(db: Connection, what: str) -> int:
    row = db.execute(f"select count(*) from {what}").fetchone()
    assert row is not None
    return int(row[0])


def test_nothing_is_lost_between_relays_and_cleanups(db: Connection, dsn: str) -> None:
    """Settling, cleaning up and reading the archive at once: every message is kept, once, and nobody fails."""
    db.execute("select outbox.configure('retention', '1 day')")
    db.execute("select outbox.emit('kept', '1') from generate_series(1, %s)", [MESSAGES])
    for day in range(1, 10):
        db.execute(
            f"create table outbox.archive_2020010{day} partition of outbox.archive"
            f" for values from ('2020-01-0{day} 00:00:00+00') to ('2020-01-0{day} 24:00:00+00')"
        )
    settled = threading.Event()
    failed: list[BaseException] = []

    def work(step: str) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as mine:
                while not settled.is_set():
                    if step:
                        mine.execute(step)
                    else:
                        settle_one_batch(mine)
        except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
            failed.append(error)

    steps = ["", "", "select outbox.cleanup()", "select outbox.cleanup()", "select count(*) from outbox.archive"]
    threads = [threading.Thread(target=work, args=[step]) for step in steps]
    for thread in threads:
        thread.start()
    while count(db, "outbox.message") and not failed:
        settled.wait(0.02)
    settled.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert count(db, "outbox.archive") == MESSAGES
    assert count(db, "(select distinct message_id from outbox.archive) as kept") == MESSAGES
    db.execute("select outbox.cleanup()")
    assert count(db, "outbox._days() as d where d.ends_at < now()") == 0


@pytest.fixture
def owned(roles: databases.Roles) -> Iterator[str]:
    """The DSN of a role that owns a database and the package in it, and has no other right."""
    role = roles.make("owner")
    with databases.database(databases.SERVER, options=f"owner {role}") as dsn:
        mine = databases.as_user(dsn, role)
        databases.install(mine, "plain")
        yield mine


def test_an_owner_without_privileges(owned: str) -> None:
    with psycopg.connect(owned, autocommit=True) as db:
        db.execute("select outbox.configure('retention', '1 day')")
        assert count(db, "outbox._days()") == 4
        db.execute("select outbox.emit('kept', '1')")
        assert settle_one_batch(db) == 1
        db.execute(
            "create table outbox.archive_20200101 partition of outbox.archive"
            " for values from ('2020-01-01 00:00:00+00') to ('2020-01-02 00:00:00+00')"
        )
        assert db.execute("select archive_days, more from outbox.cleanup()").fetchone() == (1, False)
        assert count(db, "outbox.message_status where status = 'sent'") == 1


def test_what_a_caller_has_set_for_himself_changes_nothing(db: Connection) -> None:
    db.execute("set default_tablespace = 'pg_global'")
    db.execute("set timezone = 'Pacific/Apia'; set datestyle = 'german'")
    db.execute("set lock_timeout = '1ms'; set search_path = pg_temp")
    db.execute("select outbox.configure('retention', 'forever')")
    assert count(db, "outbox._days()") == 4
    odd = "select count(*) from outbox._days() where begins_at <> date_trunc('day', begins_at, 'UTC')"
    assert db.execute(odd).fetchone() == (0,)


@pytest.mark.parametrize("size", [100, 3_000, 1_000_000])
def test_a_body_is_kept_whole(db: Connection, size: int) -> None:
    """Large ones lie outside of the row, and are deleted there by the statement that copies them."""
    db.execute("select outbox.configure('retention', 'forever')")
    bodies = {os.urandom(size) for _ in range(5)}
    for body in bodies:
        db.execute("select outbox.emit_bytes('kept', %s)", [body])
    assert settle_one_batch(db) == len(bodies)
    db.execute("vacuum outbox.message")
    assert {body for (body,) in db.execute("select body from outbox.archive")} == bodies
    assert count(db, "outbox.message") == 0


def test_a_kept_message_is_found_by_its_id_or_time(db: Connection) -> None:
    """Among 100,000, of which each hundredth was sent much later than its neighbours: a retry comes late."""
    db.execute("select outbox.configure('retention', 'forever')")
    db.execute(
        """
        insert into outbox.archive
            (id, sent_at, message_id, routing_key, content_type, created_at, attempts, emitted_by, body)
        select
            n, now() - interval '1 s' + n * interval '1 us', gen_random_uuid(), 'kept', 'text/plain', now(), 0, 'x',
            repeat('x', 300)::bytea
        from generate_series(1, 100000) as n
        order by case when n % 100 = 0 then n + 30000 else n end
        """
    )
    db.execute("vacuum analyze outbox.archive")
    whole = read(db, "select body from outbox.archive")
    assert read(db, "select settled_at from outbox.message_status where id = 51234") < whole / 5
    assert read(db, "select settled_at from outbox.message_status where id = 51200") < whole / 5
    span = "between now() - interval '0.5 s' and now() - interval '0.49 s'"
    assert read(db, f"select * from outbox.archive where sent_at {span}") < whole / 5


def read(db: Connection, query: str) -> int:
    """Blocks that the plan touched."""
    row = db.execute(f"explain (analyze, buffers, format json) {query}").fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
