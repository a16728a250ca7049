"""Consuming without a broker: messages go from the outbox straight to the listeners, under the leases of a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from outbox.claimer import Batch, Claimer
from outbox.config import RelaySettings
from outbox.handle import Dead, Done, Failed, Handling, Incoming, Outcome, next_delay
from outbox.listener import Listener, matches
from outbox.store import ClaimedMessage, Store
from outbox.worker_metrics import Metrics

UNROUTABLE = Dead("unroutable", "", "no listener matches its routing key")
# The words for a death that the database knows.
REASONS = {"unreadable": "rejected", "no_message_id": "rejected"}


@dataclass(frozen=True, kw_only=True)
class PostgresSource:
    """Worker(source=PostgresSource(dsn)): listeners are called straight from the database."""

    dsn: str = field(repr=False, kw_only=False)
    lease: float = 120.0
    poll: float = 1.0


class Direct(Claimer):
    """Claims, leases, sleeps and wakes as a relay does; but hands messages to listeners instead of a broker."""

    what_is_ready = "worker ready"

    def __init__(
        self,
        source: PostgresSource,
        *,
        exchange: str,
        listeners: Sequence[Listener],
        handling: Handling,
        metrics: Metrics,
        retry_delays: Sequence[float],
        prefetch_count: int,
        shutdown: float,
    ) -> None:
        settings = RelaySettings(
            dsn=source.dsn,
            amqp_url="amqp://",  # no broker: what concerns one is not looked at
            batch_size=prefetch_count,
            window=3 * prefetch_count,
            lease=source.lease,
            poll=source.poll,
            shutdown=shutdown,
        )
        super().__init__(settings, Store(settings, kind="worker: "))
        self._exchange, self._listeners = exchange, listeners
        self._handling, self._metrics = handling, metrics
        self._delays = retry_delays
        self._slots = asyncio.Semaphore(prefetch_count)
        self.ready = asyncio.Event()

    async def _forward(self) -> None:
        self.ready.set()
        for listener in self._listeners:
            self._metrics.consumers(listener.queue, 1)
        try:
            await super()._forward()
        finally:
            for listener in self._listeners:
                self._metrics.consumers(listener.queue, 0)

    async def _deliver(self, batch: Batch) -> None:
        """One after another within a key, side by side otherwise. What is left at the end goes back."""
        chains: dict[Any, list[ClaimedMessage]] = {}
        for message in batch.messages:
            chains.setdefault(message.id if message.key is None else message.key, []).append(message)
        ended = await asyncio.gather(*(self._one_by_one(batch, chain) for chain in chains.values()))
        if not all(ended):
            await self._persist(batch, "release", self._store.release, [])

    async def _one_by_one(self, batch: Batch, messages: Sequence[ClaimedMessage]) -> bool:
        """Until one of them fails: then those behind it wait. Whether all were settled."""
        for message in messages:
            async with self._slots:
                if self._stopping.is_set() or not await self._hold(batch):
                    return False
                outcomes = await self._handle(message)
            await self._mark(batch, message, outcomes)
            if not all(isinstance(outcome, Done) for _, outcome in outcomes):
                return message is messages[-1]
        return True

    async def _handle(self, message: ClaimedMessage) -> list[tuple[Listener | None, Outcome]]:
        """All listeners that match, side by side."""
        chosen = [one for one in self._listeners if matches(one.binding_key, message.routing_key)]
        if not chosen or message.exchange != self._exchange:
            return [(None, UNROUTABLE)]
        incoming = Incoming(
            message.body,
            message.routing_key,
            message.message_id,
            message.headers or {},
            message.attempts + 1,
            lambda: message,
        )
        return list(zip(chosen, await asyncio.gather(*(self._call(one, incoming) for one in chosen)), strict=True))

    async def _call(self, listener: Listener, incoming: Incoming) -> Outcome:
        self._metrics.received(listener.queue)
        begun = monotonic()
        outcome = await self._handling(listener, incoming)
        self._metrics.handled(listener.queue, monotonic() - begun)
        self._metrics.processed(listener.queue, outcome)
        return outcome

    async def _mark(
        self, batch: Batch, message: ClaimedMessage, outcomes: Sequence[tuple[Listener | None, Outcome]]
    ) -> None:
        """Sent when all succeeded. Else again while one of those that failed has a delay left, and dead after that."""
        bad = [(listener, outcome) for listener, outcome in outcomes if not isinstance(outcome, Done)]
        if not bad:
            await self._persist(batch, "sent", self._store.mark_sent, [message.id])
            self.sent += 1
            return
        delays = [
            (delay, listener, one)
            for listener, one in bad
            if (delay := self._delay(listener, one, message)) is not None
        ]
        listener, outcome = bad[0]
        retry_in = None
        if delays:
            delay, listener, outcome = min(delays, key=lambda found: found[0])
            retry_in = timedelta(seconds=delay)
            self._metrics.retried(listener.queue if listener else "", delay)
        reason = REASONS.get(outcome.reason, outcome.reason) if isinstance(outcome, Dead) else "max_attempts"
        where = f"{listener.queue}: " if listener else ""
        text = f"{where}{outcome.kind}: {outcome.text}" if outcome.kind else f"{where}{outcome.text}"
        counts = not isinstance(outcome, Failed) or outcome.counts
        mark = partial(
            self._store.mark_failed,
            errors=[text],
            reasons=[reason if retry_in is None else None],
            counts=counts,
            retry_in=retry_in,
            dead=retry_in is None,
        )
        await self._persist(batch, "failed", mark, [message.id])
        self.failed += 1
        self._last_error = text

    def _delay(self, listener: Listener | None, outcome: Outcome, message: ClaimedMessage) -> float | None:
        if listener is None or not isinstance(outcome, Failed):
            return None
        delays = self._delays if listener.retry_delays is None else listener.retry_delays
        if not outcome.counts:
            return delays[0] if delays else 1.0
        return next_delay(message.attempts + 1, delays)
