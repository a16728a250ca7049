"""What the relay costs: draining a backlog into a queue, with keys, and with bodies of several sizes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import aio_pika

from bench.measure import Bench, Case, Contender, Row, compare, take_turns
from bench.place import BATCH, KINDS, OLD_KIND, WINDOW, Place, place
from bench.processes import apart
from outbox import MessageRelay, loop
from outbox.confirms import SENT
from outbox.publish import Publisher
from outbox.store import ClaimedMessage, Store

Work = Callable[[Place, int], Coroutine[None, None, float]]
# Large enough that most claims are served by one lane, and that the queue is not a new one all the time.
BACKLOG = 50_000
SIZES = {256: "256 B", 4096: "4 KiB", 65536: "64 KiB"}


async def always() -> bool:
    return True


async def publish_from_memory(where: Place, count: int) -> float:
    """The ceiling: the relay's own publisher, its window always full, no database."""
    async with open_store(where) as store:
        messages = await store.claim(uuid.uuid4(), BATCH)
        # The relay keeps a batch back while it claims and marks: here all of the window is with the broker.
        publisher = await Publisher(where.settings(WINDOW + BATCH)).open(where.amqp_url, store.default_exchange)
    count -= count % len(messages)
    batches = iter([messages] * (count // len(messages)))
    watch = Watch(count)

    async def publish() -> None:
        for batch in batches:
            outcomes = await publisher.publish(batch, time.monotonic(), always)
            assert all(outcome is SENT for outcome in outcomes), next(one for one in outcomes if one is not SENT)
            watch.sent(batch)

    try:
        # The library's queue takes ten writes: with large bodies that is less than the window.
        await asyncio.gather(*(publish() for _ in range(min(WINDOW // len(messages), 10))))
        return await watch.rate
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


class Watch:
    """The clock of every drain: from the first batch that is done, when a full window is on its way, to the last.

    It is told of each batch: to look every few milliseconds would cost the relay time that others have.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted, self.total, self.first, self.begun = wanted, 0, 0, 0.0
        self.rate: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def sent(self, messages: Sequence[ClaimedMessage]) -> None:
        self.total += len(messages)
        # (Not the one message that a relay sends first on a new connection: nothing is on its way behind that.)
        if not self.first and len(messages) > 1:
            self.first, self.begun = self.total, time.perf_counter()
        if self.total == self.wanted:
            self.rate.set_result((self.total - self.first) / (time.perf_counter() - self.begun))


async def relay(where: Place, count: int) -> float:
    watch = Watch(count)
    running = MessageRelay(where.dsn, where.amqp_url, window=WINDOW, batch_size=BATCH, hooks=[watch])
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        tasks.create_task(running.run())
        await watch.rate
        running.stop()
    assert watch.total == count, f"{watch.total} of {count} sent"
    return watch.rate.result()


async def gather(where: Place, count: int) -> float:
    """A well-made loop with the library's publish: persistent, mandatory, confirmed, a batch in flight at a time."""
    connection = await aio_pika.connect(where.amqp_url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.get_exchange("outbox", ensure=False)
    watch = Watch(count)
    async with connection, open_store(where) as store:
        while not watch.rate.done():
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
            settled = await store.mark_sent(token, [message.id for message in messages])
            assert settled == len(messages), f"{settled} of {len(messages)} settled"
            watch.sent(messages)
        return await watch.rate


def rate(where: Place, work: Work, count: int, *, keys: int = 0, strict: str = "off", size: int = 256) -> float:
    where.clear(strict)
    where.emit(count, keys, size)
    return loop.run(work(where, count))


def drain(kind: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        # Short rounds, as many forwards as backwards: what else the machine does comes and goes within seconds.
        count = bench.size(BACKLOG, 5_000)
        rounds = bench.size(12, 2) if kind in KINDS else bench.size(3, 1)
        with place(bench, kind) as where:
            contenders = [
                Contender("relay", lambda: rate(where, relay, count)),
                Contender("publish from memory", lambda: rate(where, publish_from_memory, count)),
                Contender("aio-pika publish, gather", lambda: rate(where, gather, count)),
            ]
            reach = {"publish from memory": 0.85, "aio-pika publish, gather": 2.5} if kind in KINDS else {}
            yield from compare(f"drain, {kind}", contenders, rounds, reach)
            # The same numbers: what the client itself can do must be worth reaching.
            reach = {"aio-pika publish, gather": 2.5} if kind in KINDS else {}
            yield from compare(f"ceiling, {kind}", contenders[1:], 0, reach)

    return case


def drain_apart(bench: Bench) -> Iterator[Row]:
    """What the relay would reach if the broker did not share its cores with it."""
    for kind in KINDS:
        count = bench.size(BACKLOG, 5_000)
        with place(bench, kind) as where, apart(bench.broker_pid, bench.postgres_pid):
            contenders = [
                Contender("relay", partial(rate, where, relay, count)),
                Contender("publish from memory", partial(rate, where, publish_from_memory, count)),
            ]
            yield from compare(f"drain, {kind}, broker apart", contenders, bench.size(3, 1), {})


def keyed(kind: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        count = bench.size(20_000, 4_000)
        with place(bench, kind) as where:
            unkeyed = Contender("unkeyed", lambda: rate(where, relay, count))
            variants = [
                Contender("10,000 keys", lambda: rate(where, relay, count, keys=10_000)),
                Contender("one key", lambda: rate(where, relay, count, keys=1)),
                Contender("10,000 keys, strict", lambda: rate(where, relay, count, keys=10_000, strict="on")),
                # One message a round trip: fewer will do.
                Contender("one key, strict", lambda: rate(where, relay, count // 20, keys=1, strict="on")),
            ]
            take_turns(f"keys, {kind}", [unkeyed, *variants], bench.size(3, 1))
            for variant in variants:
                yield from compare(f"drain, {kind}, {variant.name}", [variant, unkeyed], 0, {})

    return case


def bodies(kind: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        counts = {256: bench.size(20_000, 4_000), 4096: bench.size(10_000, 2_000), 65536: bench.size(2_560, 256)}
        with place(bench, kind) as where:
            for size, name in SIZES.items():
                measure = partial(rate, where, count=counts[size], size=size)
                contenders = [
                    Contender("relay", partial(measure, relay)),
                    Contender("publish from memory", partial(measure, publish_from_memory)),
                ]
                yield from compare(f"bodies of {name}, {kind}", contenders, bench.size(3, 1), {})

    return case


CASES: dict[str, Case] = {
    **{f"drain-{kind}": drain(kind) for kind in KINDS},
    "drain-v1": drain(OLD_KIND),
    "drain-apart": drain_apart,
    **{f"keys-{kind}": keyed(kind) for kind in KINDS},
    **{f"bodies-{kind}": bodies(kind) for kind in KINDS},
}
