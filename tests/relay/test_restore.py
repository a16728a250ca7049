"""A dump taken in the midst of work, restored into another server: a relay there delivers what waits, in order."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import databases
import servers
from databases import Mode
from harness import Db, Queue, StartRelay, emit, eventually

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

# Numbers of transactions that a new server has not reached yet.
AGE = "do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$"
STATUS = "select message_id::text, status from outbox.message_status"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[servers.Servers]:
    with servers.private(rabbitmq=False, name="restore", quiet=True) as private:
        private.install_extension(databases.BUILD)
        yield private


def fill(db: Db) -> dict[str, str]:
    """Messages in every state, by message_id; a relay has leases and has proved how far the ids are safe."""
    names: dict[str, str] = {}

    def one(name: str, **more: Any) -> int:
        id_, message_id = emit(db, "restored", name, **more)
        names[message_id] = name
        return id_

    def claim() -> tuple[uuid.UUID, list[int]]:
        token = uuid.uuid4()
        claimed = "select id from outbox.claim_batch(%s, relay => outbox.hello('old'))"
        return token, [row[0] for row in db.execute(claimed, [token])]

    db.execute("select outbox.configure('retention', 'forever')")
    one("sent")
    token, ids = claim()
    db.execute("select outbox.mark_sent(%s, %s)", [token, ids])
    dead, failing = one("dead"), one("retrying", key="failing")
    one("held", key="failing")
    token, ids = claim()
    refuse = "select outbox.mark_failed(%s, array[%s]::bigint[], array['no'], array[%s], array[%s]::interval[])"
    db.execute(refuse, [token, dead, "rejected", None])
    db.execute(refuse, [token, failing, None, "2 s"])
    db.execute("select outbox.release_batch(%s)", [token])
    db.execute("select outbox.configure('on_dead', 'park')")
    parking = one("dead, parked", key="parked")
    token, ids = claim()
    db.execute(refuse, [token, parking, "rejected", None])
    one("parked", key="parked")
    one("scheduled", delay="2 s")
    one("in flight 1", key="flying")
    one("in flight 2", key="flying")
    assert len(claim()[1]) == 2
    one("waiting behind them", key="flying")
    one("waiting")
    return names


def proved(db: Db) -> bool:
    db.execute("select outbox.release_batch(gen_random_uuid())")
    proofs = "select count(*) from outbox.horizon where pending_xid is not null and safe_id > 0"
    return db.execute(proofs).fetchone() == (1,)


def received(queue: Queue, count: int) -> list[str]:
    return [json.loads(one.body) for one in queue.receive(count)]


@pytest.mark.parametrize("mode", databases.MODES)
def test_dumped_while_a_relay_had_leases(
    elsewhere: servers.Servers, queue: Queue, start_relay: StartRelay, mode: Mode
) -> None:
    with databases.database(databases.SERVER) as dsn, databases.database(elsewhere.dsn) as restored:
        databases.install(dsn, mode)
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(AGE)
            names = fill(db)
            before: dict[str, str] = dict(db.execute(STATUS).fetchall())
            newest = db.execute("select last_value from outbox.message_id_seq").fetchone()
            assert newest
            eventually(lambda: proved(db), "a proof under way after one that is done")
            databases.restore(dsn, restored)
        with psycopg.connect(restored, autocommit=True) as db:
            after: dict[str, str] = dict(db.execute(STATUS).fetchall())
            assert {names[one]: after[one] for one in names} == {
                names[one]: "waiting" if mode == "extension" and before[one] == "in_flight" else before[one]
                for one in names
            }
            # What one server proved by its transactions means nothing to another. An extension's dump leaves it out.
            alien = "select count(*) from outbox.horizon where pending_xid > pg_current_xact_id()"
            assert db.execute(alien).fetchone() == (int(mode == "plain"),)
            relay = start_relay(pg=restored)
            relay.await_log("relay ready")
            found = received(queue, 7)
            flying, failing = ["in flight 1", "in flight 2", "waiting behind them"], ["retrying", "held"]
            assert sorted(found) == sorted([*flying, *failing, "scheduled", "waiting"])
            assert [one for one in found if one in flying] == flying
            assert [one for one in found if one in failing] == failing
            assert db.execute(alien).fetchone() == (0,)
            db.execute("select outbox.requeue_dead(array(select id from outbox.dead_letter order by id))")
            assert sorted(received(queue, 3)) == ["dead", "dead, parked", "parked"]
            id_, _ = emit(db)
            assert id_ > newest[0]
            queue.receive(1)
            eventually(lambda: db.execute("select count(*) from outbox.message").fetchone() == (0,), "an empty table")
            assert relay.stop() == 0
            db.execute("select outbox.cleanup()")
            assert db.execute("select floor_repairs from outbox.horizon").fetchall() == [(0,)]
            sent = "select count(*) from outbox.message_status where status = 'sent'"
            assert db.execute(sent).fetchone() == (len(names) + 1,)
