"""What becomes of a message when its listener succeeds, fails or rejects it, on both kinds of queue."""

from __future__ import annotations

from typing import Any

import pytest
from worker.conftest import Broker, eventually, running

from outbox import Reject, Worker, listen

KINDS = ["classic", "quorum"]


@pytest.fixture(params=KINDS)
def queue_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_message_is_handled_and_acknowledged(broker: Broker, queue_type: str) -> None:
    seen: list[Any] = []

    @listen("order.created", queue="stock")
    async def on_order(order: Any) -> None:
        seen.append(order)

    async with running(Worker(broker.url, listeners=[on_order], queue_type=queue_type)):
        await broker.publish("order.created", {"order": 1})
        await eventually(lambda: seen, "a message")
        await broker.empty("stock")
    assert seen == [{"order": 1}]


async def test_failure_is_retried_after_each_delay_then_dead(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("order.created", queue="stock", retry_delays=(0.05, 0.1))
    async def on_order(order: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ValueError(f"no stock for {order}")

    async with running(Worker(broker.url, listeners=[on_order], queue_type=queue_type)):
        identity = await broker.publish("order.created", {"order": 1})
        [dead] = await broker.dead("stock")
    assert attempts == [1, 2, 3]
    headers = dead["properties"]["headers"]
    assert dead["properties"]["message_id"] == identity
    assert headers["x-outbox-dead-reason"] == "max_attempts"
    assert headers["x-outbox-error-class"] == "ValueError"
    assert headers["x-outbox-attempt"] == 3
    assert dead["body"] == b'{"order": 1}'


async def test_reject_goes_to_the_dead_letters_at_once(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("order.created", queue="stock")
    def on_order(order: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise Reject(f"order {order['order']} is void")

    async with running(Worker(broker.url, listeners=[on_order], queue_type=queue_type)):
        await broker.publish("order.created", {"order": 1})
        [dead] = await broker.dead("stock")
    assert attempts == [1]
    headers = dead["properties"]["headers"]
    assert (headers["x-outbox-dead-reason"], headers["x-outbox-error"]) == ("rejected", "order 1 is void")
