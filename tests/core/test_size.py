"""How much room messages take, and that it does not grow with how many went through."""

from __future__ import annotations

import json
import os
import re
import uuid
from typing import Any

import psycopg
import pytest

import databases
import servers

Connection = psycopg.Connection[tuple[Any, ...]]

LONG = os.environ.get("OUTBOX_LONG") == "1"
THROUGH = 1_000_000 if LONG else 100_000
BATCH = 500
BODY = 256
ROOM = """
select sum(pg_total_relation_size(c.oid)) from pg_class as c
where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'r'
"""


def batch(count: int) -> str:
    return json.dumps(
        [{"routing_key": "order.created", "payload": "x" * (BODY - 2), "key": f"k{n}"} for n in range(count)]
    )


def number(db: Connection, query: str) -> int:
    row = db.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def settle(db: Connection) -> int:
    token = uuid.uuid4()
    ids = [row[0] for row in db.execute("select id from outbox.claim_batch(%s, %s)", [token, BATCH])]
    db.execute("select outbox.mark_sent(%s, %s)", [token, ids])
    return len(ids)


def told(what: str) -> int:
    """The number that docs/dba.md gives, the first one in bold behind these words."""
    page = (databases.ROOT / "docs/dba.md").read_text()
    found = re.search(re.escape(what) + r"[^*]*\*\*([\d,]+)", page)
    assert found is not None, what
    return int(found[1].replace(",", ""))


def test_a_message_takes_what_the_page_says(db: Connection) -> None:
    db.execute("select outbox.configure('retention', 'forever')")
    count = 20 * BATCH
    for _ in range(20):
        db.execute("select outbox.emit_many(%s)", [batch(BATCH)])
    waiting = number(db, "select pg_total_relation_size('outbox.message')") / count
    while settle(db):
        pass
    kept = number(db, "select sum(pg_total_relation_size(relid)) from pg_partition_tree('outbox.archive')") / count
    assert waiting == pytest.approx(told("A message that waits takes"), rel=0.1)
    assert kept == pytest.approx(told("One that is kept takes"), rel=0.1)


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_room_does_not_grow_with_what_went_through() -> None:
    """A backlog of constant size. Autovacuum looks every second, not every minute: a minute's work in a second."""
    waiting = 5_000
    with (
        servers.private(rabbitmq=False, name="size", quiet=True) as private,
        databases.database(private.dsn) as dsn,
    ):
        databases.install(dsn, "plain")
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute("alter system set autovacuum_naptime = '1s'")
            db.execute("select pg_reload_conf()")
            messages = batch(BATCH)
            for _ in range(waiting // BATCH):
                db.execute("select outbox.emit_many(%s)", [messages])
            rooms: list[int] = []
            done = 0
            while done < THROUGH:
                db.execute("select outbox.emit_many(%s)", [messages])
                done += settle(db)
                if done >= THROUGH // 10 * (len(rooms) + 1):
                    rooms.append(number(db, ROOM) >> 20)
            assert number(db, "select count(*) from outbox.message") == waiting
            # In a short run it matters at which moment autovacuum comes by; without it, it would end at 52.
            assert rooms[9] <= told("never more than"), f"MiB after each tenth: {rooms}"
            assert not LONG or rooms[9] <= 1.2 * rooms[4], f"MiB after each tenth: {rooms}"
