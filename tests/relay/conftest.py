from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from harness import Management, Page, Proxy, Queue, RelayProcess, RunOutbox, StartRelay, environment_with, run_outbox


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
    return lambda *arguments, **given: run_outbox(arguments, environment_with(**given))


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
def pooled(dsn: str) -> Iterator[str]:
    """The test's database behind pgbouncer, in transaction mode."""
    with harness.pooled(dsn) as running:
        yield running.url
