"""The worker: calls listeners for messages, from RabbitMQ or straight from the database."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aio_pika.abc import AbstractConnection

from outbox.errors import ConfigurationError
from outbox.handle import Handling
from outbox.listener import Listener, delays
from outbox.source_amqp import AmqpSettings, AmqpSource
from outbox.topology import Topology, topology
from outbox.transaction import Connect

logger = logging.getLogger(__name__)

QUEUE_TYPES = ("quorum", "classic")


class Worker:
    """Calls listeners until stop() is called. Several may run side by side; they share the work."""

    def __init__(
        self,
        amqp_url: str = "",
        *,
        connection: AbstractConnection | None = None,
        exchange_name: str = "outbox",
        listeners: Sequence[Listener] = (),
        retry_delays: Sequence[float] = (1, 10, 60, 300),
        prefetch_count: int = 10,
        connect: Connect | None = None,
        declare: bool = True,
        queue_type: str = "quorum",
        delivery_limit: int = 20,
        timeout: float = 1200.0,
        shutdown: float = 30.0,
        heartbeat: int = 15,
    ) -> None:
        url = str(connection.url) if connection is not None and not amqp_url else amqp_url  # type: ignore[attr-defined]
        if not url:
            raise ConfigurationError("no broker given: pass amqp_url or connection")
        if not url.startswith(("amqp://", "amqps://")):
            raise ConfigurationError("amqp_url must begin with amqp:// or amqps://")
        if queue_type not in QUEUE_TYPES:
            raise ConfigurationError(f"queue_type must be one of {', '.join(QUEUE_TYPES)}")
        self.listeners = checked(listeners)
        if connect is None and (needy := [one.queue for one in self.listeners if one.once]):
            raise ConfigurationError(f"listener {needy[0]} has once=True: pass connect, which makes its connections")
        self._topology = topology(
            exchange_name, self.listeners, delays(retry_delays), queue_type=queue_type, delivery_limit=delivery_limit
        )
        settings = AmqpSettings(
            url=url,
            connection=connection,
            exchange=exchange_name,
            retry_delays=delays(retry_delays),
            prefetch_count=prefetch_count,
            declare=declare,
            heartbeat=heartbeat,
            shutdown=shutdown,
        )
        self._source = AmqpSource(settings, self._topology, self.listeners, Handling(connect, timeout))

    @property
    def topology(self) -> Topology:
        """What this worker needs on the broker."""
        return self._topology

    @property
    def ready(self) -> asyncio.Event:
        """Set while the worker receives messages."""
        return self._source.ready

    def stop(self) -> None:
        """Ends run() after the listeners that are running."""
        self._source.stop()

    async def run(self) -> None:
        """Until stop(), SIGTERM or SIGINT, after the listeners that are running; a second signal ends the process.

        Raises ConfigurationError when only a person can help; waits and reconnects when a server is away.
        """
        with self._signals():
            await self._source.run()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)

        def stop(number: int) -> None:
            for again in numbers:
                loop.add_signal_handler(again, os._exit, 128 + number)
            self.stop()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def checked(listeners: Sequence[Listener]) -> list[Listener]:
    for one in listeners:
        if not isinstance(one, Listener):
            raise ConfigurationError(f"{one!r} is no listener: decorate it with @listen(...)")
    if not listeners:
        raise ConfigurationError("a worker needs at least one listener")
    queue, times = Counter(one.queue for one in listeners).most_common(1)[0]
    if times > 1:
        raise ConfigurationError(f"two listeners have the queue {queue}: give one of them another by queue=...")
    return list(listeners)
