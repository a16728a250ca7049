"""One run through the public functions, each in the hands of the role whose part it is.

The statements are calls with constants and nothing else: what else they named could be somebody else's.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

from databases import PARTS, as_user

BATCH = "00000000-0000-0000-0000-000000000001"
EMITS = (
    r"""emit('plain', E'{"n": 1, "t": "é\\\\n"}')""",
    "emit('keyed', '[1.50, 1e3]', key => 'k')",
    """emit('whole', 'true', 'k2', '{"a": "x", "n": 9007199254740993}', 'elsewhere', expires_in => '1 day',
        properties => '{"priority": 3}')""",
    "emit('later', '1', delay => '1 hour')",
    "emit('later', '1', eta => '2001-02-03T04:05:06Z')",
    r"emit_bytes('bytes', E'\\x00ff5c27', 'application/x-bytes', 'k')",
    "emit_event('order', '1', 'placed', '{}')",
    "emit('once', '1', dedup_key => 'd')",
    "emit('once', '1', dedup_key => 'd')",
    """set_context('{"trace": "1"}')""",
    "cancel('-1')",
    "version()",
)
MANY = [
    {"routing_key": "many", "payload": {"a": "' \""}, "headers": {"h": [1, None, "é"]}},
    {"routing_key": "many", "body": "AP9cJw==", "content_type": "x/y", "delay": "1 day 02:00:00.5"},
    {"routing_key": "many", "payload": None, "message_id": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"},
    {"routing_key": "many", "payload": 1, "expires_in": "P1DT2H"},
]
BAD_MANY = [
    {"routing_key": "a", "payload": 1, "eta": "2024-01-01T00:00:00x5Z"},
    {"routing_key": "a", "payload": 1, "delay": "1x5 s"},
    {"routing_key": "a", "payload": 1, "eta": "01/02/2030"},
]
RELAY = (
    "hello('story') is null",
    "relay_settings()",
    "next_due() is null",
    f"extend_lease('{BATCH}', '1 min')",
    f"mark_failed('{BATCH}', '{{1,2,3}}', '{{x,y,é}}', '{{unroutable,rejected,unroutable}}', '{{1 h,2 h,3 h}}')",
    f"mark_sent('{BATCH}', '{{5,6}}')",
    f"release_batch('{BATCH}')",
    "arm_wakeup()",
    "disarm_wakeup()",
)
ADMIN = (
    "configure('retry_base', '2 s')",
    "configure('retry_multiplier', '1.5')",
    "configure('max_attempts', '5')",
    "configure('retry_cap', 'nonsense')",
    "pause()",
    "resume()",
    "requeue_dead('{1,2,3}')",
    "purge_dead('1 day')",
    "wait_sent('5', '1 s')",
    *(f"{verb}_{part}('pg_monitor')" for part in PARTS for verb in ("grant", "revoke")),
)
CLAIM = (
    "select id, routing_key, key, body, content_type, headers, properties, exchange, attempts, expires_in is null"
    f" from outbox.claim_batch('{BATCH}', '100', '1 min')"
)
DEAD_AMONG = (
    "select id, exchange, routing_key, key, body, content_type, headers, properties, attempts, error, reason"
    " from outbox.dead_among('{1,2,3}')"
)
WRITTEN = """
select m.id, m.routing_key, m.key, m.exchange, m.content_type, m.headers::text, m.properties::text,
    encode(m.body, 'hex'), m.attempts, m.error, m.dedup_key, m.emitted_by <> current_user, m.due_at is null,
    round(extract(epoch from m.due_at - m.created_at) / 600),
    round(extract(epoch from m.expires_at - coalesce(m.due_at, m.created_at)) / 600),
    m.key is null or m.lane = hashtextextended(m.key, 0) & 63
from outbox.message as m
order by m.id
"""
KEPT = "select a.id, a.routing_key, encode(a.body, 'hex') from outbox.archive as a order by a.id"
DAYS = """
select c.relname, pg_get_expr(c.relpartbound, c.oid), c.reltablespace::text
from pg_inherits as i
join pg_class as c on c.oid = i.inhrelid
where i.inhparent = 'outbox.archive'::regclass
order by c.relname
"""


def answer(connection: psycopg.Connection[Any], statement: str) -> Any:
    """The rows; an error as its code."""
    try:
        return connection.execute(statement.encode()).fetchall()
    except psycopg.Error as error:
        return error.sqlstate


def call(connection: psycopg.Connection[Any], function: str) -> Any:
    return answer(connection, f"select outbox.{function}")


def tell(dsn: str, roles: dict[str, str], prepare: str = "") -> dict[str, Any]:
    """What the functions answered and what was then in the tables, as the superuser reads it."""
    with (
        psycopg.connect(dsn, autocommit=True) as reader,
        psycopg.connect(as_user(dsn, roles["emit"]), autocommit=True) as emit,
        psycopg.connect(as_user(dsn, roles["relay"]), autocommit=True) as relay,
        psycopg.connect(as_user(dsn, roles["admin"]), autocommit=True) as admin,
    ):
        reader.execute("select outbox.configure('retention', '7 days')")
        for connection in (emit, relay, admin):
            connection.execute("set client_encoding = utf8")
            if prepare:
                connection.execute(prepare.encode())
        facts = {function: call(emit, function) for function in EMITS}
        for messages in (MANY, *([bad] for bad in BAD_MANY)):
            text = json.dumps(messages, ensure_ascii=False).replace("\\", "\\\\").replace("'", "''")
            facts[f"emit_many: {messages}"] = call(emit, f"emit_many(E'{text}')")
        with emit.transaction():
            call(emit, """set_context('{"trace": "1"}')""")
            facts["in context"] = call(emit, "emit('context', '1')")
        facts["written"] = reader.execute(WRITTEN).fetchall()
        facts["cancelled"] = call(emit, "cancel('4')")
        facts["cleanup"] = answer(relay, "select (outbox.cleanup()).more")
        rows = answer(relay, CLAIM)
        facts["claimed"] = sorted(rows, key=lambda row: int(row[0])) if isinstance(rows, list) else rows
        facts |= {function: call(relay, function) for function in RELAY}
        facts["dead_among('{1,2,3}')"] = answer(relay, DEAD_AMONG)
        facts["settled"] = reader.execute(WRITTEN).fetchall()
        facts["kept"] = reader.execute(KEPT).fetchall()
        facts["days"] = reader.execute(DAYS).fetchall()
        facts["dead"] = reader.execute("select d.id, d.reason, d.error from outbox.dead_letter as d").fetchall()
        facts |= {function: call(admin, function) for function in ADMIN}
        facts["admin: cleanup"] = answer(admin, "select (outbox.cleanup()).more")
        facts["settings"] = reader.execute("select s.name, s.value from outbox.setting as s order by s.name").fetchall()
        facts["at the end"] = reader.execute(WRITTEN).fetchall()
    return facts
