"""What surrounds a listener: the chain of messages, the trace, metrics and the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import prometheus_client
import psycopg
import pytest
from opentelemetry import propagate, trace
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from harness import Db, waiting
from outbox import Reject, emit, get_tracking_ids, listen

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_the_chain_is_restored_and_continued(broker: Broker, dsn: str, db: Db, queue_type: str) -> None:
    chain = [str(uuid4()) for _ in range(3)]
    seen: list[Any] = []

    @listen("a", queue="async", once=True)
    async def handle(_body: Any, tracking_ids: Any, tx: Any) -> None:
        seen.append((tracking_ids, get_tracking_ids()))
        await emit(tx, "next", {})

    @listen("a", queue="sync")
    def in_thread(_body: Any) -> None:
        seen.append((get_tracking_ids(), get_tracking_ids()))

    async with running(
        worker_on(
            broker, handle, in_thread, connect=lambda: psycopg.AsyncConnection.connect(dsn), queue_type=queue_type
        )
    ):
        await broker.publish("a", headers={"x-outbox-tracking-ids": chain}, message_id=chain[-1])
        await eventually(lambda: len(seen) == 2, "both listeners")
    assert seen == [(tuple(chain), tuple(chain))] * 2
    assert get_tracking_ids() == ()
    row = db.execute("select headers -> 'x-outbox-tracking-ids', message_id::text from outbox.message").fetchone()
    assert row is not None
    assert row[0] == [*chain, row[1]]


@pytest.mark.parametrize("header", [None, "no list", ["no uuid"], []])
async def test_without_a_chain_the_message_begins_one(broker: Broker, header: Any) -> None:
    seen: list[Any] = []

    @listen("a", queue="q")
    async def handle(_body: Any, tracking_ids: Any) -> None:
        seen.append(tracking_ids)

    async with running(worker_on(broker, handle)):
        identity = await broker.publish("a", headers={"x-outbox-tracking-ids": header})
        await eventually(lambda: seen, "a message")
    assert seen == [(identity,)]


async def test_the_trace_is_restored(broker: Broker, dsn: str, db: Db, queue_type: str) -> None:
    seen: list[str] = []

    @listen("a", queue="q", once=True)
    async def handle(_body: Any, tx: Any) -> None:
        seen.append(format(trace.get_current_span().get_span_context().trace_id, "032x"))
        await emit(tx, "next", {})

    assert propagate is not None
    async with running(
        worker_on(broker, handle, connect=lambda: psycopg.AsyncConnection.connect(dsn), queue_type=queue_type)
    ):
        await broker.publish("a", headers={"traceparent": TRACE})
        await eventually(lambda: seen, "a message")
    assert seen == [TRACE.split("-")[1]]
    row = db.execute("select headers ->> 'traceparent' from outbox.message").fetchone()
    assert row is not None
    assert row[0].split("-")[1] == TRACE.split("-")[1]
    assert not trace.get_current_span().get_span_context().is_valid


SENTRY = """
import asyncio, os, psycopg, sentry_sdk
from outbox import Worker, emit, listen

sentry_sdk.init(traces_sample_rate=1.0, default_integrations=False)
DSN = os.environ["OUTBOX_DSN"]

@listen("a", queue="task", once=True)
async def handle(body: str, tx):
    await asyncio.sleep(0.2)  # all of them are under way at once
    await emit(tx, f"task.{body}", {})

@listen("a", queue="thread")
def in_thread(body: str):
    with psycopg.connect(DSN) as connection:
        emit(connection, f"thread.{body}", {})

worker = Worker(
    os.environ["OUTBOX_AMQP_URL"],
    listeners=[handle, in_thread],
    connect=lambda: psycopg.AsyncConnection.connect(DSN),
    queue_type=os.environ["QUEUE_TYPE"],
)
"""


async def test_the_trace_of_sentry_is_restored(  # noqa: PLR0917 - fixtures
    broker: Broker, dsn: str, db: Db, start: StartProcess, tmp_path: Path, queue_type: str
) -> None:
    """In a process of its own: Sentry belongs to a whole one."""
    (tmp_path / "app.py").write_text(SENTRY)
    environment = {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": broker.url, "QUEUE_TYPE": queue_type}
    await start("worker", "app:worker", **environment).await_log("worker ready")
    traces = {"one": uuid4().hex, "two": uuid4().hex}
    for name, trace_id in traces.items():
        headers = {"sentry-trace": f"{trace_id}-{'b' * 16}-1", "baggage": f"sentry-trace_id={trace_id},tenant=north"}
        await broker.publish("a", name, headers=headers)
    await broker.publish("a", "none")
    await eventually(lambda: waiting(db) == 6, "what the listeners emit")
    rows = db.execute("select routing_key, headers ->> 'sentry-trace', headers ->> 'baggage' from outbox.message")
    found = {key: (trace.split("-")[0], baggage) for key, trace, baggage in rows}
    for place in ("task", "thread"):
        for name, trace_id in traces.items():
            assert found[f"{place}.{name}"][0] == trace_id
            assert f"sentry-trace_id={trace_id}" in found[f"{place}.{name}"][1]
        assert found[f"{place}.none"][0] not in traces.values()


async def test_metrics(broker: Broker, monkeypatch: pytest.MonkeyPatch, queue_type: str) -> None:
    monkeypatch.setattr("outbox.source_amqp.CHECK_EVERY", 0.05)
    queue = f"metrics.{queue_type}"  # one registry for the whole process

    @listen("a", queue=queue, retry_delays=(0.05,))
    async def handle(body: int, attempt_count: int) -> None:
        if body == 1 and attempt_count == 1:
            raise ValueError
        if body == 2:
            raise Reject

    def value(name: str, **labels: str) -> float | None:
        return prometheus_client.REGISTRY.get_sample_value(name, {"queue": queue, **labels})

    exchange = {"exchange_name": "measured"}
    async with running(worker_on(broker, handle, exchange_name="measured", queue_type=queue_type)):
        assert value("outbox_active_consumers", **exchange) == 1
        for number in range(3):
            await broker.publish("a", number, exchange="measured")
        await eventually(
            lambda: value("outbox_messages_processed_total", **exchange, status="success") == 2, "successes"
        )
        await eventually(lambda: value("outbox_dlq_messages") == 1, "the count of dead letters")
    assert value("outbox_messages_received_total", **exchange) == 4
    assert value("outbox_messages_processed_total", **exchange, status="failed") == 1
    assert value("outbox_messages_processed_total", **exchange, status="rejected") == 1
    assert value("outbox_retry_attempts_total", delay_seconds="0.05") == 1
    assert value("outbox_message_processing_duration_seconds_count", **exchange) == 4
    assert value("outbox_active_consumers", **exchange) == 0


async def test_metrics_can_be_left_off(broker: Broker) -> None:
    seen: list[int] = []

    @listen("a", queue="unmeasured")
    async def handle(body: int) -> None:
        seen.append(body)

    async with running(worker_on(broker, handle, enable_metrics=False)):
        await broker.publish("a", 1)
        await eventually(lambda: seen, "a message")
    labels = {"queue": "unmeasured", "exchange_name": "outbox"}
    assert prometheus_client.REGISTRY.get_sample_value("outbox_messages_received_total", labels) is None


async def test_no_library_logs_a_body(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """Received, tried again and dead, in a program that logs everything."""
    caplog.set_level(logging.DEBUG)

    @listen("a", queue="q", retry_delays=(0.05,))
    async def handle(_body: Any) -> None:
        raise ValueError

    async with running(worker_on(broker, handle)):
        await broker.publish("a", {"secret": "canary in the body"}, headers={"h": "canary in a header"})
        await broker.filled("q.dlq")
    assert "DEBUG" in {record.levelname for record in caplog.records}
    assert "dead letter" in caplog.messages
    assert "canary" not in caplog.text


async def test_the_log_has_constant_messages_and_fields(
    broker: Broker, caplog: pytest.LogCaptureFixture, queue_type: str
) -> None:
    caplog.set_level(logging.INFO, "outbox")

    @listen("a.*", queue="q", retry_delays=(0.05,))
    async def handle(_body: Any) -> None:
        raise ValueError("secret")

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        identity = await broker.publish("a.b", 1)
        await broker.dead("q")
    found = {record.message: vars(record) for record in caplog.records if record.name.startswith("outbox")}
    assert list(found) == ["worker ready", "listener failed, trying again", "dead letter", "stopping"]
    wanted = {"queue": "q", "message_id": identity, "routing_key": "a.b", "error": "ValueError"}
    for message, more in {
        "listener failed, trying again": {"action": "retry", "attempt": 1, "delay": 0.05},
        "dead letter": {"action": "dead", "attempt": 2, "reason": "max_attempts"},
    }.items():
        assert {name: found[message][name] for name in wanted | more} == wanted | more
    assert "secret" not in caplog.text
