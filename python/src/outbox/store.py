"""The only SQL of the relay: each statement calls one function of the schema outbox."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import args_row, scalar_row

from outbox.config import RelaySettings
from outbox.errors import (
    BY_CODE,
    PUT_ASIDE,
    ConfigurationError,
    DatabaseUnavailableError,
    NotInstalledError,
    OutboxError,
)
from outbox.options import UNREADABLE
from outbox.tls import database_tls

VERSION = "select outbox.version()"
RELAY_SETTINGS = "select outbox.relay_settings()"
HELLO = "select outbox.hello(name => %(name)s)"
CLAIM_BATCH = """
    select id, message_id::text, exchange, routing_key, key, body, content_type, headers, properties, expires_in,
           attempts, created_at
    from outbox.claim_batch(token => %(token)s, batch_size => %(batch_size)s, lease => %(lease)s,
                            max_bytes => %(max_bytes)s, relay => %(relay)s)
"""
MARK_SENT = "select outbox.mark_sent(token => %(token)s, ids => %(ids)s::bigint[])"
MARK_FAILED = """
    select outbox.mark_failed(token => %(token)s, ids => %(ids)s::bigint[], errors => %(errors)s::text[],
                              reasons => %(reasons)s::text[], retry_in => %(retry_in)s::interval[],
                              counts => %(counts)s, dead => %(dead)s)
"""
RELEASE_BATCH = "select outbox.release_batch(token => %(token)s)"
EXTEND_LEASE = "select outbox.extend_lease(token => %(token)s, lease => %(lease)s)"
ARM_WAKEUP = "select outbox.arm_wakeup()"
DISARM_WAKEUP = "select outbox.disarm_wakeup()"
NEXT_DUE = "select extract(epoch from outbox.next_due() - clock_timestamp())::double precision"
CLEANUP = "select (outbox.cleanup()).more"
DEAD_AMONG = "select jsonb_object_agg(id, reason) from outbox.dead_among(ids => %(ids)s::bigint[])"
# Apart: a database of 0.1.0 has no such columns, and puts nothing aside with a notice.
DEAD_MESSAGES = """
    select id, message_id::text, exchange, routing_key, key, body, content_type, headers, properties, expires_in,
           attempts, created_at, coalesce(error, ''), reason
    from outbox.dead_among(ids => %(ids)s::bigint[])
"""
STATS = """
    select to_jsonb(s) || jsonb_build_object(
        'at', extract(epoch from clock_timestamp()),
        'oldest_age', extract(epoch from s.oldest_age),
        'open_emitter', coalesce(extract(epoch from clock_timestamp() - s.oldest_emitter_at), 0)
    )
    from outbox.stats() as s
"""
NOTIFY = "select pg_notify(%(channel)s, '')"
# Marks need no sync of their own: a claim sees to those before it, and a lost one is only sent again.
SESSION = """
    select set_config('statement_timeout', %(timeout)s, false),
           set_config('synchronous_commit', 'off', false),
           set_config('lock_timeout', '0', false),
           set_config('idle_session_timeout', '0', false),
           set_config('client_min_messages', 'notice', false),
           set_config('default_transaction_read_only', 'off', false),
           set_config('default_transaction_isolation', 'read committed', false),
           set_config('array_nulls', 'on', false)
"""

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


class ClaimedMessage(NamedTuple):
    """One message to publish; the fields are those of the type outbox.claimed_message."""

    id: int
    message_id: str
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
    """The relay's database session. A call that fails drops it, the next one makes a new one."""

    def __init__(self, settings: RelaySettings, kind: str = "") -> None:
        self._settings = settings
        self._kind = kind  # before the name in hello(): "worker: " for what is no relay
        self._connection: Connection | None = None
        self._relay: int | None = None
        self._lock = asyncio.Lock()
        self.sessions = 0
        self.default_exchange, self.strict_keys = "", False
        # Whether a connection is a session of our own. A pooler's is not, and must not be given settings or locks.
        self.private = False
        self._replica_lacks_it = False
        # What claims have put aside; whoever claims takes it. It is kept when the answer to a claim is lost.
        self.put_aside: list[int] = []

    async def connect(self) -> bool:
        """Makes the first session; whatever only a person can put right shows here."""
        async with self._session():
            return True

    async def read_settings(self) -> None:
        """What all relays of this database agree on."""
        self._agree(await self._one(RELAY_SETTINGS))

    def _agree(self, settings: dict[str, Any]) -> None:
        self.default_exchange, self.strict_keys = settings["default_exchange"], settings["strict_keys"]

    async def claim(self, token: UUID, batch_size: int) -> list[ClaimedMessage]:
        """Leases the next messages to the token. They come in the order in which they are to be published."""
        async with (
            self._session() as connection,
            connection.cursor(binary=True, row_factory=args_row(ClaimedMessage)) as cursor,
        ):
            arguments = {
                "token": token,
                "batch_size": batch_size,
                "lease": timedelta(seconds=self._settings.lease),
                "max_bytes": self._settings.max_bytes,
                "relay": self._relay,
            }
            await cursor.execute(CLAIM_BATCH, arguments)
            if self._replica_lacks_it:
                raise DatabaseUnavailableError("a claim did not reach the synchronous replica: its wait was cancelled")
            return await cursor.fetchall()

    async def mark_sent(self, token: UUID, ids: Sequence[int]) -> int:
        """Returns how many were settled: fewer than given means that the lease was lost."""
        return int(await self._one(MARK_SENT, token=token, ids=array(ids)))

    async def mark_failed(
        self,
        token: UUID,
        ids: Sequence[int],
        errors: Sequence[str],
        reasons: Sequence[str | None],
        *,
        counts: bool,
        retry_in: timedelta | None = None,
        dead: bool = False,
    ) -> int:
        """What a failure leads to (back-off, dead letter) is decided by the database, unless it is told."""
        lists = {"errors": list(errors), "reasons": list(reasons)}
        told = {"counts": counts, "dead": dead, "retry_in": None if retry_in is None else [retry_in] * len(ids)}
        return int(await self._one(MARK_FAILED, token=token, ids=array(ids), **told, **lists))

    async def release(self, token: UUID) -> int:
        """Gives back what the token still holds; no attempt is counted."""
        return int(await self._one(RELEASE_BATCH, token=token))

    async def extend(self, token: UUID) -> bool:
        """Holds a claim for another lease. False: nothing is held under this token any more."""
        return bool(await self._one(EXTEND_LEASE, token=token, lease=timedelta(seconds=self._settings.lease)))

    async def arm_wakeup(self) -> bool:
        """Asks for a notification of the next emit. False: one is on its way now, so look again soon instead."""
        return bool(await self._one(ARM_WAKEUP))

    async def disarm_wakeup(self) -> None:
        await self._one(DISARM_WAKEUP)

    async def next_due(self) -> float | None:
        """Seconds until there is something to do that nobody will announce."""
        seconds: float | None = await self._one(NEXT_DUE)
        return seconds

    async def cleanup(self) -> bool:
        """Returns whether there is more to remove."""
        return bool(await self._one(CLEANUP))

    async def dead_among(self, ids: Sequence[int]) -> dict[int, str]:
        """Which of them are dead letters, and why."""
        found = await self._one(DEAD_AMONG, ids=array(ids))
        return {int(id_): reason for id_, reason in (found or {}).items()}

    async def dead_messages(self, ids: Sequence[int]) -> list[tuple[ClaimedMessage, str, str]]:
        """Those of them that have just died, each with error and reason."""
        async with self._session() as connection, connection.cursor(binary=True) as cursor:
            await cursor.execute(DEAD_MESSAGES, {"ids": array(ids)})
            return [(ClaimedMessage(*row[:-2]), *row[-2:]) for row in await cursor.fetchall()]

    async def stats(self) -> dict[str, Any]:
        """The state of the outbox, and the database's clock."""
        return dict(await self._one(STATS))

    async def ring(self) -> None:
        """Wakes the relays that sleep: they may have relied on this one."""
        await self._one(NOTIFY, channel="outbox")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()

    async def listen(self, ready: Callable[[], None], heard: Callable[[], None]) -> None:
        """Calls heard() at each announcement of new messages, on a connection of its own; ends by an error."""
        connection = await self._connect()
        try:
            await self._test_listening(connection)
            async with self._talk(connection):
                await connection.execute("set idle_session_timeout = 0")
                await connection.execute("listen outbox")
            async with self._lock:
                if not self.private:
                    self.private = True
                    await self.close()  # the next session is made as one of our own
            ready()
            while True:
                async with translated(connection):
                    async for _ in connection.notifies(timeout=LISTEN_CHECK):
                        heard()
                async with self._talk(connection):  # a silent peer may be a dead one
                    await connection.execute("select")
        finally:
            with suppress(psycopg.Error):
                await connection.close()

    async def _test_listening(self, connection: Connection) -> None:
        """Behind a pooler that shares sessions, LISTEN succeeds and nothing ever arrives."""
        channel = f"outbox_{secrets.token_hex(8)}"
        async with self._talk(connection):
            await connection.execute(f"listen {channel}".encode())
        # By the other connection: a shared session would hear itself.
        await self._one(NOTIFY, channel=channel)
        async with translated(connection):
            async for _ in connection.notifies(timeout=LISTEN_TEST, stop_after=1):
                break
            else:
                raise PooledError("notifications do not arrive: a pooler is in between, or the server is very slow")
        async with self._talk(connection):
            await connection.execute(f"unlisten {channel}".encode())

    async def _one(self, statement: LiteralString, **arguments: Any) -> Any:
        async with self._session() as connection, connection.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(statement, arguments)
            return await cursor.fetchone()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Connection]:
        """The session, to one caller at a time. Whatever goes wrong in it ends it."""
        async with self._lock:
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                    await self._introduce(self._connection)
                    self.sessions += 1
                async with self._talk(self._connection):
                    yield self._connection
            except BaseException:
                await self.close()
                raise
            finally:
                self._replica_lacks_it = False

    async def _connect(self) -> Connection:
        async with translated(None):
            # No prepared statements yet: they do not survive a pooler that shares sessions.
            connection = await psycopg.AsyncConnection.connect(
                self._settings.dsn, autocommit=True, prepare_threshold=None, **connection_settings(self._settings.dsn)
            )
        connection.add_notice_handler(self._on_notice)
        return connection

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.sqlstate == PUT_ASIDE:
            self.put_aside += map(int, str(notice.message_detail).strip("{}").split(","))
        # Cancelling a commit that waits for a synchronous replica lets it succeed, with a warning without a code.
        if notice.source_function == "SyncRepWaitForLSN":
            self._replica_lacks_it = True

    async def _introduce(self, connection: Connection) -> None:
        async with self._talk(connection), connection.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(VERSION)
            found, ours = str(await cursor.fetchone()), version("pg-outbox")
            if not fits(found, ours):
                raise ConfigurationError(
                    f"the database has outbox {found}, this is {ours}: upgrade the older one, the database first"
                )
            await cursor.execute(RELAY_SETTINGS)
            self._agree(await cursor.fetchone() or {})
            self._relay = None
            if self.private:
                await cursor.execute(SESSION, {"timeout": str(int(self._settings.statement_timeout * 1000))})
                await cursor.execute(HELLO, {"name": f"{self._kind}{socket.gethostname()} {os.getpid()}"})
                self._relay = await cursor.fetchone()
                # To plan a claim anew costs a tenth of it. Not through a pooler, where statements belong to nobody.
                connection.prepare_threshold = 0

    @asynccontextmanager
    async def _talk(self, connection: Connection) -> AsyncIterator[None]:
        """Cuts a connection on which nothing comes: to cancel the call would take the driver ten more seconds."""
        loop, limit = asyncio.get_running_loop(), self._settings.statement_timeout
        timer = loop.call_later(limit + min(limit, ANSWER_MARGIN), cut, connection.fileno())
        try:
            async with translated(connection):
                yield
        except DatabaseUnavailableError as error:
            if timer.when() > loop.time():
                raise
            raise DatabaseUnavailableError("the database did not answer in time") from error
        finally:
            timer.cancel()


def fits(database: str, ours: str) -> bool:
    """Within a major version everything that was callable stays so: a database may be ahead, never behind."""
    theirs, own = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (database, ours))
    return theirs[:1] == own[:1] and theirs >= own


def connection_settings(dsn: str) -> dict[str, Any]:
    return NETWORK | database_tls(dsn)


class PooledError(DatabaseUnavailableError):
    """The connection is not a session of our own."""


@asynccontextmanager
async def translated(connection: Connection | None) -> AsyncIterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, connection) from None


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


def array(ids: Sequence[int]) -> str:
    """As the driver would write it, in a third of the time."""
    return "{" + ",".join(map(str, ids)) + "}"


def one_line(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
