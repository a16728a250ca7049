"""How things are measured: contenders in turn, ratios round by round, their median and spread."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import databases


@dataclass
class Contender:
    """One thing that is measured: a function that does the work once and returns its rate."""

    name: str
    measure: Callable[[], float]
    rates: list[float] = field(default_factory=list)


@dataclass
class Row:
    """A line of the table: how the first contender did against another."""

    case: str
    against: str
    ratio: float
    low: float
    high: float
    reach: float | None
    rates: dict[str, float]


def compare(case: str, contenders: list[Contender], rounds: int, reach: dict[str, float]) -> Iterator[Row]:
    """Measures the contenders in turn, so that what disturbs the machine disturbs them all alike."""
    for number in range(rounds):
        # Forwards and backwards: none is always the one that comes after a checkpoint or a vacuum.
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            progress(f"{case}: round {number + 1} of {rounds}, {contender.name}")
            contender.rates.append(contender.measure())
    ours, *others = contenders
    for other in others:
        yield ratio(case, ours, other, reach.get(other.name))


def ratio(case: str, ours: Contender, other: Contender, reach: float | None) -> Row:
    ratios = [a / b for a, b in zip(ours.rates, other.rates, strict=True)]
    rates = {c.name: round(statistics.median(c.rates), 1) for c in (ours, other)}
    return Row(case, other.name, statistics.median(ratios), min(ratios), max(ratios), reach, rates)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """What every case needs: a server, and how much to do."""

    server: str
    amqp_url: str
    management: str
    quick: bool

    def size(self, usual: int, quick: int) -> int:
        return quick if self.quick else usual

    @contextmanager
    def database(self) -> Iterator[str]:
        with databases.database(self.server) as dsn:
            databases.install(dsn, "extension")
            yield dsn


Case = Callable[[Bench], Iterator[Row]]
