"""A little shop: orders and their messages in one transaction, a relay, a consumer, a worker. Run by `make demo`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, LiteralString

import aio_pika
import psycopg
from aio_pika.abc import AbstractIncomingMessage
from psycopg import sql

import databases
from outbox import PostgresSource, Worker, emit, listen

sys.path.insert(0, str(databases.ROOT / "sql" / "packaging"))
import build  # found through the line above

PATIENCE = 10.0
BURST = 1000
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ

Shop = psycopg.AsyncConnection[Any]

NEXT = """\
  make up                  the same servers, for as long as you like
  eval "$(make -s env)"    their addresses for this shell
  README.md                the same by hand: a consumer, a relay, your own transactions
  make test                everything this package promises, checked
"""


class DemoError(Exception):
    """What the demo was to show did not happen."""


def paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLOUR else text


class Steps:
    number = 0

    @classmethod
    def begin(cls, title: str) -> None:
        cls.number += 1
        print(f"\n{paint(f'{cls.number}. {title}', '1')}")


def show(text: str) -> None:
    print(paint(indent(dedent(text).strip(), "     "), "36"))


def tell(text: str, started: float | None = None) -> None:
    taken = "" if started is None else paint(f"  ({(time.perf_counter() - started) * 1000:.1f} ms)", "2")
    print(f"  {paint('->', '32')} {text}{taken}", flush=True)


class Consumer:
    """Stands for another service: reads the queue `warehouse` and notes what comes when."""

    def __init__(self) -> None:
        self.orders: dict[int, float] = {}
        self.last: AbstractIncomingMessage | None = None

    async def read(self, message: AbstractIncomingMessage) -> None:
        arrived = time.perf_counter()
        async with message.process():
            self.orders[json.loads(message.body)["order"]] = arrived
            self.last = message

    async def wait_for(self, orders: set[int]) -> None:
        deadline = time.perf_counter() + PATIENCE
        while not orders <= self.orders.keys():
            if time.perf_counter() > deadline:
                raise DemoError(f"{len(orders - self.orders.keys())} committed orders did not arrive in {PATIENCE:g} s")
            await asyncio.sleep(0.001)


async def run(shop: Shop, statement: LiteralString, *arguments: object) -> Any:
    """Runs the statement and returns the first value, if there is one."""
    cursor = await shop.execute(statement, arguments)
    row = await cursor.fetchone() if cursor.description else None
    return row[0] if row else None


async def order(shop: Shop, customer: str, item: str, pieces: int, end: LiteralString) -> int:
    """An insert and an emit in one transaction, as the block that is shown says."""
    await shop.execute("begin")
    insert = "insert into orders (customer, item, pieces) values (%s, %s, %s) returning id"
    number = int(await run(shop, insert, customer, item, pieces))
    payload = json.dumps({"order": number, "item": item, "pieces": pieces})
    await shop.execute("select outbox.emit('order.created', %s, key => %s)", (payload, customer))
    show(f"""
        begin;
        insert into orders (customer, item, pieces) values ('{customer}', '{item}', {pieces});
        select outbox.emit('order.created', '{payload}', key => '{customer}');
        {end};
        """)
    await shop.execute(end)
    return number


class Relay:
    """`outbox relay` as a process of its own, with what it wrote to its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())
            if "relay ready" in self.lines[-1] and not self.ready.done():
                self.ready.set_result(True)
        if not self.ready.done():
            self.ready.set_result(False)

    def error(self, what: str) -> DemoError:
        return DemoError(f"{what}:\n{''.join(self.lines)}")


@contextlib.asynccontextmanager
async def relay(dsn: str, amqp_url: str) -> AsyncIterator[Relay]:
    environment = {**os.environ, "OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outbox", "relay", "--declare", env=environment, stderr=asyncio.subprocess.PIPE
    )
    running = Relay(process)
    reader = asyncio.create_task(running.read())
    try:
        async with asyncio.timeout(PATIENCE):
            ready = await running.ready
        if not ready:
            raise running.error("the relay did not start")
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reader


async def make_shop(server: str, name: str) -> str:
    """A database of the demo's own, and the package where the server finds it."""
    async with await psycopg.AsyncConnection.connect(server, autocommit=True) as connection:
        await connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    build.copy_extension(build.build(databases.ROOT, databases.BUILD), Path(os.environ["OUTBOX_EXTENSION_DIR"]))
    return databases.named(server, name)


async def tour(server: str, amqp_url: str, name: str) -> None:
    dsn = await make_shop(server, name)
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as shop,
        await aio_pika.connect(amqp_url) as broker,
    ):
        Steps.begin("A shop, and the package in its database")
        table: LiteralString = (
            "create table orders (id bigint generated always as identity, customer text, item text, pieces integer)"
        )
        show(f"{table};\ncreate extension outbox;")
        started = time.perf_counter()
        await shop.execute(table)
        await shop.execute("create extension outbox")
        tell(f"outbox {await run(shop, 'select outbox.version()')} installed", started)

        Steps.begin("A relay, which carries messages to RabbitMQ")
        show("outbox relay --declare")
        started = time.perf_counter()
        async with relay(dsn, amqp_url) as running:
            tell("relay ready", started)

            Steps.begin("A consumer: the warehouse wants to hear of every order")
            consumer = Consumer()
            channel = await broker.channel()
            queue = await channel.declare_queue("warehouse", durable=True)
            await queue.bind("outbox", "order.*")
            await queue.consume(consumer.read)
            tell("queue `warehouse` bound to exchange `outbox` with `order.*`")

            await tell_the_story(shop, consumer)

            Steps.begin("A worker: retries what fails, and handles each payment once")
            show("""
                @listen("payment.*", queue="ledger", retry_delays=(0.1,), once=True)
                async def book(payment, tx, attempt_count): ...   # fails at the first attempt

                Worker(amqp_url, listeners=[book], connect=...)
                """)
            await pay(shop, dsn, Worker(amqp_url, listeners=[book], connect=partial(connect, dsn)))

            Steps.begin("The relay stops when it is told to")
            show("kill -TERM <relay>")
            started = time.perf_counter()
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                status = await running.process.wait()
            if status != 0:
                raise running.error(f"the relay ended with status {status}")
            tell("batch in hand finished, exit status 0", started)

        Steps.begin("The same listener without a broker: one line differs")
        show("Worker(source=PostgresSource(dsn), listeners=[book], connect=...)")
        await pay(shop, dsn, Worker(source=PostgresSource(dsn), listeners=[book], connect=partial(connect, dsn)))


def connect(dsn: str) -> Any:
    return psycopg.AsyncConnection.connect(dsn)


@listen("payment.*", queue="ledger", retry_delays=(0.1,), once=True)
async def book(payment: dict[str, int], tx: Shop, attempt_count: int) -> None:
    await tx.execute("insert into ledger values (%s, %s)", (payment["payment"], attempt_count))
    if attempt_count == 1:
        raise ConnectionError("the bank does not answer")


async def pay(shop: Shop, dsn: str, worker: Worker) -> None:
    """A payment, which the worker books at its second attempt."""
    await shop.execute("create table if not exists ledger (payment integer, attempt integer)")
    logging.getLogger("outbox").setLevel(logging.ERROR)  # a failure is what is to be seen here
    task = asyncio.create_task(worker.run())
    number = int(await run(shop, "select 1 + count(*) from ledger"))
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait({task, asyncio.create_task(worker.ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        started = time.perf_counter()
        async with await connect(dsn) as connection:
            await emit(connection, "payment.received", {"payment": number})
        while not await run(shop, "select count(*) from ledger where payment = %s", number):  # noqa: ASYNC110 - asked
            await asyncio.sleep(0.005)
        taken = await run(shop, "select string_agg(attempt::text, ', ') from ledger where payment = %s", number)
        if taken != "2":
            raise DemoError(f"payment {number} is in the ledger from attempts {taken}")
        tell(f"payment {number} failed, was tried again and is in the ledger once, from attempt {taken}", started)
        worker.stop()
        await task


async def tell_the_story(shop: Shop, consumer: Consumer) -> None:
    Steps.begin("An order and its message, in one transaction")
    committed = await order(shop, "ada", "teapot", 1, "commit")
    started = time.perf_counter()
    await consumer.wait_for({committed})
    assert consumer.last is not None
    taken = (consumer.orders[committed] - started) * 1000
    tell(f"the warehouse got {consumer.last.routing_key} {consumer.last.body.decode()}")
    tell(f"message_id {consumer.last.message_id}, {taken:.1f} ms after commit")

    Steps.begin("Another order, rolled back: its message must never leave")
    rolled_back = await order(shop, "bob", "anvil", 100, "rollback")
    tell(f"order {rolled_back} is gone, and so is its message")

    Steps.begin(f"{BURST:,} orders in one transaction")
    show(f"""
        with new as (insert into orders ... from generate_series(1, {BURST}) returning id, customer)
        select outbox.emit('order.created', jsonb_build_object('order', id), key => customer) from new;
        """)
    started = time.perf_counter()
    cursor = await shop.execute(
        "with new as ("
        "    insert into orders (customer, item, pieces)"
        "    select 'customer ' || n %% 50, 'cup', 1 from generate_series(1, %s) as n returning id, customer"
        ") select id, outbox.emit('order.created', jsonb_build_object('order', id), key => customer) from new",
        (BURST,),
    )
    burst = {number for number, _ in await cursor.fetchall()}
    tell("committed", started)
    await consumer.wait_for(burst)
    tell("all of them in the warehouse", started)

    Steps.begin("What is where")
    kept = {number for (number,) in await (await shop.execute("select id from orders")).fetchall()}
    deadline = time.perf_counter() + PATIENCE
    while waiting := await run(shop, "select count(*) from outbox.message"):
        if time.perf_counter() > deadline:
            raise DemoError(f"{waiting} messages still wait in the database")
        await asyncio.sleep(0.01)
    # The burst came after the rollback and has arrived, so a message of the rolled-back order would be here as well.
    if rolled_back in consumer.orders:
        raise DemoError("the rolled-back order arrived")
    if consumer.orders.keys() != kept:
        raise DemoError(f"{len(consumer.orders)} orders arrived, {len(kept)} were committed")
    tell(f"orders in the shop {len(kept):,}, in the warehouse {len(consumer.orders):,}, waiting in the outbox 0")
    tell(f"order {rolled_back}, the rolled-back one, never arrived")


def main() -> int:
    started = time.perf_counter()
    try:
        asyncio.run(tour(os.environ["OUTBOX_DSN"], os.environ["OUTBOX_AMQP_URL"], (sys.argv[1:] or ["shop"])[0]))
    except KeyboardInterrupt:
        return 130
    except (DemoError, TimeoutError) as error:
        print(f"\n{paint('demo failed:', '31')} {str(error) or 'it took too long'}", file=sys.stderr)
        return 1
    print(f"\n{paint('What was committed arrived, what was rolled back did not', '1;32')}", end="")
    print(f" ({time.perf_counter() - started:.1f} s). To go on:\n\n{NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
