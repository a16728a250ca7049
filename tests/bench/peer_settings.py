"""Which settings suit faststream-outbox best when it drains a backlog into a classic queue.

.venv/bin/python tests/bench/peer_settings.py    7 minutes, in which nothing else should run
"""

from __future__ import annotations

import os
import statistics
import sys
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import servers  # noqa: E402 - the folder of the test tools is on the path only now
from bench import peer  # noqa: E402
from bench.measure import Bench  # noqa: E402
from bench.place import Place, place  # noqa: E402
from bench.processes import drain  # noqa: E402

COUNT, ROUNDS = 10_000, 4
KNOBS = ("max_workers", "fetch_batch_size", "terminal_flush_batch_size")
TRIED = list(
    dict.fromkeys(
        chain(
            ((workers, 500, 200) for workers in (16, 24, 32, 48, 64, 100)),
            ((32, fetch, 200) for fetch in (250, 500, 1000, 2000)),
            ((32, 500, flush) for flush in (50, 100, 200, 500)),
            [(64, 1000, 200)],
        )
    )
)


def rate(where: Place, tried: tuple[int, int, int]) -> float:
    where.purge()
    peer.fill(where.dsn, COUNT)
    settings = peer.DRAIN | dict(zip(KNOBS, tried, strict=True))
    return drain(where, "outbox", COUNT, [peer.command(where.dsn, where.amqp_url, settings)]).rate


def main() -> None:
    found: dict[tuple[int, int, int], list[float]] = {tried: [] for tried in TRIED}
    with servers.private(name="bench", durable=True) as private:
        os.environ |= private.environment()
        private.install_extension(ROOT / "build")
        assert private.postgres.pid
        assert private.rabbitmq.pid
        pids = private.postgres.pid, private.rabbitmq.pid
        bench = Bench(private.dsn, private.amqp_url, private.management_url, False, *pids)  # noqa: FBT003
        with place(bench, "classic") as where:
            peer.create(where.dsn)
            for number in range(ROUNDS):
                for tried in TRIED if number % 2 == 0 else reversed(TRIED):
                    found[tried].append(rate(where, tried))
                    print(f"round {number + 1} of {ROUNDS}: {tried} {found[tried][-1]:,.0f} a second", file=sys.stderr)
    print(", ".join(KNOBS), "messages a second", sep=": ")
    for tried, rates in sorted(found.items(), key=lambda item: -statistics.median(item[1])):
        print(f"{tried}: {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")


if __name__ == "__main__":
    main()
