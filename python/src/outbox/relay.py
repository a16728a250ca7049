"""The relay: publishes what it claims, and settles each message by what the broker said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from time import monotonic, time
from typing import Any

from outbox.claimer import Batch, Claimer
from outbox.config import RelaySettings
from outbox.confirms import BEHIND, SENT, Failed, Outcome, Unknown
from outbox.errors import BrokerUnavailableError, ConfigurationError, UnavailableError
from outbox.hooks import Failure
from outbox.publish import Publisher
from outbox.store import ClaimedMessage, Store

logger = logging.getLogger(__name__)

ACCESS_REFUSED, NOT_FOUND = 403, 404


class MessageRelay(Claimer):
    """Carries messages from one database to one broker until stop() is called. Several may run side by side."""

    what_is_ready = "relay ready"

    def __init__(self, dsn: str, amqp_url: str, *, hooks: Sequence[object] = (), **knobs: Any) -> None:
        settings = RelaySettings(dsn=dsn, amqp_url=amqp_url, **knobs)
        super().__init__(settings, Store(settings), hooks)
        self._brokers = cycle(settings.brokers)
        self._publisher: Publisher | None = None
        self._connecting = asyncio.Lock()
        self._careful = 0  # batches that are sent one by one

    @property
    def state(self) -> dict[str, Any]:
        return super().state | {"broker": self._publisher is not None and "broker" not in self._problems}

    async def _close(self) -> None:
        if self._publisher is not None:
            await self._publisher.close()
        await super()._close()

    async def _reach(self) -> bool:
        if self._publisher is not None and not self._publisher.is_open:
            await self._disarm()  # nobody sleeps: emits need not ring all through an outage
        return await self._broker() is not None

    def _room(self) -> int:
        publisher = self._publisher
        assert publisher is not None
        self._report("sending", publisher.trouble)
        if self._backoff["broker"].is_on or publisher.trouble or self._careful:
            return 0
        if not publisher.proven:
            # After a reconnect one message goes first: a broker in trouble would be given a window of duplicates.
            return 0 if self._batches else 1
        return super()._room()

    async def _let_end(self, limit: float) -> None:
        await super()._let_end(limit)
        if self._batches and self._publisher is not None:
            self._publisher.abort()
            await asyncio.wait(self._batches.values(), timeout=limit * 0.2)

    # --- delivering

    async def _deliver(self, batch: Batch) -> None:
        try:
            outcomes = await self._publish(batch, batch.messages, alone=False)
            await self._settle(batch, batch.messages, outcomes)
            if outcomes.count(SENT) == len(outcomes):
                self._backoff["broker"].reset()
            else:
                await self._follow_up(batch, outcomes)
        finally:
            self._tell("settled", batch.messages, monotonic() - batch.claimed_at)

    async def _follow_up(self, batch: Batch, outcomes: list[Outcome]) -> None:
        """What is to be done when not all of a batch arrived."""
        if any(isinstance(outcome, Unknown) and outcome.code for outcome in outcomes):
            # One of them closed the channel, or the connection, on all in flight. One by one tells which.
            pairs = list(zip(batch.messages, outcomes, strict=True))
            held = {message.key for message, outcome in pairs if isinstance(outcome, Failed)} - {None}
            rest = [m for m, outcome in pairs if isinstance(outcome, Unknown) and m.key not in held]
            self._careful += 1
            try:
                again = await self._publish(batch, rest, alone=True)
            finally:
                self._careful -= 1
            await self._settle(batch, rest, again)
            outcomes += again
        self._take_stock(outcomes)
        if any(isinstance(outcome, Unknown) for outcome in outcomes):
            await self._persist(batch, "release", self._store.release, [])

    async def _publish(self, batch: Batch, messages: list[ClaimedMessage], *, alone: bool) -> list[Outcome]:
        """One outcome for each message. After one that fails, no other of its key is sent."""
        if alone:
            waves = [[message] for message in messages]
        else:
            waves = by_key(messages) if self._store.strict_keys else [messages]
        found: dict[int, Outcome] = {}
        held: set[str | None] = set()
        for wave in waves:
            ready = [message for message in wave if message.key not in held] if held else wave
            if not ready:
                continue
            # Who holds messages does not wait for the end of an outage, and sends one alone on a new connection.
            publisher = await self._broker(patiently=False) if alone else self._publisher
            if publisher is None or (len(ready) > 1 and not publisher.proven):
                break
            outcomes = await publisher.publish(ready, batch.claimed_at, partial(self._hold, batch), alone=alone)
            if alone and isinstance(outcomes[0], Unknown) and outcomes[0].code:
                outcomes = [await self._judge(ready[0], outcomes[0], publisher)]
            if len(waves) == 1:
                return outcomes
            for message, outcome in zip(ready, outcomes, strict=True):
                found[message.id] = outcome
                if outcome is not SENT and message.key is not None:
                    held.add(message.key)
            if any(isinstance(outcome, Unknown) and outcome is not BEHIND for outcome in outcomes):
                break
        return [found.get(message.id, BEHIND) for message in messages]

    async def _judge(self, message: ClaimedMessage, outcome: Unknown, publisher: Publisher) -> Outcome:
        """What it means that the broker closed the channel when this message alone was in flight."""
        missing = outcome.code in (ACCESS_REFUSED, NOT_FOUND) and "to topic" not in outcome.error
        await self._ask(self._store.read_settings(), None)  # which exchange is the default may have changed
        if missing and message.exchange == self._store.default_exchange:
            # Nobody's fault but the broker's: an outage, until the exchange is there again.
            publisher.abort()
            return Unknown(outcome.error)
        return Failed(outcome.error, "unroutable" if outcome.code == NOT_FOUND else None)

    # --- settling

    async def _settle(self, batch: Batch, messages: Sequence[ClaimedMessage], outcomes: Sequence[Outcome]) -> None:
        sent = [message for message, outcome in zip(messages, outcomes, strict=True) if outcome is SENT]
        if sent:
            await self._persist(batch, "sent", self._store.mark_sent, [message.id for message in sent])
            self.sent += len(sent)
            self.last_sent = time()
            self._tell("sent", sent)
        failed = 0
        if len(sent) < len(messages):
            failed = await self._settle_failed(batch, list(zip(messages, outcomes, strict=True)))
        logger.debug("batch settled", extra={"action": "settle", "sent": len(sent), "failed": failed,
                     "open": len(messages) - len(sent) - failed})  # fmt: skip

    async def _settle_failed(self, batch: Batch, pairs: Sequence[tuple[ClaimedMessage, Outcome]]) -> int:
        failed = [Failure(m, o.error, o.reason) for m, o in pairs if isinstance(o, Failed)]
        for counts in (True, False):
            bad = [(m.id, o.error, o.reason) for m, o in pairs if isinstance(o, Failed) and o.counts is counts]
            if bad:
                ids, errors, reasons = zip(*bad, strict=True)
                mark = partial(self._store.mark_failed, errors=errors, reasons=reasons, counts=counts)
                await self._persist(batch, "failed", mark, ids)
        if failed:
            self.failed += len(failed)
            self._last_error = failed[-1].error
            self._tell("failed", failed)
            if self._tell:
                dead = await self._ask(self._store.dead_among([f.message.id for f in failed]), {})
                if dead:
                    self._tell(
                        "dead_lettered", [f._replace(reason=dead[f.message.id]) for f in failed if f.message.id in dead]
                    )
        return len(failed)

    def _take_stock(self, outcomes: Sequence[Outcome]) -> None:
        """A batch that got nowhere is not worth another try at once."""
        refused = next((o.error for o in outcomes if isinstance(o, Failed) and not o.counts), None)
        if any(outcome is SENT or (isinstance(outcome, Failed) and outcome.counts) for outcome in outcomes):
            self._backoff["broker"].reset()
            if refused and self._settings.once:
                self._error = BrokerUnavailableError(refused)
        else:
            unknown = next((o.error for o in outcomes if isinstance(o, Unknown)), "")
            self._backoff["broker"].pause()
            self._give_up(BrokerUnavailableError(refused or unknown))

    # --- the broker

    async def _broker(self, *, patiently: bool = True) -> Publisher | None:
        """The publisher, made anew if its connection is gone. None: it is time to stop, or the broker is away."""
        while True:
            async with self._connecting:
                if self._publisher is not None and self._publisher.is_open:
                    return self._publisher
                if self._stopping.is_set():
                    return None
                if self._publisher is not None:
                    lost, self._publisher = self._publisher, None  # told once, not at each try
                    self._report("broker", lost.lost.error, "BrokerUnavailableError")
                    await lost.close()
                try:
                    new = Publisher(self._settings)
                    self._publisher = await new.open(next(self._brokers), self._store.default_exchange)
                    self._report("broker", None)
                    continue
                except (UnavailableError, ConfigurationError) as error:
                    self._failed("broker", error)
            if not patiently:
                return None
            await self._back_off("broker")


def by_key(messages: Sequence[ClaimedMessage]) -> list[list[ClaimedMessage]]:
    """Waves in which each key comes once, in order."""
    waves: list[list[ClaimedMessage]] = []
    seen: dict[str, int] = {}
    for message in messages:
        number = 0
        if message.key is not None:
            number = seen[message.key] = seen.get(message.key, -1) + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(message)
    return waves
