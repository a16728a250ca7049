"""What provision.py does where there is nothing to do, and what it says where it can do nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import provision

SCRIPT = """
import os, sys
import provision

os.getuid = lambda: 1000
provision.missing_for = lambda version: ["a-package"]
sys.exit(provision.main(["packages"]))
"""


def provision_without_root(path: Path) -> subprocess.CompletedProcess[str]:
    """Runs provision.py as if a package were missing and nobody could become root."""
    environment = {"PATH": str(path), "PYTHONPATH": str(Path(provision.__file__).parent)}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


def test_nothing_to_do_is_silent() -> None:
    done = subprocess.run([sys.executable, provision.__file__], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_root_the_message_names_packages_and_command(tmp_path: Path) -> None:
    (tmp_path / "apt-get").symlink_to("/usr/bin/apt-get")
    done = provision_without_root(tmp_path)
    assert done.returncode == 1
    assert "a-package" in done.stderr
    assert re.search("su -c .*python3 .*provision.py.* packages", done.stderr)


def test_without_apt_the_message_names_packages(tmp_path: Path) -> None:
    done = provision_without_root(tmp_path)
    assert done.returncode == 1
    assert "Install what Debian calls: a-package" in done.stderr


def test_an_environment_behind_a_link_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another clone's. This one gets an environment of its own in the place of the link."""
    others, ours = tmp_path / "others", tmp_path / ".venv"
    others.mkdir()
    (others / "outbox-stamp").write_text("of another clone")
    ours.symlink_to(others)
    monkeypatch.setattr(provision, "VENV", ours)
    monkeypatch.setattr(provision, "STAMP", ours / "outbox-stamp")

    def run(_what: str, command: list[str | Path]) -> None:
        """What makes the environment, for real; nothing is installed into it."""
        if "venv" in command:
            subprocess.run([*command, "--without-pip"], check=True)

    monkeypatch.setattr(provision, "run_logged", run)
    provision.ensure_venv()
    assert [path.name for path in others.iterdir()] == ["outbox-stamp"]
    assert (others / "outbox-stamp").read_text() == "of another clone"
    assert not ours.is_symlink()
    assert (ours / "outbox-stamp").read_text() == provision.wanted_stamp()
