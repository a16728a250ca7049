"""How a relay without work waits: woken by the doorbell, by time, or by its own clock."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psycopg

from harness import Db, Queue, StartRelay, claims, emit, eventually, waiting

BELL = "from pg_locks where locktype = 'advisory' and objsubid = 2 and mode = 'ExclusiveLock' and granted"
ARMED = f"select pid {BELL} and classid = 'outbox.message'::regclass::oid and objid = 1"
LIFE = """
    select from pg_locks as l join pg_stat_activity as a using (pid)
    where l.locktype = 'advisory' and l.objsubid = 1 and a.datname = current_database()
"""


def armed(db: Db) -> list[int]:
    return [pid for (pid,) in db.execute(ARMED)]


def test_woken_by_the_doorbell(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    took = 0.0
    for _ in range(10):
        eventually(lambda: armed(db), "a relay that sleeps")
        begun = time.monotonic()
        emit(db)
        queue.receive(1)
        took += time.monotonic() - begun
    # Polling alone would need half a second for each, on average.
    assert took < 3
    assert relay.stop() == 0
    assert not armed(db)


def test_polling_needs_no_notification(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay("--poll", "0.2")
    relay.await_log("relay ready")
    db.execute("set session_replication_role = replica")  # no trigger fires
    emit(db)
    queue.receive(1)
    assert relay.stop() == 0


def test_open_emit_is_seen_soon_after_its_commit(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    took = 0.0
    for _ in range(3):
        with db.transaction():
            emit(db)
            before = claims(db)
            relay = start_relay()
            eventually(lambda before=before: claims(db) > before + 3, "a relay that looks, since it cannot arm")  # type: ignore[misc]
            assert not armed(db)
        begun = time.monotonic()
        queue.receive(1)
        took += time.monotonic() - begun
        assert relay.stop() == 0
    # One that looks every second has just done so.
    assert took < 1


def test_relay_that_stops_wakes_the_others(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relays = {relay.process.pid: relay for relay in (start_relay(), start_relay())}
    for relay in relays.values():
        relay.await_log("relay ready")
    eventually(lambda: armed(db), "a relay that sleeps")
    db.execute("listen outbox")
    for relay in relays.values():
        assert relay.stop() == 0
    assert list(db.notifies(timeout=5, stop_after=1))
    assert not armed(db)
    assert queue.take() == []


def test_bell_that_rings_for_nothing(db: Db, dsn: str, queue: Queue, start_relay: StartRelay) -> None:
    """Anybody can ring it, as often as they like."""
    relay = start_relay()
    relay.await_log("relay ready")
    eventually(lambda: armed(db), "a relay that sleeps")
    time.sleep(1)  # nothing came for a while
    before, begun, rings = claims(db), time.monotonic(), 0
    with psycopg.connect(dsn, autocommit=True) as stranger:
        while time.monotonic() < begun + 2:
            stranger.execute("notify outbox")
            rings += 1
    made = claims(db) - before
    assert made < 60 * (time.monotonic() - begun) < rings
    emit(db)
    queue.receive(1)
    assert relay.stop() == 0


def test_due_message_leaves_on_time(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    late = []
    for _ in range(4):
        emit(db, delay="0.4 s")
        begun = time.monotonic()
        queue.receive(1)
        late.append(time.monotonic() - begun - 0.4)
    assert min(late) > -0.1
    # Polling alone would be late by half a second, on average.
    assert sum(late) < 1.2
    assert relay.stop() == 0


def test_idle_relay_does_next_to_nothing(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    eventually(lambda: armed(db), "a relay that sleeps")

    def ticks() -> int:
        fields = Path(f"/proc/{relay.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(2)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.2
    assert relay.stop() == 0


def test_behind_a_pooler_it_polls(db: Db, queue: Queue, pooled: str, start_relay: StartRelay) -> None:
    emit(db, delay="3 s", payload={"n": 1})
    relay = start_relay("--poll", "30", pg=pooled)
    relay.await_log("relay ready")
    begun = time.monotonic()
    queue.receive(1)
    assert time.monotonic() - begun < 10, "it wakes when a message is due"
    assert relay.log.count("no notifications, polling instead") == 1
    assert db.execute(LIFE).fetchall() == []
    assert armed(db) == []
    # What a relay sets in a session would go to whoever gets that session next.
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(psycopg.connect(pooled, prepare_threshold=None))
            row = client.execute("select current_setting('synchronous_commit'), current_setting('statement_timeout')")
            assert row.fetchone() == ("on", "0")
    assert relay.stop() == 0

    db.execute("select outbox.emit('order.created', '{}', key => 'k' || n % 10) from generate_series(1, 2000) as n")
    assert start_relay("--once", pg=pooled).process.wait(30) == 0
    assert len(queue.receive(2000)) == 2000
    assert waiting(db) == 0


def test_direct_session_has_its_locks_and_settings(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    eventually(lambda: armed(db), "a relay that sleeps")
    assert len(db.execute(LIFE).fetchall()) >= 1
    row = db.execute("select count(*) from outbox.relay").fetchone()
    assert row == (1,)
    assert relay.stop() == 0
    assert queue.take() == []
