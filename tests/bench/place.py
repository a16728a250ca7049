"""Where relays are measured: a database with a backlog and a vhost with one queue."""

from __future__ import annotations

import functools
import random
import string
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import databases
import servers
from bench.measure import Bench
from outbox.config import RelaySettings

BATCH, WINDOW = 500, 1500
KINDS = ("classic", "quorum")
# What a classic queue is by default before RabbitMQ 4: measured less often, to know what it costs.
OLD_KIND = "classic v1"


@functools.cache
def body(size: int) -> str:
    """JSON of so many bytes that the database cannot compress."""
    return '{"x": "' + "".join(random.Random(size).choices(string.ascii_letters, k=size - 9)) + '"}'  # noqa: S311


@dataclass(frozen=True)
class Place:
    """A database with the package and a vhost with one queue behind the exchange."""

    bench: Bench
    dsn: str
    amqp_url: str

    def settings(self, window: int = WINDOW) -> RelaySettings:
        return RelaySettings(dsn=self.dsn, amqp_url=self.amqp_url, window=window, batch_size=BATCH)

    def clear(self, strict: str = "off") -> None:
        databases.query(self.dsn, f"select outbox.configure('strict_keys', '{strict}')")
        databases.query(self.dsn, "truncate outbox.message, outbox.held_key")
        databases.query(
            self.dsn,
            "update outbox.lane set version = version + 1, token = null, relay = null, leased_until = null, "
            "handed = '{}'",
        )
        self.purge()

    def purge(self) -> None:
        servers.manage(self.bench.management, "DELETE", f"queues/{self.amqp_url.rpartition('/')[2]}/bench/contents")

    def emit(self, count: int, keys: int = 0, size: int = 256) -> None:
        key = f"(n % {keys})::text" if keys else "null"
        databases.query(
            self.dsn, f"select outbox.emit('bench', '{body(size)}', key => {key}) from generate_series(1, {count}) as n"
        )
        databases.query(self.dsn, "vacuum analyze outbox.message")


@contextmanager
def place(bench: Bench, kind: str) -> Iterator[Place]:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    manage = servers.manage
    manage(bench.management, "PUT", f"vhosts/{name}", {})
    type_, _, version = kind.partition(" v")
    arguments: dict[str, Any] = {"x-queue-type": type_}
    if type_ == "classic":  # since RabbitMQ 4 there is no other version than 2
        arguments["x-queue-version"] = int(version or 2)
    manage(bench.management, "PUT", f"exchanges/{name}/outbox", {"type": "topic", "durable": True})
    manage(bench.management, "PUT", f"queues/{name}/bench", {"durable": True, "arguments": arguments})
    manage(bench.management, "POST", f"bindings/{name}/e/outbox/q/bench", {"routing_key": "#"})
    try:
        with bench.database() as dsn:
            yield Place(bench, dsn, bench.amqp_url.rstrip("/") + f"/{name}")
    finally:
        manage(bench.management, "DELETE", f"vhosts/{name}")
