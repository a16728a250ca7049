"""The broker restarts, dies, raises an alarm or loses its patience: on a broker of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from worker.conftest import Broker, eventually, running, worker_on

import servers
from outbox import listen

pytestmark = pytest.mark.servers


class Own(Broker):
    """A broker that may be stopped."""

    def __init__(self, pair: servers.Servers) -> None:
        super().__init__(lambda *_: None, pair.amqp_url)
        self.server = pair.rabbitmq

    async def publish(self, *args: Any, **kwargs: Any) -> str:
        if self._connection is not None and self._connection.transport.connection.is_closed:
            self._channel = None
        return await super().publish(*args, **kwargs)


@pytest.fixture(scope="module")
def pair() -> Iterator[servers.Servers]:
    with servers.private(postgres=False, quiet=True) as made:
        yield made


async def test_restart_and_kill(pair: servers.Servers) -> None:
    broker = Own(pair)
    seen: list[int] = []
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.1,))
    async def handle(body: int, attempt_count: int) -> None:
        attempts.append(attempt_count)
        if attempt_count == 1:
            raise ValueError
        seen.append(body)

    async with running(worker_on(broker, handle)) as one:
        for number, mode in enumerate(("fast", "kill")):
            one.worker.ready.clear()
            await broker.publish("a", number)
            await asyncio.to_thread(pair.rabbitmq.restart, mode)
            await asyncio.wait_for(one.worker.ready.wait(), 60)
            await broker.publish("a", 10 + number)
            await eventually(lambda number=number: {number, 10 + number} <= set(seen), "both messages", 60)  # type: ignore[misc]
    await broker.close()


async def test_w9_longer_than_the_broker_allows(pair: servers.Servers, caplog: pytest.LogCaptureFixture) -> None:
    """It closes the channel; the message comes again, and the worker goes on."""
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1000).")
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
    broker = Own(pair)
    seen: list[int] = []
    again = asyncio.Event()

    @listen("slow", queue="slow")
    async def handle(body: int) -> None:
        seen.append(body)
        if len(seen) == 2:
            again.set()
        await again.wait()

    async with running(worker_on(broker, handle)):
        await broker.publish("slow", 1)
        await eventually(lambda: len(seen) == 2, "the message again", 30)
        await eventually(
            lambda: "could not acknowledge a message: it comes again" in caplog.messages, "a word about the first", 30
        )
    assert await broker.ready("slow") == 0
    await broker.close()
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")


async def test_w16_an_alarm_blocks_copies_not_consumers(pair: servers.Servers) -> None:
    broker = Own(pair)
    attempts: list[int] = []
    others: list[int] = []

    @listen("fails", queue="fails", retry_delays=(0.05,))
    async def fails(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        if attempt_count == 1:
            raise ValueError

    @listen("works", queue="works")
    async def works(body: int) -> None:
        await asyncio.sleep(0.3 if body == 1 else 0)
        others.append(body)

    async with running(worker_on(broker, fails, works, prefetch_count=1)):
        for number in range(1, 4):
            await broker.publish("works", number)
        pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0.000001")
        try:
            await eventually(lambda: others == [1, 2, 3], "messages that were there, handled under the alarm")
        finally:
            pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")
        await broker.publish("fails", 1)
        await eventually(lambda: attempts == [1, 2], "a retry after the alarm")
    await broker.close()
