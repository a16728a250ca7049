"""Looking at the dead letters of a queue, putting them back, and throwing them away; over AMQP, as the worker does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import time
from typing import Any

from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelNotFoundEntity

from outbox.courier import (
    ATTEMPT_HEADER,
    EXPIRES_HEADER,
    ROUTING_KEY_HEADER,
    Address,
    Courier,
    connect,
    copied,
    unavailable,
)
from outbox.errors import BrokerUnavailableError, ConfigurationError
from outbox.listener import DEAD_SUFFIX

# What a worker wrote about its death; gone when it lives again.
OBITUARY = (ATTEMPT_HEADER, EXPIRES_HEADER, "x-outbox-dead-", "x-outbox-error", "x-outbox-queue")


class DeadLetter:
    """One message of the queue of dead letters, as it lies there."""

    def __init__(self, message: DeliveredMessage) -> None:
        self.message = message
        self.headers: dict[str, Any] = message.header.properties.headers or {}
        deaths = self.headers.get("x-death")
        # Written by the broker when it gave up: a message that came back too often.
        self._death: Any = deaths[0] if isinstance(deaths, list) and deaths else {}

    @property
    def message_id(self) -> str:
        return self.message.header.properties.message_id or ""

    @property
    def reason(self) -> str:
        return str(self.headers.get("x-outbox-dead-reason") or self._death.get("reason") or "")

    @property
    def routing_key(self) -> str:
        keys = self._death.get("routing-keys") or [self.message.routing_key]
        return str(self.headers.get(ROUTING_KEY_HEADER) or keys[0])

    @property
    def line(self) -> str:
        died = self.headers.get("x-outbox-dead-at") or self._death.get("time") or ""
        kind = self.headers.get("x-outbox-error-class", "")
        return "\t".join(map(str, (self.message_id, died, self.routing_key, self.reason, kind)))

    @property
    def whole(self) -> str:
        """Everything about it, the body last."""
        given = self.message.header.properties
        names = ("content_type", "correlation_id", "message_type", "app_id", "timestamp")
        properties = {name: getattr(given, name) for name in names if getattr(given, name)}
        facts = {"message_id": self.message_id, "routing_key": self.routing_key, **properties, **self.headers}
        lines = [f"{name}: {value}" for name, value in facts.items()]
        return "\n".join([*lines, "", self.message.body.decode(errors="replace"), ""])


class DeadLetters:
    """The dead letters of one queue; usable inside opened()."""

    def __init__(self, at: Address, queue: str) -> None:
        self._at, self._queue = at, queue.removesuffix(DEAD_SUFFIX)
        self._name = self._queue + DEAD_SUFFIX
        self._channel: Any = None
        self.count = 0  # when it was opened

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[DeadLetters]:
        connection = await connect(self._at, "outbox dlq")
        try:
            async with unavailable():
                opened = await connection.channel()
                self._channel = await opened.get_underlay_channel()
                self.count = (await self._channel.queue_declare(self._name, passive=True)).message_count
            yield self
        except BrokerUnavailableError as error:
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                raise ConfigurationError(f"the broker has no queue {self._name!r}") from error
            raise
        finally:
            await connection.close()  # what was looked at goes back

    async def each(self) -> AsyncIterator[DeadLetter]:
        """Those that were there at the beginning, first to last. Each stays in hand until the end."""
        for _ in range(self.count):
            async with unavailable():
                message = await self._channel.basic_get(self._name)
            if message.delivery_tag is None:
                return
            yield DeadLetter(message)

    async def requeue(self, chosen: Callable[[DeadLetter], bool]) -> int:
        """A confirmed copy to the queue, with all attempts before it, then away with the dead letter."""
        courier, count = Courier(self._at), 0
        try:
            async for letter in self.each():
                if not chosen(letter):
                    continue
                properties = copied(letter.message, None, time(), {ROUTING_KEY_HEADER: letter.routing_key})
                given = properties.headers or {}
                properties.headers = {name: value for name, value in given.items() if not name.startswith(OBITUARY)}
                await courier.publish("", self._queue, properties, letter.message.body)
                async with unavailable():
                    await self._channel.basic_ack(letter.message.delivery_tag)
                count += 1
            async with unavailable():
                await self._channel.queue_declare(self._name, passive=True)  # answered after the acknowledgements
        finally:
            await courier.close()
        return count

    async def purge(self) -> int:
        async with unavailable():
            return int((await self._channel.queue_purge(self._name)).message_count or 0)
