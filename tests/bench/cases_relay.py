"""What the relay costs: draining a backlog into a queue, and the time from commit to the consumer."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aio_pika
import psycopg

import databases
import servers
from bench.cases_sql import BATCH, BODY
from bench.measure import Bench, Case, Contender, Row, compare
from outbox import MessageRelay
from outbox.config import RelaySettings
from outbox.publish import SENT, Publisher
from outbox.store import Store

HERE = Path(__file__).resolve().parent
WINDOW = 1000


@dataclass(frozen=True)
class Place:
    """A database with the package and a vhost with one queue behind the exchange."""

    dsn: str
    amqp_url: str

    def emit(self, count: int, keys: int) -> None:
        key = f"(n % {keys})::text" if keys else "null"
        databases.query(
            self.dsn, f"select outbox.emit('bench', '{BODY}', key => {key}) from generate_series(1, {count}) as n"
        )
        databases.query(self.dsn, "vacuum analyze outbox.message")

    def settings(self, **knobs: Any) -> RelaySettings:
        return RelaySettings(dsn=self.dsn, amqp_url=self.amqp_url, window=WINDOW, batch_size=BATCH, **knobs)


@contextmanager
def place(bench: Bench, kind: str) -> Iterator[Place]:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    manage = servers.manage
    manage(bench.management, "PUT", f"vhosts/{name}", {})
    arguments = {"x-queue-type": kind}
    manage(bench.management, "PUT", f"exchanges/{name}/outbox", {"type": "topic", "durable": True})
    manage(bench.management, "PUT", f"queues/{name}/bench", {"durable": True, "arguments": arguments})
    manage(bench.management, "POST", f"bindings/{name}/e/outbox/q/bench", {"routing_key": "#"})
    try:
        with bench.database() as dsn:
            yield Place(dsn, bench.amqp_url.rstrip("/") + f"/{name}")
    finally:
        manage(bench.management, "DELETE", f"vhosts/{name}")


def purge(bench: Bench, where: Place) -> None:
    vhost = where.amqp_url.rpartition("/")[2]
    servers.manage(bench.management, "DELETE", f"queues/{vhost}/bench/contents")


Work = Callable[[Place, int], Coroutine[None, None, float]]


async def always() -> bool:
    return True


async def publish_from_memory(where: Place, count: int) -> float:
    """The ceiling: the relay's own publisher, its window always full, no database."""
    async with open_store(where) as store:
        messages = await store.claim(uuid.uuid4(), BATCH)
        publisher = await Publisher(where.settings()).open(where.amqp_url, store.default_exchange)
    batches = iter([messages] * (count // len(messages)))

    async def publish() -> None:
        for batch in batches:
            outcomes = await publisher.publish(batch, time.monotonic(), always)
            assert all(outcome is SENT for outcome in outcomes)

    try:
        begun = time.perf_counter()
        await asyncio.gather(*(publish() for _ in range(WINDOW // len(messages))))
        return count / (time.perf_counter() - begun)
    finally:
        await publisher.close()


@asynccontextmanager
async def open_store(where: Place) -> AsyncIterator[Store]:
    store = Store(where.settings())
    store.private = True  # no pooler in between: with the settings of a relay's session
    await store.connect()
    try:
        yield store
    finally:
        await store.close()


async def relay(where: Place, count: int) -> float:
    """From the first message to the last: the others are not timed while they connect either."""
    running = MessageRelay(where.dsn, where.amqp_url, window=WINDOW, batch_size=BATCH)

    async def reach(wanted: int) -> tuple[int, float]:
        while running.sent < wanted:  # noqa: ASYNC110 - as often as it takes, and no more work for what is measured
            await asyncio.sleep(0.005)
        return running.sent, time.perf_counter()

    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        tasks.create_task(running.run())
        first, begun = await reach(1)
        last, ended = await reach(count)
        running.stop()
    assert last == count, f"{last} of {count} sent"
    return (last - first) / (ended - begun)


async def gather(where: Place, count: int) -> float:
    """A well-made loop with the library's publish: persistent, mandatory, confirmed, a batch in flight at a time."""
    connection = await aio_pika.connect(where.amqp_url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.get_exchange("outbox", ensure=False)
    done = 0
    async with connection, open_store(where) as store:
        begun = time.perf_counter()
        while done < count:
            token = uuid.uuid4()
            messages = await store.claim(token, BATCH)
            await asyncio.gather(
                *(
                    exchange.publish(
                        aio_pika.Message(
                            message.body,
                            message_id=str(message.message_id),
                            timestamp=message.created_at,
                            content_type=message.content_type,
                            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                        ),
                        message.routing_key,
                        mandatory=True,
                    )
                    for message in messages
                )
            )
            done += await store.mark_sent(token, [message.id for message in messages])
        return count / (time.perf_counter() - begun)


def drain(kind: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        count = bench.size(50_000, 5_000)
        with place(bench, kind) as where:

            def rate(work: Work, keys: int = 0, strict: str = "off", share: int = 1) -> Callable[[], float]:
                def measure() -> float:
                    databases.query(where.dsn, f"select outbox.configure('strict_keys', '{strict}')")
                    databases.query(where.dsn, "truncate outbox.message, outbox.held_key")
                    databases.query(
                        where.dsn,
                        "update outbox.lane set version = version + 1, token = null, relay = null, "
                        "leased_until = null, handed = '{}'",
                    )
                    purge(bench, where)
                    where.emit(count // share, keys)
                    return asyncio.run(work(where, count // share))

                return measure

            contenders = [
                Contender("relay", rate(relay)),
                Contender("publish from memory", rate(publish_from_memory)),
                Contender("aio-pika publish, gather", rate(gather)),
            ]
            reach = {"publish from memory": 0.85, "aio-pika publish, gather": 2.5}
            yield from compare(f"drain, {kind}", contenders, bench.size(5, 1), reach)
            # The same numbers: what the client itself can do must be worth reaching.
            yield from compare(f"ceiling, {kind}", contenders[1:], 0, {"aio-pika publish, gather": 2.5})
            variants = [
                Contender("10,000 keys", rate(relay, 10_000)),
                Contender("one key", rate(relay, 1)),
                Contender("10,000 keys, strict", rate(relay, 10_000, "on")),
                # One message a round trip: fewer will do.
                Contender("one key, strict", rate(relay, 1, "on", share=20)),
            ]
            for variant in variants:
                pair = [variant, Contender("unkeyed", rate(relay))]
                yield from compare(f"drain, {kind}, {variant.name}", pair, bench.size(3, 1), {})

    return case


# --- latency


class Consumer(threading.Thread):
    """Notes when each message arrives, by the number in its body."""

    def __init__(self, amqp_url: str) -> None:
        super().__init__(daemon=True)
        self.amqp_url = amqp_url
        self.arrived: dict[int, float] = {}
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self.task: asyncio.Task[None]
        self.start()
        assert self.ready.wait(20)

    def run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self.consume())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.join()

    async def consume(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
        async with await aio_pika.connect(self.amqp_url) as connection:
            await self.note_arrivals(connection)

    async def note_arrivals(self, connection: aio_pika.abc.AbstractConnection) -> None:
        channel = await connection.channel()
        await channel.set_qos(100)
        queue = await channel.get_queue("bench", ensure=False)
        self.ready.set()
        async with queue.iterator(no_ack=True) as messages:
            async for message in messages:
                self.arrived[json.loads(message.body)["n"]] = time.perf_counter()


def emit_at(dsn: str, statement: str, per_second: int, seconds: float) -> dict[int, float]:
    """Transactions at an even pace; returns when COMMIT returned, by number."""
    committed: dict[int, float] = {}
    count = max(int(per_second * seconds), 20)
    workers = max(per_second // 200, 1)  # one alone would not keep the pace: each commit is a sync
    databases.query(dsn, "create table orders (n integer)")

    def work(first: int) -> None:
        with psycopg.connect(dsn) as connection:
            for number in range(first, count, workers):
                time.sleep(max(begun + number / per_second - time.perf_counter(), 0))
                connection.execute("insert into orders values (%s)", [number])
                connection.execute(statement, [json.dumps({"n": number})])
                connection.commit()
                committed[number] = time.perf_counter()

    begun = time.perf_counter() + 0.2
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    return committed


def median_delay(where: Place, command: list[str], statement: str, per_second: int, seconds: float) -> float:
    """Median milliseconds from COMMIT's return to the consumer."""
    consumer = Consumer(where.amqp_url)
    addresses = {"OUTBOX_DSN": where.dsn, "OUTBOX_AMQP_URL": where.amqp_url}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | addresses
    ) as forwarder:
        try:
            time.sleep(2)
            committed = emit_at(where.dsn, statement, per_second, seconds)
            deadline = time.monotonic() + 10
            while len(consumer.arrived) < len(committed) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            forwarder.terminate()
            consumer.close()
    assert len(consumer.arrived) == len(committed), f"{len(consumer.arrived)} of {len(committed)} arrived"
    return 1000 * statistics.median(consumer.arrived[number] - at for number, at in committed.items())


def latency(per_second: int) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        seconds = bench.size(10, 3)

        def delay(command: list[str], statement: str, prepare: str = "") -> Callable[[], float]:
            def measure() -> float:
                with place(bench, "classic") as where:
                    if prepare:
                        databases.query(where.dsn, prepare)
                    filled = [part.format(dsn=where.dsn, amqp_url=where.amqp_url) for part in command]
                    return median_delay(where, filled, statement, per_second, seconds)

            return measure

        relay_command = [sys.executable, "-m", "outbox", "relay"]
        bare_command = [sys.executable, str(HERE / "bare_loop.py"), "{dsn}", "{amqp_url}"]
        bare_table = """
            create table bare (id bigserial primary key, body text);
            create function ring() returns trigger language plpgsql as
                $$ begin perform pg_notify('bare', ''); return null; end $$;
            create trigger ring after insert on bare for each statement execute function ring();
            """
        contenders = [
            Contender(
                "bare LISTEN and publish", delay(bare_command, "insert into bare (body) values (%s)", bare_table)
            ),
            Contender("relay", delay(relay_command, "select outbox.emit('bench', %s)")),
        ]
        # Milliseconds, not rates: the ratio of bare to ours says how much of its speed is left.
        rows = compare(f"latency p50, {per_second}/s", contenders, bench.size(3, 2), {"relay": 0.67})
        for row in rows:
            yield Row(row.case, "bare LISTEN and publish", row.ratio, row.low, row.high, row.reach, row.rates)

    return case


CASES: dict[str, Case] = {
    "drain-classic": drain("classic"),
    "drain-quorum": drain("quorum"),
    "latency-10": latency(10),
    "latency-100": latency(100),
    "latency-1000": latency(1000),
}
