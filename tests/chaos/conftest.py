"""Two sizes: a quick choice always; with OUTBOX_LONG=1 all, OUTBOX_REPEAT times, on both kinds of queue in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
from chaos.stage import LONG, Stage, stage

REPEAT = int(os.environ.get("OUTBOX_REPEAT", "2" if LONG else "1"))
QUEUES = ("classic", "quorum")
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs only with OUTBOX_LONG=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Left out, not skipped: a skipped test counts as a failure."""
    if LONG:
        return
    late = [item for item in items if HERE in item.path.parents and item.get_closest_marker("long")]
    if late:
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]


@pytest.fixture(params=range(REPEAT), ids=lambda n: f"{QUEUES[n % 2]}{n // 2 or ''}")
def queue(request: pytest.FixtureRequest) -> str:
    return QUEUES[request.param % 2]


@pytest.fixture
def scene(dsn: str, amqp_url: str, management: Any, tmp_path: Path, queue: str) -> Iterator[Stage]:
    """On the servers of all tests: for faults that nobody else notices."""
    with Stage(dsn, amqp_url, management.url, tmp_path, queue=queue) as running:
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[servers.Servers]:
    """Servers that may be killed."""
    with servers.private(name="chaos", durable=True, quiet=True) as running:
        yield running


@pytest.fixture
def own(pair: servers.Servers, tmp_path: Path, queue: str) -> Iterator[Stage]:
    """On those servers."""
    for server in (pair.postgres, pair.rabbitmq):
        if server.pid is None:  # a test that failed in the middle has left it so
            server.start()
    with stage(pair.dsn, pair.amqp_url, pair.management_url, tmp_path, queue=queue) as running:
        yield running
