"""kill -9 between receive, effect, retry and acknowledgement: nothing is lost, and once=True means one effect."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from databases import SERVER, named
from harness import Db
from outbox import Listener

LONG = os.environ.get("OUTBOX_LONG") == "1"
POINTS = ["in the transaction", "committed", "copy confirmed"]
if LONG:
    POINTS += ["received", "before the copy", "before the ack", "acked"]
ROUNDS = 200 // len(POINTS) + 1 if LONG else 1
MESSAGES = 6


async def handle(body: int) -> None:
    pytest.fail(f"called with {body}")


@pytest.mark.timeout(1800 if LONG else 120)
@pytest.mark.parametrize("point", POINTS)
async def test_killed(broker: Broker, db: Db, start: StartProcess, tmp_path: Path, point: str) -> None:
    shutil.copy(Path(__file__).parent / "killed.py", tmp_path)
    db.execute("create table effect (name text, n integer)")
    chance = random.Random(point)  # noqa: S311 - the same rounds each time
    environment = {"OUTBOX_DSN": named(SERVER, db.info.dbname), "OUTBOX_AMQP_URL": broker.url, "OUTBOX_LONG": ""}
    # The queues before the messages, as a first start would leave them.
    queues = [Listener("a", handle, name, (0.05,)) for name in ("once", "again")]
    async with running(worker_on(broker, *queues)):
        pass
    for _ in range(ROUNDS):
        db.execute("truncate effect, outbox.inbox")
        for body in range(MESSAGES):
            await broker.publish("a", body)
        nth = str(chance.randint(1, MESSAGES // 2))
        killed = start("worker", "killed:worker", **environment, KILL_AT=point, KILL_NTH=nth)
        assert await killed.ended() == -9
        last = start("worker", "killed:worker", **environment)

        def complete() -> bool:
            rows = db.execute("select name, n, count(*) from effect group by 1, 2").fetchall()
            found = {(name, body): count for name, body, count in rows}
            enough = all(found.get(("again", body), 0) >= 1 + body % 2 for body in range(MESSAGES))
            return enough and all(("once", body) in found for body in range(MESSAGES))

        await eventually(complete, "an effect of every message")
        last.process.terminate()
        assert await last.ended() == 0
        counts = Counter(row[0] for row in db.execute("select n from effect where name = 'once'"))
        assert counts == dict.fromkeys(range(MESSAGES), 1)
        for queue in ("once", "again"):
            assert await broker.ready(queue + ".dlq") == 0
