"""A worker that kills itself, as kill -9 does, at the point that KILL_AT names, when it gets there the KILL_NTH time.

Its listeners leave effects in the database: `once` exactly one for each message, `again` one for each call. Messages
come from the kind of queue that SOURCE names, or straight from the database.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import psycopg

from outbox import PostgresSource, Worker, listen
from outbox.courier import Courier
from outbox.handle import Handling
from outbox.source_amqp import AmqpSource
from outbox.store import Store

DSN = os.environ["OUTBOX_DSN"]
SOURCE = os.environ["SOURCE"]
DELAYS = (0.05, 0.05, 0.05, 0.05, 0.05)
left = int(os.environ.get("KILL_NTH", "1"))


def die_at(point: str) -> None:
    global left  # noqa: PLW0603 - a count for the whole process
    if os.environ.get("KILL_AT") == point:
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: str, after: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        die_at(before)
        result = await original(*args, **kwargs)
        if result != []:  # a claim that found nothing
            die_at(after)
        return result

    setattr(owner, name, wrapped)


around(Handling, "__call__", "received", "handled")
around(Handling, "_once", "before the transaction", "committed")
around(Courier, "publish", "before the copy", "copy confirmed")
around(AmqpSource, "_ack", "before the ack", "acked")
around(Store, "claim", "before the claim", "claimed")
around(Store, "mark_sent", "before the mark", "marked")
around(Store, "mark_failed", "before the retry is marked", "retry marked")


@listen("a", queue="once", retry_delays=DELAYS, once=True)
async def once(body: int, tx: psycopg.AsyncConnection[Any], attempt_count: int) -> None:
    await tx.execute("insert into effect values ('once', %s)", [body])
    die_at("in the transaction")
    if body % 2 and attempt_count == 1:
        raise ValueError


@listen("a", queue="again", retry_delays=DELAYS)
def again(body: int, attempt_count: int) -> None:
    with psycopg.connect(DSN) as connection:
        connection.execute("insert into effect values ('again', %s)", [body])
    if body % 2 and attempt_count == 1:
        raise ValueError


def connect() -> Any:
    return psycopg.AsyncConnection.connect(DSN)


if SOURCE == "postgres":
    worker = Worker(source=PostgresSource(DSN), listeners=[once, again], connect=connect)
else:
    worker = Worker(os.environ["OUTBOX_AMQP_URL"], listeners=[once, again], connect=connect, queue_type=SOURCE)
