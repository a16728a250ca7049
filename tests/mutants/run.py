"""Runs the tests against mutants of the functions: run.py [--parent PID] [BEGINNING OF A NAME...].

Each mutant gets a database of its own, cloned from one with the package, with one guard disarmed. Tests run until one
fails: the mutant is killed. One that nothing kills shows a guard that no test watches, and fails the run; so does one
that is no longer valid SQL, because it would be killed by any test. The last line counts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path[:1] = [str(TESTS), str(ROOT / "sql/packaging")]

from isolation import run as isolation  # noqa: E402
from mutants import mutate  # noqa: E402

import build  # noqa: E402 - its folder is on the path only now
import databases  # noqa: E402
import servers  # noqa: E402

WORKERS = 2
# A mutant may loop for ever, or wait for ever.
LIMIT = 15
isolation.TIME_LIMIT = LIMIT
# The short ones first.
TAP = {path.stem: path for path in sorted((ROOT / "pgtap").glob("*.sql"), key=lambda path: path.stat().st_size)}
# Written for what the stories of the other files leave alive.
GUARDS = "46_guards"
SPECS = {path.stem: path for path in sorted((TESTS / "isolation/specs").glob("*.spec"))}
CHECK = """

select c.message || coalesce(': ' || c.detail, '')
from pg_proc as p
join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
left join pg_trigger as t on t.tgfoid = p.oid
cross join lateral tap.plpgsql_check_function_tb(
    p.oid, coalesce(t.tgrelid, 0), fatal_errors => false, other_warnings => false, extra_warnings => false,
    performance_warnings => false
) as c
where p.oid = 'outbox.{name}'::regproc and c.level = 'error';
"""


@dataclass(frozen=True)
class Verdict:
    mutant: mutate.Mutant
    killer: str
    problem: str


def tap_fails(path: Path, dsn: str) -> bool:
    """As the runner reads pgTAP, but no further than the first failure."""
    with subprocess.Popen(
        [databases.program("psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-f", path, dsn],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as psql:
        assert psql.stdout is not None
        plan, results = "", 0
        for line in psql.stdout:
            if line.startswith("not ok "):
                psql.kill()
                return True
            results += line.startswith("ok ")
            plan = plan or (re.match(r"1\.\.(\d+)", line) or [""])[0]
    return psql.returncode != 0 or plan != f"1..{results}"


class Bench:
    """A server on which one mutant at a time is tried: the floor's proof would feel the transactions of another one."""

    def __init__(self, server: str, stack: ExitStack) -> None:
        self.server = server
        dsn = stack.enter_context(databases.database(server))
        databases.query(dsn, "create schema tap; create extension pgtap schema tap")
        databases.query(dsn, "create extension plpgsql_check schema tap")
        databases.install(dsn, "plain")
        self.template = urlsplit(dsn).path[1:]
        self.sound: dict[str, bool] = {}

    @contextmanager
    def clone(self, sql: str = "") -> Iterator[tuple[str, str]]:
        """A database as it is after the installation, with one function changed; and what is wrong with that."""
        with databases.database(self.server, template=self.template, options="strategy file_copy") as dsn:
            applied = databases.psql(dsn, "-f", "-", text=sql, check=False)
            yield dsn, applied.stderr.strip() or applied.stdout.strip()

    def fails(self, test: str, dsn: str, sql: str = "") -> bool:
        if test in TAP:
            return tap_fails(TAP[test], dsn)
        # What SQL tests draw from sequences stays drawn, and specs show it: they begin with a database that is new.
        with self.clone(sql) as (fresh, _):
            return isolation.run_spec(SPECS[test], self.server, urlsplit(fresh).path[1:], accept=False).failed > 0

    def kills(self, test: str, dsn: str, sql: str) -> bool:
        """A test that fails without the mutant as well kills nothing."""
        if not self.fails(test, dsn, sql):
            return False
        if test not in self.sound:
            with self.clone() as (original, _):
                self.sound[test] = not self.fails(test, original)
        return self.sound[test]

    def judge(self, mutant: mutate.Mutant) -> Verdict:
        killer = ""
        with self.clone(mutant.sql + CHECK.format(name=mutant.function.name)) as (dsn, problem):
            if not problem:
                killer = next((test for test in tests_for(mutant) if self.kills(test, dsn, mutant.sql)), "")
        return Verdict(mutant, killer, problem)


def tests_for(mutant: mutate.Mutant) -> list[str]:
    """The likely killers first: those named for it, SQL tests of its station, the others, specs of its function."""
    station = [name for name in TAP if name == mutant.function.station]
    return list(dict.fromkeys([*mutant.killers, *station, GUARDS, *TAP, *mutant.specs]))


def benches(stack: ExitStack, parent: int | None) -> list[Bench]:
    if given := os.environ.get("OUTBOX_DSN"):
        return [Bench(given, stack)]
    started = [
        stack.enter_context(servers.private(name="mutants", parent=parent, rabbitmq=False)) for _ in range(WORKERS)
    ]
    os.environ["OUTBOX_PG_BIN"] = started[0].environment()["OUTBOX_PG_BIN"]
    return [Bench(one.dsn, stack) for one in started]


def show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def judge_all(chosen: list[mutate.Mutant], free: list[Bench]) -> int:
    """Returns how many were killed; says what happened to the others."""
    kills: Counter[str] = Counter()

    def judge(mutant: mutate.Mutant) -> Verdict:
        bench = free.pop()
        try:
            return bench.judge(mutant)
        finally:
            free.append(bench)

    with ThreadPoolExecutor(len(free)) as pool:
        for done, verdict in enumerate(pool.map(judge, chosen), 1):
            show(f"{done} of {len(chosen)}: {verdict.mutant.name}")
            if verdict.killer:
                kills[verdict.killer] += 1
            else:
                show("")
                what = f"is not valid: {verdict.problem}" if verdict.problem else "survived"
                print(f"{verdict.mutant.function.station}: {verdict.mutant.name}: {what}", flush=True)
    show("")
    print("killed by " + ", ".join(f"{test} {times}" for test, times in kills.most_common()))
    return kills.total()


def report(chosen: list[mutate.Mutant], parent: int | None) -> int:
    begun = time.monotonic()
    build.build(ROOT, databases.BUILD)
    with ExitStack() as stack:
        used = benches(stack, parent)
        killed = judge_all(chosen, used.copy())
    broken = {test for bench in used for test, sound in bench.sound.items() if not sound}
    for test in sorted(broken):
        print(f"{test} fails without any mutant, so it kills none")
    failed = len(chosen) - killed + len(broken)
    print(f"in {time.monotonic() - begun:.0f} s")
    print(f"{killed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests against mutants of the functions.")
    parser.add_argument("--parent", type=int, help="stop as soon as this process ends")
    parser.add_argument("names", nargs="*", help="beginnings of names of mutants: a function, or more of it")
    given = parser.parse_args()
    named = [one for one in mutate.mutants() if one.name.startswith(tuple(given.names or [""]))]
    chosen = [one for one in named if not one.equivalent]
    if not chosen:
        print(f"mutants: no name begins with {' or '.join(given.names)}; a function's name and a colon begin one")
        return 2
    print(f"{len(chosen)} mutants; {len(named) - len(chosen)} more are listed as equivalent", flush=True)
    os.environ["PGOPTIONS"] = f"-c statement_timeout={LIMIT}s"
    try:
        return report(chosen, given.parent)
    except (build.BuildError, servers.ServerError, RuntimeError, OSError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        print("0 passed, 1 failed")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
