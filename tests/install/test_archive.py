"""The archive's days are made at run time: no extension owns them, and a dump must have them all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

import databases
from databases import BUILD, SERVER, assert_same, fingerprint, psql, query, restore

if TYPE_CHECKING:
    from databases import Mode

KEPT = "select tableoid::regclass, a.* from outbox.archive as a order by a.id, a.sent_at"
OUTSIDE = """
insert into outbox.archive (id, sent_at, message_id, routing_key, content_type, created_at, attempts, emitted_by, body)
values (7, '2020-01-01', gen_random_uuid(), 'old', 't', now(), 0, 'x', 'x')
"""


def keep(dsn: str) -> None:
    """Three messages in the partition of today, one in the default partition."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("select outbox.configure('retention', 'forever')")
        db.execute("select outbox.emit('kept', '1') from generate_series(1, 3)")
        claim = "00000000-0000-0000-0000-000000000001"
        db.execute(
            "select outbox.mark_sent(%s, array(select c.id from outbox.claim_batch(%s) as c))",
            [claim, claim],
        )
        db.execute(OUTSIDE)


def test_restored(installed: str) -> None:
    keep(installed)
    with databases.database(SERVER) as restored:
        restore(installed, restored)
        assert len(query(restored, KEPT).splitlines()) == 4
        assert query(installed, KEPT) == query(restored, KEPT)
        assert_same(fingerprint(installed), fingerprint(restored))
        # What was restored goes on: today's partition takes what is sent, and cleanup() knows its days.
        query(restored, "select outbox.cleanup()")
        query(restored, "select outbox.configure('retention', '1 day')")
        assert query(restored, "select archive_rows, more from outbox.cleanup()") == "1|f"
        assert query(restored, "select count(*) from outbox._days()") == "4"


def test_restored_twice(installed: str) -> None:
    keep(installed)
    with databases.database(SERVER) as once, databases.database(SERVER) as twice:
        restore(installed, once)
        restore(once, twice)
        assert query(installed, KEPT) == query(twice, KEPT)


def test_removed_with_its_days(installed: str, mode: Mode) -> None:
    keep(installed)
    if mode == "extension":
        # No cascade: a day goes with the table it is a part of.
        query(installed, "drop extension outbox")
    else:
        done = psql(installed, "-f", BUILD / "outbox-uninstall.sql", check=False)
        assert "not removed: messages in outbox.dead_letter: 0, in outbox.archive: some" in done.stderr
        done = psql(installed, "-v", "force=1", "-f", BUILD / "outbox-uninstall.sql")
        assert done.stdout.endswith("; waiting messages discarded: 0; the archive is gone\n")
    assert query(installed, "select count(*) from pg_class where relname like 'archive%'") == "0"
