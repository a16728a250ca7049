"""The relay as a process, on real servers: what reaches the queue, what is left in the table."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any
from uuid import UUID

import pytest

import databases
from harness import PATIENCE, Db, Management, Proxy, Queue, StartRelay, emit, eventually, leased, may, waiting
from outbox import MessageRelay, cli
from outbox.publish import Publisher
from outbox.store import Store, fits


def test_emitted_message_arrives_and_its_row_goes(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    _, message_id = emit(db, "order.created", {"order": 1})
    (message,) = queue.receive(1)
    assert json.loads(message.body) == {"order": 1}
    assert message.routing_key == "order.created"
    assert message.properties["message_id"] == message_id
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert relay.stop() == 0
    assert queue.take() == []


def test_rolled_back_message_never_arrives(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    with db.transaction(force_rollback=True):
        emit(db, payload={"order": "rolled back"})
    with db.transaction():
        emit(db, payload={"order": "kept"})
        with db.transaction(force_rollback=True):
            emit(db, payload={"order": "rolled back to savepoint"})
    (message,) = queue.receive(1)
    assert json.loads(message.body) == {"order": "kept"}
    assert relay.stop() == 0
    assert queue.take() == []


def test_everything_a_message_carries_arrives(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    headers = {
        "text": "ä",
        "yes": True,
        "no": False,
        "big": 2**63 - 1,
        "small": -1,
        "list": [1, "two"],
        "deep": {"a": 1},
    }
    properties = {"priority": 7, "type": "t", "correlation_id": "c", "reply_to": "r", "app_id": "a"}
    before = datetime.now(UTC) - timedelta(seconds=2)
    _, message_id = emit(
        db,
        payload={"ä": [1.5, None]},
        headers=json.dumps(headers),
        properties=json.dumps(properties),
        expires_in=timedelta(hours=1),
    )
    assert start_relay("--once").process.wait(20) == 0
    (message,) = queue.receive(1)
    assert json.loads(message.body) == {"ä": [1.5, None]}
    found = dict(message.properties)
    assert found.pop("headers") == headers
    assert before < datetime.fromtimestamp(found.pop("timestamp"), UTC) <= datetime.now(UTC)
    assert 3500_000 < int(found.pop("expiration")) <= 3600_000
    assert found == {**properties, "message_id": message_id, "content_type": "application/json", "delivery_mode": 2}


def test_chosen_message_id_and_exchange(db: Db, management: Management, queue: Queue, start_relay: StartRelay) -> None:
    billing = Queue(management, name="billing", exchange="billing")
    chosen = UUID("3b241101-e2bb-4255-8caf-4136c566a962")
    emit(db, message_id=chosen, exchange="billing")
    assert start_relay("--once").process.wait(20) == 0
    (message,) = billing.receive(1)
    assert message.properties["message_id"] == str(chosen)
    assert queue.take() == []


def test_messages_of_a_key_arrive_in_order(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    for number in range(300):
        emit(db, payload={"key": number % 3, "number": number}, key=f"customer-{number % 3}")
    assert start_relay("--once", "--batch-size", "50").process.wait(20) == 0
    bodies = [json.loads(message.body) for message in queue.receive(300)]
    assert waiting(db) == 0
    for key in range(3):
        numbers = [body["number"] for body in bodies if body["key"] == key]
        assert numbers == list(range(key, 300, 3))


def test_unroutable_message_is_not_marked_sent(db: Db, management: Management, start_relay: StartRelay) -> None:
    queue = Queue(management, binding="order.*")
    lost, _ = emit(db, "nobody.listens")
    emit(db, "order.created")
    assert start_relay("--once").process.wait(20) == 0
    assert len(queue.receive(1)) == 1
    row = db.execute("select id, attempts, error from outbox.message").fetchone()
    assert row == (lost, 1, "no queue is bound for this routing key")


def test_message_for_a_missing_exchange_does_not_stop_the_others(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    for _ in range(5):
        emit(db)
    lost, _ = emit(db, exchange="no-such-exchange")
    for _ in range(5):
        emit(db)
    assert start_relay("--once").process.wait(20) == 0
    # The broker drops the whole channel on it, so some of the others may come twice.
    assert len({message.properties["message_id"] for message in queue.receive(10)}) == 10
    row = db.execute("select id, attempts, error from outbox.message").fetchone()
    assert row is not None
    assert row[:2] == (lost, 1)
    assert "no-such-exchange" in row[2]


def test_two_messages_with_one_message_id(db: Db, management: Management, start_relay: StartRelay) -> None:
    queue = Queue(management, binding="order.*")
    same = UUID("3b241101-e2bb-4255-8caf-4136c566a962")
    lost, _ = emit(db, "nobody.listens", message_id=same, key="one")
    emit(db, "order.created", message_id=same, key="two")
    assert start_relay("--once").process.wait(20) == 0
    assert len(queue.receive(1)) == 1
    assert db.execute("select id from outbox.message").fetchall() == [(lost,)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly(db: Db, queue: Queue, start_relay: StartRelay, number: int) -> None:
    relay = start_relay("--poll", "60")
    relay.await_log("relay ready")
    for _ in range(20):
        emit(db)
    assert relay.stop(number) == 0
    # Whatever it did not take is there for the next one at once, not after a lease of two minutes.
    assert start_relay("--once").process.wait(20) == 0
    assert len(queue.receive(20)) == 20
    assert waiting(db) == 0


def test_once_goes_on_behind_what_has_expired(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    """A claim that finds only such messages hands out none; it ends before it has seen all."""
    for key in ("'one'", "n::text"):  # one lane deep, then all of them
        db.execute(
            f"select count(outbox.emit('gone', '1', key => {key}, expires_in => '1 ms'::interval))"
            " from generate_series(1, 300) as n".encode()
        )
    emit(db, key="one")
    emit(db)
    assert start_relay("--once", "--batch-size", "20").process.wait(20) == 0
    assert waiting(db) == 0
    assert len(queue.receive(2)) == 2


def test_once_drains_several_batches(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    db.execute("select outbox.emit('order.created', '{}') from generate_series(1, 1000)")
    assert start_relay("--once", "--batch-size", "100").process.wait(20) == 0
    assert waiting(db) == 0
    assert len(queue.receive(1000)) == 1000


async def test_as_a_library(dsn: str, amqp_url: str, db: Db, queue: Queue) -> None:
    emit(db)
    await MessageRelay(dsn=dsn, amqp_url=amqp_url, once=True).run()
    assert waiting(db) == 0
    assert len(queue.receive(1)) == 1


def test_key_waits_behind_what_closed_the_channel(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    emit(db, key="a", payload={"n": 1})
    lost, _ = emit(db, key="a", exchange="no-such-exchange")
    behind, _ = emit(db, key="a", payload={"n": 2})
    emit(db, key="b", payload={"n": 3})
    assert start_relay("--once").process.wait(20) == 0
    assert {json.loads(message.body)["n"] for message in queue.receive(2)} == {1, 3}
    assert db.execute("select id, attempts from outbox.message order by id").fetchall() == [(lost, 1), (behind, 0)]


def test_no_permission_for_one_exchange(
    db: Db, broker_user: str, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    Queue(management, "other", exchange="other")
    may(management, broker_user, write="^outbox$")
    good = [emit(db)[1] for _ in range(20)]
    refused, _ = emit(db, exchange="other")
    good += [emit(db)[1] for _ in range(20)]
    assert start_relay("--once", amqp=broker_user).process.wait(20) == 0
    assert {message.properties["message_id"] for message in queue.receive(40)} == set(good)
    ((found, attempts, error),) = db.execute("select id, attempts, error from outbox.message").fetchall()
    assert (found, attempts) == (refused, 1)
    assert error.startswith("ACCESS_REFUSED")


def test_strict_keys_lets_nothing_overtake(db: Db, management: Management, start_relay: StartRelay) -> None:
    queue = Queue(management, binding="order.*")
    emit(db, key="a", payload={"n": 1})
    lost, _ = emit(db, "nobody.listens", key="a")
    behind, _ = emit(db, key="a", payload={"n": 2})
    for n in range(3, 6):
        emit(db, key="b", payload={"n": n})
    emit(db, payload={"n": 6})
    db.execute("select outbox.configure('strict_keys', 'on')")
    assert start_relay("--once").process.wait(20) == 0
    found = [json.loads(message.body)["n"] for message in queue.receive(5)]
    assert sorted(found) == [1, 3, 4, 5, 6]
    assert [n for n in found if 3 <= n <= 5] == [3, 4, 5]
    assert db.execute("select id, attempts from outbox.message order by id").fetchall() == [(lost, 1), (behind, 0)]


def test_stop_gives_back_what_is_not_confirmed(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay("--shutdown", "2", amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    _, message_id = emit(db)
    eventually(lambda: leased(db), "a claim")
    begun = time.monotonic()
    assert relay.stop() == 0
    assert 1 < time.monotonic() - begun < 5
    # At once, not after a lease of two minutes.
    assert not leased(db)
    assert start_relay("--once").process.wait(20) == 0
    assert {message.properties["message_id"] for message in queue.receive(1)} == {message_id}
    assert waiting(db) == 0


def test_stop_waits_for_confirms(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay(amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    emit(db)
    eventually(lambda: leased(db), "a claim")
    relay.process.send_signal(signal.SIGTERM)
    relay.await_log("stopping")
    proxy.held.clear()
    assert relay.process.wait(PATIENCE) == 0
    assert waiting(db) == 0
    assert len(queue.receive(1)) == 1


@pytest.mark.usefixtures("queue")
def test_second_signal_ends_it_at_once(db: Db, proxy: Proxy, start_relay: StartRelay) -> None:
    # After one signal it would wait for the confirm, for the 30 s of --shutdown: longer than stop() does.
    relay = start_relay(amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.held.set()
    emit(db)
    eventually(lambda: leased(db), "a claim")
    relay.process.send_signal(signal.SIGTERM)
    relay.await_log("stopping")
    assert relay.stop() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Store, "claim"), (Store, "listen"), (Store, "mark_sent"), (Store, "cleanup"), (Publisher, "publish")],
)
@pytest.mark.usefixtures("queue")
async def test_bug_in_any_task_ends_it(
    dsn: str, amqp_url: str, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("outbox.claimer.CLEANUP_EVERY", 0.1)
    monkeypatch.setattr(kind, name, broken)
    databases.query(dsn, "select outbox.emit('order.created', '{}')")
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(PATIENCE):
            await MessageRelay(dsn=dsn, amqp_url=amqp_url).run()


@pytest.mark.usefixtures("queue")
def test_bug_has_an_exit_status_of_its_own(
    dsn: str, amqp_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Store, "claim", broken)
    monkeypatch.setenv("OUTBOX_DSN", dsn)
    monkeypatch.setenv("OUTBOX_AMQP_URL", amqp_url)
    assert cli.main(["relay", "--once"]) == 3
    assert "outbox: internal error, please report it: ZeroDivisionError: a bug" in capsys.readouterr().err


HANGS = """
import sys, time
from outbox import cli
from outbox.store import Store

async def hang(*_, **__):
    time.sleep(1000)

Store.claim = hang
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("queue")
def test_relay_that_hangs_ends_itself(dsn: str, amqp_url: str) -> None:
    knobs = ["--lease", "3", "--confirm-timeout", "1", "--heartbeat", "1", "--send-timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-c", HANGS, "relay", *knobs],
        env=os.environ | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "outbox: internal error, please report it: nothing has moved for 6 s" in done.stderr
    assert "in hang" in done.stderr


def test_hostile_defaults_do_not_matter(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    hostile = {
        "default_transaction_read_only": "on", "default_transaction_isolation": "serializable", "lock_timeout": "1",
        "statement_timeout": "200", "datestyle": "German", "intervalstyle": "sql_standard", "bytea_output": "escape",
        "timezone": "Asia/Kathmandu", "idle_session_timeout": "100", "extra_float_digits": "-15",
    }  # fmt: skip
    emit(db, payload={"ä": "\\x00"}, expires_in="1 hour", headers=json.dumps({"a": 1}))
    for name, value in hostile.items():
        db.execute(f"alter database {db.info.dbname} set {name} = '{value}'")
    relay = start_relay()
    relay.await_log("relay ready")
    (message,) = queue.receive(1)
    assert json.loads(message.body) == {"ä": "\\x00"}
    assert abs(message.properties["timestamp"] - time.time()) < 600
    assert 3500_000 < int(message.properties["expiration"]) <= 3600_000
    time.sleep(0.5)  # idle for longer than they allow
    emit(db)
    queue.receive(1)
    assert relay.stop() == 0
    assert relay.log.count("server unavailable") == 0


@pytest.mark.parametrize("found", ["99.0", "0.0.9"])
def test_database_of_another_version(db: Db, start_relay: StartRelay, found: str) -> None:
    db.execute(f"create or replace function outbox.version() returns text language sql as $$ select '{found}' $$")
    relay = start_relay()
    assert relay.process.wait(PATIENCE) == 2
    ours = version("pg-outbox")
    says = f"outbox: the database has outbox {found}, this is {ours}: upgrade the older one, the database first"
    assert relay.log.splitlines()[-1] == says


def test_versions_that_fit() -> None:
    assert fits("1.2.0", "1.2.5")
    assert fits("1.3.0", "1.2.0")
    assert not fits("1.1.9", "1.2.0")
    assert not fits("2.0.0", "1.2.0")


@pytest.mark.usefixtures("queue")
def test_progress_line_on_a_terminal(dsn: str, db: Db, amqp_url: str) -> None:
    ours, theirs = pty.openpty()
    relay = subprocess.Popen(
        [sys.executable, "-m", "outbox", "relay"],
        stderr=theirs,
        env=os.environ | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
    )
    os.close(theirs)
    try:
        emit(db)
        seen = b""
        while b", 1 sent" not in seen:
            seen += os.read(ours, 4096)
        assert b" a second, " in seen
        assert b" in flight, " in seen
    finally:
        relay.terminate()
        relay.wait(PATIENCE)
        os.close(ours)
