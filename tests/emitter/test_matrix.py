"""Every kind of connection, and what its transaction does to the messages; read back from a second connection."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from emitter.kinds import Opened, Waiting, value
from outbox import Emitter, OutboxMessage, emit, emit_many, tracking
from outbox.errors import BodyTooLargeError, HeadersError, MissingArgumentError

TRACKING = "x-outbox-tracking-ids"


async def test_commit(opened: Opened, waiting: Waiting) -> None:
    message_id, eta = uuid4(), datetime.now(UTC) + timedelta(hours=1)
    made = await value(
        emit(
            opened.conn,
            "order.created",
            {"order": 1, "name": "Grüße, 日本"},
            key="customer 7",
            headers={"tenant": "north", "list": [1, None, True], "object": {"a": "b"}},
            exchange="shop",
            eta=eta,
            expiration=timedelta(days=1, microseconds=1),
            dedup_key="order 1 created",
            message_id=message_id,
            properties={"priority": 5, "type": "created"},
        )
    )
    assert waiting() == []
    await value(opened.commit())
    (message,) = waiting()
    assert isinstance(made, int)
    assert message.id == made
    assert message.body.decode() == '{"order":1,"name":"Grüße, 日本"}'
    assert (message.routing_key, message.content_type) == ("order.created", "application/json")
    assert (message.key, message.exchange, message.dedup_key) == ("customer 7", "shop", "order 1 created")
    assert message.headers == {"tenant": "north", "list": [1, None, True], "object": {"a": "b"}}
    assert message.properties == {"priority": 5, "type": "created"}
    assert message.message_id == message_id
    assert message.eta == eta
    assert message.expires_at == eta + timedelta(days=1, microseconds=1)


async def test_rollback(opened: Opened, waiting: Waiting) -> None:
    await value(emit(opened.conn, "a", 1))
    await value(emit_many(opened.conn, [OutboxMessage("b", 1)]))
    await value(opened.rollback())
    assert waiting() == []


async def test_savepoint(opened: Opened, waiting: Waiting) -> None:
    await value(emit(opened.conn, "before", 1))
    async with opened.nested():
        await value(emit(opened.conn, "inside", 1))
        await value(emit_many(opened.conn, [OutboxMessage("inside", 1)]))
    await value(emit(opened.conn, "after", 1))
    await value(opened.commit())
    assert waiting.keys() == ["before", "after"]


async def test_bulk(opened: Opened, waiting: Waiting) -> None:
    eta = datetime.now(UTC) + timedelta(hours=1)
    many = [OutboxMessage(f"many.{number}", {"n": number}) for number in range(50)]
    others = [
        OutboxMessage("bytes", b"\x00\xff", content_type="image/png", key="k", properties={"priority": 1}),
        OutboxMessage("later", None, eta=eta, expiration=0.5, headers={"h": "ä"}, message_id=uuid4(), exchange="x"),
    ]
    ids = await value(emit_many(opened.conn, [*many, *others]))
    again = await value(emit_many(opened.conn, [OutboxMessage("once", number, dedup_key="d") for number in range(2)]))
    none = await value(emit_many(opened.conn, []))
    await value(opened.commit())
    assert none == []
    assert again[0] == again[1]
    *found, sent, later, _ = waiting()
    assert [(message.id, message.payload["n"]) for message in found] == list(zip(ids, range(50), strict=False))
    assert (sent.body, sent.content_type, sent.key, sent.properties) == (b"\x00\xff", "image/png", "k", {"priority": 1})
    assert (later.eta, later.expires_at) == (eta, eta + timedelta(seconds=0.5))
    assert (later.body, later.headers, later.exchange) == (b"null", {"h": "ä"}, "x")
    assert later.message_id == others[1].message_id


async def test_bad_input_leaves_the_transaction_as_it_was(opened: Opened, waiting: Waiting) -> None:
    with pytest.raises(HeadersError):
        await value(emit(opened.conn, "bad", 1, headers={"ratio": 0.5}))
    with pytest.raises(MissingArgumentError, match=r"^messages\[1\]\.routing_key must not be null\. Pass a "):
        await value(emit_many(opened.conn, [OutboxMessage("a", 1), OutboxMessage(None, 1)]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^body\.set cannot be sent as JSON: it is of type set$"):
        await value(emit(opened.conn, "bad", {"set": {1}}))
    await value(emit(opened.conn, "good", 1))
    await value(opened.commit())
    assert waiting.keys() == ["good"]


async def test_what_only_the_server_can_refuse(opened: Opened, waiting: Waiting) -> None:
    with pytest.raises(BodyTooLargeError) as single:
        await value(emit(opened.conn, "large", b"x" * 1_048_577))
    await value(opened.rollback())
    assert single.value.message == "body is larger than max_body_bytes"
    assert single.value.hint.startswith("Send a reference instead")
    assert single.value.__cause__ is not None
    assert waiting() == []


async def test_tracking_is_for_the_messages_of_its_block(opened: Opened, waiting: Waiting) -> None:
    with tracking() as chain:
        await value(emit(opened.conn, "tracked", 1))
        await value(emit_many(opened.conn, [OutboxMessage("tracked", 1)]))
    await value(emit(opened.conn, "plain", 1))
    await value(opened.commit())
    *tracked, plain = waiting()
    assert [message.headers[TRACKING] for message in tracked] == [
        [*chain, str(message.message_id)] for message in tracked
    ]
    assert plain.headers == {}


async def test_created_hook(opened: Opened) -> None:
    counted: list[tuple[str, int]] = []
    emitter = Emitter(created=lambda message, made: counted.append((message.routing_key, made)))
    first = await value(emitter.emit(opened.conn, "a", 1))
    others = await value(emitter.emit_many(opened.conn, [OutboxMessage("b", 1), OutboxMessage("c", 1)]))
    assert counted == [("a", first), ("b", others[0]), ("c", others[1])]


async def test_what_a_driver_says_is_left_as_it_is(opened: Opened, db: psycopg.Connection[object]) -> None:
    db.execute("alter schema outbox rename to away")
    try:
        with pytest.raises(Exception, match='schema "outbox" does not exist') as caught:
            await value(emit(opened.conn, "a", 1))
    finally:
        db.execute("alter schema away rename to outbox")
    assert not type(caught.value).__module__.startswith("outbox")
    await value(opened.rollback())
