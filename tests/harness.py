"""For tests with a relay: a queue to look into, the relay as a process, a proxy that can hold answers back."""

from __future__ import annotations

import base64
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

PATIENCE = 20.0

T = TypeVar("T")

Management = Callable[..., Any]


def eventually(look: Callable[[], T], what: str) -> T:
    """Waits until the look finds something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE:g} s in vain for {what}")
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Received:
    body: bytes
    routing_key: str
    properties: dict[str, Any]


class Queue:
    """A queue bound to an exchange; reading it is asking the broker, so nothing is hidden in a client."""

    def __init__(
        self, management: Management, name: str = "inbox", binding: str = "#", exchange: str = "outbox"
    ) -> None:
        self._management = management
        self._path = f"/queues/{{vhost}}/{name}"
        management("PUT", f"/exchanges/{{vhost}}/{exchange}", {"type": "topic", "durable": True})
        management("PUT", self._path, {"durable": True})
        management("POST", f"/bindings/{{vhost}}/e/{exchange}/q/{name}", {"routing_key": binding})

    def take(self) -> list[Received]:
        """What is in the queue now; it is gone from there afterwards."""
        order = {"count": 1000, "ackmode": "ack_requeue_false", "encoding": "base64"}
        return [
            Received(base64.b64decode(found["payload"]), found["routing_key"], found["properties"])
            for found in self._management("POST", self._path + "/get", order)
        ]

    def receive(self, count: int) -> list[Received]:
        received: list[Received] = []

        def complete() -> bool:
            received.extend(self.take())
            return len(received) >= count

        eventually(complete, f"{count} messages")
        return received


class RelayProcess:
    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen([sys.executable, "-m", "outbox", "relay", *arguments], stderr=output)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def await_log(self, text: str, times: int = 1) -> None:
        eventually(lambda: self.log.count(text) >= times, f"{text!r} in the relay's log")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


StartRelay = Callable[..., RelayProcess]


@dataclass(frozen=True)
class Finished:
    status: int
    output: str
    log: str

    @property
    def errors(self) -> list[str]:
        """What is meant for the person at the terminal, without the log."""
        return [line for line in self.log.splitlines() if line.startswith("outbox: ")]


RunOutbox = Callable[..., Finished]


class Proxy:
    """Stands between relay and broker; once `deaf` is set, what the broker says no longer reaches the relay."""

    def __init__(self, amqp_url: str) -> None:
        at = urlsplit(amqp_url)
        self._target = (str(at.hostname), int(at.port or 5672))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.deaf = threading.Event()
        login = at.netloc.rpartition("@")[0]
        self.url = at._replace(netloc=f"{login}@127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                relay, _ = self._listener.accept()
                broker = socket.create_connection(self._target)
                self._sockets += [relay, broker]
                threading.Thread(target=self._pass_on, args=(relay, broker, None), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(broker, relay, self.deaf), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, muted: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if muted is None or not muted.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            one.close()
