from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import databases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Mode


@pytest.fixture
def empty() -> Iterator[str]:
    """A database without the package."""
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
