"""The loop: claim a batch, publish it, settle each message by what the broker said. Knows neither driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from time import monotonic
from typing import Any
from uuid import uuid4

from outbox.config import RelaySettings
from outbox.errors import BrokerUnavailableError, UnavailableError
from outbox.publish import Failed, Publisher, Sent, Unknown
from outbox.store import Store

logger = logging.getLogger(__name__)

BACKOFF_FIRST = 0.5
BACKOFF_LAST = 30.0
CLEANUP_EVERY = 60.0
# How soon to look again when a transaction with a message in it is about to end.
COMMIT_WAIT = 0.02


class MessageRelay:
    """Carries messages from one database to one broker until stop() is called. Several may run side by side."""

    def __init__(self, dsn: str, amqp_url: str, **knobs: Any) -> None:
        self._settings = RelaySettings(dsn=dsn, amqp_url=amqp_url, **knobs)
        self._stopping = asyncio.Event()
        self._backoff = BACKOFF_FIRST
        self._carefully = False

    def stop(self) -> None:
        """Ends run() after the batch in hand is settled."""
        self._stopping.set()

    async def run(self) -> None:
        """Raises ConfigurationError when only a person can help; waits and reconnects when a server is away."""
        work = asyncio.create_task(self._work())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                logger.info("stopping", extra={"action": "stop"})
                await asyncio.wait({work}, timeout=self._settings.shutdown)
        finally:
            stopping.cancel()
            if not work.done():
                logger.warning("stopped before the batch was settled; its lease runs out", extra={"action": "stop"})
                work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _work(self) -> None:
        while not self._stopping.is_set():
            careful = self._carefully
            try:
                async with Store(self._settings) as store, Publisher(self._settings) as publisher:
                    logger.info("relay ready", extra={"action": "ready"})
                    await self._forward(store, publisher)
                    return
            except UnavailableError as error:
                # A batch that broke the session deserves one more try, which finds the message that did it.
                if self._settings.once and careful == self._carefully:
                    raise
                logger.warning(
                    "server unavailable, trying again",
                    extra={"action": "retry", "kind": type(error).__name__, "error": str(error), "in": self._backoff},
                )
            await self._pause()

    async def _forward(self, store: Store, publisher: Publisher) -> None:
        cleaned = monotonic()
        while not self._stopping.is_set():
            handled = await self._batch(store, publisher)
            self._backoff = BACKOFF_FIRST
            if monotonic() - cleaned > CLEANUP_EVERY:
                await store.cleanup()
                await store.wait(0)  # forgets what was announced while we were busy
                cleaned = monotonic()
            if handled:
                continue
            if self._settings.once:
                return
            await self._sleep(store, publisher)

    async def _batch(self, store: Store, publisher: Publisher) -> int:
        if not publisher.is_open:
            raise BrokerUnavailableError("the connection was lost")
        token = uuid4()
        messages = await store.claim(token)
        if not messages:
            return 0
        outcomes = await publisher.publish(messages, carefully=self._carefully)

        sent = [m.id for m, o in zip(messages, outcomes, strict=True) if isinstance(o, Sent)]
        failed = [(m.id, o) for m, o in zip(messages, outcomes, strict=True) if isinstance(o, Failed)]
        unknown = [o for o in outcomes if isinstance(o, Unknown)]
        self._carefully = bool(unknown)
        settled = 0
        if sent:
            settled += await store.mark_sent(token, sent)
        if failed:
            settled += await store.mark_failed(
                token, [i for i, _ in failed], [o.error for _, o in failed], [o.reason for _, o in failed]
            )
        released = await store.release(token) if unknown else 0
        logger.info(
            "batch done",
            extra={"action": "batch", "sent": len(sent), "failed": len(failed), "released": released,
                   "lost": len(sent) + len(failed) - settled},
        )  # fmt: skip
        if unknown and not (sent or failed):
            raise BrokerUnavailableError(unknown[0].error)
        return len(messages)

    async def _sleep(self, store: Store, publisher: Publisher) -> None:
        if not await store.arm_wakeup():
            await self._wait(COMMIT_WAIT)
            return
        # What was committed before we armed rang no bell: look once more.
        if not await self._batch(store, publisher):
            await self._listen(store)
        await store.disarm_wakeup()

    async def _listen(self, store: Store) -> None:
        """Until messages come in, the poll interval is over, or somebody calls stop()."""
        waiting = asyncio.create_task(store.wait(self._settings.poll))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            waiting.cancel()
            await asyncio.wait({waiting})
        else:
            await waiting

    async def _pause(self) -> None:
        # Spread out, so that relays which lost one server together do not come back together.
        seconds = self._backoff * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it
        self._backoff = min(self._backoff * 2, BACKOFF_LAST)
        await self._wait(seconds)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
