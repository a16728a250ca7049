"""Effects exactly once: acceptance, effects and emits commit together, on whatever connection the application uses."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from worker.conftest import Broker, eventually, running, worker_on

from harness import Db
from outbox import Reject, Worker, emit, listen
from outbox.errors import ConfigurationError

INSERT = "insert into effect values ({})"
Connect = Callable[[], Any]


@pytest.fixture(autouse=True)
def _effect(db: Db) -> None:
    db.execute("create table effect (n integer)")


def effects(db: Db) -> list[int]:
    return [row[0] for row in db.execute("select n from effect order by n")]


def chatter(db: Db) -> int:
    """How many messages the listeners have emitted."""
    row = db.execute("select count(*) from outbox.message").fetchone()
    assert row is not None
    return int(row[0])


def url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


@contextlib.asynccontextmanager
async def asynchronous(kind: str, dsn: str) -> AsyncIterator[Connect]:
    if kind == "psycopg":
        yield lambda: psycopg.AsyncConnection.connect(dsn)
        return
    if kind == "psycopg autocommit":
        yield lambda: psycopg.AsyncConnection.connect(dsn, autocommit=True)
        return
    if kind == "asyncpg":
        import asyncpg  # noqa: PLC0415 - only here

        yield lambda: asyncpg.connect(dsn)
        return
    engine = create_async_engine(url(dsn))
    makers: dict[str, Connect] = {"session": async_sessionmaker(engine), "engine.begin": engine.begin}
    yield makers.get(kind, engine.connect)
    await engine.dispose()


async def run_async(tx: Any, number: int) -> None:
    sql: Any = INSERT.format(number)
    await tx.execute(sqlalchemy.text(sql) if "sqlalchemy" in type(tx).__module__ else sql)


@pytest.mark.parametrize(
    "kind", ["psycopg", "psycopg autocommit", "session", "engine.begin", "engine.connect", "asyncpg"]
)
async def test_async(broker: Broker, dsn: str, db: Db, kind: str) -> None:
    called: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05,), once=True)
    async def handle(body: int, tx: Any, attempt_count: int) -> None:
        called.append(body)
        await run_async(tx, body)
        await emit(tx, "said", {"n": body})
        if attempt_count == 1 and body == 2:
            raise ValueError

    async with asynchronous(kind, dsn) as connect, running(worker_on(broker, handle, connect=connect)):
        identity = await broker.publish("a", 1)
        await eventually(lambda: effects(db) == [1], "an effect")
        await broker.publish("a", 1, message_id=identity)
        await broker.publish("a", 2)
        await eventually(lambda: effects(db) == [1, 2], "another")
    assert called == [1, 2, 2], "a duplicate is acknowledged without a call; a failure is called again"
    assert chatter(db) == 2, "what a failed attempt emitted is gone with it"
    assert (await broker.ready("q"), await broker.ready("q.dlq")) == (0, 0)


@pytest.mark.parametrize("kind", ["psycopg", "session", "engine.begin"])
async def test_sync(broker: Broker, dsn: str, db: Db, kind: str) -> None:
    called: list[int] = []
    engine = sqlalchemy.create_engine(url(dsn))
    makers: dict[str, Connect] = {
        "psycopg": lambda: psycopg.connect(dsn),
        "session": sessionmaker(engine),
        "engine.begin": engine.begin,
    }

    @listen("a", queue="q", retry_delays=(0.05,), once=True)
    def handle(body: int, tx: Any, attempt_count: int) -> None:
        called.append(body)
        sql: Any = INSERT.format(body)
        tx.execute(sql if isinstance(tx, psycopg.Connection) else sqlalchemy.text(sql))
        emit(tx, "said", {"n": body})
        if attempt_count == 1 and body == 2:
            raise ValueError

    async with running(worker_on(broker, handle, connect=makers[kind])):
        identity = await broker.publish("a", 1)
        await eventually(lambda: effects(db) == [1], "an effect")
        await broker.publish("a", 1, message_id=identity)
        await broker.publish("a", 2)
        await eventually(lambda: effects(db) == [1, 2], "another")
    assert called == [1, 2, 2]
    assert chatter(db) == 2
    engine.dispose()


async def test_the_same_message_twice_at_once(broker: Broker, dsn: str, db: Db, queue_type: str) -> None:
    called: list[int] = []

    @listen("a", queue="q", once=True)
    async def handle(body: int, tx: Any) -> None:
        called.append(body)
        await asyncio.sleep(0.05)
        await run_async(tx, body)

    connect = lambda: psycopg.AsyncConnection.connect(dsn)  # noqa: E731 - as an application writes it
    async with running(worker_on(broker, handle, connect=connect, queue_type=queue_type)):
        identity = await broker.publish("a", 1)
        await asyncio.gather(*(broker.publish("a", 1, message_id=identity) for _ in range(5)))
        await eventually(lambda: effects(db), "an effect")
    assert (effects(db), called) == ([1], [1])
    assert await broker.ready("q") == 0


async def test_two_listeners_accept_each_for_itself(broker: Broker, dsn: str, db: Db) -> None:
    @listen("a", queue="one", once=True)
    async def one(_body: int, tx: Any) -> None:
        await run_async(tx, 1)

    @listen("a", queue="two", once=True)
    async def two(_body: int, tx: Any) -> None:
        await run_async(tx, 2)

    async with running(worker_on(broker, one, two, connect=lambda: psycopg.AsyncConnection.connect(dsn))):
        await broker.publish("a", 1)
        await eventually(lambda: effects(db) == [1, 2], "both effects")


@pytest.mark.parametrize("identity", [None, "order 7", ""])
async def test_without_an_identity_it_is_dead(
    broker: Broker, dsn: str, db: Db, identity: str | None, queue_type: str
) -> None:
    @listen("a", queue="q", once=True)
    async def handle(_body: int, tx: Any) -> None:
        pytest.fail(f"called with {tx}")

    async with running(
        worker_on(broker, handle, connect=lambda: psycopg.AsyncConnection.connect(dsn), queue_type=queue_type)
    ):
        # As a client that gives no identity; ours would make one up.
        properties = {"delivery_mode": 2} | ({} if identity is None else {"message_id": identity})
        broker.management(
            "POST", "/exchanges/{vhost}/outbox/publish",
            {"routing_key": "a", "payload": "1", "payload_encoding": "string", "properties": properties},
        )  # fmt: skip
        [dead] = await broker.dead("q")
    assert dead["properties"]["headers"]["x-outbox-dead-reason"] == "no_message_id"
    assert effects(db) == []


async def test_reject_undoes_its_effects(broker: Broker, dsn: str, db: Db, queue_type: str) -> None:
    @listen("a", queue="q", once=True)
    async def handle(body: int, tx: Any) -> None:
        await run_async(tx, body)
        raise Reject

    async with running(
        worker_on(broker, handle, connect=lambda: psycopg.AsyncConnection.connect(dsn), queue_type=queue_type)
    ):
        await broker.publish("a", 1)
        await broker.dead("q")
    assert effects(db) == []
    assert db.execute("select count(*) from outbox.inbox").fetchone() == (0,)


async def test_while_the_database_is_away_nothing_is_counted(
    broker: Broker, dsn: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    away = True
    attempts: list[int] = []

    @listen("a", queue="q", once=True, retry_delays=())
    async def handle(body: int, tx: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        await run_async(tx, body)

    def connect() -> Any:
        return psycopg.AsyncConnection.connect(dsn if not away else "host=127.0.0.1 port=1")

    async with running(worker_on(broker, handle, connect=connect)):
        await broker.publish("a", 1)
        await eventually(lambda: "database unavailable, trying again" in caplog.messages, "a word about it")
        away = False
        await eventually(lambda: effects(db) == [1], "an effect")
    assert attempts == [1]


async def test_the_database_stays_away_for_long(broker: Broker, dsn: str, db: Db) -> None:
    """Longer than a message may stay in hand: it goes to a delay, and comes back as the same attempt."""
    away = True
    attempts: list[int] = []

    @listen("a", queue="q", once=True, retry_delays=(0.05, 0.05), timeout=0.3)
    async def handle(body: int, tx: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        await run_async(tx, body)

    def connect() -> Any:
        return psycopg.AsyncConnection.connect(dsn if not away else "host=127.0.0.1 port=1")

    async with running(worker_on(broker, handle, connect=connect)):
        await broker.publish("a", 1)
        await asyncio.sleep(2)
        away = False
        await eventually(lambda: effects(db) == [1], "an effect")
    assert attempts == [1]


async def test_connections_of_the_wrong_kind_end_the_worker(broker: Broker, dsn: str) -> None:
    @listen("a", queue="async", once=True)
    async def is_async(_body: int, tx: Any) -> None:
        pytest.fail(f"called with {tx}")

    @listen("a", queue="sync", once=True)
    def is_sync(_body: int, tx: Any) -> None:
        pytest.fail(f"called with {tx}")

    for listener, connect, words in (
        (is_async, lambda: psycopg.connect(dsn), "not async, the listener is async"),
        (is_sync, lambda: psycopg.AsyncConnection.connect(dsn), "for async functions, the listener is not async"),
        (is_sync, lambda: contextlib.closing(io.BytesIO()), "must return a connection or session of psycopg"),
    ):
        async with running(worker_on(broker, listener, connect=connect)) as one:
            await broker.publish("a", 1)
            with pytest.raises(ConfigurationError, match=words):
                await asyncio.wait_for(one.task, 20)


def test_once_needs_a_factory() -> None:
    @listen("a", queue="q", once=True)
    async def handle(_body: int, tx: AsyncSession | Session) -> None:
        pytest.fail(f"called with {tx}")

    with pytest.raises(ConfigurationError, match="listener q has once=True: pass connect"):
        Worker("amqp://localhost/", listeners=[handle])


async def test_a_role_that_may_only_consume(broker: Broker, dsn: str, db: Db) -> None:
    name = f"consumer_{db.info.dbname}"
    db.execute(f"create role {name} login password 'p'")
    db.execute(f"select outbox.grant_consume('{name}')")
    db.execute(f"grant insert on effect to {name}")

    @listen("a", queue="q", once=True)
    async def handle(body: int, tx: Any) -> None:
        await run_async(tx, body)

    try:
        connect = lambda: psycopg.AsyncConnection.connect(dsn, user=name, password="p")  # noqa: E731, S106
        async with running(worker_on(broker, handle, connect=connect)):
            await broker.publish("a", 1)
            await eventually(lambda: effects(db) == [1], "an effect")
    finally:
        db.execute(f"drop owned by {name}")
        db.execute(f"drop role {name}")
