"""Backends terminated, a pooler in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from chaos.stage import Stage
from harness import Pooler, pooled

pytestmark = pytest.mark.timeout(240)

TERMINATE = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and application_name like 'outbox%%'
"""


@pytest.mark.long
def test_backends_terminated(scene: Stage) -> None:
    scene.relay()
    for _ in scene.rounds(10):
        [(ended,)] = scene.execute(TERMINATE)
        assert ended > 0
        scene.note(f"{ended} backends terminated")
        scene.unclean += 1
    scene.finish()


@pytest.mark.long
def test_all_backends_terminated(scene: Stage) -> None:
    """Those of the emitters too, in the midst of a COMMIT if it happens so."""
    scene.relay()
    for _ in scene.rounds(10):
        scene.execute(TERMINATE.replace("application_name like 'outbox%%'", "true"))
        scene.note("all backends terminated")
        scene.unclean += 1
    scene.finish()


@pytest.fixture
def pooler(scene: Stage) -> Iterator[Pooler]:
    with pooled(scene.dsn) as running:
        yield running


def nothing(_: Pooler) -> None:
    time.sleep(0.5)


def restart(pooler: Pooler) -> None:
    pooler.kill()
    time.sleep(0.5)
    pooler.start()


def test_through_a_pooler(scene: Stage, pooler: Pooler) -> None:
    """Nothing comes twice in quiet times; then a relay is killed, whose lease alone tells that it is gone."""
    relay = scene.relay(pg=pooler.url)
    scene.relay(pg=pooler.url)
    for _ in scene.rounds(1):
        scene.kill(relay)
    scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("fault", [nothing, restart], ids=lambda f: f.__name__)
def test_pooler(scene: Stage, pooler: Pooler, fault: Callable[[Pooler], None]) -> None:
    scene.relay(pg=pooler.url)
    for _ in scene.rounds(3):
        fault(pooler)
        scene.note(f"{fault.__name__} done")
        scene.unclean += int(fault is restart)
    scene.finish()
