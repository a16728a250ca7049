"""Bodies arrive as they were given: as JSON, or byte for byte."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest

from outbox import OutboxMessage, emit, emit_many
from outbox.body import encode

ID = UUID("0f8fad5b-d9cb-469f-a165-70867728950e")
NOON = datetime(2030, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Item(pydantic.BaseModel):
    sku: UUID
    price: Decimal
    shop: str = pydantic.Field(default="north", serialization_alias="store")


class Struct(msgspec.Struct, rename="camel"):
    item_id: UUID
    made_at: datetime


@dataclass
class Order:
    id: UUID
    placed: datetime
    total: Decimal
    colour: Colour = Colour.RED
    items: list[Item] = field(default_factory=list)


Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - also the untyped kind is a tuple

BODIES: dict[str, tuple[Any, str]] = {
    "dict": ({"b": [1, 2.5, None, True], "a": {"ü": "日本"}}, '{"b":[1,2.5,null,true],"a":{"ü":"日本"}}'),
    "list": ([1, "a"], '[1,"a"]'),
    "tuple": (Point(1, 2), "[1,2]"),
    "text": ('say "hi"\0', '"say \\"hi\\"\\u0000"'),
    "integer": (2**70, "1180591620717411303424"),
    "none": (None, "null"),
    "datetime": (NOON, '"2030-01-02T12:00:00.250000+00:00"'),
    "date and time": ([date(2030, 1, 2), time(12, 30)], '["2030-01-02","12:30:00"]'),
    "uuid": ({"id": ID}, f'{{"id":"{ID}"}}'),
    "decimal": (Decimal("1.10"), '"1.10"'),
    "enum": ([Colour.RED, Level.HIGH], '["red",3]'),
    "pydantic": (Item(sku=ID, price=Decimal("1.10")), f'{{"sku":"{ID}","price":"1.10","shop":"north"}}'),
    "msgspec": (Struct(ID, NOON), f'{{"itemId":"{ID}","madeAt":"2030-01-02T12:00:00.250000Z"}}'),
    "all together": (
        [Order(ID, NOON, Decimal(7), items=[Item(sku=ID, price=Decimal("0.5"))]), Struct(ID, NOON)],
        (
            f'[{{"id":"{ID}","placed":"2030-01-02T12:00:00.250000+00:00","total":"7","colour":"red",'
            f'"items":[{{"sku":"{ID}","price":"0.5","shop":"north"}}]}},'
            f'{{"itemId":"{ID}","madeAt":"2030-01-02T12:00:00.250000Z"}}]'
        ),
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_json(kind: str, db: psycopg.Connection[Any]) -> None:
    body, expected = BODIES[kind]
    made = [emit(db, "a", body), *emit_many(db, [OutboxMessage("a", body)])]
    rows = db.execute("select body, content_type from outbox.message where id = any(%s)", [made]).fetchall()
    assert rows == [(expected.encode(), "application/json")] * 2
    json.loads(expected)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes(kind: Any, db: psycopg.Connection[Any]) -> None:
    content = bytes(range(256))
    made = [emit(db, "a", kind(content)), *emit_many(db, [OutboxMessage("a", kind(content))])]
    made.append(emit(db, "a", kind(b""), content_type="text/plain"))
    rows = db.execute("select body, content_type from outbox.message where id = any(%s) order by id", [made]).fetchall()
    assert rows == [(content, "application/octet-stream")] * 2 + [(b"", "text/plain")]


@dataclass
class Circle:
    name: str
    inner: Any = None


ROUND = Circle("round")
ROUND.inner = {"again": ROUND}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({1, 2}, "body cannot be sent as JSON: it is of type set"),
        ({"a": [1, {"b c": b"x"}]}, "body.a[1]['b c'] cannot be sent as JSON: it is of type bytes"),
        (Order(ID, NOON, Decimal(1), items=[object()]), "body.items[0] cannot be sent as JSON: it is of type object"),  # type: ignore[list-item]
        ({"a": {"b": float("nan")}}, "body.a.b cannot be sent as JSON: it is not a finite number"),
        ({"a": ["\ud800"]}, "body.a[0] cannot be sent as JSON: it holds half of a surrogate pair"),
        ({"a": {ID: 1}}, "body.a cannot be sent as JSON: it has a key of type UUID"),
        ([ROUND], "body[0].inner.again cannot be sent as JSON: it contains itself"),
        (Colour, "body cannot be sent as JSON: it is of type EnumType"),
    ],
)
def test_anything_else_is_a_type_error_that_says_where(body: Any, complaint: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode(body)
    assert str(caught.value) == complaint


def test_in_bulk_it_says_which(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(TypeError, match=r"^messages\[1\]\.body\.a cannot be sent as JSON"):
        emit_many(db, [OutboxMessage("a", 1), OutboxMessage("b", {"a": object()})])
