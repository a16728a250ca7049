"""A message as the application gives it, and as outbox.emit_bytes() and outbox.emit_many() take it.

What cannot be sent is refused here, before the network, with the code and the words of the checks in SQL
(_check_message() and what it calls), in their order. Only the server knows max_body_bytes and its own clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Never, TypeAlias
from uuid import UUID

from outbox import body
from outbox.errors import BY_CODE

Eta: TypeAlias = datetime | timedelta | int
Expiration: TypeAlias = timedelta | float

MOST_BODY_BYTES = 15 * 1024 * 1024  # what max_body_bytes can be set to
MOST_HEADER_BYTES = 32 * 1024
HEADER_NAME, SHORT_STRING = 128, 255  # bytes, AMQP's limits
TEN_YEARS = timedelta(days=3600)  # PostgreSQL compares intervals by months of 30 days
TEN_YEARS_AT_MOST = timedelta(days=3653)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
RESERVED = re.compile(r"CC|BCC|x-death|x-delivery-count|x-acquired-count|x-first-death-.*|x-outbox-.*", re.DOTALL)
INT64 = range(-(2**63), 2**63)
LENGTH_HINTS = {
    "routing_key": "Shorten it; bytes count, not characters.",
    "content_type": "Pass a MIME type such as 'application/json'.",
    "exchange": "Name an exchange, or leave it null for the setting default_exchange.",
    "key": "Shorten it, or leave it null for no order.",
    "dedup_key": "Shorten it, for instance to a hash.",
}


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """One message for emit_many(); the fields are the arguments of emit()."""

    routing_key: str
    body: Any
    _: KW_ONLY
    key: str | None = None
    headers: Mapping[str, Any] | None = None
    exchange: str | None = None
    eta: Eta | None = None
    expiration: Expiration | None = None
    dedup_key: str | None = None
    message_id: UUID | str | None = None
    properties: Mapping[str, Any] | None = None
    content_type: str | None = None


def refuse(code: str, message: str, hint: str) -> Never:
    raise BY_CODE[code](message, hint)


def arguments(
    message: OutboxMessage, context: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """The arguments of emit_bytes() that are not null. Times are text, headers and properties objects, body bytes.

    context (headers) and defaults are for what the message leaves open; prefix is how errors call the message.
    """
    if message.routing_key is None:
        refuse("OB001", f"{prefix}routing_key must not be null", "Pass a routing key such as 'order.placed'.")
    content, content_type = body.encode(message.body, f"{prefix}body")
    found = _text(prefix, "routing_key", message.routing_key)
    found |= _text(prefix, "content_type", content_type if message.content_type is None else message.content_type)
    found["body"] = content
    if len(content) > MOST_BODY_BYTES:
        refuse(
            "OB004",
            f"{prefix}body is larger than max_body_bytes",
            "Send a reference instead, or raise the limit (at most 15 MiB):"
            " select outbox.configure('max_body_bytes', ...).",
        )
    if not defaults and not context and _given(message) == _NOTHING:  # most messages: nothing else to look at
        return found
    for name, check in _OPTIONAL.items():
        value = getattr(message, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            found |= check(prefix, name, value)
    if context or message.headers is not None:
        found |= _headers(prefix, message.headers, context)
    if message.properties is not None:
        found |= _properties(prefix, message.properties)
    return found


def _text(prefix: str, name: str, value: str) -> dict[str, Any]:
    if not isinstance(value, str):
        raise TypeError(f"{prefix}{name} must be a str, not {type(value).__qualname__}")
    if type(value) is str and 0 < len(value) <= SHORT_STRING and value.isascii() and "\0" not in value:
        return {name: value}
    size = _bytes(value)
    if size is None:
        raise ValueError(f"{prefix}{name} must not hold a NUL or half of a surrogate pair")
    if not 1 <= size <= SHORT_STRING:
        refuse("OB002", f"{prefix}{name} must have 1 to 255 bytes", LENGTH_HINTS[name])
    # A plain string also of an Enum: drivers send those by their names.
    return {name: str.__str__(value)}


def _due(prefix: str, _: str, eta: Eta) -> dict[str, Any]:
    """A point in time is the argument eta, a duration is delay: then the database's clock counts."""
    if isinstance(eta, datetime):
        if eta.utcoffset() is None:
            hint = "Pass for instance datetime.now(UTC) + timedelta(hours=1)."
            refuse("OB005", f"{prefix}eta must have a time zone", hint)
        if eta > datetime.now(UTC) + TEN_YEARS_AT_MOST:
            refuse("OB005", f"{prefix}eta and delay must lie within 10 years", "Pass an earlier time.")
        return {"eta": max(eta, LONG_AGO).astimezone(UTC).isoformat()}
    if isinstance(eta, int) and not isinstance(eta, bool):
        # Kept within what a timedelta can hold.
        eta = timedelta(milliseconds=max(-1, min(eta, 10**12)))
    if not isinstance(eta, timedelta):
        raise TypeError(f"{prefix}eta must be a datetime, a timedelta or milliseconds, not {type(eta).__qualname__}")
    if eta < timedelta(0):
        refuse("OB005", f"{prefix}delay must not be negative", "Leave it null to send at once.")
    if eta > TEN_YEARS:
        refuse("OB005", f"{prefix}eta and delay must lie within 10 years", "Pass an earlier time.")
    return {"delay": _interval(eta)}


def _expires_in(prefix: str, _: str, expiration: Expiration) -> dict[str, Any]:
    if isinstance(expiration, int | float) and not isinstance(expiration, bool):
        # Kept within what a timedelta can hold; NaN becomes -1 like everything that is not positive.
        expiration = timedelta(seconds=min(expiration, 10**9) if expiration > 0 else -1)
    if not isinstance(expiration, timedelta):
        raise TypeError(f"{prefix}expiration must be a timedelta or seconds, not {type(expiration).__qualname__}")
    if not timedelta(0) < expiration <= TEN_YEARS:
        refuse(
            "OB005",
            f"{prefix}expires_in must be positive and at most 10 years",
            "Leave it null to keep the message until it is sent.",
        )
    return {"expires_in": _interval(expiration)}


def _interval(duration: timedelta) -> str:
    return f"{duration.days * 86400 + duration.seconds}.{duration.microseconds:06} s"


def _uuid(prefix: str, name: str, value: UUID | str) -> dict[str, Any]:
    try:
        return {name: str(UUID(str(value)))}
    except ValueError:
        raise ValueError(f"{prefix}{name} must be a UUID") from None


_OPTIONAL: dict[str, Callable[[str, str, Any], dict[str, Any]]] = {
    "exchange": _text,
    "key": _text,
    "dedup_key": _text,
    "eta": _due,
    "expiration": _expires_in,
    "message_id": _uuid,
}
_given = attrgetter(*_OPTIONAL, "headers", "properties")
_NOTHING = (None,) * (len(_OPTIONAL) + 2)


def _headers(prefix: str, headers: Mapping[str, Any] | None, context: Mapping[str, Any]) -> dict[str, Any]:
    if headers is not None and not isinstance(headers, Mapping):
        refuse("OB003", f"{prefix}headers must be an object", "Pass a JSON object of header names and values.")
    merged = {**context, **(headers or {})}
    try:
        # Written as the server writes a jsonb, so that both count the same bytes.
        size = len(json.dumps(merged, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        size = 0  # refused below
    if size > MOST_HEADER_BYTES:
        refuse("OB003", f"{prefix}headers are larger than 32 KiB", "Move large values into the body.")
    if any(RESERVED.fullmatch(str(name)) for name in merged):
        refuse(
            "OB003",
            f"{prefix}headers contain a reserved name",
            "CC, BCC, x-death, x-first-death-*, x-delivery-count, x-acquired-count and x-outbox-* belong to the broker"
            " and to outbox.",
        )
    if not all(_carried(name, value) for name, value in merged.items()):
        refuse(
            "OB003",
            f"{prefix}headers contain a name or value that AMQP cannot carry unchanged",
            "Names have 1 to 128 bytes; values are strings, booleans, 64-bit integers, null, or flat lists and objects"
            " of those. Send other numbers as strings.",
        )
    return {"headers": merged}


def _carried(name: Any, value: Any, *, nested: bool = False) -> bool:
    if not (isinstance(name, str) and 1 <= (_bytes(name) or 0) <= HEADER_NAME):
        return False
    if isinstance(value, dict):
        return not nested and all(_carried(inner, item, nested=True) for inner, item in value.items())
    if isinstance(value, list | tuple):
        return not nested and all(_carried("item", item, nested=True) for item in value)
    if isinstance(value, int):
        return value in INT64
    return value is None or (isinstance(value, str) and _bytes(value) is not None)


def _bytes(text: str) -> int | None:
    """How many bytes; none if it holds a NUL or half of a surrogate pair, which no text in PostgreSQL does."""
    if "\0" in text:
        return None
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _properties(prefix: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(properties, Mapping):
        refuse(
            "OB003",
            f"{prefix}properties must be an object",
            "Pass a JSON object with priority, type, correlation_id, reply_to or app_id.",
        )
    if not all(_sendable(name, value) for name, value in properties.items()):
        refuse(
            "OB003",
            f"{prefix}properties contain a name or value that cannot be sent",
            "priority is an integer from 0 to 255; type, correlation_id, reply_to and app_id are strings of at most"
            " 255 bytes; nothing else is taken.",
        )
    return {"properties": dict(properties)}


def _sendable(name: Any, value: Any) -> bool:
    if name == "priority":
        return isinstance(value, int) and not isinstance(value, bool) and value in range(256)
    if name not in {"type", "correlation_id", "reply_to", "app_id"} or not isinstance(value, str):
        return False
    if name == "reply_to" and value.startswith("amq.rabbitmq.reply-to"):
        return False
    size = _bytes(value)
    return size is not None and size <= SHORT_STRING
