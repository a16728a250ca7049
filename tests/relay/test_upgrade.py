"""A relay of the old version, and emitters, while the database is upgraded under them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import databases
import releases as made
from chaos.stage import LONG, SECONDS, TOTAL, Stage
from databases import SERVER, Mode, Roles, as_user, psql, query
from releases import Releases

if TYPE_CHECKING:
    from conftest import Management


# An extension's upgrade runs the same body: the real ones of both kinds take their time with OUTBOX_LONG=1.
CASES: list[tuple[Releases | None, Mode]] = [
    *((None, mode) for mode in databases.MODES),
    *((one, mode) for one in made.real() for mode in (databases.MODES if LONG else ("plain",))),
]


@pytest.mark.parametrize(
    ("releases", "mode"), CASES, ids=[f"{one.old if one else 'made up'} {mode}" for one, mode in CASES]
)
def test_goes_on_through_an_upgrade(
    roles: Roles, releases: Releases | None, mode: Mode, amqp_url: str, management: Management
) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if releases is None:
            releases = stack.enter_context(made.all_kinds(Path(folder) / "next"))
        dsn = stack.enter_context(databases.database(SERVER))
        releases.install(dsn, mode)
        query(dsn, f"select outbox.grant_relay('{(role := roles.make('relay'))}')")
        as_relay = as_user(dsn, role)
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
