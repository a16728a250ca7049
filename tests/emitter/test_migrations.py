"""install_sql(), from a wheel and under the real tools: the recipes of docs/migrations.md, up to a next release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import asyncpg
import psycopg
import pytest

import build
import databases
from databases import ROOT, assert_same, fingerprint, query
from emitter.documents import examples, write
from emitter.kinds import django_place, url
from outbox import ConfigurationError, OutboxMessage, emit, emit_many, install_sql
from outbox.install import from_clone

VERSION = build.Tree(ROOT).version
NEXT = "99.0.0"
DELTA = "-- locks: outbox.setting in access exclusive\nalter table outbox.setting add column note text;\n"
Run = Callable[..., str]


def wheel(root: Path, target: Path) -> Path:
    """Builds the wheel of a clone and unpacks it."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            target,
            root / "python",
        ],
        check=True,
    )
    with zipfile.ZipFile(next(target.glob("*.whl"))) as packed:
        packed.extractall(target / "unpacked")
    return target / "unpacked"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the next release: this version is frozen, and a table gets a column."""
    root: Path = tmp_path_factory.mktemp("clone")
    for folder in ("sql", "python"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "outbox.control", root)
    build.release(root)
    shutil.rmtree(root / "sql/upgrade", ignore_errors=True)
    control = (root / "outbox.control").read_text()
    (root / "outbox.control").write_text(re.sub(r"(?<=default_version = ')[^']+", NEXT, control))
    write(root, {f"sql/upgrade/{VERSION}--{NEXT}.sql": DELTA})
    return wheel(root, tmp_path_factory.mktemp("wheel"))


def run_in(folder: Path, dsn: str, path: Path | None = None) -> Run:
    """Runs Python in a project's folder; path is where it finds outbox, if not where the tests do."""
    at = os.pathsep.join(map(str, [folder, *([path] if path else [])]))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": at, "OUTBOX_DSN": dsn, "DJANGO_SETTINGS_MODULE": "settings"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The catalog after the installation by psql."""
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, "plain")
        return fingerprint(dsn)


def test_the_wheel_carries_what_the_clone_has(released: Path) -> None:
    texts = {path.stem: path.read_text() for path in (released / "outbox" / "sql").glob("*.sql")}
    assert {VERSION, NEXT, f"{VERSION}--{NEXT}", "version"} < set(texts)
    here = from_clone(ROOT)
    assert texts[VERSION] == here[VERSION]
    assert texts["plain_head"] == here["plain_head"]
    assert (texts["version"], here["version"]) == (NEXT, VERSION)


def test_no_command_of_psql_and_no_transaction_control() -> None:
    script = install_sql()
    assert script == install_sql(VERSION)
    outside = re.sub(r"(\$\w*\$).*?\1", "", script, flags=re.DOTALL)
    assert not re.search(r"^(\\|(begin|commit|rollback|start)\b)", outside, re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("wanted", [{"version": "0.0.7"}, {"upgrade_from": "0.0.7"}, {"upgrade_from": VERSION}])
def test_unknown_versions(wanted: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"it has .*{VERSION}"):
        install_sql(**wanted)


def test_psycopg_in_a_transaction_that_goes_on(empty: str, expected: list[str]) -> None:
    with psycopg.connect(empty, options="-c search_path=mine,public") as conn:
        conn.execute("create schema mine")
        conn.execute(install_sql().encode())
        assert conn.execute("show search_path").fetchone() == ("mine,public",)
        assert conn.execute("show client_min_messages").fetchone() == ("notice",)
        conn.execute("create table here (id int)")
        assert conn.execute("select to_regclass('mine.here') is not null").fetchone() == (True,)
        conn.rollback()
        conn.execute(install_sql().encode())
    assert_same(expected, fingerprint(empty))
    with psycopg.connect(empty) as conn, pytest.raises(psycopg.Error, match="outbox is installed by") as caught:
        conn.execute(install_sql().encode())
    assert caught.value.sqlstate == "OB090"


async def test_asyncpg_without_a_transaction(empty: str, expected: list[str]) -> None:
    conn = await asyncpg.connect(empty)
    await conn.execute(install_sql())
    assert await conn.fetchval("show search_path") == '"$user", public'
    await conn.close()
    assert_same(expected, fingerprint(empty))


ENV = """
from alembic import context
from sqlalchemy import create_engine
with create_engine(URL).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
ASYNC_ENV = """
import asyncio
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine
def migrate(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
async def main():
    async with create_async_engine(URL).connect() as connection:
        await connection.run_sync(migrate)
asyncio.run(main())
"""


def versions(example: str) -> str:
    """The examples name the first two versions; here they are this one and the next."""
    here = {'"0.1.0"': f'"{VERSION}"', '"0.2.0"': f'"{NEXT}"'}
    return re.sub("|".join(here), lambda found: here[found[0]], example)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg async", "asyncpg"])
def test_alembic(tmp_path: Path, empty: str, expected: list[str], released: Path, driver: str) -> None:
    name = "0001_outbox_asyncpg.py" if driver == "asyncpg" else "0001_outbox.py"
    first = versions(examples("migrations.md")[f"versions/{name}"])
    second = versions(examples("migrations.md")["versions/0002_outbox.py"])
    if driver == "asyncpg":  # as the text says: in the same way
        call = re.search(r"    adapted = .*\n    adapted.*\n", first)
        assert call is not None
        begin, end = second.index("    op.get_bind()"), second.index("\n\n\ndef downgrade")
        second = second[:begin] + call[0].replace(f'install_sql("{VERSION}")', "script").rstrip() + second[end:]
    write(
        tmp_path,
        {
            "alembic.ini": "[alembic]\nscript_location = .\npath_separator = os\n",
            "env.py": f"URL = {url(empty, driver.partition(' ')[0])!r}\n{ENV if driver == 'psycopg' else ASYNC_ENV}",
            "versions/first.py": first,
            "versions/second.py": second,
        },
    )
    run = run_in(tmp_path, empty, released)
    if driver == "psycopg":  # with the others the two steps go at once
        run("-m", "alembic", "upgrade", "0001")
        assert_same(expected, fingerprint(empty))
    run("-m", "alembic", "upgrade", "head")
    assert query(empty, "select outbox.version(), version_num from alembic_version") == f"{NEXT}|0002"
    assert query(empty, "select note from outbox.setting") == ""
    if driver == "psycopg":
        run("-m", "alembic", "downgrade", "base")
        assert query(empty, "select to_regnamespace('outbox') is null") == "t"


SETTINGS = """
DATABASES = {{"default": {place}}}
INSTALLED_APPS = ["shop", "outbox.django"]
ROOT_URLCONF = "urls"
SECRET_KEY = "secret"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
URLS = """
from django.urls import path
from shop.views import create
urlpatterns = [path("orders", create)]
"""
MODELS = """
from django.db import models
class Order(models.Model):
    item = models.TextField()
"""
# Several commands of manage.py in one process: each takes its time to start.
FIRST = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("makemigrations", "shop", verbosity=0)
open("shop/migrations/0002_outbox.py", "w").write(open("0002_outbox.py").read())
call_command("migrate", "shop", verbosity=0)
call_command("check", databases=["default"], fail_level="WARNING")
print(Client().post("/orders", {"item": "teapot"}).json())
"""


def test_django(tmp_path: Path, empty: str, expected: list[str], released: Path) -> None:
    here, there = run_in(tmp_path, empty), run_in(tmp_path, empty, released)
    write(
        tmp_path,
        {
            "settings.py": SETTINGS.format(place=django_place(empty)),
            "urls.py": URLS,
            "shop/__init__.py": "",
            "shop/models.py": MODELS,
            "shop/views.py": examples("emitting.md")["shop/views.py"],
            "shop/migrations/__init__.py": "",
            "0002_outbox.py": versions(examples("migrations.md")["shop/migrations/0002_outbox.py"]),
        },
    )
    assert here("-c", FIRST).splitlines()[-1] == "{'order': 1}"
    assert_same(expected, fingerprint(empty))
    found = query(empty, "select key, convert_from(body, 'UTF8') from outbox.message")
    assert found == 'order 1|{"order":1,"item":"teapot"}'
    third = "shop/migrations/0003_outbox.py"
    write(tmp_path, {third: versions(examples("migrations.md")[third])})
    there("-m", "django", "migrate", "shop")
    assert query(empty, "select outbox.version(), count(*) from outbox.message") == f"{NEXT}|1"
    there("-m", "django", "migrate", "shop", "0001")
    assert query(empty, "select to_regnamespace('outbox') is null") == "t"


def test_grants(empty: str) -> None:
    databases.install(empty, "plain")
    with psycopg.connect(empty) as conn:
        conn.execute("create role shop")  # roles belong to the whole server: nothing of this is committed
        conn.execute(examples("migrations.md")["grants.sql"].encode())
        conn.execute("set local role shop")
        emit(conn, "a", 1)
        emit_many(conn, [OutboxMessage("a", 1)])
        conn.rollback()
