"""The rights that README.md gives are enough, and no more than that."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import databases
from harness import Management, Queue, RunOutbox, StartRelay


@dataclass(frozen=True)
class Roles:
    shop: str
    relay: str


@pytest.fixture
def roles(db: psycopg.Connection[Any], dsn: str) -> Iterator[Roles]:
    """DSNs of two roles with the rights of the README's block, under names of their own."""
    readme = (databases.ROOT / "README.md").read_text()
    found = re.search(r"^<!-- rolled back -->\n```sql\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    suffix = secrets.token_hex(6)
    shop, relay = f"outbox_test_shop_{suffix}", f"outbox_test_relay_{suffix}"
    block = re.sub(r"\bshop\b", shop, re.sub(r"\bshop_relay\b", relay, found[1]))
    databases.psql(dsn, text=block + f"alter role {shop} password 'x'; alter role {relay} password 'x';")
    at = urlsplit(dsn)
    yield Roles(*(at._replace(netloc=f"{role}:x@{at.hostname}:{at.port}").geturl() for role in (shop, relay)))
    db.execute(f"drop owned by {shop}, {relay}")
    db.execute(f"drop role {shop}, {relay}")


def test_shop_emits_and_relay_relays(roles: Roles, amqp_url: str, queue: Queue, outbox: RunOutbox) -> None:
    databases.query(roles.shop, "select outbox.emit('order.created', '{}')")
    assert outbox("relay", "--once", OUTBOX_DSN=roles.relay, OUTBOX_AMQP_URL=amqp_url).status == 0
    assert len(queue.receive(1)) == 1


def test_rights_are_enough_to_sleep_and_wake(roles: Roles, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay(
        "--lease", "8", "--confirm-timeout", "2", "--send-timeout", "1", "--heartbeat", "1", pg=roles.relay
    )
    relay.await_log("relay ready")
    for _ in range(3):
        databases.query(roles.shop, "select outbox.emit('order.created', '{}')")
        queue.receive(1)
    assert relay.stop() == 0
    assert "unavailable" not in relay.log


def test_neither_can_do_the_others_part(roles: Roles) -> None:
    with psycopg.connect(roles.shop) as shop, pytest.raises(psycopg.errors.InsufficientPrivilege):
        shop.execute("select outbox.claim_batch(gen_random_uuid())")
    with psycopg.connect(roles.relay) as relay, pytest.raises(psycopg.errors.InsufficientPrivilege):
        relay.execute("select outbox.emit('order.created', '{}')")


@pytest.mark.parametrize("who", ["shop", "relay"])
def test_neither_reads_the_table(roles: Roles, who: str) -> None:
    with psycopg.connect(getattr(roles, who)) as one, pytest.raises(psycopg.errors.InsufficientPrivilege):
        one.execute("select from outbox.message")


def test_relay_needs_only_write_on_the_broker(
    dsn: str, amqp_url: str, management: Management, queue: Queue, outbox: RunOutbox
) -> None:
    user = f"outbox_test_{secrets.token_hex(6)}"
    management("PUT", f"/users/{user}", {"password": "x", "tags": ""})
    try:
        rights = {"configure": "^$", "write": "^outbox$", "read": "^$"}
        management("PUT", f"/permissions/{{vhost}}/{user}", rights)
        at = urlsplit(amqp_url)
        as_user = at._replace(netloc=f"{user}:x@{at.hostname}:{at.port}").geturl()
        databases.query(dsn, "select outbox.emit('order.created', '{}')")
        assert outbox("relay", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=as_user).status == 0
        assert len(queue.receive(1)) == 1
        declared = outbox("relay", "--once", "--declare", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=as_user)
        assert declared.status == 2
        assert "ACCESS_REFUSED" in declared.errors[-1]
    finally:
        management("DELETE", f"/users/{user}")
