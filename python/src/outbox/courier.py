"""The worker's second connection, for copies (retries and dead letters) and for what must exist on the broker.

Apart from the consumers', because an alarm blocks connections that publish. A copy counts once it is confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import aio_pika
from aio_pika.abc import AbstractConnection
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    ProbableAuthenticationError,
    PublishError,
)
from pamqp.commands import Basic
from yarl import URL

from outbox.confirms import describe
from outbox.errors import BrokerUnavailableError, ConfigurationError
from outbox.options import UNREADABLE
from outbox.tls import broker_tls
from outbox.topology import Topology

ATTEMPT_HEADER = "x-outbox-attempt"
ROUTING_KEY_HEADER = "x-outbox-routing-key"
EXPIRES_HEADER = "x-outbox-expires-at"
USER_HEADER = "x-outbox-user-id"
PERSISTENT = 2
ANSWER_TIMEOUT = 10.0
CLOSE_TIMEOUT = 3.0
# The broker's own. A copy that brought them along would be taken for one that goes round in circles, and dropped.
BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count", "CC", "BCC")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the broker is, and which certificates count. Of several, with commas between, the first that answers."""

    url: str = field(repr=False)
    heartbeat: int
    amqp_ca: str = ""
    amqp_cert: str = ""
    amqp_key: str = ""
    lent: AbstractConnection | None = None  # what it says of TLS holds for other connections too

    @property
    def urls(self) -> list[URL]:
        try:
            return [URL(one.strip()) for one in self.url.split(",")]
        except ValueError as error:
            raise ConfigurationError(f"amqp_url cannot be read: {UNREADABLE['amqp_url']}") from error

    def tls(self, url: URL) -> ssl.SSLContext | None:
        if self.lent is not None:
            context: ssl.SSLContext | None = getattr(self.lent, "kwargs", {}).get("context")
            return context
        return broker_tls(self, url)


async def connect(at: Address, name: str) -> AbstractConnection:
    """A plain connection: what is lost is made anew by whoever uses it, so that nothing waits inside a library."""
    *others, last = at.urls
    for url in others:
        with contextlib.suppress(BrokerUnavailableError):
            return await connect_to(at, url, name)
    return await connect_to(at, last, name)


async def connect_to(at: Address, url: URL, name: str) -> AbstractConnection:
    context = at.tls(url)
    try:
        async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
            return await aio_pika.connect(
                url, heartbeat=at.heartbeat, ssl_context=context, client_properties={"connection_name": name}
            )
    except ValueError as error:
        raise ConfigurationError(f"amqp_url cannot be read: {UNREADABLE['amqp_url']}") from error


def is_lost(connection: AbstractConnection) -> bool:
    """Also one that ended without having been closed, of which the library's own word for it knows nothing."""
    return connection.is_closed or connection.transport is None or connection.transport.connection.is_closed


class unavailable:  # noqa: N801 - used like a function
    """Around calls of the library: whatever it raises when the broker is away, or has closed a channel."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, asyncio.CancelledError):  # also what a call gets that waits when the connection is lost
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise BrokerUnavailableError("the connection was lost") from error
        elif isinstance(error, AuthenticationError | ProbableAuthenticationError):
            raise LoginError(f"the broker refuses the login: {describe(error)}") from error
        elif isinstance(error, OSError | TimeoutError | AMQPError | RuntimeError):
            raise BrokerUnavailableError(describe(error)) from error


class LoginError(ConfigurationError):
    """The broker refuses the user or the password."""


class NotTakenError(BrokerUnavailableError):
    """The broker is there and has not taken the copy: no queue, no right, no room."""


class Courier:
    def __init__(self, at: Address) -> None:
        self._at = at
        self._connection: AbstractConnection | None = None
        # One for copies; one for questions, which the broker answers by closing the channel if it says no.
        self._channels: dict[str, Any] = {}
        self._opening = asyncio.Lock()
        # The library tells a returned message by its message_id: two copies with one id take turns.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(self, exchange: str, routing_key: str, properties: Basic.Properties, body: bytes) -> None:
        """Returns when the broker has confirmed a persistent, routed copy.

        Without a limit of time: a broker that blocks takes it later, and who sends again sends it twice. A dead
        connection ends when its heartbeats stay away.
        """
        turn = self._turns.setdefault(properties.message_id or "", asyncio.Lock())
        async with turn:
            channel = await self._channel("copies")
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
                    raise NotTakenError(f"exchange {exchange!r}: {describe(cause)}") from error
                raise
            if not isinstance(confirmed, Basic.Ack):
                raise NotTakenError(f"exchange {exchange!r}: not confirmed")

    async def look(self, queue: str) -> tuple[int, int]:
        """How many messages are in a queue, and how many consumers it has."""
        channel = await self._channel("questions")
        async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
            found = await channel.queue_declare(queue, passive=True)
        return found.message_count or 0, found.consumer_count or 0

    async def prepare(self, topology: Topology, *, declare: bool) -> None:
        """Makes what must exist, or only looks whether it does, and then names all that is missing."""
        missing = []
        for exchange in topology.exchanges:
            name = exchange.name
            call = {"exchange_type": exchange.kind, "durable": True, "passive": not declare}
            missing += await self._ask(f"exchange {name!r}", "exchange_declare", name, **call)
        for queue in topology.queues:
            call = {"durable": True, "arguments": queue.arguments, "passive": not declare}
            missing += await self._ask(f"queue {queue.name!r}", "queue_declare", queue.name, **call)
        if missing:
            raise ConfigurationError(
                f"the broker lacks {', '.join(missing)}: `outbox topology` writes down what is needed;"
                " or pass declare=True to have it made"
            )
        if declare:
            for one in topology.bindings:
                name = f"binding of queue {one.queue!r} to exchange {one.exchange!r}"
                await self._ask(name, "queue_bind", one.queue, one.exchange, routing_key=one.routing_key)

    async def _ask(self, what: str, call: str, *args: Any, **kwargs: Any) -> list[str]:
        channel = await self._channel("questions")
        try:
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await getattr(channel, call)(*args, **kwargs)
        except BrokerUnavailableError as error:
            match error.__cause__:
                case ChannelNotFoundEntity() if kwargs.get("passive"):
                    return [what]
                case ChannelPreconditionFailed() as cause:
                    raise ConfigurationError(
                        f"{what} differs from what is needed: {describe(cause)}; delete it, or use another name"
                    ) from error
                case ChannelAccessRefused() as cause:
                    raise ConfigurationError(
                        f"{what} is refused: {describe(cause)}; grant that, or have it made and pass declare=False"
                    ) from error
            raise
        return []

    async def _channel(self, name: str) -> Any:
        """The channel, made anew if it is gone."""
        async with self._opening:
            if self._connection is None or is_lost(self._connection):
                self._connection = await connect(self._at, "outbox worker, copies")
                self._channels.clear()
            channel = self._channels.get(name)
            if channel is None or channel.is_closed:
                async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                    opened = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
                    channel = self._channels[name] = await opened.get_underlay_channel()
            return channel

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._connection.close()


def copied(message: DeliveredMessage, user: str | None, came: float, more: Mapping[str, Any]) -> Basic.Properties:
    """All properties of a message for its copy: persistent, with more headers; its expiration counts from came on."""
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
        headers[EXPIRES_HEADER] = round(came * 1000) + int(given.expiration)
    found.headers = headers | dict(more)
    return found
