"""A relay of the old version, and emitters, while the database is upgraded under them."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import databases
import releases as made
from chaos.stage import LONG, SECONDS, TOTAL, Stage
from databases import SERVER, Mode, psql, query
from releases import Releases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Management


@pytest.fixture
def relay_role() -> Iterator[str]:
    name = f"outbox_test_relay_{secrets.token_hex(6)}"
    query(SERVER, f"create role {name} login password 'x'")
    yield name
    query(SERVER, f"drop role {name}")


# An extension's upgrade runs the same body: the real ones of both kinds take their time with OUTBOX_LONG=1.
CASES: list[tuple[Releases | None, Mode]] = [
    *((None, mode) for mode in databases.MODES),
    *((one, mode) for one in made.real() for mode in (databases.MODES if LONG else ("plain",))),
]


@pytest.mark.parametrize(
    ("releases", "mode"), CASES, ids=[f"{one.old if one else 'made up'} {mode}" for one, mode in CASES]
)
def test_goes_on_through_an_upgrade(
    relay_role: str, releases: Releases | None, mode: Mode, amqp_url: str, management: Management
) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if releases is None:
            releases = stack.enter_context(made.all_kinds(Path(folder) / "next"))
        dsn = stack.enter_context(databases.database(SERVER))
        releases.install(dsn, mode)
        query(dsn, f"select outbox.grant_relay('{relay_role}')")
        at = urlsplit(dsn)
        as_relay = at._replace(netloc=f"{relay_role}:x@{at.netloc.rpartition('@')[2]}").geturl()
        with Stage(dsn, amqp_url, management.url, Path(folder)) as stage:
            relays = [stage.relay(pg=as_relay), stage.relay(pg=as_relay)]
            stage.emit(TOTAL // 2, SECONDS / 2)
            stage.await_progress(200)
            tries = 0
            while (done := psql(dsn, *releases.statements(mode), check=False)).returncode:
                # Whoever reads the table at that moment is waited for, for two seconds.
                assert "is in use" in done.stderr
                tries += 1
                assert tries < 5
            stage.note(f"upgraded, after {tries} tries in vain")
            # In hand, claimed before and settled afterwards; and what comes now.
            stage.emit(TOTAL // 2, SECONDS / 2)
            stage.await_progress(200)
            assert query(dsn, "select outbox.version()") == releases.new
            verdict = stage.finish()
            assert verdict.duplicates == 0
            assert all(relay.process.returncode == 0 for relay in relays)
            assert not any(emitters.errors for emitters in stage.emitters)
