"""Between a message and its listener: reads the body, calls, limits the time, accepts once; and returns a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from outbox import transaction
from outbox.decode import UnreadableError
from outbox.listener import Listener, Reject
from outbox.tracking import tracking

logger = logging.getLogger(__name__)

TRACKING_HEADER = "x-outbox-tracking-ids"
LONGEST_ERROR = 500
AWAY_FIRST, AWAY_LAST = 0.2, 10.0


class Incoming(NamedTuple):
    """A message as a listener may ask for it, wherever it came from."""

    body: bytes
    routing_key: str
    message_id: str | None
    headers: Mapping[str, Any]
    attempt: int
    raw: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Done:
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """To be tried again, or given up after the last delay. counts: whether it is the listener's doing."""

    kind: str
    text: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Dead:
    reason: str
    kind: str
    text: str


Outcome = Done | Failed | Dead
DONE, DUPLICATE = Done(), Done(duplicate=True)


class AwayError(Exception):
    """The database was away before the listener was called."""


class FirstTime:
    """Whether a message was accepted. What goes wrong before that is the database's doing, not the listener's."""

    accepted = False

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not self.accepted and not isinstance(error, transaction.ConnectError):
            raise AwayError from error


class Handling:
    """Calls listeners. One for a worker."""

    def __init__(self, connect: transaction.Connect | None, timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._away = False
        self.threads = 0

    async def __call__(self, listener: Listener, incoming: Incoming) -> Outcome:
        try:
            body = listener.decode(incoming.body)
        except UnreadableError as error:
            return Dead("unreadable", "UnreadableError", str(error))
        identity = uuid_of(incoming.message_id)
        if listener.once and identity is None:
            return Dead("no_message_id", "", "its message_id is missing or no UUID, so that a duplicate cannot be told")
        limit = listener.timeout or self._timeout
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                with restored(incoming, identity) as chain:
                    arguments = arguments_for(listener, incoming, body, chain)
                    if listener.once:
                        return await self._accepted(listener, str(identity), arguments)
                    await self._call(listener, arguments)
                    return DONE
        except transaction.ConnectError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            logger.debug("listener failed", exc_info=True, extra={"action": "handle", "queue": listener.queue})
            return self._verdict(error, limit if timer.expired() else None)

    def _verdict(self, error: BaseException, limit: float | None) -> Failed | Dead:
        if isinstance(error, Reject):
            return Dead("rejected", "Reject", trimmed(error))
        if limit is None:
            return Failed(type(error).__name__, trimmed(error))
        if self._away:
            return Failed("TimeoutError", "the database was away", counts=False)
        return Failed("TimeoutError", f"the listener took longer than {limit:g} s")

    async def _call(self, listener: Listener, arguments: Mapping[str, Any]) -> None:
        if listener.is_async:
            await listener.callback(**arguments)
        else:
            await self._in_thread(lambda: listener.callback(**arguments))

    async def _accepted(self, listener: Listener, identity: str, arguments: Mapping[str, Any]) -> Outcome:
        """Effects, emits and acceptance commit together. While the database is away, the message stays in hand."""
        seconds = AWAY_FIRST
        while True:
            try:
                outcome = await self._once(listener, identity, arguments)
            except AwayError as error:
                if not self._away:
                    cause = error.__cause__
                    logger.warning(
                        "database unavailable, trying again",
                        extra={
                            "action": "trouble",
                            "what": "database",
                            "kind": type(cause).__name__,
                            "error": trimmed(cause),
                        },
                    )
                self._away = True
                await asyncio.sleep(seconds)
                seconds = min(seconds * 2, AWAY_LAST)
                continue
            self._away = False
            return outcome

    async def _once(self, listener: Listener, identity: str, arguments: Mapping[str, Any]) -> Outcome:
        connect, first = self._connect, FirstTime()
        assert connect is not None

        async def in_loop() -> None:
            with first:
                async with transaction.begin_async(connect) as tx:
                    first.accepted = await transaction.accept(tx, listener.queue, identity)
                    if first.accepted:
                        await listener.callback(tx=tx, **arguments)

        def in_thread() -> None:
            with first, transaction.begin(connect) as tx:
                first.accepted = transaction.accept(tx, listener.queue, identity)
                if first.accepted:
                    listener.callback(tx=tx, **arguments)

        await (in_loop() if listener.is_async else self._in_thread(in_thread))
        return DONE if first.accepted else DUPLICATE

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """In a thread of its own, which nothing waits for when the process ends: a pool's could hold it up for ever."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = copy_context()

        def report(value: Any, error: BaseException | None) -> None:
            self.threads -= 1
            if not future.done():
                future.set_result((value, error))

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(function)
            except BaseException as raised:  # noqa: BLE001 - it is raised where it is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, value, error)

        self.threads += 1
        threading.Thread(target=work, name="outbox listener", daemon=True).start()
        value, error = await future
        if error is not None:
            raise error
        return value


def arguments_for(listener: Listener, incoming: Incoming, body: Any, chain: tuple[str, ...]) -> dict[str, Any]:
    """What the listener's arguments ask for by their names; the transaction comes later."""
    found: dict[str, Any] = {listener.body_argument: body}
    wants = listener.wants
    if not wants:
        return found
    if "routing_key" in wants:
        found["routing_key"] = incoming.routing_key
    if "message" in wants:
        found["message"] = incoming.raw()
    if "tracking_ids" in wants:
        found["tracking_ids"] = chain
    if "queue_name" in wants:
        found["queue_name"] = listener.queue
    if "attempt_count" in wants:
        found["attempt_count"] = incoming.attempt
    return found


@contextlib.contextmanager
def restored(incoming: Incoming, identity: UUID | None) -> Iterator[tuple[str, ...]]:
    """The chain of messages and the trace that led here: what the listener emits continues both."""
    given = incoming.headers.get(TRACKING_HEADER)
    chain = [found for one in given if (found := uuid_of(one))] if isinstance(given, list) else []
    if not chain and identity is not None:
        chain = [identity]
    sentry = sys.modules.get("sentry_sdk")
    if "opentelemetry.trace" not in sys.modules and sentry is None:
        with tracking(chain) as found_chain:
            yield found_chain
        return
    with contextlib.ExitStack() as around:
        if "opentelemetry.trace" in sys.modules:
            from opentelemetry import context, propagate  # noqa: PLC0415 - only if the application has loaded it

            token = context.attach(propagate.extract(texts(incoming.headers)))
            around.callback(context.detach, token)
        if sentry is not None and sentry.is_initialized():
            around.enter_context(sentry.isolation_scope())
            sentry.continue_trace(texts(incoming.headers))
        yield around.enter_context(tracking(chain))


def texts(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if isinstance(value, str)}


def uuid_of(text: Any) -> UUID | None:
    try:
        return UUID(text)
    except (ValueError, TypeError, AttributeError):
        return None


def trimmed(error: BaseException | None) -> str:
    text = " ".join(str(error or "").split())
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 3] + "..."


def next_delay(attempt: int, retry_delays: Sequence[float]) -> float | None:
    """How long to wait after this attempt; none: it was the last."""
    return retry_delays[attempt - 1] if attempt <= len(retry_delays) else None


__all__ = ["DONE", "DUPLICATE", "Dead", "Done", "Failed", "Handling", "Incoming", "Outcome", "next_delay"]
