"""A database, a vhost, emitters, relays as processes, and the reckoning at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiormq
import psycopg
from aiormq.abc import DeliveredMessage

import databases
import servers
from chaos.oracle import LEDGER, Emitters, Evidence, Message, Verdict, judge
from chaos.proxy import Amqp, Postgres, Proxy

LONG = os.environ.get("OUTBOX_LONG") == "1"
TOTAL, SECONDS = (10_000, 5.0) if LONG else (4_000, 2.0)
WINDOW = 200
LEASE = 6.0
PATIENCE = 60.0
RECOVERY = 30.0
# How old a quorum queue must be: one killed at 1 s, with RabbitMQ 3.10, came back without its log and without a leader.
REGISTERED = 5.0
QUIET = 1.0
LINES = 50  # of complaint in a relay's log, whatever happens

Manage = Callable[..., Any]

# Short times, so that a case takes seconds; the proportions are those of the defaults.
KNOBS: dict[str, float | str] = {
    "batch_size": 100,
    "window": WINDOW,
    "lease": LEASE,
    "confirm_timeout": 2,
    "heartbeat": 2,
    "send_timeout": 2,
    "poll": 0.5,
    "shutdown": 5,
}


class Relay:
    def __init__(self, name: str, dsn: str, amqp_url: str, log: Path, knobs: dict[str, float | str]) -> None:
        self.name, self._log = name, log
        self.ended = False
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOX_")}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in (KNOBS | knobs).items()]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "outbox", "relay", *flags],
                env=clean | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def assert_calm(self) -> None:
        """It neither floods its log nor meets what it does not know."""
        log = self.log
        assert "Traceback" not in log
        assert len([line for line in log.splitlines() if " WARNING" in line or " ERROR" in line]) <= LINES


class Stage:
    """`with Stage(...) as stage`: prints seed, faults and logs."""

    def __init__(
        self,
        dsn: str,
        amqp_url: str,
        management_url: str,
        folder: Path,
        *,
        queue: str = "classic",
        seed: int | None = None,
    ) -> None:
        self.dsn, self.amqp_url = dsn, amqp_url
        self._management_url = management_url
        self._vhost = urlsplit(amqp_url).path[1:]
        self._folder, self._queue = folder, queue
        self._stack = contextlib.ExitStack()
        self._begun = time.monotonic()
        self.seed = seed if seed is not None else int(os.environ.get("OUTBOX_CHAOS_SEED", random.getrandbits(32)))
        self.chance = random.Random(self.seed)  # noqa: S311 - to be repeated, not to be secret
        self.timeline: list[str] = []
        self.relays: list[Relay] = []
        self.emitters: list[Emitters] = []
        self.unclean = 0
        with self.connect() as db:
            db.execute(LEDGER)
        self.manage("PUT", "exchanges/{vhost}/outbox", {"type": "topic", "durable": True})
        self.manage("PUT", "queues/{vhost}/inbox", {"durable": True, "arguments": {"x-queue-type": queue}})
        self.manage("POST", "bindings/{vhost}/e/outbox/q/inbox", {"routing_key": "chaos"})

    def manage(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return servers.manage(self._management_url, method, path.replace("{vhost}", self._vhost), body)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, autocommit=True, connect_timeout=5)

    def __enter__(self) -> Self:
        self.note(f"seed {self.seed}")
        return self

    def __exit__(self, *_: object) -> None:
        for emitters in self.emitters:
            emitters.stop()
        for emitters in self.emitters:
            emitters.join(PATIENCE)
        for relay in self.relays:
            if relay.process.poll() is None:
                relay.process.kill()
            relay.process.wait()
        self._stack.close()
        # Shown if the test fails; a fixture does not learn whether it did.
        print("\n".join(self.timeline))
        print(f"repeat with OUTBOX_CHAOS_SEED={self.seed}")
        for relay in self.relays:
            print(f"--- relay {relay.name}", *relay.log.splitlines()[-60:], sep="\n")

    def note(self, text: str) -> None:
        self.timeline.append(f"{time.monotonic() - self._begun:8.3f} {text}")

    # --- actors

    def emit(self, total: int = TOTAL, seconds: float = SECONDS, **more: Any) -> Emitters:
        """Returns when there is a backlog, so that what happens next happens to a busy relay."""
        self.note(f"emit {total} messages in {seconds} s")
        emitters = Emitters(self.dsn, self.seed + len(self.emitters), total, seconds, **more)
        self.emitters.append(emitters)
        deadline = time.monotonic() + PATIENCE
        while emitters.committed < emitters.burst:
            assert time.monotonic() < deadline, f"emitters hang: {emitters.errors[-3:]}"
            time.sleep(0.01)
        return emitters

    def relay(self, *, pg: str | None = None, amqp: str | None = None, **knobs: float | str) -> Relay:
        name = str(len(self.relays))
        relay = Relay(name, pg or self.dsn, amqp or self.amqp_url, self._folder / f"relay{name}.log", knobs)
        self.relays.append(relay)
        self.note(f"relay {name} started, process {relay.process.pid}")
        return relay

    def kill(self, relay: Relay) -> None:
        """An unclean end: what was in flight may come twice."""
        relay.process.send_signal(signal.SIGKILL)
        relay.process.wait()
        relay.ended = True
        self.unclean += 1
        self.note(f"relay {relay.name} killed")

    def stop(self, relay: Relay) -> None:
        begun = time.monotonic()
        relay.process.send_signal(signal.SIGTERM)
        status = relay.process.wait(PATIENCE)
        relay.ended = True
        self.note(f"relay {relay.name} stopped in {time.monotonic() - begun:.1f} s with status {status}")
        assert status == 0

    def amqp_proxy(self) -> Proxy:
        return self._stack.enter_context(Proxy(self.amqp_url, Amqp, lambda text: self.note(f"amqp: {text}")))

    def pg_proxy(self, url: str | None = None) -> Proxy:
        return self._stack.enter_context(Proxy(url or self.dsn, Postgres, lambda text: self.note(f"pg: {text}")))

    # --- looking

    def left(self) -> tuple[int, int, int]:
        """Messages that wait, lanes that are leased, messages that were sent or are dead."""
        with self.connect() as db:
            row = db.execute(
                """
                select (select count(*) from outbox.message),
                       (select count(*) from outbox.lane where token is not null),
                       (select coalesce(sum(messages), 0) from public.ledger)
                """
            ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1]), int(row[2]) - int(row[0])

    def await_registered(self) -> None:
        """Before the broker is killed: it would forget a quorum queue it has just made, with all that it confirmed."""
        if self._queue == "quorum":
            time.sleep(max(self._begun + REGISTERED - time.monotonic(), 0))

    def await_progress(self, more: int, timeout: float = RECOVERY) -> None:
        """Waits until so many more messages are settled."""
        goal = self.left()[2] + more
        deadline = time.monotonic() + timeout
        while (now := self.left())[2] < goal:
            assert time.monotonic() < deadline, f"no progress: {now} waiting, leased, settled; wanted {goal} settled"
            time.sleep(0.05)
        self.note(f"{now[2]} settled, {now[0]} waiting")

    def rounds(self, times: int, **more: Any) -> Iterator[int]:
        """For a fault each: there is a backlog, and a relay is at work on it."""
        for number in range(times):
            self.emit(TOTAL // times, SECONDS / times, **more)
            self.await_progress(TOTAL // times // 5)
            yield number

    def await_emitted(self) -> None:
        for emitters in self.emitters:
            assert emitters.join(PATIENCE), f"emitters hang: {emitters.errors[-3:]}"
        self.note(f"{sum(e.committed for e in self.emitters)} messages committed")

    def await_empty(self, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        begun = time.monotonic()
        while any((now := self.left())[:2]):
            for relay in self.relays:
                assert relay.ended or relay.process.poll() is None, f"relay {relay.name} died: {relay.process.poll()}"
            assert time.monotonic() < deadline, f"never empty: {now[0]} waiting, {now[1]} lanes leased, {self.rest()}"
            time.sleep(0.05)
        self.note(f"empty after {time.monotonic() - begun:.1f} s")

    def execute(self, statement: str, *arguments: object) -> list[Any]:
        with self.connect() as db:
            done = db.execute(statement.encode(), arguments)
            return done.fetchall() if done.description else []

    def rest(self) -> list[Any]:
        with self.connect() as db:
            return (
                db.execute(
                    "select lane, key, id, due_at, attempts, error from outbox.message order by id limit 5"
                ).fetchall()
                + db.execute("select * from outbox.lane where token is not null limit 3").fetchall()
            )

    def received(self) -> list[Message]:
        """Everything in the queue, in its order; it is gone from there afterwards."""
        return asyncio.run(drain(self.amqp_url))

    # --- the reckoning

    def finish(self, *, timeout: float = PATIENCE, refused: bool = False) -> Verdict:
        """Waits for rest, stops the relays and judges. At most the window may come twice per unclean end."""
        self.await_emitted()
        self.await_empty(timeout)
        for relay in self.relays:
            if not relay.ended:
                self.stop(relay)
        with self.connect() as db:
            ledger = {str(txn) for (txn,) in db.execute("select txn from public.ledger")}
            dead = {str(one) for (one,) in db.execute("select message_id from outbox.dead_letter")}
            repairs = db.execute("select floor_repairs from outbox.horizon").fetchall()
            attempts = db.execute("select count(*), min(error) from public.refused").fetchone()
        evidence = Evidence(
            attempts=[attempt for emitters in self.emitters for attempt in emitters.attempts],
            ledger=ledger,
            received=self.received(),
            dead=dead,
            poison={one for emitters in self.emitters for one in emitters.poison},
            durable=all(emitters.synchronous for emitters in self.emitters),
        )
        verdict = judge(evidence, self.unclean * WINDOW)
        self.note(str(verdict))
        assert not verdict.problems, str(verdict)
        assert repairs == [(0,)], f"floors were wrong: {repairs}"
        assert attempts is not None
        for relay in self.relays:
            relay.assert_calm()
        if not refused:
            assert attempts[0] == 0, f"{attempts[0]} attempts were counted: {attempts[1]}"
        if evidence.durable:
            assert verdict.committed >= sum(emitters.total for emitters in self.emitters)
        return verdict


async def drain(amqp_url: str) -> list[Message]:
    found: list[Message] = []
    changed = asyncio.Event()

    async def take(message: DeliveredMessage) -> None:
        body = json.loads(message.body)
        found.append(Message(str(message.header.properties.message_id), body["key"], body["number"]))
        changed.set()

    async with await aiormq.connect(amqp_url) as connection:
        channel = await connection.channel()
        await channel.basic_consume("inbox", take, no_ack=True)
        # Quiet for a while is empty: the relays have stopped, and the broker has nothing else to do.
        with contextlib.suppress(TimeoutError):
            while True:
                changed.clear()
                await asyncio.wait_for(changed.wait(), QUIET)
        left = await channel.queue_declare("inbox", passive=True)
        assert left.message_count == 0, f"{left.message_count} messages stay in the queue"
    return found


@contextlib.contextmanager
def stage(server: str, amqp_url: str, management_url: str, folder: Path, *, queue: str = "classic") -> Iterator[Stage]:
    """On servers of one's own: a database and a vhost that live as long as the block."""
    name = f"chaos_{random.getrandbits(48):x}"
    user = quote(str(urlsplit(amqp_url).username), safe="")
    servers.manage(management_url, "PUT", f"vhosts/{name}")
    servers.manage(
        management_url, "PUT", f"permissions/{name}/{user}", {"configure": ".*", "write": ".*", "read": ".*"}
    )
    with databases.database(server) as dsn:
        databases.install(dsn, "plain")
        at = urlsplit(amqp_url)._replace(path=f"/{name}").geturl()
        try:
            with Stage(dsn, at, management_url, folder, queue=queue) as running:
                yield running
        finally:
            servers.manage(management_url, "DELETE", f"vhosts/{name}")
