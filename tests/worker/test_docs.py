"""Every example of docs/worker.md runs, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from worker.conftest import Broker, StartProcess, eventually

from emitter.documents import DOCS, examples, write
from harness import Db, emit, waiting


@pytest.fixture
def environment(dsn: str, broker: Broker) -> dict[str, str]:
    return {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": broker.url}


async def test_app(broker: Broker, start: StartProcess, tmp_path: Path, environment: dict[str, str]) -> None:
    write(tmp_path, examples("worker.md"))
    one = start("worker", "app:worker", **environment)
    await one.await_log("worker ready")
    await broker.publish("order.created", {"order": 1, "item": "cup"})
    await broker.publish("order.created", {"order": 2, "item": "anvil"})
    for words in ("reserved cup", "audit order.created 1", "audit order.created 2"):
        await one.await_log(words)
    await broker.filled("warehouse.dlq")
    one.process.terminate()
    assert await one.ended() == 0
    [block] = re.findall(r"^```sh\n(.*?)^```$", (DOCS / "worker.md").read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        command = line.partition("#")[0].split()
        done = start(*command[1:], **environment)
        assert await done.ended() == 0, done.log
    assert await broker.ready("warehouse") == 1
    table = start("topology", "app:worker", **environment)
    assert await table.ended() == 0
    assert "outbox.delay_10s" in table.log


async def test_stock(db: Db, broker: Broker, start: StartProcess, tmp_path: Path, environment: dict[str, str]) -> None:
    write(tmp_path, examples("worker.md"))
    db.execute("create table stock (item text, pieces integer); insert into stock values ('cup', 5)")
    await start("worker", "stock:worker", **environment).await_log("worker ready")
    identity = await broker.publish("order.created", {"item": "cup"})
    await broker.publish("order.created", {"item": "cup"}, message_id=identity)
    await eventually(lambda: waiting(db) == 1, "what the listener emits")
    assert db.execute("select pieces from stock").fetchone() == (4,)


async def test_direct(db: Db, start: StartProcess, tmp_path: Path, environment: dict[str, str]) -> None:
    write(tmp_path, examples("worker.md"))
    one = start("worker", "direct:worker", **environment)
    await one.await_log("worker ready")
    emit(db, "order.created", {"item": "cup"})
    await one.await_log("reserved cup")
