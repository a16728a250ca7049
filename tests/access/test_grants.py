"""Rights are those that grant_*() gave, whatever happens to roles and databases afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pytest
from access.rights import granted, refused, rights

import databases
from databases import PARTS, ROOT, SERVER, Roles, as_user, assert_same, fingerprint, psql, query, restore
from releases import Releases, edit, made_up

if TYPE_CHECKING:
    from databases import Mode

LEAKS = "tables", "sequences", "functions", "types", "schemas"


def leak(dsn: str, *to: str) -> None:
    """Default privileges of the installing role that give others everything."""
    psql(dsn, text="".join(f"alter default privileges grant all on {kind} to {', '.join(to)};" for kind in LEAKS))


def test_default_privileges_give_nothing(empty: str, mode: Mode, roles: Roles) -> None:
    leak(empty, "public", role := roles.make())
    databases.install(empty, mode)
    assert rights(empty, role) == set()
    with psycopg.connect(as_user(empty, role), autocommit=True) as connection:
        for statement in ("select outbox.version()", "select from outbox.message", "create table outbox.mine ()"):
            assert refused(connection, statement) == "42501"
        assert refused(connection, "create temporary table mine (m outbox.claimed_message)") == "42501"
    with databases.database(SERVER) as reference:
        databases.install(reference, mode)
        assert_same(fingerprint(reference), fingerprint(empty))
    # Nor do they on tables that are made later.
    psql(empty, text="select outbox.configure('retention', '7 days'); select outbox.cleanup();")
    assert int(query(empty, "select count(*) from pg_inherits where inhparent = 'outbox.archive'::regclass")) > 1
    assert rights(empty, role) == set()


def test_owner_needs_no_superuser(empty: str, mode: Mode, roles: Roles) -> None:
    owner, admin, shop = roles.make("owner"), roles.make("admin"), roles.make("shop")
    query(SERVER, f"grant create on database {urlsplit(empty).path[1:]} to {owner}")
    databases.install(as_user(empty, owner), mode)
    query(as_user(empty, owner), f"select outbox.grant_admin('{admin}')")
    # An admin gives rights, and has none of those he gives.
    query(as_user(empty, admin), f"select outbox.grant_emit('{shop}')")
    assert query(as_user(empty, shop), "select outbox.emit('order.created', '{}')") == "1"
    with psycopg.connect(as_user(empty, admin), autocommit=True) as connection:
        assert refused(connection, "select outbox.emit('order.created', '{}')") == "42501"
    with psycopg.connect(as_user(empty, shop), autocommit=True) as connection:
        assert refused(connection, f"select outbox.grant_relay('{shop}')") == "42501"
    query(as_user(empty, admin), f"select outbox.revoke_emit('{shop}')")
    assert rights(empty, shop) == set()


def test_renamed_role_keeps_its_part(dsn: str, roles: Roles) -> None:
    query(dsn, f"select outbox.grant_relay('{(role := roles.make())}')")
    before = rights(dsn, role)
    query(dsn, f"alter role {role} rename to {role}_new")
    roles.made.append(f"{role}_new")
    assert granted(dsn, f"{role}_new") == {"relay"}
    query(dsn, "insert into outbox.access default values")
    assert rights(dsn, f"{role}_new") == before
    # Whoever takes the old name takes nothing else.
    query(dsn, f"create role {role}")
    query(dsn, "insert into outbox.access default values")
    assert rights(dsn, role) == set()


def test_dropped_role_leaves_nothing(dsn: str, roles: Roles) -> None:
    role = roles.make()
    query(dsn, f"select outbox.grant_emit('{role}'), outbox.grant_admin('{role}')")
    done = psql(dsn, "-c", f"drop role {role}", check=False)
    assert "cannot be dropped because some objects depend on it" in done.stderr
    query(dsn, f"drop owned by {role}")
    assert (granted(dsn, role), rights(dsn, role)) == (set(), set())
    query(dsn, f"drop role {role}")
    query(dsn, "insert into outbox.access default values")


def test_two_grants_at_once(dsn: str, roles: Roles) -> None:
    """Unserialised, the second to change a function's entry in the catalog fails."""
    one, other = roles.make(), roles.make()
    errors: list[BaseException] = []

    def grant() -> None:
        try:
            query(dsn, f"select outbox.grant_emit('{other}')")
        except RuntimeError as error:
            errors.append(error)

    with psycopg.connect(dsn) as first:
        first.execute(f"select outbox.grant_emit('{one}')".encode())
        thread = threading.Thread(target=grant)
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join()
    assert not errors
    assert rights(dsn, one) == rights(dsn, other) != set()


def grant_all(dsn: str, roles: Roles) -> dict[str, str]:
    """A role for each part; one of them has two."""
    made = {part: roles.make(part) for part in PARTS}
    psql(dsn, text="".join(f"select outbox.grant_{part}('{role}');" for part, role in made.items()))
    query(dsn, f"select outbox.grant_monitor('{made['admin']}')")
    return made


def state(dsn: str, roles: Roles) -> dict[str, tuple[set[str], set[str]]]:
    return {role: (granted(dsn, role), rights(dsn, role)) for role in roles.made}


def test_restored_keeps_grants(installed: str, roles: Roles) -> None:
    grant_all(installed, roles)
    with databases.database(SERVER) as restored:
        restore(installed, restored)
        assert state(restored, roles) == state(installed, roles)
        assert_same(fingerprint(installed), fingerprint(restored))


def two_more_functions(tree: Path) -> str:
    access = tree / "sql/functions/70_access.sql"
    for part in ("emit", "relay"):
        edit(access, f"('{part}', array['version',", f"('{part}', array['version', '{part}_more',")
        function = f"\ncreate or replace function outbox.{part}_more() returns integer language sql as 'select 1';\n"
        access.write_text(access.read_text() + function)
    return "-- locks: none\n"


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[Releases]:
    with made_up(tmp_path, lambda _: None, two_more_functions) as made:
        yield made


def test_upgrade_keeps_grants_and_nothing_else(empty: str, mode: Mode, releases: Releases, roles: Roles) -> None:
    releases.install(empty, mode)
    parts = grant_all(empty, roles)
    before = state(empty, roles)
    # By hand, to somebody who has no part and to somebody who has one; and what the upgrade creates leaks.
    stranger = roles.make("stranger")
    by_hand = (
        (stranger, "message", "claim_batch", "claimed_message"),
        (parts["emit"], "dedup", "hello", "cleanup_result"),
    )
    for role, table, function, kind in by_hand:
        query(empty, f"grant select on outbox.{table} to {role}")
        query(empty, f"grant execute on function outbox.emit, outbox.{function} to {role} with grant option")
        query(empty, f"grant select (body), update (body) on outbox.archive to {role}")
        query(empty, f"grant usage on type outbox.{kind} to {role}")
    query(empty, f"grant usage on schema outbox to {stranger}")
    third = roles.make("third")
    query(as_user(empty, stranger), f"grant execute on function outbox.claim_batch to {third}")
    # Taking this back would take the record with it.
    query(empty, f"grant select on outbox.access to {parts['relay']}")
    leak(empty, stranger, parts["emit"], "public")

    releases.upgrade(empty, mode)
    assert rights(empty, stranger) == set()
    with psycopg.connect(as_user(empty, parts["emit"]), autocommit=True) as connection:
        assert refused(connection, "select body from outbox.archive") == "42501"
        assert refused(connection, "select outbox.relay_more()") == "42501"
    more = {parts[part]: {f"execute routine outbox.{part}_more()"} for part in ("emit", "relay")}
    more[parts["relay"]].add("select table outbox.access")
    after = {role: (granted, rights | more.get(role, set())) for role, (granted, rights) in before.items()}
    assert state(empty, roles) == after | {stranger: (set(), set()), third: (set(), set())}

    # What an extension's script grants would be left out by pg_dump.
    with databases.database(SERVER) as restored:
        if mode == "extension":
            # A dump says only that the extension is to exist, and the server knows another version as the newest.
            query(restored, f"create extension outbox version '{releases.new}'")
        restore(empty, restored)
        assert state(restored, roles) == state(empty, roles)


def test_upgrade_without_triggers_keeps_grants(empty: str, mode: Mode, releases: Releases, roles: Roles) -> None:
    releases.install(empty, mode)
    query(empty, f"select outbox.grant_emit('{(role := roles.make())}')")
    query(SERVER, f"alter database {urlsplit(empty).path[1:]} set session_replication_role = replica")
    releases.upgrade(empty, mode)
    assert "execute routine outbox.emit_more()" in rights(empty, role)


def test_upgrade_and_uninstall_in_one_transaction(dsn: str) -> None:
    """With nobody to give rights to, no trigger is left pending."""
    with psycopg.connect(dsn) as connection:
        connection.execute((ROOT / "sql/grants.sql").read_text().encode())
        connection.execute("drop schema outbox cascade")
