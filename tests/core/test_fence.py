"""What a claim hands out is on disk before it is published, whatever the emitter's commit waited for.

On a server whose WAL writer sleeps, so that only a commit that waits for the disk writes to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import databases
import servers
from harness import eventually

Connection = psycopg.Connection[tuple[Any, ...]]

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def lazy() -> Iterator[str]:
    with servers.private(rabbitmq=False, name="fence", quiet=True) as private:
        with psycopg.connect(private.dsn, autocommit=True) as db:
            db.execute("alter system set wal_writer_delay = '10s'")
            db.execute("alter system set wal_writer_flush_after = '1GB'")
            db.execute("select pg_reload_conf()")
        with databases.database(private.dsn) as dsn:
            databases.install(dsn, "plain")
            yield dsn


def session(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True, options="-c synchronous_commit=off")


def number(db: Connection, query: str) -> Any:
    row = db.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def claim(db: Connection) -> int:
    token = uuid.uuid4()
    ids = [id_ for (id_,) in db.execute("select id from outbox.claim_batch(%s)", [token])]
    return len(ids)


def settle_all(db: Connection) -> None:
    """An empty table, and everything on disk."""
    db.execute("truncate outbox.message")
    db.execute("update outbox.lane set version = version + 1, token = null, leased_until = null, handed = '{}'")
    write_all(db)


def write_all(db: Connection) -> None:
    db.execute("begin; set local synchronous_commit = on; select pg_logical_emit_message(true, '', ''); commit")


# Of ten: a checkpoint or a vacuum at work beside us writes the log as well.
MOST = 5
WRITTEN = "select pg_current_wal_insert_lsn()"
ON_DISK = "select pg_current_wal_flush_lsn() >= '{}'"


def test_an_emit_that_did_not_wait_is_on_disk_when_it_is_claimed(lazy: str) -> None:
    with session(lazy) as emitter, session(lazy) as relay:
        waited = 0
        for _ in range(10):
            settle_all(relay)
            number(emitter, "select outbox.emit('a', '1')")
            written = number(emitter, WRITTEN)
            waited += not number(emitter, ON_DISK.format(written))
            assert claim(relay) == 1
            assert number(emitter, ON_DISK.format(written))
    assert waited > MOST, "the server is not lazy"


def test_so_is_one_that_ends_while_the_claim_runs(lazy: str) -> None:
    with session(lazy) as emitter, session(lazy) as relay, session(lazy) as lock, ThreadPoolExecutor(1) as pool:
        waits = f"select exists (select from pg_locks where pid = {relay.info.backend_pid} and not granted)"
        waited = 0
        for _ in range(10):
            settle_all(relay)
            assert claim(relay) == 0  # tidies the catalog's pages, which is written too, as is the lock
            with lock.transaction():
                lock.execute("lock table outbox.setting")
                write_all(emitter)
                # The claim has looked how far the disk is, and waits for its first table.
                claimed = pool.submit(claim, relay)
                eventually(lambda: number(emitter, waits), "a claim that waits")
                number(emitter, "select outbox.emit('a', '1')")
                written = number(emitter, WRITTEN)
                waited += not number(emitter, ON_DISK.format(written))
            assert claimed.result(10) == 1
            assert number(emitter, ON_DISK.format(written))
    assert waited > MOST, "the server is not lazy"


def test_what_is_on_disk_is_not_written_again(lazy: str) -> None:
    """The one write that a message waits for, when little happens, is that of its own transaction."""
    with psycopg.connect(lazy, autocommit=True) as emitter, session(lazy) as relay:
        spared = 0
        for _ in range(10):
            settle_all(relay)
            assert claim(relay) == 0  # as before a sleep: the move of the turn is written by then
            number(emitter, "select outbox.emit('a', '1')")
            assert claim(relay) == 1
            spared += not number(emitter, ON_DISK.format(number(emitter, WRITTEN)))
    assert spared > MOST


def test_nor_what_somebody_else_writes_meanwhile(lazy: str) -> None:
    with session(lazy) as emitter, session(lazy) as relay, session(lazy) as lock, ThreadPoolExecutor(1) as pool:
        waits = f"select exists (select from pg_locks where pid = {relay.info.backend_pid} and not granted)"
        spared = 0
        for _ in range(10):
            settle_all(relay)
            assert claim(relay) == 0
            number(emitter, "select outbox.emit('a', '1')")
            written = number(emitter, WRITTEN)
            with lock.transaction():
                lock.execute("lock table outbox.setting")
                claimed = pool.submit(claim, relay)
                eventually(lambda: number(emitter, waits), "a claim that waits")
                assert not number(emitter, ON_DISK.format(written)), "the server is not lazy"
                write_all(emitter)
            assert claimed.result(10) == 1
            assert number(emitter, ON_DISK.format(written))
            spared += not number(emitter, ON_DISK.format(number(emitter, WRITTEN)))
    assert spared > MOST


def test_with_synchronous_replicas_a_claim_waits_for_them(lazy: str) -> None:
    """An emit need not have: 'local', or one whose wait a restart ended. There is no replica: the claim waits."""
    with session(lazy) as admin, session(lazy) as relay, ThreadPoolExecutor(1) as pool:
        settle_all(relay)
        admin.execute("alter system set synchronous_standby_names = 'nobody'")
        admin.execute("select pg_reload_conf()")
        try:
            eventually(lambda: number(relay, "show synchronous_standby_names") == "nobody", "the setting")
            with admin.transaction():
                admin.execute("set local synchronous_commit = local")
                number(admin, "select outbox.emit('a', '1')")
            claimed = pool.submit(claim, relay)
            with pytest.raises(TimeoutError):
                claimed.result(1)
        finally:
            admin.execute("alter system reset synchronous_standby_names")
            admin.execute("select pg_reload_conf()")
        assert claimed.result(10) == 1
