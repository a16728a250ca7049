"""The relay's session with the broker: one write per batch, one outcome for each message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Self

from aiormq.connection import Connection, TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPError, ChannelClosed, ChannelNotFoundEntity
from yarl import URL

from outbox.config import RelaySettings
from outbox.confirms import BEHIND, EXPIRED, SENT, ConfirmChannel, Failed, Flight, Outcome, Unknown, describe
from outbox.errors import BrokerUnavailableError, ConfigurationError, ExchangeMissingError
from outbox.frames import FRAME_OVERHEAD, ExpiredError, encode_one
from outbox.options import UNREADABLE
from outbox.store import ClaimedMessage
from outbox.tls import broker_tls

CONNECT_TIMEOUT = 10.0
CLOSE_TIMEOUT = 3.0
# At DEBUG they write whole messages, whoever runs the relay and however much that program logs.
for name in ("aio_pika", "aiormq"):
    logging.getLogger(name).setLevel(logging.INFO)


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

        Waits while anything is in doubt or too much in flight, then asks whether the messages are still ours. Alone
        means that nothing else is in flight meanwhile: what the broker closes, it closes because of these messages.
        """
        async with contextlib.AsyncExitStack() as turn:
            await turn.enter_async_context(self._turn)
            if not await self._ready(len(messages), alone=alone):
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

    async def _ready(self, count: int, *, alone: bool) -> bool:
        """Waits until nothing is in doubt and so many more may be in flight. False: the connection is gone."""
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
            elif self.trouble is not None or (alone and channel.flights):
                channel.moved.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # nobody tells when the broker unblocks the connection
                        await channel.moved.wait()
            elif channel.flights and not self._fits(count):
                await asyncio.wait({channel.flights[0].done}, timeout=0.2)
            else:
                return True
        return False

    def _fits(self, count: int) -> bool:
        """A batch of the window stays here: a broker that confirms all it has at once need not wait for a claim."""
        most = max(self._settings.window - self._settings.batch_size, 2 * self._settings.batch_size)
        return sum(flight.open for flight in self._channel.flights) + count <= most

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
