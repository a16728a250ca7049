"""What is handed out: an sdist that carries the SQL, a wheel built from it, and the container file for that."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import guardian
import pytest

import databases
from harness import PATIENCE, Queue

pytestmark = pytest.mark.timeout(300)

STEPS = ["FROM", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"]


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made


def files(wheel: Path) -> dict[str, bytes]:
    """Of the package; what describes it differs."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("outbox/")}


def test_wheel_from_the_sdist_is_that_from_the_clone(tmp_path: Path) -> None:
    sdist = build("sdist", databases.ROOT / "python", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build("wheel", unpacked, tmp_path / "wheel")
    assert files(wheel) == files(build("wheel", databases.ROOT / "python", tmp_path / "direct"))


@pytest.fixture
def image() -> Iterator[Path]:
    """A clean venv, which another user can read."""
    place = Path(tempfile.mkdtemp(prefix="outbox_test_image_", dir="/tmp"))
    place.chmod(0o755)
    (place / "tmp").mkdir()
    venv.create(place / "python", with_pip=True)
    yield place
    shutil.rmtree(place)


def test_container_file(image: Path, tmp_path: Path, amqp_url: str, queue: Queue) -> None:
    """Its steps in turn, from the wheel to a message. No engine: a venv stands for the image, its Python is ours."""
    port = str(guardian.free_port())
    text = (databases.ROOT / "docs" / "Containerfile").read_text().replace("9187", port)
    lines = [line.split(" ", 1) for line in text.splitlines() if line[0] != "#"]
    assert [word for word, _ in lines] == STEPS
    step = dict(lines)
    at = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHON"))}
    at |= {"PATH": f"{image}/python/bin:{os.environ['PATH']}", "HOME": "/"}
    user = int(step["USER"].split(":")[0]) if os.geteuid() == 0 else None

    def run(*command: str, user: int | None = None) -> str:
        done = subprocess.run(command, env=at, cwd="/", user=user, check=True, capture_output=True, text=True)
        return done.stdout

    (minor,) = re.findall(r"^python:3\.(\d+)-slim$", step["FROM"])
    (least,) = re.findall(
        r'^requires-python = ">=3\.(\d+)"$', (databases.ROOT / "python/pyproject.toml").read_text(), re.MULTILINE
    )
    assert int(minor) >= int(least)
    wheel = build("wheel", databases.ROOT / "python", tmp_path / "dist")
    pattern, place = step["COPY"].split()
    assert wheel.match(pattern)
    shutil.copy(wheel, f"{image}{place}")
    run("sh", "-ec", step["RUN"].replace(" /tmp/", f" {image}/tmp/"))  # noqa: S108 - a folder of our own
    assert list((image / "tmp").iterdir()) == []
    assert step["EXPOSE"] == port
    health, entry, command = (json.loads(step[word].removeprefix("CMD ")) for word in ("HEALTHCHECK", *STEPS[-2:]))

    with databases.database(databases.SERVER) as dsn:
        for name, value in {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url}.items():
            secret = image / name.lower()
            secret.write_text(value)
            if user is not None:
                os.chown(secret, user, -1)
            secret.chmod(0o400)
            at[f"{name}_FILE"] = str(secret)
        run(*entry, "install", user=user)
        assert run(*entry, "--version", user=user).split()[1] == databases.query(dsn, "select outbox.version()")
        assert run(*entry, "emit", "order.created", '{"order": 1}', user=user) == "1\n"
        assert run(*entry, "relay", "--check", user=user).endswith("ready to relay\n")
        with subprocess.Popen([*entry, *command], env=at, cwd="/", stderr=subprocess.DEVNULL, user=user) as relay:
            try:
                assert [message.body for message in queue.receive(1)] == [b'{"order":1}']
                run(*health, user=user)
                relay.send_signal(signal.Signals[step["STOPSIGNAL"]])
                assert relay.wait(PATIENCE) == 0
                with pytest.raises(subprocess.CalledProcessError):
                    run(*health, user=user)
            finally:
                relay.kill()
