"""The relay does its work whatever is set for its role."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from databases import SERVER, Roles, as_user, psql, query
from harness import PATIENCE, Management, Queue

SETTINGS = {
    "values": (
        "bytea_output = escape",
        "DateStyle = German",
        "extra_float_digits = -15",
        "IntervalStyle = iso_8601",
        "standard_conforming_strings = off",
        "TimeZone = 'Asia/Kathmandu'",
    ),
    "lists": ("array_nulls = off",),
    "text": ("client_encoding = latin1",),
    "transactions": (
        "default_transaction_deferrable = on",
        "default_transaction_isolation = serializable",
        "default_transaction_read_only = on",
        "idle_in_transaction_session_timeout = '10ms'",
        "lock_timeout = '1ms'",
        "synchronous_commit = off",
    ),
    "the rest": (
        "plpgsql.extra_errors = 'all'",
        "row_security = off",
        "search_path = ''",
        "session_replication_role = replica",
    ),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_relays_under(dsn: str, roles: Roles, amqp_url: str, management: Management, kind: str) -> None:
    queue = Queue(management, binding="order.*")
    role = roles.make("relay")
    query(dsn, f"select outbox.grant_relay('{role}')")
    psql(SERVER, text="".join(f"alter role {role} set {setting};" for setting in SETTINGS[kind]))
    psql(
        dsn,
        text="""
            select outbox.emit('order.created', '"✓"', key => '✓', headers => '{"h": "✓ 語"}', expires_in => '1 day');
            select outbox.emit_bytes('order.created', decode('00ff', 'hex'));
            select outbox.emit('unroutable', '1');
        """,
    )
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "relay", "--once"],
        env=os.environ | {"OUTBOX_DSN": as_user(dsn, role), "OUTBOX_AMQP_URL": amqp_url},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    received = {message.body: message.properties for message in queue.receive(2)}
    assert set(received) == {'"✓"'.encode(), b"\x00\xff"}
    assert received['"✓"'.encode()]["headers"]["h"] == "✓ 語"
    assert query(dsn, "select m.routing_key, m.attempts, m.due_at > now() from outbox.message as m") == "unroutable|1|t"
