"""Runs the tests: run.py [lint | pgtap | isolation | install | pytest | chaos] [--accept] [arguments of the suite].

Brings its own PostgreSQL and RabbitMQ, unless OUTBOX_DSN and OUTBOX_AMQP_URL name others; there it makes databases and
vhosts of its own and removes them (`make install` has put the extension there, and the user is a superuser). The last
line counts what ran. A skipped test and an empty suite are failures.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(ROOT / "sql/packaging")]

import build  # noqa: E402 - its folder is on the path only now
import databases  # noqa: E402
import provision  # noqa: E402
import servers  # noqa: E402


@dataclass
class Outcome:
    """What a suite counted, and what to read when it failed."""

    passed: int = 0
    failed: int = 0
    output: str = ""

    def add(self, name: str, passed: int, failed: int, output: str = "") -> None:
        self.passed += passed
        self.failed += failed
        if failed:
            self.output += f"--- {name}\n{output.rstrip()}\n"


@dataclass(frozen=True)
class Order:
    """What was asked for on the command line."""

    server: str
    arguments: list[str]
    accept: bool


def lint(order: Order) -> Outcome:
    # Imported late: it needs no package, but only this suite needs it.
    import lint as suite  # noqa: PLC0415

    outcome = Outcome()
    for check in suite.checks(order.server):
        outcome.add(check.name, int(check.ok), int(not check.ok), check.findings)
    return outcome


def run_tap(path: Path, dsn: str) -> tuple[int, int, str]:
    """Runs one pgTAP file; returns assertions that passed, that failed, and the whole output."""
    done = databases.psql(dsn, "-f", path, check=False)
    results = re.findall(r"^(not ok|ok) \d+(.*)$", done.stdout, re.MULTILINE)
    plans = re.findall(r"^1\.\.(\d+)", done.stdout, re.MULTILINE)
    # A directive turns a result into one that nobody looks at.
    good = [word == "ok" and not re.search(r"#\s*(skip|todo)", rest, re.IGNORECASE) for word, rest in results]
    whole = done.returncode == 0 and plans == [str(len(results))] and bool(results)
    return sum(good), good.count(False) + (not whole), done.stdout + done.stderr


def pgtap(order: Order) -> Outcome:
    """Every file in both install modes; a mode's files one after another, because they would see each other's locks."""
    files = sorted((ROOT / "pgtap").glob("*.sql"))
    chosen = [path for path in files if not order.arguments or path.stem in order.arguments]

    def run_mode(mode: databases.Mode) -> dict[str, tuple[int, int, str]]:
        with databases.database(order.server) as dsn:
            databases.query(dsn, "create schema tap; create extension pgtap schema tap")
            databases.install(dsn, mode)
            return {path.name: run_tap(path, dsn) for path in chosen}

    outcome = Outcome()
    with ThreadPoolExecutor(len(databases.MODES)) as pool:
        modes = dict(zip(databases.MODES, pool.map(run_mode, databases.MODES), strict=True))
    for mode, results in modes.items():
        for name, (passed, failed, output) in results.items():
            outcome.add(f"{name} ({mode})", passed, failed, output)
    for path in chosen:
        counts = {mode: sum(results[path.name][:2]) for mode, results in modes.items()}
        same = len(set(counts.values())) == 1
        outcome.add(f"{path.name}: assertions per mode", int(same), int(not same), str(counts))
    return outcome


def isolation(order: Order) -> Outcome:
    from isolation import run as suite  # noqa: PLC0415 - as lint

    outcome = Outcome()
    for result in suite.run(order.server, order.arguments, accept=order.accept):
        outcome.add(result.spec, result.passed, result.failed, result.difference)
    return outcome


def run_to_end(command: list[str | Path]) -> int:
    """When we are interrupted, tests still give back their databases and vhosts: the child is not killed at once."""
    child = subprocess.Popen(command, cwd=ROOT)
    try:
        return child.wait()
    except BaseException as reason:
        # Ctrl-C has reached it already; a second signal would cut its tidying short.
        if not isinstance(reason, KeyboardInterrupt):
            child.send_signal(signal.SIGINT)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def run_pytest(order: Order, *arguments: str | Path) -> Outcome:
    """Its progress is shown as it comes, and its failures are in it."""
    workers = min(os.cpu_count() or 1, 8)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "report.xml"
        # By file, so that what a file starts for all its tests is started once.
        command: list[str | Path] = [ROOT / ".venv/bin/pytest", "-q", "-n", str(workers), "--dist", "loadfile"]
        # pytest's own temporary folder would stay behind.
        command += [
            f"--basetemp={folder}/tests",
            f"--junitxml={report}",
            *(["--accept"] if order.accept else []),
            *arguments,
            *order.arguments,
        ]
        code = run_to_end(command)
        suites = list(ET.parse(report).getroot().iter("testsuite")) if report.exists() else []  # noqa: S314 - our own
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"] + counts["skipped"]
    if code and not failed:
        failed = 1
    return Outcome(max(counts["tests"] - failed, 0), failed)


def install(order: Order) -> Outcome:
    return run_pytest(order, TESTS / "install")


def others(order: Order) -> Outcome:
    """All other tests of pytest; or those whose paths are given."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in order.arguments):
        return run_pytest(order)
    return run_pytest(order, TESTS, *(f"--ignore={TESTS / name}" for name in ("install", "chaos")))


def chaos(order: Order) -> Outcome:
    """A quick choice of the faults; OUTBOX_LONG=1 makes it all of them."""
    return run_pytest(order, TESTS / "chaos")


SUITES: dict[str, Callable[[Order], Outcome]] = {
    "lint": lint,
    "pgtap": pgtap,
    "isolation": isolation,
    "install": install,
    "pytest": others,
    "chaos": chaos,
}


def start_servers(stack: ExitStack, names: list[str], parent: int | None) -> str:
    """Private servers for what the suites need and the environment does not name; the environment then names them."""
    wanted = {
        "postgres": "OUTBOX_DSN" not in os.environ,
        "rabbitmq": "OUTBOX_AMQP_URL" not in os.environ and not {"pytest", "chaos"}.isdisjoint(names),
    }
    if any(wanted.values()):
        private = stack.enter_context(servers.private(name="test", parent=parent, **wanted))
        os.environ.update(private.environment())
    if folder := os.environ.get("OUTBOX_EXTENSION_DIR"):
        build.copy_extension(build.build(ROOT, databases.BUILD), Path(folder))
    return os.environ["OUTBOX_DSN"]


def run_suites(names: list[str], order: Order) -> int:
    table: list[tuple[str, Outcome, float]] = []
    for name in names:
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        try:
            outcome = SUITES[name](order)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            outcome = Outcome(failed=1, output=f"{error}\n")
        if not outcome.passed + outcome.failed:
            outcome.add(name, 0, 1, "nothing ran")
        seconds = time.monotonic() - begun
        print(
            f"{outcome.output}{name}: {outcome.passed} passed, {outcome.failed} failed in {seconds:.1f} s", flush=True
        )
        table.append((name, outcome, seconds))
    print(f"\n{'suite':<12}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for name, outcome, seconds in table:
        print(f"{name:<12}{outcome.passed:>8}{outcome.failed:>8}{seconds:>9.1f}")
    passed, failed = (sum(getattr(outcome, word) for _, outcome, _ in table) for word in ("passed", "failed"))
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs all suites, or one with arguments of its own.")
    parser.add_argument("--parent", type=int, help="stop as soon as this process ends")
    parser.add_argument("--accept", action="store_true", help="isolation, install: take what is found as expected")
    parser.add_argument("suite", nargs="?", choices=[*SUITES])
    given, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        provision.ensure()
        build.build(ROOT, databases.BUILD)
        names = [given.suite] if given.suite else [*SUITES]
        with ExitStack() as stack:
            server = start_servers(stack, names, given.parent)
            return run_suites(names, Order(server, arguments, given.accept))
    except (build.BuildError, servers.ServerError, RuntimeError, ValueError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        print("0 passed, 1 failed")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
