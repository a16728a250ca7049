"""Extension, plain and restored databases have the same catalog; and the comparison sees each kind of fact."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import databases
from databases import PARTS, assert_same, fingerprint, restore
from outbox.verify import masked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Mode

PACKAGING = databases.ROOT / "sql/packaging"
EXPECTED = PACKAGING / "fingerprint.expected"
SETTINGS, _, QUERY = (PACKAGING / "fingerprint.sql").read_text().partition("\n\nwith ")


@contextlib.contextmanager
def database_in(mode: Mode) -> Iterator[str]:
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, mode)
        yield dsn


def lines_of(connection: psycopg.Connection[Any]) -> set[str]:
    connection.execute(SETTINGS.encode())
    return {str(row[0]) for row in connection.execute(f"with {QUERY}".encode())}


def patterns(dsn: str) -> list[str]:
    """The lines that come with a right given by grant_*(), and with a day of the archive."""
    found = []
    with psycopg.connect(dsn) as connection:
        before = lines_of(connection)
        for part in PARTS:
            connection.execute("create role outbox_test_grantee")  # roles belong to the server: never committed
            connection.execute(f"select outbox.grant_{part}('outbox_test_grantee')".encode())
            given = sorted(lines_of(connection) - before)
            found += [f"when granted {part}: {line.replace('outbox_test_grantee', '@ROLE@')}" for line in given]
            connection.rollback()
        connection.execute("select outbox.configure('retention', 'forever')")
        days = sorted(lines_of(connection) - before)
        connection.rollback()
    for line in days:
        one_day = re.sub(r"archive_\d{8}", "archive_@DAY@", masked(line))
        if (pattern := f"each day: {one_day}") not in found:
            found.append(pattern)
    return found


def test_extension_as_expected(request: pytest.FixtureRequest) -> None:
    with database_in("extension") as dsn:
        lines = [*fingerprint(dsn), *patterns(dsn)]
    if request.config.getoption("--accept"):
        EXPECTED.write_text("\n".join(lines) + "\n")
    assert_same(
        EXPECTED.read_text().splitlines(),
        lines,
        "The catalog changed. If that is meant: python3 tests/run.py install --accept",
    )


def test_plain_equals_extension() -> None:
    with database_in("extension") as extension, database_in("plain") as plain:
        assert_same(fingerprint(extension, marks=False), fingerprint(plain))


def test_restored_equals_dumped(installed: str) -> None:
    with databases.database(databases.SERVER) as restored:
        restore(installed, restored)
        assert_same(fingerprint(installed), fingerprint(restored))


def test_restored_keeps_grants_and_changes(installed: str) -> None:
    """What an administrator changes afterwards is part of a dump, in both modes."""
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute("grant usage on schema outbox to pg_monitor")
        connection.execute("grant execute on function outbox.version() to pg_monitor")
    with databases.database(databases.SERVER) as restored:
        restore(installed, restored)
        assert_same(fingerprint(installed), fingerprint(restored))


# What a line begins with, what to do first, what to break.
BREAKS = {
    "schema privilege": ("privilege on schema outbox", "", "grant usage on schema outbox to public"),
    "schema comment": ("comment on schema", "", "comment on schema outbox is null"),
    "relation option": ("relation outbox.setting", "", "alter table outbox.setting set (fillfactor = 50)"),
    "toast option": ("relation outbox.setting", "", "alter table outbox.setting set (toast.autovacuum_enabled = off)"),
    "persistence": ("relation outbox.setting", "", "alter table outbox.setting set unlogged"),
    "row security": ("relation outbox.setting", "", "alter table outbox.setting enable row level security"),
    "replica identity": ("relation outbox.setting", "", "alter table outbox.setting replica identity full"),
    "partition bound": (
        "relation outbox.part",
        (
            "create table outbox.whole (n integer) partition by range (n);"
            "create table outbox.part partition of outbox.whole for values from (1) to (2)"
        ),
        "alter table outbox.whole detach partition outbox.part",
    ),
    "column": ("column outbox.setting.extra", "", "alter table outbox.setting add column extra text"),
    "column type": ("column outbox.setting.value", "", "alter table outbox.setting alter value type varchar(10)"),
    "column null": ("column outbox.setting.value", "", "alter table outbox.setting alter value drop not null"),
    "column default": ("column outbox.setting.value", "", "alter table outbox.setting alter value set default 'x'"),
    "column identity": (
        "column outbox.extra.id",
        "create table outbox.extra (id bigint not null)",
        "alter table outbox.extra alter id add generated always as identity",
    ),
    "column generated": (
        "column outbox.extra.id",
        "create table outbox.extra (id bigint generated always as (1) stored)",
        "alter table outbox.extra alter id drop expression",
    ),
    "column storage": (
        "column outbox.setting.value",
        "",
        "alter table outbox.setting alter value set storage external",
    ),
    "column compression": (
        "column outbox.setting.value",
        "",
        "alter table outbox.setting alter value set compression pglz",
    ),
    "column statistics": ("column outbox.setting.value", "", "alter table outbox.setting alter value set statistics 5"),
    "column option": (
        "column outbox.setting.value",
        "",
        "alter table outbox.setting alter value set (n_distinct = 5)",
    ),
    "column collation": (
        "column outbox.setting.value",
        "",
        'alter table outbox.setting alter value type text collate "C"',
    ),
    "column order": (
        "columns outbox.extra",
        "create table outbox.extra (a integer, b integer)",
        "drop table outbox.extra; create table outbox.extra (b integer, a integer)",
    ),
    "constraint": ("constraint setting_pkey", "", "alter table outbox.setting drop constraint setting_pkey"),
    "constraint text": (
        "constraint extra",
        "alter table outbox.setting add constraint extra check (name > '')",
        "alter table outbox.setting drop constraint extra, add constraint extra check (name >= '')",
    ),
    "constraint not validated": (
        "constraint extra",
        "alter table outbox.setting add constraint extra check (name > '')",
        "alter table outbox.setting drop constraint extra, add constraint extra check (name > '') not valid",
    ),
    "index": ("index outbox.extra", "", "create index extra on outbox.setting (value)"),
    "index predicate": (
        "index outbox.extra",
        "create index extra on outbox.setting (value) where value > ''",
        "drop index outbox.extra; create index extra on outbox.setting (value)",
    ),
    "index clustered": ("index outbox.setting_pkey", "", "alter table outbox.setting cluster on setting_pkey"),
    "sequence increment": (
        "sequence outbox.extra",
        "create sequence outbox.extra",
        "alter sequence outbox.extra increment 2",
    ),
    "sequence cache": ("sequence outbox.extra", "create sequence outbox.extra", "alter sequence outbox.extra cache 5"),
    "sequence cycle": ("sequence outbox.extra", "create sequence outbox.extra", "alter sequence outbox.extra cycle"),
    "sequence owner column": (
        "sequence outbox.extra",
        "create sequence outbox.extra owned by outbox.setting.name",
        "alter sequence outbox.extra owned by none",
    ),
    "composite type": (
        "column outbox.claimed_message.extra",
        "",
        "alter type outbox.claimed_message add attribute extra text",
    ),
    "enum": ("type outbox.extra", "create type outbox.extra as enum ('a')", "alter type outbox.extra add value 'b'"),
    "domain": ("type outbox.extra", "create domain outbox.extra as text", "alter domain outbox.extra set default 'x'"),
    "domain check": (
        "constraint small",
        "create domain outbox.extra as text",
        "alter domain outbox.extra add constraint small check (value < 'x')",
    ),
    "routine volatility": ("routine outbox.version()", "", "alter function outbox.version() volatile"),
    "routine cost": ("routine outbox.version()", "", "alter function outbox.version() cost 7"),
    "routine setting": ("routine outbox.version()", "", "alter function outbox.version() reset all"),
    "routine security": (
        "routine outbox.extra()",
        "create function outbox.extra() returns integer language sql security definer return 1",
        "alter function outbox.extra() security invoker",
    ),
    "routine body": (
        "routine outbox.extra()",
        "create function outbox.extra() returns integer language sql as 'select 1'",
        "create or replace function outbox.extra() returns integer language sql as 'select 2'",
    ),
    "routine overload": (
        "routine outbox.version(integer)",
        "",
        "create function outbox.version(integer) returns text language sql as 'select null::text'",
    ),
    "trigger disabled": (
        "trigger extra",
        (
            "create trigger extra before update on outbox.setting for each row"
            " execute function suppress_redundant_updates_trigger()"
        ),
        "alter table outbox.setting disable trigger extra",
    ),
    "trigger definition": (
        "trigger extra",
        (
            "create trigger extra before update on outbox.setting for each row"
            " execute function suppress_redundant_updates_trigger()"
        ),
        (
            "create or replace trigger extra before update of value on outbox.setting for each row"
            " execute function suppress_redundant_updates_trigger()"
        ),
    ),
    "view definition": (
        "view outbox.extra",
        "create view outbox.extra as select 1 as n",
        "create or replace view outbox.extra as select 2 as n",
    ),
    "view option": (
        "relation outbox.extra",
        "create view outbox.extra as select 1 as n",
        "alter view outbox.extra set (security_barrier)",
    ),
    "rule": ("rule extra", "", "create rule extra as on delete to outbox.setting do instead nothing"),
    "policy": ("policy extra", "", "create policy extra on outbox.setting using (true)"),
    "relation owner": ("owner of relation outbox.setting", "", "alter table outbox.setting owner to pg_monitor"),
    "routine owner": ("owner of routine outbox.version()", "", "alter function outbox.version() owner to pg_monitor"),
    "type owner": ("owner of type outbox.claimed_message", "", "alter type outbox.claimed_message owner to pg_monitor"),
    "relation privilege": ("privilege on relation outbox.setting", "", "grant select on outbox.setting to pg_monitor"),
    "grant option": (
        "privilege on relation outbox.setting",
        "grant select on outbox.setting to pg_monitor",
        "grant select on outbox.setting to pg_monitor with grant option",
    ),
    "sequence privilege": (
        "privilege on relation outbox.extra",
        "create sequence outbox.extra",
        "grant usage on sequence outbox.extra to pg_monitor",
    ),
    "column privilege": (
        "privilege on column outbox.setting.name",
        "",
        "grant select (name) on outbox.setting to pg_monitor",
    ),
    "routine privilege": (
        "privilege on routine outbox.version()",
        "",
        "grant execute on function outbox.version() to pg_monitor",
    ),
    "type privilege": (
        "privilege on type outbox.claimed_message",
        "",
        "grant usage on type outbox.claimed_message to pg_monitor",
    ),
    "default privileges": (
        "privilege on default privileges",
        "",
        "alter default privileges in schema outbox grant select on tables to pg_monitor",
    ),
    "table comment": ("comment on table outbox.setting", "", "comment on table outbox.setting is null"),
    "column comment": (
        "comment on table column outbox.setting.value",
        "",
        "comment on column outbox.setting.value is 'x'",
    ),
    "routine comment": ("comment on function outbox.version()", "", "comment on function outbox.version() is 'x'"),
    "type comment": ("comment on type outbox.claimed_message", "", "comment on type outbox.claimed_message is null"),
    "constraint comment": (
        "comment on table constraint",
        "",
        "comment on constraint setting_pkey on outbox.setting is 'x'",
    ),
    "index comment": ("comment on index", "", "comment on index outbox.setting_pkey is 'x'"),
    "dump mark": (
        "dump mark outbox.message",
        "",
        (
            "update pg_extension set extconfig = array_remove(extconfig, 'outbox.message'::regclass),"
            " extcondition = extcondition[2:] where extname = 'outbox'"
        ),
    ),
    "another kind of object": ("object collation", "", 'create collation outbox.extra from "C"'),
}


@pytest.fixture(scope="module")
def intact() -> Iterator[str]:
    with database_in("extension") as dsn:
        yield dsn


@pytest.mark.parametrize("kind", BREAKS)
def test_sees_each_kind_of_fact(intact: str, kind: str) -> None:
    begins, prepare, change = BREAKS[kind]

    with psycopg.connect(intact) as connection:
        connection.execute("set search_path = pg_catalog")
        if prepare:
            connection.execute(prepare.encode())
        before = lines_of(connection)
        connection.execute(change.encode())
        changed = before ^ lines_of(connection)
        connection.rollback()
    assert any(line.startswith(begins) for line in changed), changed
