"""Without a broker: listeners are called straight from the outbox."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from worker.conftest import Broker, StartProcess, eventually, running

from harness import Db, emit, waiting
from outbox import PostgresSource, Reject, Worker, listen
from outbox.errors import OtherKindError


def dead(db: Db) -> list[tuple[Any, ...]]:
    return db.execute("select routing_key, reason, attempts, error from outbox.dead_letter order by id").fetchall()


async def test_all_listeners_that_match_are_called(dsn: str, db: Db) -> None:
    seen: list[tuple[str, Any]] = []

    @listen("order.*", queue="star")
    async def star(order: Any, routing_key: str) -> None:
        seen.append((f"star {routing_key}", order))

    @listen("#.created", queue="hash")
    def sync(order: Any, queue_name: str, message: Any) -> None:
        seen.append((f"{queue_name} {message.routing_key}", order))

    @listen("order.paid", queue="paid")
    async def paid(order: Any) -> None:
        seen.append(("paid", order))

    async with running(Worker(source=PostgresSource(dsn), listeners=[star, sync, paid])):
        emit(db, "order.created", {"n": 1})
        await eventually(lambda: not waiting(db), "an empty outbox")
    assert sorted(seen) == [("hash order.created", {"n": 1}), ("star order.created", {"n": 1})]


async def test_nobody_listens_dead_at_once(dsn: str, db: Db) -> None:
    @listen("order.*", queue="q")
    async def handle(order: Any) -> None:
        pytest.fail(f"called with {order}")

    async with running(Worker(source=PostgresSource(dsn), listeners=[handle])):
        emit(db, "user.created")
        emit(db, "order.created", exchange="elsewhere")
        await eventually(lambda: len(dead(db)) == 2, "dead letters")
    assert [row[:3] for row in dead(db)] == [("user.created", "unroutable", 1), ("order.created", "unroutable", 1)]


async def test_retried_after_the_delays_then_dead(dsn: str, db: Db) -> None:
    attempts: list[tuple[int, float]] = []

    @listen("a", queue="q", retry_delays=(0.2, 0.4))
    async def handle(body: Any, attempt_count: int) -> None:
        attempts.append((attempt_count, asyncio.get_running_loop().time()))
        raise ValueError(f"no {body['n']}")

    async with running(Worker(source=PostgresSource(dsn), listeners=[handle])):
        emit(db, "a", {"n": 1})
        await eventually(lambda: dead(db), "a dead letter")
    assert dead(db) == [("a", "max_attempts", 3, "q: ValueError: no 1")]
    assert [number for number, _ in attempts] == [1, 2, 3]
    (_, first), (_, second), (_, third) = attempts
    assert (second - first >= 0.2, third - second >= 0.4) == (True, True)


async def test_reject_and_unreadable_are_dead_at_once(dsn: str, db: Db) -> None:
    @listen("a", queue="rejects")
    async def rejects(body: Any) -> None:
        raise Reject(f"never {body['n']}")

    @listen("b", queue="reads")
    async def reads(body: list[int]) -> None:
        pytest.fail(f"called with {body}")

    async with running(Worker(source=PostgresSource(dsn), listeners=[rejects, reads])):
        emit(db, "a", {"n": 1})
        emit(db, "b", {"n": 1})
        await eventually(lambda: len(dead(db)) == 2, "dead letters")
    assert dead(db) == [
        ("a", "rejected", 1, "rejects: Reject: never 1"),
        ("b", "rejected", 1, "reads: UnreadableError: body is not a list"),
    ]


async def test_one_of_two_fails_both_are_called_again(dsn: str, db: Db) -> None:
    """Those who must not be called twice say once=True."""
    good: list[int] = []
    bad: list[int] = []

    @listen("a", queue="good", retry_delays=())
    async def succeeds(_body: Any, attempt_count: int) -> None:
        good.append(attempt_count)

    @listen("a", queue="bad", retry_delays=(0.1,))
    async def fails(_body: Any, attempt_count: int) -> None:
        bad.append(attempt_count)
        if attempt_count == 1:
            raise ValueError

    @listen("a", queue="once", once=True)
    async def exactly(_body: Any, tx: Any) -> None:
        await tx.execute("insert into effect values (1)")

    db.execute("create table effect (n integer)")
    worker = Worker(
        source=PostgresSource(dsn),
        listeners=[succeeds, fails, exactly],
        connect=lambda: psycopg.AsyncConnection.connect(dsn),
    )
    async with running(worker):
        emit(db, "a")
        await eventually(lambda: not waiting(db), "an empty outbox")
    assert (good, bad, dead(db)) == ([1, 2], [1, 2], [])
    assert db.execute("select count(*) from effect").fetchone() == (1,)


async def test_order_of_a_key_is_kept(dsn: str, db: Db) -> None:
    seen: list[int] = []
    failed: set[int] = set()

    @listen("a", queue="q", retry_delays=(0.05, 0.05))
    async def handle(body: Any) -> None:
        await asyncio.sleep(0.01 * (body["n"] % 3))
        if body["n"] % 4 == 0 and body["n"] not in failed:
            failed.add(body["n"])
            raise ValueError
        seen.append(body["n"])

    for number in range(30):
        emit(db, "a", {"n": number}, key="k")
    async with running(Worker(source=PostgresSource(dsn), listeners=[handle])):
        await eventually(lambda: not waiting(db), "an empty outbox")
    assert seen == list(range(30))


async def test_two_workers_share(dsn: str, db: Db) -> None:
    seen: dict[str, list[int]] = {"one": [], "two": []}

    def worker(name: str) -> Worker:
        @listen("a", queue="q")
        async def handle(body: Any) -> None:
            await asyncio.sleep(0.005)
            seen[name].append(body["n"])

        return Worker(source=PostgresSource(dsn), listeners=[handle], prefetch_count=5)

    async with running(worker("one")), running(worker("two")):
        for number in range(200):
            emit(db, "a", {"n": number})
        await eventually(lambda: not waiting(db), "an empty outbox")
    assert sorted(seen["one"] + seen["two"]) == list(range(200))
    assert min(map(len, seen.values())) > 20


async def test_the_second_kind_is_refused(dsn: str, broker: Broker, start: StartProcess) -> None:
    @listen("#", queue="q")
    async def handle(_body: Any) -> None: ...

    relay = partial(start, "relay", "--declare", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=broker.url)
    async with running(Worker(source=PostgresSource(dsn), listeners=[handle])):
        refused = relay()
        assert await refused.ended() == 2
        assert "outbox: messages of this database are delivered by the other kind" in refused.log
    await relay().await_log("relay ready")
    with pytest.raises(OtherKindError, match="delivered by the other kind") as raised:
        await Worker(source=PostgresSource(dsn), listeners=[handle]).run()
    assert raised.value.code == "OB015"


POISON = """
import os
from outbox import PostgresSource, Worker, listen

@listen("a", queue="q")
async def handle(body):
    if body["n"] == 3:
        os._exit(1)
    with open("handled", "a") as file:
        file.write(f"{body['n']}\\n")

worker = Worker(source=PostgresSource(os.environ["OUTBOX_DSN"]), listeners=[handle])
"""


async def test_a_message_that_kills_ends_among_the_dead(dsn: str, db: Db, start: StartProcess, tmp_path: Path) -> None:
    """And those that were in hand with it do not."""
    (tmp_path / "app.py").write_text(POISON)
    for number in range(1, 7):
        emit(db, "a", {"n": number})
    deaths = 0
    while deaths < 12:
        one = start("worker", "app:worker", OUTBOX_DSN=dsn)
        await eventually(lambda one=one: one.process.poll() is not None or not waiting(db), "an end")  # type: ignore[misc]
        if not waiting(db):
            break
        deaths += 1
        # As if the three seconds were over that a lease outlives its session.
        db.execute(
            "update outbox.lane set leased_until = clock_timestamp(), version = version + 1 where token is not null"
        )
    [found] = dead(db)
    assert found == ("a", "killed_relay", 0, "the relay died with it 5 times, nothing else in its hands")
    assert set((tmp_path / "handled").read_text().split()) == {"1", "2", "4", "5", "6"}
    assert deaths >= 5


async def test_stop_gives_back_what_has_not_begun(dsn: str, db: Db) -> None:
    begun: list[int] = []
    finish = asyncio.Event()

    @listen("a", queue="q")
    async def handle(body: Any) -> None:
        begun.append(body["n"])
        await finish.wait()

    for number in range(6):
        emit(db, "a", {"n": number}, key="k")
    async with running(Worker(source=PostgresSource(dsn), listeners=[handle])) as one:
        await eventually(lambda: begun, "a message")
        one.worker.stop()
        await asyncio.sleep(0.2)
        finish.set()
    assert begun == [0]
    assert waiting(db) == 5
    assert db.execute("select count(*) from outbox.lane where token is not null").fetchone() == (0,)


async def test_what_a_listener_emits_goes_on_the_chain(dsn: str, db: Db) -> None:
    from outbox import emit as emit_on  # noqa: PLC0415 - beside the helper of the same name

    chains: list[tuple[str, ...]] = []

    @listen("first", queue="first", once=True)
    async def first(_body: Any, tx: Any, tracking_ids: Any) -> None:
        chains.append(tracking_ids)
        await emit_on(tx, "second", {})

    @listen("second", queue="second")
    async def second(_body: Any, tracking_ids: Any) -> None:
        chains.append(tracking_ids)

    worker = Worker(
        source=PostgresSource(dsn), listeners=[first, second], connect=lambda: psycopg.AsyncConnection.connect(dsn)
    )
    async with running(worker):
        _, identity = emit(db, "first")
        await eventually(lambda: len(chains) == 2, "both listeners")
    assert chains[0] == (identity,)
    assert chains[1][0] == identity
    assert len(chains[1]) == 2
