"""For tests of the worker: workers that run in the test's own loop, queues to put messages into and to look into."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import aio_pika
import pytest

from harness import PATIENCE, Management
from outbox import Listener, Worker

T = TypeVar("T")


async def eventually(look: Callable[[], T], what: str, patience: float = PATIENCE) -> T:
    """Waits until the look finds something, and lets others run meanwhile."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {patience:g} s in vain for {what}")
        await asyncio.sleep(0.02)
    return found


class Broker:
    """The test's vhost: publishes as a relay does, and looks into queues."""

    def __init__(self, management: Management, url: str) -> None:
        self.management, self.url = management, url
        self._connection: Any = None
        self._channel: Any = None

    async def publish(
        self, routing_key: str, body: object = None, *, exchange: str = "outbox", headers: Any = None, **properties: Any
    ) -> str:
        """Persistent and confirmed; returns the message_id."""
        await self._open()
        given: dict[str, Any] = {
            "message_id": str(uuid4()),
            "delivery_mode": 2,
            "content_type": "application/json",
        } | properties
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        target = (
            await self._channel.get_exchange(exchange, ensure=False) if exchange else self._channel.default_exchange
        )
        await target.publish(aio_pika.Message(content, headers=headers, **given), routing_key)
        return str(given["message_id"])

    def look(self, queue: str, *, take: bool = False, count: int = 1000) -> list[dict[str, Any]]:
        """What is in a queue now, as the management API shows it; body as bytes."""
        mode = "ack_requeue_false" if take else "ack_requeue_true"
        order = {"count": count, "ackmode": mode, "encoding": "base64"}
        found: list[dict[str, Any]] = self.management("POST", f"/queues/{{vhost}}/{queue}/get", order)
        return [one | {"body": base64.b64decode(one["payload"])} for one in found]

    async def dead(self, queue: str, count: int = 1) -> list[dict[str, Any]]:
        """The dead letters of a queue, once there are so many."""
        found: list[dict[str, Any]] = []

        def complete() -> bool:
            found.extend(self.look(queue + ".dlq", take=True))
            return len(found) >= count

        await eventually(complete, f"{count} dead letters in {queue}")
        return found

    async def ready(self, queue: str) -> int:
        """How many messages of a queue are in nobody's hands."""
        await self._open()
        seen: list[int] = []
        while len(seen) < 3 or len(set(seen[-3:])) > 1:  # an acknowledgement may still be on its way through the queue
            if seen:
                await asyncio.sleep(0.05)
            seen.append((await self._channel.declare_queue(queue, passive=True)).declaration_result.message_count)
        return seen[-1]

    async def filled(self, queue: str) -> None:
        """Waits for a message in a queue, and for the queue."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    if await self.ready(queue):
                        return
                except aio_pika.exceptions.ChannelClosed:
                    self._channel = None
                await asyncio.sleep(0.02)

    async def _open(self) -> None:
        if self._channel is None:
            self._connection = await aio_pika.connect(self.url)
            self._channel = await self._connection.channel(on_return_raises=True)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


@pytest.fixture
async def broker(management: Management, amqp_url: str) -> AsyncIterator[Broker]:
    made = Broker(management, amqp_url)
    yield made
    await made.close()


@dataclass
class Running:
    worker: Worker
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.worker.stop()
        async with asyncio.timeout(PATIENCE):
            await self.task


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Running]:
    """The worker runs in the block, from the moment it is ready."""
    task = asyncio.create_task(worker.run())
    one = Running(worker, task)
    try:
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            task.result()
        yield one
    finally:
        if not task.done():
            await one.stop()


class Process:
    """The command `outbox`, and what it logs."""

    def __init__(self, arguments: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outbox", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **environment},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def await_log(self, text: str) -> None:
        await eventually(lambda: text in self.log or self.process.poll() is not None, f"{text!r} in {self.log}")
        assert text in self.log

    async def ended(self) -> int:
        """Its exit status."""
        await eventually(lambda: self.process.poll() is not None, "the end of the process")
        return int(self.process.returncode)


StartProcess = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartProcess]:
    """Starts `outbox ...` in the test's own folder; whatever still runs is killed at the end."""
    started: list[Process] = []

    def run(*arguments: str, **environment: str) -> Process:
        started.append(Process(arguments, tmp_path / f"process{len(started)}.log", tmp_path, environment))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()


def worker_on(broker: Broker, *listeners: Listener, **knobs: Any) -> Worker:
    return Worker(broker.url, listeners=listeners, **knobs)


@pytest.fixture(params=["classic", "quorum"])
def queue_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)
