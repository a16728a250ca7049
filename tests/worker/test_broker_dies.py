"""The broker restarts, dies, raises an alarm or loses its patience: on a broker of the test's own.

Each fault takes seconds, so it meets two workers at once: one on classic queues, one on quorum queues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from worker.conftest import Broker, Running, eventually, running, worker_on

import servers
from outbox import Listener, listen

pytestmark = pytest.mark.servers

KINDS = ("classic", "quorum")


class Own(Broker):
    """A broker that may be stopped."""

    def __init__(self, pair: servers.Servers) -> None:
        super().__init__(lambda *_: None, pair.amqp_url)
        self.server = pair.rabbitmq

    async def publish(self, *args: Any, **kwargs: Any) -> str:
        if self._connection is not None and self._connection.transport.connection.is_closed:
            self._channel = None
        return await super().publish(*args, **kwargs)

    async def delete(self, queue: str) -> None:
        await (await self._channel.get_queue(queue)).delete(if_unused=False, if_empty=False)

    async def publish_to_both(self, routing_key: str, body: object = None) -> None:
        for kind in KINDS:
            await self.publish(routing_key, body, exchange=kind)


@pytest.fixture(scope="module")
def pair() -> Iterator[servers.Servers]:
    with servers.private(postgres=False, quiet=True) as made:
        yield made


@contextlib.asynccontextmanager
async def both(
    broker: Broker, listeners: Callable[[str], Sequence[Listener]], **knobs: Any
) -> AsyncIterator[list[Running]]:
    """A worker for each kind of queue, with an exchange of that name."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [worker_on(broker, *listeners(kind), exchange_name=kind, queue_type=kind, **knobs) for kind in KINDS]
        yield [await stack.enter_async_context(running(one)) for one in workers]


async def test_restart_and_kill(pair: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.backoff.LAST", 0.5)  # a restart takes seconds, and so would the waiting
    broker = Own(pair)
    seen: dict[str, set[int]] = defaultdict(set)

    def listeners(kind: str) -> list[Listener]:
        @listen("a", queue=f"{kind}.q", retry_delays=(0.1,))
        async def handle(body: int, attempt_count: int) -> None:
            if attempt_count == 1:
                raise ValueError
            seen[kind].add(body)

        return [handle]

    async with both(broker, listeners) as workers:
        for number, mode in enumerate(("fast", "kill")):
            for one in workers:
                one.worker.ready.clear()
            await broker.publish_to_both("a", number)
            await asyncio.to_thread(pair.rabbitmq.restart, mode)
            for one in workers:
                await asyncio.wait_for(one.worker.ready.wait(), 60)
            await broker.publish_to_both("a", 10 + number)
            wanted = {number, 10 + number}
            await eventually(lambda wanted=wanted: all(wanted <= seen[kind] for kind in KINDS), "both messages", 60)  # type: ignore[misc]
    await broker.close()


async def test_w7_a_retry_whose_queue_is_gone_when_its_delay_ends(pair: servers.Servers) -> None:
    """A quorum queue keeps it until it can hand it over. A classic one has nothing to keep it by."""
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, dead_letter_worker_publisher_confirm_timeout, 500).")
    broker = Own(pair)
    attempts: dict[str, list[int]] = defaultdict(list)

    def listeners(kind: str) -> list[Listener]:
        @listen("a", queue=f"{kind}.gone", retry_delays=(0.8,))
        async def handle(_body: Any, attempt_count: int) -> None:
            attempts[kind].append(attempt_count)
            if attempt_count == 1:
                raise ValueError

        return [handle]

    async with both(broker, listeners):
        await broker.publish_to_both("a")
        await eventually(lambda: all(attempts[kind] == [1] for kind in KINDS), "an attempt")
    for kind in KINDS:
        await broker.delete(f"{kind}.gone")
    await asyncio.sleep(1.2)
    async with both(broker, listeners):
        await eventually(lambda: attempts["quorum"] == [1, 2], "the retry")
    assert attempts["classic"] == [1]
    await broker.close()


async def test_w9_longer_than_the_broker_allows(pair: servers.Servers, caplog: pytest.LogCaptureFixture) -> None:
    """It closes the channel; the message comes again, and the worker goes on."""
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1000).")
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
    broker = Own(pair)
    seen: dict[str, list[int]] = defaultdict(list)

    def listeners(kind: str) -> list[Listener]:
        again = asyncio.Event()

        @listen("slow", queue=f"{kind}.slow")
        async def handle(body: int) -> None:
            seen[kind].append(body)
            if len(seen[kind]) == 2:
                again.set()
            await again.wait()

        return [handle]

    def unacknowledged() -> set[str]:
        words = "could not acknowledge a message: it comes again"
        return {vars(record)["queue"] for record in caplog.records if record.message == words}

    async with both(broker, listeners):
        await broker.publish_to_both("slow", 1)
        await eventually(lambda: all(len(seen[kind]) == 2 for kind in KINDS), "the message again", 30)
        await eventually(lambda: unacknowledged() == {"classic.slow", "quorum.slow"}, "a word about the first", 30)
    assert [await broker.ready(f"{kind}.slow") for kind in KINDS] == [0, 0]
    await broker.close()
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")


async def test_w16_an_alarm_blocks_copies_not_consumers(pair: servers.Servers) -> None:
    broker = Own(pair)
    attempts: dict[str, list[int]] = defaultdict(list)
    others: dict[str, list[int]] = defaultdict(list)
    alarm = asyncio.Event()

    def listeners(kind: str) -> list[Listener]:
        @listen("a", queue=f"{kind}.fails", retry_delays=(0.05,))
        async def fails(body: int, attempt_count: int) -> None:
            await alarm.wait()
            attempts[kind].append(attempt_count)
            if body == attempt_count == 1:
                raise ValueError

        @listen("a", queue=f"{kind}.works")
        async def works(body: int) -> None:
            await alarm.wait()
            await eventually(lambda: attempts[kind], "the attempt whose copy is blocked")
            others[kind].append(body)

        return [fails, works]

    async with both(broker, listeners, prefetch_count=1):
        for number in range(1, 4):
            await broker.publish_to_both("a", number)
        pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0.000001")
        alarm.set()
        try:
            await eventually(
                lambda: all(others[kind] == [1, 2, 3] for kind in KINDS),
                "messages that were there, handled under the alarm",
            )
            assert attempts == {kind: [1] for kind in KINDS}, "the copy waits, and with it what is behind"
        finally:
            pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")
        await eventually(lambda: all(sorted(attempts[kind]) == [1, 1, 1, 2] for kind in KINDS), "a retry, and the rest")
    await broker.close()
