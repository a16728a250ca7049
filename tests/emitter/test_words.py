"""What cannot be sent is refused before the network, with the code, the words and the hint of the server."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from sqlalchemy import create_engine

from outbox import OutboxMessage, RefusedError, emit, emit_many
from outbox.message import arguments as checked

Words = tuple[str, str, str]

LONG = "x" * 256
FAR = datetime.now(UTC) + timedelta(days=3660)
# What Python is given, and the same as arguments of outbox.emit_bytes().
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no routing key": ({"routing_key": None}, {"routing_key": None}),
    "empty routing key": ({"routing_key": ""}, {"routing_key": ""}),
    "long routing key": ({"routing_key": "ä" * 128}, {"routing_key": "ä" * 128}),
    "empty content type": ({"content_type": ""}, {"content_type": ""}),
    "long content type": ({"content_type": LONG}, {"content_type": LONG}),
    "empty exchange": ({"exchange": ""}, {"exchange": ""}),
    "long exchange": ({"exchange": LONG}, {"exchange": LONG}),
    "empty key": ({"key": ""}, {"key": ""}),
    "long key": ({"key": LONG}, {"key": LONG}),
    "empty dedup key": ({"dedup_key": ""}, {"dedup_key": ""}),
    "long dedup key": ({"dedup_key": LONG}, {"dedup_key": LONG}),
    "body beyond every limit": ({"body": b"x" * 15_728_641}, {"body": b"x" * 15_728_641}),
    "negative delay": ({"eta": -1}, {"delay": timedelta(milliseconds=-1)}),
    "negative timedelta": ({"eta": timedelta(days=-1)}, {"delay": timedelta(days=-1)}),
    "delay beyond 10 years": ({"eta": timedelta(days=3601)}, {"delay": timedelta(days=3601)}),
    "milliseconds beyond 10 years": ({"eta": 10**20}, {"delay": timedelta(days=10_000)}),
    "eta beyond 10 years": ({"eta": FAR}, {"eta": FAR}),
    "eta at the end of time": ({"eta": datetime.max.replace(tzinfo=UTC)}, {"eta": "infinity"}),
    "no time to live": ({"expiration": 0}, {"expires_in": timedelta(0)}),
    "negative time to live": ({"expiration": timedelta(-1)}, {"expires_in": timedelta(-1)}),
    "time to live beyond 10 years": ({"expiration": timedelta(days=3601)}, {"expires_in": timedelta(days=3601)}),
    "endless time to live": ({"expiration": float("inf")}, {"expires_in": timedelta(days=10_000)}),
    "undefined time to live": ({"expiration": float("nan")}, {"expires_in": timedelta(0)}),
    "headers as a list": ({"headers": [1]}, {"headers": [1]}),
    "large headers": ({"headers": {"a": "ä" * 17_000}}, {"headers": {"a": "ä" * 17_000}}),
    "large headers of another kind": ({"headers": {"a": "x" * 40_000, "b": 0.5}},) * 2,
    **{
        f"reserved {name}": ({"headers": {name: 1}},) * 2
        for name in (
            "CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count", "x-first-death-queue", "x-outbox-",
            "x-outbox-a\nb",
        )
    },
    "header with a fraction": ({"headers": {"a": 0.5}},) * 2,
    "header with a whole fraction": ({"headers": {"a": 1.0}},) * 2,
    "header with a large integer": ({"headers": {"a": 2**63}},) * 2,
    "header with a small integer": ({"headers": {"a": -(2**63) - 1}},) * 2,
    "header without a name": ({"headers": {"": 1}},) * 2,
    "header with a long name": ({"headers": {"x" * 129: 1}},) * 2,
    "header with a long name inside": ({"headers": {"a": {"x" * 129: 1}}},) * 2,
    "header in three layers": ({"headers": {"a": [[]]}},) * 2,
    "header in three layers of objects": ({"headers": {"a": {"b": {}}}},) * 2,
    "properties as a list": ({"properties": []}, {"properties": []}),
    "unknown property": ({"properties": {"user_id": "a"}},) * 2,
    "large priority": ({"properties": {"priority": 256}},) * 2,
    "negative priority": ({"properties": {"priority": -1}},) * 2,
    "true as a priority": ({"properties": {"priority": True}},) * 2,
    "fractional priority": ({"properties": {"priority": 1.0}},) * 2,
    "long type": ({"properties": {"type": LONG}},) * 2,
    "number as a type": ({"properties": {"type": 1}},) * 2,
    "direct reply": ({"properties": {"reply_to": "amq.rabbitmq.reply-to.x"}},) * 2,
}  # fmt: skip


def message(given: dict[str, Any]) -> dict[str, Any]:
    return {"routing_key": "a", "body": 1} | given


# What cannot be said in Python: None leaves the content type to the body, and eta is one argument.
ONLY_SQL = {"content_type must not be null", "eta and delay exclude each other"}


@pytest.fixture
def closed(dsn: str) -> psycopg.Connection[Any]:
    """A connection that nothing can be asked of."""
    with psycopg.connect(dsn) as connection:
        pass
    return connection


def in_sql(db: psycopg.Connection[Any], given: dict[str, Any]) -> Words | None:
    """What the server says to a message; nothing if it takes it."""
    arguments = {"routing_key": "a", "body": b"1"} | given
    values = {
        name: Jsonb(value) if name in {"headers", "properties"} and value is not None else value
        for name, value in arguments.items()
    }
    call = ", ".join(f"{name} => %({name})s" for name in arguments)
    try:
        with db.transaction(force_rollback=True):
            db.execute(f"select outbox.emit_bytes({call})", values)
    except psycopg.Error as error:
        return str(error.sqlstate), str(error.diag.message_primary), str(error.diag.message_hint)
    return None


@pytest.mark.parametrize("case", CASES)
def test_the_same_words_on_both_sides(case: str, db: psycopg.Connection[Any], closed: psycopg.Connection[Any]) -> None:
    python, sql = CASES[case]
    wrong = message(python)
    expected = in_sql(db, sql)
    assert expected is not None
    with pytest.raises(RefusedError) as single:
        emit(closed, **wrong)
    assert (single.value.code, single.value.message, single.value.hint) == expected
    with pytest.raises(RefusedError) as many:
        emit_many(closed, [OutboxMessage("a", 1), OutboxMessage(**wrong)])
    code, words, hint = expected
    assert (many.value.code, many.value.message, many.value.hint) == (code, f"messages[1].{words}", hint)


def test_no_check_of_the_server_is_missing(db: psycopg.Connection[Any]) -> None:
    sources = db.execute(
        "select string_agg(prosrc, '') from pg_proc where pronamespace = 'outbox'::regnamespace"
        " and proname in ('_check_message', '_check_headers', '_check_properties')"
    ).fetchone()
    assert sources is not None
    words = set(re.findall(r"_refuse\('OB\d+', format\('%s([^']+)'", sources[0]))
    seen = {found[1] for _, sql in CASES.values() if (found := in_sql(db, sql))}
    assert words == seen | ONLY_SQL


def test_messages(db: psycopg.Connection[Any], closed: psycopg.Connection[Any]) -> None:
    for python, sql in ((None, None), (17, "17"), ({}, "{}"), ("[]", '""'), ([1], "[1]"), ([None], "[null]")):
        with pytest.raises(psycopg.Error) as there, db.transaction():
            db.execute("select outbox.emit_many(%s::jsonb)", [sql])
        with pytest.raises(RefusedError) as here:
            emit_many(closed, python)  # type: ignore[arg-type]
        assert (here.value.code, here.value.message) == (there.value.sqlstate, there.value.diag.message_primary)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
)
NAMES = st.one_of(
    st.sampled_from(["CC", "x-death", "x-outbox-a", "priority", "type", "app_id", "reply_to", ""]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=130),
)
DOCUMENTS = st.one_of(
    SCALARS,
    st.dictionaries(
        NAMES, st.recursive(SCALARS, lambda s: st.lists(s, max_size=2) | st.dictionaries(NAMES, s, max_size=2))
    ),
)
SHORT = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300)


@settings(max_examples=200, deadline=None)
@given(headers=DOCUMENTS, properties=DOCUMENTS, routing_key=SHORT, key=SHORT)
def test_both_sides_draw_the_line_at_the_same_place(cleaner: psycopg.Connection[Any], **given_: Any) -> None:
    try:
        checked(OutboxMessage(body=b"1", **given_), {}, {})
    except RefusedError as error:
        found: Words | None = (error.code, error.message, error.hint)
    else:
        found = None
    assert found == in_sql(cleaner, given_)


def test_what_no_text_of_the_server_can_hold_is_refused_too(closed: psycopg.Connection[Any]) -> None:
    for text in ("a\0", "\ud800"):
        for name in ("routing_key", "key", "exchange", "dedup_key", "content_type"):
            with pytest.raises(ValueError, match=f"^{name} must not hold a NUL or half of a surrogate pair$"):
                emit(closed, **message({name: text}))
        for headers in ({text: 1}, {"a": text}, {"a": [text]}):
            with pytest.raises(RefusedError, match="that AMQP cannot carry unchanged"):
                emit(closed, **message({"headers": headers}))
        with pytest.raises(RefusedError, match="properties contain"):
            emit(closed, "a", 1, properties={"type": text})
    for odd in ({1: "a"}, {"a": uuid4()}, {"a": b"b"}, {"a": {1: 2}}):
        with pytest.raises(RefusedError, match="that AMQP cannot carry unchanged"):
            emit(closed, **message({"headers": odd}))


def test_a_time_without_a_zone_is_refused(closed: psycopg.Connection[Any]) -> None:
    with pytest.raises(RefusedError, match=r"^eta must have a time zone") as caught:
        emit(closed, "a", 1, eta=datetime(2030, 1, 1))  # noqa: DTZ001 - that is the point
    assert caught.value.code == "OB005"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("routing_key", 1),
        ("key", b"k"),
        ("exchange", 1),
        ("eta", "now"),
        ("eta", True),
        ("eta", 1.5),
        ("expiration", "1 s"),
    ],
)
def test_other_types_are_type_errors(closed: psycopg.Connection[Any], name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a"):
        emit(closed, **message({name: wrong}))


def test_message_id_must_be_one(closed: psycopg.Connection[Any]) -> None:
    with pytest.raises(ValueError, match=r"^message_id must be a UUID$"):
        emit(closed, "a", 1, message_id="17")


def test_times(db: psycopg.Connection[Any]) -> None:
    """Durations count from the database's clock; what lies in the past is sent at once."""
    for eta in (
        0,
        timedelta(0),
        datetime.min.replace(tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
    ):
        made = emit(db, "a", 1, eta=eta)
        assert db.execute("select due_at from outbox.message where id = %s", [made]).fetchone() == (None,)
    for eta, seconds in (
        (90_500, 90.5),
        (timedelta(days=3600), 3600 * 86400),
        (timedelta(microseconds=10**8 + 1), 100.000001),
    ):
        made = emit(db, "a", 1, eta=eta)
        (many,) = emit_many(db, [OutboxMessage("a", 1, eta=eta)])
        rows = db.execute(
            "select extract(epoch from due_at - created_at)::float8 from outbox.message where id in (%s, %s)",
            [made, many],
        ).fetchall()
        assert rows == [(seconds,), (seconds,)]


def test_text_of_an_enum_is_its_value(db: psycopg.Connection[Any]) -> None:
    class Topic(str, Enum):  # noqa: UP042 - as many applications still have them
        CREATED = "order.created"

    made = emit(db, Topic.CREATED, 1, key=Topic.CREATED, headers={"a": Topic.CREATED})
    row = db.execute("select routing_key, key, headers from outbox.message where id = %s", [made]).fetchone()
    assert row == ("order.created", "order.created", {"a": "order.created"})


@pytest.mark.parametrize("pool", ["engine", "class", "nothing"])
def test_only_a_connection_has_a_transaction(pool: str) -> None:
    wrong = {"engine": create_engine("postgresql+psycopg://"), "class": psycopg.Connection, "nothing": None}[pool]
    with pytest.raises(TypeError, match="needs the connection or session whose transaction the message is to join"):
        emit(wrong, "a", 1)  # type: ignore[call-overload]
