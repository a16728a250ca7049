"""The command `outbox dlq`: dead letters are looked at, put back, thrown away."""

from __future__ import annotations

from typing import Any

import aio_pika
import pytest
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from outbox import Listener, Reject


@pytest.fixture
async def ids(broker: Broker, queue_type: str) -> list[str]:
    """Three dead letters of the queue q."""

    async def handle(body: Any) -> None:
        raise Reject(f"no {body}")

    async with running(worker_on(broker, Listener("a.*", handle, "q"), queue_type=queue_type)):
        found = [await broker.publish("a.b", number) for number in range(3)]
        while await broker.ready("q.dlq") < 3:
            pass
    return found


async def run(start: StartProcess, broker: Broker, *arguments: str) -> tuple[int, list[str]]:
    one = start("dlq", *arguments, OUTBOX_AMQP_URL=broker.url)
    return await one.ended(), one.log.splitlines()


async def test_list_and_show(broker: Broker, start: StartProcess, ids: list[str]) -> None:
    status, lines = await run(start, broker, "list", "q")
    assert status == 0
    rows = [line.split("\t") for line in lines]
    assert [[row[0], *row[2:]] for row in rows] == [[one, "a.b", "rejected", "Reject"] for one in ids]
    status, lines = await run(start, broker, "show", "q", ids[1])
    assert status == 0
    assert {"x-outbox-error: no 1", f"message_id: {ids[1]}", "routing_key: a.b", "1"} <= set(lines)
    assert ids[0] not in "\n".join(lines)
    assert await broker.ready("q.dlq") == 3, "looking takes nothing away"


async def test_requeue(broker: Broker, start: StartProcess, ids: list[str], queue_type: str) -> None:
    seen: list[tuple[int, str, int]] = []

    async def handle(body: int, routing_key: str, attempt_count: int, message: Any) -> None:
        assert not [name for name in message.headers if name.startswith(("x-outbox-dead", "x-outbox-error"))]
        seen.append((body, routing_key, attempt_count))

    async with running(worker_on(broker, Listener("a.*", handle, "q"), queue_type=queue_type)):
        assert await run(start, broker, "requeue", "q", ids[2]) == (0, ["1 put back"])
        await eventually(lambda: seen == [(2, "a.b", 1)], "one message again")
        assert await run(start, broker, "requeue", "q.dlq", "--all") == (0, ["2 put back"])
        await eventually(lambda: len(seen) == 3, "the others")
    assert sorted(seen) == [(number, "a.b", 1) for number in range(3)]
    assert await broker.ready("q.dlq") == 0


@pytest.mark.usefixtures("ids")
async def test_moved_back_by_other_means(broker: Broker, queue_type: str) -> None:
    """As RabbitMQ's shovel does, which knows nothing of a worker's headers: it goes on with the attempt it had."""
    seen: list[tuple[int, str, int]] = []

    async def handle(body: int, routing_key: str, attempt_count: int) -> None:
        seen.append((body, routing_key, attempt_count))
        if body == 2:
            raise ValueError

    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        dead = await channel.get_queue("q.dlq")
        for _ in range(3):
            message = await dead.get()
            await channel.default_exchange.publish(message, "q")
            await message.ack()
    worker = worker_on(broker, Listener("a.*", handle, "q"), retry_delays=(0.05,), queue_type=queue_type)
    async with running(worker):
        [again] = await broker.dead("q")
    assert sorted(seen) == [(0, "a.b", 1), (1, "a.b", 1), (2, "a.b", 1), (2, "a.b", 2)]
    assert again["properties"]["headers"]["x-outbox-dead-reason"] == "max_attempts"


@pytest.mark.usefixtures("ids")
async def test_purge(broker: Broker, start: StartProcess) -> None:
    status, lines = await run(start, broker, "purge", "q")
    assert (status, await broker.ready("q.dlq")) == (2, 3)
    assert lines == ["outbox: purge throws all dead letters of the queue away: say so with --all"]
    for arguments in (["--dry-run"], ["--all", "--dry-run"]):
        assert await run(start, broker, "purge", "q", *arguments) == (0, ["would throw 3 away"])
    assert await broker.ready("q.dlq") == 3
    assert await run(start, broker, "purge", "q", "--all") == (0, ["3 thrown away"])
    assert await broker.ready("q.dlq") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "nowhere"], "outbox: the broker has no queue 'nowhere.dlq'"),
        (["requeue", "q"], "outbox: which ones? pass their message_ids, or --all"),
        (["requeue", "q", "some", "--all"], "outbox: which ones? pass their message_ids, or --all"),
        (["list", "q", "--all"], "outbox: --all is for requeue and purge"),
        (["requeue", "q", "--all", "--dry-run"], "outbox: --dry-run is for purge"),
    ],
)
async def test_refused(broker: Broker, start: StartProcess, arguments: list[str], words: str) -> None:
    assert await run(start, broker, *arguments) == (2, [words])


async def test_no_broker_given(start: StartProcess) -> None:
    one = start("dlq", "list", "q", OUTBOX_AMQP_URL="")
    assert await one.ended() == 2
    assert one.log == "outbox: no broker given: pass --amqp-url or set OUTBOX_AMQP_URL\n"
