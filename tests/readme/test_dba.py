"""docs/dba.md: every block runs, in order. Its statements, and those of other pages, name tests that exist."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import databases

PAGE = (databases.ROOT / "docs/dba.md").read_text()
GUARANTEES = (databases.ROOT / "docs/guarantees.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:pgtap|\w+/(?:specs/)?)[\w/.]*\.(?:sql|py|spec|expected))(?:::(\w+))?`")

OWNER = """
select r.rolname, r.rolcanlogin
from pg_namespace as n join pg_roles as r on r.oid = n.nspowner
where n.nspname = 'outbox'
"""


def run(language: str, script: str, folder: Path, environment: dict[str, str]) -> None:
    psql = ["psql", "-Xqv", "ON_ERROR_STOP=1", "-c", script, environment["OUTBOX_DSN"]]
    command = ["bash", "-ec", script] if language == "sh" else psql
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def test_blocks_run(tmp_path: Path) -> None:
    """As one who reads from top to bottom; the role is the server's, so it gets a name of its own here."""
    role = f"outbox_test_{secrets.token_hex(6)}"
    folder = Path(databases.program("psql")).parent
    with databases.database(databases.SERVER) as dsn, databases.database(databases.SERVER) as restored:
        (tmp_path / "build").symlink_to(databases.BUILD)
        environment = os.environ | {
            "OUTBOX_DSN": dsn,
            "RESTORED_DSN": restored,
            "PGDATABASE": urlsplit(dsn).path[1:],
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        try:
            for language, text in BLOCK.findall(PAGE):
                run(language, text.replace("outbox_owner", role), tmp_path, environment)
                if "outbox-install.sql" in text:
                    assert databases.query(dsn, OWNER) == f"{role}|f"
                    databases.query(dsn, "select outbox.emit('kept', '1')")
                if "pg_restore" in text:
                    assert databases.query(restored, "select routing_key from outbox.message") == "kept"
                    databases.query(restored, f"drop owned by {role} cascade")
                    databases.query(dsn, "delete from outbox.message")
            assert databases.query(dsn, "select count(*) from pg_namespace where nspname = 'outbox'") == "0"
            assert databases.query(dsn, f"select count(*) from pg_roles where rolname = '{role}'") == "0"
        finally:
            for one in (dsn, restored):
                databases.psql(one, "-c", f"drop owned by {role} cascade", check=False)
            databases.psql(databases.SERVER, "-c", f"drop role if exists {role}", check=False)


# Pages, and how many tests they name at least.
PAGES = {"dba.md": 40, "guarantees.md": 60, "rabbitmq.md": 2, "security.md": 35, "tuning.md": 15}


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    named = NAMED.findall((databases.ROOT / "docs" / page).read_text())
    assert len(named) >= PAGES[page]
    for path, name in named:
        file = databases.ROOT / (path if path.startswith(("pgtap/", "sql/")) else f"tests/{path}")
        assert file.exists(), path
        assert not name or re.search(rf"^(?:async )?def {name}\(", file.read_text(), re.MULTILINE), f"{path}::{name}"


@pytest.mark.parametrize("page", ["dba.md", "security.md"])
def test_every_statement_names_a_test(page: str) -> None:
    text = (databases.ROOT / "docs" / page).read_text()
    items = re.findall(r"^- (.*?)(?=\n\n|\n- |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(items) > 20
    assert not [item for item in items if not NAMED.search(item)]


def test_every_failure_names_a_test() -> None:
    tables = re.findall(r"^\|.*\| Shown by \|\n\|[-|]+\n((?:\|.*\n)+)", GUARANTEES, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert not [row for row in rows if not NAMED.search(row.rpartition(" | ")[2])]
