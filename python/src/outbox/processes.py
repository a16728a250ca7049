"""Several processes of `outbox relay`: one of them, started anew when it dies, and its line to the one that leads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable

from outbox.health import Look
from outbox.metrics import Snapshot

logger = logging.getLogger(__name__)

PAUSE_FIRST, PAUSE_LAST = 1.0, 60.0
ANSWER_WITHIN = 2.0
HOPELESS = 2  # the exit status of what only a person can put right
# Tells a worker the number of its line to the process that started it, and which one it is.
WORKER = "OUTBOX_WORKER"


async def report_to(line: socket.socket, look: Look, stop: Callable[[], None]) -> None:
    """A worker's side: answers each question with a snapshot; nobody there any more means to stop."""
    reader, writer = await asyncio.open_connection(sock=line)
    with contextlib.suppress(OSError):
        while number := await reader.readline():
            writer.write(json.dumps([int(number), await look()]).encode() + b"\n")
            await writer.drain()
    stop()


class Worker:
    """One of several processes, started anew when it dies."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._process: asyncio.subprocess.Process | None = None
        self._line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking, self._asked = asyncio.Lock(), 0

    async def run(self, over: asyncio.Event, stop: Callable[[], None], *, once: bool) -> int:
        """Returns its exit status when it is not to be started again."""
        pause = PAUSE_FIRST
        while True:
            begun = time.monotonic()
            status = await self._one()
            if status == HOPELESS and not once:
                stop()
            if over.is_set() or once:
                return status
            fields = {"action": "worker", "worker": self._number, "status": status}
            logger.error("a worker ended, starting another", extra=fields)
            pause = PAUSE_FIRST if time.monotonic() - begun > PAUSE_LAST else min(2 * pause, PAUSE_LAST)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await over.wait()
                    return status

    async def _one(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "outbox", *sys.argv[1:],
                env=os.environ | {WORKER: f"{theirs.fileno()}:{self._number}"},
                pass_fds=[theirs.fileno()],
                # Ctrl-C reaches only us: a second signal would end it at once.
                start_new_session=True,
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**24)
        self._line = reader, writer
        try:
            return await self._process.wait()
        finally:
            self._line = None
            writer.close()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    async def look(self) -> Snapshot | None:
        """None: it does not answer."""
        async with self._asking:
            if self._line is None:
                return None
            reader, writer = self._line
            self._asked += 1
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(ANSWER_WITHIN):
                    writer.write(b"%d\n" % self._asked)
                    while text := await reader.readline():
                        number, found = json.loads(text)
                        if number == self._asked:  # not a late answer to an earlier question
                            return dict(found)
            return None
