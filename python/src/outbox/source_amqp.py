"""Consuming from RabbitMQ: sessions that are made anew when lost, and what becomes of each message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

from aio_pika import IncomingMessage
from aio_pika.abc import AbstractConnection
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed
from pamqp.commands import Basic

from outbox.courier import ATTEMPT_HEADER, EXPIRES_HEADER, ROUTING_KEY_HEADER, Courier, connect, copied, unavailable
from outbox.errors import BrokerUnavailableError, ConfigurationError
from outbox.handle import DONE, Dead, Done, Failed, Handling, Incoming, Outcome, next_delay
from outbox.listener import Listener
from outbox.relay import jittered
from outbox.topology import Topology, dead_letter_exchange, delay_name

logger = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_LAST = 0.2, 10.0
ANSWER_TIMEOUT = 10.0
CHECK_EVERY = 30.0
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpSettings:
    url: str
    exchange: str
    retry_delays: tuple[float, ...]
    prefetch_count: int
    declare: bool
    heartbeat: int
    shutdown: float
    connection: AbstractConnection | None = None


@dataclass(eq=False, slots=True)
class Delivery:
    """A message in our hands, and the channel on which it is to be acknowledged."""

    listener: Listener
    message: DeliveredMessage
    channel: Any
    raw: IncomingMessage | None = None

    def as_aio_pika(self) -> IncomingMessage:
        if self.raw is None:
            self.raw = IncomingMessage(self.message)
        return self.raw

    @property
    def headers(self) -> dict[str, Any]:
        return self.message.header.properties.headers or {}

    @property
    def attempt(self) -> int:
        found = self.headers.get(ATTEMPT_HEADER)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def returned(self) -> int:
        """How often it has come back to a quorum queue; each time, a worker may have died of it."""
        found = self.headers.get("x-delivery-count")
        return found if isinstance(found, int) else 0

    @property
    def expires_at(self) -> float:
        found = self.headers.get(EXPIRES_HEADER)
        return found / 1000 if isinstance(found, int) else NEVER


class AmqpSource:
    def __init__(
        self, settings: AmqpSettings, topology: Topology, listeners: Sequence[Listener], handling: Handling
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._listeners = listeners
        self._handling = handling
        self._courier = Courier(settings.url, settings.heartbeat)
        self._user = unquote(urlsplit(settings.url).username or "guest")
        self._ready_made = settings.connection
        self._stopping = asyncio.Event()
        self.ready = asyncio.Event()  # set while it consumes
        self._lost = asyncio.Event()
        self._running: dict[asyncio.Task[None], Delivery] = {}
        self._alone = asyncio.Condition()
        self._one_alone = False
        self._error: BaseException | None = None
        self._trouble: str | None = None

    def stop(self) -> None:
        self._stopping.set()
        self._lost.set()

    async def run(self) -> None:
        seconds, started = BACKOFF_FIRST, False
        try:
            while not self._stopping.is_set():
                try:
                    await self._session()
                    seconds, started = BACKOFF_FIRST, True
                except BrokerUnavailableError as error:
                    self._report(str(error))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(jittered(seconds)):
                            await self._stopping.wait()
                    seconds = min(seconds * 2, BACKOFF_LAST)
                if self._error is not None:
                    raise self._error
        finally:
            await self._finish()
            await self._courier.close()

    # --- one session

    async def _session(self) -> None:
        """Returns when it is time to stop; raises when the session is lost."""
        self._lost.clear()
        self.ready.clear()
        if self._stopping.is_set():
            return
        if self._ready_made is not None and not self._ready_made.is_closed:
            connection, ours = self._ready_made, False
        else:
            connection = await connect(self._settings.url, self._settings.heartbeat, "outbox worker")
            ours = True
        self._ready_made = None
        channel: Any = None
        try:
            await self._make_topology()
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                opened = await connection.channel(publisher_confirms=False)
                opened.close_callbacks.add(lambda *_: self._lost.set())
                channel = await opened.get_underlay_channel()
                channel.on_consumer_cancel_callbacks.add(self._cancelled)
                await channel.basic_qos(prefetch_count=self._settings.prefetch_count)
            await self._begin(channel)
            self._report(None)
            self.ready.set()
            logger.info("worker ready", extra={"action": "ready", "queues": len(self._listeners)})
            while not self._lost.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_EVERY):
                        await self._lost.wait()
                        break
                await self._check()
            if not self._stopping.is_set():
                raise BrokerUnavailableError("the channel or a consumer was lost")
            await self._drain(channel)
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(3):
                    if ours:
                        await connection.close()
                    elif channel is not None:
                        await channel.close()

    async def _begin(self, channel: Any) -> None:
        """First what came back, each alone and with nothing else in our hands: should it kill us, only it is counted."""
        held: list[Delivery] = []
        for listener in self._listeners:
            while not self._stopping.is_set():
                async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                    message = await channel.basic_get(listener.queue)
                if message.delivery_tag is None:
                    break
                delivery = Delivery(listener, message, channel)
                if not delivery.returned:
                    held.append(delivery)
                    break
                for one in held:
                    self._start(one)
                held.clear()
                await self._idle()
                self._start(delivery)
                await self._idle()
        for one in held:
            self._start(one)
        for listener in self._listeners:
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await channel.basic_consume(listener.queue, self._receiver(listener, channel))

    def _receiver(self, listener: Listener, channel: Any) -> Callable[[DeliveredMessage], Any]:
        async def receive(message: DeliveredMessage) -> None:
            self._start(Delivery(listener, message, channel))

        return receive

    def _start(self, delivery: Delivery) -> None:
        # A task of our own: those of the channel are cancelled with it.
        task = asyncio.get_running_loop().create_task(self._deliver(delivery))
        self._running[task] = delivery
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._lost.set()

    async def _idle(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _cancelled(self, frame: Any) -> None:
        logger.warning(
            "the broker has cancelled a consumer", extra={"action": "cancelled", "consumer": frame.consumer_tag}
        )
        self._lost.set()

    async def _check(self) -> None:
        """A consumer that the broker does not know of would wait for ever."""
        channel = await self._courier.channel()
        for listener in self._listeners:
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                found = await channel.queue_declare(listener.queue, passive=True)
            if not found.consumer_count:
                raise BrokerUnavailableError(f"queue {listener.queue!r} has no consumer any more")

    async def _drain(self, channel: Any) -> None:
        """No more messages; those that came meanwhile go back."""
        for tag in list(channel.consumers):
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await channel.basic_cancel(tag)
        await self._finish()

    async def _finish(self) -> None:
        """Lets what runs end; what does not end in time is given back by closing."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.shutdown)
        for task, delivery in list(self._running.items()):
            logger.warning(
                "stopped before a listener had ended: its message comes again",
                extra={"action": "stop", "queue": delivery.listener.queue},
            )
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=1)

    # --- one message

    async def _deliver(self, delivery: Delivery) -> None:
        if self._stopping.is_set():
            await self._give_back(delivery)
            return
        if delivery.expires_at < time():
            outcome: Outcome = Dead("expired", "", "its time was over before it could be handled again")
        else:
            outcome = await self._handling(delivery.listener, self._incoming(delivery))
        await self._settle(delivery, outcome)

    def _incoming(self, delivery: Delivery) -> Incoming:
        message = delivery.message
        headers = delivery.headers
        return Incoming(
            message.body,
            headers.get(ROUTING_KEY_HEADER) or message.routing_key or "",
            message.header.properties.message_id,
            headers,
            delivery.attempt,
            delivery.as_aio_pika,
        )

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """The copy first, confirmed; then the acknowledgement."""
        if not isinstance(outcome, Done):
            exchange, properties = self._copy(delivery, outcome)
            await self._publish(exchange, delivery.listener.queue, properties, delivery.message.body)
        await self._ack(delivery)

    def _copy(self, delivery: Delivery, outcome: Failed | Dead) -> tuple[str, Basic.Properties]:
        """To a delay, or to the dead letters."""
        settings, listener = self._settings, delivery.listener
        given = settings.retry_delays if listener.retry_delays is None else tuple(listener.retry_delays)
        attempt = delivery.attempt
        fields = {"action": "retry", "queue": listener.queue, "message_id": delivery.message.header.properties.message_id,
                  "attempt": attempt, "error": outcome.kind}  # fmt: skip
        if isinstance(outcome, Failed):
            delay = next_delay(attempt, given) if outcome.counts else next(iter(given), None)
            if delay is None:
                outcome = Dead("max_attempts", outcome.kind, outcome.text)
            else:
                properties = copied(delivery.message, self._user, {ATTEMPT_HEADER: attempt + outcome.counts})
                expires_at = (properties.headers or {}).get(EXPIRES_HEADER, NEVER)
                if not isinstance(expires_at, int | float) or time() + delay <= expires_at / 1000:
                    logger.warning("listener failed, trying again", extra=fields | {"delay": delay})
                    return delay_name(settings.exchange, delay), properties
                outcome = Dead("expired", outcome.kind, outcome.text)
        logger.warning("dead letter", extra=fields | {"action": "dead", "reason": outcome.reason})
        more = {
            ATTEMPT_HEADER: attempt,
            "x-outbox-dead-reason": outcome.reason,
            "x-outbox-dead-at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "x-outbox-queue": listener.queue,
        }
        if outcome.kind:
            more["x-outbox-error-class"] = outcome.kind
        if outcome.text:
            more["x-outbox-error"] = outcome.text
        return dead_letter_exchange(settings.exchange), copied(delivery.message, self._user, more)

    async def _publish(self, exchange: str, queue: str, properties: Basic.Properties, body: bytes) -> None:
        """Until it gets through: the original stays in our hands, and nobody handles it a second time meanwhile."""
        seconds = BACKOFF_FIRST
        while True:
            try:
                await self._courier.publish(exchange, queue, properties, body)
            except BrokerUnavailableError as error:
                self._report(str(error))
                await asyncio.sleep(jittered(seconds))
                seconds = min(seconds * 2, BACKOFF_LAST)
                if self._settings.declare:
                    with contextlib.suppress(BrokerUnavailableError):
                        await self._make_topology()
            else:
                self._report(None)
                return

    async def _ack(self, delivery: Delivery) -> None:
        if delivery.raw is not None and delivery.raw.processed:
            return  # the listener did it
        try:
            async with unavailable():
                await delivery.channel.basic_ack(delivery.message.delivery_tag)
        except BrokerUnavailableError as error:
            logger.warning(
                "could not acknowledge a message: it comes again",
                extra={"action": "ack", "queue": delivery.listener.queue, "error": str(error)},
            )

    async def _give_back(self, delivery: Delivery) -> None:
        with contextlib.suppress(BrokerUnavailableError):
            async with unavailable():
                await delivery.channel.basic_nack(delivery.message.delivery_tag, requeue=True)

    # --- beside

    async def _make_topology(self) -> None:
        """Declares it, or looks whether it is there; names all that is missing."""
        passive, missing = not self._settings.declare, []
        for exchange in self._topology.exchanges:
            call = {"exchange_type": exchange.kind, "durable": True, "passive": passive}
            missing += await self._ask("exchange", exchange.name, "exchange_declare", exchange.name, **call)
        for queue in self._topology.queues:
            call = {"durable": True, "arguments": queue.arguments, "passive": passive}
            missing += await self._ask("queue", queue.name, "queue_declare", queue.name, **call)
        if missing:
            raise ConfigurationError(
                f"the broker lacks {', '.join(missing)}: `outbox topology` writes what is needed, or pass declare=True"
            )
        if not passive:
            for one in self._topology.bindings:
                await self._ask("queue", one.queue, "queue_bind", one.queue, one.exchange, routing_key=one.routing_key)

    async def _ask(self, what: str, name: str, call: str, *args: Any, **kwargs: Any) -> list[str]:
        channel = await self._courier.channel()
        try:
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await getattr(channel, call)(*args, **kwargs)
        except BrokerUnavailableError as error:
            cause = error.__cause__
            if isinstance(cause, ChannelNotFoundEntity):
                return [f"{what} {name!r}"]
            if isinstance(cause, ChannelPreconditionFailed):
                raise ConfigurationError(
                    f"{what} {name!r} exists and is not what it must be: {cause}. Delete it, or use other names"
                ) from error
            if isinstance(cause, ChannelAccessRefused):
                raise ConfigurationError(
                    f"{what} {name!r} may not be made by this user: {cause}. Have it made, and pass declare=False"
                ) from error
            raise
        return []

    def _report(self, problem: str | None) -> None:
        """One line for each change."""
        if problem is not None and self._trouble is None:
            logger.warning(
                "broker unavailable, trying again", extra={"action": "trouble", "what": "broker", "error": problem}
            )
        self._trouble = problem


__all__ = ["DONE", "AmqpSettings", "AmqpSource"]
