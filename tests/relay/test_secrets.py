"""Passwords of both servers appear nowhere: canaries are looked for in whatever a relay writes or shows."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from harness import PATIENCE, Db, Page, Queue, RunOutbox, StartRelay, emit, eventually

CANARY = "canary%/:@ ü'\\"
SHAPES = ("canary", quote("canary"))


def assert_clean(text: str) -> None:
    assert text
    assert not any(shape in text for shape in SHAPES), text


@dataclass(frozen=True)
class Addresses:
    dsn: str
    amqp_url: str


@pytest.fixture
def addresses(db: Db, dsn: str, amqp_url: str, management: Callable[..., Any]) -> Iterator[Addresses]:
    """Of users on both servers whose passwords are canaries."""
    name = f"outbox_test_{secrets.token_hex(6)}"
    db.execute(f"create role {name} superuser login password '{CANARY.replace(chr(39), chr(39) * 2)}'")
    management("PUT", f"/users/{name}", {"password": CANARY, "tags": ""})
    management("PUT", f"/permissions/{{vhost}}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    login = f"{name}:{quote(CANARY, safe='')}"
    pg, mq = urlsplit(dsn), urlsplit(amqp_url)
    yield Addresses(
        pg._replace(netloc=f"{login}@{pg.hostname}:{pg.port}").geturl(),
        mq._replace(netloc=f"{login}@{mq.hostname}:{mq.port}").geturl(),
    )
    management("DELETE", f"/users/{name}")
    db.execute(f"drop role {name}")


def test_a_running_relay(  # noqa: PLR0917 - fixtures
    addresses: Addresses, start_relay: StartRelay, db: Db, queue: Queue, page: Page, tmp_path: Path
) -> None:
    file = tmp_path / "dsn"
    file.write_text(addresses.dsn + "\n")
    relay = start_relay(
        "-v", "--workers", "2", "--http", page.address, "--dsn-file", str(file), pg="", amqp=addresses.amqp_url
    )
    relay.await_log("relay ready", 2)
    emit(db)
    queue.receive(1)
    pids = Path(f"/proc/{relay.process.pid}/task/{relay.process.pid}/children").read_text().split()
    assert len(pids) == 2
    for pid in (*pids, str(relay.process.pid)):
        assert_clean(Path(f"/proc/{pid}/cmdline").read_text())
    for path in ("/metrics", "/healthz", "/readyz"):
        assert_clean(page.get(path)[1])
    # Both servers lose sight of it, and it says so.
    role = urlsplit(addresses.dsn).username
    db.execute(f"alter role {role} nologin")
    db.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", [role])
    relay.await_log("server unavailable")
    assert relay.stop() == 0
    assert_clean(relay.log)


@pytest.mark.usefixtures("queue")
def test_wrong_passwords(addresses: Addresses, outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    wrong = Addresses(*(at.replace("canary", "canary2") for at in (addresses.dsn, addresses.amqp_url)))
    for pg, mq in ((wrong.dsn, amqp_url), (dsn, wrong.amqp_url)):
        for command in (["relay", "--once", "-v"], ["relay", "--check"], ["stats"]):
            done = outbox(*command, OUTBOX_DSN=pg, OUTBOX_AMQP_URL=mq)
            assert done.status == (0 if command == ["stats"] and pg == dsn else 1), done.log
            assert_clean(done.log + done.output)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTBOX_DSN", "postgresql://me:canary%zz@db/shop"),
        ("OUTBOX_DSN", "host=db password='canary"),
        ("OUTBOX_DSN", "host=db password=ca canary"),
        ("OUTBOX_AMQP_URL", "amqp://me:canary@mq:port/"),
        ("OUTBOX_AMQP_URL", "http://me:canary@mq/"),
        ("OUTBOX_AMQP_URL", "amqp://me:canary@[::/"),
    ],
)
def test_addresses_that_cannot_be_read(outbox: RunOutbox, dsn: str, amqp_url: str, name: str, value: str) -> None:
    done = outbox("relay", "-v", **{"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url, name: value})
    assert done.status == 2, done.log
    assert_clean(done.log)


CRASH = """
import sys
from outbox import cli
from outbox.store import Store

async def crash(self, *_):
    raise ZeroDivisionError(repr(self._settings))

Store.claim = crash
sys.exit(cli.main(["relay", "-v", *sys.argv[1:]]))
"""


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("style", ["text", "json"])
def test_traceback(addresses: Addresses, style: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, "--log-format", style],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
        env=os.environ | {"OUTBOX_DSN": addresses.dsn, "OUTBOX_AMQP_URL": addresses.amqp_url},
    )  # fmt: skip
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert "RelaySettings(" in done.stderr
    assert_clean(done.stderr)


@pytest.mark.usefixtures("queue")
def test_broker_that_vanishes(addresses: Addresses, start_relay: StartRelay, management: Callable[..., Any]) -> None:
    relay = start_relay("-v", pg=addresses.dsn, amqp=addresses.amqp_url)
    relay.await_log("relay ready")
    name = urlsplit(addresses.amqp_url).username
    management("PUT", f"/users/{name}", {"password": "another", "tags": ""})

    def cut() -> bool:
        """The list of connections lags behind."""
        names = [found["name"] for found in management("GET", "/connections") if found.get("user") == name]
        for connection in names:
            management("DELETE", f"/connections/{quote(connection)}")
        return bool(names)

    eventually(cut, "its connection")
    relay.await_log("server unavailable")
    relay.stop()
    assert_clean(relay.log)


@pytest.mark.parametrize(
    ("setting", "logged"),
    [
        ("log_min_duration_statement = 0", True),
        ("log_statement = 'all'", True),
        ("log_min_duration_statement = 0; set log_parameter_max_length = 0", False),
        ("log_statement = 'all'; set log_parameter_max_length = 0", False),
    ],
)
def test_bodies_in_the_servers_log(db: Db, setting: str, *, logged: bool) -> None:
    """A session is sent what the server logs about it, if it asks for that."""
    lines: list[str] = []
    db.add_notice_handler(lambda said: lines.append(f"{said.severity} {said.message_primary} {said.message_detail}"))
    db.execute(f"set client_min_messages = log; set {setting}".encode())
    db.execute("select outbox.emit('a', %s::jsonb)", ['"canary"'])
    assert "LOG" in "".join(lines)
    assert ("canary" in "".join(lines)) is logged


def test_bodies_in_the_servers_log_by_default(db: Db) -> None:
    for name, default in (("log_parameter_max_length", "-1"), ("log_parameter_max_length_on_error", "0")):
        assert db.execute("select boot_val from pg_settings where name = %s", [name]).fetchone() == (default,)
