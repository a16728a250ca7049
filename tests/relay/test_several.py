"""Several databases in one process, several processes of one command."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import guardian
import psycopg
import pytest

import databases
from harness import PATIENCE, Db, Page, Queue, RelayProcess, RunOutbox, StartRelay, emit, eventually


@pytest.fixture
def second(dsn: str) -> Iterator[str]:
    """Another database with the package, on the same server."""
    with databases.database(dsn) as name:
        databases.install(name, "plain")
        yield name


def emit_in(dsn: str, count: int = 1) -> None:
    with psycopg.connect(dsn, autocommit=True) as db:
        for _ in range(count):
            emit(db)


def test_each_is_served(start_relay: StartRelay, dsn: str, second: str, queue: Queue, page: Page) -> None:
    relay = start_relay("--http", page.address, "--log-format", "json", pg=f"{dsn}\n# a comment\n\n{second}\n")
    relay.await_log("relay ready", 2)
    emit_in(dsn)
    emit_in(second, 2)
    queue.receive(3)
    first_name, second_name = (databases.query(at, "select current_database()") for at in (dsn, second))
    assert f'"database": "{first_name}"' in relay.log
    assert f'"database": "{second_name}"' in relay.log
    page.shows('outbox_messages_published_total{exchange_name="outbox"}', 3)
    page.shows(f'outbox_relay_up{{database="{first_name}"}}', 1)
    page.shows(f'outbox_relay_up{{database="{second_name}"}}', 1)
    assert relay.stop() == 0


def test_flag_can_be_repeated(dsn: str, second: str, amqp_url: str, queue: Queue, outbox: RunOutbox) -> None:
    emit_in(dsn)
    emit_in(second)
    plain, password = zip(*(without_password(at) for at in (dsn, second)), strict=True)
    done = outbox(
        "relay", "--once", "--dsn", plain[0], "--dsn", plain[1], OUTBOX_AMQP_URL=amqp_url, PGPASSWORD=password[0]
    )
    assert done.status == 0, done.log
    queue.receive(2)


def without_password(dsn: str) -> tuple[str, str]:
    parts = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(dsn).items()}
    password = parts.pop("password")
    return psycopg.conninfo.make_conninfo(**parts), password


def test_one_that_fails_does_not_stop_the_others(
    start_relay: StartRelay, dsn: str, second: str, queue: Queue, page: Page
) -> None:
    databases.query(second, "drop schema outbox cascade")
    name = databases.query(second, "select current_database()")
    relay = start_relay("--http", page.address, pg=f"{second}\n{dsn}")
    relay.await_log("database not served, trying again")
    assert f"database={name}" in next(line for line in relay.log.splitlines() if "not served" in line)
    emit_in(dsn)
    queue.receive(1)
    status, text = page.get("/readyz")
    assert status == 503
    assert f'"{name}": {{"ready": false' in text
    databases.install(second, "plain")
    emit_in(second)
    queue.receive(1)
    page.shows(f'outbox_relay_up{{database="{name}"}}', 1)
    assert page.metrics()[f'outbox_relay_restarts_total{{database="{name}"}}'] >= 1
    assert relay.stop() == 0


def test_bug_in_one_does_not_stop_the_others(
    dsn: str, second: str, amqp_url: str, queue: Queue, tmp_path: Path
) -> None:
    """A bug ends the loop it is in, and is said."""
    script = (
        "import sys\nfrom outbox import cli\nfrom outbox.store import Store\nclaim = Store.claim\n"
        "async def broken(self, *a):\n"
        f"    if {second!r} in self._settings.dsn: raise ZeroDivisionError('a bug')\n"
        "    return await claim(self, *a)\n"
        "Store.claim = broken\nsys.exit(cli.main(['relay']))\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        relay = subprocess.Popen(
            [sys.executable, "-c", script], stderr=output,
            env=os.environ | {"OUTBOX_DSN": f"{dsn}\n{second}", "OUTBOX_AMQP_URL": amqp_url},
        )  # fmt: skip
    try:
        eventually(lambda: "ZeroDivisionError: a bug" in log.read_text(), "the traceback")
        emit_in(dsn)
        queue.receive(1)
    finally:
        relay.terminate()
        assert relay.wait(PATIENCE) == 0


@pytest.mark.usefixtures("queue")
def test_none_can_be_served(outbox: RunOutbox, dsn: str, second: str, amqp_url: str) -> None:
    for at in (dsn, second):
        databases.query(at, "drop schema outbox cascade")
    done = outbox("relay", OUTBOX_DSN=f"{dsn}\n{second}", OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert "does not have the package outbox" in done.errors[0]


def test_one_away_when_all_are_to_be_drained(outbox: RunOutbox, dsn: str, amqp_url: str, queue: Queue) -> None:
    emit_in(dsn)
    done = outbox("relay", "--once", OUTBOX_DSN=f"postgresql://127.0.0.1:1/none\n{dsn}", OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 1
    queue.receive(1)


def test_the_same_twice(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    done = outbox("relay", OUTBOX_DSN=f"{dsn}\n{dsn}", OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert "is given twice" in done.errors[0]


# --- workers


def children(relay: RelayProcess) -> list[int]:
    path = Path(f"/proc/{relay.process.pid}/task/{relay.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def test_workers_share_the_work(db: Db, queue: Queue, start_relay: StartRelay, page: Page) -> None:
    relay = start_relay("--workers", "2", "--http", page.address)
    relay.await_log("relay ready", 2)
    assert "worker=1" in relay.log
    assert "worker=2" in relay.log
    for _ in range(50):
        emit(db)
    queue.receive(50)
    page.shows('outbox_messages_published_total{exchange_name="outbox"}', 50)
    page.shows(f'outbox_relay_up{{database="{db.info.dbname}"}}', 2)
    page.shows(f'outbox_relays{{database="{db.info.dbname}"}}', 2)
    assert page.get("/healthz") == (200, "ok\n")
    assert page.get("/readyz")[0] == 200
    assert relay.stop() == 0


def test_worker_that_dies_is_replaced(db: Db, queue: Queue, start_relay: StartRelay, page: Page) -> None:
    relay = start_relay("--workers", "2", "--http", page.address)
    relay.await_log("relay ready", 2)
    os.kill(children(relay)[0], signal.SIGKILL)
    eventually(lambda: page.get("/healthz") == (503, "1 workers do not answer\n"), "that it shows")
    relay.await_log("a worker ended, starting another")
    relay.await_log("relay ready", 3)
    emit(db)
    queue.receive(1)
    eventually(lambda: page.get("/healthz")[0] == 200, "health")
    assert relay.stop(signal.SIGINT) == 0


@pytest.mark.usefixtures("queue")
def test_worker_that_hangs_shows(start_relay: StartRelay, page: Page) -> None:
    relay = start_relay("--workers", "2", "--http", page.address)
    relay.await_log("relay ready", 2)
    stopped = children(relay)[0]
    os.kill(stopped, signal.SIGSTOP)
    assert page.get("/healthz")[0] == 503
    os.kill(stopped, signal.SIGCONT)
    eventually(lambda: page.get("/healthz")[0] == 200, "health")


@pytest.mark.usefixtures("queue")
def test_workers_end_with_the_one_that_started_them(start_relay: StartRelay) -> None:
    relay = start_relay("--workers", "2")
    relay.await_log("relay ready", 2)
    workers = children(relay)
    relay.stop(signal.SIGKILL)
    eventually(lambda: not any(map(guardian.birth, workers)), "the end of the workers")


def status(pid: int, name: str) -> str:
    (found,) = re.findall(rf"^{name}:\t(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return str(found)


def is_due(pid: int, number: int) -> bool:
    """Whether a process that is stopped has been sent this signal."""
    return bool(int(status(pid, "ShdPnd"), 16) >> (number - 1) & 1)


@pytest.mark.usefixtures("queue")
def test_second_signal_ends_workers_at_once(start_relay: StartRelay) -> None:
    relay = start_relay("--workers", "2")
    relay.await_log("relay ready", 2)
    workers = children(relay)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(status(pid, "State") == "T" for pid in workers), "workers that stand still")
    relay.process.send_signal(signal.SIGTERM)
    eventually(lambda: all(is_due(pid, signal.SIGTERM) for pid in workers), "the first signal, passed on")
    assert all(map(guardian.birth, workers))
    assert relay.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    eventually(lambda: not any(map(guardian.birth, workers)), "the end of the workers")


def test_worker_without_hope(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    done = outbox("relay", "--workers", "2", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert "the broker has no exchange 'outbox'" in done.errors[0]


def test_workers_drain_and_end(outbox: RunOutbox, db: Db, dsn: str, amqp_url: str, queue: Queue) -> None:
    for _ in range(20):
        emit(db)
    done = outbox("relay", "--once", "--workers", "2", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 0, done.log
    queue.receive(20)


@pytest.mark.usefixtures("queue")
def test_progress_shows_what_waits(dsn: str, db: Db, amqp_url: str) -> None:
    """On a terminal, with what the rights of a relay permit."""
    db.execute("select outbox.pause()")
    for _ in range(3):
        emit(db)
    ours, theirs = pty.openpty()
    relay = subprocess.Popen(
        [sys.executable, "-m", "outbox", "relay"], stderr=theirs,
        env=os.environ | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = b""
        while b"0 a second, 3 waiting, oldest " not in seen:
            seen += os.read(ours, 4096)
        db.execute("select outbox.resume()")
        while b"0 waiting, oldest 0.0 s, 0 in flight, 3 sent, 0 failed" not in seen:
            seen += os.read(ours, 4096)
    finally:
        relay.terminate()
        relay.wait(PATIENCE)
        os.close(ours)
