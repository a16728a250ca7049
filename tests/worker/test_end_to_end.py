"""From emit() through the relay to a listener, and on from there: what an emitter says is what a listener gets."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pydantic
import pytest
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from outbox import emit, listen, tracking


class User(pydantic.BaseModel):
    id: int
    username: str


@pytest.fixture
def _relay(dsn: str, broker: Broker, start: StartProcess) -> None:
    start("relay", "--declare", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=broker.url)


@pytest.mark.usefixtures("_relay")
async def test_a_model_and_its_chain(broker: Broker, dsn: str, queue_type: str) -> None:
    """Each listener sees the whole history: what began it, and every message since."""
    seen: dict[str, tuple[User, tuple[str, ...]]] = {}

    def connect() -> Any:
        return psycopg.AsyncConnection.connect(dsn)

    @listen("user.created", queue="created", once=True)
    async def on_created(user: User, tracking_ids: tuple[str, ...], tx: Any) -> None:
        seen["created"] = user, tracking_ids
        await emit(tx, "user.welcome", user)
        await emit(tx, "user.notified", user)

    @listen("user.*", queue="others")
    async def on_others(user: User, routing_key: str, tracking_ids: tuple[str, ...]) -> None:
        if routing_key != "user.created":
            seen[routing_key] = user, tracking_ids

    async with running(worker_on(broker, on_created, on_others, connect=connect, queue_type=queue_type)):
        async with await connect() as connection:
            with tracking() as begun:
                await emit(connection, "user.created", User(id=123, username="johndoe"))
        await eventually(lambda: len(seen) == 3, "three messages")
    chains = {name: chain for name, (_, chain) in seen.items()}
    assert [user for user, _ in seen.values()] == [User(id=123, username="johndoe")] * 3
    assert (chains["created"][:-1], len(chains["created"])) == (begun, 2)
    for name in ("user.welcome", "user.notified"):
        assert (chains[name][:-1], len(chains[name])) == (chains["created"], 3)
    assert chains["user.welcome"] != chains["user.notified"]


@pytest.mark.usefixtures("_relay")
async def test_w13_a_life_that_the_emitter_gave(broker: Broker, dsn: str, queue_type: str) -> None:
    """However many retries there would be, it is over when its time is."""
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.1, 60))
    async def handle(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ValueError

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await emit(connection, "a", {}, expiration=15)
        begun = time.monotonic()
        [dead] = await broker.dead("q")
    assert attempts == [1, 2]
    assert dead["properties"]["headers"]["x-outbox-dead-reason"] == "expired"
    assert time.monotonic() - begun < 15
