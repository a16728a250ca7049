"""A relay of the old version, and emitters, while the database is upgraded under them."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import databases
import releases as made
from chaos.stage import Stage
from databases import SERVER, psql, query
from releases import Releases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Management

    from databases import Mode


@pytest.fixture
def relay_role() -> Iterator[str]:
    name = f"outbox_test_relay_{secrets.token_hex(6)}"
    query(SERVER, f"create role {name} login password 'x'")
    yield name
    query(SERVER, f"drop role {name}")


@pytest.fixture(params=["made up", *made.real()], ids=lambda one: one if isinstance(one, str) else f"from {one.old}")
def releases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Releases]:
    if isinstance(request.param, Releases):
        yield request.param
    else:
        with made.all_kinds(tmp_path) as releases:
            yield releases


@pytest.mark.parametrize("mode", databases.MODES)
def test_goes_on_through_an_upgrade(
    relay_role: str, releases: Releases, mode: Mode, amqp_url: str, management: Management
) -> None:
    with databases.database(SERVER) as dsn, tempfile.TemporaryDirectory() as folder:
        releases.install(dsn, mode)
        query(dsn, f"select outbox.grant_relay('{relay_role}')")
        at = urlsplit(dsn)
        as_relay = at._replace(netloc=f"{relay_role}:x@{at.netloc.rpartition('@')[2]}").geturl()
        with Stage(dsn, amqp_url, management.url, Path(folder)) as stage:
            relays = [stage.relay(pg=as_relay), stage.relay(pg=as_relay)]
            stage.emit()
            stage.await_progress(300)
            tries = 0
            while (done := psql(dsn, *releases.statements(mode), check=False)).returncode:
                # Whoever reads the table at that moment is waited for, for two seconds.
                assert "is in use" in done.stderr
                tries += 1
                assert tries < 5
            stage.note(f"upgraded, after {tries} tries in vain")
            # In hand, claimed before and settled afterwards; and what comes now.
            stage.emit()
            stage.await_progress(300)
            assert query(dsn, "select outbox.version()") == releases.new
            verdict = stage.finish()
            assert verdict.duplicates == 0
            assert all(relay.process.returncode == 0 for relay in relays)
            assert not any(emitters.errors for emitters in stage.emitters)
