"""Consuming from RabbitMQ: sessions that are made anew when lost, and what becomes of each message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from aio_pika.abc import AbstractConnection
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from outbox.backoff import Backoff
from outbox.courier import (
    ANSWER_TIMEOUT,
    ATTEMPT_HEADER,
    CLOSE_TIMEOUT,
    EXPIRES_HEADER,
    Address,
    Courier,
    LoginError,
    connect,
    copied,
    is_lost,
    unavailable,
)
from outbox.delivery import Delivery, autopsy
from outbox.errors import BrokerUnavailableError
from outbox.handle import Dead, Done, Failed, Handling, Incoming, Outcome, next_delay
from outbox.listener import DEAD_SUFFIX, Listener
from outbox.topology import Topology, dead_letter_exchange, delay_name
from outbox.worker_metrics import Metrics

logger = logging.getLogger(__name__)

CHECK_EVERY = 30.0
# A message that has come back so often may be what kills workers. Once happens at every lost connection.
SUSPECT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpSettings:
    at: Address
    exchange: str
    retry_delays: tuple[float, ...]
    prefetch_count: int
    declare: bool
    shutdown: float


class Gate:
    """Many pass together; or one alone, after all others have left and before they may enter again."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty, self._open, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._empty.set()
        self._open.set()

    async def __aenter__(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._turn:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()


class AmqpSource:
    """Sessions until stop(): a connection for the consumers, and the courier's for everything else."""

    def __init__(
        self,
        settings: AmqpSettings,
        topology: Topology,
        listeners: Sequence[Listener],
        handling: Handling,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._listeners = listeners
        self._handling = handling
        self._metrics = metrics
        self._courier = Courier(settings.at)
        self._user = settings.at.urls[0].user or "guest"
        self._given = settings.at.lent
        self._stopping, self._lost = asyncio.Event(), asyncio.Event()
        self._running: dict[asyncio.Task[None], Delivery] = {}
        self._gate = Gate()
        # The broker counts what is in hand for each consumer: not what was asked for before, or came by a lost session.
        self._places = {one.queue: asyncio.Semaphore(settings.prefetch_count) for one in listeners}
        self._started = False
        self._trouble: str | None = None
        self._error: BaseException | None = None
        self.ready = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()
        self._lost.set()

    async def run(self) -> None:
        backoff = Backoff()
        try:
            while not self._stopping.is_set():
                try:
                    await self._session()
                except BrokerUnavailableError as error:
                    self._report(str(error))
                except LoginError as error:
                    if not self._started:
                        raise
                    self._report(str(error))
                if self._error is not None:
                    raise self._error
                if self.ready.is_set():
                    backoff.reset()
                self.ready.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.pause()):
                        await self._stopping.wait()
        finally:
            await self._finish()
            await self._courier.close()

    # --- one session

    async def _session(self) -> None:
        """Returns when it is time to stop, or somebody has raised; raises when the session is lost."""
        self._lost.clear()
        given, self._given = self._given, None
        connection = given if given is not None and not is_lost(given) else await self._connect()
        channel: Any = None
        try:
            await self._courier.prepare(self._topology, declare=self._settings.declare)
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                opened = await connection.channel(publisher_confirms=False)
                channel = await opened.get_underlay_channel()
                channel.closing.add_done_callback(lambda _: self._lost.set())
                channel.on_consumer_cancel_callbacks.add(self._on_cancel)
                await channel.basic_qos(prefetch_count=self._settings.prefetch_count)
            await self._begin(channel)
            self._report(None)
            self._started = True
            self.ready.set()
            logger.info("worker ready", extra={"action": "ready", "queues": len(self._listeners)})
            await self._watch(channel)
            if self._stopping.is_set():
                await self._stop_consuming(channel)
            elif self._error is None:
                raise BrokerUnavailableError("the connection, its channel or a consumer was lost")
        finally:
            for listener in self._listeners:
                self._metrics.consumers(listener.queue, 0)
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await (connection.close() if connection is not given else channel.close())

    async def _connect(self) -> AbstractConnection:
        return await connect(self._settings.at, "outbox worker")

    async def _begin(self, channel: Any) -> None:
        """First what came back, each alone and with nothing else in hand: should it kill us, only it is counted.

        Not after a lost connection: this process has survived what comes back then.
        """
        held: list[Delivery] = []
        for listener in self._listeners:
            while not self._lost.is_set() and not self._started:
                async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                    message = await channel.basic_get(listener.queue)
                if message.delivery_tag is None:
                    break
                delivery = Delivery(listener, message, channel)
                if not delivery.returned:
                    held.append(delivery)
                    break
                await self._all(held)
                held = []
                await self._all([delivery])
        for one in held:
            self._start(one)
        for listener in self._listeners:
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await channel.basic_consume(listener.queue, self._receiver(listener, channel))
            self._metrics.consumers(listener.queue, 1)

    async def _all(self, deliveries: Sequence[Delivery]) -> None:
        """Until these have ended, and whatever is left of an earlier session."""
        for one in deliveries:
            self._start(one)
        while self._running:
            await asyncio.wait(self._running)

    def _receiver(self, listener: Listener, channel: Any) -> Callable[[DeliveredMessage], Coroutine[Any, Any, None]]:
        async def receive(message: DeliveredMessage) -> None:
            self._start(Delivery(listener, message, channel))

        return receive

    def _start(self, delivery: Delivery) -> None:
        # A task of our own: those of the channel are cancelled with it.
        task = asyncio.get_running_loop().create_task(self._deliver(delivery))
        self._running[task] = delivery
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._lost.set()

    async def _on_cancel(self, frame: Basic.Cancel) -> None:
        """A queue was deleted, or moved to another node."""
        logger.warning("consumer cancelled by the broker", extra={"action": "cancel", "consumer": frame.consumer_tag})
        self._lost.set()

    async def _watch(self, channel: Any) -> None:
        """Until the session ends. A consumer that the broker does not know of would wait for ever."""
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY):
                    await self._lost.wait()
                    return
            for listener in self._listeners:
                if not (await self._courier.look(listener.queue))[1] or len(channel.consumers) < len(self._listeners):
                    raise BrokerUnavailableError(f"queue {listener.queue!r} has no consumer any more")
                self._metrics.dead(listener.queue, (await self._courier.look(listener.queue + DEAD_SUFFIX))[0])

    async def _stop_consuming(self, channel: Any) -> None:
        """What comes before the broker has heard it goes back."""
        logger.info("stopping", extra={"action": "stop", "running": len(self._running)})
        for tag in list(channel.consumers):
            async with unavailable(), asyncio.timeout(ANSWER_TIMEOUT):
                await channel.basic_cancel(tag)
        await self._finish()

    async def _finish(self) -> None:
        """Lets what runs end. What does not in time goes back with the connection."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.shutdown)
        for task, delivery in list(self._running.items()):
            fields = {"action": "stop", "queue": delivery.listener.queue}
            logger.warning("stopped before a listener had ended: its message comes again", extra=fields)
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=1)

    # --- one message

    async def _deliver(self, delivery: Delivery) -> None:
        queue = delivery.listener.queue
        self._metrics.received(queue)
        async with self._gate.alone() if delivery.returned >= SUSPECT else self._gate:
            # Not until the acknowledgement: the next message comes as soon as that is sent, and would wait.
            async with self._places[queue]:
                if self._stopping.is_set():
                    with contextlib.suppress(BrokerUnavailableError):
                        async with unavailable():
                            await delivery.channel.basic_nack(delivery.message.delivery_tag, requeue=True)
                    return
                begun = monotonic()
                if delivery.expires_at <= time():
                    outcome: Outcome = Dead("expired", "", "its time was over before it was handled")
                else:
                    outcome = await self._handling(delivery.listener, self._incoming(delivery))
            self._metrics.handled(queue, monotonic() - begun)
            if not isinstance(outcome, Done):
                # The copy first, confirmed; then the acknowledgement.
                await self._publish(*self._copy(delivery, outcome), queue, delivery.message.body)
            await self._ack(delivery)
            self._metrics.processed(queue, outcome)

    def _incoming(self, delivery: Delivery) -> Incoming:
        message = delivery.message
        return Incoming(
            message.body,
            delivery.routing_key,
            message.header.properties.message_id,
            delivery.headers,
            delivery.attempt,
            delivery.as_aio_pika,
        )

    def _copy(self, delivery: Delivery, outcome: Failed | Dead) -> tuple[str, Basic.Properties]:
        """To which exchange, and with what: a retry after a delay, or a dead letter."""
        settings, listener, attempt = self._settings, delivery.listener, delivery.attempt
        delays = settings.retry_delays if listener.retry_delays is None else listener.retry_delays
        fields = {
            "queue": listener.queue,
            "message_id": delivery.message.header.properties.message_id,
            "routing_key": delivery.routing_key,
            "attempt": attempt,
            "error": outcome.kind,
        }
        if isinstance(outcome, Failed):
            # What is not the listener's doing is tried again after the first delay, as the same attempt.
            delay = next_delay(attempt if outcome.counts else 1, delays)
            properties = copied(delivery.message, self._user, delivery.came, {ATTEMPT_HEADER: attempt + outcome.counts})
            expires_at = (properties.headers or {}).get(EXPIRES_HEADER)
            if delay is None:
                outcome = Dead("max_attempts", outcome.kind, outcome.text)
            elif isinstance(expires_at, int) and expires_at / 1000 < time() + delay:
                outcome = Dead("expired", outcome.kind, outcome.text)
            else:
                logger.warning("listener failed, trying again", extra={"action": "retry", **fields, "delay": delay})
                self._metrics.retried(listener.queue, delay)
                return delay_name(settings.exchange, delay), properties
        logger.warning("dead letter", extra={"action": "dead", **fields, "reason": outcome.reason})
        properties = copied(delivery.message, self._user, delivery.came, autopsy(delivery, outcome))
        return dead_letter_exchange(settings.exchange), properties

    async def _publish(self, exchange: str, properties: Basic.Properties, queue: str, body: bytes) -> None:
        """Until it gets through. Meanwhile the original stays in our hands, and nobody handles it a second time."""
        backoff = Backoff()
        while True:
            try:
                await self._courier.publish(exchange, queue, properties, body)
            except BrokerUnavailableError as error:
                self._report(str(error))
                await asyncio.sleep(backoff.pause())
                if self._settings.declare:
                    with contextlib.suppress(BrokerUnavailableError):
                        await self._courier.prepare(self._topology, declare=True)
            else:
                self._report(None)
                return

    async def _ack(self, delivery: Delivery) -> None:
        if delivery.raw is not None and delivery.raw.processed:
            return  # the listener did it
        try:
            async with unavailable():
                # Not waiting until the socket has taken it: if that fails, the message comes again as well.
                await delivery.channel.basic_ack(delivery.message.delivery_tag, wait=False)
        except BrokerUnavailableError as error:
            fields = {"action": "ack", "queue": delivery.listener.queue, "error": str(error)}
            logger.warning("could not acknowledge a message: it comes again", extra=fields)

    def _report(self, problem: str | None) -> None:
        """One line for each change."""
        if problem is not None and self._trouble is None:
            fields = {"action": "trouble", "what": "broker", "error": problem}
            logger.warning("broker unavailable, trying again", extra=fields)
        self._trouble = problem
