"""What the broker says of each message: confirms as a watermark, returns, and why a channel was closed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiormq.abc import ChannelFrame, ConfirmationFrameType
from aiormq.channel import Channel
from aiormq.connection import EXCEPTION_MAPPING, Connection
from aiormq.exceptions import ConnectionClosed
from pamqp import commands, header

from outbox.store import ClaimedMessage

CONNECTION_FORCED = 320
CODES = {kind: code for code, kind in EXCEPTION_MAPPING.items()}


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
