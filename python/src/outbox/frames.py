"""A message as AMQP frames: persistent, mandatory, with all that it carries."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache

from pamqp import commands, encode
from pamqp.frame import marshal

from outbox.store import ClaimedMessage

LONGEST_EXPIRATION = 315_360_000_000  # ms; on more than that the broker closes the channel
HEADER, BODY, FRAME_END, FRAME_OVERHEAD = 2, 3, b"\xce", 8
frame_head = struct.Struct(">BHI").pack
content_head = struct.Struct(">HHQH").pack
seconds = struct.Struct(">Q").pack
PLAIN = 0x90C0  # has content type, delivery mode, message id, timestamp
UUID_LENGTH = 36


def encode_one(message: ClaimedMessage, age: float, channel: int, most: int) -> list[bytes]:
    """Frames with at most so many bytes in each. What has waited for age seconds since the claim has less time left."""
    body, size = message.body, len(message.body)
    if 0 < size <= most and not message.headers and not message.properties and message.expires_in is None:
        # Most messages, in half the time.
        before, pack, kind = plain_frames(channel, message.exchange, message.routing_key, message.content_type)
        created_at = int(message.created_at.timestamp())
        own = pack(size, PLAIN, kind, message.message_id.encode(), created_at, FRAME_END, BODY, channel, size)
        return [before, own, body, FRAME_END]
    head = content_header(message, size, age)
    if len(head) > most:
        raise ValueError("its headers do not fit into one frame")
    method = publish_frame(channel, message.exchange, message.routing_key)
    parts = [method, frame_head(HEADER, channel, len(head)), head, FRAME_END]
    for start in range(0, size, most):
        piece = body[start : start + most]
        parts += (frame_head(BODY, channel, len(piece)), piece, FRAME_END)
    return parts


@lru_cache(10_000)
def publish_frame(channel: int, exchange: str, routing_key: str) -> bytes:
    return marshal(commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True), channel)


@lru_cache(10_000)
def plain_frames(
    channel: int, exchange: str, routing_key: str, content_type: str
) -> tuple[bytes, Callable[..., bytes], bytes]:
    """What messages without options have in common: all before the size of the body, and how all up to it is packed."""
    kind = encode.short_string(content_type) + b"\x02\x24"  # persistent; the length of a UUID
    length = len(content_head(60, 0, 0, 0) + kind) + UUID_LENGTH + len(seconds(0))
    before = publish_frame(channel, exchange, routing_key) + frame_head(HEADER, channel, length) + b"\x00\x3c\x00\x00"
    return before, struct.Struct(f">QH{len(kind)}s{UUID_LENGTH}sQcBHI").pack, kind


def content_header(message: ClaimedMessage, size: int, age: float) -> bytes:
    """Properties in the order of their flags; every message has a type, delivery mode 2 (persistent), id and time."""
    flags, fields = PLAIN, encode.short_string(message.content_type)
    identity = b"\x24" + message.message_id.encode() + seconds(int(message.created_at.timestamp()))
    if message.headers:
        flags |= 0x2000
        fields += encode.field_table(message.headers)
    fields += b"\x02"
    given = message.properties or {}
    if "priority" in given:
        flags |= 0x0800
        fields += encode.octet(given["priority"])
    for name, flag in (("correlation_id", 0x0400), ("reply_to", 0x0200)):
        if name in given:
            flags |= flag
            fields += encode.short_string(given[name])
    if message.expires_in is not None:
        left = message.expires_in.total_seconds() - age
        if left <= 0:
            raise ExpiredError
        flags |= 0x0100
        fields += encode.short_string(str(min(max(int(left * 1000), 1), LONGEST_EXPIRATION)))
    fields += identity
    for name, flag in (("type", 0x0020), ("app_id", 0x0008)):
        if name in given:
            flags |= flag
            fields += encode.short_string(given[name])
    return content_head(60, 0, size, flags) + fields


class ExpiredError(Exception):
    """The message's life is over."""
