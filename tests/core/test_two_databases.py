"""A database and its copy on one server: their tables have the same oids, and so their advisory locks the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from mutants import mutate

import databases

Connection = psycopg.Connection[tuple[Any, ...]]
FILTER = "_bell_holders: l.database = "


@pytest.fixture
def copy(dsn: str) -> Iterator[Connection]:
    with (
        databases.database(databases.SERVER, template=urlsplit(dsn).path[1:]) as name,
        psycopg.connect(name, autocommit=True) as connection,
    ):
        yield connection


# Without the filter the copy's sleeper would count: nobody would ring for the relay that then sleeps here.
@pytest.mark.parametrize("filtered", [True, False])
def test_who_sleeps_in_a_copy_hears_no_bell_here(copy: Connection, dsn: str, *, filtered: bool) -> None:
    oid = "select 'outbox.message'::regclass::oid"
    with psycopg.connect(dsn, autocommit=True) as relay, psycopg.connect(dsn) as emitter:
        assert relay.execute(oid).fetchall() == copy.execute(oid).fetchall()
        if not filtered:
            [mutant] = [one for one in mutate.mutants() if one.name.startswith(FILTER)]
            relay.execute(mutant.sql.encode())
        assert copy.execute("select outbox.arm_wakeup()").fetchall() == [(True,)]
        emitter.execute("select outbox.emit('m', '1')")
        # Refused: an emit is in flight, and it has seen nobody sleep.
        assert relay.execute("select outbox.arm_wakeup()").fetchall() == [(not filtered,)]
        emitter.commit()
        assert relay.execute("select outbox.arm_wakeup()").fetchall() == [(True,)]


def test_an_emitter_in_a_copy_holds_back_no_floor_here(copy: Connection, db: Connection) -> None:
    """An open emit there is another table's: the proof by lock holders does not wait for it."""
    copy.execute("begin")
    copy.execute("select outbox.emit('m', '1')")
    assert db.execute("select outbox._emitter_xids()").fetchall() == [([],)]
