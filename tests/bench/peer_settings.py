"""Which settings suit faststream-outbox best when it drains a backlog into a classic queue.

.venv/bin/python tests/bench/peer_settings.py    10 minutes, in which nothing else should run
"""

from __future__ import annotations

import statistics
import sys
from itertools import chain
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from bench import peer  # noqa: E402 - the folder of the test tools is on the path only now
from bench.measure import private_bench  # noqa: E402
from bench.place import Place, place  # noqa: E402
from bench.processes import drain  # noqa: E402

Settings = tuple[float, ...]
COUNT = 10_000
KNOBS = ("max_workers", "fetch_batch_size", "terminal_flush_batch_size")
TRIED: list[Settings] = list(
    dict.fromkeys(
        chain(
            ((workers, 500, 200) for workers in (16, 24, 32, 48, 64, 100)),
            ((32, fetch, 200) for fetch in (250, 500, 1000, 2000)),
            ((32, 500, flush) for flush in (50, 100, 200, 500)),
            [(16, 500, 500), (64, 1000, 200)],
        )
    )
)


def rate(where: Place, tried: Settings) -> float:
    where.purge()
    peer.fill(where.dsn, COUNT)
    settings = peer.DRAIN | dict(zip(KNOBS, tried, strict=True))
    return drain(where, "outbox", COUNT, [peer.command(where.dsn, where.amqp_url, settings)]).rate


def best(where: Place, candidates: list[Settings], rounds: int) -> list[Settings]:
    """In turn, forwards and backwards; the fastest first."""
    found: dict[Settings, list[float]] = {tried: [] for tried in candidates}
    for number in range(rounds):
        for tried in candidates if number % 2 == 0 else reversed(candidates):
            found[tried].append(rate(where, tried))
            print(f"round {number + 1} of {rounds}: {tried} {found[tried][-1]:,.0f} a second", file=sys.stderr)
    order = sorted(found, key=lambda tried: -statistics.median(found[tried]))
    print(f"{', '.join(KNOBS)}: messages a second, median of {rounds}")
    for tried in order:
        rates = found[tried]
        print(f"{tried}: {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")
    return order


def main() -> None:
    with private_bench() as bench, place(bench, "classic") as where:
        peer.create(where.dsn)
        # Many differ by less than the noise: the first four meet again, and with them what the benchmarks use.
        used = tuple(peer.DRAIN[knob] for knob in KNOBS)
        best(where, list(dict.fromkeys([used, *best(where, TRIED, 4)[:4]])), 9)


if __name__ == "__main__":
    main()
