"""The only SQL of the relay: each statement calls one function of the schema outbox."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import scalar_row, tuple_row

from outbox.config import RelaySettings
from outbox.errors import PUT_ASIDE, ConfigurationError
from outbox.session import NOTIFY, Connection, Session

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


def claimed_row(_cursor: object) -> Callable[[Sequence[Any]], ClaimedMessage]:
    """As args_row(ClaimedMessage) would, without two calls in Python for each row."""
    return partial(tuple.__new__, ClaimedMessage)


class Store(Session):
    """What the relay asks of the database."""

    def __init__(self, settings: RelaySettings, kind: str = "") -> None:
        super().__init__(settings.dsn, settings.statement_timeout)
        self._settings = settings
        self._kind = kind  # before the name in hello(): "worker: " for what is no relay
        self._relay: int | None = None
        self.default_exchange, self.strict_keys = "", False
        # What claims have put aside; whoever claims takes it. It is kept when the answer to a claim is lost.
        self.put_aside: list[int] = []

    async def read_settings(self) -> None:
        """What all relays of this database agree on."""
        self._agree(await self._one(RELAY_SETTINGS))

    def _agree(self, settings: dict[str, Any]) -> None:
        self.default_exchange, self.strict_keys = settings["default_exchange"], settings["strict_keys"]

    async def claim(self, token: UUID, batch_size: int) -> list[ClaimedMessage]:
        """Leases the next messages to the token. They come in the order in which they are to be published."""
        arguments = {
            "token": token,
            "batch_size": batch_size,
            "lease": timedelta(seconds=self._settings.lease),
            "max_bytes": self._settings.max_bytes,
            "relay": self._relay,
        }
        return await self._fetch(CLAIM_BATCH, arguments, claimed_row)

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
        rows = await self._fetch(DEAD_MESSAGES, {"ids": array(ids)}, tuple_row)
        return [(ClaimedMessage(*row[:-2]), *row[-2:]) for row in rows]

    async def stats(self) -> dict[str, Any]:
        """The state of the outbox, and the database's clock."""
        return dict(await self._one(STATS))

    async def ring(self) -> None:
        """Wakes the relays that sleep: they may have relied on this one."""
        await self._one(NOTIFY, channel="outbox")

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        super()._on_notice(notice)
        if notice.sqlstate == PUT_ASIDE:
            self.put_aside += map(int, str(notice.message_detail).strip("{}").split(","))

    async def _introduce(self, connection: Connection) -> None:
        async with connection.cursor(row_factory=scalar_row) as cursor:
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


def fits(database: str, ours: str) -> bool:
    """Within a major version everything that was callable stays so: a database may be ahead, never behind."""
    theirs, own = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (database, ours))
    return theirs[:1] == own[:1] and theirs >= own


def array(ids: Sequence[int]) -> str:
    """As the driver would write it, in an eighth of the time."""
    return "{" + str(list(ids))[1:-1] + "}"
