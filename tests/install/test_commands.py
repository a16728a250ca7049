"""`outbox install`, `upgrade`, `verify` and `uninstall`, as programs: what they do, what they print, how they end."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pytest

import build
import databases
import releases as made
from databases import PARTS, ROOT, SERVER, Roles, as_user, assert_same, fingerprint, psql, query
from harness import environment_with, on_terminal, run_outbox, run_outbox_here
from outbox.install import from_clone
from releases import Releases

if TYPE_CHECKING:
    from databases import Mode

VERSION = build.Tree(ROOT).version


@dataclass(frozen=True)
class Command:
    """`outbox ...` on one database; path is where Python finds it, if not in this tree."""

    dsn: str
    path: Path | None = None

    def environment(self) -> dict[str, str]:
        found = {"PYTHONPATH": str(self.path)} if self.path else {}
        return environment_with(OUTBOX_DSN=self.dsn, **found)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """What it says, on both channels; never the password."""
        run = run_outbox if self.path else run_outbox_here
        done = run(arguments, self.environment())
        said = done.output + done.log
        assert done.status == status, said
        assert "Traceback" not in said
        assert (urlsplit(self.dsn).password or "@") not in said
        return said

    def typed(self, *arguments: str, keys: str) -> tuple[int, str]:
        """On a terminal, where somebody types."""
        return on_terminal(arguments, self.environment(), keys)


Login = Callable[[], str]


@pytest.fixture
def login(roles: Roles) -> Login:
    """Makes roles that may log in, and nothing else, and whose names must be quoted."""
    return lambda: roles.add(f'"Outbox, test {secrets.token_hex(6)}"')


@pytest.fixture
def outbox(empty: str) -> Command:
    return Command(empty)


def as_role(dsn: str, role: str) -> str:
    return as_user(dsn, role.strip('"'))


def name_of(dsn: str) -> str:
    return urlsplit(dsn).path[1:]


# --- install


def test_install(outbox: Command, mode: Mode) -> None:
    how = ["--extension"] if mode == "extension" else []
    said = outbox("install", *how)
    assert said == f"outbox {VERSION} ({mode}) installed in database '{name_of(outbox.dsn)}'\n"
    with databases.database(SERVER) as reference:
        databases.install(reference, mode)
        assert_same(fingerprint(reference), fingerprint(outbox.dsn))
    for again in ([], ["--extension"]):
        assert f"has outbox {VERSION} ({mode}) already: `outbox upgrade`" in outbox("install", *again, status=2)


def test_install_in_a_hostile_session(outbox: Command) -> None:
    for setting in ("search_path = public, pg_catalog", "default_transaction_isolation = 'serializable'",
                    "default_transaction_read_only = on"):  # fmt: skip
        query(SERVER, f"alter database {name_of(outbox.dsn)} set {setting}")
    psql(outbox.dsn, text="begin read write; create domain public.text as pg_catalog.text; commit;")
    outbox("install")
    assert "is what was shipped" in outbox("verify")
    outbox("uninstall", "--yes")


def test_install_says_what_is_missing(outbox: Command, login: Login) -> None:
    other = replace(outbox, dsn=as_role(outbox.dsn, login()))
    said = other("install", status=2)
    assert "may not do this: permission denied for database" in said
    assert "grant create on database" in said
    assert "does not have the package outbox: run `outbox install`" in outbox("verify", status=2)
    assert "--dsn has a password in it" in outbox("install", "--dsn", outbox.dsn, status=2)


@pytest.fixture
def next_release(tmp_path: Path) -> Iterator[Releases]:
    with made.all_kinds(tmp_path) as releases:
        yield releases


@pytest.fixture
def newer(outbox: Command, next_release: Releases) -> Command:
    """The command of the made-up next release."""
    shutil.copytree(ROOT / "python/src", next_release.tree / "python/src")
    return replace(outbox, path=next_release.tree / "python/src")


def test_install_without_the_files(newer: Command, next_release: Releases) -> None:
    with away(f"outbox--{next_release.new}.sql", f"outbox--{next_release.steps[0]}.sql"):
        said = newer("install", "--extension", status=2)
    assert f"the server has no files of the extension outbox {next_release.new} (it has: " in said
    assert "put them there with `make install`, or leave out --extension" in said


@contextlib.contextmanager
def away(*files: str) -> Iterator[None]:
    """Files of the extension that the server does not have for a while."""
    folder = Path(os.environ["OUTBOX_EXTENSION_DIR"])
    texts = {folder / name: (folder / name).read_text() for name in files}
    for path in texts:
        path.unlink()
    yield
    for path, text in texts.items():
        path.write_text(text)


# --- upgrade


def test_upgrade(newer: Command, next_release: Releases, mode: Mode) -> None:
    next_release.install(newer.dsn, mode)
    before, name = fingerprint(newer.dsn), name_of(newer.dsn)
    step = f"{next_release.old} to {next_release.new}, locks: {made.LOCKS}\n"
    said = newer("upgrade", "--dry-run")
    assert (
        said
        == f"{step}outbox {next_release.old} ({mode}) in database '{name}' would be upgraded to {next_release.new}\n"
    )
    assert_same(before, fingerprint(newer.dsn))
    assert newer("upgrade") == f"{step}outbox {next_release.new} ({mode}) in database '{name}': upgraded\n"
    with databases.database(SERVER) as fresh:
        next_release.install(fresh, mode, next_release.new)
        assert_same(fingerprint(fresh), fingerprint(newer.dsn))
    assert newer("upgrade") == f"outbox {next_release.new} ({mode}) in database '{name}' needs no upgrade\n"


def test_upgraded_is_what_was_shipped(newer: Command, next_release: Releases, mode: Mode) -> None:
    with databases.database(SERVER) as fresh:
        next_release.install(fresh, "extension", next_release.new)
        shipped = next_release.tree / "sql/packaging/fingerprint.expected"
        shipped.write_text("\n".join(fingerprint(fresh)))
    next_release.install(newer.dsn, mode)
    assert f"has outbox {next_release.old} ({mode}), and this pg-outbox knows" in newer("verify", status=2)
    newer("upgrade")
    assert "is what was shipped" in newer("verify")


def test_the_page_about_it(newer: Command, next_release: Releases, mode: Mode) -> None:
    """What docs/upgrading.md shows, on the made-up release; the command, the script or the statement of that mode."""
    page = (ROOT / "docs/upgrading.md").read_text()
    for old, new in (("0.1.0", next_release.old), ("0.2.0", next_release.new)):
        page = page.replace(old, new)
    command, script, statement = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    created = re.findall(r"^create extension .*$", page, re.MULTILINE)
    with databases.database(SERVER) as fresh:
        query(fresh, created[0].replace(next_release.old, next_release.new))
        (next_release.tree / "sql/packaging/fingerprint.expected").write_text("\n".join(fingerprint(fresh)))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in (command, statement if mode == "extension" else script):
        with databases.database(SERVER) as dsn:
            if mode == "extension":
                query(dsn, created[0])
            else:
                next_release.install(dsn, mode)
            subprocess.run(
                ["sh", "-ec", block],
                cwd=next_release.tree,
                env=replace(newer, dsn=dsn).environment() | {"PATH": path},
                check=True,
            )
            assert query(dsn, "select outbox.version()") == next_release.new


def test_every_release_is_upgraded_to_what_is_shipped(mode: Mode) -> None:
    for releases in made.real():
        with databases.database(SERVER) as dsn:
            releases.install(dsn, mode)
            Command(dsn)("upgrade")
            Command(dsn)("verify")


def test_no_upgrade_leads_here(outbox: Command, next_release: Releases, mode: Mode) -> None:
    next_release.install(outbox.dsn, mode)
    said = outbox("upgrade", status=2)
    assert f"has outbox {next_release.old} ({mode}), and no upgrade leads from there to {VERSION}" in said
    assert "newer than" in said


def test_upgrade_without_the_files(newer: Command, next_release: Releases) -> None:
    next_release.install(newer.dsn, "extension")
    with away(f"outbox--{next_release.steps[0]}.sql"):
        said = newer("upgrade", status=2)
    assert f"the server has no files of the extension outbox {next_release.new}: run `make install` there" in said


def test_upgrade_is_for_the_owner(newer: Command, next_release: Releases, login: Login, mode: Mode) -> None:
    next_release.install(newer.dsn, mode)
    said = replace(newer, dsn=as_role(newer.dsn, login()))("upgrade", status=2)
    owner = urlsplit(newer.dsn).username
    assert f"run it as role '{owner}', which owns the package" in said or f"outbox belongs to role {owner}" in said


def test_upgrade_is_patient(newer: Command, next_release: Releases, mode: Mode) -> None:
    next_release.install(newer.dsn, mode)
    with psycopg.connect(newer.dsn) as reader:
        reader.execute("select from outbox.message")
        said = newer("upgrade", "--patience", "0", status=1)
        assert f"not upgraded: outbox.message is in use by process {reader.info.backend_pid}" in said
        assert "Nothing has changed. Try again" in said
        patient = subprocess.Popen(
            [sys.executable, "-m", "outbox", "upgrade"], env=newer.environment(), stderr=subprocess.PIPE, text=True
        )
        assert patient.stderr is not None
        assert patient.stderr.readline().endswith("; trying again\n")
        reader.rollback()
        assert patient.wait(30) == 0
        patient.stderr.close()
    assert query(newer.dsn, "select outbox.version()") == next_release.new


# --- verify


def test_verify(installed: str, outbox: Command, mode: Mode, login: Login) -> None:
    """Rights that grant_*() gave and days of the archive are as they should be; any role can look."""
    roles = [login() for _ in range(6)]
    parts = zip(roles, (*PARTS, "emit"), strict=True)
    psql(installed, text="".join(f"select outbox.grant_{part}('{role}');\n" for role, part in parts))
    query(installed, f"select outbox.grant_monitor('{roles[0]}')")
    query(installed, "select outbox.configure('retention', '7 days')")
    expected = f"outbox {VERSION} ({mode}) in database '{name_of(installed)}' is what was shipped\n"
    assert outbox("verify") == expected
    assert replace(outbox, dsn=as_role(installed, login()))("verify") == expected


# What is done, and what is said about it.
BREAKS = {
    "create or replace function outbox.pause() returns void language sql as ''": "changed: routine outbox.pause()",
    "alter function outbox.next_due() security invoker": "changed: routine outbox.next_due()",
    "create function outbox.emit(x int) returns void language sql as ''": "not shipped: routine outbox.emit(integer)",
    "drop function outbox.resume()": "missing: routine outbox.resume()",
    "alter function outbox.hello owner to {role}": "changed: owner of routine outbox.hello(text)",
    "alter table outbox.dedup add column x int": "not shipped: column outbox.dedup.x",
    "alter table outbox.message set (fillfactor = 10)": "changed: relation outbox.message\n    shipped: ",
    "drop index outbox.message_due": "missing: index outbox.message_due",
    "alter table outbox.dedup drop constraint dedup_pkey": "missing: constraint dedup_pkey",
    "alter table outbox.message disable trigger ring": "changed: trigger ring on outbox.message",
    "grant select on outbox.message to {role}": "not shipped: privilege on relation outbox.message: SELECT to {role}",
    # Beyond the part that was granted, and less than it.
    "select outbox.grant_emit('{role}'); grant execute on function outbox.extend_lease to {role}": (
        "not shipped: privilege on routine outbox.extend_lease(uuid,interval): EXECUTE to {role}"
    ),
    "revoke execute on function outbox.emit_many from {role}": (
        "missing: privilege on routine outbox.emit_many(jsonb): EXECUTE to {role}"
    ),
    "grant references (emit) on outbox.access to public": (
        "not shipped: privilege on column outbox.access.emit: REFERENCES to public"
    ),
    "select outbox.configure('retention', 'forever')": "",
    "do $$ begin execute format('grant select on outbox.archive_%s to {role}', to_char(now(), 'YYYYMMDD')); end $$": (
        "not shipped: privilege on relation outbox.archive_2"
    ),
}


def test_verify_finds(empty: str, outbox: Command, login: Login) -> None:
    databases.install(empty, "plain")
    query(SERVER, f"alter database {name_of(empty)} set timezone = 'UTC'")
    role = login()
    psql(empty, text="".join(f"{change.format(role=role)};\n" for change in BREAKS))
    said = outbox("verify", status=1)
    for expected in BREAKS.values():
        assert expected.format(role=role) in said
    # Each is one line, or two: nothing else is said.
    counted = len(re.findall(r"^(changed|missing|not shipped): ", said, re.MULTILINE))
    assert said.endswith(f"in database '{name_of(empty)}' differs from what was shipped: {counted}\n")


def test_verify_finds_what_an_extension_lost(empty: str, outbox: Command) -> None:
    databases.install(empty, "extension")
    query(empty, "update pg_extension set extconfig = null, extcondition = null where extname = 'outbox'")
    assert "missing: dump mark outbox.message" in outbox("verify", status=1)


def test_verify_cannot_compare(empty: str, outbox: Command) -> None:
    nowhere = urlsplit(empty)._replace(netloc="postgres@127.0.0.1:1").geturl()
    assert "refused" in replace(outbox, dsn=nowhere)("verify", status=2)
    query(empty, "create schema outbox")
    assert "is not from this package" in outbox("verify", status=2)


def test_verify_shows_no_commands_to_a_terminal(empty: str, outbox: Command) -> None:
    databases.install(empty, "plain")
    with psycopg.connect(empty, autocommit=True) as db:
        db.execute('create table outbox."\x1b[2J" ()')
    said = outbox("verify", status=1)
    assert "\x1b" not in said
    assert "\\x1b[2J" in said


# --- uninstall


def test_uninstall(installed: str, outbox: Command, mode: Mode) -> None:
    what, name = f"outbox {VERSION} ({mode})", name_of(installed)
    query(installed, "select outbox.emit('a', '1') from generate_series(1, 3)")
    said = outbox("uninstall", "--dry-run")
    assert said == f"{what}, with 3 waiting messages and 0 dead letters, would not be removed from database '{name}'\n"
    said = outbox("uninstall", "--yes", status=2)
    assert "not removed: messages waiting in outbox.message: 3" in said
    assert "outbox uninstall --force" in said
    assert "nobody is there to ask: pass --yes" in outbox("uninstall", "--force", status=2)
    status, said = outbox.typed("uninstall", "--force", keys="n\n")
    question = f"Remove {what}, with 3 waiting messages and 0 dead letters, from database '{name}'? [y/N] "
    assert (status, said.replace("n\n", "", 1)) == (0, f"{question}not removed\n")
    assert query(installed, "select count(*) from outbox.message") == "3"
    said = outbox("uninstall", "--force", "--dry-run")
    assert said == f"{what}, with 3 waiting messages and 0 dead letters, would be removed from database '{name}'\n"
    status, said = outbox.typed("uninstall", "--force", keys="y\n")
    assert status == 0
    kind = "extension" if mode == "extension" else "schema"
    assert said.endswith(f"outbox removed: the {kind} in database {name}; waiting messages discarded: 3\n")
    assert query(installed, "select to_regnamespace('outbox') is null") == "t"
    assert "does not have the package outbox" in outbox("uninstall", "--yes", status=2)


def test_what_uninstall_foretells_is_what_it_does(empty: str, outbox: Command) -> None:
    databases.install(empty, "plain")
    what = f"outbox {VERSION} (plain), with 0 waiting messages and"
    claimed = "00000000-0000-0000-0000-000000000001"
    claim = f"select outbox.emit('a', '1'); select id from outbox.claim_batch('{claimed}');"
    all_ids = "(select array_agg(id) from outbox.message)"
    query(empty, f"{claim} select outbox.mark_failed('{claimed}', {all_ids}, '{{no}}', '{{rejected}}')")
    assert f"{what} 1 dead letters, would not be removed" in outbox("uninstall", "--dry-run")
    assert "not removed: messages in outbox.dead_letter: 1" in outbox("uninstall", "--yes", status=2)
    query(empty, "select outbox.purge_dead('0')")
    query(
        empty,
        f"select outbox.configure('retention', 'forever'); {claim} select outbox.mark_sent('{claimed}', {all_ids})",
    )
    assert f"{what} 0 dead letters and the archive, would not be removed" in outbox("uninstall", "--dry-run")
    assert "in outbox.archive: some" in outbox("uninstall", "--yes", status=2)
    assert "would be removed" in outbox("uninstall", "--dry-run", "--force")


def test_uninstall_is_for_the_owner(installed: str, outbox: Command, login: Login) -> None:
    said = replace(outbox, dsn=as_role(installed, login()))("uninstall", "--yes", status=2)
    assert f"run it as role '{urlsplit(installed).username}', which owns the package" in said


def test_uninstall_does_not_wait_for_long(empty: str, outbox: Command) -> None:
    databases.install(empty, "plain")
    with psycopg.connect(empty) as reader:
        reader.execute("select from outbox.message")
        said = outbox("uninstall", "--yes", status=1)
    assert "not removed: outbox.message is in use. Stop the relays and whoever emits" in said


def test_the_wheel_carries_it_all() -> None:
    """What the commands read, they find where a wheel has it."""
    assert {"plain_head", "plain_upgrade_head", "uninstall", "fingerprint", "expected"} < set(from_clone(ROOT))
