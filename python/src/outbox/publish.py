"""The only AMQP of the relay: publish a batch and say, message by message, what the broker answered."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import UUID

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import ChannelClosed, ChannelNotFoundEntity, DeliveryError, PublishError
from pamqp.commands import Basic

from outbox.config import RelaySettings
from outbox.errors import BrokerUnavailableError, ConfigurationError, ExchangeMissingError
from outbox.store import ClaimedMessage

CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Sent:
    """The broker took responsibility: it answered with a Basic.Ack."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The broker's verdict about this message."""

    error: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """No verdict: the message may or may not have arrived, and must be sent again."""

    error: str
    closed: ChannelClosed | None = None


Outcome = Sent | Failed | Unknown


class Publisher:
    """One broker session of the relay: `async with Publisher(settings) as publisher`."""

    def __init__(self, settings: RelaySettings) -> None:
        self._settings = settings
        self._connection: AbstractConnection
        self._channel: AbstractChannel
        self._in_doubt = False

    async def __aenter__(self) -> Self:
        # A plain connection: one that repairs itself hides which confirms were lost.
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self._connection = await aio_pika.connect(self._settings.amqp_url, heartbeat=self._settings.heartbeat)
        except ValueError as error:
            raise ConfigurationError("--amqp-url cannot be read: write it as amqp://user@host:5672/vhost") from error
        except (OSError, TimeoutError) as error:  # AMQPConnectionError is an OSError
            raise BrokerUnavailableError(describe(error)) from error
        try:
            await self._find_exchange()
            await self._open_channel()
        except BaseException:
            await self._connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    @property
    def is_open(self) -> bool:
        return not (self._in_doubt or self._connection.is_closed or self._channel.is_closed)

    async def publish(self, messages: Sequence[ClaimedMessage], *, carefully: bool = False) -> list[Outcome]:
        """Persistent and mandatory, in the given order; one outcome for each message.

        The broker answers one bad message by closing the channel, or the connection, on all that are in flight.
        Carefully means one by one: then it is clear which message was meant.
        """
        deadline = monotonic() + self._settings.confirm_timeout
        if carefully:
            return await self._publish_one_by_one(messages, deadline)
        outcomes: list[Outcome] = []
        for wave in waves(messages):
            outcomes += await asyncio.gather(*(self._publish(message, deadline) for message in wave))
        return outcomes

    async def _publish_one_by_one(self, messages: Sequence[ClaimedMessage], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        failed_keys: set[str | None] = set()
        for message in messages:
            outcome: Outcome = Unknown("not sent")
            if message.key not in failed_keys and not self._in_doubt and not self._connection.is_closed:
                outcome = await self._publish(message, deadline)
            if isinstance(outcome, Unknown) and outcome.closed:
                missing = isinstance(outcome.closed, ChannelNotFoundEntity)
                outcome = Failed(outcome.error, "unroutable" if missing else None)
                await self._reopen_channel()
            if isinstance(outcome, Failed) and message.key is not None:
                failed_keys.add(message.key)
            outcomes.append(outcome)
        return outcomes

    async def _publish(self, message: ClaimedMessage, deadline: float) -> Outcome:  # noqa: PLR0911 - one for each answer
        try:
            exchange = await self._channel.get_exchange(message.exchange, ensure=False)
            answer = await exchange.publish(
                to_amqp(message), message.routing_key, mandatory=True, timeout=max(deadline - monotonic(), 0)
            )
        except PublishError:
            return Failed("no queue is bound for this routing key", "unroutable")
        except DeliveryError as error:
            return Failed(f"the broker answered {error.frame.name}")
        except ChannelClosed as error:
            return Unknown(describe(error), error)
        except TimeoutError:
            self._in_doubt = True  # the session is of no more use: its late confirms would belong to nobody
            return Unknown(f"no confirm within {self._settings.confirm_timeout:g} s")
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            return Failed(f"cannot be written as AMQP: {describe(error)}", "rejected")
        except asyncio.CancelledError:
            # Also what a waiting publish gets when the connection dies.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Unknown("the connection was lost")
        except Exception as error:  # noqa: BLE001 - whatever is no verdict is unknown
            return Unknown(describe(error))
        return Sent() if isinstance(answer, Basic.Ack) else Unknown(f"unexpected answer {answer!r}")

    async def _reopen_channel(self) -> None:
        try:
            await self._open_channel()
        except BrokerUnavailableError:
            self._in_doubt = True

    async def _open_channel(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        except Exception as error:
            raise BrokerUnavailableError(describe(error)) from error

    async def _find_exchange(self) -> None:
        name, declare = self._settings.exchange, self._settings.declare
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT), self._connection.channel() as channel:
                await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC, durable=True, passive=not declare)
        except ChannelNotFoundEntity as error:
            raise ExchangeMissingError(
                f"the broker has no exchange {name!r}: create it, start with --declare to have it made,"
                " or name another one with --exchange"
            ) from error
        except ChannelClosed as error:
            raise ConfigurationError(f"exchange {name!r} cannot be used: {describe(error)}") from error
        except Exception as error:
            raise BrokerUnavailableError(describe(error)) from error


def waves(messages: Sequence[ClaimedMessage]) -> Iterator[list[ClaimedMessage]]:
    """The library finds a returned message by its message_id, so two with the same one never fly together."""
    wave: dict[UUID, ClaimedMessage] = {}
    for message in messages:
        if message.message_id in wave:
            yield list(wave.values())
            wave = {}
        wave[message.message_id] = message
    yield list(wave.values())


def to_amqp(message: ClaimedMessage) -> aio_pika.Message:
    return aio_pika.Message(
        message.body,
        message_id=str(message.message_id),
        timestamp=message.created_at,
        content_type=message.content_type,
        headers=message.headers,
        expiration=message.expires_in,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        **(message.properties or {}),
    )


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
