"""An upgrade ends where a fresh install begins, keeps every row and every right, and never blocks an emit for long."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest

import build
import databases
import releases as made
from databases import PARTS, ROOT, SERVER, Roles, as_user, assert_same, fingerprint, psql, query, restore
from harness import eventually
from releases import Releases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from databases import Mode

TOKENS = [f"00000000-0000-0000-0000-00000000000{n}" for n in range(5)]


@pytest.fixture
def next_release(tmp_path: Path) -> Iterator[Releases]:
    with made.all_kinds(tmp_path) as releases:
        yield releases


@pytest.fixture(params=["made up", *made.real()], ids=lambda one: one if isinstance(one, str) else f"from {one.old}")
def releases(request: pytest.FixtureRequest) -> Releases:
    """Something of every kind changes; and, once there is a release, the real upgrades to this tree."""
    if isinstance(request.param, Releases):
        return request.param
    chosen: Releases = request.getfixturevalue("next_release")
    return chosen


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    return done.stderr


# --- the same catalog


def test_upgraded_equals_fresh(empty: str, mode: Mode, releases: Releases) -> None:
    releases.install(empty, mode)
    releases.upgrade(empty, mode)
    assert query(empty, "select outbox.version()") == releases.new
    with databases.database(SERVER) as fresh, databases.database(SERVER) as restored:
        releases.install(fresh, mode, releases.new)
        assert_same(fingerprint(fresh), fingerprint(empty))
        if mode == "extension":
            query(restored, f"create extension outbox version '{releases.new}'")
        restore(empty, restored)
        assert_same(fingerprint(fresh), fingerprint(restored))


def test_both_ways_are_alike(empty: str, releases: Releases) -> None:
    with databases.database(SERVER) as other:
        for dsn, mode in ((empty, "extension"), (other, "plain")):
            releases.install(dsn, mode)  # type: ignore[arg-type]
            releases.upgrade(dsn, mode)  # type: ignore[arg-type]
        assert_same(fingerprint(empty, marks=False), fingerprint(other))


def test_something_of_every_kind_has_changed(empty: str, mode: Mode, next_release: Releases) -> None:
    """What the comparisons above are about."""
    next_release.install(empty, mode)
    before = set(fingerprint(empty))
    next_release.upgrade(empty, mode)
    changed = before ^ set(fingerprint(empty))
    for begins in (
        "column outbox.message.note",
        "index outbox.message_note",
        "relation outbox.setting: ",
        "relation outbox.extra: ",
        "sequence outbox.extra_a_seq",
        "column outbox.cleanup_result.extra",
        "routine outbox.same()",
        "routine outbox.gone()",
        "routine outbox.resigned(integer):",
        "routine outbox.resigned(integer,text)",
        "routine outbox.added()",
        *(["dump mark outbox.extra:", "dump mark outbox.extra_a_seq"] if mode == "extension" else []),
    ):
        assert any(line.startswith(begins) for line in changed), begins
    values = query(empty, "select outbox.same(), outbox.retyped(), outbox._value_of('added')")
    assert values == "2|two|on"


def test_owner_stays_the_owner(empty: str, mode: Mode, releases: Releases, roles: Roles) -> None:
    """A superuser upgrades what another role owns: functions made by the upgrade must not get a superuser's rights."""
    owner = roles.make("owner")
    query(empty, f"grant create on database {urlsplit(empty).path[1:]} to {owner}")
    releases.install(as_user(empty, owner), mode)
    # In a transaction that goes on, as before.
    script = "".join(
        f"\\i {argument}\n" if argument.startswith("/") else f"{argument};\n"
        for argument in releases.statements(mode)[1::2]
    )
    if mode == "extension":
        shown = psql(
            empty, text=f"begin; set local lock_timeout = '7s'; {script} show role; show lock_timeout; commit;"
        )
        assert shown.stdout.split() == ["none", "7s"]
    else:
        psql(empty, text=script)
    with databases.database(SERVER) as fresh:
        releases.install(fresh, mode, releases.new)
        assert_same(fingerprint(fresh), fingerprint(empty))
    assert query(empty, "select count(*) from pg_proc where pronamespace = 'outbox'::regnamespace"
                 f" and proowner <> '{owner}'::regrole") == "0"  # fmt: skip


def test_others_may_not(empty: str, next_release: Releases, roles: Roles) -> None:
    stranger = roles.make("stranger")
    next_release.install(empty, "plain")
    query(empty, f"select outbox.grant_emit('{stranger}')")
    before = fingerprint(empty)
    script = next_release.scripts[0].read_text()
    done = psql(empty, "-v", "VERBOSITY=verbose", text=f"set session authorization {stranger};\n{script}", check=False)
    assert "OB090: not upgraded: outbox belongs to role " in error_of(done)
    assert f"for which role {stranger} may not act" in done.stderr
    assert_same(before, fingerprint(empty))


# --- rows and rights


SEED = """
select outbox.configure('retention', 'forever');
select outbox.emit('archived', '1', key => 'a', dedup_key => 'archived once');
select outbox.mark_sent('{0}', array(select c.id from outbox.claim_batch('{0}') as c));
select outbox.configure('on_dead', 'park');
select outbox.emit('parked head', '1', key => 'p'), outbox.emit('parked', '2', key => 'p');
select outbox.emit('failing', '1', key => 'f'), outbox.emit('held', '2', key => 'f'), outbox.emit('backing off', '1');
select count(*) from outbox.claim_batch('{1}');
select outbox.mark_failed('{1}', array(select m.id from outbox.message as m where m.routing_key = 'parked head'),
    array['no'], array['rejected']);
select outbox.mark_failed('{1}', m.ids, array['no', 'no'], null, array[interval '1 h', interval '1 h'])
from (select array_agg(m.id) as ids from outbox.message as m where m.routing_key in ('failing', 'backing off')) as m;
select outbox.release_batch('{1}');
select outbox.configure('on_dead', 'continue');
select outbox.emit('dead', '1');
select outbox.mark_failed('{2}', array(select c.id from outbox.claim_batch('{2}') as c), array['no'],
    array['rejected']);
select outbox.emit('in flight', '1', key => 'i'), outbox.emit('in flight', '2', key => 'j');
select count(*) from outbox.claim_batch('{3}', lease => '1 h', relay => outbox.hello('old'));
select outbox.emit('ready', '1'), outbox.emit('ready', '2', key => 'k', headers => '{{"h": 1}}', expires_in => '1 h');
select outbox.emit('delayed', '1', delay => '1 h', dedup_key => 'delayed once');
"""
STATES = {
    ("archived", "sent"),
    ("parked head", "dead"),
    ("parked", "parked"),
    ("failing", "retrying"),
    ("held", "waiting"),
    ("backing off", "retrying"),
    ("dead", "dead"),
    ("in flight", "in_flight"),
    ("ready", "waiting"),
    ("delayed", "scheduled"),
}


def columns(db: psycopg.Connection[Any]) -> dict[str, str]:
    """By table, all but access, which notes upgrades."""
    return dict(
        db.execute(
            "select c.oid::regclass::text, string_agg(quote_ident(a.attname), ', ' order by a.attname)"
            " from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
            " where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'r' and c.relname <> 'access'"
            " group by c.oid"
        ).fetchall()
    )


def rows(db: psycopg.Connection[Any], of: dict[str, str]) -> dict[str, list[Any]]:
    return {
        table: db.execute(f"select row({names})::text from {table} order by 1".encode()).fetchall()
        for table, names in of.items()
    }


def statuses(db: psycopg.Connection[Any]) -> set[Any]:
    return set(db.execute("select routing_key, status from outbox.message_status").fetchall())


def rights(dsn: str) -> set[str]:
    return {line for line in fingerprint(dsn) if line.startswith("privilege ")}


def test_rows_and_rights_survive(empty: str, mode: Mode, releases: Releases, roles: Roles) -> None:
    releases.install(empty, mode)
    parts = {part: roles.make(part) for part in PARTS}
    for part, role in parts.items():
        query(empty, f"select outbox.grant_{part}('{role}')")
    with psycopg.connect(empty, autocommit=True) as db:
        for statement in SEED.format(*TOKENS).split(";\n"):
            db.execute(statement.encode())
        known = columns(db)
        before = rows(db, known)
        assert statuses(db) == STATES
        assert {name for name, kept in before.items() if kept} >= {
            f"outbox.{name}" for name in ("dead_letter", "dedup", "held_key", "lane", "message", "relay", "setting")
        }
        # Its session goes on: what it has planned is planned anew.
        releases.upgrade(empty, mode)
        assert rows(db, known) == before
        brought = {table: names for table, names in columns(db).items() if table not in known}
        # They begin as in a fresh install: empty.
        assert not any(rows(db, brought).values())
        assert statuses(db) == STATES

        # And all of it goes on: what is in hand is settled, what is dead returns, the rest leaves.
        settled = db.execute(
            "select outbox.mark_sent(%s, array(select id from outbox.message where routing_key = 'in flight'))",
            [TOKENS[3]],
        ).fetchone()
        assert settled == (2,)
        assert db.execute("select outbox.requeue_dead(array(select d.id from outbox.dead_letter as d))").fetchone() == (
            2,
        )
        assert db.execute(
            "select outbox.emit('again', '1', dedup_key => 'archived once')"
            " = (select id from outbox.archive where routing_key = 'archived')"
        ).fetchone() == (True,)
        db.execute("select pg_sleep(0.11)")  # claims look for what is due, as the dead that returned are, every 100 ms
        claimed = db.execute("select routing_key from outbox.claim_batch(%s)", [TOKENS[4]]).fetchall()
        assert {name for (name,) in claimed} >= {"ready", "dead"}
        db.execute("select outbox.cleanup()")

    # The rights of each part are those of a fresh install, whatever was dropped and made again.
    with databases.database(SERVER) as fresh:
        releases.install(fresh, mode, releases.new)
        for part, role in parts.items():
            query(fresh, f"select outbox.grant_{part}('{role}')")
        query(fresh, "select outbox.configure('retention', 'forever')")
        assert_same(sorted(rights(fresh)), sorted(rights(empty)))


def test_an_old_dump(empty: str, mode: Mode, releases: Releases) -> None:
    """It is restored into its own version, and that is upgraded."""
    releases.install(empty, mode)
    with psycopg.connect(empty, autocommit=True) as db, databases.database(SERVER) as restored:
        for statement in SEED.format(*TOKENS).split(";\n"):
            db.execute(statement.encode())
        if mode == "extension":
            releases.install(restored, mode)
        restore(empty, restored)
        releases.upgrade(restored, mode)
        with psycopg.connect(restored) as other:
            # An extension's leases are not dumped.
            lost = {("in flight", "in_flight")} if mode == "extension" else set()
            assert statuses(other) == STATES - lost | {("in flight", "waiting") for _ in lost}


# --- locks


# From weak to strong. What is left out, emitters take as well.
MODES = ["share update exclusive", "share", "share row exclusive", "exclusive", "access exclusive"]
EVERY = {"outbox.access": "share row exclusive", "outbox.message_status": "access exclusive"}


def strongest(locks: list[tuple[str, str]]) -> dict[str, str]:
    return {name: mode for mode in MODES for name, one in locks if one == mode}


def taken(db: psycopg.Connection[Any], pid: int, known: list[int]) -> dict[str, str]:
    """The locks on tables and views; what the upgrade makes is nobody's yet."""
    found = db.execute(
        "select c.oid::regclass::text, l.mode from pg_locks as l join pg_class as c on c.oid = l.relation"
        " where l.pid = %s and c.relkind in ('r', 'p', 'v', 'm') and c.oid = any (%s)"
        " and c.relnamespace = 'outbox'::regnamespace",
        [pid, known],
    ).fetchall()
    words = [(name, re.sub(r"(?<!^)(?=[A-Z])", " ", mode.removesuffix("Lock")).lower()) for name, mode in found]
    return strongest(words)


def test_locks_are_those_listed(empty: str, mode: Mode, releases: Releases) -> None:
    releases.install(empty, mode)
    listed = list(EVERY.items())
    texts = build.Tree(releases.tree).bodies()
    for step in releases.steps:
        lines = re.findall(r"^-- locks: (.*)$", texts[step], re.MULTILINE)
        assert len(lines) == 1
        listed += re.findall(r"(outbox\.\w+) in ([a-z ]+)", lines[0])
    with psycopg.connect(empty) as db, psycopg.connect(empty, autocommit=True) as watcher:
        known = [row[0] for row in watcher.execute("select oid::bigint from pg_class")]
        upgrade_without_commit(db, mode, releases)
        assert taken(watcher, db.info.backend_pid, known) == strongest(listed)
        db.rollback()


def test_locks_are_written_down() -> None:
    """Those of every upgrade in the documentation, those of each step in the change log."""
    every = {f"{table} in {mode}" for table, mode in EVERY.items()}
    page, log = ((ROOT / name).read_text() for name in ("docs/upgrading.md", "CHANGELOG.md"))
    assert every == set(re.findall(r"`(outbox\.\w+ in [a-z ]+)`", page))
    for name, body in build.Tree(ROOT).bodies().items():
        if "--" in name:
            section = log.partition(f"\n## {name.partition('--')[2]} ")[2].partition("\n## ")[0]
            listed = re.findall(r"^-- locks: (.*)$", body, re.MULTILINE)[0]
            assert f"Locks: {listed}." in section


def upgrade_without_commit(db: psycopg.Connection[Any], mode: Mode, releases: Releases) -> None:
    if mode == "extension":
        db.execute(f"alter extension outbox update to '{releases.new}'".encode())
        return
    for script in releases.scripts:
        db.execute(re.sub(r"^(\\|begin |commit;).*\n", "", script.read_text(), flags=re.MULTILINE).encode())


@pytest.mark.parametrize("table", ["outbox.message", "outbox.message_status", "outbox.access"])
def test_a_long_reader_stops_the_upgrade_not_emits(empty: str, mode: Mode, next_release: Releases, table: str) -> None:
    next_release.install(empty, mode)
    before = fingerprint(empty)
    with psycopg.connect(empty) as reader:
        reader.execute(f"select * from {table}".encode())
        if table == "outbox.access":
            reader.execute("lock table outbox.access in share mode")
        slowest, done = 0.0, threading.Event()

        def emit() -> None:
            nonlocal slowest
            with psycopg.connect(empty, autocommit=True) as db:
                while not done.is_set():
                    begun = time.monotonic()
                    db.execute("select outbox.emit('a', '1')")
                    slowest = max(slowest, time.monotonic() - begun)

        thread = threading.Thread(target=emit)
        thread.start()
        begun = time.monotonic()
        result = psql(empty, "-v", "VERBOSITY=verbose", *next_release.statements(mode), check=False)
        took = time.monotonic() - begun
        done.set()
        thread.join()
        error = error_of(result)
        assert f"OB093: not upgraded: {table} is in use by process " in error
        assert str(reader.info.backend_pid) in error
        assert "HINT:  Nothing has changed. Try again" in error
    assert 2 <= took < 10
    # What emitters need is locked last.
    assert slowest < (5 if table == "outbox.message" else 1)
    assert_same(before, fingerprint(empty))
    next_release.upgrade(empty, mode)


def test_as_patient_as_told(empty: str, next_release: Releases) -> None:
    next_release.install(empty, "plain")
    with psycopg.connect(empty) as reader:
        reader.execute("select from outbox.message")
        script = next_release.scripts[0].read_text()
        begun = time.monotonic()
        done = psql(empty, text=f"set lock_timeout = '100ms';\n{script}", check=False)
        assert "not upgraded: outbox.message is in use by process " in error_of(done)
        assert time.monotonic() - begun < 1.5


# --- whole, once, in order


def test_twice(empty: str, mode: Mode, releases: Releases) -> None:
    releases.install(empty, mode)
    releases.upgrade(empty, mode)
    before = fingerprint(empty)
    done = psql(empty, "-v", "VERBOSITY=verbose", *releases.statements(mode), check=False)
    if mode == "extension":
        # The server's own answer.
        assert f'version "{releases.new}" of extension "outbox" is already installed' in done.stderr
    else:
        assert f"OB090: outbox in this database has version {releases.new}, and this upgrades " in error_of(done)
    assert_same(before, fingerprint(empty))


def test_another_version(empty: str, mode: Mode, next_release: Releases) -> None:
    """This tree's version is installed, from which no step leads on."""
    databases.install(empty, mode)
    before = fingerprint(empty)
    done = psql(empty, "-v", "VERBOSITY=verbose", *next_release.statements(mode), check=False)
    version = build.Tree(ROOT).version
    if mode == "extension":
        assert f'has no update path from version "{version}" to version "{next_release.new}"' in error_of(done)
    else:
        assert (
            f"OB090: outbox in this database has version {version}, and this upgrades {next_release.old}"
            in error_of(done)
        )
        assert "HINT:  Take the upgrades from that version on" in done.stderr
    assert_same(before, fingerprint(empty))


def test_an_extension_that_is_not_what_it_says(empty: str, next_release: Releases) -> None:
    """The server goes by its own record; the script looks."""
    databases.install(empty, "extension")
    query(empty, f"update pg_extension set extversion = '{next_release.old}' where extname = 'outbox'")
    done = psql(empty, "-v", "VERBOSITY=verbose", *next_release.statements("extension"), check=False)
    assert "OB090: outbox in this database has version " in error_of(done)


def test_two_at_once(empty: str, mode: Mode, next_release: Releases) -> None:
    next_release.install(empty, mode)
    command = [databases.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *next_release.statements(mode), empty]
    with psycopg.connect(empty) as gate, psycopg.connect(empty, autocommit=True) as watcher:
        gate.execute("select pg_advisory_xact_lock(hashtextextended('outbox install', 0))")
        pipe = subprocess.PIPE
        both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
        waiting = (
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        eventually(lambda: watcher.execute(waiting).fetchone() == (2,), "both")
    errors = [one.communicate(timeout=60)[1] for one in both]
    assert sorted(error == "" for error in errors) == [False, True]
    # Of an extension the server itself writes down the new version first.
    refusal = f"outbox in this database has version {next_release.new}, and this upgrades {next_release.old}"
    assert ("tuple concurrently updated" if mode == "extension" else refusal) in "".join(errors)
    with databases.database(SERVER) as fresh:
        next_release.install(fresh, mode, next_release.new)
        assert_same(fingerprint(fresh), fingerprint(empty))


@pytest.mark.parametrize("share", range(1, 10, 2))
def test_interrupted(empty: str, next_release: Releases, share: int) -> None:
    """The input ends early, and at once the server process is gone: nothing has changed."""
    next_release.install(empty, "plain")
    before = fingerprint(empty)
    lines = next_release.scripts[0].read_text().splitlines(keepends=True)
    psql(empty, text="".join(lines[: len(lines) * share // 10]), check=False)
    assert_same(before, fingerprint(empty))


def test_killed(empty: str, mode: Mode, next_release: Releases) -> None:
    """The server process dies with everything done but the commit."""
    next_release.install(empty, mode)
    before = fingerprint(empty)
    with psycopg.connect(empty, autocommit=True) as killer:
        db = psycopg.connect(empty)
        upgrade_without_commit(db, mode, next_release)
        assert db.execute("select outbox.version()").fetchone() == (next_release.new,)
        killer.execute("select pg_terminate_backend(%s, 10000)", [db.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            db.commit()
        db.close()
    assert_same(before, fingerprint(empty))
    next_release.upgrade(empty, mode)
