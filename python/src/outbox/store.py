"""The only SQL of the relay: each statement calls one function of the schema outbox."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, LiteralString, Self
from uuid import UUID

import psycopg
from psycopg.rows import class_row, scalar_row

from outbox.config import RelaySettings
from outbox.errors import BY_CODE, ConfigurationError, DatabaseUnavailableError, NotInstalledError

VERSION = "select outbox.version()"
HELLO = "select outbox.hello(name => %(name)s)"
CLAIM_BATCH = """
    select id, message_id, exchange, routing_key, key, body, content_type, headers, properties, expires_in,
           attempts, created_at
    from outbox.claim_batch(token => %(token)s, batch_size => %(batch_size)s, lease => %(lease)s,
                            max_bytes => %(max_bytes)s, relay => %(relay)s)
"""
MARK_SENT = "select outbox.mark_sent(token => %(token)s, ids => %(ids)s::bigint[])"
MARK_FAILED = """
    select outbox.mark_failed(token => %(token)s, ids => %(ids)s::bigint[], errors => %(errors)s::text[],
                              reasons => %(reasons)s::text[])
"""
RELEASE_BATCH = "select outbox.release_batch(token => %(token)s)"
ARM_WAKEUP = "select outbox.arm_wakeup()"
DISARM_WAKEUP = "select outbox.disarm_wakeup()"
CLEANUP = "select outbox.cleanup()"
LISTEN = "listen outbox"
# Ends a statement shortly before the lease does: after that it would work on messages that are no longer ours.
SESSION = """
    select set_config('statement_timeout', %(timeout)s, false),
           set_config('default_transaction_isolation', 'read committed', false)
"""

# A peer that vanished without a word is noticed within 15 s.
NETWORK: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15000,
    "fallback_application_name": "outbox relay",
}

INSTALL_HINT = "run `create extension outbox` there, or `psql -f outbox-install.sql`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedMessage:
    """One message to publish; the fields are those of the type outbox.claimed_message."""

    id: int
    message_id: UUID
    exchange: str
    routing_key: str
    key: str | None
    body: bytes
    content_type: str
    headers: dict[str, Any] | None
    properties: dict[str, Any] | None
    expires_in: timedelta | None
    attempts: int
    created_at: datetime


class Store:
    """One database session of the relay: `async with Store(settings) as store`."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._connection: psycopg.AsyncConnection[Any]
        self._relay: int

    async def __aenter__(self) -> Self:
        async with self._translated():
            # No prepared statements: they do not survive a pooler that shares sessions.
            self._connection = await psycopg.AsyncConnection.connect(
                self._settings.dsn, autocommit=True, prepare_threshold=None, **NETWORK
            )
        try:
            await self._one(VERSION)
            await self._one(SESSION, timeout=str(int(self._settings.lease * 900)))
            async with self._translated():
                await self._connection.execute(LISTEN)
            self._relay = await self._one(HELLO, name=f"{socket.gethostname()} {os.getpid()}")
        except BaseException:
            await self._connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    async def claim(self, token: UUID) -> list[ClaimedMessage]:
        """Leases the next messages to the token. They come in the order in which they are to be published."""
        arguments = {
            "token": token,
            "batch_size": self._settings.batch_size,
            "lease": timedelta(seconds=self._settings.lease),
            "max_bytes": self._settings.max_bytes,
            "relay": self._relay,
        }
        async with (
            self._translated(),
            self._connection.cursor(binary=True, row_factory=class_row(ClaimedMessage)) as cursor,
        ):
            await cursor.execute(CLAIM_BATCH, arguments)
            return await cursor.fetchall()

    async def mark_sent(self, token: UUID, ids: Sequence[int]) -> int:
        """Returns how many were settled: fewer than given means that the lease was lost."""
        return int(await self._one(MARK_SENT, token=token, ids=list(ids)))

    async def mark_failed(
        self, token: UUID, ids: Sequence[int], errors: Sequence[str], reasons: Sequence[str | None]
    ) -> int:
        """What a failure leads to (back-off, dead letter) is decided by the database."""
        return int(await self._one(MARK_FAILED, token=token, ids=list(ids), errors=list(errors), reasons=list(reasons)))

    async def release(self, token: UUID) -> int:
        """Gives back what the token still holds; no attempt is counted."""
        return int(await self._one(RELEASE_BATCH, token=token))

    async def arm_wakeup(self) -> bool:
        """Asks for a notification of the next emit. False: one is on its way now, so look again soon instead."""
        return bool(await self._one(ARM_WAKEUP))

    async def disarm_wakeup(self) -> None:
        await self._one(DISARM_WAKEUP)

    async def cleanup(self) -> None:
        await self._one(CLEANUP)

    async def wait(self, timeout: float) -> None:  # noqa: ASYNC109 - the driver measures it and keeps the connection
        """Returns when the database says that messages came in, or after the time-out."""
        async with self._translated():
            async for _ in self._connection.notifies(timeout=timeout, stop_after=1):
                pass

    async def _one(self, statement: LiteralString, **arguments: Any) -> Any:
        async with self._translated(), self._connection.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(statement, arguments)
            return await cursor.fetchone()

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        try:
            yield
        except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction) as error:
            raise NotInstalledError(
                f"database {self._connection.info.dbname!r} does not have the package outbox: {INSTALL_HINT}"
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"role {self._connection.info.user!r} may not relay: {one_line(error)};"
                " the owner of the package can grant it what the section Rights of the README lists"
            ) from error
        except psycopg.ProgrammingError as error:
            if error.sqlstate is None:  # raised by the driver: the DSN cannot be read
                raise ConfigurationError(f"--dsn cannot be read: {one_line(error)}") from error
            raise DatabaseUnavailableError(one_line(error)) from error
        except psycopg.Error as error:
            if error.sqlstate in BY_CODE:
                hint = f" ({error.diag.message_hint})" if error.diag.message_hint else ""
                raise BY_CODE[error.sqlstate](one_line(error) + hint) from error
            raise DatabaseUnavailableError(one_line(error)) from error


def one_line(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
