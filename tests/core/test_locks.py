"""Which locks on tables each call holds until its transaction ends: what docs/dba.md says, line by line."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

import databases

Connection = psycopg.Connection[tuple[Any, ...]]

PAGE = databases.ROOT / "docs/dba.md"
BATCH = "'00000000-0000-0000-0000-000000000001'"
IDS = f"array(select c.id from outbox.claim_batch({BATCH}) as c)"
KEEP = "select outbox.configure('retention', '1 day')"
FORGET = "do $$ begin execute (select format('drop table outbox.%I', max(d.name)) from outbox._days() as d); end $$"
PAST = (
    "create table outbox.archive_20200101 partition of outbox.archive"
    " for values from ('2020-01-01 00:00:00+00') to ('2020-01-02 00:00:00+00')"
)
CLAIMED = f"select outbox.emit('a', '1'); select * from outbox.claim_batch({BATCH})"
DEAD = f"select outbox.emit('a', '1'); select outbox.mark_failed({BATCH}, {IDS}, '{{x}}', '{{rejected}}')"
# What happened before, and the call itself.
CALLS = {
    "emit()": ("", "select outbox.emit('a', '1', key => 'k')"),
    "emit() with dedup_key": ("", "select outbox.emit('a', '1', dedup_key => 'd')"),
    "claim_batch()": ("select outbox.emit('a', '1')", f"select * from outbox.claim_batch({BATCH})"),
    "mark_sent()": ("select outbox.emit('a', '1')", f"select outbox.mark_sent({BATCH}, {IDS})"),
    "mark_sent() with retention": (
        f"{KEEP}; select outbox.emit('a', '1')",
        f"select outbox.mark_sent({BATCH}, {IDS})",
    ),
    "mark_failed()": (
        "select outbox.emit('a', '1', key => 'k')",
        f"select outbox.mark_failed({BATCH}, {IDS}, '{{x}}')",
    ),
    "release_batch()": (CLAIMED, f"select outbox.release_batch({BATCH})"),
    "extend_lease()": (CLAIMED, f"select outbox.extend_lease({BATCH}, '1 min')"),
    "hello()": ("", "select outbox.hello('r')"),
    "cancel()": ("", "select outbox.cancel(outbox.emit('a', '1', delay => '1 h'))"),
    "requeue_dead()": (DEAD, "select outbox.requeue_dead(array(select id from outbox.dead_letter))"),
    "purge_dead()": (DEAD, "select outbox.purge_dead('0')"),
    "accept()": ("", "select outbox.accept('c', gen_random_uuid())"),
    "cleanup()": ("", "select outbox.cleanup()"),
    "cleanup() that makes a day": (f"{KEEP}; {FORGET}", "select outbox.cleanup()"),
    "cleanup() that drops a day": (f"{KEEP}; {PAST}", "select outbox.cleanup()"),
    "stats(), message_status": ("", "select outbox.stats(), (select count(*) from outbox.message_status)"),
    "configure()": ("", "select outbox.configure('max_attempts', '5')"),
    "pause(), resume()": ("", "select outbox.pause(), outbox.resume()"),
    "grant_emit() and the like": ("", "select outbox.grant_emit('pg_monitor')"),
}
# From the weakest to the strongest.
MODES = (
    "AccessShare", "RowShare", "RowExclusive", "ShareUpdateExclusive", "Share", "ShareRowExclusive", "Exclusive",
    "AccessExclusive",
)  # fmt: skip
HELD = """
select regexp_replace(c.relname, '^archive_[0-9]{8}$', 'a day'), array_agg(replace(l.mode, 'Lock', ''))
from pg_locks as l
join pg_class as c on c.oid = l.relation
where l.pid = pg_backend_pid() and c.relnamespace = 'outbox'::regnamespace and c.relkind in ('r', 'p')
group by 1
"""


def locks(db: Connection) -> str:
    """The strongest mode on each table, without those that only readers need."""
    held: dict[str, list[str]] = {}
    for table, modes in db.execute(HELD).fetchall():
        mode = max(modes, key=MODES.index)
        if mode not in ("AccessShare", "RowShare"):
            held.setdefault(re.sub("(?<!^)([A-Z])", r" \1", mode).lower(), []).append(table)
    return "; ".join(f"{mode}: {', '.join(sorted(held[mode]))}" for mode in sorted(held)) or "none"


def told() -> dict[str, str]:
    section = PAGE.read_text().partition("\n## Locks\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^|`]+)` +\| ([^|]+?) +\|", section, re.MULTILINE))


@pytest.mark.parametrize("call", CALLS)
def test_locks_are_those_of_the_page(db: Connection, call: str) -> None:
    before, statement = CALLS[call]
    if before:
        db.execute(before.encode())
    with db.transaction(force_rollback=True):
        db.execute(statement.encode())
        assert locks(db) == told()[call]


def test_the_page_lists_no_other_call() -> None:
    assert set(told()) == set(CALLS)
