"""Installing and removing: refused where it must be, whole or not at all, and nothing that waits is lost."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest

import databases
from databases import BUILD, SERVER, Roles, as_user, assert_same, fingerprint, psql, query, restore
from harness import eventually

if TYPE_CHECKING:
    from databases import Mode

INSTALL = BUILD / "outbox-install.sql"
UNINSTALL = BUILD / "outbox-uninstall.sql"
SCRIPT = INSTALL.read_text().splitlines(keepends=True)


def try_install(dsn: str, mode: Mode) -> str:
    """Returns the error with its code; empty when it worked."""
    how = ["-c", "create extension outbox"] if mode == "extension" else ["-f", str(INSTALL)]
    done = psql(dsn, "-v", "VERBOSITY=verbose", *how, check=False)
    return done.stderr


def state(dsn: str) -> str:
    return query(
        dsn,
        "select concat_ws(' ', (select 'schema' from pg_namespace where nspname = 'outbox'),"
        " (select 'extension' from pg_extension where extname = 'outbox'))",
    )


def emit(dsn: str, count: int = 1) -> list[int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return [
            int(row[0])
            for n in range(count)
            for row in connection.execute("select outbox.emit('order.created', %s::jsonb)", [f'{{"n": {n}}}'])
        ]


def start_psql(dsn: str, *arguments: str) -> subprocess.Popen[str]:
    command = [databases.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *arguments, dsn]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def activity(dsn: str, condition: str) -> int:
    name = urlsplit(dsn).path[1:]
    return int(query(SERVER, f"select count(*) from pg_stat_activity where datname = '{name}' and {condition}"))


def test_version_is_the_control_files(installed: str) -> None:
    control = (databases.ROOT / "outbox.control").read_text()
    assert f"default_version = '{query(installed, 'select outbox.version()')}'" in control


def test_says_one_line(empty: str) -> None:
    done = psql(empty, "-f", INSTALL)
    version = query(empty, "select outbox.version()")
    assert (done.stdout, done.stderr) == (f"outbox installed: {version}\n", "")


@pytest.mark.parametrize("again", databases.MODES)
def test_refuses_a_second_time(installed: str, mode: Mode, again: Mode) -> None:
    before = fingerprint(installed)
    error = try_install(installed, again)
    if mode == again == "extension":
        # The server's own answer, before our script runs.
        assert '42710: extension "outbox" already exists' in error
    else:
        how = "as an extension" if mode == "extension" else "by outbox-install.sql"
        assert f"OB090: schema outbox exists in this database: outbox is installed {how}" in error
        assert "HINT:  Upgrade what is there, remove it with outbox-uninstall.sql" in error
    assert_same(before, fingerprint(installed))


def test_refuses_somebody_elses_schema(empty: str, mode: Mode) -> None:
    query(empty, "create schema outbox")
    error = try_install(empty, mode)
    assert "OB090: schema outbox exists in this database: it is not from this package" in error
    assert state(empty) == "schema"


def test_refuses_another_encoding(mode: Mode) -> None:
    with databases.database(SERVER, template="template0", options="encoding 'SQL_ASCII' locale 'C'") as dsn:
        error = try_install(dsn, mode)
        assert "OB091: outbox needs a database with encoding UTF8" in error
        assert "has SQL_ASCII" in error
        assert "HINT:  AMQP text is UTF-8." in error
        assert state(dsn) == ""


@pytest.fixture
def plain_user(empty: str, roles: Roles) -> str:
    """A DSN for the empty database as a role that may create schemas in it, and no more."""
    role = roles.make()
    query(SERVER, f"grant create on database {urlsplit(empty).path[1:]} to {role}")
    return as_user(empty, role)


def test_needs_no_superuser(empty: str, plain_user: str, mode: Mode) -> None:
    assert try_install(plain_user, mode) == ""
    assert emit(plain_user) != []
    with databases.database(SERVER) as reference:
        databases.install(reference, mode)
        assert_same(fingerprint(reference), fingerprint(empty))
    done = psql(plain_user, "-v", "force=1", "-f", UNINSTALL)
    assert done.stdout.startswith("outbox removed")
    assert state(empty) == ""


def test_needs_the_right_to_create_a_schema(empty: str, plain_user: str, mode: Mode) -> None:
    at = urlsplit(plain_user)
    query(SERVER, f"revoke create on database {at.path[1:]} from {at.username}")
    assert "permission denied" in try_install(plain_user, mode)
    assert state(empty) == ""


@pytest.mark.parametrize("share", range(1, 10))
def test_interrupted_leaves_nothing(empty: str, share: int) -> None:
    """The input ends early, at a tenth of the script, two tenths..."""
    part = "".join(SCRIPT[: len(SCRIPT) * share // 10])
    psql(empty, text=part, check=False)
    assert state(empty) == ""
    assert try_install(empty, "plain") == ""


@pytest.mark.parametrize("killed", ["client", "server"])
def test_killed_leaves_nothing(empty: str, killed: str) -> None:
    """psql or its server process dies after the last statement before the commit."""
    end = SCRIPT.index("commit;\n")
    client = start_psql(empty)
    assert client.stdin
    client.stdin.write("".join(SCRIPT[:end]) + "\\echo here\n")
    client.stdin.flush()
    assert client.stdout
    assert client.stdout.readline() == "here\n"
    assert activity(empty, "state = 'idle in transaction'") == 1
    if killed == "client":
        client.kill()
    else:
        query(
            SERVER,
            f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{urlsplit(empty).path[1:]}'"
            " and state = 'idle in transaction'",
        )
        client.stdin.write("commit;\n")
    client.communicate(timeout=30)
    assert client.returncode != 0
    eventually(lambda: activity(empty, "backend_type = 'client backend'") == 0, "the end of the server process")
    assert state(empty) == ""


@pytest.mark.parametrize("other", databases.MODES)
def test_two_installers_at_once(empty: str, other: Mode) -> None:
    with psycopg.connect(empty) as gate:
        gate.execute("select pg_advisory_xact_lock(hashtextextended('outbox install', 0))")
        how = ["-c", "create extension outbox"] if other == "extension" else ["-f", str(INSTALL)]
        clients = [start_psql(empty, "-f", str(INSTALL)), start_psql(empty, *how)]
        eventually(lambda: activity(empty, "wait_event = 'advisory'") == len(clients), "both")
    errors = [client.communicate(timeout=60)[1] for client in clients]
    assert sorted(error == "" for error in errors) == [False, True]
    assert "ERROR:  schema outbox exists in this database: outbox is installed" in "".join(errors)
    assert emit(empty) != []


def test_hostile_session_settings(empty: str) -> None:
    """The plain installer does not depend on the settings of whoever runs it."""
    name = urlsplit(empty).path[1:]
    for setting in (
        "search_path = public, pg_catalog",
        "standard_conforming_strings = off",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "check_function_bodies = off",
        "client_min_messages = debug1",
    ):
        query(SERVER, f"alter database {name} set {setting}")
    # Found before the server's own by that path.
    psql(empty, text="begin read write; create domain public.text as pg_catalog.text; commit;")
    done = psql(empty, "-f", INSTALL)
    assert done.stdout.startswith("outbox installed: ")
    assert done.stderr == ""
    with databases.database(SERVER) as reference:
        databases.install(reference, "plain")
        assert_same(fingerprint(reference), fingerprint(empty))


def test_extension_script_is_not_for_psql(empty: str) -> None:
    script = next(path for path in BUILD.glob("outbox--*.sql") if path.name.count("--") == 1)
    done = psql(empty, "-f", script, check=False)
    assert done.stdout == 'Use "create extension outbox" to load this file.\n'
    assert state(empty) == ""


def test_uninstall_and_again(installed: str, mode: Mode) -> None:
    before = fingerprint(installed)
    done = psql(installed, "-f", UNINSTALL)
    name, what = urlsplit(installed).path[1:], "extension" if mode == "extension" else "schema"
    assert done.stdout == f"outbox removed: the {what} in database {name}; waiting messages discarded: 0\n"
    assert done.stderr == ""
    assert state(installed) == ""
    databases.install(installed, mode)
    assert_same(before, fingerprint(installed))


def test_uninstall_needs_something_to_remove(empty: str) -> None:
    done = psql(empty, "-v", "VERBOSITY=verbose", "-f", UNINSTALL, check=False)
    assert "OB090: outbox is not installed in database" in done.stderr


def test_uninstall_refuses_while_messages_wait(installed: str) -> None:
    emit(installed, 3)
    before = fingerprint(installed)
    done = psql(installed, "-v", "VERBOSITY=verbose", "-f", UNINSTALL, check=False)
    assert done.returncode != 0
    assert "OB092: not removed: messages waiting in outbox.message: 3" in done.stderr
    assert "HINT:  Let a relay send them, or discard them: psql -v force=1" in done.stderr
    assert_same(before, fingerprint(installed))
    assert query(installed, "select count(*) from outbox.message") == "3"

    done = psql(installed, "-v", "force=0", "-f", UNINSTALL, check=False)
    assert "not removed: messages waiting in outbox.message: 3" in done.stderr

    done = psql(installed, "-v", "force=1", "-f", UNINSTALL)
    assert done.stdout.endswith("; waiting messages discarded: 3\n")
    assert state(installed) == ""


def test_uninstall_refuses_while_there_are_dead_letters(installed: str) -> None:
    with psycopg.connect(installed, autocommit=True) as connection:
        emit(installed)
        claim = "00000000-0000-0000-0000-000000000001"
        connection.execute(
            "select outbox.mark_failed(%s, array(select c.id from outbox.claim_batch(%s) as c), '{no}', '{rejected}')",
            [claim, claim],
        )
    done = psql(installed, "-f", UNINSTALL, check=False)
    assert "not removed: messages in outbox.dead_letter: 1, in outbox.archive: none" in done.stderr
    assert query(installed, "select count(*) from outbox.dead_letter") == "1"
    done = psql(installed, "-v", "force=1", "-f", UNINSTALL)
    assert done.stdout.endswith("; waiting messages discarded: 0; dead letters discarded: 1\n")


def test_uninstall_sees_an_emit_that_is_under_way(installed: str) -> None:
    with psycopg.connect(installed) as emitter:
        emitter.execute("select outbox.emit('order.created', '{}')")
        client = start_psql(installed, "-f", str(UNINSTALL))
        eventually(lambda: activity(installed, "wait_event_type = 'Lock'") == 1, "an uninstall that waits")
    _, error = client.communicate(timeout=30)
    assert "not removed: messages waiting in outbox.message: 1" in error


def test_uninstall_refuses_while_others_need_it(installed: str) -> None:
    query(installed, "create view public.report as select m.routing_key from outbox.message as m")
    query(installed, "create table public.kept (message outbox.claimed_message)")
    done = psql(installed, "-v", "VERBOSITY=verbose", "-f", UNINSTALL, check=False)
    assert "OB092: not removed: other objects need outbox: " in done.stderr
    assert "view public.report" in done.stderr
    assert "column message of table public.kept" in done.stderr
    done = psql(installed, "-v", "force=1", "-f", UNINSTALL)
    assert "also dropped: " in done.stdout
    assert state(installed) == ""
    assert (
        query(installed, "select to_regclass('public.report') is null and to_regclass('public.kept') is not null")
        == "t"
    )


def test_dump_and_restore_loses_nothing(installed: str) -> None:
    ids = emit(installed, 5)
    rows = "select row(m.*)::text from outbox.message as m order by m.id"
    waiting = query(installed, rows)
    assert len(waiting.splitlines()) == len(ids)
    with databases.database(SERVER) as restored:
        restore(installed, restored)
        assert query(restored, rows) == waiting
        assert emit(restored) > [max(ids)]


def every_table(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """The rows of each table, but of those that are derived from the others."""
    tables = connection.execute(
        "select c.oid::regclass::text from pg_class as c where c.relnamespace = 'outbox'::regnamespace"
        " and c.relkind = 'r' and c.relname not in ('lane', 'horizon', 'tally', 'tally_minute')"
    ).fetchall()
    found = {}
    for (table,) in tables:
        rows = connection.execute(f"select t::text from {table} as t order by 1".encode()).fetchall()
        found[table] = [row[0] for row in rows]
    return found


def test_dump_and_restore_keeps_every_table(installed: str) -> None:
    """One row of our own making in each table: a table that is not marked would lose it."""
    with psycopg.connect(installed, autocommit=True) as connection, contextlib.ExitStack() as stack:
        connection.execute("set session_replication_role = replica")
        for table in every_table(connection):
            fill(connection, table)
        dumped = every_table(connection)
        assert all(dumped.values())
        restored = stack.enter_context(databases.database(SERVER))
        restore(installed, restored)
        with psycopg.connect(restored) as other:
            assert every_table(other) == dumped


def fill(connection: psycopg.Connection[Any], table: str) -> None:
    """Inserts a row with something in every column that must not be null and has no default."""
    columns = connection.execute(
        "select quote_ident(a.attname), case"
        " when a.atttypid = any ('{int2,int4,int8}'::regtype[]) then '1'"
        " when a.atttypid = any ('{text,name}'::regtype[]) then"
        "  coalesce((select substring(pg_get_constraintdef(c.oid) from '''([^'']+)''::text') from pg_constraint as c"
        "   where c.conrelid = a.attrelid and a.attnum = any (c.conkey) and c.contype = 'c' limit 1), 'x')"
        " when a.atttypid = 'timestamptz'::regtype then '2020-01-01'"
        " when a.atttypid = 'interval'::regtype then '1 s'"
        " when a.atttypid = 'bytea'::regtype then '\\x00'"
        " when a.atttypid = 'boolean'::regtype then 'true'"
        " when a.atttypid = 'jsonb'::regtype then '{}'"
        " when a.atttypid = 'uuid'::regtype then '00000000-0000-0000-0000-000000000001'"
        " end"
        " from pg_attribute as a where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped"
        " and a.attnotnull and not a.atthasdef and a.attidentity = ''",
        [table],
    ).fetchall()
    if columns:
        names, values = ", ".join(name for name, _ in columns), ", ".join("%s" for _ in columns)
        connection.execute(f"insert into {table} ({names}) values ({values})".encode(), [value for _, value in columns])
    else:
        connection.execute(f"insert into {table} default values".encode())
