"""The only AMQP of the relay: one write per batch, confirms as a watermark, one outcome for each message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Self

from aiormq.abc import ChannelFrame, ConfirmationFrameType
from aiormq.channel import Channel
from aiormq.connection import EXCEPTION_MAPPING, Connection, TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPError, ChannelClosed, ChannelNotFoundEntity, ConnectionClosed
from pamqp import commands, encode, header
from pamqp.frame import marshal
from yarl import URL

from outbox.config import RelaySettings
from outbox.errors import BrokerUnavailableError, ConfigurationError, ExchangeMissingError
from outbox.options import UNREADABLE
from outbox.store import ClaimedMessage
from outbox.tls import broker_tls

CONNECT_TIMEOUT = 10.0
CLOSE_TIMEOUT = 3.0
LONGEST_EXPIRATION = 315_360_000_000  # ms; on more than that the broker closes the channel
HEADER, BODY, FRAME_END, FRAME_OVERHEAD = 2, 3, b"\xce", 8
CONNECTION_FORCED = 320
CODES = {kind: code for code, kind in EXCEPTION_MAPPING.items()}
# At DEBUG they write whole messages, whoever runs the relay and however much that program logs.
for name in ("aio_pika", "aiormq"):
    logging.getLogger(name).setLevel(logging.INFO)
frame_head = struct.Struct(">BHI").pack
content_head = struct.Struct(">HHQH").pack
seconds = struct.Struct(">Q").pack
plain_size = struct.Struct(">QH").pack
plain_end = struct.Struct(">QcBHI").pack
PLAIN = 0x90C0  # has content type, delivery mode, message id, timestamp
UUID_LENGTH = 36


@dataclass(frozen=True, slots=True)
class Sent:
    """The broker took responsibility: it answered with a Basic.Ack."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A verdict about this message; it counts as an attempt unless the fault is the broker's."""

    error: str
    reason: str | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Unknown:
    """No verdict: it may or may not have arrived. `code` is the broker's, if one in flight made it cut off all."""

    error: str
    code: int = 0


Outcome = Sent | Failed | Unknown
SENT = Sent()
REFUSED = Failed("the broker refused it (Basic.Nack): a queue is full, or has lost its leader", counts=False)
UNROUTABLE = Failed("no queue is bound for this routing key", "unroutable")
EXPIRED = Failed("its time was over before it could be sent", "expired")
BEHIND = Unknown("not sent: one before it was not confirmed")


class Flight:
    """Messages that were written together, and what is known of each. Their delivery tags count up from `first`."""

    def __init__(self, messages: Sequence[ClaimedMessage], first: int) -> None:
        self.messages = messages
        self.first, self.end = first, first + len(messages)
        self.low = first  # the watermark: everything below is answered
        self.open = len(messages)
        self.outcomes: list[Outcome | None] = [None] * len(messages)
        self.done = asyncio.get_running_loop().create_future()

    def answer(self, begin: int, end: int, outcome: Outcome) -> None:
        """Gives the outcome to those tags from begin up to (not including) end that have none."""
        begin, end = max(begin, self.low), min(end, self.end)
        for place in range(begin - self.first, end - self.first):
            if self.outcomes[place] is None:
                self.outcomes[place] = outcome
                self.open -= 1
        if begin == self.low:
            self.low = max(self.low, end)
        if self.open == 0 and not self.done.done():
            self.done.set_result(None)


class ConfirmChannel(Channel):
    """A channel of the library that keeps a watermark instead of a future per message."""

    def __init__(self, connection: Connection, number: int) -> None:
        super().__init__(connection, number, publisher_confirms=True, frame_buffer=1000)
        self.flights: deque[Flight] = deque()
        self.next_tag = 1
        self.last_returned = 0
        self.answered = False
        self.moved = asyncio.Event()
        self.reason: Unknown | None = None  # why it is closed
        self.closing.add_done_callback(self._on_closed)

    def write(self, messages: Sequence[ClaimedMessage], payload: bytes) -> tuple[Flight, asyncio.Future[None]]:
        """Hands over the whole batch at once. The second value is done when the socket has taken it."""
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not waiting for a place: what is written after the answer to a Channel.Close ends the whole connection.
        self.write_queue.put_nowait(ChannelFrame(payload=payload, should_close=False, drain_future=drained))
        flight = Flight(messages, self.next_tag)
        self.next_tag = flight.end
        self.flights.append(flight)
        return flight, drained

    async def _on_confirm_frame(self, frame: ConfirmationFrameType) -> None:
        tag, multiple = frame.delivery_tag or 0, getattr(frame, "multiple", False)
        outcome = SENT if isinstance(frame, commands.Basic.Ack) else REFUSED
        for flight in self.flights:
            if flight.first <= tag:
                flight.answer(flight.first if multiple else tag, tag + 1, outcome)
        while self.flights and not self.flights[0].open:
            self.flights.popleft()
        self.answered = True
        self.moved.set()

    async def _on_return_frame(self, frame: commands.Basic.Return) -> None:
        head = await self._get_frame()
        assert isinstance(head, header.ContentHeader)
        returned = await self._read_content(frame, head)
        wire = (head.properties.message_id, frame.exchange, frame.routing_key, returned.body)
        # Returns come in the order of publishing, each before its ack. A message_id need not be unique.
        for flight in self.flights:
            for tag in range(max(flight.low, self.last_returned + 1), flight.end):
                message = flight.messages[tag - flight.first]
                sent = (message.message_id, message.exchange, message.routing_key, message.body)
                if sent == wire and flight.outcomes[tag - flight.first] is None:
                    self.last_returned = tag
                    flight.answer(tag, tag + 1, UNROUTABLE)
                    return
        raise ConnectionError("the broker returned a message that is not in flight")

    async def _on_close_frame(self, frame: commands.Channel.Close) -> None:
        self.reason = Unknown(" ".join((frame.reply_text or "the channel was closed").split()), frame.reply_code or 0)
        await super()._on_close_frame(frame)

    def _on_closed(self, closing: asyncio.Future[Any]) -> None:
        if self.reason is None:
            error = None if closing.cancelled() else closing.exception()
            self.reason = Unknown(describe(error), code_of(error))
        for flight in self.flights:
            flight.answer(flight.first, flight.end, self.reason)
        self.flights.clear()
        self.moved.set()


class Transport(TransportFactory):
    """Opens the socket, and keeps it in reach: to close politely may take longer than we can wait."""

    writer: asyncio.StreamWriter | None = None

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, self.writer = await factory.create(url, **kwargs)
        self.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return reader, self.writer


class Publisher:
    """One broker session of the relay. It is never repaired: what was in flight when it ended must be clear."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._transport = Transport()
        self.connection: Connection
        self._channel: ConfirmChannel
        self._turn = asyncio.Lock()
        self._late: dict[Flight, str] = {}
        self.proven = False  # it has confirmed something

    async def open(self, url: str, exchange: str) -> Self:
        """Fails unless the broker has the exchange."""
        try:
            at = URL(url).update_query(heartbeat=self._settings.heartbeat, name="outbox relay")
            self.connection = Connection(at, context=broker_tls(self._settings, at), transport_factory=self._transport)
        except ValueError as error:
            raise ConfigurationError(f"--amqp-url cannot be read: {UNREADABLE['amqp_url']}") from error
        try:
            async with within(CONNECT_TIMEOUT):
                await self.connection.connect()
                await self.connection.ready()
                await self._find_exchange(exchange)
                await self._open_channel(2)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        try:
            with contextlib.suppress(BrokerUnavailableError):
                async with within(CLOSE_TIMEOUT):
                    await self.connection.close()
        finally:
            self.abort()

    def abort(self) -> None:
        """Gives up on what is in flight: it becomes unknown at once."""
        if self._transport.writer is not None:
            self._transport.writer.transport.abort()

    @property
    def is_open(self) -> bool:
        return not self.connection.is_closed

    @property
    def trouble(self) -> str | None:
        """Why nothing may be sent for now: it would only be sent again after a reconnect, and then arrive twice."""
        if self._blocked:
            return "the broker has blocked the connection"
        return next(iter(self._late.values()), None)

    @property
    def lost(self) -> Unknown:
        return self._channel.reason or Unknown("the connection was lost")

    async def publish(
        self,
        messages: Sequence[ClaimedMessage],
        claimed_at: float,
        may_send: Callable[[], Awaitable[bool]],
        *,
        alone: bool = False,
    ) -> list[Outcome]:
        """Persistent and mandatory, in the given order, in one write; one outcome for each message.

        Waits while anything is in doubt, then asks whether the messages are still ours. Alone means that nothing else
        is in flight meanwhile: what the broker then closes, it closes because of these messages.
        """
        async with contextlib.AsyncExitStack() as turn:
            await turn.enter_async_context(self._turn)
            if not await self._ready(alone=alone):
                return [self.lost] * len(messages)
            if not await may_send():
                return [Unknown("the lease was lost")] * len(messages)
            channel, frame_max = self._channel, self.connection.connection_tune.frame_max
            outcomes, places, payload = encode_all(messages, monotonic() - claimed_at, channel.number, frame_max)
            if not places:
                return outcomes
            if channel.reason is not None or channel.write_queue.full():
                return [self.lost] * len(messages)
            flight, drained = channel.write([messages[place] for place in places], payload)
            if not alone:
                await turn.aclose()
            await self._answered(flight, drained)
        for place, outcome in zip(places, flight.outcomes, strict=True):
            assert outcome is not None
            outcomes[place] = outcome
        self.proven = self.proven or channel.answered
        return outcomes

    async def _ready(self, *, alone: bool) -> bool:
        """Waits until nothing is in doubt, or in flight at all. False: the connection is gone."""
        while self.is_open:
            channel = self._channel
            if channel.reason is not None:
                try:
                    # A new number: whether the broker has seen the end of an old one is not sure.
                    async with within(CONNECT_TIMEOUT):
                        await self._open_channel(channel.number + 1)
                except BrokerUnavailableError:
                    self.abort()
                    return False
            elif self.trouble is None and not (alone and channel.flights):
                return True
            else:
                channel.moved.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # nobody tells when the broker unblocks the connection
                        await channel.moved.wait()
        return False

    async def _answered(self, flight: Flight, drained: asyncio.Future[None]) -> None:
        """Returns when each message has an outcome. What comes late makes the session suspect: then we only wait."""
        limit, begun = self._settings.confirm_timeout, monotonic()
        try:
            first = {drained, flight.done}
            await asyncio.wait(first, timeout=self._settings.send_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not drained.done() and not flight.done.done():
                self._late[flight] = f"the socket did not drain in {self._settings.send_timeout:g} s"
            await asyncio.wait({flight.done}, timeout=begun + limit - monotonic())
            # A dead connection ends by itself when heartbeats stay away. One that lives, is not blocked and still does
            # not answer is of no more use.
            patience = monotonic() + limit
            while not flight.done.done():
                self._late[flight] = f"no confirm within {limit:g} s"
                await asyncio.wait({flight.done}, timeout=0.2)
                if self._blocked:
                    patience = monotonic() + limit
                elif monotonic() > patience:
                    self.abort()
        finally:
            drained.cancel()
            self._late.pop(flight, None)

    @property
    def _blocked(self) -> bool:
        unblocked: asyncio.Event = vars(self.connection)["_Connection__connection_unblocked"]
        return not unblocked.is_set()

    async def _open_channel(self, number: int) -> None:
        if number > (self.connection.connection_tune.channel_max or 65535):
            raise ConnectionError("all channel numbers are used up")
        channel = ConfirmChannel(self.connection, number)
        self.connection.channels[number] = channel
        await channel.open()
        self._channel = channel

    async def _find_exchange(self, name: str) -> None:
        passive = not self._settings.declare
        try:
            channel = await self.connection.channel(1, publisher_confirms=False)
            await channel.exchange_declare(name, exchange_type="topic", durable=True, passive=passive)
            await channel.close()
        except ChannelNotFoundEntity as error:
            raise ExchangeMissingError(
                f"the broker has no exchange {name!r}: create it, start with --declare to have it made,"
                " or name another with outbox.configure('default_exchange', ...)"
            ) from error
        except ChannelClosed as error:
            raise ConfigurationError(f"exchange {name!r} cannot be used: {describe(error)}") from error


def encode_all(
    messages: Sequence[ClaimedMessage], age: float, channel: int, frame_max: int
) -> tuple[list[Outcome], list[int], bytes]:
    """Returns an outcome for each message that cannot be sent, the places of all others, and the bytes of those."""
    outcomes: list[Outcome] = [SENT] * len(messages)
    places: list[int] = []
    parts: list[bytes] = []
    failed_keys: set[str | None] = set()
    for place, message in enumerate(messages):
        if failed_keys and message.key in failed_keys:
            outcomes[place] = BEHIND
            continue
        try:
            parts += encode_one(message, age, channel, frame_max - FRAME_OVERHEAD)
            places.append(place)
            continue
        except ExpiredError:
            outcomes[place] = EXPIRED
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            outcomes[place] = Failed(f"cannot be written as AMQP: {describe(error)}", "rejected")
        if message.key is not None:
            failed_keys.add(message.key)
    return outcomes, places, b"".join(parts)


def encode_one(message: ClaimedMessage, age: float, channel: int, most: int) -> list[bytes]:
    body, size = message.body, len(message.body)
    if 0 < size <= most and not message.headers and not message.properties and message.expires_in is None:
        # Most messages, in half the time.
        before, after = plain_frames(channel, message.exchange, message.routing_key, message.content_type)
        end = plain_end(int(message.created_at.timestamp()), FRAME_END, BODY, channel, size)
        return [before, plain_size(size, PLAIN), after, message.message_id.encode(), end, body, FRAME_END]
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
def plain_frames(channel: int, exchange: str, routing_key: str, content_type: str) -> tuple[bytes, bytes]:
    """What messages without options have in common: what comes before the size of the body, and after it."""
    kind = encode.short_string(content_type)
    length = len(content_head(60, 0, 0, 0) + kind + b"\x02\x24") + UUID_LENGTH + len(seconds(0))
    before = publish_frame(channel, exchange, routing_key) + frame_head(HEADER, channel, length) + b"\x00\x3c\x00\x00"
    return before, kind + b"\x02\x24"


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


@contextlib.asynccontextmanager
async def within(limit: float) -> AsyncIterator[None]:
    """What the library raises, or does not finish, when the broker is away."""
    try:
        async with asyncio.timeout(limit):
            yield
    except asyncio.CancelledError as error:  # also what a call gets that waits when the connection is lost
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerUnavailableError("the connection was lost") from error
    except (OSError, TimeoutError, AMQPError, RuntimeError) as error:
        raise BrokerUnavailableError(describe(error)) from error


def code_of(error: BaseException | None) -> int:
    """The broker's reply code, of which the library keeps the number only if it has no class for it.

    0 if no message is to blame: the connection was lost without a word, or an operator closed it.
    """
    if not isinstance(error, ConnectionClosed):
        return 0
    code = CODES.get(type(error)) or next((part for part in error.args if isinstance(part, int)), 0)
    return 0 if code == CONNECTION_FORCED else code


def describe(error: BaseException | None) -> str:
    return " ".join(str(error or "").split()) or (type(error).__name__ if error else "the connection was lost")
