from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import guardian
import pytest

from harness import PATIENCE, Finished, Management, Page, Proxy, Queue, RelayProcess, RunOutbox, StartRelay, eventually


@pytest.fixture
def queue(management: Management) -> Queue:
    return Queue(management)


@pytest.fixture
def start_relay(dsn: str, amqp_url: str, tmp_path: Path) -> Iterator[StartRelay]:
    """Starts `outbox relay` on the test's own database and vhost; whatever still runs is killed at the end."""
    started: list[RelayProcess] = []

    def start(*arguments: str, pg: str = dsn, amqp: str = amqp_url) -> RelayProcess:
        log = tmp_path / f"relay{len(started)}.log"
        started.append(RelayProcess([*arguments], log, OUTBOX_DSN=pg, OUTBOX_AMQP_URL=amqp))
        return started[-1]

    yield start
    for relay in started:
        relay.process.kill()
        relay.process.wait()


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def outbox() -> RunOutbox:
    """Runs the command `outbox` to its end, with an environment that holds only what is given."""

    def run(*arguments: str, **environment: str) -> Finished:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")} | environment
        done = subprocess.run(
            [sys.executable, "-m", "outbox", *arguments],
            env=clean, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def proxy(amqp_url: str) -> Iterator[Proxy]:
    """Between relay and broker."""
    running = Proxy(amqp_url)
    yield running
    running.close()


@pytest.fixture
def pg_proxy(dsn: str) -> Iterator[Proxy]:
    """Between relay and database."""
    running = Proxy(dsn)
    yield running
    running.close()


@pytest.fixture
def pooled(dsn: str, tmp_path: Path) -> Iterator[str]:
    """The test's database behind pgbouncer, in transaction mode."""
    at = urlsplit(dsn)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Path(f"/tmp/outbox_test_pgbouncer_{port}")  # noqa: S108 - another user must reach it
    place.mkdir()
    user, name = unquote(at.username or ""), at.path[1:]
    (place / "users").write_text(f'"{user}" "{unquote(at.password or "")}"\n')
    (place / "ini").write_text(
        f"[databases]\n{name} = host={at.hostname} port={at.port} dbname={name}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {place}/users\npool_mode = transaction\ndefault_pool_size = 3\n"
    )
    server = guardian.server_user()
    for path in (place, *place.iterdir()):
        path.chmod(0o755)
    command = [shutil.which("pgbouncer") or "/usr/sbin/pgbouncer", str(place / "ini")]
    with (tmp_path / "pgbouncer.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, **guardian.as_user(server))

    def reachable() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    eventually(reachable, "pgbouncer")
    yield at._replace(netloc=f"{at.username}:x@127.0.0.1:{port}").geturl()
    running.send_signal(signal.SIGTERM)
    running.wait()
    shutil.rmtree(place)
