"""A transaction on a connection that the application's factory makes, of whatever kind: for listeners with once=True.

The factory returns what `with` or `async with` takes, or a coroutine for it: psycopg.AsyncConnection.connect(dsn),
a pool's connection(), an SQLAlchemy session, engine.begin(). The transaction commits at the end of the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from inspect import isawaitable
from typing import Any, TypeAlias

from outbox.connections import Statement, run
from outbox.errors import ConfigurationError

Connect: TypeAlias = Callable[[], Any]


class ConnectError(ConfigurationError):
    """What the factory returns cannot be used."""


def is_async(made: Any) -> bool:
    return isawaitable(made) or hasattr(made, "__aenter__")


@asynccontextmanager
async def begin_async(connect: Connect) -> AsyncIterator[Any]:
    made = connect()
    if not is_async(made):
        _close(made)
        raise ConnectError("connect returns a connection for functions that are not async, the listener is async")
    if not hasattr(made, "__aenter__"):
        made = await made
    async with _entered(made) as connection, _transaction(connection):
        yield connection


@contextmanager
def begin(connect: Connect) -> Iterator[Any]:
    made = connect()
    if is_async(made):
        _close(made)
        raise ConnectError("connect returns a connection for async functions, the listener is not async")
    with made if hasattr(made, "__enter__") else nullcontext(made) as connection, _transaction(connection):
        yield connection


def _close(made: Any) -> None:
    close = getattr(made, "close", None)  # a coroutine that nobody awaits would complain
    if close is not None and not hasattr(made, "__aenter__"):
        close()


@asynccontextmanager
async def _entered(made: Any) -> AsyncIterator[Any]:
    if hasattr(made, "__aenter__"):
        async with made as connection:
            yield connection
        return
    try:  # asyncpg's has no block of its own
        yield made
    finally:
        await made.close()


def _transaction(connection: Any) -> Any:
    """Of psycopg and asyncpg: transaction(); of SQLAlchemy: begin(), unless engine.begin() has begun one."""
    if hasattr(connection, "transaction"):
        return connection.transaction()
    if not hasattr(connection, "in_transaction"):
        raise ConnectError(
            "connect must return a connection or session of psycopg, SQLAlchemy or asyncpg,"
            f" not {type(connection).__module__}.{type(connection).__qualname__}"
        )
    return _Begun() if connection.in_transaction() else connection.begin()


class _Begun(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """Whoever began it ends it."""

    def __exit__(self, *_: object) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        return None


def accept(connection: Any, consumer: str, message_id: str) -> Any:
    """Whether this is the first time; a coroutine for that on an async connection."""
    return run(connection, Statement("select outbox.accept(%s::text, %s::text::uuid)", (consumer, message_id)), bool)
