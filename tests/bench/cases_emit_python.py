"""What emitting from Python costs: ten thousand messages in one statement, against as many single committed emits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg

from bench.measure import Bench, Case, Contender, Row, compare
from outbox import OutboxMessage, emit, emit_many

BODY = {"x": "0" * 247}  # 256 bytes as JSON


def bulk(bench: Bench) -> Iterator[Row]:
    count, singles = 10_000, bench.size(3000, 500)
    messages = [OutboxMessage("bench", BODY) for _ in range(count)]
    with bench.database() as dsn, psycopg.connect(dsn) as connection:

        def rate(number: int, work: Callable[[], object]) -> Callable[[], float]:
            def measure() -> float:
                connection.execute("truncate outbox.message")
                connection.commit()
                begun = time.perf_counter()
                work()
                return number / (time.perf_counter() - begun)

            return measure

        def together() -> None:
            emit_many(connection, messages)
            connection.commit()

        def one_by_one() -> None:
            for _ in range(singles):
                emit(connection, "bench", BODY)
                connection.commit()

        contenders = [
            Contender("emit_many", rate(count, together)),
            Contender("emit and commit", rate(singles, one_by_one)),
        ]
        yield from compare("Python, 10,000 messages", contenders, bench.size(5, 3), {"emit and commit": 20.0})


CASES: dict[str, Case] = {"emit-python": bulk}
