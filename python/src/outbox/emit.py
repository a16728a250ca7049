"""Emitting: one statement, built here, that joins the transaction open on the caller's connection.

Sync connection: it happens now. Async connection: what is returned is awaited. Nothing here begins, flushes or commits.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict, Unpack, overload
from uuid import UUID

from outbox.connections import AsyncConnection, Statement, SyncConnection, run
from outbox.message import Eta, Expiration, OutboxMessage, arguments, refuse
from outbox.tracking import get_tracking_ids, log_headers, trace_headers

# The arguments of emit_bytes() and their types. As text wherever possible: every driver sends that alike.
_TYPES = {
    "routing_key": "text",
    "body": "bytea",
    "content_type": "text",
    "key": "text",
    "headers": "text::jsonb",
    "exchange": "text",
    "eta": "text::timestamptz",
    "delay": "text::interval",
    "expires_in": "text::interval",
    "dedup_key": "text",
    "message_id": "text::uuid",
    "properties": "text::jsonb",
}
_ONE = f"outbox.emit_bytes({', '.join(f'{name} => %s::{kind}' for name, kind in _TYPES.items())})"
_MANY = "outbox.emit_many(%s::text::jsonb)"
# The chain is set for this call only: later statements of the transaction find what was set before.
_TRACKED = """
with was as materialized (
    select coalesce(current_setting('outbox.tracking', true), '') as chain
), made as materialized (
    select case when set_config('outbox.tracking', %s::text, true) is not null then {call} end as made from was
)
select case when set_config('outbox.tracking', was.chain, true) is not null then made.made end from made, was
"""


_PLAIN = {"routing_key", "content_type"}
_object = json.JSONEncoder(ensure_ascii=False).encode


@lru_cache
def _plain(routing_key: str, content_type: str) -> str:
    return _object({"routing_key": routing_key, "content_type": content_type})


class Options(TypedDict, total=False):
    """The arguments of emit() that have names."""

    key: str | None
    headers: Mapping[str, Any] | None
    exchange: str | None
    eta: Eta | None
    expiration: Expiration | None
    dedup_key: str | None
    message_id: UUID | str | None
    properties: Mapping[str, Any] | None
    content_type: str | None


@dataclass(frozen=True, kw_only=True)
class Emitter:
    """emit() and emit_many() with defaults.

    created is called for each message once its row is written, with the message and its id; the transaction may still
    roll back. log_context sends structlog's context variables along, as header log_context.
    """

    exchange: str | None = None
    expiration: Expiration | None = None
    created: Callable[[OutboxMessage, int], object] | None = None
    log_context: bool = False

    @overload
    def emit(
        self, conn: AsyncConnection, routing_key: str, body: Any, **options: Unpack[Options]
    ) -> Coroutine[Any, Any, int]: ...

    @overload
    def emit(self, conn: SyncConnection, routing_key: str, body: Any, **options: Unpack[Options]) -> int: ...

    def emit(
        self,
        conn: AsyncConnection | SyncConnection,
        routing_key: str,
        body: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        exchange: str | None = None,
        eta: Eta | None = None,
        expiration: Expiration | None = None,
        dedup_key: str | None = None,
        message_id: UUID | str | None = None,
        properties: Mapping[str, Any] | None = None,
        content_type: str | None = None,
    ) -> int | Coroutine[Any, Any, int]:
        """Writes a message in the transaction open on conn and returns its id; it leaves when that commits.

        eta: a datetime with time zone, or a timedelta or milliseconds from now. expiration: a timedelta or seconds.
        """
        message = OutboxMessage(
            routing_key,
            body,
            key=key,
            headers=headers,
            exchange=exchange,
            eta=eta,
            expiration=expiration,
            dedup_key=dedup_key,
            message_id=message_id,
            properties=properties,
            content_type=content_type,
        )
        given = arguments(message, self._context(), self._defaults())
        for name in ("headers", "properties"):
            if name in given:
                given[name] = _object(given[name])
        call = _call(_ONE, *(given.get(name) for name in _TYPES))
        return run(conn, call, lambda made: self._report([message], [int(made)])[0])

    @overload
    def emit_many(self, conn: AsyncConnection, messages: Iterable[OutboxMessage]) -> Coroutine[Any, Any, list[int]]: ...

    @overload
    def emit_many(self, conn: SyncConnection, messages: Iterable[OutboxMessage]) -> list[int]: ...

    def emit_many(
        self, conn: AsyncConnection | SyncConnection, messages: Iterable[OutboxMessage]
    ) -> list[int] | Coroutine[Any, Any, list[int]]:
        """Writes all messages in one statement and returns their ids in the same order."""
        if messages is None:
            refuse("OB001", "messages must not be null", "Pass a list of OutboxMessage.")
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            refuse("OB006", "messages must be an array", "Pass a list of OutboxMessage.")
        listed, context, defaults = list(messages), self._context(), self._defaults()
        rows = []
        for number, message in enumerate(listed):
            if not isinstance(message, OutboxMessage):
                refuse("OB006", f"messages[{number}] is not a message", "Each is an OutboxMessage.")
            row = arguments(message, context, defaults, f"messages[{number}].")
            # Written by hand: base64 needs no escaping, and most messages have the same two fields beside it.
            content = b64encode(row.pop("body")).decode()
            others = _plain(**row) if row.keys() == _PLAIN else _object(row)
            rows.append(f'{{"body":"{content}",{others[1:]}')
        call = _call(_MANY, f"[{','.join(rows)}]")
        return run(conn, call, lambda made: self._report(listed, [int(one) for one in made]))

    def _context(self) -> dict[str, Any]:
        return trace_headers() | (log_headers() if self.log_context else {})

    def _defaults(self) -> dict[str, Any]:
        defaults = {"exchange": self.exchange, "expiration": self.expiration}
        return {name: value for name, value in defaults.items() if value is not None}

    def _report(self, messages: list[OutboxMessage], ids: list[int]) -> list[int]:
        if self.created is not None:
            for message, made in zip(messages, ids, strict=True):
                self.created(message, made)
        return ids


def _call(function: str, *values: Any) -> Statement:
    chain = get_tracking_ids()
    if not chain:
        return Statement(f"select {function}", values)
    return Statement(_TRACKED.format(call=function), (",".join(chain), *values))


_default = Emitter()
emit = _default.emit
emit_many = _default.emit_many
