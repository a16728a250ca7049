"""What a listener may look like, what its body is read as, and which routing keys it matches. Without servers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import aio_pika
import msgspec
import pydantic
import pytest

from outbox import Listener, Worker, body, listen
from outbox.decode import UnreadableError, decoder
from outbox.errors import ConfigurationError
from outbox.listener import matches


class Colour(Enum):
    RED = "red"


@dataclass
class Item:
    name: str
    price: Decimal
    tags: list[str] = field(default_factory=list)


@dataclass
class Order:
    id: UUID
    at: datetime
    day: date
    items: tuple[Item, ...]
    colour: Colour = Colour.RED
    note: str | None = None
    parent: Order | None = None
    more: dict[str, int] = field(default_factory=dict)
    weight: float = 0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError("an order weighs something")


class Model(pydantic.BaseModel):
    id: int


class Struct(msgspec.Struct):
    id: int


def order(**more: Any) -> Order:
    item = Item("cup", Decimal("1.10"), ["a"])
    at = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Order(UUID(int=1), at, date(2024, 1, 2), (item,), **more)


# --- signatures


async def simple(user: Any) -> None:
    """A listener."""


def test_named_after_module_and_qualname() -> None:
    @listen("a")
    async def local(body: Any) -> None: ...

    assert Listener("a", simple).queue == f"{__name__}.simple"
    assert local.queue == f"{__name__}.test_named_after_module_and_qualname.local"
    assert Listener("a", simple, "mine").queue == "mine"


async def test_calling_the_listener_calls_the_function() -> None:
    @listen("a")
    def double(body: int) -> int:
        return 2 * body

    @listen("a")
    async def triple(body: int) -> int:
        return 3 * body

    assert (double(2), await triple(2)) == (4, 6)


def test_listen_and_listener_are_the_same() -> None:
    made = listen("a", queue="q", retry_delays=(1, 2))(simple)
    assert made == made  # noqa: PLR0124 - by identity
    assert (made.binding_key, made.callback, made.queue, made.retry_delays) == ("a", simple, "q", (1, 2))


class Service:
    async def method(self, body: Any, attempt_count: int) -> None: ...

    async def __call__(self, body: Any) -> None: ...


def test_methods_and_objects() -> None:
    bound = Listener("a", Service().method)
    assert (bound.body_argument, bound.is_async) == ("body", True)
    called = Listener("a", Service())
    assert (called.body_argument, called.is_async, called.queue) == ("body", True, f"{__name__}.Service")


def no_body(routing_key: str) -> None: ...


def two_bodies(user: Any, order: Any) -> None: ...


def star(*bodies: Any) -> None: ...


def stars(**bodies: Any) -> None: ...


def only_position(user: Any, /) -> None: ...


def unknown_name(user: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - that is the point


def odd_type(user: Callable[[], None]) -> None: ...


def with_tx(user: Any, tx: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Listener("a", no_body),
            "exactly one argument for the body, it has none; those known are attempt_count",
        ),
        (lambda: Listener("a", two_bodies), "exactly one argument for the body, it has user, order"),
        (lambda: Listener("a", star), "its argument .*bodies.* cannot be filled by name"),
        (lambda: Listener("a", stars), "its argument .*bodies.* cannot be filled by name"),
        (lambda: Listener("a", only_position), "its argument user.* cannot be filled by name"),
        (lambda: Listener("a", unknown_name), "the annotation of user cannot be used: name 'Missing' is not defined"),
        (lambda: Listener("a", odd_type), "the annotation of user cannot be used: a body cannot be read as"),
        (lambda: Listener("a", with_tx), "its argument tx needs once=True"),
        (lambda: Listener("a", simple, once=True), "with once=True it must have an argument tx"),
        (lambda: Listener("", simple), "its binding key must have 1 to 255 bytes"),
        (lambda: Listener("é" * 128, simple), "its binding key must have 1 to 255 bytes"),
        (lambda: Listener("a", simple, "q" * 252), "a queue's name has at most 251 letters"),
        (lambda: Listener("a", simple, "amq.q"), "does not begin with amq"),
        (lambda: Listener("a", simple, "ünï"), "all of ASCII"),
        (lambda: Listener("a", lambda body: body), "pass queue=..."),
        (lambda: Listener("a", simple, "q", [1, "2"]), "retry_delays must be numbers of seconds"),  # type: ignore[list-item]
        (lambda: Listener("a", simple, "q", [True]), "retry_delays must be numbers of seconds"),
        (lambda: Listener("a", simple, "q", [float("nan")]), "retry_delays must be numbers of seconds"),
        (lambda: Listener("a", simple, "q", [0]), "between 1 ms and 30 days"),
        (lambda: Listener("a", simple, "q", [30 * 86400 + 1]), "between 1 ms and 30 days"),
        (lambda: Listener("a", simple, timeout=0), "timeout must be a number of seconds"),
        (lambda: Listener("a", 1), "callback must be a function, not int"),  # type: ignore[arg-type]
        (lambda: Worker("amqp://x/"), "a worker needs at least one listener"),
        (lambda: Worker(listeners=[Listener("a", simple)]), "pass one of amqp_url, connection and source"),
        (lambda: Worker("amqp://x/", listeners=[simple]), "is no listener: decorate it"),  # type: ignore[list-item]
        (lambda: Worker("amqp://x/", listeners=[Listener("a", simple)] * 2), "two listeners have the queue .*simple"),
        (lambda: Worker("amqp://x/", listeners=[Listener("a", simple)], queue_type="x"), "queue_type must be one of"),
        (lambda: Worker("amqp://x/", listeners=[Listener("a", simple)], exchange_name=""), "exchange_name must have"),
        (lambda: Worker("amqp://x/", listeners=[Listener("a", simple)], prefetch_count=0), "prefetch_count must be"),
    ],
)
def test_refused_at_registration(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


# --- bodies


@pytest.mark.parametrize(
    ("annotation", "given", "found"),
    [
        (Any, b'{"a": 1}', {"a": 1}),
        (Any, b"\xff\x00", b"\xff\x00"),
        (Any, b"not json", b"not json"),
        (bytes, b'{"a": 1}', b'{"a": 1}'),
        (Model, b'{"id": "7"}', Model(id=7)),
        (Struct, b'{"id": 7}', Struct(7)),
        (dict, b'{"a": 1}', {"a": 1}),
        (dict[str, list[int]], b'{"a": [1]}', {"a": [1]}),
        (Mapping[str, int], b'{"a": 1}', {"a": 1}),
        (Sequence[int], b"[1]", [1]),
        (list, b"[1, null]", [1, None]),
        (int, b"1", 1),
        (float, b"1", 1),
        (str | None, b"null", None),
        (int | str, b'"a"', "a"),
        (None.__class__, b"null", None),
        (Colour, b'"red"', Colour.RED),
    ],
)
def test_read_as(annotation: Any, given: bytes, found: Any) -> None:
    assert decoder(annotation)(given) == found


@pytest.mark.parametrize("given", [order(), order(parent=order(note="x"), more={"a": 1}, weight=1.5)])
def test_a_dataclass_comes_back_as_it_was_emitted(given: Order) -> None:
    assert decoder(Order)(body.encode(given)[0]) == given


def test_fields_that_are_not_known_are_passed_over() -> None:
    assert decoder(Item)(b'{"name": "a", "price": "1", "colour": "red"}') == Item("a", Decimal(1))


SECRET = b"4111111111111111"


@pytest.mark.parametrize(
    ("annotation", "given", "words"),
    [
        (Model, b'{"id": "%s x"}' % SECRET, "the body does not fit: ValidationError, 1 errors"),
        (Model, b"{", "the body does not fit"),
        (Struct, b'{"id": "%s"}' % SECRET, "the body does not fit: ValidationError"),
        (dict, b"{", "the body is not JSON"),
        (dict, b"\xff", "the body is not JSON"),
        (int, b"true", "body is not of type int"),
        (float, b"true", "body is not of type number"),
        (list[int], b'[1, "%s"]' % SECRET, r"body\[1\] is not of type int"),
        (list, b"{}", "body is not a list"),
        (dict[str, int], b'{"%s": "x"}' % SECRET, "body field is not of type int"),
        (int | None, b'"%s"' % SECRET, "body is of none of the types it may be"),
        (UUID, b'"%s"' % SECRET, "body is not of type UUID"),
        (Decimal, b'"x"', "body is not of type Decimal"),
        (Decimal, b"1.5", "body is not of type Decimal"),
        (Colour, b'"%s"' % SECRET, "body is not of type Colour"),
        (Item, b"[]", "body is not an object"),
        (Item, b'{"name": "%s"}' % SECRET, "body has no price"),
        (Item, b'{"name": "a", "price": "%s x"}' % SECRET, "body.price is not of type Decimal"),
    ],
)
def test_unreadable_and_no_word_of_the_body_is_repeated(annotation: Any, given: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as raised:
        decoder(annotation)(given)
    assert SECRET.decode() not in str(raised.value)


@pytest.mark.parametrize("annotation", [Any, bytes, Model, Struct, Order, dict[str, list[int]], int | None])
def test_w12_whatever_comes_is_read_or_unreadable(annotation: Any) -> None:
    """Bodies with bytes changed, lost or doubled: nothing else is raised, which would end the worker."""
    chance, read, found = random.Random(12), decoder(annotation), 0  # noqa: S311 - the same bodies each time
    bodies = [body.encode(order(parent=order()))[0], b'{"id": 7}', b'{"a": [1, 2]}', b"7", b"null"]
    for number in range(1000):
        given = bytearray(bodies[number % len(bodies)])
        for _ in range(chance.randint(0, 3)):
            at = chance.randrange(len(given))
            given[at : at + 1] = chance.choice([b"", bytes([chance.randrange(256)]), given[at : at + 1] * 2, b"1e999"])
            given = given or bytearray(b" ")
        try:
            read(bytes(given))
            found += 1
        except UnreadableError:
            pass
    assert found


def test_refused_by_the_class_itself() -> None:
    given = body.encode(order())[0].replace(b'"weight":0', b'"weight":-1')
    with pytest.raises(UnreadableError, match="body is refused by Order: ValueError"):
        decoder(Order)(given)


# --- routing keys

KEYS = ["a", "b", "a.b", "a.c", "b.a", "a.b.c", "a.b.c.d", "a..b", "aa.b", "a.*", "#"]
PATTERNS = [
    "a",
    "a.b",
    "*",
    "#",
    "a.*",
    "*.b",
    "a.#",
    "#.c",
    "#.b.#",
    "*.*",
    "a.#.d",
    "*.#",
    "#.#",
    "a.*.c",
    "#.*",
    "a.*.b",
]


async def test_matched_as_a_topic_exchange_does(amqp_url: str) -> None:
    """The broker itself is asked."""
    found: dict[str, set[str]] = {}
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("t", "topic")
        queues = {}
        for pattern in PATTERNS:
            queues[pattern] = await channel.declare_queue(exclusive=True)
            await queues[pattern].bind(exchange, pattern)
        for key in KEYS:
            await exchange.publish(aio_pika.Message(key.encode()), key, mandatory=False)
        for pattern, queue in queues.items():
            found[pattern] = set()
            while message := await queue.get(fail=False, no_ack=True):
                found[pattern].add(message.body.decode())
    assert {pattern: {key for key in KEYS if matches(pattern, key)} for pattern in PATTERNS} == found
