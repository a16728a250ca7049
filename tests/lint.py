"""The lint suite: ruff, mypy, pgspot, plpgsql_check and the rules of the tree that a search can check.

Findings that are right as they are stand in lint.toml, each with its reason; one that no longer occurs must go.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import databases
from databases import BUILD, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = ROOT / "python" / "pyproject.toml"
SOURCES = ["python/src", "python/hatch_build.py", "tests", "sql/packaging"]
BIN = ROOT / ".venv" / "bin"


@dataclass(frozen=True)
class Check:
    name: str
    findings: str

    @property
    def ok(self) -> bool:
        return not self.findings


class Exceptions:
    """lint.toml: which findings are explained, and which explanations are still needed."""

    def __init__(self) -> None:
        self.reasons: dict[str, dict[str, str]] = tomllib.loads((ROOT / "tests/lint.toml").read_text())
        self.used: set[tuple[str, str]] = set()

    def unexplained(self, tool: str, findings: list[str]) -> str:
        patterns = self.reasons.get(tool, {})
        left = []
        for finding in findings:
            known = [pattern for pattern in patterns if re.fullmatch(pattern, finding)]
            self.used |= {(tool, pattern) for pattern in known}
            left += [] if known else [finding]
        return "\n".join(left)

    def stale(self) -> str:
        given = {(tool, pattern) for tool, patterns in self.reasons.items() for pattern in patterns}
        return "\n".join(f"[{tool}] {pattern}" for tool, pattern in sorted(given - self.used))


def tool(name: str, *command: str | Path) -> Check:
    # What other scripts of the tree import as top-level modules.
    path = os.pathsep.join(str(ROOT / folder) for folder in ("python/src", "tests", "sql/packaging"))
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return Check(name, "" if done.returncode == 0 else done.stdout + done.stderr or f"exit code {done.returncode}")


def pgspot(script: Path, exceptions: Exceptions) -> Check:
    # pgspot reads SQL only: psql's own commands are left out. And it knows no tables, so that the fields of a row
    # variable would be unknown to it; those of a record are not checked.
    # An upgrade replaces what the version before it has made, for which nobody else can have made anything.
    source, _, target = script.stem.removeprefix("outbox--").rpartition("--")
    text = (script.with_name(f"outbox--{source}.sql").read_text() if source and target else "") + script.read_text()
    text = re.sub(r"^\\.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^( +v_\w+ +)outbox\.\w+(?=;| :=)", r"\1record", text, flags=re.MULTILINE)
    done = subprocess.run([BIN / "pgspot"], input=text, capture_output=True, text=True, check=False)
    if "Errors: " not in done.stdout:
        return Check(f"pgspot {script.name}", done.stdout + done.stderr or "no summary")
    findings = [re.sub(r" at line \d+.*", "", line) for line in done.stdout.splitlines() if re.match(r"PS\d+", line)]
    return Check(f"pgspot {script.name}", exceptions.unexplained("pgspot", sorted(set(findings))))


PLPGSQL_CHECK = """
select p.oid::regprocedure, coalesce(string_agg(
    format('%s: %s, in %s: %s%s', p.proname, c.level, coalesce(c.statement, 'the body'), c.message,
        '; ' || replace(c.detail, e'\\n', ' ')),
    e'\\x1f'
) filter (where c.message is not null), '')
from pg_proc as p
join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
left join pg_trigger as t on t.tgfoid = p.oid
cross join lateral (select coalesce(t.tgrelid, 0)::regclass as relation) as r
left join lateral plpgsql_check_function_tb(
    p.oid, r.relation, fatal_errors => false, all_warnings => true, oldtable => t.tgoldtable, newtable => t.tgnewtable
) as c on true
where p.pronamespace = 'outbox'::regnamespace
group by p.oid
order by 1
"""


def plpgsql_check(server: str, exceptions: Exceptions) -> Iterator[Check]:
    with databases.database(server) as dsn:
        databases.install(dsn, "plain")
        databases.query(dsn, "create extension plpgsql_check")
        found = databases.psql(dsn, "-F", "\x1e", "-0", "-c", PLPGSQL_CHECK).stdout
    for record in filter(None, found.split("\0")):
        function, _, findings = record.partition("\x1e")
        texts = [text for text in findings.split("\x1f") if text]
        yield Check(f"plpgsql_check {function}", exceptions.unexplained("plpgsql_check", texts))


def sql_files() -> list[Path]:
    folders = ("sql", "pgtap", "tests")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.sql") if "released" not in path.parts)


def without_text(sql: str) -> str:
    """SQL without comments, psql's commands and string constants; function bodies stay."""
    return re.sub(r"--.*|^\s*\\.*|'(?:[^']|'')*'", "''", sql, flags=re.MULTILINE)


def tidy() -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}:{number}: tab, trailing space or carriage return"
        for path in sql_files()
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if "\t" in line or line != line.rstrip()
    )


def lower_case() -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}: {word}"
        for path in sql_files()
        for word in sorted(set(re.findall(r"(?<![@\w])[A-Z]{2,}(?![@\w])", without_text(path.read_text()))))
    )


def only_replaceable() -> str:
    """Whatever stands in sql/functions is run again at every upgrade."""
    findings = []
    for path in sorted((ROOT / "sql/functions").glob("*.sql")):
        text = re.sub(r"(\$\w*\$).*?\1", "", without_text(path.read_text()), flags=re.DOTALL)
        for statement in text.split(";"):
            words = " ".join(statement.replace("''", " ").split())
            if words and not re.match(r"(create or replace (function|procedure|view)|comment on) ", words):
                findings.append(f"{path.relative_to(ROOT)}: {words[:80]}")
    return "\n".join(findings)


def manifest() -> str:
    listed = re.findall(r"^\\ir (\S+)$", (ROOT / "sql/outbox.sql").read_text(), re.MULTILINE)
    there = [str(path.relative_to(ROOT / "sql")) for folder in ("tables", "functions") for path in folder_files(folder)]
    return "\n".join(f"sql/{path} is not in sql/outbox.sql" for path in there if path not in listed)


def folder_files(folder: str) -> list[Path]:
    return sorted((ROOT / "sql" / folder).glob("*.sql"))


def codes(exceptions: Exceptions) -> Iterator[Check]:
    """Every error code is listed once, raised, provoked by a test and known to Python."""
    pattern = re.compile(r"\bOB0\d\d\b")
    first = (ROOT / "sql/functions/00_internal.sql").read_text()
    head = first[: first.index("\ncreate ")]
    listed = set(pattern.findall(head))
    sources = {path: path.read_text() for path in (ROOT / "sql").rglob("*.sql") if "released" not in path.parts}
    sources[ROOT / "sql/functions/00_internal.sql"] = first[len(head) :]
    raised = {code for text in sources.values() for code in pattern.findall(text)}
    tests = [*(ROOT / "pgtap").glob("*.sql"), *(ROOT / "tests/isolation/expected").glob("*.out")]
    tests += (ROOT / "tests").rglob("test_*.py")
    provoked = {code for path in tests for code in pattern.findall(path.read_text())}
    python = set(pattern.findall((ROOT / "python/src/outbox/errors.py").read_text()))

    def report(name: str, wanted: set[str], found: set[str], problem: str) -> Check:
        return Check(name, exceptions.unexplained("codes", [f"{code} {problem}" for code in sorted(wanted - found)]))

    yield report("codes are listed", raised, listed, "is not listed in sql/functions/00_internal.sql")
    yield report("codes are raised", listed, raised, "is listed and raised nowhere")
    yield report("codes are tested", raised, provoked, "is provoked by no test")
    if python:
        yield report("codes are known to Python", listed, python, "is not in python/src/outbox/errors.py")
    yield report("codes in Python exist", python, listed, "is in python/src/outbox/errors.py and not listed")


def checks(server: str) -> Iterator[Check]:
    exceptions = Exceptions()
    yield tool("ruff check", "ruff", "check", "--config", CONFIG, *SOURCES)
    yield tool("ruff format", "ruff", "format", "--check", "--diff", "--config", CONFIG, *SOURCES)
    yield tool("mypy", "mypy", "--config-file", CONFIG, "--explicit-package-bases", *SOURCES)
    for script in [*sorted(BUILD.glob("outbox--*.sql")), BUILD / "outbox-install.sql"]:
        yield pgspot(script, exceptions)
    yield from plpgsql_check(server, exceptions)
    yield Check("sql is tidy", tidy())
    yield Check("sql is lower-case", lower_case())
    yield Check("sql/functions can be run again", only_replaceable())
    yield Check("every file is in the manifest", manifest())
    yield from codes(exceptions)
    yield Check("every exception is needed", exceptions.stale())
