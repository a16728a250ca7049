"""Nothing that others put in the way is taken for what the server ships: functions, operators, tables, types."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from access.story import EMITS, tell

import databases
from databases import SERVER, Roles, as_user, assert_same, fingerprint, psql, query

if TYPE_CHECKING:
    from databases import Mode

# For nearly every function and operator of the server one of the same name and types, which says so when it is called.
TRAP = """
create schema evil;
do $do$
declare
    v_one record;
begin
    for v_one in
        select p.proname, pg_get_function_identity_arguments(p.oid) as arguments,
            case when p.proretset then 'setof ' else '' end || p.prorettype::regtype as returns
        from pg_proc as p
        where p.pronamespace = 'pg_catalog'::regnamespace
          and p.prokind = 'f'
          and not exists (
              select
              from unnest(p.proargtypes || nullif(p.prorettype, 'void'::regtype)) as a (oid)
              join pg_type as t on t.oid = a.oid
              where t.typtype = 'p'
          )
          and p.provariadic = 0
    loop
        execute format(
            'create function evil.%I(%s) returns %s language plpgsql as %L',
            v_one.proname, v_one.arguments, v_one.returns,
            $$begin raise exception 'hijacked' using errcode = 'HIJAK'; end$$
        );
    end loop;
    for v_one in
        select o.oid, o.oprname, format_type(o.oprleft, null) as l, format_type(o.oprright, null) as r,
            format_type(o.oprresult, null) as result
        from pg_operator as o
        join pg_type as lt on lt.oid = o.oprleft
        join pg_type as rt on rt.oid = o.oprright
        where lt.typtype <> 'p' and rt.typtype <> 'p'
    loop
        execute format(
            'create function evil.operator_%s(%s, %s) returns %s language plpgsql as %L',
            v_one.oid, v_one.l, v_one.r, v_one.result,
            $$begin raise exception 'hijacked' using errcode = 'HIJAK'; end$$
        );
        execute format(
            'create operator evil.%s (leftarg = %s, rightarg = %s, function = evil.operator_%s)',
            v_one.oprname, v_one.l, v_one.r, v_one.oid
        );
    end loop;
end
$do$;
grant usage on schema evil to public;
"""
# Tables, views and types of the session that are called like those of the server and of the package.
TEMPORARY = """
do $do$
declare
    v_name name;
begin
    for v_name in
        select c.relname from pg_catalog.pg_class as c
        where c.relnamespace operator(pg_catalog.=) any (array['pg_catalog'::regnamespace, 'outbox'::regnamespace])
          and c.relkind in ('r', 'v', 'p')
        union
        select t.typname from pg_catalog.pg_type as t
        where t.typnamespace operator(pg_catalog.=) 'pg_catalog'::regnamespace and t.typtype = 'b' and t.typname !~ '^_'
    loop
        execute pg_catalog.format('create temporary table %I (hijacked pg_catalog.int4)', v_name);
    end loop;
end
$do$;
"""
PATHS = {
    "a schema before the server's": "set search_path = evil, pg_catalog",
    "tables and types of the session": TEMPORARY + "set search_path = pg_temp, pg_catalog",
    "both": TEMPORARY + "set search_path = evil, pg_temp, pg_catalog, outbox",
}


@pytest.fixture
def parts(dsn: str, roles: Roles) -> dict[str, str]:
    made = {part: roles.make(part) for part in ("emit", "relay", "admin")}
    psql(dsn, text="".join(f"select outbox.grant_{part}('{role}');" for part, role in made.items()))
    return made


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_hijacked(dsn: str, parts: dict[str, str], path: str) -> None:
    psql(dsn, text=TRAP)
    with databases.database(SERVER, template=urlsplit(dsn).path[1:]) as reference:
        expected = tell(reference, parts)
    assert tell(dsn, parts, PATHS[path]) == expected


def unpinned(dsn: str, parts: dict[str, str], change: str, path: str) -> set[str]:
    """The calls that are still answered when every function has another path."""
    psql(
        dsn,
        text=f"""
            do $do$
            declare
                v_one regprocedure;
            begin
                for v_one in select p.oid from pg_proc as p where p.pronamespace = 'outbox'::regnamespace loop
                    execute format('alter function %s {change}', v_one);
                end loop;
            end
            $do$
        """,
    )
    told = tell(dsn, parts, path)
    return {call for call, answer in told.items() if isinstance(answer, list) and "(" in call}


def test_the_trap_catches(dsn: str, parts: dict[str, str]) -> None:
    """Without the pinned path every function falls into it, but for those that name nothing, or find nothing."""
    psql(dsn, text=TRAP)
    answered = {"version()", "pause()", "dead_among('{1,2,3}')"}
    assert unpinned(dsn, parts, "reset search_path", PATHS["both"]) == answered


def test_the_trap_catches_a_path_without_pg_temp(dsn: str, parts: dict[str, str]) -> None:
    """Where it is not named, the session's own tables and types come first."""
    answered = unpinned(dsn, parts, "set search_path = pg_catalog", TEMPORARY)
    assert not answered & {EMITS[0], "arm_wakeup()", "hello('story') is null", "grant_emit('pg_monitor')"}


def test_installs_among_traps(empty: str, mode: Mode) -> None:
    psql(empty, text=TRAP)
    query(SERVER, f"alter database {urlsplit(empty).path[1:]} set search_path = evil, pg_catalog")
    databases.install(empty, mode)
    with databases.database(SERVER) as reference:
        databases.install(reference, mode)
        assert_same(fingerprint(reference), fingerprint(empty))


def test_nobody_prepares_the_schema(empty: str, mode: Mode, roles: Roles) -> None:
    """What somebody else made in advance is neither adopted nor changed."""
    attacker = roles.make("attacker")
    query(SERVER, f"grant create on database {urlsplit(empty).path[1:]} to {attacker}")
    psql(
        as_user(empty, attacker),
        text="create schema outbox; create table outbox.message (spy text);"
        " create function outbox.emit(text, jsonb) returns bigint language sql as 'select 1::bigint'",
    )
    before = fingerprint(empty)
    with pytest.raises(RuntimeError, match="schema outbox exists in this database: it is not from this package"):
        databases.install(empty, mode)
    assert_same(before, fingerprint(empty))


def test_emitters_do_not_reach_each_others_messages(dsn: str, roles: Roles) -> None:
    one, other = roles.make("one"), roles.make("other")
    query(dsn, f"select outbox.grant_emit('{one}'), outbox.grant_emit('{other}')")
    emitted = query(as_user(dsn, one), "select outbox.emit('order.created', '{}', delay => '1 h')")
    assert query(as_user(dsn, other), f"select outbox.cancel({emitted})") == "f"
    # Nor by taking on a role: what counts is who logged in.
    query(dsn, f"grant {one} to {other}")
    done = psql(as_user(dsn, other), text=f"set role {one}; select outbox.cancel({emitted});")
    assert done.stdout == "f\n"
    assert query(as_user(dsn, one), f"select outbox.cancel({emitted})") == "t"


def test_admin_cancels_for_others(dsn: str, roles: Roles) -> None:
    one, admin = roles.make("one"), roles.make("admin")
    query(dsn, f"select outbox.grant_emit('{one}'), outbox.grant_admin('{admin}')")
    emitted = query(as_user(dsn, one), "select outbox.emit('order.created', '{}', delay => '1 h')")
    assert query(as_user(dsn, admin), f"select outbox.cancel({emitted})") == "t"
