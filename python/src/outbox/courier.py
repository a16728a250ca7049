"""Publishes copies for the worker, retries and dead letters, on a connection of its own: an alarm that blocks publishers
then leaves the consumers alone. A copy counts once the broker has confirmed it; before that nothing is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from time import time
from typing import Any
from weakref import WeakValueDictionary

import aio_pika
import aiormq
from aio_pika.abc import AbstractConnection
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import AMQPError, ChannelClosed, DeliveryError, PublishError
from pamqp.commands import Basic

from outbox.errors import BrokerUnavailableError, ConfigurationError
from outbox.publish import describe

ATTEMPT_HEADER = "x-outbox-attempt"
ROUTING_KEY_HEADER = "x-outbox-routing-key"
EXPIRES_HEADER = "x-outbox-expires-at"
USER_HEADER = "x-outbox-user-id"
PERSISTENT = 2
CONNECT_TIMEOUT = 10.0
# The broker writes these itself. A copy that brought them along would be taken for one that goes round in circles, and dropped.
BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "CC", "BCC")


async def connect(url: str, heartbeat: int, name: str) -> AbstractConnection:
    """A plain connection: what is lost is made anew by whoever uses it, so that nothing waits inside a library."""
    try:
        async with unavailable(), asyncio.timeout(CONNECT_TIMEOUT):
            return await aio_pika.connect(url, heartbeat=heartbeat, client_properties={"connection_name": name})
    except ValueError as error:
        raise ConfigurationError("amqp_url cannot be read: write it as amqp://user@host:5672/vhost") from error


@contextlib.asynccontextmanager
async def unavailable() -> AsyncIterator[None]:
    """Whatever the library raises when the broker is away, or has closed a channel."""
    try:
        yield
    except asyncio.CancelledError as error:  # also what a call gets that waits when the connection is lost
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerUnavailableError("the connection was lost") from error
    except (aiormq.exceptions.AuthenticationError, aiormq.exceptions.ProbableAuthenticationError) as error:
        raise ConfigurationError(f"the broker refuses the login: {describe(error)}") from error
    except (OSError, TimeoutError, AMQPError, RuntimeError) as error:
        raise BrokerUnavailableError(describe(error)) from error


class NotTakenError(BrokerUnavailableError):
    """The broker is there and has not taken the copy: no queue, no right, no room."""


class Courier:
    def __init__(self, url: str, heartbeat: int) -> None:
        self._url, self._heartbeat = url, heartbeat
        self._connection: AbstractConnection | None = None
        self._channel: Any = None
        self._opening = asyncio.Lock()
        # The library tells a returned message by its message_id: two copies with one id take turns.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, exchange: str, routing_key: str, properties: Basic.Properties, body: bytes) -> None:
        """Returns when the broker has confirmed a persistent, routed copy. No limit of time: a blocked broker takes it later,
        and whoever gives up and sends again sends twice. A dead connection ends by its heartbeats."""
        turn = self._turns.setdefault(properties.message_id or "", asyncio.Lock())
        async with turn:
            channel = await self.channel()
            try:
                async with unavailable():
                    confirmed = await channel.basic_publish(
                        body, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=True
                    )
            except BrokerUnavailableError as error:
                cause = error.__cause__
                if isinstance(cause, PublishError):
                    raise NotTakenError(f"no queue takes what is sent to exchange {exchange!r}") from error
                if isinstance(cause, DeliveryError | ChannelClosed):
                    raise NotTakenError(describe(cause)) from error
                raise
            if not isinstance(confirmed, Basic.Ack):
                raise NotTakenError("the broker has not confirmed it")

    async def channel(self) -> Any:
        """The channel, made anew if it is gone."""
        async with self._opening:
            if self._connection is None or self._connection.is_closed:
                self._connection = await connect(self._url, self._heartbeat, "outbox worker, copies")
                self._channel = None
            if self._channel is None or self._channel.is_closed:
                async with unavailable(), asyncio.timeout(CONNECT_TIMEOUT):
                    opened = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
                    self._channel = await opened.get_underlay_channel()
            return self._channel

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(3):
                    await self._connection.close()


def copied(message: DeliveredMessage, user: str | None, more: Mapping[str, Any]) -> Basic.Properties:
    """All properties of a message, for its copy: persistent, without an expiration of its own, and with more headers."""
    given = message.header.properties
    headers = {
        name: bytearray(value) if isinstance(value, bytes) else value
        for name, value in (given.headers or {}).items()
        if not name.startswith(BROKERS_OWN)
    }
    headers.setdefault(ROUTING_KEY_HEADER, message.routing_key or "")
    found = Basic.Properties(
        content_type=given.content_type,
        content_encoding=given.content_encoding,
        priority=given.priority,
        correlation_id=given.correlation_id,
        reply_to=given.reply_to,
        message_id=given.message_id,
        timestamp=given.timestamp,
        message_type=given.message_type,
        app_id=given.app_id,
        delivery_mode=PERSISTENT,
    )
    if given.user_id is not None and given.user_id == user:
        found.user_id = given.user_id
    elif given.user_id is not None:
        headers.setdefault(USER_HEADER, given.user_id)  # as the property it would have to be ours
    if given.expiration is not None and EXPIRES_HEADER not in headers and given.expiration.isdigit():
        headers[EXPIRES_HEADER] = round(time() * 1000) + int(given.expiration)
    found.headers = headers | dict(more)
    return found
