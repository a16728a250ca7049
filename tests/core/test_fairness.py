"""No lane waits for ever behind a busy one, and no relay behind a busier one.

One session plays all relays: what is fair is decided by tokens and turns, not by who is quicker.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from typing import Any

import psycopg
import pytest

LANES = 64
BATCH = 20

Connection = psycopg.Connection[tuple[Any, ...]]


def fill(db: Connection, counts: dict[int, int]) -> None:
    """So many messages for each of these lanes, each lane by a key of its own."""
    db.execute(
        """
        with k as (
            select distinct on (1) hashtextextended(k, 0) & 63 as lane, k as key
            from (select 'k' || n as k from generate_series(1, 2000) as n) as k
        )
        select outbox.emit('m', '1', key => k.key)
        from unnest(%s::int[], %s::int[]) as w (lane, count)
        join k using (lane)
        cross join generate_series(1, w.count)
        """,
        [list(counts), list(counts.values())],
    )


class Relay:
    """Holds up to `window` batches before it settles the oldest."""

    def __init__(self, db: Connection, window: int = 1, batch: int = BATCH) -> None:
        self.db = db
        self.window = window
        self.batch = batch
        self.batches: deque[tuple[uuid.UUID, list[int]]] = deque()

    def claim(self) -> Counter[int]:
        """How many messages of which lane came."""
        while len(self.batches) >= self.window:
            self.settle()
        token = uuid.uuid4()
        ids = [id_ for (id_,) in self.db.execute("select id from outbox.claim_batch(%s, %s)", [token, self.batch])]
        self.batches.append((token, ids))
        return Counter(
            lane for (lane,) in self.db.execute("select lane from outbox.message where id = any (%s)", [ids])
        )

    def settle(self) -> None:
        token, ids = self.batches.popleft()
        assert self.db.execute("select outbox.mark_sent(%s, %s)", [token, ids]).fetchall() == [(len(ids),)]


@pytest.mark.parametrize("hogs", [(0,), (63,), (30, 31, 32), tuple(range(64))])
@pytest.mark.parametrize("window", [1, 3])
def test_a_huge_backlog_starves_no_lane(db: Connection, hogs: tuple[int, ...], window: int) -> None:
    claims = 3 * LANES
    # A hog could fill every batch of the whole test alone.
    fill(db, dict.fromkeys(range(LANES), 3) | dict.fromkeys(hogs, BATCH * claims // min(len(hogs), 4)))
    relay = Relay(db, window)
    since = dict.fromkeys(range(LANES), 0)
    left: Counter[int] = Counter(lane for (lane,) in db.execute("select lane from outbox.message"))
    for _ in range(claims):
        came = relay.claim()
        left -= came
        for lane in since:
            # A message that is in somebody's hands keeps the lane, so a lane may miss its turn once for each batch.
            since[lane] = 0 if came[lane] or not left[lane] else since[lane] + 1
            assert since[lane] < LANES * window, f"lane {lane} was passed over {since[lane]} times"


def test_relays_that_take_turns_get_the_same(db: Connection) -> None:
    fill(db, dict.fromkeys(range(LANES), 25))
    one, other = Relay(db), Relay(db)
    came = [(one.claim().total(), other.claim().total()) for _ in range(LANES * 25 // BATCH // 2)]
    assert came == [(BATCH, BATCH)] * len(came)
    assert one.claim().total() + other.claim().total() == 0


def test_a_relay_that_claims_faster_keeps_no_other_out(db: Connection) -> None:
    """Three batches are in its hands, each of as many lanes as a batch may have: as many are left for another."""
    fast, slow = Relay(db, window=3, batch=500), Relay(db, batch=500)
    for _ in range(4):
        for _ in range(5):
            fill(db, dict.fromkeys(range(LANES), 1))
            assert len(fast.claim()) == LANES // 4
        assert len(slow.claim()) == LANES // 4


@pytest.mark.parametrize("hogs", [(0, 63), (9, 58), (30, 31, 32)])
def test_busy_lanes_get_the_same(db: Connection, hogs: tuple[int, ...]) -> None:
    """Empty lanes before one of them give it no more turns."""
    fill(db, dict.fromkeys(hogs, BATCH * LANES))
    relay = Relay(db)
    came = sum((relay.claim() for _ in range(20 * len(hogs))), Counter[int]())
    assert came == Counter(dict.fromkeys(hogs, 20 * BATCH))
