"""Builds the extension scripts and the plain psql scripts from the same files.

    body(X)     every file of the manifest sql/outbox.sql, in its order
    body(A--X)  upgrade_head, sql/upgrade/A--X.sql, all of the manifest that does not run only once, upgrade_tail
    extension   extension_head + body
    plain       plain_head + body + plain_tail, the same bytes in between

Two edits are made to SQL text, and no third: a fresh install creates instead of replacing (so that
nothing prepared by somebody else is adopted), and @VERSION@ becomes the version in outbox.control.
An upgrade begins with a line that lists its locks; the head takes them before anything is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Taken by every upgrade, while it gives rights anew.
ACCESS_LOCK = "outbox.access in share row exclusive"
LOCK = r"outbox\.\w+ in (access exclusive|exclusive|share row exclusive|share|share update exclusive)"


class BuildError(Exception):
    """What is wrong with the tree, and what to do about it."""


class Tree:
    """A source tree and the texts that are built from it."""

    def __init__(self, root: Path) -> None:
        self.control = root / "outbox.control"
        self.sql = root / "sql"
        found = re.findall(r"^default_version = '([^']+)'$", self.control.read_text(), re.MULTILINE)
        if len(found) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", found[0]):
            raise BuildError(f"{self.control} needs one line: default_version = 'N.N.N'")
        self.version: str = found[0]

    def read(self, path: str) -> str:
        text = (self.sql / path).read_text()
        return text if text.endswith("\n") else text + "\n"

    def manifest(self) -> list[str]:
        paths = []
        for number, line in enumerate(self.read("outbox.sql").splitlines(), 1):
            if line.strip() and not line.startswith("--"):
                if not (match := re.fullmatch(r"\\ir (\S+)", line)):
                    raise BuildError(f"sql/outbox.sql, line {number}: only comments and '\\ir path' lines are read")
                paths.append(match[1])
        return paths

    def flatten(self, paths: list[str]) -> str:
        texts = [self.read(path) for path in paths]
        for path, text in zip(paths, texts, strict=True):
            if match := re.search(r"^\s*\\.*", text, re.MULTILINE):
                raise BuildError(f"sql/{path}: the psql command {match[0].strip()} belongs in sql/packaging")
        return "\n".join(texts).replace("@VERSION@", self.version)

    def bodies(self) -> dict[str, str]:
        """Maps 'X' and 'A--X' to their bodies, frozen ones included."""
        manifest = self.manifest()
        create = re.sub(r"^create or replace ", "create ", self.flatten(manifest), flags=re.MULTILINE)
        bodies = {self.version: create}
        rerun = [path for path in manifest if not path.startswith("tables/")]
        for delta in sorted((self.sql / "upgrade").glob("*--*.sql")):
            if not delta.stem.endswith(f"--{self.version}"):
                raise BuildError(
                    f"sql/upgrade/{delta.name} does not lead to {self.version}: "
                    "the built script of a released step is kept in sql/released"
                )
            body = self.flatten(
                ["packaging/upgrade_head.sql", f"upgrade/{delta.name}", *rerun, "packaging/upgrade_tail.sql"]
            )
            taken = ", ".join(f"'{lock}'" for lock in [ACCESS_LOCK, *self.locks(delta)])
            bodies[delta.stem] = body.replace("@FROM@", delta.stem.partition("--")[0]).replace("@LOCKS@", taken)
        for frozen in sorted((self.sql / "released").glob("*.sql")):
            if bodies.setdefault(frozen.stem, frozen.read_text()) != frozen.read_text():
                raise BuildError(f"{frozen.stem} is released and sql/ differs from it: bump default_version")
        return bodies

    @staticmethod
    def locks(delta: Path) -> list[str]:
        """What the first line of an upgrade says that it locks."""
        first = delta.read_text().partition("\n")[0]
        listed = first.removeprefix("-- locks: ").split(", ")
        if not first.startswith("-- locks: ") or not (
            listed == ["none"] or all(re.fullmatch(LOCK, lock) for lock in listed)
        ):
            raise BuildError(
                f"sql/upgrade/{delta.name} must begin with a line '-- locks: none', "
                "or '-- locks: outbox.message in access exclusive, ...': what it locks for longer than a moment"
            )
        return [] if listed == ["none"] else listed

    def scripts(self) -> dict[str, str]:
        """Maps the name of each built file to its text."""
        head, tail = self.read("packaging/plain_head.sql"), self.read("packaging/plain_tail.sql")
        upgrade_head = self.read("packaging/plain_upgrade_head.sql")
        scripts = {
            "outbox.control": self.control.read_text(),
            "outbox-uninstall.sql": self.read("packaging/uninstall.sql"),
        }
        for name, body in self.bodies().items():
            source, _, target = name.rpartition("--")
            guard = "alter extension outbox update" if source else "create extension outbox"
            scripts[f"outbox--{name}.sql"] = (
                self.read("packaging/extension_head.sql").replace("@COMMAND@", guard) + body
            )
            if source:
                wrapped = upgrade_head.replace("@FROM@", source) + body + tail.replace("@DONE@", "upgraded to")
                scripts[f"outbox-upgrade-{source}-{target}.sql"] = wrapped.replace("@VERSION@", target)
            elif name == self.version:
                wrapped = head + body + tail.replace("@DONE@", "installed:")
                scripts["outbox-install.sql"] = wrapped.replace("@VERSION@", name)
        return scripts


def build(root: Path, target: Path) -> list[Path]:
    """Writes the scripts and removes what an earlier build left."""
    scripts = Tree(root).scripts()
    target.mkdir(exist_ok=True)
    for stale in target.glob("outbox*"):
        if stale.name not in scripts:
            stale.unlink()
    for name, text in scripts.items():
        # Replaced as a whole: whoever reads meanwhile sees the old script or the new one.
        part = target / f".{name}.{os.getpid()}"
        part.write_text(text)
        part.replace(target / name)
    return sorted(target / name for name in scripts)


def install(built: list[Path], pg_config: str) -> Path:
    """Copies the extension's files to where this pg_config's server looks for them, below DESTDIR if that is set."""
    answer = subprocess.run([pg_config, "--sharedir"], check=True, capture_output=True, text=True)  # noqa: S603
    folder = Path(os.environ.get("DESTDIR", "") + answer.stdout.strip()) / "extension"
    folder.mkdir(parents=True, exist_ok=True)
    copy_extension(built, folder)
    return folder


def copy_extension(built: list[Path], folder: Path) -> None:
    for path in built:
        if path.suffix == ".control" or path.name.startswith("outbox--"):
            shutil.copy(path, folder)


def release(root: Path) -> None:
    """Freezes the bodies of this version in sql/released."""
    for name, body in Tree(root).bodies().items():
        (root / "sql" / "released").mkdir(exist_ok=True)
        (root / "sql" / "released" / f"{name}.sql").write_text(body)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the scripts of the package.")
    parser.add_argument("command", nargs="?", choices=["build", "install", "release"], default="build")
    parser.add_argument("--root", type=Path, default=ROOT, help="the source tree (default: this one)")
    parser.add_argument("--pg-config", default="pg_config", help="install: for the server of this pg_config")
    arguments = parser.parse_args()
    try:
        built = build(arguments.root, arguments.root / "build")
        if arguments.command == "install":
            print(f"installed for create extension in {install(built, arguments.pg_config)}")
        else:
            print("built " + " ".join(f"build/{path.name}" for path in built))
        if arguments.command == "release":
            release(arguments.root)
    except (BuildError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"build: {error}")


if __name__ == "__main__":
    main()
