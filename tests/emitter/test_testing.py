"""The helpers for the tests of applications, with every kind of connection, inside its open transaction."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from unittest.mock import ANY
from uuid import uuid4

import psycopg
import pydantic
import pytest

from emitter.kinds import Opened, Waiting, value
from outbox import OutboxMessage, emit, emit_many
from outbox.testing import Emitted, Outbox


async def test_in_the_open_transaction(opened: Opened, waiting: Waiting) -> None:
    outbox = Outbox(opened.conn)
    await value(outbox.assert_nothing_emitted())
    made = await value(emit(opened.conn, "now", {"a": 1}, key="k", headers={"h": "1"}, dedup_key="once"))
    await value(emit(opened.conn, "later", b"\xff", eta=timedelta(days=1)))
    found = await value(outbox.assert_emitted("now", {"a": 1}, headers={"h": "1"}, key="k", count=1))
    assert isinstance(found, Emitted)
    assert found.id == made
    assert [message.body for message in await value(outbox.messages())] == [b'{"a":1}', b"\xff"]
    with pytest.raises(AssertionError, match="2 emitted, expected none"):
        await value(outbox.assert_nothing_emitted())
    with pytest.raises(AssertionError, match=r"payload.a: expected 2, emitted 1"):
        await value(outbox.assert_emitted("now", {"a": 2}))
    assert waiting() == []
    now, later = await value(outbox.drain())
    assert (now.eta, later.body) == (None, b"\xff")
    assert later.eta is not None
    await value(outbox.assert_nothing_emitted())
    # As after sending: a deduplicated message does not come again.
    assert await value(emit(opened.conn, "now", 1, dedup_key="once")) == made
    await value(outbox.assert_nothing_emitted())
    await value(opened.rollback())


class Item(pydantic.BaseModel):
    name: str
    price: int = 3


ID = uuid4()
BODY = {"id": ID, "item": {"name": "teapot", "price": 3}, "tags": ["a", "b"], "none": None}


@pytest.mark.parametrize(
    "pattern",
    [
        {},
        {"id": ID, "none": None},
        {"id": str(ID)},
        {"item": Item(name="teapot")},
        {"item": {"name": re.compile("^tea")}, "tags": ["a", ANY]},
        {"tags": ("a", "b")},
        BODY,
    ],
)
def test_matches(db: psycopg.Connection[Any], pattern: Any) -> None:
    emit(db, "a", BODY)
    Outbox(db).assert_emitted("a", pattern)


@pytest.mark.parametrize(
    ("pattern", "difference"),
    [
        ({"item": {"name": "cup"}}, "payload.item.name: expected 'cup', emitted 'teapot'"),
        ({"item": {"size": 1}}, "payload.item.size: expected 1, missing"),
        ({"tags": ["a"]}, "payload.tags: expected ['a'], emitted ['a', 'b']"),
        ({"tags": ["a", "c"]}, "payload.tags[1]: expected 'c', emitted 'b'"),
        ({"item": re.compile("t")}, "payload.item: expected to match 't', emitted {'name': 'teapot', 'price': 3}"),
        ({"none": False}, "payload.none: expected False, emitted None"),
        (b"bytes", "payload: expected b'bytes', emitted {"),
    ],
)
def test_differences(db: psycopg.Connection[Any], pattern: Any, difference: str) -> None:
    emit(db, "a", BODY)
    with pytest.raises(AssertionError) as caught:
        Outbox(db).assert_emitted("a", pattern)
    assert f"      {difference}" in str(caught.value)


def test_key_headers_and_count(db: psycopg.Connection[Any]) -> None:
    emit_many(db, [OutboxMessage("a", 1, key="k"), OutboxMessage("a", 1, headers={"h": 1}), OutboxMessage("b", b"1")])
    outbox = Outbox(db)
    assert outbox.assert_emitted("a", key=None).headers == {"h": 1}
    assert outbox.assert_emitted("b", b"1").payload == b"1"
    assert outbox.assert_emitted("c", count=0) is None
    for wrong, difference in (
        ({"key": "other"}, "key: expected 'other', emitted 'k'"),
        ({"headers": {"h": 2}}, "headers.h: expected 2, emitted 1"),
        ({"headers": {"i": 2}}, "headers.i: expected 2, missing"),
        ({"count": 1}, "2 messages like that emitted, not 1: 'a'"),
    ):
        with pytest.raises(AssertionError, match=re.escape(difference)):
            outbox.assert_emitted("a", **wrong)
    with pytest.raises(AssertionError, match="another routing key"):
        outbox.assert_emitted("c")
    outbox.drain()
    with pytest.raises(AssertionError, match="nothing was emitted"):
        outbox.assert_emitted("c")
