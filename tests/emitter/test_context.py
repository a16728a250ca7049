"""What travels with a message without being passed: the chain of ids, the trace, the context of the log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import structlog
from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from emitter.kinds import Waiting
from outbox import Emitter, OutboxMessage, emit, emit_many, get_tracking_ids, tracking

TRACKING = "x-outbox-tracking-ids"
Db = psycopg.Connection[Any]


def test_chain_through_handlers(db: Db, waiting: Waiting) -> None:
    """An entry point emits; whoever handles that emits in turn, and so on: each message lists those before it."""
    assert get_tracking_ids() == ()
    with tracking() as entry:
        assert get_tracking_ids() == entry
        emit(db, "user.created", 1)
    (first,) = waiting()
    with tracking(first.headers[TRACKING]):
        emit(db, "user.welcomed", 1)
        emit(db, "user.announced", 1)
    _, *rest = waiting()
    assert [message.headers[TRACKING] for message in rest] == [
        [*entry, str(first.message_id), str(message.message_id)] for message in rest
    ]
    assert get_tracking_ids() == ()


def test_blocks_nest_and_end_with_an_error() -> None:
    with tracking() as outer:
        with suppress(RuntimeError), tracking() as inner:
            assert inner[:-1] == outer
            raise RuntimeError
        assert get_tracking_ids() == outer
        with tracking([]):
            assert get_tracking_ids() == ()
    with pytest.raises(ValueError, match="hexadecimal"), tracking(["no uuid"]):
        pass


async def test_tasks_keep_their_own_chain() -> None:
    async def handler() -> tuple[str, ...]:
        with tracking():
            await asyncio.sleep(0)
            return get_tracking_ids()

    one, other = await asyncio.gather(handler(), handler())
    assert len(one) == len(other) == 1
    assert one != other


def test_a_long_chain_keeps_the_newest(db: Db, waiting: Waiting) -> None:
    ids = [str(uuid4()) for _ in range(150)]
    with tracking(ids):
        emit(db, "a", 1)
    (message,) = waiting()
    assert message.headers[TRACKING] == [*ids[-99:], str(message.message_id)]


def test_a_chain_set_in_sql_is_given_back(db: Db, waiting: Waiting) -> None:
    """Triggers may emit too: what the transaction had set holds for them, before and after."""
    mine = str(uuid4())
    with db.transaction():
        db.execute("select set_config('outbox.tracking', %s, true)", [mine])
        with tracking() as chain:
            emit(db, "python", 1)
        db.execute("select outbox.emit('sql', '1')")
    python, sql = waiting()
    assert python.headers[TRACKING] == [*chain, str(python.message_id)]
    assert sql.headers[TRACKING] == [mine, str(sql.message_id)]


SPAN = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1))
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_opentelemetry(db: Db, waiting: Waiting) -> None:
    emit(db, "before", 1)
    token = context.attach(baggage.set_baggage("tenant", "north", trace.set_span_in_context(NonRecordingSpan(SPAN))))
    try:
        emit(db, "single", 1, headers={"own": 1})
        emit_many(db, [OutboxMessage("many", 1), OutboxMessage("explicit", 1, headers={"traceparent": "mine"})])
    finally:
        context.detach(token)
    before, single, many, explicit = waiting()
    assert before.headers == {}
    assert single.headers == {"traceparent": TRACEPARENT, "baggage": "tenant=north", "own": 1}
    assert many.headers == {"traceparent": TRACEPARENT, "baggage": "tenant=north"}
    assert explicit.headers == {"traceparent": "mine", "baggage": "tenant=north"}


SENTRY = """
import os, psycopg, sentry_sdk
from outbox import emit
sentry_sdk.init(traces_sample_rate=1.0, default_integrations=False)
with psycopg.connect(os.environ["DSN"]) as db, sentry_sdk.start_transaction(name="order") as transaction:
    emit(db, "a", 1)
    print(transaction.trace_id, transaction.span_id)
"""


def test_sentry(dsn: str, waiting: Waiting) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENTRY], env=os.environ | {"DSN": dsn}, capture_output=True, text=True, check=True
    )
    trace_id, span_id = done.stdout.split()
    (message,) = waiting()
    assert message.headers["sentry-trace"] == f"{trace_id}-{span_id}-1"
    assert message.headers["traceparent"] == f"00-{trace_id}-{span_id}-01"
    assert f"sentry-trace_id={trace_id}" in message.headers["baggage"]


def test_structlog_only_if_asked(db: Db, waiting: Waiting) -> None:
    request = uuid4()
    with structlog.contextvars.bound_contextvars(request_id=request, attempt=2):
        emit(db, "plain", 1)
        Emitter(log_context=True).emit(db, "logged", 1)
    Emitter(log_context=True).emit(db, "no context", 1)
    plain, logged, without = waiting()
    assert plain.headers == without.headers == {}
    assert logged.headers == {"log_context": {"request_id": str(request), "attempt": 2}}


def test_defaults_of_an_emitter(db: Db, waiting: Waiting) -> None:
    emitter = Emitter(exchange="shop", expiration=60)
    emitter.emit(db, "a", 1)
    emitter.emit_many(db, [OutboxMessage("b", 1), OutboxMessage("c", 1, exchange="other", expiration=1)])
    seconds = db.execute("select extract(epoch from expires_at - created_at)::int from outbox.message order by id")
    assert [message.exchange for message in waiting()] == ["shop", "shop", "other"]
    assert [count for (count,) in seconds] == [60, 60, 1]
