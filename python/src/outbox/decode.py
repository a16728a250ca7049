"""What a listener gets for a body, by the annotation of its argument; the way back of body.py."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints
from uuid import UUID

Decode: TypeAlias = Callable[[bytes], Any]

_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    Decimal: Decimal,
}
_JSON = (str, int, float, bool, type(None))


class UnreadableError(Exception):
    """The body is not what the annotation asks for. The text never holds the body, or a part of it."""


def decoder(annotation: Any) -> Decode:
    """How to read a body for an argument annotated so; TypeError if that is not known."""
    if annotation is Any:
        return anything
    if annotation is bytes:
        return bytes
    if _derived(annotation, "pydantic", "BaseModel"):
        return _guarded(annotation.model_validate_json)
    if _derived(annotation, "msgspec", "Struct"):
        msgspec = sys.modules["msgspec"]
        return _guarded(lambda body: msgspec.json.decode(body, type=annotation))
    read = _reader(annotation)

    def decode(body: bytes) -> Any:
        try:
            return read(json.loads(body), "body")
        except (ValueError, RecursionError):
            raise UnreadableError("the body is not JSON") from None

    return decode


def anything(body: bytes) -> Any:
    """JSON if it is, the bytes if not."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


def _derived(annotation: Any, module: str, kind: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(annotation, type) and issubclass(annotation, getattr(loaded, kind))


def _guarded(read: Decode) -> Decode:
    def decode(body: bytes) -> Any:
        try:
            return read(body)
        except Exception as error:  # noqa: BLE001 - whatever a validator raises, it is about the body
            count = getattr(error, "error_count", None)
            many = f", {count()} errors" if count else ""
            raise UnreadableError(f"the body does not fit: {type(error).__name__}{many}") from None

    return decode


# --- values of JSON, by type

Read: TypeAlias = Callable[[Any, str], Any]


def _reader(kind: Any) -> Read:
    """Reads a value of JSON as this type."""
    found = _simple(kind) or _composed(get_origin(kind) or kind, get_args(kind))
    if found is None:
        raise TypeError(
            f"a body cannot be read as {getattr(kind, '__qualname__', kind)}: use a Pydantic model, a dataclass,"
            " a msgspec struct, bytes, or what JSON has"
        )
    return found


def _simple(kind: Any) -> Read | None:
    if kind is float:
        return _checked("number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
    if kind in _JSON:
        return _checked(kind.__name__, lambda value: type(value) is kind)
    if kind in _TEXT:
        return _converted(kind, _TEXT[kind], str)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _converted(kind, kind, object)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind)
    return (lambda value, _: value) if kind is Any else None


def _composed(origin: Any, inner: tuple[Any, ...]) -> Read | None:
    if origin in (Union, types.UnionType):
        return _union([_reader(one) for one in inner])
    if origin in (list, Sequence, tuple) and inner[1:] in ((), (...,)):
        return _list(origin, _reader(inner[0] if inner else Any))
    if origin in (dict, Mapping):
        return _dict(_reader(inner[1] if inner else Any))
    return None


def _checked(name: str, fits: Callable[[Any], bool]) -> Read:
    def read(value: Any, path: str) -> Any:
        if not fits(value):
            raise UnreadableError(f"{path} is not of type {name}")
        return value

    return read


def _converted(kind: Any, convert: Callable[[Any], Any], given: type) -> Read:
    def read(value: Any, path: str) -> Any:
        try:
            if isinstance(value, given):
                return convert(value)
        except (ValueError, ArithmeticError):
            pass
        raise UnreadableError(f"{path} is not of type {kind.__name__}")

    return read


def _union(readers: list[Read]) -> Read:
    def read(value: Any, path: str) -> Any:
        for one in readers:
            try:
                return one(value, path)
            except UnreadableError:
                continue
        raise UnreadableError(f"{path} is of none of the types it may be")

    return read


def _list(kind: Any, item: Read) -> Read:
    def read(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise UnreadableError(f"{path} is not a list")
        found = [item(one, f"{path}[{number}]") for number, one in enumerate(value)]
        return tuple(found) if kind is tuple else found

    return read


def _dict(item: Read) -> Read:
    def read(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise UnreadableError(f"{path} is not an object")
        return {name: item(one, f"{path} field") for name, one in value.items()}

    return read


def _dataclass(kind: Any) -> Read:
    known = fields(kind)
    needed = {one.name for one in known if one.init and one.default is MISSING and one.default_factory is MISSING}
    readers: dict[str, Read] = {}

    def read(value: Any, path: str) -> Any:
        if not readers:  # late: a class may hold itself
            types_of = get_type_hints(kind)
            readers.update({one.name: _reader(types_of[one.name]) for one in known if one.init})
        if not isinstance(value, dict):
            raise UnreadableError(f"{path} is not an object")
        if missing := sorted(needed - value.keys()):
            raise UnreadableError(f"{path} has no {missing[0]}")
        # What is not known is passed over: producers add fields before consumers read them.
        given = {name: reader(value[name], f"{path}.{name}") for name, reader in readers.items() if name in value}
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            raise UnreadableError(f"{path} is refused by {kind.__name__}: {type(error).__name__}") from None

    return read
