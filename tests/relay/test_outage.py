"""A server goes away, hangs or answers late: nothing is lost, no attempt counted, the relay comes back by itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pamqp import commands
from pamqp.frame import marshal

from databases import PASSWORD, Roles, as_user
from harness import (
    Db,
    Management,
    Proxy,
    Queue,
    StartRelay,
    claims,
    cut_off,
    emit,
    eventually,
    leased,
    may,
    waiting,
)
from outbox import loop
from outbox.errors import DatabaseUnavailableError
from outbox.session import Session

# Time-outs in the proportions of the defaults, so that a test takes seconds.
QUICK = ("--lease", "8", "--confirm-timeout", "2", "--send-timeout", "1", "--heartbeat", "1")


def attempts(db: Db) -> int:
    row = db.execute(
        "select coalesce(sum(attempts), 0) + (select count(*) from outbox.dead_letter) from outbox.message"
    )
    return int((row.fetchone() or (0,))[0])


def ids(queue: Queue, count: int) -> list[str]:
    return [message.properties["message_id"] for message in queue.receive(count)]


# The second lease is far longer than the test waits: another relay must notice that its holder is gone.
@pytest.mark.parametrize("settings", [QUICK, ()])
def test_killed_relay_leaves_nothing_behind(
    db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay, settings: tuple[str, ...]
) -> None:
    relay = start_relay(*settings, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.deaf.set()
    _, message_id = emit(db)
    (first,) = ids(queue, 1)
    # Published, not confirmed: the relay cannot have marked it.
    os.kill(relay.process.pid, signal.SIGKILL)
    relay.process.wait()
    assert waiting(db) == 1

    second = start_relay(*settings)
    (again,) = ids(queue, 1)
    assert first == again == message_id
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert second.stop() == 0


def test_swallowed_confirms_cost_one_probe_a_round(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay(*QUICK, "-v", amqp=proxy.url)
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    eventually(lambda: waiting(db) == 0, "an empty table")
    proxy.deaf.set()
    wanted = {emit(db)[1] for _ in range(300)}
    relay.await_log("no confirm within 2 s")
    assert attempts(db) == 0
    relay.await_log("server unavailable")
    proxy.deaf.clear()
    proxy.cut()  # what it is connecting to has not heard
    received: list[str] = []
    while set(received) != wanted:
        received += ids(queue, 1)
    eventually(lambda: waiting(db) == 0, "an empty table")
    # What was in flight when confirms stopped comes twice, and one probe at most: not a window a round.
    assert len(received) <= 2 * len(wanted) + 1
    after = relay.log[relay.log.index("server unavailable") :]
    assert re.findall(r"batch settled .*?sent=(\d+)", after)[0] in {"0", "1"}
    assert attempts(db) == 0
    assert relay.stop() == 0


def test_late_confirms_make_no_duplicates(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    settings = ("--lease", "9", "--confirm-timeout", "4", "--send-timeout", "1", "--heartbeat", "3")
    relay = start_relay(*settings, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    db.execute("select outbox.emit('order.created', '{}') from generate_series(1, 20)")
    eventually(lambda: leased(db), "a claim")
    other = start_relay(*settings)
    other.await_log("relay ready")
    relay.await_log("no confirm within 4 s")
    assert leased(db)
    proxy.held.clear()
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert len(set(ids(queue, 20))) == 20
    relay.await_log("relay ready", times=2)
    assert relay.log.count("not sending") == 1
    assert relay.stop() == other.stop() == 0
    assert queue.take() == []


def test_leases_are_held_while_the_connection_is_blocked(
    db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay
) -> None:
    settings = ("--lease", "6", "--confirm-timeout", "3", "--send-timeout", "1", "--heartbeat", "3")
    relay = start_relay(*settings, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    _, message_id = emit(db)
    assert ids(queue, 1) == [message_id]
    proxy.say(marshal(commands.Connection.Blocked("low on memory"), 0))
    relay.await_log("the broker has blocked the connection")
    other = start_relay(*settings)
    other.await_log("relay ready")
    until = time.monotonic() + 6.5  # longer than the lease and twice the confirm time-out, within three heartbeats
    while time.monotonic() < until:
        assert leased(db)
        time.sleep(0.02)
    proxy.say(marshal(commands.Connection.Unblocked(), 0))
    proxy.held.clear()
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert queue.take() == []
    relay.await_log("relay ready", times=2)
    assert relay.log.count("not sending") == 1
    assert relay.stop() == other.stop() == 0


def test_full_queue_costs_no_attempt(db: Db, management: Management, start_relay: StartRelay) -> None:
    queue = Queue(management, arguments={"x-max-length": 5, "x-overflow": "reject-publish"})
    relay = start_relay()
    wanted = {emit(db)[1] for _ in range(12)}
    relay.await_log("the broker refused it (Basic.Nack)")
    assert attempts(db) == 0
    before, until = claims(db), time.monotonic() + 1.5
    while time.monotonic() < until:
        assert claims(db) - before < 20, "it must not try again and again without a pause"
        time.sleep(0.02)
    found: set[str] = set()
    while found != wanted:
        found |= set(ids(queue, 1))
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert attempts(db) == 0
    assert relay.stop() == 0


def test_full_queue_delays_no_other(db: Db, management: Management, start_relay: StartRelay) -> None:
    Queue(management, "full", "full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    queue = Queue(management, binding="order.*")
    for n in range(10):
        emit(db, "full", key=f"k{n}")
    relay = start_relay()
    eventually(lambda: waiting(db) == 9, "refused messages")
    emit(db)
    queue.receive(1)
    # The next attempt is due after the usual back-off, and was none.
    later = "select count(*) from outbox.message where due_at > clock_timestamp() and attempts = 0"
    eventually(lambda: db.execute(later).fetchone() == (9,), "messages that wait for their next attempt")
    assert relay.stop() == 0


def test_once_does_not_wait_for_a_full_queue(db: Db, management: Management, start_relay: StartRelay) -> None:
    Queue(management, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for _ in range(3):
        emit(db)
    relay = start_relay("--once")
    assert relay.process.wait(20) == 1
    assert "outbox: the broker refused it (Basic.Nack)" in relay.log
    assert waiting(db) == 2
    assert attempts(db) == 0
    assert not leased(db)


def test_missing_default_exchange_is_an_outage(
    db: Db, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    relay = start_relay()
    emit(db)
    queue.receive(1)
    management("DELETE", "/exchanges/{vhost}/outbox")
    wanted = {emit(db)[1] for _ in range(20)}
    relay.await_log("no exchange 'outbox'")
    eventually(lambda: not leased(db), "released messages")
    assert attempts(db) == 0
    Queue(management)
    assert set(ids(queue, 20)) == wanted
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert attempts(db) == 0
    assert relay.stop() == 0


def test_what_an_outage_has_become_is_told(
    db: Db, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    """The connection is lost, and when the broker is back the exchange is missing: only the second can be mended."""
    relay = start_relay()
    relay.await_log("relay ready")
    management("DELETE", "/exchanges/{vhost}/outbox")
    cut_off(management)
    emit(db)
    relay.await_log("the broker has no exchange 'outbox': create it")
    Queue(management)
    queue.receive(1)
    assert relay.log.count("server unavailable") == 2, "once for each, however often it was tried"
    assert relay.stop() == 0


def test_lost_broker_connection_is_made_again(
    db: Db, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    relay = start_relay("-v")
    relay.await_log("relay ready")
    cut_off(management)
    relay.await_log("relay ready", times=2)
    db.execute("select outbox.emit('order.created', '{}') from generate_series(1, 20)")
    queue.receive(20)
    assert "BrokerUnavailableError" in relay.log
    # After a reconnect one goes first.
    assert re.findall(r"batch settled .*?sent=(\d+)", relay.log)[0] == "1"
    assert relay.stop() == 0


@pytest.mark.usefixtures("queue")
def test_outage_is_told_once(db: Db, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay(amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.close()
    relay.await_log("server unavailable")
    emit(db)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert not leased(db), "nothing is claimed while the broker is away"
        time.sleep(0.02)
    assert relay.log.count("\n") <= 3
    assert relay.stop() == 0


def test_signal_ends_it_while_a_server_is_away(start_relay: StartRelay) -> None:
    for addresses in ({"amqp": "amqp://127.0.0.1:1/"}, {"pg": "postgresql://127.0.0.1:1/none"}):
        relay = start_relay(**addresses)
        relay.await_log("server unavailable")
        assert relay.stop() == 0


SESSIONS = "from pg_stat_activity where application_name = 'outbox relay' and datname = current_database()"


def test_lost_database_sessions_are_made_again(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    wanted = set()
    for _ in range(5):
        eventually(lambda: db.execute(f"select {SESSIONS}").rowcount == 2, "two sessions")
        db.execute(f"select pg_terminate_backend(pid) {SESSIONS}")
        wanted.add(emit(db)[1])
    # The session that claims, alone: of both, the one that listens may notice first, and tells it in words of its own.
    listening = f"{SESSIONS} and query = 'listen outbox'"
    eventually(lambda: db.execute(f"select {listening}").rowcount == 1, "a session that listens")
    db.execute(f"select pg_terminate_backend(pid) {SESSIONS} and query <> 'listen outbox'")
    wanted.add(emit(db)[1])
    relay.await_log("DatabaseUnavailableError")
    assert set(ids(queue, 6)) == wanted
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert attempts(db) == 0
    assert relay.stop() == 0


def test_without_listening_it_polls(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    listening = f"{SESSIONS} and query = 'listen outbox'"
    eventually(lambda: db.execute(f"select {listening}").rowcount == 1, "a session that listens")
    db.execute(f"select pg_terminate_backend(pid) {listening}")
    relay.await_log("no notifications, polling instead")
    emit(db)
    queue.receive(1)
    eventually(lambda: db.execute(f"select {listening}").rowcount == 1, "a session that listens")
    assert "server unavailable" not in relay.log
    assert relay.stop() == 0


def test_answer_to_a_claim_is_lost(db: Db, queue: Queue, pooled: str, start_relay: StartRelay) -> None:
    """Behind a pooler: elsewhere the end of the session would shorten the lease of two minutes."""
    with contextlib.closing(Proxy(pooled)) as proxy:
        relay = start_relay(pg=proxy.url)
        relay.await_log("relay ready")
        # Stopped, so that the claim that is lost is one that finds the message.
        relay.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # for a claim that is on its way
        _, message_id = emit(db)
        proxy.deaf_at = "claim_batch"
        relay.process.send_signal(signal.SIGCONT)
        eventually(lambda: leased(db), "a claim")
        proxy.deaf_at = ""
        proxy.cut()
        proxy.deaf.clear()
        assert ids(queue, 1) == [message_id]
        eventually(lambda: waiting(db) == 0, "an empty table")
        assert relay.stop() == 0
        assert queue.take() == []


def test_answer_to_a_mark_is_lost(db: Db, queue: Queue, proxy: Proxy, pg_proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay(pg=pg_proxy.url, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    _, first = emit(db)
    assert ids(queue, 1) == [first]
    pg_proxy.deaf_at = "mark_sent"
    proxy.held.clear()
    eventually(lambda: waiting(db) == 0, "an empty table")
    pg_proxy.deaf_at = ""
    pg_proxy.cut()
    pg_proxy.deaf.clear()
    _, second = emit(db)
    assert ids(queue, 1) == [second]
    assert relay.stop() == 0
    assert "lease lost" not in relay.log  # it was done before, not by somebody else


def test_mark_is_repeated_until_it_gets_through(
    db: Db, queue: Queue, proxy: Proxy, pg_proxy: Proxy, start_relay: StartRelay
) -> None:
    relay = start_relay(pg=pg_proxy.url, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    _, first = emit(db)
    assert ids(queue, 1) == [first]
    pg_proxy.stuck.set()
    proxy.held.clear()
    pg_proxy.cut()
    relay.await_log("server unavailable")
    assert waiting(db) == 1
    pg_proxy.stuck.clear()
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert relay.stop() == 0
    assert queue.take() == []


def test_database_that_hangs(db: Db, queue: Queue, pg_proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay(*QUICK, pg=pg_proxy.url)
    relay.await_log("relay ready")
    pg_proxy.held.set()
    emit(db)
    relay.await_log("the database did not answer in time")
    pg_proxy.held.clear()
    queue.receive(1)
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert relay.stop() == 0


def test_database_that_hangs_is_said_to_each_time(dsn: str) -> None:
    class Slow(Session):
        async def ask(self) -> str:
            try:
                await self._one("select pg_sleep(1)")
            except DatabaseUnavailableError as error:
                return str(error)
            return "it answered"

    async def ask(times: int) -> set[str]:
        session = Slow(dsn, statement_timeout=0.02)
        return {await session.ask() for _ in range(times)}

    assert loop.run(ask(40)) == {"the database did not answer in time"}


def test_window_counts_until_the_mark(
    db: Db, queue: Queue, proxy: Proxy, pg_proxy: Proxy, start_relay: StartRelay
) -> None:
    """What is confirmed and not marked is sent again after a crash: so it is still in the window."""
    relay = start_relay("--batch-size", "10", "--window", "20", pg=pg_proxy.url, amqp=proxy.url)
    emit(db)
    queue.receive(1)
    eventually(lambda: waiting(db) == 0, "an empty table")
    proxy.held.set()
    # With keys: what is emitted at once without them shares a lane, and a lane is in one batch at a time.
    db.execute("select outbox.emit('order.created', '{}', key => n::text) from generate_series(1, 100) as n")
    received = ids(queue, 20)
    pg_proxy.stuck_at = "mark_sent"
    proxy.held.clear()
    eventually(pg_proxy.stuck.is_set, "a mark")
    time.sleep(0.5)
    received += [message.properties["message_id"] for message in queue.take()]
    assert len(received) == len(set(received)) == 20
    os.kill(relay.process.pid, signal.SIGKILL)
    relay.process.wait()
    pg_proxy.cut()
    second = start_relay()
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert second.stop() == 0
    received += ids(queue, 80)
    assert len(set(received)) == 100
    assert len(received) <= 120


def test_memory_is_bounded(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    """However large the window is in messages, what is claimed stays within a few times max_bytes."""
    relay = start_relay("--max-bytes", "1000000", amqp=proxy.url)
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    proxy.held.set()
    body = "decode(repeat('00', 300000), 'hex')"
    db.execute(f"select outbox.emit_bytes('order.created', {body}, key => n::text) from generate_series(1, 50) as n")
    # Three batches of four: one body may exceed the limit by its length.
    handed = "select coalesce(sum(cardinality(handed)), 0) from outbox.lane where token is not null"
    eventually(lambda: (db.execute(handed).fetchone() or (0,))[0] >= 9, "claims")
    time.sleep(0.5)
    assert (db.execute(handed).fetchone() or (0,))[0] <= 12
    proxy.held.clear()
    queue.receive(50)
    assert relay.stop() == 0


@pytest.mark.usefixtures("queue")
def test_large_bodies_do_not_starve_heartbeats(db: Db, start_relay: StartRelay) -> None:
    db.execute("select outbox.configure('max_body_bytes', '10000000')")
    body = "decode(repeat('00', 5000000), 'hex')"
    db.execute(f"select outbox.emit_bytes('order.created', {body}) from generate_series(1, 12)")
    relay = start_relay(*QUICK)
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert relay.stop() == 0
    assert "server unavailable" not in relay.log


def test_brokers_are_tried_in_turn(db: Db, amqp_url: str, proxy: Proxy, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay(amqp=f"amqp://127.0.0.1:1/, {proxy.url}, {amqp_url}")
    relay.await_log("server unavailable")
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    proxy.close()
    emit(db)
    queue.receive(1)
    assert relay.stop() == 0


@pytest.mark.parametrize(("deny", "permit"), [("nologin", "login"), ("connection limit 0", "connection limit -1")])
def test_database_that_lets_nobody_in(  # noqa: PLR0917 - fixtures
    db: Db, dsn: str, roles: Roles, queue: Queue, start_relay: StartRelay, deny: str, permit: str
) -> None:
    role = roles.make()
    db.execute(f"select outbox.grant_relay('{role}')")
    relay = start_relay(pg=as_user(dsn, role))
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    eventually(lambda: waiting(db) == 0, "an empty table")
    db.execute(f"alter role {role} {deny}")
    db.execute(f"select pg_terminate_backend(pid) {SESSIONS}")
    relay.await_log("server unavailable")
    emit(db)
    time.sleep(2)
    assert relay.log.count("\n") <= 5
    db.execute(f"alter role {role} {permit}")
    queue.receive(1)
    assert relay.stop() == 0


def test_changed_password_at_the_broker(
    db: Db, broker_user: str, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    def set_password(password: str) -> None:
        management("PUT", f"/users/{urlsplit(broker_user).username}", {"password": password, "tags": ""})

    may(management, broker_user, write="^outbox$")
    relay = start_relay(amqp=broker_user)
    relay.await_log("relay ready")
    set_password("another")
    cut_off(management)
    relay.await_log("server unavailable")
    emit(db)
    time.sleep(2)
    assert relay.log.count("\n") <= 3
    set_password(PASSWORD)
    queue.receive(1)
    assert attempts(db) == 0
    assert relay.stop() == 0


def test_reconnecting_leaves_no_files_open(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay("--poll", "0.1", amqp=proxy.url)
    relay.await_log("relay ready")

    def open_files() -> int:
        return len(list(Path(f"/proc/{relay.process.pid}/fd").iterdir()))

    def disturb() -> None:
        eventually(lambda: db.execute(f"select {SESSIONS}").rowcount == 2, "two sessions")
        db.execute(f"select pg_terminate_backend(pid) {SESSIONS}")
        proxy.cut()
        emit(db)
        queue.receive(1)

    disturb()
    eventually(lambda: db.execute(f"select {SESSIONS}").rowcount == 2, "two sessions")
    before = open_files()
    for _ in range(8):
        disturb()
    eventually(lambda: db.execute(f"select {SESSIONS}").rowcount == 2, "two sessions")
    assert open_files() <= before
    assert relay.stop() == 0


def test_revoked_rights_stay_inside_the_loop(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    db.execute("alter function outbox.claim_batch rename to claim_elsewhere")
    relay.await_log("server unavailable")
    emit(db)
    db.execute("alter function outbox.claim_elsewhere rename to claim_batch")
    queue.receive(1)
    assert relay.stop() == 0
