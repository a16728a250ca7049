"""kill -9 between receive, effect, retry and acknowledgement: nothing is lost, and once=True means one effect."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from databases import SERVER, named
from harness import Db, emit, waiting
from outbox import Listener

LONG = os.environ.get("OUTBOX_LONG") == "1"
LIMIT = 3000 if LONG else 120
QUEUE_POINTS = ["in the transaction", "committed", "copy confirmed"]
TABLE_POINTS = ["claimed", "in the transaction", "committed"]
if LONG:
    QUEUE_POINTS += ["received", "before the copy", "before the ack", "acked"]
    TABLE_POINTS += ["received", "before the mark", "marked", "before the retry is marked", "retry marked"]
TIMES = 200
MESSAGES = 6

Publish = Callable[[int], Awaitable[object]]


def cases(points: list[str]) -> pytest.MarkDecorator:
    """One after another on the same messages; or each by itself, so often that it is 200 times in all."""
    return pytest.mark.parametrize("points", [[one] for one in points] if LONG else [points], ids=", ".join)


async def handle(body: int) -> None:
    pytest.fail(f"called with {body}")


class Scene:
    def __init__(self, db: Db, start: StartProcess, folder: Path, **environment: str) -> None:
        self.db, self._start = db, start
        self._environment = {"OUTBOX_DSN": named(SERVER, db.info.dbname), "OUTBOX_LONG": "", **environment}
        shutil.copy(Path(__file__).parent / "killed.py", folder)
        db.execute("create table effect (name text, n integer)")

    def effects(self, name: str) -> Counter[int]:
        return Counter(row[0] for row in self.db.execute("select n from effect where name = %s", [name]))

    def complete(self, bodies: Iterable[int]) -> bool:
        """Every message has had its effects, and each odd one was refused once on the way."""
        again, once = self.effects("again"), self.effects("once")
        return all(again[body] >= 1 + body % 2 and once[body] for body in bodies)

    async def kill(self, points: list[str], rounds: int, publish: Publish) -> None:
        chance = random.Random(points[0])  # noqa: S311 - the same rounds each time
        for number in range(rounds):
            # Others each time: a copy may be left of a message that was handled.
            bodies = range(number * MESSAGES + 1, (number + 1) * MESSAGES + 1)
            for body in bodies:
                await publish(body)
            for point in points:
                nth = chance.randint(1, MESSAGES // 2) if len(points) == 1 and point != "claimed" else 1
                killed = self._start("worker", "killed:worker", **self._environment, KILL_AT=point, KILL_NTH=str(nth))
                assert await killed.ended() == -9, killed.log
            last = self._start("worker", "killed:worker", **self._environment)
            await eventually(lambda bodies=bodies: self.complete(bodies), "an effect of every message")  # type: ignore[misc]
            await eventually(lambda: not waiting(self.db), "an empty outbox")
            last.process.terminate()
            assert await last.ended() == 0
        assert self.effects("once") == dict.fromkeys(range(1, rounds * MESSAGES + 1), 1)


@pytest.mark.timeout(LIMIT)
@cases(QUEUE_POINTS)
async def test_consuming_from_a_queue(  # noqa: PLR0917 - fixtures
    broker: Broker, db: Db, start: StartProcess, tmp_path: Path, queue_type: str, points: list[str]
) -> None:
    # The queues before the messages, as a first start would leave them.
    queues = [Listener("a", handle, name, (0.05,)) for name in ("once", "again")]
    async with running(worker_on(broker, *queues, queue_type=queue_type)):
        pass
    scene = Scene(db, start, tmp_path, SOURCE=queue_type, OUTBOX_AMQP_URL=broker.url)
    await scene.kill(points, TIMES // len(QUEUE_POINTS) + 1 if LONG else 1, lambda body: broker.publish("a", body))
    assert [await broker.ready(f"{name}.dlq") for name in ("once", "again")] == [0, 0]


@pytest.mark.timeout(LIMIT)
@cases(TABLE_POINTS)
async def test_consuming_from_the_database(db: Db, start: StartProcess, tmp_path: Path, points: list[str]) -> None:
    async def publish(body: int) -> None:
        emit(db, "a", body)

    scene = Scene(db, start, tmp_path, SOURCE="postgres")
    await scene.kill(points, TIMES // len(TABLE_POINTS) + 1 if LONG else 1, publish)
    assert db.execute("select count(*) from outbox.dead_letter").fetchone() == (0,)
