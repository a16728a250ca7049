"""For the tests of applications: what was emitted, read in the transaction of the connection under test.

The connection needs the right to read outbox.message (and to delete from it, for drain()): the owner has it.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from outbox.body import encode, plain
from outbox.connections import Statement, run

ANYTHING: Any = object()

# One value, so that it can be read through every kind of connection.
_LIST = """
select coalesce(jsonb_agg(to_jsonb(m) || jsonb_build_object('body', encode(m.body, 'base64')) order by m.id),
    '[]')::text
from m
"""
_WAITING = Statement("with m as (select * from outbox.message)" + _LIST, ())  # noqa: S608 - constants
_DRAINED = Statement("with m as (delete from outbox.message returning *)" + _LIST, ())  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A message that waits to be sent."""

    id: int
    message_id: UUID
    routing_key: str
    exchange: str | None
    key: str | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    content_type: str
    body: bytes
    eta: datetime | None
    expires_at: datetime | None
    dedup_key: str | None

    @property
    def payload(self) -> Any:
        """The body read as JSON, if that is what it is."""
        return json.loads(self.body) if self.content_type.partition(";")[0].endswith("json") else self.body

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Emitted:
        return cls(
            id=row["id"],
            message_id=UUID(row["message_id"]),
            routing_key=row["routing_key"],
            exchange=row["exchange"],
            key=row["key"],
            headers=row["headers"] or {},
            properties=row["properties"] or {},
            content_type=row["content_type"],
            body=b64decode(row["body"]),
            eta=_time(row["due_at"]),
            expires_at=_time(row["expires_at"]),
            dedup_key=row["dedup_key"],
        )


def _time(text: str | None) -> datetime | None:
    return None if text in {None, "infinity"} else datetime.fromisoformat(str(text))


class Outbox:
    """What was emitted. With an async connection every method is awaited."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def messages(self) -> Any:
        """All that waits, as a list of Emitted in the order of emission."""
        return self._read(_WAITING, lambda found: found)

    def drain(self) -> Any:
        """The same, delayed messages included, and settles them as if they had been sent."""
        return self._read(_DRAINED, lambda found: found)

    def assert_emitted(
        self,
        routing_key: str,
        payload: Any = ANYTHING,
        *,
        headers: Mapping[str, Any] | None = None,
        key: str | None = ANYTHING,
        count: int | None = None,
    ) -> Any:
        """At least one message matches (or exactly count do); returns the first of them.

        In payload and headers, an object matches one that has more fields, a compiled pattern a string; everything
        else must be equal.
        """
        __tracebackhide__ = True

        def check(found: list[Emitted]) -> Emitted | None:
            __tracebackhide__ = True
            wanted = Wanted(routing_key, payload, headers, key)
            matching = [message for message in found if not list(wanted.differences(message))]
            if len(matching) == count or (matching and count is None):
                return matching[0] if matching else None
            number = "no message" if not matching else f"{len(matching)} messages"
            asked = "" if count is None else f", not {count}"
            raise AssertionError("\n".join([f"{number} like that emitted{asked}: {wanted}", *wanted.explain(found)]))

        return self._read(_WAITING, check)

    def assert_nothing_emitted(self) -> Any:
        __tracebackhide__ = True

        def check(found: list[Emitted]) -> None:
            __tracebackhide__ = True
            if found:
                lines = [f"{len(found)} emitted, expected none:", *(f"  {describe(message)}" for message in found)]
                raise AssertionError("\n".join(lines))

        return self._read(_WAITING, check)

    def _read(self, statement: Statement, then: Callable[[list[Emitted]], Any]) -> Any:
        __tracebackhide__ = True

        def parse(text: str) -> Any:
            __tracebackhide__ = True
            return then([Emitted.from_row(row) for row in json.loads(text)])

        return run(self.connection, statement, parse)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What assert_emitted() looks for."""

    routing_key: str
    payload: Any
    headers: Mapping[str, Any] | None
    key: str | None

    def __str__(self) -> str:
        parts = [repr(self.routing_key)]
        if self.payload is not ANYTHING:
            parts.append(f"payload {self.payload!r}")
        if self.headers is not None:
            parts.append(f"headers {self.headers!r}")
        if self.key is not ANYTHING:
            parts.append(f"key {self.key!r}")
        return ", ".join(parts)

    def differences(self, message: Emitted) -> Iterator[str]:
        if message.routing_key != self.routing_key:
            yield "another routing key"
            return
        if self.payload is not ANYTHING:
            yield from differences(self.payload, message.payload, "payload")
        if self.headers is not None:
            yield from differences(dict(self.headers), message.headers, "headers")
        if self.key is not ANYTHING:
            yield from differences(self.key, message.key, "key")

    def explain(self, found: list[Emitted]) -> Iterator[str]:
        if not found:
            yield "nothing was emitted"
        for message in found:
            yield f"  {describe(message)}"
            yield from (f"      {difference}" for difference in self.differences(message))


def describe(message: Emitted) -> str:
    key = f", key {message.key!r}" if message.key is not None else ""
    return f"{message.id}: {message.routing_key!r}{key}, {message.payload!r}"


def differences(expected: Any, actual: Any, path: str) -> Iterator[str]:
    """Where and how a value does not match; nothing if it does."""
    if isinstance(expected, re.Pattern):
        if not (isinstance(actual, str) and expected.search(actual)):
            yield f"{path}: expected to match {expected.pattern!r}, emitted {actual!r}"
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for name, value in expected.items():
            if name in actual:
                yield from differences(value, actual[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: expected {value!r}, missing"
    elif isinstance(expected, list | tuple) and isinstance(actual, list) and len(expected) == len(actual):
        for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif expected != actual and _as_sent(expected) != actual:
        yield f"{path}: expected {expected!r}, emitted {actual!r}"


def _as_sent(expected: Any) -> Any:
    """A model, a datetime and the like are compared with what they become."""
    try:
        plain(expected)
    except TypeError:
        return expected
    return json.loads(encode(expected)[0])
