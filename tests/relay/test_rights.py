"""The rights that README.md gives are enough, and no more than that."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import psycopg
import pytest

import databases
from databases import PASSWORD, Roles, as_user
from harness import Management, Queue, RunOutbox, StartRelay, may


@dataclass(frozen=True)
class Pair:
    shop: str
    relay: str


@pytest.fixture
def pair(dsn: str, roles: Roles) -> Pair:
    """DSNs of two roles with the rights of the README's block, under names of their own."""
    readme = (databases.ROOT / "README.md").read_text()
    found = re.search(r"^<!-- rolled back -->\n```sql\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    suffix = secrets.token_hex(6)
    shop, relay = f"outbox_test_shop_{suffix}", f"outbox_test_relay_{suffix}"
    block = re.sub(r"\bshop\b", shop, re.sub(r"\bshop_relay\b", relay, found[1]))
    roles.made += [shop, relay]
    databases.psql(dsn, text=block + "".join(f"alter role {role} password '{PASSWORD}';" for role in roles.made))
    return Pair(as_user(dsn, shop), as_user(dsn, relay))


def test_shop_emits_and_relay_relays(pair: Pair, amqp_url: str, queue: Queue, outbox: RunOutbox) -> None:
    databases.query(pair.shop, "select outbox.emit('order.created', '{}')")
    assert outbox("relay", "--once", OUTBOX_DSN=pair.relay, OUTBOX_AMQP_URL=amqp_url).status == 0
    assert len(queue.receive(1)) == 1


def test_rights_are_enough_to_sleep_and_wake(pair: Pair, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay(
        "--lease", "8", "--confirm-timeout", "2", "--send-timeout", "1", "--heartbeat", "1", pg=pair.relay
    )
    relay.await_log("relay ready")
    for _ in range(3):
        databases.query(pair.shop, "select outbox.emit('order.created', '{}')")
        queue.receive(1)
    assert relay.stop() == 0
    assert "unavailable" not in relay.log


def test_neither_can_do_the_others_part(pair: Pair) -> None:
    with psycopg.connect(pair.shop) as shop, pytest.raises(psycopg.errors.InsufficientPrivilege):
        shop.execute("select outbox.claim_batch(gen_random_uuid())")
    with psycopg.connect(pair.relay) as relay, pytest.raises(psycopg.errors.InsufficientPrivilege):
        relay.execute("select outbox.emit('order.created', '{}')")


@pytest.mark.parametrize("who", ["shop", "relay"])
def test_neither_reads_the_table(pair: Pair, who: str) -> None:
    with psycopg.connect(getattr(pair, who)) as one, pytest.raises(psycopg.errors.InsufficientPrivilege):
        one.execute("select from outbox.message")


def test_relay_needs_only_write_on_the_broker(
    dsn: str, broker_user: str, management: Management, queue: Queue, outbox: RunOutbox
) -> None:
    may(management, broker_user, write="^outbox$")
    databases.query(dsn, "select outbox.emit('order.created', '{}')")
    assert outbox("relay", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=broker_user).status == 0
    assert len(queue.receive(1)) == 1
    declared = outbox("relay", "--once", "--declare", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=broker_user)
    assert declared.status == 2
    assert "ACCESS_REFUSED" in declared.errors[-1]
