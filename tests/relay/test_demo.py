"""`make demo` must fail when what it shows is not true."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

import databases
from harness import Management, Queue


@pytest.fixture
def shop() -> Iterator[str]:
    name = f"outbox_test_{secrets.token_hex(6)}"
    yield name
    databases.query(os.environ["OUTBOX_DSN"], f"drop database if exists {name} with (force)")


def run_demo(shop: str, amqp_url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, databases.ROOT / "tests" / "demo.py", shop],
        env={**os.environ, "OUTBOX_AMQP_URL": amqp_url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_demo_tells_its_story(shop: str, amqp_url: str) -> None:
    done = run_demo(shop, amqp_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "order 2, the rolled-back one, never arrived" in done.stdout
    for number in (1, 2):
        assert f"payment {number} failed, was tried again and is in the ledger once, from attempt 2" in done.stdout
    assert "\033" not in done.stdout


def test_demo_fails_when_the_rolled_back_order_arrives(shop: str, amqp_url: str, management: Management) -> None:
    Queue(management, name="warehouse")
    forged = {"routing_key": "order.created", "properties": {}, "payload": '{"order": 2}', "payload_encoding": "string"}
    management("POST", "/exchanges/{vhost}/outbox/publish", forged)
    done = run_demo(shop, amqp_url)
    assert done.returncode == 1
    assert "demo failed: the rolled-back order arrived" in done.stderr


def test_demo_fails_when_the_relay_does_not_start(shop: str, amqp_url: str, management: Management) -> None:
    management("PUT", "/exchanges/{vhost}/outbox", {"type": "fanout", "durable": True})
    done = run_demo(shop, amqp_url)
    assert done.returncode == 1
    assert "demo failed: the relay did not start" in done.stderr
