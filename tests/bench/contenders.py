"""What is measured and against what, in the words of the table: each contender by the beginning of its name."""

from __future__ import annotations

from bench import peer

OURS = "window 1,500, batches of 500, uvloop, everything else by default"
PUBLISHED = "persistent, mandatory, confirmed"

CONTENDERS = {
    "emit": "`select outbox.emit(routing key, 256 bytes of JSON)`, committed one by one, pgbench, prepared statements",
    "emit and commit": "`emit(connection, ...)` and `commit()` for every message, psycopg",
    "emit_many": "SQL: 1,000 messages in one statement; Python: 10,000",
    "insert": "one insert of the same row into a copy of the table with its indexes, nothing else",
    "insert with NOTIFY trigger": "the same, and a trigger that calls `pg_notify`, somebody listening",
    "insert select unnest": "the same rows from an array of bodies, ready made",
    "claim + mark": "`claim_batch` of 500, all columns read, then `mark_sent`",
    "held transaction": "`select for update skip locked` of 500, delete, commit; the transaction stays open in between",
    "row leases": "500 rows leased by `update ... returning`, committed, then deleted; HOT updates, due time indexed",
    "with a snapshot held": "the same while a transaction keeps vacuum from removing anything",
    "with a writer open": "the same while a transaction that has written elsewhere stays open",
    "snapshot, failing and scheduled": "a held snapshot, 10,000 messages that fail again and again, 100,000 that wait",
    "alone": "claim and mark with nobody else in the database",
    "under an old snapshot": "the median of 2,000 batches after 8,000 others under one snapshot",
    "under a new one": "the median of 2,000 batches, the first under their snapshot; in turn with those",
    "backlog of": "claim and mark of the oldest messages while so many wait",
    "kept for a day": "`mark_sent` with `retention` of one day, batch by batch in turn with those that are deleted",
    "deleted": "`mark_sent` with the default, which deletes",
    "waiting messages": "5,000 waiting messages by the room of all tables",
    "after a tenth": "the same after a tenth of the messages",
    "relay": f"`outbox relay`: {OURS}; {PUBLISHED}",
    "publish from memory": f"the ceiling: the relay's own publisher, uvloop, no database; {PUBLISHED}, 1,500 in flight",
    "aio-pika publish, gather": f"claim 500, `asyncio.gather` of aio-pika's `publish`, mark; uvloop; {PUBLISHED}",
    "unkeyed": "the relay, messages without a key",
    "10,000 keys": "the relay, 10,000 keys in turn; strict: `strict_keys` on",
    "one key": "the relay, all messages with one key; strict: `strict_keys` on, one message a round trip",
    "one relay": f"one process `outbox relay`: {OURS}; {PUBLISHED}",
    "two relays": "two of them on the same database and queue",
    "faststream-outbox": peer.SETTINGS,
    "bare LISTEN and publish": f"the least that forwards: LISTEN, select 100, `publish`, delete; uvloop; {PUBLISHED}",
    "worker": "`Worker`, a listener that does nothing, prefetch 10, a quorum queue",
    "worker alone": "the worker with messages that are in the queue already, prefetch 10",
    "bare": "aio-pika: `queue.consume`, `message.process()`, prefetch 10, the same queue",
    "two workers": "two processes, a listener that waits 5 ms, prefetch 10",
    "one worker": "one of them",
    "emit to listener": "`emit_many` of 100, one relay, one worker with prefetch 100, all in one process",
}


def described(name: str) -> str:
    """By the longest beginning that fits."""
    return CONTENDERS[max((known for known in CONTENDERS if name.startswith(known)), key=len)]
