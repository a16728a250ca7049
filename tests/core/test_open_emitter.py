"""An emitter that stays open: what it costs, and that the cost ends with it."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

BATCH = 500
MESSAGES = json.dumps([{"routing_key": "r", "payload": 1, "key": f"k{n}"} for n in range(BATCH)])


def work(db: Connection, rounds: int) -> None:
    """Emits and settles as many."""
    for _ in range(rounds):
        db.execute("select outbox.emit_many(%s)", [MESSAGES])
        token, settled = uuid.uuid4(), 1
        while settled:
            token = uuid.uuid4()
            ids = [row[0] for row in db.execute("select id from outbox.claim_batch(%s, %s)", [token, BATCH])]
            settled = len(ids)
            db.execute("select outbox.mark_sent(%s, %s)", [token, ids])


def claim_blocks(db: Connection) -> int:
    """What a claim of one message reads that looks into all lanes: its own is the last in turn."""
    db.execute("select outbox.emit('r', '1', key => 'k1')")
    db.execute("select setval('outbox.lane_turn', lane + 64) from outbox.message where key = 'k1'")
    with db.transaction(force_rollback=True):
        row = db.execute(
            "explain (analyze, buffers, format json) select * from outbox.claim_batch(gen_random_uuid(), 1)"
        ).fetchone()
    assert row is not None
    plan = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_claims_walk_over_what_was_settled_since_until_it_ends(db: Connection, dsn: str) -> None:
    # So that only the floors can spare a claim the walk.
    db.execute("alter table outbox.message set (autovacuum_enabled = off)")
    work(db, 4)
    time.sleep(0.05)
    work(db, 1)
    before = claim_blocks(db)
    with psycopg.connect(dsn) as emitter:
        emitter.execute("select outbox.emit('late', '1')")
        work(db, 40)
        during = claim_blocks(db)
        assert db.execute("select oldest_emitter_pid from outbox.stats()").fetchone() == (emitter.info.backend_pid,)
    assert during > 5 * before
    # A lane's floor follows when something of it is settled.
    deadline = time.monotonic() + 20
    while (after := claim_blocks(db)) > 2 * before:
        assert time.monotonic() < deadline, f"{before} blocks before, {during} during, {after} after"
        time.sleep(0.05)
        work(db, 1)
