# ruff: noqa: SLF001 - inside is what this file is about
"""What the publisher takes from inside its libraries. A release that changes it must fail here, not lose confirms."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import pytest
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from aiormq.connection import EXCEPTION_MAPPING, Connection
from pamqp import commands, header
from pamqp.body import ContentBody
from pamqp.frame import marshal

from harness import message
from outbox.confirms import ConfirmChannel
from outbox.frames import content_header, encode_one, publish_frame


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_versions() -> None:
    assert [version(name).split(".")[0] for name in ("aiormq", "pamqp")] == ["7", "4"]


@pytest.mark.parametrize(
    ("function", "expected", "asynchronous"),
    [
        (Channel._on_confirm_frame, ["self", "frame"], True),
        (Channel._on_return_frame, ["self", "frame"], True),
        (Channel._on_close_frame, ["self", "frame"], True),
        (Channel._get_frame, ["self"], True),
        (Channel._read_content, ["self", "frame", "header"], True),
        (Channel.open, ["self", "timeout"], True),
        (
            Channel.__init__,
            ["self", "connector", "number", "publisher_confirms", "frame_buffer", "on_return_raises"],
            False,
        ),
    ],
)
def test_functions_that_are_called_or_replaced(
    function: Callable[..., Any], expected: list[str], *, asynchronous: bool
) -> None:
    assert parameters(function) == expected
    assert inspect.iscoroutinefunction(function) is asynchronous


def test_reader_hands_frames_to_what_is_replaced() -> None:
    source = inspect.getsource(Channel._reader)
    for name in ("_on_confirm_frame", "_on_return_frame", "_on_close_frame"):
        assert f"self.{name}(frame)" in source
        assert name in vars(ConfirmChannel)


def test_writer_takes_our_bytes() -> None:
    assert [field.name for field in fields(ChannelFrame)] == ["payload", "should_close", "drain_future"]
    source = inspect.getsource(sys.modules[Connection.__module__])
    assert "writer.write(channel_frame.payload)" in source
    assert "await writer.drain()\n                    channel_frame.drain()" in source


async def test_attributes() -> None:
    connection = Connection("amqp://nowhere/")
    unblocked = vars(connection)["_Connection__connection_unblocked"]
    assert isinstance(unblocked, asyncio.Event)
    assert isinstance(connection.write_queue, asyncio.Queue)
    assert connection.channels == {}
    assert EXCEPTION_MAPPING[504].__name__ == "ConnectionChannelError"
    assert 320 not in EXCEPTION_MAPPING


def test_our_encoding_is_theirs() -> None:
    one = message("order.created", headers={"a": 1}, properties={"priority": 3, "type": "t"})
    theirs = header.ContentHeader(
        body_size=2,
        properties=commands.Basic.Properties(
            content_type=one.content_type, headers=one.headers, delivery_mode=2, priority=3, message_id=one.message_id,
            timestamp=one.created_at, message_type="t",
        ),
    )  # fmt: skip
    assert marshal(theirs, 5)[7:-1] == content_header(one, 2, 0)
    assert publish_frame(5, "x", "y")[1:3] == b"\0\5"
    assert publish_frame(6, "x", "y")[1:3] == b"\0\6"


@pytest.mark.parametrize("size", [0, 1, 255, 256, 100_000])
@pytest.mark.parametrize("key", ["a", "order.created"])
def test_a_plain_message_is_theirs_from_end_to_end(size: int, key: str) -> None:
    plain = message(key, body=b"x" * size)
    properties = commands.Basic.Properties(
        content_type=plain.content_type, delivery_mode=2, message_id=plain.message_id, timestamp=plain.created_at
    )
    publish = commands.Basic.Publish(exchange=plain.exchange, routing_key=key, mandatory=True)
    head = header.ContentHeader(body_size=size, properties=properties)
    body = b"".join(marshal(ContentBody(plain.body[start : start + 256]), 5) for start in range(0, size, 256))
    assert b"".join(encode_one(plain, 0, 5, 256)) == marshal(publish, 5) + marshal(head, 5) + body
