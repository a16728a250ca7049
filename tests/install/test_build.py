"""What the build makes of the tree, and that an upgrade made of a delta and all functions equals a fresh install."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import build
import databases
from databases import ROOT, SERVER, assert_same, fingerprint, psql, query

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Mode

PACKAGING = ROOT / "sql" / "packaging"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources that may be changed."""
    shutil.copytree(ROOT / "sql", tmp_path / "sql")
    shutil.copy(ROOT / "outbox.control", tmp_path)
    return tmp_path


def set_version(tree: Path, version: str) -> None:
    control = (ROOT / "outbox.control").read_text()
    (tree / "outbox.control").write_text(re.sub(r"(?<=default_version = ')[^']+", version, control))


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
    assert "@" not in "".join(re.findall("@[A-Z]+@", extension + plain))
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
    assert found == {"outbox.control", f"outbox--{build.Tree(tree).version}.sql"}


def test_a_released_version_is_frozen(tree: Path) -> None:
    build.release(tree)
    built(tree)
    (tree / "sql/grants.sql").write_text("select 1;\n")
    with pytest.raises(build.BuildError, match="bump default_version"):
        built(tree)


class Releases(NamedTuple):
    tree: Path
    old: str
    new: str

    @property
    def upgrade(self) -> Path:
        return self.tree / "build" / f"outbox-upgrade-{self.old}-{self.new}.sql"


@pytest.fixture
def releases(tree: Path) -> Iterator[Releases]:
    """A tree with a release behind it: since then a table, a function and a body have changed."""
    # Far from real versions and from those of a test beside this one: the extension's files lie in one folder.
    series = f"9000.{secrets.randbelow(1_000_000)}"
    old, new = f"{series}.0", f"{series}.1"
    manifest = tree / "sql/outbox.sql"
    added = "\\ir functions/99_extra.sql\n\\ir tables/99_extra.sql\n"
    manifest.write_text(manifest.read_text().replace("\\ir grants.sql\n", added + "\\ir grants.sql\n"))
    extra = "create or replace function outbox.extra() returns integer language sql as 'select {}';\n"
    (tree / "sql/functions/99_extra.sql").write_text(extra.format(1))
    (tree / "sql/tables/99_extra.sql").write_text("create table outbox.extra (a integer);\n")
    set_version(tree, old)
    build.release(tree)

    set_version(tree, new)
    (tree / "sql/functions/99_extra.sql").write_text(extra.format(2))
    (tree / "sql/tables/99_extra.sql").write_text("create table outbox.extra (a integer, b integer);\n")
    (tree / "sql/upgrade").mkdir(exist_ok=True)
    (tree / f"sql/upgrade/{old}--{new}.sql").write_text("alter table outbox.extra add column b integer;\n")
    built(tree)
    copies = []
    if folder := os.environ.get("OUTBOX_EXTENSION_DIR"):
        copies = [shutil.copy(path, folder) for path in (tree / "build").glob(f"outbox--{series}.*.sql")]
    yield Releases(tree, old, new)
    for copy in copies:
        Path(copy).unlink()


def test_upgraded_equals_fresh(releases: Releases, mode: Mode) -> None:
    tree, old, new = releases
    with databases.database(SERVER) as upgraded, databases.database(SERVER) as fresh:
        if mode == "extension":
            query(upgraded, f"create extension outbox version '{old}'")
            query(upgraded, f"alter extension outbox update to '{new}'")
            query(fresh, f"create extension outbox version '{new}'")
        else:
            install, bodies = tree / "build/outbox-install.sql", build.Tree(tree).bodies()
            psql(upgraded, text=install.read_text().replace(bodies[new], bodies[old]))
            done = psql(upgraded, "-f", releases.upgrade)
            assert done.stdout == f"outbox upgraded to {new}\n"
            psql(fresh, "-f", install)
        assert query(upgraded, "select outbox.version(), outbox.extra()") == f"{new}|2"
        assert_same(fingerprint(fresh), fingerprint(upgraded))


def test_plain_upgrade_refuses(releases: Releases, installed: str, mode: Mode) -> None:
    before = fingerprint(installed)
    done = psql(installed, "-v", "VERBOSITY=verbose", "-f", releases.upgrade, check=False)
    expected = "is installed as an extension" if mode == "extension" else f"and this script upgrades {releases.old}"
    assert "OB090: outbox " in done.stderr
    assert expected in done.stderr
    assert_same(before, fingerprint(installed))


def test_plain_upgrade_needs_something_to_upgrade(releases: Releases, empty: str) -> None:
    done = psql(empty, "-f", releases.upgrade, check=False)
    assert "outbox is not installed in this database" in done.stderr
