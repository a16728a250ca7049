"""A database for the worker, and every kind of connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

import databases
from emitter.kinds import KINDS, Opened, Waiting


@pytest.fixture(scope="session")
def database() -> Iterator[str]:
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, "plain")
        yield dsn


@pytest.fixture(scope="session")
def cleaner(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def dsn(database: str, cleaner: psycopg.Connection[Any]) -> str:
    """One database for all tests of a worker, emptied before each."""
    cleaner.execute("delete from outbox.message; delete from outbox.dedup; delete from outbox.setting")
    return database


@pytest.fixture
def waiting(db: psycopg.Connection[Any]) -> Waiting:
    return Waiting(db)


@pytest.fixture(params=KINDS)
async def opened(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opened]:
    # The matrix runs in an event loop, where Django refuses to work unless told so.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    async with KINDS[request.param](dsn) as found:
        yield found
