"""One small adapter for each kind of connection: runs one statement, in whatever transaction is open there.

An adapter returns the one value that the statement returns, or a coroutine for it.
Drivers are looked up among the modules that are loaded, never imported: a connection has brought its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import iscoroutine
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from outbox.errors import BY_CODE, RefusedError

T = TypeVar("T")


class AsyncConnection(Protocol):
    """psycopg's AsyncConnection, AsyncCursor; SQLAlchemy's AsyncSession, AsyncConnection; asyncpg's Connection."""

    def execute(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]: ...


class _Rows(Protocol):
    def fetchone(self) -> Any: ...


class _Executes(Protocol):
    """psycopg's Connection, Cursor; SQLAlchemy's Session, Connection."""

    def execute(self, *args: Any, **kwargs: Any) -> _Rows: ...


class _Django(Protocol):
    """Django's connection."""

    @property
    def vendor(self) -> str: ...

    def cursor(self, *args: Any, **kwargs: Any) -> Any: ...


SyncConnection: TypeAlias = _Executes | _Django


class Statement(NamedTuple):
    """SQL with %s where a value goes, and the values."""

    sql: str
    values: tuple[Any, ...]

    @property
    def numbered(self) -> str:
        return _numbered(self.sql)


@cache
def _numbered(sql: str) -> str:
    """The same with $1, $2, ..."""
    numbers = count(1)
    return "".join(f"{part}${next(numbers)}" for part in sql.split("%s")[:-1]) + sql.rpartition("%s")[2]


def run(connection: Any, statement: Statement, then: Callable[[Any], T]) -> T | Coroutine[Any, Any, T]:
    """What then() makes of the statement's value, or a coroutine for it if the connection is asynchronous."""
    with _refusals():
        value = _adapter(connection)(connection, statement)
    if not iscoroutine(value):
        return then(value)

    async def finish() -> T:
        with _refusals():
            found = await value
        return then(found)

    return finish()


@contextmanager
def _refusals() -> Iterator[None]:
    """What the database package refuses is raised like what Python refuses; the driver's own error is the cause."""
    try:
        yield
    except Exception as error:
        if refused := _refused(error):
            raise refused from error
        raise


def _refused(error: BaseException | None) -> RefusedError | None:
    while error is not None:
        kind = BY_CODE.get(getattr(error, "sqlstate", None) or "")
        diag = getattr(error, "diag", None)  # psycopg's; asyncpg has the words in the error itself
        if kind is not None and diag is not None:
            return kind(diag.message_primary, diag.message_hint or "")
        if kind is not None and hasattr(error, "hint"):
            return kind(str(getattr(error, "message", error)), getattr(error, "hint", None) or "")
        error = getattr(error, "orig", None) or error.__cause__  # SQLAlchemy and Django wrap the driver's errors
    return None


def _adapter(connection: Any) -> Callable[[Any, Statement], Any]:
    kind = type(connection)
    for base in kind.__mro__:
        name = f"{base.__module__.partition('.')[0]}.{base.__name__}"
        if name in _ADAPTERS:
            return _ADAPTERS[name]
    raise TypeError(
        "outbox needs the connection or session whose transaction the message is to join"
        f" (of psycopg, SQLAlchemy, Django or asyncpg), not {kind.__module__}.{kind.__qualname__}"
    )


def _psycopg(connection: Any, statement: Statement) -> Any:
    psycopg = sys.modules["psycopg"]
    # A plain cursor: the connection may be set up to return other rows or to take other placeholders.
    with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        return cursor.execute(*statement).fetchone()[0]


async def _psycopg_async(connection: Any, statement: Statement) -> Any:
    psycopg = sys.modules["psycopg"]
    async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        await cursor.execute(*statement)
        return (await cursor.fetchone())[0]


def _cursor(cursor: Any, statement: Statement) -> Any:
    # Not the cursor itself: the application may still be reading from it.
    return _adapter(cursor.connection)(cursor.connection, statement)


def _sqlalchemy(connection: Any, statement: Statement) -> Any:
    sql = statement.numbered if connection.dialect.paramstyle == "numeric_dollar" else statement.sql
    return connection.exec_driver_sql(sql, statement.values).scalar_one()


def _session(session: Any, statement: Statement) -> Any:
    # session.execute() may flush; this does not.
    return _sqlalchemy(session.connection(), statement)


async def _sqlalchemy_async(connection: Any, statement: Statement) -> Any:
    return await connection.run_sync(_sqlalchemy, statement)


async def _session_async(session: Any, statement: Statement) -> Any:
    return await session.run_sync(_session, statement)


def _scoped(session: Any, statement: Statement) -> Any:
    current = session.registry()
    return _adapter(current)(current, statement)


def _django(connection: Any, statement: Statement) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(*statement)
        return cursor.fetchone()[0]


async def _asyncpg(connection: Any, statement: Statement) -> Any:
    return await connection.fetchval(statement.numbered, *statement.values)


_ADAPTERS: dict[str, Callable[[Any, Statement], Any]] = {
    "psycopg.Connection": _psycopg,
    "psycopg.Cursor": _cursor,
    "psycopg.AsyncConnection": _psycopg_async,
    "psycopg.AsyncCursor": _cursor,
    "sqlalchemy.Connection": _sqlalchemy,
    "sqlalchemy.Session": _session,
    "sqlalchemy.scoped_session": _scoped,
    "sqlalchemy.AsyncConnection": _sqlalchemy_async,
    "sqlalchemy.AsyncSession": _session_async,
    "sqlalchemy.async_scoped_session": _scoped,
    "django.BaseDatabaseWrapper": _django,
    "django.ConnectionProxy": _django,
    "asyncpg.Connection": _asyncpg,
    "asyncpg.PoolConnectionProxy": _asyncpg,
}
