"""How things are measured: contenders in turn, ratios round by round, their median and spread."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import databases
import servers


@dataclass
class Contender:
    """One thing that is measured: a function that does the work once and returns its rate."""

    name: str
    measure: Callable[[], float]
    rates: list[float] = field(default_factory=list)


@dataclass
class Row:
    """A line of the table: how the first contender did against another. A ratio above 1 means that it did better."""

    case: str
    against: str
    ratio: float
    low: float
    high: float
    reach: float | None
    rates: dict[str, float]
    unit: str = "per second"


def take_turns(case: str, contenders: list[Contender], rounds: int) -> None:
    """Measures the contenders in turn, so that what disturbs the machine disturbs them all alike."""
    for number in range(rounds):
        # Forwards and backwards: none is always the one that comes after a checkpoint or a vacuum.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            progress(f"{case}: round {number + 1} of {rounds}, {contender.name}")
            contender.rates.append(contender.measure())


def compare(
    case: str,
    contenders: list[Contender],
    rounds: int,
    reach: dict[str, float],
    *,
    unit: str = "per second",
    less_is_better: bool = False,
) -> Iterator[Row]:
    take_turns(case, contenders, rounds)
    ours, *others = contenders
    for other in others:
        yield ratio(case, ours, other, reach.get(other.name), unit, less_is_better=less_is_better)


def ratio(
    case: str,
    ours: Contender,
    other: Contender,
    reach: float | None,
    unit: str = "per second",
    *,
    less_is_better: bool = False,
) -> Row:
    pairs = zip(ours.rates, other.rates, strict=True)
    ratios = [b / a if less_is_better else a / b for a, b in pairs]
    rates = {c.name: float(f"{statistics.median(c.rates):.4g}") for c in (ours, other)}
    return Row(case, other.name, statistics.median(ratios), min(ratios), max(ratios), reach, rates, unit)


class Progress:
    """One line: which case, which round, how long so far, about how long still."""

    def __init__(self) -> None:
        self.begun = self.case_begun = time.monotonic()
        self.expected: dict[str, float] = {}
        self.current = ""
        self.said = 0.0

    def plan(self, expected: dict[str, float]) -> None:
        """So many seconds for each case that is to come."""
        self.begun = time.monotonic()
        self.expected = dict(expected)

    def begin(self, case: str) -> None:
        self.current, self.case_begun, self.said = case, time.monotonic(), 0.0
        self.say(case)

    def end(self) -> float:
        """How long the case took."""
        del self.expected[self.current]
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        return time.monotonic() - self.case_begun

    def say(self, text: str) -> None:
        now = time.monotonic()
        left = max(self.expected.get(self.current, 0) - (now - self.case_begun), 0)
        left += sum(seconds for case, seconds in self.expected.items() if case != self.current)
        line = f"{text} | {clock(now - self.begun)} so far, about {clock(left)} left"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif now - self.said > 20:  # a file keeps every line: not each of them
            self.said = now
            print(line, file=sys.stderr, flush=True)


PROGRESS = Progress()


def progress(text: str) -> None:
    PROGRESS.say(text)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@dataclass(frozen=True)
class Bench:
    """What every case needs: servers, and how much to do."""

    server: str
    amqp_url: str
    management: str
    quick: bool
    postgres_pid: int
    broker_pid: int

    def size(self, usual: int, quick: int) -> int:
        return quick if self.quick else usual

    @contextmanager
    def database(self) -> Iterator[str]:
        with databases.database(self.server) as dsn:
            databases.install(dsn, "extension")
            yield dsn


@contextmanager
def private_bench(*, quick: bool = False, parent: int | None = None) -> Iterator[Bench]:
    """On servers of its own, with the package as it is in this tree."""
    builder = databases.ROOT / "sql/packaging/build.py"
    subprocess.run([sys.executable, builder], check=True, stdout=subprocess.DEVNULL)
    with servers.private(name="bench", parent=parent, durable=True) as private:
        os.environ |= private.environment()
        private.install_extension(databases.BUILD)
        postgres, broker = private.postgres.pid, private.rabbitmq.pid
        assert postgres
        assert broker
        yield Bench(private.dsn, private.amqp_url, private.management_url, quick, postgres, broker)


Case = Callable[[Bench], Iterator[Row]]
