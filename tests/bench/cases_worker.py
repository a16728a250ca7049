"""What the worker costs: a listener that does nothing against a bare consumer; two workers; all the way from emit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aio_pika
import psycopg

import servers
from bench.measure import Bench, Case, Contender, Row, compare
from outbox import MessageRelay, OutboxMessage, Worker, emit_many, listen
from outbox.topology import topology

HERE = Path(__file__).resolve().parent
PREFETCH = 10
BODY = b'{"order": 1, "note": "' + b"x" * 230 + b'"}'


@listen("#", queue="bench")
async def nothing(_body: Any) -> None: ...


@contextmanager
def vhost(bench: Bench) -> Iterator[str]:
    """A vhost with the worker's own topology, so that both read the same kind of queue."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    servers.manage(bench.management, "PUT", f"vhosts/{name}", {})
    found = topology("outbox", [nothing], (1,))
    servers.manage(bench.management, "PUT", f"exchanges/{name}/outbox", {"type": "topic", "durable": True})
    for queue in found.queues:
        servers.manage(
            bench.management, "PUT", f"queues/{name}/{queue.name}", {"durable": True, "arguments": queue.arguments}
        )
    servers.manage(bench.management, "POST", f"bindings/{name}/e/outbox/q/bench", {"routing_key": "#"})
    try:
        yield bench.amqp_url.rstrip("/") + f"/{name}"
    finally:
        servers.manage(bench.management, "DELETE", f"vhosts/{name}")


async def fill(url: str, count: int) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange("outbox", ensure=False)
        for begin in range(0, count, 500):
            await asyncio.gather(
                *(
                    exchange.publish(aio_pika.Message(BODY, delivery_mode=2, message_id=str(uuid.uuid4())), "bench")
                    for _ in range(begin, min(begin + 500, count))
                )
            )


class Clock:
    """Counts, and knows when the last came, and when those of the start had: they are not timed."""

    def __init__(self, count: int) -> None:
        self.left, self.count = count, count - 2 * PREFETCH
        self.begun = self.ended = 0.0
        self.done = asyncio.Event()

    def tick(self) -> None:
        self.left -= 1
        if self.left == self.count:
            self.begun = self.begun or time.perf_counter()
        if not self.left:
            self.ended = time.perf_counter()
            self.done.set()

    @property
    def rate(self) -> float:
        return self.count / (self.ended - self.begun)


async def bare(url: str, count: int) -> float:
    """aio-pika as its documentation shows it, and an acknowledgement for each message."""
    clock = Clock(count)
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.get_queue("bench", ensure=False)

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            async with message.process():
                clock.tick()

        await queue.consume(handle)
        async with asyncio.timeout(600):
            await clock.done.wait()
    return clock.rate


async def worker(url: str, count: int) -> float:
    clock = Clock(count)

    @listen("#", queue="bench")
    async def handle(_body: Any) -> None:
        clock.tick()

    running = Worker(url, listeners=[handle], prefetch_count=PREFETCH, retry_delays=(1,), enable_metrics=False)
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(600):
        await clock.done.wait()
    running.stop()
    await task
    return clock.rate


def filled(url: str, count: int, work: Callable[[str, int], Coroutine[Any, Any, float]]) -> Callable[[], float]:
    async def measure() -> float:
        await fill(url, count)
        return await work(url, count)

    return lambda: asyncio.run(measure())


def against_bare(bench: Bench) -> Iterator[Row]:
    count = bench.size(20_000, 4_000)
    with vhost(bench) as url:
        contenders = [Contender("worker", filled(url, count, worker)), Contender("bare", filled(url, count, bare))]
        yield from compare("worker, no-op listener", contenders, bench.size(7, 2), {"bare": 0.9})


SLOW = """
import asyncio, sys
from outbox import Worker, listen

@listen("#", queue="bench")
async def handle(_body):
    await asyncio.sleep(0.005)

asyncio.run(Worker(sys.argv[1], listeners=[handle], prefetch_count=10, retry_delays=(1,)).run())
"""


def processes(url: str, count: int, number: int) -> Callable[[], float]:
    """So many workers whose listener waits 5 ms, as one that asks another service does."""

    def measure() -> float:
        asyncio.run(fill(url, count))
        started = [
            subprocess.Popen([sys.executable, "-c", SLOW, url], stderr=subprocess.DEVNULL) for _ in range(number)
        ]
        try:
            while asyncio.run(look(url)).consumers < number:
                time.sleep(0.02)
            begun, left = time.perf_counter(), asyncio.run(look(url)).ready
            while asyncio.run(look(url)).ready:
                time.sleep(0.02)
            return left / (time.perf_counter() - begun)
        finally:
            for one in started:
                one.terminate()
            for one in started:
                one.wait()

    return measure


class Queue(NamedTuple):
    ready: int
    consumers: int


async def look(url: str) -> Queue:
    """Asks the queue itself: what the management tells is seconds old."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        found = (await channel.declare_queue("bench", passive=True)).declaration_result
        return Queue(found.message_count or 0, found.consumer_count or 0)


def two_share(bench: Bench) -> Iterator[Row]:
    count = bench.size(10_000, 6_000)
    with vhost(bench) as url:
        contenders = [
            Contender("two workers", processes(url, count, 2)),
            Contender("one worker", processes(url, count, 1)),
        ]
        yield from compare("two workers, listener 5 ms", contenders, bench.size(3, 2), {"one worker": 1.5})


async def all_the_way(dsn: str, url: str, count: int) -> float:
    """emit, relay, listener: from the first emit until the last message was handled; one relay, one worker."""
    clock = Clock(count)

    @listen("#", queue="bench")
    async def handle(_body: Any) -> None:
        clock.tick()

    running = Worker(url, listeners=[handle], prefetch_count=100, retry_delays=(1,), enable_metrics=False)
    relay = MessageRelay(dsn, url)
    tasks = [asyncio.create_task(running.run()), asyncio.create_task(relay.run())]
    await running.ready.wait()
    clock.begun = time.perf_counter()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for _ in range(count // 100):
            await emit_many(connection, [OutboxMessage("bench", BODY) for _ in range(100)])
    async with asyncio.timeout(600):
        await clock.done.wait()
    running.stop()
    relay.stop()
    await asyncio.gather(*tasks)
    return clock.rate


def end_to_end(bench: Bench) -> Iterator[Row]:
    count = bench.size(20_000, 4_000)
    with vhost(bench) as url, bench.database() as dsn:
        contenders = [
            Contender("emit to listener", lambda: asyncio.run(all_the_way(dsn, url, count))),
            Contender("worker alone", filled(url, count, worker)),
        ]
        yield from compare("emit, relay and listener", contenders, bench.size(3, 2), {})


CASES: dict[str, Case] = {"worker-noop": against_bare, "worker-two": two_share, "worker-end-to-end": end_to_end}
