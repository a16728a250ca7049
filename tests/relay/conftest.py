from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import PATIENCE, Finished, Management, Proxy, Queue, RelayProcess, RunOutbox, StartRelay


@pytest.fixture
def queue(management: Management) -> Queue:
    return Queue(management)


@pytest.fixture
def start_relay(dsn: str, amqp_url: str, tmp_path: Path) -> Iterator[StartRelay]:
    """Starts `outbox relay` on the test's own database and vhost; whatever still runs is killed at the end."""
    started: list[RelayProcess] = []

    def start(*arguments: str, amqp: str = amqp_url) -> RelayProcess:
        addresses = ["--dsn", dsn, "--amqp-url", amqp]
        started.append(RelayProcess([*addresses, *arguments], tmp_path / f"relay{len(started)}.log"))
        return started[-1]

    yield start
    for relay in started:
        relay.process.kill()
        relay.process.wait()


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
    running = Proxy(amqp_url)
    yield running
    running.close()
