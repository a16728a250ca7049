"""What becomes of a message when its listener succeeds, fails or rejects it, on both kinds of queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import aio_pika
import pydantic
import pytest
from worker.conftest import Broker, eventually, running, worker_on

from outbox import Listener, Reject, Worker, listen
from outbox.errors import ConfigurationError


async def test_message_is_handled_and_acknowledged(broker: Broker, queue_type: str) -> None:
    seen: list[Any] = []

    @listen("order.created", queue="stock")
    async def on_order(order: Any) -> None:
        seen.append(order)

    async with running(worker_on(broker, on_order, queue_type=queue_type)):
        await broker.publish("order.created", {"order": 1})
        await eventually(lambda: seen, "a message")
    assert seen == [{"order": 1}]
    assert await broker.ready("stock") == 0


async def test_failure_is_retried_after_each_delay_then_dead(broker: Broker, queue_type: str) -> None:
    attempts: list[tuple[int, str, float]] = []

    @listen("order.*", queue="stock")
    async def on_order(order: Any, attempt_count: int, routing_key: str) -> None:
        attempts.append((attempt_count, routing_key, time.monotonic()))
        raise ValueError(f"no stock for {order['order']}")

    async with running(worker_on(broker, on_order, queue_type=queue_type, retry_delays=(0.1, 0.3))):
        identity = await broker.publish("order.created", {"order": 1})
        [dead] = await broker.dead("stock")
    assert [one[:2] for one in attempts] == [(1, "order.created"), (2, "order.created"), (3, "order.created")]
    assert attempts[1][2] - attempts[0][2] >= 0.1
    assert attempts[2][2] - attempts[1][2] >= 0.3
    headers = dead["properties"]["headers"]
    headers.pop("x-delivery-count", None)  # the queue's own
    assert dead["properties"]["message_id"] == identity
    assert headers.pop("x-outbox-dead-at").startswith("20")
    assert headers == {
        "x-outbox-attempt": 3,
        "x-outbox-dead-reason": "max_attempts",
        "x-outbox-error": "no stock for 1",
        "x-outbox-error-class": "ValueError",
        "x-outbox-queue": "stock",
        "x-outbox-routing-key": "order.created",
    }
    assert dead["body"] == b'{"order": 1}'
    assert await broker.ready("stock") == 0


async def test_reject_goes_to_the_dead_letters_at_once(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("order.created", queue="stock")
    def on_order(order: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise Reject(f"order {order['order']} is void")

    async with running(worker_on(broker, on_order, queue_type=queue_type)):
        await broker.publish("order.created", {"order": 1})
        [dead] = await broker.dead("stock")
    assert attempts == [1]
    headers = dead["properties"]["headers"]
    assert (headers["x-outbox-dead-reason"], headers["x-outbox-error"]) == ("rejected", "order 1 is void")


async def test_no_delays_no_retries_and_a_listener_overrides_the_worker(broker: Broker, queue_type: str) -> None:
    attempts: dict[str, list[int]] = {"none": [], "own": [], "default": []}

    def fails(name: str, **options: Any) -> Listener:
        async def callback(_body: Any, attempt_count: int) -> None:
            attempts[name].append(attempt_count)
            raise ValueError

        return Listener("a", callback, name, **options)

    listeners = [fails("none", retry_delays=()), fails("own", retry_delays=(0.05, 0.05)), fails("default")]
    async with running(worker_on(broker, *listeners, queue_type=queue_type, retry_delays=(0.05,))):
        await broker.publish("a")
        for name in attempts:
            await broker.dead(name)
    assert attempts == {"none": [1], "own": [1, 2, 3], "default": [1, 2]}


async def test_a_retry_that_succeeds_is_gone(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05, 60))
    async def handle(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        if attempt_count == 1:
            raise ValueError

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await broker.publish("a")
        await eventually(lambda: len(attempts) == 2, "a second attempt")
    assert attempts == [1, 2]
    assert [await broker.ready(name) for name in ("q", "q.dlq", "outbox.delay_50ms", "outbox.delay_60s")] == [0] * 4


async def test_a_retry_comes_to_its_own_queue_only(broker: Broker, queue_type: str) -> None:
    seen: list[tuple[str, int]] = []

    @listen("a", queue="good")
    async def good(_body: Any, attempt_count: int) -> None:
        seen.append(("good", attempt_count))

    @listen("a", queue="bad", retry_delays=(0.05,))
    async def bad(_body: Any, attempt_count: int) -> None:
        seen.append(("bad", attempt_count))
        raise ValueError

    async with running(worker_on(broker, good, bad, queue_type=queue_type)):
        await broker.publish("a")
        await broker.dead("bad")
    assert sorted(seen) == [("bad", 1), ("bad", 2), ("good", 1)]


@pytest.mark.parametrize(
    ("binding_key", "taken"),
    [("user.*", ["user.created", "user.deleted"]), ("#", ["a", "user.created", "user.created.eu", "user.deleted"])],
)
async def test_wildcards(broker: Broker, binding_key: str, taken: list[str], queue_type: str) -> None:
    seen: list[str] = []

    @listen(binding_key, queue="q")
    async def handle(_body: Any, routing_key: str) -> None:
        seen.append(routing_key)

    @listen("#", queue="all")
    async def everything(_body: Any) -> None: ...

    async with running(worker_on(broker, handle, everything, queue_type=queue_type)):
        for key in ("user.created", "user.created.eu", "user.deleted", "a"):
            await broker.publish(key)
        await eventually(lambda: len(seen) >= len(taken), "messages")
    assert sorted(seen) == taken


async def test_arguments_by_name(broker: Broker, queue_type: str) -> None:
    seen: list[dict[str, Any]] = []

    @listen("a.*", queue="q")
    async def handle(
        body: Any, *, routing_key: str, message: Any, tracking_ids: Any, queue_name: str, attempt_count: int
    ) -> None:
        seen.append(locals() | {"message": message.headers, "kind": type(message)})

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        identity = await broker.publish("a.b", [1], headers={"tenant": "north"})
        await eventually(lambda: seen, "a message")
    [found] = seen
    found.pop("seen")
    assert found == {
        "body": [1],
        "routing_key": "a.b",
        "message": {"tenant": "north"},
        "kind": aio_pika.IncomingMessage,
        "tracking_ids": (identity,),
        "queue_name": "q",
        "attempt_count": 1,
    }


class User(pydantic.BaseModel):
    id: int


async def test_bodies_by_annotation(broker: Broker, queue_type: str) -> None:
    seen: dict[str, list[Any]] = {"model": [], "none": [], "bytes": []}

    @listen("user.*", queue="model")
    async def model(user: User) -> None:
        seen["model"].append(user)

    @listen("#", queue="none")
    async def none(body) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - that is the point
        seen["none"].append(body)

    @listen("#", queue="bytes")
    async def raw(body: bytes) -> None:
        seen["bytes"].append(body)

    async with running(worker_on(broker, model, none, raw, prefetch_count=1, queue_type=queue_type)):
        await broker.publish("user.created", b'{"id": 7}')
        await broker.publish("image", b"\xff\xd8")
        await eventually(lambda: [len(one) for one in seen.values()] == [1, 2, 2], "all messages")
    assert seen == {"model": [User(id=7)], "none": [{"id": 7}, b"\xff\xd8"], "bytes": [b'{"id": 7}', b"\xff\xd8"]}


async def unnamed(_body: Any, queue_name: str) -> None:
    raise Reject(queue_name)


async def test_a_queue_without_a_name_is_called_by_its_function(broker: Broker, queue_type: str) -> None:
    name = f"{__name__}.unnamed"
    async with running(worker_on(broker, listen("a")(unnamed), queue_type=queue_type)):
        await broker.publish("a")
        [dead] = await broker.dead(name)
    assert dead["properties"]["headers"]["x-outbox-error"] == name


async def test_a_listener_that_acknowledges_itself(broker: Broker, queue_type: str) -> None:
    seen: list[int] = []

    @listen("a", queue="q")
    async def handle(body: Any, message: aio_pika.IncomingMessage) -> None:
        await message.ack()
        seen.append(body)

    async with running(worker_on(broker, handle, queue_type=queue_type)) as one:
        for number in range(3):
            await broker.publish("a", number)
        await eventually(lambda: len(seen) == 3, "all messages")
        assert one.worker.ready.is_set()
    assert sorted(seen) == [0, 1, 2]


async def test_sync_listeners_run_side_by_side_in_threads(broker: Broker, queue_type: str) -> None:
    together = threading.Barrier(3, timeout=10)
    names: set[str] = set()

    @listen("a", queue="q")
    def handle(_body: Any) -> None:
        together.wait()
        names.add(threading.current_thread().name)

    async with running(worker_on(broker, handle, prefetch_count=3, queue_type=queue_type)):
        for number in range(3):
            await broker.publish("a", number)
        await eventually(lambda: names and together.n_waiting == 0, "three threads at once")
    assert threading.main_thread().name not in names


async def test_no_more_than_prefetch_count_at_once(broker: Broker, queue_type: str) -> None:
    """Each listener, async or not; also at the start, with messages waiting."""
    now, most, done = Counter[str](), Counter[str](), Counter[str]()
    lock = threading.Lock()

    def count(name: str, step: int) -> None:
        with lock:
            now[name] += step
            most[name] = max(most[name], now[name])
            most["all"] = max(most["all"], sum(now.values()))
            done[name] += step < 0

    @listen("a", queue="task")
    async def task(_body: Any) -> None:
        count("task", 1)
        await asyncio.sleep(0.02)
        count("task", -1)

    @listen("a", queue="thread")
    def thread(_body: Any) -> None:
        count("thread", 1)
        time.sleep(0.02)
        count("thread", -1)

    worker = worker_on(broker, task, thread, prefetch_count=4, queue_type=queue_type)
    async with running(worker):
        pass
    for number in range(30):
        await broker.publish("a", number)
    async with running(worker_on(broker, task, thread, prefetch_count=4, queue_type=queue_type)):
        await eventually(lambda: done == {"task": 30, "thread": 30}, "all messages")
    assert (most["task"], most["thread"]) == (4, 4)
    assert most["all"] > 4, "one does not wait for the other"


async def test_a_limit_of_time(broker: Broker, queue_type: str) -> None:
    release = threading.Event()

    @listen("a", queue="slow", retry_delays=(), timeout=0.1)
    async def slow(_body: Any) -> None:
        await asyncio.sleep(60)

    @listen("a", queue="thread", retry_delays=(), timeout=0.1)
    def thread(_body: Any) -> None:
        release.wait(20)

    async with running(worker_on(broker, slow, thread, queue_type=queue_type)):
        await broker.publish("a")
        found = [*await broker.dead("slow"), *await broker.dead("thread")]
        release.set()
    assert [one["properties"]["headers"]["x-outbox-error-class"] for one in found] == ["TimeoutError"] * 2
    assert found[0]["properties"]["headers"]["x-outbox-error"] == "the listener took longer than 0.1 s"


async def test_whatever_a_listener_raises_is_a_failure(broker: Broker, queue_type: str) -> None:
    raised: dict[str, BaseException] = {
        "exit": SystemExit(1),
        "cancelled": asyncio.CancelledError(),
        "timeout": TimeoutError("mine"),
        "configuration": ConfigurationError("mine"),
        "stop": StopIteration(),
    }

    @listen("a", queue="async", retry_delays=())
    async def handle(body: str) -> None:
        if body == "stop":
            raise ValueError
        raise raised[body]

    @listen("a", queue="sync", retry_delays=())
    def in_thread(body: str) -> None:
        raise raised[body]

    async with running(worker_on(broker, handle, in_thread, queue_type=queue_type)) as one:
        for name in raised:
            await broker.publish("a", name)
        await broker.dead("async", len(raised))
        await broker.dead("sync", len(raised))
        assert not one.task.done()


async def test_two_workers_share_a_queue(broker: Broker, queue_type: str) -> None:
    seen: dict[str, list[int]] = {"one": [], "two": []}

    def worker(name: str) -> Worker:
        async def handle(body: int) -> None:
            await asyncio.sleep(0.005)
            seen[name].append(body)

        return worker_on(broker, Listener("a", handle, "q"), prefetch_count=5, queue_type=queue_type)

    async with running(worker("one")), running(worker("two")):
        await asyncio.gather(*(broker.publish("a", number) for number in range(200)))
        await eventually(lambda: sum(map(len, seen.values())) >= 200, "all messages")
    assert sorted(seen["one"] + seen["two"]) == list(range(200))
    assert min(map(len, seen.values())) > 20


async def test_a_ready_connection(broker: Broker, queue_type: str) -> None:
    seen: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05,))
    async def handle(body: int, attempt_count: int) -> None:
        seen.append(body)
        if attempt_count == 1:
            raise ValueError

    connection = await aio_pika.connect_robust(broker.url)
    async with connection:
        async with running(Worker(connection=connection, listeners=[handle], queue_type=queue_type)) as one:
            await broker.publish("a", 1)
            await eventually(lambda: len(seen) == 2, "a retry")
            one.worker.ready.clear()
            await connection.transport.connection.close(ConnectionResetError())  # type: ignore[union-attr]
            await asyncio.wait_for(one.worker.ready.wait(), 20)
            await broker.publish("a", 2)
            await eventually(lambda: len(seen) == 4, "another after the connection was lost")
        await eventually(lambda: not connection.is_closed, "the connection that was lent")


async def test_unusual_names(broker: Broker, queue_type: str) -> None:
    name, exchange = "a queue / of #1, @home + more", "my exchange"

    @listen("a", queue=name)
    async def handle(_body: Any) -> None:
        raise Reject

    async with running(worker_on(broker, handle, exchange_name=exchange, queue_type=queue_type)):
        await broker.publish("a", exchange=exchange)
        await broker.filled(name + ".dlq")
