"""What is handed out: an sdist that carries the SQL, and a wheel built from it that installs and runs by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import databases
from harness import Queue

pytestmark = pytest.mark.timeout(300)


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made


def files(wheel: Path) -> dict[str, bytes]:
    """Of the package; what describes it differs."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("outbox/")}


def test_from_source_to_a_message(tmp_path: Path, amqp_url: str, queue: Queue) -> None:
    sdist = build("sdist", databases.ROOT / "python", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build("wheel", unpacked, tmp_path / "wheel")
    assert files(wheel) == files(build("wheel", databases.ROOT / "python", tmp_path / "direct"))

    venv.create(tmp_path / "clean", with_pip=True)
    bin_ = tmp_path / "clean" / "bin"
    subprocess.run([bin_ / "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    with databases.database(databases.SERVER) as dsn:
        at = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHON"))}
        at |= {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url}

        def run(*command: str) -> str:
            words = [str(bin_ / command[0]), *command[1:]]
            return subprocess.run(words, env=at, cwd="/", check=True, capture_output=True, text=True).stdout

        sql = run("python", "-c", "import outbox; print(outbox.install_sql())")
        databases.psql(dsn, "-1", text=sql)
        assert run("outbox", "--version").split()[1] == databases.query(dsn, "select outbox.version()")
        assert run("outbox", "emit", "order.created", '{"order": 1}') == "1\n"
        assert run("outbox", "relay", "--check").endswith("ready to relay\n")
        run("outbox", "relay", "--once", "--http", "127.0.0.1:0")
    assert [message.body for message in queue.receive(1)] == [b'{"order":1}']
