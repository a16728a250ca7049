"""The relay as a process, on real servers: what reaches the queue, what is left in the table."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID

import psycopg
import pytest

from harness import Management, Proxy, Queue, StartRelay, eventually
from outbox import MessageRelay

Db = psycopg.Connection[Any]


def emit(db: Db, routing_key: str = "order.created", payload: object = None, **more: object) -> tuple[int, str]:
    """Returns the message's id and message_id."""
    names = "".join(f", {name} => %({name})s" for name in more)
    row = db.execute(
        f"select outbox.emit(%(routing_key)s, %(payload)s::jsonb{names})",
        {"routing_key": routing_key, "payload": json.dumps(payload or {}), **more},
    ).fetchone()
    assert row is not None
    found = db.execute("select message_id from outbox.message where id = %s", [row[0]]).fetchone()
    assert found is not None
    return row[0], str(found[0])


def waiting(db: Db) -> int:
    row = db.execute("select count(*) from outbox.message").fetchone()
    assert row is not None
    return int(row[0])


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
    relay = start_relay("--once")
    assert relay.process.wait(20) == 0
    assert len(queue.receive(1)) == 1
    row = db.execute("select id, attempts, error from outbox.message").fetchone()
    assert row == (lost, 1, "no queue is bound for this routing key")
    assert "sent=1 failed=1" in relay.log


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


# The second lease is far longer than the test waits: another relay must notice that its holder is gone.
@pytest.mark.parametrize("lease", ["3", "120"])
def test_killed_relay_leaves_nothing_behind(
    db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay, lease: str
) -> None:
    settings = ("--lease", lease, "--confirm-timeout", "2.5")
    relay = start_relay(*settings, amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.deaf.set()
    _, message_id = emit(db)
    (first,) = queue.receive(1)
    # Published, not confirmed: the relay cannot have marked it.
    os.kill(relay.process.pid, signal.SIGKILL)
    relay.process.wait()
    assert waiting(db) == 1

    second = start_relay(*settings)
    (again,) = queue.receive(1)
    assert first.properties["message_id"] == again.properties["message_id"] == message_id
    eventually(lambda: waiting(db) == 0, "an empty table")
    assert second.stop() == 0


def test_unconfirmed_message_is_sent_again(db: Db, queue: Queue, proxy: Proxy, start_relay: StartRelay) -> None:
    relay = start_relay("--confirm-timeout", "0.5", amqp=proxy.url)
    relay.await_log("relay ready")
    proxy.deaf.set()
    _, message_id = emit(db)
    relay.await_log("released=1")
    assert db.execute("select attempts from outbox.message").fetchall() == [(0,)]
    proxy.deaf.clear()
    received = queue.receive(2)
    assert {message.properties["message_id"] for message in received} == {message_id}
    eventually(lambda: waiting(db) == 0, "an empty table")
    row = db.execute("select count(*) from outbox.dead_letter").fetchone()
    assert row == (0,)
    assert relay.stop() == 0


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


def test_signal_ends_it_while_a_server_is_away(start_relay: StartRelay) -> None:
    relay = start_relay(amqp="amqp://127.0.0.1:1/")
    relay.await_log("server unavailable")
    assert relay.stop() == 0


def test_once_drains_several_batches(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    db.execute("select outbox.emit('order.created', '{}') from generate_series(1, 1000)")
    assert start_relay("--once", "--batch-size", "100").process.wait(20) == 0
    assert waiting(db) == 0
    assert len(queue.receive(1000)) == 1000


def test_woken_by_notification(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay("--poll", "60")
    relay.await_log("relay ready")
    for _ in range(3):
        emit(db)
        queue.receive(1)
    assert relay.stop() == 0


def test_polling_needs_no_notification(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay("--poll", "0.2")
    relay.await_log("relay ready")
    db.execute("set session_replication_role = replica")  # no trigger fires
    emit(db)
    queue.receive(1)
    assert relay.stop() == 0


def test_lost_database_session_is_made_again(db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    ended = db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'outbox relay' and datname = current_database()"
    ).fetchall()
    assert ended == [(True,)]
    emit(db)
    queue.receive(1)
    relay.await_log("relay ready", times=2)
    assert "DatabaseUnavailableError" in relay.log
    assert relay.stop() == 0


def test_lost_broker_connection_is_made_again(
    db: Db, management: Management, queue: Queue, start_relay: StartRelay
) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    (connection,) = eventually(lambda: management("GET", "/vhosts/{vhost}/connections"), "the relay's connection")
    management("DELETE", f"/connections/{quote(connection['name'], safe='')}")
    relay.await_log("relay ready", times=2)
    emit(db)
    queue.receive(1)
    assert "BrokerUnavailableError" in relay.log
    assert relay.stop() == 0


async def test_as_a_library(dsn: str, amqp_url: str, db: Db, queue: Queue) -> None:
    emit(db)
    await MessageRelay(dsn=dsn, amqp_url=amqp_url, once=True).run()
    assert waiting(db) == 0
    assert len(queue.receive(1)) == 1
