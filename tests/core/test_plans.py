"""The plans of the hot queries: 500,000 messages, dead rows that an old snapshot keeps, statistics that know nothing.

auto_explain sends the plan of every statement inside the functions to the client. What must never appear is a
sequential scan of a table that grows, or a cost that grows with what was settled before.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import databases

MESSAGES = 500_000
SCHEDULED = 100_000
SETTLED = 100_000
BATCH = 500
GROWING = {"message", "lane", "horizon", "dedup"}

Connection = psycopg.Connection[tuple[Any, ...]]
Plan = dict[str, Any]

FILL = f"""
insert into outbox.message (lane, due_at, message_id, routing_key, key, content_type, created_at, emitted_by, body)
select
    case when n % 10 = 0 then hashtextextended('k' || n % 1000, 0) & 63 else n % 64 end,
    case when n > {MESSAGES - SCHEDULED} then clock_timestamp() + interval '1 h' end,
    gen_random_uuid(), 'plan', case when n % 10 = 0 then 'k' || n % 1000 end, 'application/json', clock_timestamp(),
    'x', '1'
from generate_series(1, {MESSAGES}) as n
"""


class Explained:
    """A session whose every statement, nested ones too, is explained with what it really read."""

    def __init__(self, dsn: str, password: str) -> None:
        self.db = psycopg.connect(dsn, password=password, autocommit=True)
        self.plans: list[Plan] = []
        self.db.execute(
            """
            load 'auto_explain';
            set auto_explain.log_min_duration = 0;
            set auto_explain.log_nested_statements = on;
            set auto_explain.log_analyze = on;
            set auto_explain.log_timing = off;
            set auto_explain.log_buffers = on;
            set auto_explain.log_format = json;
            set client_min_messages = log
            """
        )
        self.db.add_notice_handler(self.hear)

    def hear(self, notice: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (notice.message_primary or "").partition("plan:\n")
        if found:
            self.plans.append(json.loads(plan))

    def run(self, query: str, *arguments: Any) -> tuple[list[tuple[Any, ...]], list[Plan]]:
        self.plans = []
        rows = self.db.execute(query, arguments).fetchall()
        return rows, self.plans


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def check(plans: list[Plan]) -> None:
    assert len(plans) > 1, "the statements inside the function were not explained"
    for plan in plans:
        for node in nodes(plan["Plan"]):
            if node.get("Relation Name") in GROWING:
                assert node["Node Type"] != "Seq Scan", plan["Query Text"]
            # Every row of the lane, or of the table, was read and thrown away: the index did not lead to the row.
            removed = node.get("Rows Removed by Filter", 0) * node.get("Actual Loops", 1)
            assert removed <= 2 * BATCH, f"{removed} rows removed by {node.get('Filter')}: {plan['Query Text']}"


def blocks(plans: list[Plan]) -> int:
    """What the whole call touched: the outermost statement comes last and counts those inside it."""
    outer = plans[-1]["Plan"]
    return int(outer["Shared Hit Blocks"] + outer["Shared Read Blocks"])


def rows_read(plans: list[Plan], relation: str) -> int:
    return sum(
        round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        for plan in plans
        for node in nodes(plan["Plan"])
        if node.get("Relation Name") == relation and "Scan" in node["Node Type"]
    )


CLAIM = "select id from outbox.claim_batch(%s, %s)"


def settle(db: Connection, count: int) -> None:
    for _ in range(count // BATCH):
        token = uuid.uuid4()
        ids = [id_ for (id_,) in db.execute(CLAIM, [token, BATCH])]
        assert len(ids) == BATCH
        db.execute("select outbox.mark_sent(%s, %s)", [token, ids])


def round_trip(session: Explained, size: int = BATCH) -> tuple[int, int]:
    """Blocks touched by one claim and by its settling; their plans are checked."""
    token = uuid.uuid4()
    claimed, plans = session.run(CLAIM, token, size)
    assert len(claimed) == size
    check(plans)
    assert rows_read(plans, "message") <= 4 * size + 128
    assert rows_read(plans, "lane") <= 256
    for_claim = blocks(plans)
    [(settled,)], plans = session.run("select outbox.mark_sent(%s, %s)", token, [id_ for (id_,) in claimed])
    assert settled == size
    check(plans)
    return for_claim, blocks(plans)


@pytest.fixture(scope="module")
def full() -> Iterator[Connection]:
    """Analyzed while empty, then filled, and never looked at by autovacuum. Filling takes long: once is enough."""
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, "plain")
        with psycopg.connect(dsn, autocommit=True) as db:
            fill(db)
            yield db


def fill(db: Connection) -> None:
    for table in ("message", "lane", "horizon", "dedup", "dead_letter", "held_key"):
        db.execute(f"alter table outbox.{table} set (autovacuum_enabled = off)")
    db.execute("analyze")
    db.execute("set synchronous_commit = off")
    db.execute(FILL)
    db.execute("insert into outbox.dedup select 'd' || n, n, clock_timestamp() from generate_series(1, 50000) as n")


@pytest.fixture
def explained(full: Connection) -> Iterator[Callable[[], Explained]]:
    sessions: list[Explained] = []

    def make() -> Explained:
        sessions.append(Explained(full.info.dsn, full.info.password))
        # The first calls of a session also read the catalog.
        round_trip(sessions[-1])
        return sessions[-1]

    yield make
    for session in sessions:
        session.db.close()


def test_cost_stays_the_same_under_an_old_snapshot(full: Connection, explained: Callable[[], Explained]) -> None:
    session = explained()
    with psycopg.connect(full.info.dsn, password=full.info.password) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1 from outbox.message limit 1")
        settle(full, 20 * BATCH)
        first = [round_trip(session) for _ in range(8)]
        settle(full, SETTLED)
        # A session that plans now, with statistics from before everything.
        late = explained()
        last = [round_trip(session) for _ in range(8)] + [round_trip(late) for _ in range(8)]
        small = [round_trip(late, 5) for _ in range(8)]

        assert max(claim for claim, _ in last) <= 1.2 * max(claim for claim, _ in first) + 50
        assert max(mark for _, mark in last) <= 1.2 * max(mark for _, mark in first) + 50
        assert max(claim for claim, _ in last) / BATCH < 3, "blocks per message claimed"
        assert max(mark for _, mark in last) / BATCH < 7, "blocks per message settled"
        assert max(claim for claim, _ in small) < 200, "a small claim pays for what was settled before it"
        # It reads 64 lanes to note their floors, and now and then the locks of those who may have drawn an id.
        assert max(mark for _, mark in small) < 500, "a small settling pays for what was settled before it"


def test_other_calls_find_what_they_need(full: Connection, explained: Callable[[], Explained]) -> None:
    settle(full, 20 * BATCH)
    session = explained()
    token = uuid.uuid4()
    claimed = [id_ for (id_,) in session.run(CLAIM, token, BATCH)[0]]

    def call(query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        rows, plans = session.run(query, *arguments)
        check(plans)
        # A lane costs what was settled since its floor last moved, 64 lanes at most; reading the table costs 12,000.
        assert blocks(plans) < 6000, f"{blocks(plans)} blocks for {query}"
        return rows

    call("select outbox.extend_lease(%s, '30 s')", token)
    few = claimed[:5]
    assert call("select outbox.mark_failed(%s, %s, %s)", token, few, ["x"] * 5) == [(5,)]
    few = claimed[5:10]
    reasons = ["rejected"] * 5
    assert call("select outbox.mark_failed(%s, %s, %s, %s)", token, few, reasons, reasons) == [(5,)]
    call("select outbox.requeue_dead(%s)", few)
    call("select outbox.release_batch(%s)", token)
    session.run("select outbox.next_due()")
    assert call("select outbox.next_due() is not null") == [(True,)]
    call("select outbox.emit('plan', '1', dedup_key => 'p')")
    call("select outbox.emit('plan', '1', dedup_key => 'p')")
    delayed = full.execute("select max(id) from outbox.message").fetchall()[0][0]
    full.execute("update outbox.message set emitted_by = session_user where id = %s", [delayed - 10])
    assert call("select outbox.cancel(%s)", delayed - 10) == [(True,)]
    assert call("select outbox.cancel(%s)", claimed[20]) == [(False,)]
    call("select outbox.wait_sent(%s, '0')", claimed[20])


def test_what_is_due_or_held_is_found_by_its_index(full: Connection, explained: Callable[[], Explained]) -> None:
    """100,000 scheduled messages, 10,000 keys with a failing head and something behind it."""
    full.execute(
        """
        insert into outbox.message
            (lane, due_at, message_id, routing_key, key, content_type, created_at, emitted_by, body)
        select
            hashtextextended('f' || n, 0) & 63,
            case when k = 0 then clock_timestamp() + interval '1 h' else 'infinity' end,
            gen_random_uuid(), 'held', 'f' || n, 'application/json', clock_timestamp(), 'x', '1'
        from generate_series(1, 10000) as n, generate_series(0, 1) as k
        """
    )
    full.execute(
        """
        insert into outbox.held_key (lane, key, head_id)
        select lane, key, min(id) from outbox.message where routing_key = 'held' group by lane, key
        """
    )
    session = explained()
    assert max(claim for claim, _ in [round_trip(session) for _ in range(5)]) < 5000
    full.execute(
        """
        update outbox.message set due_at = clock_timestamp()
        where id in (select head_id from outbox.held_key limit 200)
        """
    )
    seen = 0
    for _ in range(3 * 64):  # with a backlog everywhere a lane has its turn every 64 claims
        full.execute("update outbox.horizon set due_checked_at = '-infinity'")
        token = uuid.uuid4()
        claimed, plans = session.run("select id, routing_key from outbox.claim_batch(%s, %s)", token, BATCH)
        check(plans)
        assert blocks(plans) < 6000
        seen += sum(routing_key == "held" for _, routing_key in claimed)
        _, plans = session.run("select outbox.mark_sent(%s, %s)", token, [id_ for id_, _ in claimed])
        check(plans)
        if seen == 400:
            return
    assert seen == 400, "200 heads, and what waited behind each"
