"""stats(): what it costs, and the transaction it names."""

from __future__ import annotations

import json
import secrets
from typing import Any

import psycopg

import databases

Connection = psycopg.Connection[tuple[Any, ...]]

FILL = """
insert into outbox.message (
    lane, due_at, message_id, routing_key, key, content_type, created_at, emitted_by, attempts, body
)
select
    n %% 64, case n %% 10 when 0 then now() + interval '1 h' when 1 then now() end, gen_random_uuid(), 'r' || n %% 20,
    'k' || n %% 1000, 'application/json', now(), 'x', (n %% 10 = 1)::integer, convert_to(repeat('x', 200), 'UTF8')
from generate_series(1, %s) as n
"""


def blocks(db: Connection) -> int:
    """What one call reads, statements inside it included."""
    row = db.execute("explain (analyze, buffers, format json) select outbox.stats()").fetchone()
    assert row is not None
    plan = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def stats(db: Connection, *names: str) -> tuple[Any, ...]:
    row = db.execute(f"select {', '.join(names)} from outbox.stats()").fetchone()
    assert row is not None
    return row


def test_cost_does_not_grow_with_the_backlog(db: Connection) -> None:
    db.execute("alter table outbox.message set (autovacuum_enabled = off)")
    db.execute(FILL, [50_000])
    few = blocks(db)
    db.execute(FILL, [450_000])
    many = blocks(db)
    assert many < 2 * few
    waiting, scheduled, retrying, exact = stats(db, "waiting", "scheduled", "retrying", "exact")
    assert not exact
    # An estimate from 500 pages, without statistics: within a third, and nearly always within a tenth.
    assert 270_000 < waiting < 530_000
    assert 33_000 < scheduled < 67_000
    assert 33_000 < retrying < 67_000


def test_cost_does_not_grow_with_what_was_settled(db: Connection, dsn: str) -> None:
    """Rows that an old snapshot keeps from vacuum lie below the floors."""
    db.execute("select outbox.emit_many(%s)", [json.dumps([{"routing_key": "r", "payload": 1}] * 64)])
    blocks(db)  # what a first call reads of the catalog
    few = blocks(db)
    with psycopg.connect(dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from outbox.message")
        for _ in range(60):
            db.execute("select outbox.emit_many(%s)", [json.dumps([{"routing_key": "r", "payload": 1}] * 500)])
            for _ in range(8):
                token = secrets.token_hex(16)
                db.execute(
                    "select outbox.mark_sent(%s::uuid, array(select c.id from outbox.claim_batch(%s::uuid, 500) as c))",
                    [token, token],
                )
        many = blocks(db)
    assert many < 10 * few + 2_000


def test_names_the_emitter_that_stays_open(db: Connection, dsn: str) -> None:
    assert stats(db, "oldest_emitter_pid", "oldest_emitter_at") == (None, None)
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second, psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from outbox.message")
        first.execute("select 1")
        second.execute("select outbox.emit('b', '1')")
        assert stats(db, "oldest_emitter_pid") == (second.info.backend_pid,)
        first.execute("select outbox.emit('a', '1')")
        pid = first.info.backend_pid
        began = db.execute("select xact_start from pg_stat_activity where pid = %s", [pid]).fetchone()
        assert began is not None
        assert stats(db, "oldest_emitter_pid", "oldest_emitter_at") == (pid, began[0])
        first.rollback()
        assert stats(db, "oldest_emitter_pid") == (second.info.backend_pid,)
        second.rollback()
        assert stats(db, "oldest_emitter_pid", "oldest_emitter_at") == (None, None)


def test_names_a_prepared_one_by_its_time(db: Connection) -> None:
    name = f"outbox_test_{secrets.token_hex(6)}"
    db.execute("begin; set local outbox.notify = off")
    db.execute("select outbox.emit('a', '1')")
    db.execute(f"prepare transaction '{name}'")
    try:
        prepared = db.execute("select prepared from pg_prepared_xacts where gid = %s", [name]).fetchone()
        assert prepared is not None
        assert stats(db, "oldest_emitter_pid", "oldest_emitter_at") == (None, prepared[0])
    finally:
        db.execute(f"rollback prepared '{name}'")


def test_an_owner_without_privileges_learns_it_from_the_horizon(roles: databases.Roles) -> None:
    """Who may not see when another's transaction began is told since when it was in the way."""
    role = roles.make("owner")
    with databases.database(databases.SERVER, options=f"owner {role}") as dsn:
        mine = databases.as_user(dsn, role)
        databases.install(mine, "plain")
        with psycopg.connect(dsn) as emitter, psycopg.connect(mine, autocommit=True) as owner:
            emitter.execute("select outbox.emit('a', '1')")
            assert stats(owner, "oldest_emitter_pid", "oldest_emitter_at") == (emitter.info.backend_pid, None)
            owner.execute(
                "update outbox.horizon set version = version + 1, noted_xids = outbox._emitter_xids(),"
                " noted_id = 1, noted_at = '2020-01-01 00:00:00+00'"
            )
            told = stats(owner, "oldest_emitter_pid", "oldest_emitter_at at time zone 'UTC'")
            assert (told[0], str(told[1])) == (emitter.info.backend_pid, "2020-01-01 00:00:00")
