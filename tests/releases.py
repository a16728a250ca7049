"""Two releases to upgrade between: the real ones, and this one as if it were released, with a made-up next one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import build
from databases import ROOT, Mode, psql, query


def set_version(tree: Path, version: str) -> None:
    control = (ROOT / "outbox.control").read_text()
    (tree / "outbox.control").write_text(re.sub(r"(?<=default_version = ')[^']+", version, control))


def copy_tree(tree: Path) -> None:
    """The sources, without what was released before."""
    shutil.copytree(ROOT / "sql", tree / "sql", ignore=shutil.ignore_patterns("upgrade", "released"))
    shutil.copy(ROOT / "outbox.control", tree)


@dataclass(frozen=True)
class Releases:
    tree: Path
    old: str
    new: str

    @property
    def steps(self) -> list[str]:
        """Names of bodies: one script after the other leads from the old version to the new one."""
        names, at, steps = list(build.Tree(self.tree).bodies()), self.old, []
        while at != self.new:
            steps.append(next(name for name in names if name.startswith(f"{at}--")))
            at = steps[-1].partition("--")[2]
        return steps

    @property
    def scripts(self) -> list[Path]:
        return [self.tree / f"build/outbox-upgrade-{step.replace('--', '-')}.sql" for step in self.steps]

    def install(self, dsn: str, mode: Mode, version: str | None = None) -> None:
        """The old version, unless another is named."""
        version = version or self.old
        if mode == "extension":
            query(dsn, f"create extension outbox version '{version}'")
        else:
            bodies = build.Tree(self.tree).bodies()
            script = (self.tree / "build/outbox-install.sql").read_text()
            psql(dsn, text=script.replace(bodies[self.new], bodies[version]))

    def statements(self, mode: Mode) -> list[str]:
        """The upgrade as arguments for psql."""
        if mode == "extension":
            return ["-c", f"alter extension outbox update to '{self.new}'"]
        return [argument for script in self.scripts for argument in ("-f", str(script))]

    def upgrade(self, dsn: str, mode: Mode) -> None:
        psql(dsn, *self.statements(mode))


def real() -> list[Releases]:
    """Every released version, and the one of this tree."""
    tree = build.Tree(ROOT)
    versions = [name for name in tree.bodies() if "--" not in name and name != tree.version]
    return [Releases(ROOT, version, tree.version) for version in versions]


@contextlib.contextmanager
def made_up(tree: Path, before: Callable[[Path], None], after: Callable[[Path], str]) -> Iterator[Releases]:
    """This tree, changed, as the old release; changed again, with the upgrade that is returned, as the new one."""
    # Far from real versions and from those of a test beside this one: the extension's files lie in one folder.
    # The same major as this tree's, so that its relay agrees.
    series = f"{build.Tree(ROOT).version.partition('.')[0]}.{9_000_000 + secrets.randbelow(1_000_000)}"
    old, new = f"{series}.0", f"{series}.1"
    tree.mkdir(exist_ok=True)
    copy_tree(tree)
    before(tree)
    set_version(tree, old)
    build.release(tree)
    set_version(tree, new)
    delta = after(tree)
    (tree / "sql/upgrade").mkdir()
    (tree / f"sql/upgrade/{old}--{new}.sql").write_text(delta)
    build.build(tree, tree / "build")
    copies = []
    if folder := os.environ.get("OUTBOX_EXTENSION_DIR"):
        copies = [shutil.copy(path, folder) for path in (tree / "build").glob(f"outbox--{series}.*.sql")]
    try:
        yield Releases(tree, old, new)
    finally:
        for copy in copies:
            Path(copy).unlink()


# --- a next release in which something of every kind has changed

EXTRA = "functions/99_extra.sql"
PINNED = "set search_path = pg_catalog, pg_temp"
OLD_EXTRA = f"""
create or replace function outbox.same() returns integer language sql {PINNED} as 'select 1';
create or replace function outbox.gone() returns integer language sql {PINNED} as 'select 1';
create or replace function outbox.resigned(a integer) returns integer language sql {PINNED} as 'select 1';
create or replace function outbox.retyped() returns integer language sql {PINNED} as 'select 1';
"""
NEW_EXTRA = f"""
create or replace function outbox.same() returns integer language sql {PINNED} as 'select 2';
create or replace function outbox.resigned(a integer, b text) returns integer language sql {PINNED} as 'select 2';
create or replace function outbox.retyped() returns text language sql {PINNED} as $$select 'two'$$;
create or replace function outbox.added() returns integer language sql {PINNED} as 'select 2';
"""
STATE = """
alter table outbox.message add column note text;
comment on column outbox.message.note is 'new';
alter table outbox.setting set (fillfactor = 50);
create index message_note on outbox.message (note) where note is not null;
alter type outbox.cleanup_result add attribute extra integer;
create table outbox.extra (
    a bigint generated always as identity,
    b text not null default 'x',
    constraint extra_pkey primary key (a)
);
"""
LOCKS = "outbox.message in access exclusive, outbox.setting in share update exclusive"
# What a relay calls all the time is among it.
DROPS = """
drop function outbox.gone();
drop function outbox.resigned(integer);
drop function outbox.retyped();
drop function outbox.claim_batch;
drop function outbox.next_due;
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} no longer has {old!r} once"
    path.write_text(text.replace(old, new))


def before_all_kinds(tree: Path) -> None:
    edit(tree / "sql/outbox.sql", "\\ir dump.sql\n", f"\\ir {EXTRA}\n\\ir dump.sql\n")
    (tree / f"sql/{EXTRA}").write_text(OLD_EXTRA)
    access = "('emit', array['version',"
    edit(tree / "sql/functions/70_access.sql", access, f"{access} 'gone', 'resigned', 'retyped',")


def after_all_kinds(tree: Path) -> str:
    edit(tree / "sql/outbox.sql", f"\\ir {EXTRA}\n", f"\\ir {EXTRA}\n\\ir tables/99_extra.sql\n")
    (tree / f"sql/{EXTRA}").write_text(NEW_EXTRA)
    (tree / "sql/tables/99_extra.sql").write_text(STATE)
    edit(tree / "sql/functions/70_access.sql", "'gone', 'resigned',", "'added', 'resigned',")
    edit(
        tree / "sql/functions/00_internal.sql",
        "        case _value_of.name\n",
        "        case _value_of.name\n            when 'added' then 'on'\n",
    )
    return f"-- locks: {LOCKS}\n{DROPS}{STATE}"


def all_kinds(tree: Path) -> contextlib.AbstractContextManager[Releases]:
    return made_up(tree, before_all_kinds, after_all_kinds)
