"""The time from COMMIT to the consumer."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

import databases
from bench import peer
from bench.measure import Bench, Case, Contender, Row, compare, progress
from bench.place import Place, place
from bench.processes import running

HERE = Path(__file__).resolve().parent
BARE_TABLE = """
    create table bare (id bigserial primary key, body text);
    create function ring() returns trigger language plpgsql as
        $$ begin perform pg_notify('bare', ''); return null; end $$;
    create trigger ring after insert on bare for each statement execute function ring();
"""


class Consumer:
    """Notes when each message arrives, by the number in its body."""

    def __init__(self, amqp_url: str) -> None:
        self.arrived: dict[int, float] = {}
        # The clock of perf_counter is the same for all processes of the machine.
        self.process = subprocess.Popen(
            [sys.executable, HERE / "arrivals.py", amqp_url], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.lines = self.process.stdout
        assert self.lines.readline() == "\n", "the consumer did not start"
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        for line in self.lines:
            number, at = line.split()
            self.arrived.setdefault(int(number), float(at))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.reader.join()
        self.lines.close()

    def wait_for(self, committed: dict[int, float]) -> None:
        deadline = time.monotonic() + 20
        while missing := sum(number not in self.arrived for number in committed):
            assert time.monotonic() < deadline, f"{missing} of {len(committed)} did not arrive"
            time.sleep(0.02)


def emit_at(dsn: str, statement: str, per_second: int, seconds: float, first: int = 0) -> dict[int, float]:
    """Transactions at an even pace: BEGIN, INSERT, emit, COMMIT; returns when COMMIT returned, by number."""
    committed: dict[int, float] = {}
    count = max(int(per_second * seconds), 20)
    workers = max(per_second // 200, 1)  # one alone would not keep the pace: each commit is a sync

    def work(number: int) -> None:
        with psycopg.connect(dsn) as connection:
            while number < count:
                time.sleep(max(begun + number / per_second - time.perf_counter(), 0))
                connection.execute("insert into orders values (%s)", [number])
                connection.execute(statement, [json.dumps({"n": first + number})])
                connection.commit()
                committed[first + number] = time.perf_counter()
                number += workers

    begun = time.perf_counter() + 0.2
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    return committed


def delays(where: Place, command: list[str], statement: str, per_second: int, seconds: float) -> list[float]:
    """Milliseconds from COMMIT's return to the consumer. The first messages warm everything up and do not count."""
    databases.query(where.dsn, "create table orders (n integer)")
    consumer = Consumer(where.amqp_url)
    try:
        with running([command], where):
            consumer.wait_for(emit_at(where.dsn, statement, 100, 0.5, first=10_000_000))
            committed = emit_at(where.dsn, statement, per_second, seconds)
            consumer.wait_for(committed)
    finally:
        consumer.close()
    return [1000 * (consumer.arrived[number] - at) for number, at in committed.items()]


@dataclass
class Forwarder:
    """Something that carries messages, and what it measured: half of the messages took p50, 99 of 100 took p99."""

    name: str
    statement: str
    command: Callable[[Place], list[str]]
    prepare: Callable[[str], object] = lambda _dsn: None
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def measure(self, bench: Bench, per_second: int, seconds: float) -> None:
        with place(bench, "classic") as where:
            self.prepare(where.dsn)
            found = delays(where, self.command(where), self.statement, per_second, seconds)
        cuts = statistics.quantiles(found, n=100, method="inclusive")
        self.p50.append(cuts[49])
        self.p99.append(cuts[98])


def forwarders(per_second: int) -> list[Forwarder]:
    return [
        Forwarder("relay", "select outbox.emit('bench', %s)", lambda _where: [sys.executable, "-m", "outbox", "relay"]),
        Forwarder(
            "bare LISTEN and publish",
            "insert into bare (body) values (%s)",
            lambda where: [sys.executable, str(HERE / "bare_loop.py"), where.dsn, where.amqp_url],
            lambda dsn: databases.query(dsn, BARE_TABLE),
        ),
        Forwarder(
            "faststream-outbox",
            f"{peer.INSERT} values ('bench', convert_to(%s, 'UTF8'), {peer.HEADERS}) {peer.NOTIFY}",
            lambda where: peer.command(where.dsn, where.amqp_url, peer.LATENCY[per_second]),
            peer.create,
        ),
    ]


def latency(per_second: int) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        seconds = bench.size(12 if per_second < 100 else 8, 3)
        rounds = bench.size(3 if per_second < 100 else 5, 1)  # it swings with the load
        candidates = forwarders(per_second)
        for number in range(rounds):
            for one in candidates if number % 2 == 0 else reversed(candidates):
                progress(f"latency, {per_second}/s: round {number + 1} of {rounds}, {one.name}")
                one.measure(bench, per_second, seconds)
        for part in ("p50", "p99"):
            # Measured above: there is nothing left to do.
            contenders = [Contender(one.name, lambda: 0.0, getattr(one, part)) for one in candidates]
            reach = {"faststream-outbox": 1.0} | ({"bare LISTEN and publish": 0.67} if part == "p50" else {})
            name = f"latency {part}, {per_second}/s"
            yield from compare(name, contenders, 0, reach, unit="ms", less_is_better=True)

    return case


CASES: dict[str, Case] = {f"latency-{per_second}": latency(per_second) for per_second in (10, 100, 1000)}
