"""Runs the isolation specs: what two sessions may see of each other, in every order that a spec names.

Each spec has a database of its own, cloned from one with the package. What isolationtester prints must equal the file
in expected/; --accept writes it there. Usage: run.py [--accept] [SPEC...], on the server of OUTBOX_DSN.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import databases  # noqa: E402 - the folder above is on the path only now

WORKERS = 2
TIME_LIMIT = 60


@dataclass(frozen=True)
class Result:
    spec: str
    passed: int
    failed: int
    difference: str


def tester() -> Path:
    """Where PGXS installs it, for the server's major version."""
    library = subprocess.run(
        [databases.program("pg_config"), "--pkglibdir"], capture_output=True, text=True, check=True
    )
    path = Path(library.stdout.strip()) / "pgxs/src/test/isolation/isolationtester"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: install postgresql-client of the server's version")
    return path


def blocks(text: str) -> list[str]:
    """The output of each permutation."""
    return text.split("starting permutation: ")[1:]


def run_spec(spec: Path, server: str, template: str, *, accept: bool) -> Result:
    expected = HERE / "expected" / f"{spec.stem}.out"
    with databases.database(server, template=template) as dsn:
        done = subprocess.run(
            [tester(), dsn],
            input=spec.read_text(),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PGISOLATIONTIMEOUT": str(TIME_LIMIT), "PGOPTIONS": "-c lc_messages=C"},
        )
    found = done.stdout + done.stderr
    if accept and done.returncode == 0:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(found)
    wanted = expected.read_text() if expected.exists() else ""
    if found == wanted and done.returncode == 0 and blocks(found):
        return Result(spec.stem, len(blocks(found)), 0, "")
    same = sum(one == other for one, other in zip(blocks(wanted), blocks(found), strict=False))
    difference = difflib.unified_diff(
        wanted.splitlines(), found.splitlines(), f"expected/{expected.name}", "found", lineterm=""
    )
    failed = max(len(blocks(wanted)), len(blocks(found)), same + 1) - same
    return Result(spec.stem, same, failed, "\n".join([*difference, f"isolationtester: exit code {done.returncode}"]))


def run(server: str, names: list[str], *, accept: bool = False) -> list[Result]:
    specs = sorted((HERE / "specs").glob("*.spec"))
    if missing := set(names) - {spec.stem for spec in specs}:
        raise FileNotFoundError(f"no such spec: {', '.join(sorted(missing))}")
    chosen = [spec for spec in specs if not names or spec.stem in names]
    with databases.database(server) as template:
        databases.install(template, "plain")
        name = urlsplit(template).path[1:]
        # How far a floor moves depends on every open transaction of the server: those specs have it to themselves.
        alone = [spec for spec in chosen if spec.stem.startswith("floor_")]
        together = [spec for spec in chosen if spec not in alone]
        results = [run_spec(spec, server, name, accept=accept) for spec in alone]
        with ThreadPoolExecutor(WORKERS) as pool:
            return results + list(pool.map(lambda spec: run_spec(spec, server, name, accept=accept), together))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the isolation specs on the server of OUTBOX_DSN.")
    parser.add_argument("--accept", action="store_true", help="write what is found as what is expected")
    parser.add_argument("specs", nargs="*")
    given = parser.parse_args()
    results = run(databases.SERVER, given.specs, accept=given.accept)
    for result in results:
        print(f"{result.spec}: {result.passed} passed, {result.failed} failed\n{result.difference}".rstrip())
    return 1 if not results or any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
