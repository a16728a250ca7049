"""The relay runs on uvloop where it is installed, and on the standard library's loop where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness import PATIENCE, Db, Queue, emit, waiting

RELAY = """
import asyncio, sys
if {plain}:
    sys.modules["uvloop"] = None
from outbox import cli, relay
began = relay.MessageRelay.run
async def run(self):
    print(type(asyncio.get_running_loop()).__module__)
    await began(self)
relay.MessageRelay.run = run
sys.exit(cli.main(["relay", "--once"]))
"""


@pytest.mark.parametrize(("plain", "module"), [(False, "uvloop"), (True, "asyncio.unix_events")])
def test_event_loop(dsn: str, amqp_url: str, db: Db, queue: Queue, *, plain: bool, module: str) -> None:
    emit(db)
    done = subprocess.run(
        [sys.executable, "-c", RELAY.format(plain=plain)],
        env=os.environ | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, module), done.stderr
    assert waiting(db) == 0
    assert len(queue.receive(1)) == 1
