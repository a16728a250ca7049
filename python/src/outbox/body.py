"""What a body becomes: bytes, and their content type. Libraries are recognised only if the application loaded them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any
from uuid import UUID

JSON = "application/json"
BYTES = "application/octet-stream"
_KNOWN = frozenset({dict, list, str, int})


def encode(body: Any, name: str = "body") -> tuple[bytes, str]:
    """The bytes to send and what they are; name is how an error calls the body."""
    if type(body) not in _KNOWN:  # most bodies are: they need no closer look
        if isinstance(body, bytes | bytearray | memoryview):
            return bytes(body), BYTES
        if _is(body, "pydantic.main", "BaseModel"):
            return body.model_dump_json().encode(), JSON
        if _is(body, "msgspec", "Struct"):
            return sys.modules["msgspec"].json.encode(body), JSON
    try:
        return _ENCODER.encode(body).encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        where, why = next(_faults(body, name, ()), (name, str(error)))
        raise TypeError(f"{where} cannot be sent as JSON: {why}") from None


def _is(value: Any, module: str, kind: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, kind))


def plain(value: Any) -> Any:
    """One step from a value that JSON does not know towards one that it does."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):  # as text: a JSON number would not keep a Decimal's digits everywhere
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if _is(value, "pydantic.main", "BaseModel"):
        return value.model_dump(mode="json")
    if _is(value, "msgspec", "Struct"):
        return sys.modules["msgspec"].to_builtins(value)
    raise TypeError(f"it is of type {type(value).__qualname__}")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)


def _faults(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Where and why encoding fails. Looked for only once it has failed."""
    if id(value) in above:
        yield path, "it contains itself"
        return
    try:
        parts = _parts(value)
    except UnicodeEncodeError:
        yield path, "it holds half of a surrogate pair"
    except (TypeError, ValueError) as error:
        yield path, str(error)
    else:
        for part, item in parts:
            yield from _faults(item, path + part, (*above, id(value)))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a value consists of, each with what it adds to the path; raises if the value itself cannot be sent."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int | float | None)]:
            raise TypeError(f"it has a key of type {type(odd[0]).__qualname__}")
        return [(f".{key}" if str(key).isidentifier() else f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("it is not a finite number")
    if isinstance(value, str):
        value.encode()
    return [] if isinstance(value, str | int | float | None) else [("", plain(value))]
