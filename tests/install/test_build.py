"""What the build makes of the tree, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import build
import databases
import releases
from databases import ROOT, assert_same, fingerprint, psql
from releases import Releases

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGING = ROOT / "sql" / "packaging"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that may be changed."""
    shutil.copytree(ROOT / "sql", tmp_path / "sql")
    shutil.copy(ROOT / "outbox.control", tmp_path)
    return tmp_path


def built(tree: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in build.build(tree, tree / "build")}


def test_two_builds_are_alike(tree: Path) -> None:
    assert built(tree) == built(tree) == {path.name: path.read_text() for path in databases.BUILD.glob("outbox*")}


def test_one_body_two_wrappers(tree: Path) -> None:
    scripts = built(tree)
    version, body = next(iter(build.Tree(tree).bodies().items()))
    extension, plain = scripts[f"outbox--{version}.sql"], scripts["outbox-install.sql"]
    assert extension.endswith(body)
    assert body in plain
    assert "create schema outbox;" in body
    assert not re.findall("@[A-Z]+@", extension + plain)
    assert not re.search("^create or replace", body, re.MULTILINE)
    for text, commands in ((extension, ["\\echo"]), (plain, ["\\set", "\\set", "\\echo"])):
        assert re.findall(r"^\\\w+", text, re.MULTILINE) == commands


def test_stale_files_go(tree: Path) -> None:
    built(tree)
    (tree / "build" / "outbox--0.0.1.sql").touch()
    built(tree)
    assert not (tree / "build" / "outbox--0.0.1.sql").exists()


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("sql/outbox.sql", "\\set x 1\n", "only comments and"),
        ("sql/outbox.sql", "select 1;\n", "only comments and"),
        ("sql/outbox.sql", "\\ir missing.sql\n", "missing.sql"),
        ("sql/grants.sql", "\\echo hello\n", "belongs in sql/packaging"),
        ("outbox.control", "default_version = '1'\n", "needs one line"),
        ("sql/upgrade/0.0.1--0.0.2.sql", "", "kept in sql/released"),
    ],
)
def test_refuses(tree: Path, path: str, text: str, complaint: str) -> None:
    (tree / path).parent.mkdir(exist_ok=True)
    with (tree / path).open("a") as file:
        file.write(text)
    done = subprocess.run(
        [sys.executable, PACKAGING / "build.py", "--root", tree], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("build: ")
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_installs_where_pg_config_says(tree: Path, tmp_path: Path) -> None:
    pg_config = tmp_path / "pg_config"
    pg_config.write_text('#!/bin/sh\ntest "$1" = --sharedir && echo /usr/share/some\n')
    pg_config.chmod(0o755)
    subprocess.run(
        [sys.executable, PACKAGING / "build.py", "install", "--root", tree, "--pg-config", pg_config],
        check=True,
        capture_output=True,
        env=os.environ | {"DESTDIR": str(tmp_path / "stage")},
    )
    found = {path.name for path in (tmp_path / "stage/usr/share/some/extension").iterdir()}
    assert found == {"outbox.control", *(f"outbox--{name}.sql" for name in build.Tree(tree).bodies())}


def test_a_released_version_is_frozen(tree: Path) -> None:
    build.release(tree)
    built(tree)
    (tree / "sql/grants.sql").write_text("select 1;\n")
    with pytest.raises(build.BuildError, match="bump default_version"):
        built(tree)


def test_an_upgrade_says_what_it_locks(tree: Path) -> None:
    version = build.Tree(tree).version
    delta = tree / f"sql/upgrade/0.0.1--{version}.sql"
    delta.parent.mkdir(exist_ok=True)
    for text in (
        "",
        "select 1;\n",
        "-- locks:\n",
        "-- locks: outbox.message\n",
        "-- locks: none, outbox.message in share\n",
    ):
        delta.write_text(text)
        with pytest.raises(build.BuildError, match="must begin with a line '-- locks: none'"):
            built(tree)
    delta.write_text("-- locks: outbox.message in access exclusive, outbox.setting in share\n")
    script = built(tree)[f"outbox-upgrade-0.0.1-{version}.sql"]
    assert "'outbox.message in access exclusive', 'outbox.setting in share']" in script
    assert not re.findall("@[A-Z]+@", script)


@pytest.fixture
def next_release(tmp_path: Path) -> Iterator[Releases]:
    with releases.all_kinds(tmp_path) as made:
        yield made


def test_says_one_line(next_release: Releases, empty: str) -> None:
    next_release.install(empty, "plain")
    done = psql(empty, "-f", next_release.scripts[0])
    assert (done.stdout, done.stderr) == (f"outbox upgraded to {next_release.new}\n", "")


def test_plain_upgrade_is_not_for_an_extension(next_release: Releases, empty: str) -> None:
    next_release.install(empty, "extension")
    before = fingerprint(empty)
    done = psql(empty, "-v", "VERBOSITY=verbose", "-f", next_release.scripts[0], check=False)
    assert "OB090: outbox is installed as an extension in this database" in done.stderr
    assert "HINT:  Run: alter extension outbox update;" in done.stderr
    assert_same(before, fingerprint(empty))


def test_plain_upgrade_needs_something_to_upgrade(next_release: Releases, empty: str) -> None:
    done = psql(empty, "-f", next_release.scripts[0], check=False)
    assert "outbox is not installed in this database" in done.stderr
