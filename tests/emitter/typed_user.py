"""An application that uses the package, for the type checkers: what is right is accepted, what is wrong is not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import asyncpg
import psycopg
from sqlalchemy import Connection
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outbox import (
    Emitter,
    MessageRelay,
    OutboxMessage,
    RefusedError,
    emit,
    emit_many,
    get_tracking_ids,
    install_sql,
    tracking,
)
from outbox.testing import Emitted, Outbox

MESSAGES = [OutboxMessage("order.created", {"order": 1}, key="k"), OutboxMessage("order.paid", b"", eta=5000)]


def of_psycopg(connection: psycopg.Connection[Any], cursor: psycopg.Cursor[tuple[int, str]]) -> None:
    assert_type(emit(connection, "order.created", {"order": 1}), int)
    assert_type(emit(cursor, "order.created", [1, 2]), int)
    assert_type(emit_many(connection, MESSAGES), list[int])
    assert_type(emit_many(cursor, (message for message in MESSAGES)), list[int])


async def of_psycopg_async(
    connection: psycopg.AsyncConnection[dict[str, Any]], cursor: psycopg.AsyncCursor[tuple[int]]
) -> None:
    assert_type(await emit(connection, "order.created", {"order": 1}), int)
    assert_type(await emit(cursor, "order.created", {"order": 1}), int)
    assert_type(await emit_many(connection, MESSAGES), list[int])


def of_sqlalchemy(session: Session, connection: Connection) -> None:
    assert_type(emit(session, "order.created", {"order": 1}), int)
    assert_type(emit(connection, "order.created", {"order": 1}), int)
    assert_type(emit_many(session, MESSAGES), list[int])


async def of_sqlalchemy_async(session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await emit(session, "order.created", {"order": 1}), int)
    assert_type(await emit(connection, "order.created", {"order": 1}), int)
    assert_type(await emit_many(connection, MESSAGES), list[int])


async def of_asyncpg(connection: asyncpg.Connection) -> None:
    made: int = await emit(connection, "order.created", {"order": 1})
    many: list[int] = await emit_many(connection, MESSAGES)
    print(made, many)


def count(message: OutboxMessage, made: int) -> None:
    print(message.routing_key, made)


def arguments(connection: psycopg.Connection[Any]) -> None:
    emitter = Emitter(exchange="shop", expiration=timedelta(hours=1), created=count)
    try:
        emitter.emit(
            connection,
            "order.created",
            None,
            key="customer 7",
            headers={"tenant": "north", "n": 1},
            exchange="other",
            eta=datetime.now(UTC),
            expiration=1.5,
            dedup_key="order 1",
            message_id=UUID(int=1),
            properties={"priority": 1},
            content_type="application/json",
        )
    except RefusedError as error:
        print(error.code, error.message, error.hint)
    with tracking() as chain:
        assert_type(chain, tuple[str, ...])
        assert_type(get_tracking_ids(), tuple[str, ...])
    assert_type(install_sql("0.1.0"), str)


def helpers(outbox: Outbox) -> None:
    message: Emitted = outbox.assert_emitted("order.created", {"order": 1}, key="k")
    print(message.payload)


async def relay() -> None:
    await MessageRelay(dsn="postgresql://", amqp_url="amqp://").run()


def wrong(connection: psycopg.Connection[Any], engine: Engine) -> None:
    emit(connection, 1, {})  # type: ignore[call-overload]
    emit(connection, "a", {}, eta="tomorrow")  # type: ignore[call-overload]
    emit(connection, "a", {}, priority=1)  # type: ignore[call-overload]
    emit_many(connection, [{"routing_key": "a"}])  # type: ignore[list-item]
    emit(engine, "a", {})  # type: ignore[call-overload]
    OutboxMessage("a", {}, "key")  # type: ignore[call-arg]
