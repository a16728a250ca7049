"""What the publisher says about each message, from a real broker's answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from harness import Management, Queue
from outbox.config import RelaySettings
from outbox.publish import Failed, Publisher, Sent, Unknown
from outbox.store import ClaimedMessage


def message(routing_key: str = "order.created", **more: Any) -> ClaimedMessage:
    values: dict[str, Any] = {
        "id": 1, "message_id": uuid4(), "exchange": "outbox", "routing_key": routing_key, "key": None, "body": b"{}",
        "content_type": "application/json", "headers": None, "properties": None, "expires_in": None, "attempts": 0,
        "created_at": datetime.now(UTC),
    }  # fmt: skip
    return ClaimedMessage(**values | more)


@pytest.fixture
async def publisher(amqp_url: str, management: Management) -> AsyncIterator[Publisher]:
    Queue(management, binding="order.*")
    async with Publisher(RelaySettings(dsn="unused", amqp_url=amqp_url)) as opened:
        yield opened


async def test_each_message_gets_its_own_outcome(publisher: Publisher) -> None:
    batch = [message(), message("nobody.listens"), message()]
    assert await publisher.publish(batch) == [
        Sent(),
        Failed("no queue is bound for this routing key", "unroutable"),
        Sent(),
    ]


async def test_equal_message_ids_are_told_apart(publisher: Publisher) -> None:
    same = UUID("3b241101-e2bb-4255-8caf-4136c566a962")
    batch = [
        message("nobody.listens", message_id=same),
        message(message_id=same),
        message("nobody.listens", message_id=same),
    ]
    assert [type(outcome) for outcome in await publisher.publish(batch)] == [Failed, Sent, Failed]


async def test_full_queue_is_a_failure_without_reason(publisher: Publisher, management: Management) -> None:
    management("PUT", "/queues/{vhost}/full", {"arguments": {"x-max-length": 1, "x-overflow": "reject-publish"}})
    management("POST", "/bindings/{vhost}/e/outbox/q/full", {"routing_key": "full"})
    first, second = await publisher.publish([message("full")]), await publisher.publish([message("full")])
    assert first == [Sent()]
    assert second == [Failed("the broker answered Basic.Nack")]


async def test_careful_publishing_finds_what_closes_the_channel(publisher: Publisher) -> None:
    batch = [message(), message(exchange="missing"), message(), message(exchange="missing"), message("nobody.listens")]
    outcomes = await publisher.publish(batch, carefully=True)
    assert [type(outcome) for outcome in outcomes] == [Sent, Failed, Sent, Failed, Failed]
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].reason == "unroutable"
    assert "no exchange 'missing'" in outcomes[1].error
    assert await publisher.publish([message()]) == [Sent()]


async def test_hasty_publishing_blames_nobody(publisher: Publisher) -> None:
    outcomes = await publisher.publish([message(exchange="missing"), message(), message(exchange="missing")])
    assert Failed not in {type(outcome) for outcome in outcomes}
    assert not publisher.is_open


async def test_key_waits_behind_what_failed(publisher: Publisher) -> None:
    batch = [message(exchange="missing", key="a"), message(key="a"), message(key="b"), message(key="a"), message()]
    outcomes = await publisher.publish(batch, carefully=True)
    assert [type(outcome) for outcome in outcomes] == [Failed, Unknown, Sent, Unknown, Sent]
    assert publisher.is_open


async def test_what_amqp_cannot_carry_is_rejected(publisher: Publisher) -> None:
    outcomes = await publisher.publish([message(), message(headers={"n": 2**70}), message()])
    assert [type(outcome) for outcome in outcomes] == [Sent, Failed, Sent]
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].reason == "rejected"


async def test_closed_connection_is_unknown(publisher: Publisher, management: Management) -> None:
    await publisher.publish([message()])
    management("DELETE", "/vhosts/{vhost}")  # takes the connection with it
    management("PUT", "/vhosts/{vhost}")
    outcomes = await publisher.publish([message(), message()])
    assert [type(outcome) for outcome in outcomes] == [Unknown, Unknown]
    assert not publisher.is_open
