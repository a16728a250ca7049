"""Backends terminated, a pooler in between."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import guardian
import pytest

from chaos.stage import Stage

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


class Pooler:
    """The real pgbouncer, in transaction mode."""

    def __init__(self, dsn: str, folder: Path) -> None:
        at = urlsplit(dsn)
        self.port = guardian.free_port()
        self.url = at._replace(netloc=f"pooled@127.0.0.1:{self.port}").geturl()
        self._folder = folder
        (folder / "pgbouncer.ini").write_text(
            f"""
[databases]
{at.path[1:]} = host={at.hostname} port={at.port} user={at.username} password={unquote(at.password or "")}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
"""
        )
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["/usr/sbin/pgbouncer", self._folder / "pgbouncer.ini"],
                cwd="/",
                stdout=log,
                stderr=log,
                **guardian.as_user(guardian.server_user()),
            )
        assert guardian.wait_until(self._answers, 10), (self._folder / "log").read_text()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pooler(scene: Stage) -> Iterator[Pooler]:
    folder = Path(tempfile.mkdtemp(prefix="outbox-pooler-", dir=guardian.TEMPORARY))
    user = guardian.server_user()
    os.chown(folder, user.pw_uid, user.pw_gid)
    running = Pooler(scene.dsn, folder)
    yield running
    running.kill()
    shutil.rmtree(folder)


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
