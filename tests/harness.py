"""For tests with a relay: a queue to look into, the relay as a process, a proxy that fails on demand."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

import guardian
import psycopg
import pytest

from chaos.proxy import Plain, Postgres
from outbox import cli
from outbox.store import ClaimedMessage

PATIENCE = 20.0

T = TypeVar("T")

Management = Callable[..., Any]
Db = psycopg.Connection[Any]


def eventually(look: Callable[[], T], what: str) -> T:
    """Waits until the look finds something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE:g} s in vain for {what}")
        time.sleep(0.02)
    return found


def message(routing_key: str = "order.created", **more: Any) -> ClaimedMessage:
    """As a claim would hand it out."""
    values: dict[str, Any] = {
        "id": 1, "message_id": str(uuid4()), "exchange": "outbox", "routing_key": routing_key, "key": None,
        "body": b"{}", "content_type": "application/json", "headers": None, "properties": None, "expires_in": None,
        "attempts": 0, "created_at": datetime.now(UTC),
    }  # fmt: skip
    return ClaimedMessage(**values | more)


@dataclass(frozen=True)
class Received:
    body: bytes
    routing_key: str
    properties: dict[str, Any]


def emit(db: Db, routing_key: str = "order.created", payload: object = None, **more: object) -> tuple[int, str]:
    """Returns the message's id and message_id."""
    given = {"message_id": uuid4(), **more}
    names = "".join(f", {name} => %({name})s" for name in given)
    row = db.execute(
        f"select outbox.emit(%(routing_key)s, %(payload)s::jsonb{names})",
        {"routing_key": routing_key, "payload": json.dumps(payload or {}), **given},
    ).fetchone()
    assert row is not None
    return row[0], str(given["message_id"])


def waiting(db: Db) -> int:
    row = db.execute("select count(*) from outbox.message").fetchone()
    assert row is not None
    return int(row[0])


def leased(db: Db) -> int:
    """How many lanes are in the hands of a relay."""
    row = db.execute("select count(*) from outbox.lane where token is not null").fetchone()
    assert row is not None
    return int(row[0])


def claims(db: Db) -> int:
    """How many claims there have been."""
    row = db.execute("select last_value from outbox.lane_turn").fetchone()
    assert row is not None
    return int(row[0])


class Queue:
    """A queue bound to an exchange; reading it is asking the broker, so nothing is hidden in a client."""

    def __init__(
        self,
        management: Management,
        name: str = "inbox",
        binding: str = "#",
        exchange: str = "outbox",
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self._management = management
        self._path = f"/queues/{{vhost}}/{name}"
        management("PUT", f"/exchanges/{{vhost}}/{exchange}", {"type": "topic", "durable": True})
        management("PUT", self._path, {"durable": True, "arguments": arguments or {}})
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


def may(management: Management, user: str, *, configure: str = "^$", write: str = "^$", read: str = "^$") -> None:
    """What the user of this URL may do in the test's vhost: nothing but what is named."""
    rights = {"configure": configure, "write": write, "read": read}
    management("PUT", f"/permissions/{{vhost}}/{urlsplit(user).username}", rights)


def cut_off(management: Management) -> None:
    """Ends the one connection to the test's vhost; the broker's list of them lags behind."""
    (found,) = eventually(lambda: management("GET", "/vhosts/{vhost}/connections"), "a connection")
    management("DELETE", f"/connections/{quote(found['name'], safe='')}")


class RelayProcess:
    def __init__(self, arguments: list[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outbox", "relay", *arguments], stderr=output, env=os.environ | environment
            )

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


def environment_with(**given: str) -> dict[str, str]:
    """What is given, and of our own what tells a command about no server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PG"))} | given


def run_outbox(arguments: Sequence[str], environment: Mapping[str, str]) -> Finished:
    """Runs `outbox ...` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox", *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def run_outbox_here(arguments: Sequence[str], environment: Mapping[str, str]) -> Finished:
    """The same without a process of its own: a short command spends most of its time on the start of Python."""
    output, log = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("sys.stdin", io.StringIO()),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(log),
    ):
        status = cli.main(arguments)
    return Finished(status, output.getvalue(), log.getvalue())


def on_terminal(arguments: Sequence[str], environment: Mapping[str, str], keys: str = "") -> tuple[int, str]:
    """Runs `outbox ...` on a terminal, where somebody types: its exit status, and what is to be seen there."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "outbox", *arguments], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, keys.encode())
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    return child.wait(3 * PATIENCE), seen.decode().replace("\r\n", "\n")


class Page:
    """Reads from a relay's HTTP address."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{guardian.free_port()}"

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.address}{path}", method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics")[1].splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def shows(self, name: str, value: float) -> None:
        eventually(lambda: self.metrics().get(name) == value, f"{name} {value}; there is {self.metrics()}")


class Proxy:
    """Stands between the relay and a server, and can fail in the ways that networks do."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._target = (str(at.hostname), int(at.port or 5672))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[tuple[socket.socket, socket.socket]] = []
        self.deaf = threading.Event()  # what the server says is dropped
        self.held = threading.Event()  # what the server says is kept back
        self.stuck = threading.Event()  # what the relay says is not read
        self.deaf_at = ""  # deaf as soon as the relay has called this in SQL
        self.stuck_at = ""  # stuck as soon as the relay wants to call this
        self._sql = at.scheme.startswith("postgres")
        login = at.netloc.rpartition("@")[0]
        self.url = at._replace(netloc=f"{login}@127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Resets all connections."""
        for link in self._links:
            for end in link:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._links.clear()

    def say(self, data: bytes) -> None:
        """Lets the server say something on every connection."""
        for relay, _ in self._links:
            relay.sendall(data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                relay, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._links.append((relay, server))
                threading.Thread(target=self._pass_on, args=(relay, server, self.stuck), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, relay, self.held), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, waiting: threading.Event) -> None:
        statements = Postgres() if self._sql else Plain()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                said = [packet.text for packet in statements.split(up=True, data=data)] if waiting is self.stuck else []
                if self.stuck_at and any(self.stuck_at in text for text in said):
                    self.stuck.set()
                while waiting.is_set():
                    time.sleep(0.01)
                if self.deaf_at and any(self.deaf_at in text for text in said):
                    self.deaf.set()
                if waiting is self.stuck or not self.deaf.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.held.clear()
        self.stuck.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept() that waits
        self._listener.close()
        self.cut()


class Pooler:
    """The real pgbouncer before a database, in transaction mode."""

    def __init__(self, dsn: str, folder: Path) -> None:
        at = urlsplit(dsn)
        self._port = guardian.free_port()
        self.url = at._replace(netloc=f"pooled@127.0.0.1:{self._port}").geturl()
        self._folder = folder
        (folder / "pgbouncer.ini").write_text(
            f"""
[databases]
{at.path[1:]} = host={at.hostname} port={at.port} user={at.username} password={unquote(at.password or "")}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self._port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
"""
        )
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [shutil.which("pgbouncer") or "/usr/sbin/pgbouncer", self._folder / "pgbouncer.ini"],
                cwd="/",
                stdout=log,
                stderr=log,
                **guardian.as_user(guardian.server_user()),
            )
        assert guardian.wait_until(self._answers, PATIENCE), (self._folder / "log").read_text()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def pooled(dsn: str) -> Iterator[Pooler]:
    """In a folder that the user who runs it can reach."""
    user = guardian.server_user()
    with tempfile.TemporaryDirectory(prefix="outbox_test_pooler_", dir=guardian.TEMPORARY) as folder:
        os.chown(folder, user.pw_uid, user.pw_gid)
        running = Pooler(dsn, Path(folder))
        try:
            yield running
        finally:
            running.kill()
