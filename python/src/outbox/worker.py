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

from aio_pika.abc import AbstractConnection

from outbox.courier import Address
from outbox.errors import ConfigurationError
from outbox.handle import Handling
from outbox.listener import NAME, Listener, delays
from outbox.source_amqp import AmqpSettings, AmqpSource
from outbox.source_postgres import Direct, PostgresSource
from outbox.topology import Topology, topology
from outbox.transaction import Connect
from outbox.worker_metrics import Metrics

logger = logging.getLogger(__name__)

QUEUE_TYPES = ("quorum", "classic")
LONGEST_EXCHANGE = 200  # leaves room for what is put behind it


class Worker:
    """Calls listeners until stop() is called. Several may run side by side; they share the work."""

    def __init__(
        self,
        amqp_url: str = "",
        *,
        connection: AbstractConnection | None = None,
        source: PostgresSource | None = None,
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
        amqp_ca: str = "",
        amqp_cert: str = "",
        amqp_key: str = "",
        enable_metrics: bool = True,
    ) -> None:
        if sum(map(bool, (amqp_url, connection, source))) != 1:
            raise ConfigurationError("pass one of amqp_url, connection and source: where messages come from")
        if not NAME.fullmatch(exchange_name) or len(exchange_name) > LONGEST_EXCHANGE:
            raise ConfigurationError(
                "exchange_name must have 1 to 200 letters, digits and -_.:@#,/+ or spaces, of ASCII"
            )
        if queue_type not in QUEUE_TYPES:
            raise ConfigurationError(f"queue_type must be one of {', '.join(QUEUE_TYPES)}")
        for name, number in {
            "prefetch_count": prefetch_count,
            "delivery_limit": delivery_limit,
            "timeout": timeout,
            "shutdown": shutdown,
            "heartbeat": heartbeat,
        }.items():
            if number <= 0:
                raise ConfigurationError(f"{name} must be greater than 0")
        self.listeners = checked(listeners)
        if connect is None and (needy := [one.queue for one in self.listeners if one.once]):
            raise ConfigurationError(f"listener {needy[0]} has once=True: pass connect, which makes its connections")
        waits = delays(retry_delays)
        self.topology: Topology = topology(
            exchange_name, self.listeners, waits, queue_type=queue_type, delivery_limit=delivery_limit
        )
        handling, metrics = Handling(connect, timeout), Metrics(exchange_name, enabled=enable_metrics)
        self._source: AmqpSource | Direct
        if source is not None:
            self._source = Direct(
                source,
                exchange=exchange_name,
                listeners=self.listeners,
                handling=handling,
                metrics=metrics,
                retry_delays=waits,
                prefetch_count=prefetch_count,
                shutdown=shutdown,
            )
            return
        settings = AmqpSettings(
            at=Address(
                amqp_url or str(getattr(connection, "url", "")), heartbeat, amqp_ca, amqp_cert, amqp_key, connection
            ),
            exchange=exchange_name,
            retry_delays=waits,
            prefetch_count=prefetch_count,
            declare=declare,
            shutdown=shutdown,
        )
        self._source = AmqpSource(settings, self.topology, self.listeners, handling, metrics)

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
