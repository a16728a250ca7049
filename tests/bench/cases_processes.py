"""Relays as processes: one and two, against faststream-outbox; what they cost in CPU time; how they grow."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aio_pika
import psycopg

from bench import peer
from bench.measure import Bench, Case, Contender, Row, compare, progress
from bench.place import KINDS, OLD_KIND, Place, body, place
from bench.processes import Cost, drain, resident, running

ROOM = """
    select sum(pg_total_relation_size(oid)) / 1048576.0
    from pg_class
    where relnamespace = 'outbox'::regnamespace and relkind = 'r'
"""
RELAY = [sys.executable, "-m", "outbox", "relay"]


@dataclass
class Fleet:
    """So many processes, and what their drains took."""

    name: str
    measure: Callable[[], Cost]
    costs: list[Cost] = field(default_factory=list)


def relays(kind: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        count, fewer = bench.size(40_000, 6_000), bench.size(10_000, 2_000)
        rounds = bench.size(5 if kind in KINDS else 3, 1)
        with place(bench, kind) as where:
            peer.create(where.dsn)

            def ours(number: int) -> Cost:
                where.clear()
                where.emit(count)
                return drain(where, "outbox.message", count, [RELAY] * number)

            def theirs() -> Cost:
                where.purge()
                peer.fill(where.dsn, fewer)
                return drain(where, "outbox", fewer, [peer.command(where.dsn, where.amqp_url, peer.DRAIN)])

            fleets = [
                Fleet("one relay", lambda: ours(1)),
                Fleet("two relays", lambda: ours(2)),
                Fleet("faststream-outbox", theirs),
            ]
            for number in range(rounds):
                for fleet in fleets if number % 2 == 0 else reversed(fleets):
                    progress(f"relays, {kind}: round {number + 1} of {rounds}, {fleet.name}")
                    fleet.costs.append(fleet.measure())
        # Measured above: there is nothing left to do.
        one, two, theirs_ = (
            Contender(fleet.name, lambda: 0.0, [cost.rate for cost in fleet.costs]) for fleet in fleets
        )
        yield from compare(f"processes, {kind}", [one, theirs_], 0, {"faststream-outbox": 6.0} if kind in KINDS else {})
        yield from compare(f"two relays, {kind}", [two, one], 0, {})
        for part, who in (("relay", "relay"), ("postgres", "PostgreSQL"), ("broker", "RabbitMQ")):
            pair = [
                Contender(fleet.name, lambda: 0.0, [getattr(cost, part) for cost in fleet.costs])
                for fleet in (fleets[0], fleets[2])
            ]
            name = f"CPU of {who}, {kind}"
            yield from compare(name, pair, 0, {}, unit="s per 1,000 messages", less_is_better=True)

    return case


async def feed(where: Place, count: int, pids: list[int]) -> list[tuple[float, float]]:
    """Emits so many while a relay forwards them; memory of the relay and room of the tables after each tenth, in MB."""
    found = []
    async with (
        await aio_pika.connect(where.amqp_url) as connection,
        await psycopg.AsyncConnection.connect(where.dsn, autocommit=True) as database,
    ):
        channel = await connection.channel()
        emitted = purged = 0
        for part in range(1, 11):
            progress(f"growth: {emitted:,} of {count:,} messages")
            while (arrived := purged + await ready(channel)) < count * part // 10:
                if emitted < count * part // 10 and emitted - arrived < 10_000:
                    await database.execute("select outbox.emit('bench', %s) from generate_series(1, 1000)", [body(256)])
                    emitted += 1000
                else:
                    await asyncio.sleep(0.02)
            (room,) = await (await database.execute(ROOM)).fetchone() or (0,)
            found.append((resident(pids), float(room)))
            queue = await channel.get_queue("bench", ensure=False)
            purged += (await queue.purge()).message_count or 0
    return found


async def ready(channel: aio_pika.abc.AbstractChannel) -> int:
    found = await channel.declare_queue("bench", passive=True)
    return int(found.declaration_result.message_count or 0)


@contextmanager
def frequent_vacuum(server: str) -> Iterator[None]:
    """As in a day, in less time: as many dead rows between two visits of autovacuum, or rather more."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("alter system set autovacuum_naptime = '1s'")
        connection.execute("select pg_reload_conf()")
        try:
            yield
        finally:
            connection.execute("alter system reset autovacuum_naptime")
            connection.execute("select pg_reload_conf()")


def growth(bench: Bench) -> Iterator[Row]:
    count = bench.size(1_000_000, 100_000)
    with place(bench, "classic") as where, running([RELAY], where) as pids, frequent_vacuum(bench.server):
        time.sleep(2)
        samples = asyncio.run(feed(where, count, pids))
    reach = None if bench.quick else 0.5  # after a few thousand messages the tables have not reached their size
    for part, what in enumerate(("relay memory", "table size")):
        rates = {f"{count * n // 10:,}": round(sample[part], 1) for n, sample in enumerate(samples, 1)}
        first, last = samples[0][part], samples[-1][part]
        yield Row(f"growth, {what}", "after a tenth", first / last, first / last, first / last, reach, rates, "MB")


CASES: dict[str, Case] = {
    **{f"relays-{kind}": relays(kind) for kind in KINDS},
    "relays-v1": relays(OLD_KIND),
    "growth": growth,
}
