"""The relay's connections to its database: made, timed, made anew; and what the driver's errors mean."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
from psycopg.rows import AsyncRowFactory, scalar_row

from outbox.errors import BY_CODE, ConfigurationError, DatabaseUnavailableError, NotInstalledError, OutboxError
from outbox.options import UNREADABLE
from outbox.tls import database_tls

NOTIFY = "select pg_notify(%(channel)s, '')"
# A peer that vanished without a word is noticed within 15 s.
NETWORK: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15000,
    "fallback_application_name": "outbox relay",
    # Headers are UTF-8, whatever is set for the role.
    "client_encoding": "utf8",
}
# What the network may add to the time that the server allows a statement.
ANSWER_MARGIN = 5.0
LISTEN_TEST = 2.0
LISTEN_CHECK = 30.0

INSTALL_HINT = "run `create extension outbox` there, or `psql -f outbox-install.sql`"

Connection = psycopg.AsyncConnection[Any]


class Session:
    """One session, for one statement at a time. A statement that fails ends it, the next one makes a new one."""

    def __init__(self, dsn: str, statement_timeout: float) -> None:
        self._dsn, self._statement_timeout = dsn, statement_timeout
        self._connection: Connection | None = None
        # Kept as long as the session: to make one costs a fifth of what the driver does for a statement.
        self._cursors: dict[Any, psycopg.AsyncCursor[Any]] = {}
        self._lock = asyncio.Lock()
        self._replica_lacks_it = False
        self.sessions = 0
        # Whether a connection is a session of our own. A pooler's is not, and must not be given settings or locks.
        self.private = False

    async def _introduce(self, connection: Connection) -> None:
        """What comes first in each session."""

    async def connect(self) -> bool:
        """Makes the first session; whatever only a person can put right shows here."""
        async with self._lock:
            if self._connection is None:
                await self._open()
        return True

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        self._cursors.clear()
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()

    async def listen(self, ready: Callable[[], None], heard: Callable[[], None]) -> None:
        """Calls heard() at each announcement of new messages, on a connection of its own; ends by an error."""
        connection = await self._connect()
        try:
            await self._test_listening(connection)
            with self._answering(connection):
                await connection.execute("set idle_session_timeout = 0")
                await connection.execute("listen outbox")
            async with self._lock:
                if not self.private:
                    self.private = True
                    await self.close()  # the next session is made as one of our own
            ready()
            while True:
                with translated(connection):
                    async for _ in connection.notifies(timeout=LISTEN_CHECK):
                        heard()
                with self._answering(connection):  # a silent peer may be a dead one
                    await connection.execute("select")
        finally:
            with suppress(psycopg.Error):
                await connection.close()

    async def _test_listening(self, connection: Connection) -> None:
        """Behind a pooler that shares sessions, LISTEN succeeds and nothing ever arrives."""
        channel = f"outbox_{secrets.token_hex(8)}"
        with self._answering(connection):
            await connection.execute(f"listen {channel}".encode())
        # By the other connection: a shared session would hear itself.
        await self._one(NOTIFY, channel=channel)
        with translated(connection):
            async for _ in connection.notifies(timeout=LISTEN_TEST, stop_after=1):
                break
            else:
                raise PooledError("notifications do not arrive: a pooler is in between, or the server is very slow")
        with self._answering(connection):
            await connection.execute(f"unlisten {channel}".encode())

    async def _one(self, statement: LiteralString, **arguments: Any) -> Any:
        """The first value of the first row."""
        rows = await self._fetch(statement, arguments, scalar_row)
        return rows[0] if rows else None

    async def _fetch(
        self, statement: LiteralString, arguments: Mapping[str, Any], factory: AsyncRowFactory[Any]
    ) -> list[Any]:
        async with self._lock:
            try:
                connection = self._connection or await self._open()
                cursor = self._cursors.get(factory)
                if cursor is None:
                    cursor = self._cursors[factory] = connection.cursor(binary=True, row_factory=factory)
                self._replica_lacks_it = False
                with self._answering(connection):
                    await cursor.execute(statement, arguments)
                    self._check_replica()
                    return await cursor.fetchall()
            except BaseException:
                await self.close()
                raise

    async def _open(self) -> Connection:
        self._connection = await self._connect()
        try:
            with self._answering(self._connection):
                await self._introduce(self._connection)
        except BaseException:
            await self.close()
            raise
        self.sessions += 1
        return self._connection

    async def _connect(self) -> Connection:
        with translated(None):
            # No prepared statements yet: they do not survive a pooler that shares sessions.
            connection = await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, prepare_threshold=None, **connection_settings(self._dsn)
            )
        connection.add_notice_handler(self._on_notice)
        return connection

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Cancelling a commit that waits for a synchronous replica lets it succeed, with a warning without a code.
        if notice.source_function == "SyncRepWaitForLSN":
            self._replica_lacks_it = True

    def _check_replica(self) -> None:
        if self._replica_lacks_it:
            raise DatabaseUnavailableError("the synchronous replica lacks it: its wait was cancelled")

    def _answering(self, connection: Connection) -> translated:
        return translated(connection, self._statement_timeout + min(self._statement_timeout, ANSWER_MARGIN))


class PooledError(DatabaseUnavailableError):
    """The connection is not a session of our own."""


class translated:  # noqa: N801 - used like a function
    """Around calls of the driver: its errors become ours.

    With a limit it cuts a connection on which nothing comes: to cancel the call would take the driver ten more seconds.
    """

    __slots__ = ("_connection", "_late", "_limit", "_timer")

    def __init__(self, connection: Connection | None, limit: float = 0.0) -> None:
        self._connection, self._limit, self._late = connection, limit, False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._connection is not None and self._limit:
            self._timer = asyncio.get_running_loop().call_later(self._limit, self._cut, self._connection.fileno())

    def _cut(self, descriptor: int) -> None:
        self._late = True  # no clock tells: by that of uvloop one timer in seven fires before its time
        cut(descriptor)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, psycopg.Error):
            found = translate(error, self._connection)
            if self._late and isinstance(found, DatabaseUnavailableError):
                found = DatabaseUnavailableError("the database did not answer in time")
            raise found from None


def connection_settings(dsn: str) -> dict[str, Any]:
    return NETWORK | database_tls(dsn)


def translate(
    error: psycopg.Error, connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any] | None, part: str = "relay"
) -> OutboxError:
    """What an error of the driver means; part is what the role needs, a function grant_...() of the package."""
    text, missing = one_line(error), (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction)
    if isinstance(error, missing):
        name = connection.info.dbname if connection else ""
        return NotInstalledError(f"database {name!r} does not have the package outbox: {INSTALL_HINT}")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        user = connection.info.user if connection else ""
        return ConfigurationError(
            f"role {user!r} may not do this: {text}; the owner of the package can"
            f" allow it with `select outbox.grant_{part}('{user}')`"
        )
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return DatabaseUnavailableError(
            f"{text}: a replica? Name the primary, or all hosts with target_session_attrs=read-write"
        )
    if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        # Raised by the driver, about the DSN. What it says quotes parts of it, and the password may be one.
        return ConfigurationError(f"--dsn cannot be read: {UNREADABLE['dsn']}")
    if error.sqlstate in BY_CODE:
        return BY_CODE[error.sqlstate](text, error.diag.message_hint or "")
    return DatabaseUnavailableError(text)


def cut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as link, suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def one_line(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
