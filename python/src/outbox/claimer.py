"""What carries messages away claims them, holds their leases, settles them, sleeps and wakes. Knows neither driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any, TypeVar
from uuid import UUID, uuid4

from outbox.backoff import FIRST, Backoff
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError, OutboxError, UnavailableError
from outbox.hooks import Failure, Teller
from outbox.store import ClaimedMessage, Store

logger = logging.getLogger(__name__)

KEEP_EVERY = 1.0
CLEANUP_EVERY = 60.0
LISTEN_AGAIN = 60.0
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


class Claimer(ABC):
    """Takes messages from one database until stop() is called; who inherits from it says where they go."""

    what_is_ready: str  # the words for it in the log

    def __init__(self, settings: RelaySettings, store: Store, hooks: Sequence[object] = ()) -> None:
        self._settings, self._store = settings, store
        self._tell = Teller(hooks)
        self._batches: dict[Batch, asyncio.Task[None]] = {}
        self._lost_claims: dict[UUID, float] = {}
        self._unsettled: set[Batch] = set()
        self._stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._listening = False
        self._tested = asyncio.Event()
        self._started = False
        self._armed = False  # emits ring the bell
        self._rang = False  # the last sleep ended before its time
        self._busy = False  # messages were found since then
        self._looked = self._found = monotonic()  # when a claim was last tried, and when one found messages
        self._buried = False  # the last claim put messages aside, and may have stopped short of others
        self._in_vain = False  # the bell rang, and there was nothing
        self._problems: dict[str, str] = {}  # by server: the kind that was told last
        self._backoff: dict[str, Backoff] = defaultdict(Backoff)  # by server
        self._error: OutboxError | None = None
        self._turned = monotonic()
        self.sent = self.failed = self.lease_lost = 0
        self.last_claim = self.last_sent = 0.0  # seconds since 1970
        self._last_error = ""

    @abstractmethod
    async def _deliver(self, batch: Batch) -> None:
        """Carries a batch away and settles it."""

    async def _reach(self) -> bool:
        """Waits until there is somebody to deliver to. False: it is time to stop."""
        return not self._stopping.is_set()

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
            await self._close()
        if self._error is not None:
            raise self._error

    async def _close(self) -> None:
        await self._store.close()

    async def _work(self) -> None:
        while not self._stopping.is_set() and not await self._ask(self._store.connect(), otherwise=False):
            pass
        await self._tested.wait()
        await self._ask(self._store.connect(), otherwise=False)
        if await self._reach():
            self._started = True
            logger.info(self.what_is_ready, extra={"action": "ready", "listening": self._listening})
            await self._forward()
        await self._finish()

    # --- claiming

    async def _forward(self) -> None:
        while True:
            self._wake.clear()  # what happens from here on ends the next pause
            self._turned = monotonic()
            if self._stopping.is_set() or not await self._reach():
                return
            size = self._room()
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

    def _room(self) -> int:
        """How many may be claimed now.

        What is not marked is sent again should we die: so the window counts from the claim to the mark. When a claim
        hands out messages the marks before it are on disk: a crash of the database brings back no more than that.
        """
        if self._unsettled or len(self._batches) >= MOST_BATCHES:
            return 0
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
            self._batches[batch] = self._tasks.create_task(self._carry(batch))
        self._buried = bool(self._store.put_aside)
        if self._buried:
            await self._tell_put_aside()
        return batch

    async def _carry(self, batch: Batch) -> None:
        try:
            await self._deliver(batch)
        finally:
            del self._batches[batch]
            self._wake.set()

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

    # --- holding and settling

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
        backoff, silent = Backoff(LISTEN_AGAIN), False
        while True:
            try:
                await self._store.listen(self._on_listening, self._wake.set)
            except OutboxError as error:
                if self._listening or not silent:
                    logger.warning("no notifications, polling instead", extra={"action": "listen", "error": str(error)})
                if self._listening:
                    backoff.reset()
                silent, self._listening = True, False
            self._tested.set()
            await asyncio.sleep(backoff.pause())

    def _on_listening(self) -> None:
        self._listening = True
        self._tested.set()
        self._wake.set()

    async def _finish(self) -> None:
        """Lets what is in flight end; gives back the rest."""
        logger.info("stopping", extra={"action": "stop", "batches": len(self._batches)})
        limit = self._settings.shutdown
        await self._let_end(limit)
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

    async def _let_end(self, limit: float) -> None:
        if self._batches:
            await asyncio.wait(self._batches.values(), timeout=limit * 0.8)

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
        self._backoff["database"].reset()
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

    async def _back_off(self, server: str) -> None:
        self._turned = monotonic()
        seconds = self._backoff[server].pause()
        if self._stopping.is_set():
            await asyncio.sleep(min(seconds, FIRST))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _pause(self, seconds: float) -> None:
        """Until something happens, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
