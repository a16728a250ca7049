"""The loop: claim a batch, publish it, settle each message by what the broker said. Knows neither driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import monotonic, time
from typing import Any, TypeVar
from uuid import UUID, uuid4

from outbox.config import RelaySettings
from outbox.confirms import BEHIND, SENT, Failed, Outcome, Unknown
from outbox.errors import BrokerUnavailableError, ConfigurationError, OutboxError, UnavailableError
from outbox.hooks import Failure, Teller
from outbox.publish import Publisher
from outbox.store import ClaimedMessage, Store

logger = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_LAST = 0.2, 10.0
KEEP_EVERY = 1.0
CLEANUP_EVERY = 60.0
SAY_FAILED_EVERY = 10.0
# One on its way, one ready to follow, one being marked. It bounds the memory too: each has at most max_bytes of bodies.
MOST_BATCHES = 3
# A lease whose holder's session is gone ends 3 s later: what is older than this is asked for again before sending.
FRESH = 2.0
# Under the bell of another relay, which may be busy: never sleep longer.
SLEEP_MOST = 1.0
# How soon to look again while messages may come unannounced: longer, the longer none came.
SOON, SOON_MOST = 0.005, 0.05
# Each has a body, of 1 MiB at most unless somebody configured more.
TOLD_AT_ONCE = 20
ACCESS_REFUSED, NOT_FOUND = 403, 404
LOST = float("-inf")

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Batch:
    """Messages under one lease. Times are monotonic and from before the call, so that no clock has to agree."""

    token: UUID
    messages: list[ClaimedMessage]
    claimed_at: float
    held_at: float
    session: int


class MessageRelay:
    """Carries messages from one database to one broker until stop() is called. Several may run side by side."""

    what_is_ready = "relay ready"

    def __init__(self, dsn: str, amqp_url: str, *, hooks: Sequence[object] = (), **knobs: Any) -> None:
        self._settings = RelaySettings(dsn=dsn, amqp_url=amqp_url, **knobs)
        self._tell = Teller(hooks)
        self._store = Store(self._settings)
        self._brokers = cycle(self._settings.brokers)
        self._publisher: Publisher | None = None
        self._batches: dict[Batch, asyncio.Task[None]] = {}
        self._lost_claims: dict[UUID, float] = {}
        self._unsettled: set[Batch] = set()
        self._careful = 0
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._listening = False
        self._tested = asyncio.Event()
        self._started = False
        self._connecting = asyncio.Lock()
        self._armed = False  # emits ring the bell
        self._rang = False  # the last sleep ended before its time
        self._busy = False  # messages were found since then
        self._looked = self._found = monotonic()  # when a claim was last tried, and when one found messages
        self._buried = False  # the last claim put messages aside, and may have stopped short of others
        self._in_vain = False  # the bell rang, and there was nothing
        self._problems: dict[str, str] = {}  # by server: the kind that was told last
        self._backoff: dict[str, tuple[float, float]] = {}  # by server: the next try, and the pause before it
        self._error: OutboxError | None = None
        self._turned = monotonic()
        self.sent = self.failed = self.lease_lost = 0
        self.last_claim = self.last_sent = 0.0  # seconds since 1970
        self._last_error = ""

    @property
    def in_flight(self) -> int:
        """Messages that are claimed and not settled."""
        return sum(len(batch.messages) for batch in self._batches)

    @property
    def state(self) -> dict[str, Any]:
        """How it does, for whoever watches."""
        return {
            "ready": self._started and not self._problems,
            "database": self._store.sessions > 0 and "database" not in self._problems,
            "broker": self._publisher is not None and "broker" not in self._problems,
            "listening": self._listening,
            "silent": monotonic() - self._turned,
            "exchange": self._store.default_exchange,
            "in_flight": self.in_flight,
            **{name: getattr(self, name) for name in ("sent", "failed", "lease_lost", "last_claim", "last_sent")},
        }

    async def stats(self) -> dict[str, Any]:
        """What outbox.stats() says; raises an OutboxError when it cannot be asked."""
        return await self._store.stats()

    def stop(self) -> None:
        """Ends run() after what is in flight is settled."""
        self._stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Raises ConfigurationError when only a person can help; waits and reconnects when a server is away."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                helpers = [self._tasks.create_task(self._keep()), self._tasks.create_task(self._listen())]
                await self._work()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if self._publisher is not None:
                await self._publisher.close()
            await self._store.close()
        if self._error is not None:
            raise self._error

    async def _work(self) -> None:
        while not self._stopping.is_set() and not await self._ask(self._store.connect(), otherwise=False):
            pass
        await self._tested.wait()
        await self._ask(self._store.connect(), otherwise=False)
        if await self._broker() is not None:
            self._started = True
            logger.info(self.what_is_ready, extra={"action": "ready", "listening": self._listening})
            await self._forward()
        await self._finish()

    # --- claiming

    async def _forward(self) -> None:
        while True:
            self._wake.clear()  # what happens from here on ends the next pause
            self._turned = monotonic()
            if self._publisher is not None and not self._publisher.is_open:
                await self._disarm()  # nobody sleeps: emits need not ring all through an outage
            publisher = None if self._stopping.is_set() else await self._broker()
            if publisher is None:
                return
            self._report("sending", publisher.trouble)
            size = self._room(publisher)
            if not size:
                await self._disarm()
                await self._pause(0.2)
            elif batch := await self._claim(size):
                # One that came alone leaves the bell armed: it is heard, not waited for, and so is the next.
                if self._busy or len(batch.messages) == size:
                    await self._disarm()
                self._busy = True
                if len(batch.messages) < size:
                    await self._pause(SOON)
            elif self._batches:
                # Others may be ours as soon as a batch is settled, or come without a bell because nobody sleeps.
                await self._pause(self._soon())
            elif self._settings.once and not self._buried and "database" not in self._problems:
                return
            else:
                await self._sleep(size)

    def _room(self, publisher: Publisher) -> int:
        """How many may be claimed now.

        What is not marked is sent again should we die: so the window counts from the claim to the mark. When a claim
        hands out messages the marks before it are on disk: a crash of the database brings back no more than that.
        """
        later = "broker" in self._backoff and monotonic() < self._backoff["broker"][0]
        if later or publisher.trouble or self._unsettled or self._careful or len(self._batches) >= MOST_BATCHES:
            return 0
        if not publisher.proven:
            # After a reconnect one message goes first: a broker in trouble would be given a window of duplicates.
            return 0 if self._batches else 1
        size = self._settings.batch_size
        return size if self.in_flight + size <= self._settings.window else 0

    async def _claim(self, size: int) -> Batch | None:
        """Takes the next messages and starts to deliver them."""
        token, begun = uuid4(), monotonic()
        self._looked = begun
        messages = await self._ask(self._store.claim(token, size), None)
        if messages is None:  # perhaps only the answer was lost
            self._lost_claims[token] = begun + self._settings.statement_timeout
            return None
        self.last_claim = time()
        batch = None
        if messages:
            self._found, self._in_vain = begun, False
            batch = Batch(token, messages, begun, begun, self._store.sessions)
            self._batches[batch] = self._tasks.create_task(self._deliver(batch))
        self._buried = bool(self._store.put_aside)
        if self._buried:
            await self._tell_put_aside()
        return batch

    async def _tell_put_aside(self) -> None:
        """What claims found expired, or to have killed relays. Claiming waits for it, delivering does not."""
        ids, self._store.put_aside = self._store.put_aside, []
        while ids and self._tell:
            some, ids = ids[:TOLD_AT_ONCE], ids[TOLD_AT_ONCE:]
            dead = await self._ask(self._store.dead_messages(some), None)
            if dead is None:
                return
            if dead:
                self._tell("dead_lettered", [Failure(*one) for one in dead])

    async def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            await self._ask(self._store.disarm_wakeup(), None)

    async def _sleep(self, size: int) -> None:
        """Until messages come in, one is due, the poll interval is over, or stop() is called."""
        seconds = self._settings.poll
        if self._listening:
            # After a sleep that nothing ended we ask again: it may be the bell of another relay, which is gone by now.
            if not (self._armed and self._rang):
                self._armed = bool(await self._ask(self._store.arm_wakeup(), None))
                if not self._armed:  # a transaction with a message in it is open
                    await self._pause(self._soon())
                    return
                # What was committed before we armed rang no bell: look once more.
                if await self._claim(size):
                    self._busy = True
                    return
            seconds = min(seconds, SLEEP_MOST)
        self._busy = False
        due = await self._ask(self._store.next_due(), None)
        await self._pause(seconds if due is None else min(seconds, max(due, SOON)))
        if self._in_vain:
            # Anybody can ring the bell: once it has led to nothing, it is not followed at once.
            await asyncio.sleep(self._looked + self._soon() - monotonic())
        self._in_vain = self._rang = self._wake.is_set()

    def _soon(self) -> float:
        return SOON + min(monotonic() - self._found, 1.0) * (SOON_MOST - SOON)

    # --- delivering

    async def _deliver(self, batch: Batch) -> None:
        try:
            outcomes = await self._publish(batch, batch.messages, alone=False)
            await self._settle(batch, batch.messages, outcomes)
            if outcomes.count(SENT) == len(outcomes):
                self._backoff.pop("broker", None)
            else:
                await self._follow_up(batch, outcomes)
        finally:
            self._tell("settled", batch.messages, monotonic() - batch.claimed_at)
            del self._batches[batch]
            self._wake.set()

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

    async def _hold(self, batch: Batch) -> bool:
        """Whether the batch is ours for long enough to be sent now."""
        fresh = min(FRESH, self._settings.lease / 4)
        if monotonic() - batch.held_at > fresh or batch.session != self._store.sessions:
            await self._extend(batch)
        held = monotonic() - batch.held_at <= fresh
        if not held and batch.held_at == LOST:
            self._lost(batch, "publish", len(batch.messages))
        return held

    async def _extend(self, batch: Batch) -> None:
        begun = monotonic()
        kept = await self._ask(self._store.extend(batch.token), None)
        if kept is not None:
            batch.held_at = begun if kept else LOST
            batch.session = self._store.sessions

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
            self._backoff.pop("broker", None)
            if refused and self._settings.once:
                self._error = BrokerUnavailableError(refused)
        else:
            unknown = next((o.error for o in outcomes if isinstance(o, Unknown)), "")
            self._next_try("broker")
            self._give_up(BrokerUnavailableError(refused or unknown))

    async def _persist(self, batch: Batch, phase: str, call: Any, ids: Sequence[int]) -> None:
        """Repeats a settling call until it gets through or the lease is over. Meanwhile nothing is claimed."""
        arguments, again = ((batch.token, ids) if ids else (batch.token,)), False
        try:
            while (settled := await self._ask(call(*arguments), None)) is None:
                again = True
                self._unsettled.add(batch)
                if monotonic() > batch.held_at + self._settings.lease:
                    self._lost(batch, phase, len(ids))
                    return
        finally:
            self._unsettled.discard(batch)
        if settled < len(ids) and not again:  # after a lost answer it may have been done before
            self._lost(batch, phase, len(ids) - settled)

    def _lost(self, batch: Batch, phase: str, count: int) -> None:
        """Somebody else has them now, or will: what was sent is sent again."""
        self.lease_lost += count
        held = round(monotonic() - batch.claimed_at, 3)
        fields = {"event": "lease_lost", "action": "settle", "phase": phase, "count": count, "held_seconds": held}
        logger.warning("lease lost", extra=fields)
        self._tell("lease_lost", phase, count)

    # --- beside the loop

    async def _keep(self) -> None:
        """Holds leases, gives back what a lost answer may have claimed, cleans up."""
        cleaned, said, failed = monotonic(), 0.0, 0
        while True:
            await asyncio.sleep(min(KEEP_EVERY, self._settings.lease / 8))
            now = monotonic()
            for batch in list(self._batches):
                if now - batch.held_at > self._settings.lease / 4 or batch.session != self._store.sessions:
                    await self._extend(batch)
            for token, until in list(self._lost_claims.items()):
                if await self._ask(self._store.release(token), 0) or ("database" not in self._problems and now > until):
                    del self._lost_claims[token]
            if self._started and now - cleaned > CLEANUP_EVERY:
                await self._ask(self._store.read_settings(), None)
                if not await self._ask(self._store.cleanup(), otherwise=False):
                    cleaned = now
            if self.failed > failed and now - said > SAY_FAILED_EVERY:
                count = self.failed - failed
                logger.warning("messages failed", extra={"action": "failed", "count": count, "error": self._last_error})
                failed, said = self.failed, now

    async def _listen(self) -> None:
        """Lets the doorbell wake us, where that works."""
        seconds, silent = BACKOFF_FIRST, False
        while True:
            try:
                await self._store.listen(self._on_listening, self._wake.set)
            except OutboxError as error:
                if self._listening or not silent:
                    logger.warning("no notifications, polling instead", extra={"action": "listen", "error": str(error)})
                if self._listening:
                    seconds = BACKOFF_FIRST
                silent, self._listening = True, False
            self._tested.set()
            await asyncio.sleep(jittered(seconds))
            seconds = min(seconds * 2, CLEANUP_EVERY)

    def _on_listening(self) -> None:
        self._listening = True
        self._tested.set()
        self._wake.set()

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

    async def _finish(self) -> None:
        """Lets what is in flight end; gives back the rest."""
        logger.info("stopping", extra={"action": "stop", "batches": len(self._batches)})
        limit = self._settings.shutdown
        if self._batches:
            await asyncio.wait(self._batches.values(), timeout=limit * 0.8)
        if self._batches and self._publisher is not None:
            self._publisher.abort()
            await asyncio.wait(self._batches.values(), timeout=limit * 0.2)
        for task in list(self._batches.values()):
            logger.warning("stopped before a batch was settled: its lease runs out", extra={"action": "stop"})
            task.cancel()
        with contextlib.suppress(OutboxError, TimeoutError):
            async with asyncio.timeout(max(limit * 0.2, 1.0)):
                for token in self._lost_claims:
                    await self._store.release(token)
                if self._armed:
                    await self._store.disarm_wakeup()
                await self._store.ring()

    # --- when a server is away

    async def _ask(self, call: Awaitable[T], otherwise: T) -> T:
        """What the database answers; when it is away, waits a little and returns the other value."""
        try:
            answer = await call
        except (UnavailableError, ConfigurationError) as error:
            self._armed = False  # with the session
            self._failed("database", error)
            await self._back_off("database")
            return otherwise
        self._backoff.pop("database", None)
        self._report("database", None)
        return answer

    def _failed(self, server: str, error: OutboxError) -> None:
        if isinstance(error, ConfigurationError) and not self._started:
            raise error
        self._report(server, str(error), type(error).__name__)
        self._give_up(error)

    def _give_up(self, error: OutboxError) -> None:
        """Once means not to wait for better times."""
        if self._settings.once and not self._stopping.is_set():
            self._error = error
            self.stop()

    def _report(self, what: str, problem: str | None, kind: str = "") -> None:
        """One line per change of state."""
        before = self._problems.pop(what, None)
        if problem is not None:
            self._problems[what] = kind
            if before != kind:
                logger.warning(
                    "server unavailable, trying again" if kind else "not sending",
                    extra={"action": "trouble", "what": what, "kind": kind, "error": problem},
                )
        elif before is not None and not self._problems and self._started:
            logger.info(self.what_is_ready, extra={"action": "ready", "listening": self._listening})

    def _next_try(self, server: str) -> float:
        """When to try again. Whoever asks before that time shares it."""
        at, seconds = self._backoff.get(server, (0.0, BACKOFF_FIRST / 2))
        if monotonic() >= at:
            # Spread out, so that relays which lost one server together do not come back together.
            seconds = min(seconds * 2, BACKOFF_LAST)
            at = monotonic() + jittered(seconds)
            self._backoff[server] = (at, seconds)
        return at

    async def _back_off(self, server: str) -> None:
        self._turned = monotonic()
        seconds = self._next_try(server) - monotonic()
        if self._stopping.is_set():
            await asyncio.sleep(min(seconds, BACKOFF_FIRST))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _pause(self, seconds: float) -> None:
        """Until something happens, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


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


def jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it
