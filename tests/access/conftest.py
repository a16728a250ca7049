from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from access.roles import Roles

import databases

if TYPE_CHECKING:
    from databases import Mode


@pytest.fixture
def roles() -> Iterator[Roles]:
    made = Roles()
    yield made
    made.remove()


# Databases after roles: a role can be dropped when no database is left in which it has rights.
@pytest.fixture
def dsn(roles: Roles, clone: psycopg.Connection[Any]) -> str:
    assert not roles.made
    name = clone.info.dbname
    clone.close()
    return databases.named(databases.SERVER, name)


@pytest.fixture
def empty(roles: Roles) -> Iterator[str]:
    """A database without the package."""
    assert not roles.made
    with databases.database(databases.SERVER) as dsn:
        yield dsn


@pytest.fixture(params=databases.MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def installed(empty: str, mode: Mode) -> str:
    """A database with the package, once in each mode."""
    databases.install(empty, mode)
    return empty
