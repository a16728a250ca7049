"""Relays as processes of their own: started, watched through the queue and the table, and what they cost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import psycopg

from bench.place import Place

TICKS = os.sysconf("SC_CLK_TCK")


@contextmanager
def running(commands: Sequence[list[str]], where: Place) -> Iterator[list[int]]:
    addresses = {"OUTBOX_DSN": where.dsn, "OUTBOX_AMQP_URL": where.amqp_url}
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | addresses)
        for command in commands
    ]
    try:
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait(60)


def tree(root: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def cpu_seconds(roots: Sequence[int]) -> float:
    """Of the processes, those below them, and those of their children that have ended."""
    total = 0
    for pid in {pid for root in roots for pid in tree(root)}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICKS


@contextmanager
def apart(broker: int, database: int) -> Iterator[None]:
    """The broker on one half of the cores; the database and this process on the other, as if on another machine."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    try:
        pin(tree(broker), cores[: max(half, 1)])
        pin([*tree(database), os.getpid()], cores[half:])
        yield
    finally:
        pin([*tree(broker), *tree(database), os.getpid()], cores)


def pin(pids: Sequence[int], cores: Sequence[int]) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cores)


def resident(pids: Sequence[int]) -> float:
    """Megabytes of memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids) / 2**20


@dataclass(frozen=True)
class Cost:
    """What a drain took: messages a second, and CPU seconds for a thousand messages."""

    rate: float
    relay: float
    postgres: float
    broker: float


async def watch(where: Place, table: str, count: int, pids: list[int]) -> Cost:
    """From a tenth of the backlog on, when every relay is at work, until the table is empty."""
    groups = (pids, [where.bench.postgres_pid], [where.bench.broker_pid])
    async with await aio_pika.connect(where.amqp_url) as connection, asyncio.timeout(300):
        channel = await connection.channel()

        async def arrived(wanted: int) -> int:
            while True:
                queue = await channel.declare_queue("bench", passive=True)
                if (found := queue.declaration_result.message_count or 0) >= wanted:
                    return found
                await asyncio.sleep(0.02)  # four times as often would cost a relay a twentieth of its rate

        first = await arrived(count // 10)
        begun, before = time.perf_counter(), [cpu_seconds(group) for group in groups]
        await arrived(count)
        async with await psycopg.AsyncConnection.connect(where.dsn, autocommit=True) as database:
            left = f"select 1 from {table} limit 1".encode()
            while await (await database.execute(left)).fetchone():  # noqa: ASYNC110 - another process empties it
                await asyncio.sleep(0.002)
        ended, after = time.perf_counter(), [cpu_seconds(group) for group in groups]
    costs = [1000 * (b - a) / (count - first) for a, b in zip(before, after, strict=True)]
    return Cost((count - first) / (ended - begun), *costs)


def drain(where: Place, table: str, count: int, commands: Sequence[list[str]]) -> Cost:
    with running(commands, where) as pids:
        return asyncio.run(watch(where, table, count, pids))
