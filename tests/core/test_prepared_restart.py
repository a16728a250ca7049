"""A prepared transaction outlives the server that it was prepared on, while the floors move on around it."""

from __future__ import annotations

import time
import uuid
from typing import Any

import psycopg
import pytest

import databases
import servers

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True)


def work(db: Connection, seconds: float) -> None:
    """A relay on the lane of key c: emit, claim, settle, for as long as both proofs need to move a floor."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        db.execute("select outbox.emit('r', '1', key => 'c')")
        assert settle_all(db) == ["r"]
        time.sleep(0.03)


def settle_all(db: Connection) -> list[str]:
    token = uuid.uuid4()
    claimed = db.execute("select id, routing_key from outbox.claim_batch(%s)", [token]).fetchall()
    db.execute("select outbox.mark_sent(%s, %s)", [token, [id_ for id_, _ in claimed]])
    return [routing_key for _, routing_key in claimed]


def prepare(db: Connection, gid: str, *, savepoint: bool) -> int:
    db.execute("begin")
    db.execute("set local outbox.notify = off")
    if savepoint:
        db.execute("savepoint s")
    [(id_,)] = db.execute("select outbox.emit(%s, '1', key => 'c')", [gid]).fetchall()
    if savepoint:
        db.execute("release savepoint s")
    db.execute(f"prepare transaction '{gid}'")
    return int(id_)


def floor(db: Connection) -> int:
    [(found,)] = db.execute("select max(floor) from outbox.lane").fetchall()
    return int(found)


@pytest.mark.servers
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["fast", "kill"])
def test_prepared_emits_are_delivered_after_a_restart(mode: str) -> None:
    with (
        servers.private(rabbitmq=False, name="prepared", quiet=True) as private,
        databases.database(private.dsn) as dsn,
    ):
        databases.install(dsn, "plain")
        with connect(dsn) as db, connect(dsn) as writer:
            work(db, 0.3)
            # The proof by xid cannot move on, so the lock holders are noted: by what a restart must not change.
            writer.execute("begin")
            writer.execute("select pg_current_xact_id()")
            work(db, 1.2)
            first = prepare(db, "first", savepoint=False)
            work(db, 1.2)
            second = prepare(db, "second", savepoint=True)
            work(db, 0.3)
            assert floor(db) <= first
        private.postgres.restart(mode)

        with connect(dsn) as db, connect(dsn) as writer:
            work(db, 0.3)
            assert floor(db) <= first
            writer.execute("begin")
            writer.execute("select pg_current_xact_id()")
            work(db, 1.2)
            assert floor(db) <= first
            db.execute("commit prepared 'first'")
            assert settle_all(db) == ["first"]
            work(db, 1.8)
            assert first < floor(db) <= second
            writer.execute("rollback")
            work(db, 0.3)
            assert floor(db) <= second
            db.execute("commit prepared 'second'")
            assert settle_all(db) == ["second"]
            work(db, 0.3)
            assert floor(db) > second
            db.execute("select outbox.cleanup()")
            assert db.execute("select floor_repairs from outbox.horizon").fetchall() == [(0,)]
