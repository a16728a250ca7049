"""The commands that install, upgrade, check and remove the database package."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg

from outbox.config import RelaySettings
from outbox.errors import ConfigurationError, DatabaseUnavailableError, NotInstalledError, UnavailableError
from outbox.install import install_sql, texts, uninstall_sql, upgrade_steps
from outbox.operate import Db, allowed, connected, one, printable, said
from outbox.options import add_options, read_dsn
from outbox.verify import differences

# From the catalog alone: whoever may not call a function of the package can still ask.
INSTALLED = """
    select substring(p.prosrc from $$'([^']+)'$$) as version,
           exists (select from pg_extension as e where e.extname = 'outbox') as extension,
           pg_get_userbyid(n.nspowner) as owner
    from pg_namespace as n
    left join pg_proc as p on p.pronamespace = n.oid and p.proname = 'version' and p.pronargs = 0
    where n.nspname = 'outbox'
"""
AVAILABLE = "select string_agg(version, ', ') as versions from pg_available_extension_versions where name = 'outbox'"
UPDATE_PATH = "select path from pg_extension_update_paths('outbox') where source = %(source)s and target = %(target)s"
ONE_AT_A_TIME = "select pg_advisory_xact_lock(hashtextextended('outbox install', 0))"
CONTENT = """
    select (select count(*) from outbox.message) as waiting, (select count(*) from outbox.dead_letter) as dead,
           exists (select from outbox.archive) as kept
"""
FORCE = "select set_config('outbox.uninstall_force', %(force)s, true)"
REPORT = "select current_setting('outbox.uninstall_report') as report"

STATUS = """
exit status:
  0  done
  1  the database is unavailable, or a table is in use: nothing has changed
  2  something only you can put right: the message says what; nothing has changed
  3  a bug: the log says where
"""
VERIFY_STATUS = """
exit status:
  0  the installation is what was shipped
  1  something differs
  2  it cannot be compared: the message says why
"""
# Between two tries to get a lock, so that whoever queued behind the first gets through.
PAUSE = 1.0


class Installed(NamedTuple):
    version: str
    extension: bool
    owner: str

    def __str__(self) -> str:
        return f"outbox {self.version} ({'extension' if self.extension else 'plain'})"


def add_commands(commands: Any) -> None:
    command = add(commands, "install", install, "install the package in a database")
    command.add_argument(
        "--extension", action="store_true", help="as an extension, whose files are on the server; not as plain SQL"
    )
    command = add(commands, "upgrade", upgrade, "upgrade the package in a database to this version")
    command.add_argument("--dry-run", action="store_true", help="only say which steps it takes, and what they lock")
    command.add_argument(
        "--patience", metavar="SECONDS", type=float, default=60.0, help="try so long to get the locks [60]"
    )
    command = add(commands, "uninstall", uninstall, "remove the package from a database, with everything in it")
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.add_argument(
        "--force", action="store_true", help="even if messages wait, are dead or are kept, or other objects need it"
    )
    add(commands, "verify", verify, "compare the package in a database with what was shipped", VERIFY_STATUS)


def add(
    commands: Any, name: str, function: Callable[[Db, argparse.Namespace], int], text: str, status: str = STATUS
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=status,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_options(command, RelaySettings, "dsn")

    def run(options: argparse.Namespace) -> int:
        with connected(read_dsn(vars(options)), "admin") as db:
            # What is asked here is asked of the server, whatever the role's path finds first.
            db.execute("set search_path = pg_catalog, pg_temp")
            db.isolation_level, db.read_only = psycopg.IsolationLevel.READ_COMMITTED, False
            return function(db, options)

    def compare(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except UnavailableError as error:
            raise ConfigurationError(str(error)) from None

    command.set_defaults(run=compare if status is VERIFY_STATUS else run)
    return command


# --- commands


def install(db: Db, options: argparse.Namespace) -> int:
    ours, row = texts()["version"], db.execute(INSTALLED).fetchone()
    if row is not None and row["version"] is not None:
        raise ConfigurationError(
            f"database {db.info.dbname!r} has {Installed(**row)} already: `outbox upgrade` brings it up to date,"
            " `outbox uninstall` removes it"
        )
    if options.extension:
        versions = one(db, AVAILABLE)["versions"] or "none"
        if ours not in versions.split(", "):
            raise ConfigurationError(
                f"the server has no files of the extension outbox {ours} (it has: {versions}):"
                " put them there with `make install`, or leave out --extension"
            )
    with allowed_to(db, f"the owner of database {db.info.dbname!r} can allow it: grant create on database"):
        run_script(db, f"create extension outbox version '{ours}'" if options.extension else install_sql())
    return said(f"{find(db)} installed in database {db.info.dbname!r}")


def upgrade(db: Db, options: argparse.Namespace) -> int:
    found, ours = find(db), texts()["version"]
    if found.version == ours:
        return said(f"{found} in database {db.info.dbname!r} needs no upgrade")
    steps = upgrade_steps(found.version)
    if not steps:
        raise ConfigurationError(
            f"database {db.info.dbname!r} has {found}, and no upgrade leads from there to {ours}:"
            f" run this command of a pg-outbox that is newer than {found.version}"
        )
    if found.extension and not one(db, UPDATE_PATH, source=found.version, target=ours)["path"]:
        raise ConfigurationError(f"the server has no files of the extension outbox {ours}: run `make install` there")
    for step, locks in steps.items():
        said(f"{step.replace('--', ' to ')}, locks: {locks}")
    if options.dry_run:
        return said(f"{found} in database {db.info.dbname!r} would be upgraded to {ours}")
    script = (
        f"alter extension outbox update to '{ours}'" if found.extension else install_sql(upgrade_from=found.version)
    )
    deadline = time.monotonic() + options.patience
    while True:
        try:
            with allowed_to(db, f"run it as role {found.owner!r}, which owns the package"):
                run_script(db, script)
            return said(f"{find(db)} in database {db.info.dbname!r}: upgraded")
        except psycopg.Error as error:
            if error.sqlstate != "OB093":
                raise
            if time.monotonic() > deadline:
                raise DatabaseUnavailableError(f"{error.diag.message_primary}. {error.diag.message_hint}") from None
            sys.stderr.write(f"outbox: {error.diag.message_primary}; trying again\n")
            time.sleep(PAUSE)


def uninstall(db: Db, options: argparse.Namespace) -> int:
    found, name = find(db), db.info.dbname
    owner = f"run it as role {found.owner!r}, which owns the package"
    with allowed_to(db, owner):
        content = one(db, CONTENT)
    archive = " and the archive" if content["kept"] else ""
    what = f"{found}, with {content['waiting']} waiting messages and {content['dead']} dead letters{archive}"
    refused = any(content.values()) and not options.force  # as the script does
    if options.dry_run:
        return said(f"{what}, would {'not ' if refused else ''}be removed from database {name!r}")
    # Asked only for what is going to happen.
    if not refused and not allowed(options, f"Remove {what}, from database {name!r}?"):
        return said("not removed")
    try:
        with allowed_to(db, owner), db.transaction():
            one(db, FORCE, force=str(options.force))
            db.execute(uninstall_sql().encode())
            report = one(db, REPORT)["report"]
    except psycopg.errors.LockNotAvailable:
        raise DatabaseUnavailableError(
            "not removed: outbox.message is in use. Stop the relays and whoever emits, and try again"
        ) from None
    return said(printable(report))


def verify(db: Db, _: argparse.Namespace) -> int:
    found, ours = find(db), texts()["version"]
    if found.version != ours:
        raise ConfigurationError(
            f"database {db.info.dbname!r} has {found}, and this pg-outbox knows what was shipped as {ours}:"
            " run `outbox upgrade`, or verify with a pg-outbox of that version"
        )
    shipped = texts()["expected"].splitlines()
    differing = differences(catalog(db), shipped, extension=found.extension)
    for difference in differing:
        said(printable(str(difference)))
    if differing:
        said(f"{found} in database {db.info.dbname!r} differs from what was shipped: {len(differing)}")
        return 1
    return said(f"{found} in database {db.info.dbname!r} is what was shipped")


# --- the database


def find(db: Db) -> Installed:
    row = db.execute(INSTALLED).fetchone()
    if row is None:
        raise NotInstalledError(f"database {db.info.dbname!r} does not have the package outbox: run `outbox install`")
    if row["version"] is None:
        raise NotInstalledError(f"schema outbox in database {db.info.dbname!r} is not from this package")
    return Installed(**row)


def catalog(db: Db) -> list[str]:
    """What fingerprint.sql finds: some settings, then one query."""
    settings, with_, query = texts()["fingerprint"].partition("\nwith ")
    with db.transaction():
        db.execute(settings.encode())
        return [str(row["line"]) for row in db.execute((with_ + query).encode())]


def run_script(db: Db, script: str) -> None:
    with db.transaction():
        db.execute(ONE_AT_A_TIME)
        db.execute(script.encode())


@contextmanager
def allowed_to(db: Db, hint: str) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        said_by_server = " ".join((error.diag.message_primary or "").split())
        raise ConfigurationError(f"role {db.info.user!r} may not do this: {said_by_server}; {hint}") from None
