"""What is left alone: other libraries, the session's flushes, the cursor's rows. And what type checkers say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import databases
from emitter.kinds import Waiting, url
from outbox import OutboxMessage, emit, emit_many

OPTIONAL = (
    "psycopg", "asyncpg", "sqlalchemy", "django", "pydantic", "msgspec", "opentelemetry", "sentry_sdk", "structlog",
    "aio_pika", "aiormq", "pamqp", "yarl", "uvloop", "prometheus_client", "pytest",
)  # fmt: skip
USES = {
    "nothing": (
        set(),
        "outbox.install_sql(); outbox.message.arguments(outbox.OutboxMessage('a', {'b': 1}, headers={'c': 1}), {}, {})",
    ),
    "psycopg": (
        {"psycopg"},
        "import psycopg\nwith psycopg.connect(os.environ['DSN']) as conn:\n    outbox.emit(conn, 'a', 1)",
    ),
    "asyncpg": (
        {"asyncpg"},
        """
import asyncio, asyncpg
async def main():
    conn = await asyncpg.connect(os.environ['DSN'])
    await outbox.emit(conn, 'a', {'b': 1})
    await conn.close()
asyncio.run(main())
""",
    ),
}


@pytest.mark.parametrize("brought", USES)
def test_nothing_is_imported_that_the_application_did_not_bring(brought: str, dsn: str) -> None:
    expected, use = USES[brought]
    script = f"import os, sys, outbox\n{use}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"DSN": dsn}, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) & set(OPTIONAL) == expected


def test_every_name_can_be_imported() -> None:
    script = "import outbox\nfrom outbox import *\nprint(outbox.__version__, MessageRelay.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "MessageRelay"


class Base(DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "thing"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_no_flush_behind_the_users_back(dsn: str) -> None:
    engine = create_engine(url(dsn, "psycopg"), poolclass=NullPool)
    with Session(engine) as session:
        thing = Thing()  # there is no such table: flushing it would fail
        session.add(thing)
        emit(session, "a", 1)
        emit_many(session, [OutboxMessage("a", 1)])
        assert thing in session.new


async def test_no_flush_behind_the_async_users_back(dsn: str) -> None:
    engine = create_async_engine(url(dsn, "asyncpg"), poolclass=NullPool)
    async with AsyncSession(engine) as session:
        session.add(Thing())
        await emit(session, "a", 1)
        assert len(session.new) == 1
    await engine.dispose()


def test_a_cursor_keeps_its_rows(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        cursor = conn.execute("select generate_series(1, 3)")
        assert cursor.fetchone() == (1,)
        emit(cursor, "a", 1)
        assert cursor.fetchall() == [(2,), (3,)]


def test_autocommit_and_pipelines(dsn: str, db: psycopg.Connection[Any], waiting: Waiting) -> None:
    emit(db, "at once", 1)
    with db.pipeline(), db.transaction():
        emit(db, "in a pipeline", 1)
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as conn:
        emit(conn, "from a client cursor", b"\x00%s")
    assert waiting.keys() == ["at once", "in a pipeline", "from a client cursor"]
    assert waiting()[-1].body == b"\x00%s"


CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-error-summary", "--python-executable", sys.executable],
    "pyrefly": ["pyrefly", "check", "--python-interpreter-path", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_accept_user_code(checker: str, tmp_path: Path) -> None:
    shutil.copy(databases.ROOT / "tests" / "emitter" / "typed_user.py", tmp_path / "user.py")
    # asyncpg has no types.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-asyncpg.*]\nignore_missing_imports = true\n")
    tool, *options = CHECKERS[checker]
    done = subprocess.run(
        [Path(sys.executable).with_name(tool), *options, "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
