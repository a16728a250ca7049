"""Many emitters, several relays, everything at once: nothing is lost, nothing leaves twice, keys keep their order.

The database keeps the books, inside the very transactions that are judged: `emitted` is written by the emitter, so it
rolls back with it; `handed` by the claiming statement; `gone` by a trigger on outbox.message. So no race of the test's
own threads can distort what is compared. OUTBOX_STRESS_SECONDS makes it longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors

SECONDS = float(os.environ.get("OUTBOX_STRESS_SECONDS", "15"))
EMITTERS = 6
FAST_EMITTERS = 2
RELAYS = 3
LANES = (9, 33, 58, 62)

Connection = psycopg.Connection[tuple[Any, ...]]

BOOKS = """
create table public.emitted (id bigint primary key, key text);
create table public.handed (
    n bigserial primary key, token uuid, id bigint, key text, at timestamptz default clock_timestamp()
);
create table public.refused (
    id bigint, retry_in interval, at timestamptz default now()
);
create table public.gone (n bigserial primary key, xid xid8 default pg_current_xact_id(), id bigint, key text);
create table public.other (n integer);
create function public.note_gone() returns trigger language plpgsql security definer as $$
begin
    insert into public.gone (id, key) values (old.id, old.key);
    return null;
end $$;
create trigger note_gone after delete on outbox.message for each row execute function public.note_gone();
"""

CLAIM = """
insert into public.handed (token, id, key)
select %(token)s, c.id, c.key
from outbox.claim_batch(%(token)s, %(size)s, %(lease)s, %(bytes)s) with ordinality as c
order by c.ordinality
returning id, key
"""

EMIT = """
insert into public.emitted (id, key)
select outbox.emit('stress', to_jsonb(repeat('x', %(size)s)), key => %(key)s, delay => %(delay)s), %(key)s
returning id
"""

# An exception block that fails is a subtransaction undone on the server.
UNDONE = """
do $$
begin
    begin
        perform outbox.emit('undone', '1');
        raise exception using errcode = 'OBXXX';
    exception when sqlstate 'OBXXX' then
        null;
    end;
end $$
"""


class Stress:
    """Threads that work until the time is over; what one of them raises fails the test."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.deadline = time.monotonic() + SECONDS
        self.threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.ends: dict[int, list[str]] = defaultdict(list)
        self.cancelled: set[int] = set()

    def start(self, work: Callable[[Stress, Connection, random.Random], None]) -> None:
        seed = random.SystemRandom().randrange(2**32)
        name = f"{work.__name__} with seed {seed}"

        def run() -> None:
            # A schedule that can be named in a report, not a secret.
            chance = random.Random(seed)  # noqa: S311
            try:
                with psycopg.connect(self.dsn, autocommit=True) as db:
                    while time.monotonic() < self.deadline and not self.errors:
                        work(self, db, chance)
            except (psycopg.Error, AssertionError) as error:
                self.errors.append(f"{name}: {error!r}")

        self.threads.append(threading.Thread(target=run, name=name))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        assert not self.errors, "\n".join(self.errors)


def keys_of_few_lanes(db: Connection, count: int) -> list[str]:
    """Keys that meet in a handful of lanes, where they are in each other's way."""
    rows = db.execute(
        """
        select k from (select 'k' || n as k from generate_series(1, 5000) as n) as n
        where hashtextextended(k collate "C", 0) & 63 = any (%s) limit %s
        """,
        [list(LANES), count],
    )
    return [key for (key,) in rows]


def nap(chance: random.Random) -> None:
    """Mostly moments; now and then long enough for the proof by lock holders to begin."""
    time.sleep(chance.choice([0, 0.001, 0.005, 0.02, 0.05, 0.2, 0.9]) if chance.random() < 0.3 else 0)


def claim(db: Connection, token: uuid.UUID, size: int, lease: str, room: int) -> list[tuple[Any, ...]]:
    return db.execute(CLAIM, {"token": token, "size": size, "lease": lease, "bytes": room}).fetchall()


def emit(db: Connection, chance: random.Random, keys: list[str]) -> None:
    key = chance.choice(keys) if keys and chance.random() < 0.8 else None
    delay = "50 ms" if key is None and chance.random() < 0.2 else None
    db.execute(EMIT, {"key": key, "delay": delay, "size": chance.choice([1, 10, 2000])})


def emit_in_savepoints(db: Connection, chance: random.Random, keys: list[str]) -> None:
    for _ in range(chance.randrange(4)):
        undo = chance.random() < 0.3
        with contextlib.suppress(psycopg.Rollback), db.transaction() as savepoint:
            emit(db, chance, keys)
            nap(chance)
            if undo:
                raise psycopg.Rollback(savepoint)


def emit_in_transaction(db: Connection, chance: random.Random, keys: list[str]) -> None:
    with contextlib.suppress(psycopg.Rollback), db.transaction() as whole:
        for _ in range(chance.randrange(1, 4)):
            emit(db, chance, keys)
            nap(chance)
            emit_in_savepoints(db, chance, keys)
        if chance.random() < 0.15:
            raise psycopg.Rollback(whole)


def emit_and_prepare(db: Connection, chance: random.Random) -> str:
    """Ends late, and not in order: no keys."""
    gid = f"stress-{uuid.uuid4()}"
    db.execute("begin")
    db.execute("set local outbox.notify = off")
    emit(db, chance, [])
    emit_in_savepoints(db, chance, [])
    nap(chance)
    db.execute(f"prepare transaction '{gid}'")
    return gid


def emitter(keys: list[str]) -> Callable[[Stress, Connection, random.Random], None]:
    """One session, so the emits of each of its keys are serialised."""
    prepared: list[str] = []

    def emitter(_: Stress, db: Connection, chance: random.Random) -> None:
        what = chance.random()
        if what < 0.1:
            prepared.append(emit_and_prepare(db, chance))
        elif what < 0.15:
            db.execute(UNDONE)
        else:
            emit_in_transaction(db, chance, keys)
        if prepared and chance.random() < 0.2:
            word = "commit" if chance.random() < 0.7 else "rollback"
            db.execute(f"{word} prepared '{prepared.pop(chance.randrange(len(prepared)))}'")

    return emitter


def fast_emitter(keys: list[str]) -> Callable[[Stress, Connection, random.Random], None]:
    """No pauses: something commits at every moment at which a relay looks."""

    def fast_emitter(_: Stress, db: Connection, chance: random.Random) -> None:
        db.execute(EMIT, {"key": chance.choice(keys), "delay": None, "size": 1})
        time.sleep(chance.choice([0, 0, 0.02]))

    return fast_emitter


def relay(stress: Stress, db: Connection, chance: random.Random) -> None:
    """Publishes key by key and stops a key at its first failure; sometimes loses its connection in the middle."""
    token = uuid.uuid4()
    claimed = claim(db, token, chance.choice([1, 5, 20, 100]), "60 s", chance.choice([100, 3000, 8388608, 8388608]))
    if not claimed:
        time.sleep(0.005)
        return
    nap(chance)
    by_key: dict[str | None, list[int]] = defaultdict(list)
    for id_, key in claimed:
        by_key[key if key is not None else f"no key {id_}"].append(id_)
    sent: list[int] = []
    failed: list[int] = []
    dead: list[int] = []
    for ids in by_key.values():
        broken = chance.randrange(len(ids)) if chance.random() < 0.15 else len(ids)
        # Unknown: neither confirmed nor refused before the connection was lost, though a later one may be refused.
        unknown = chance.randrange(broken + 1) if chance.random() < 0.05 else broken
        sent += ids[:unknown]
        if broken < len(ids):
            # One that dies before those in front of it have left is out of order by the broker's verdict, not by ours.
            (dead if unknown == broken and chance.random() < 0.1 else failed).append(ids[broken])
    if sent:
        assert db.execute("select outbox.mark_sent(%s, %s)", [token, sent]).fetchall() == [(len(sent),)]
    if failed:
        retry = [chance.choice(["0 s", "20 ms", "200 ms"]) for _ in failed]
        with db.transaction():
            settled = db.execute(
                "select outbox.mark_failed(%s, %s, %s, null, %s::interval[])",
                [token, failed, ["x"] * len(failed), retry],
            )
            assert settled.fetchall() == [(len(failed),)]
            db.execute(
                "insert into public.refused (id, retry_in) select * from unnest(%s::bigint[], %s::interval[])",
                [failed, retry],
            )
    if dead:
        settled = db.execute(
            "select outbox.mark_failed(%s, %s, %s, %s)", [token, dead, ["x"] * len(dead), ["rejected"] * len(dead)]
        )
        assert settled.fetchall() == [(len(dead),)]
    back = len(claimed) - len(sent) - len(failed) - len(dead)
    if back:
        assert db.execute("select outbox.release_batch(%s)", [token]).fetchall() == [(back,)]
    for id_, _key in claimed:
        stress.ends[id_].append("gone" if id_ in sent or id_ in dead else "again")


def slow_relay(stress: Stress, db: Connection, chance: random.Random) -> None:
    """Takes longer than its lease: what it settles late counts only where nobody has taken over."""
    token = uuid.uuid4()
    claimed = claim(db, token, 3, "1 s", 8388608)
    time.sleep(chance.uniform(0.9, 1.3) if claimed else 0.01)
    for id_, _key in claimed:
        [(settled,)] = db.execute("select outbox.mark_sent(%s, array[%s]::bigint[])", [token, id_]).fetchall()
        stress.ends[id_].append("gone" if settled else "again")


def writer(_: Stress, db: Connection, chance: random.Random) -> None:
    """Unrelated, and open for long: the proof by xid stands still."""
    with db.transaction():
        db.execute("insert into public.other values (1)")
        time.sleep(chance.uniform(0.5, 2))
    time.sleep(chance.uniform(0, 0.5))


def sweeper(_: Stress, db: Connection, chance: random.Random) -> None:
    db.execute("select outbox.cleanup()")
    time.sleep(chance.uniform(0.1, 0.5))


def canceller(stress: Stress, db: Connection, chance: random.Random) -> None:
    """Cancels at about the time at which a message is due."""
    [(id_,)] = db.execute(EMIT, {"key": None, "delay": "30 ms", "size": 1}).fetchall()
    time.sleep(chance.uniform(0, 0.1))
    with contextlib.suppress(psycopg.Rollback), db.transaction() as whole:
        [(cancelled,)] = db.execute("select outbox.cancel(%s)", [id_]).fetchall()
        nap(chance)
        if chance.random() < 0.3:
            raise psycopg.Rollback(whole)
        if cancelled:
            stress.cancelled.add(id_)


def requeuer(_: Stress, db: Connection, chance: random.Random) -> None:
    """Unkeyed ones only: a requeued message opts out of its key's order."""
    db.execute("select outbox.requeue_dead(array(select id from outbox.dead_letter where key is null limit 5))")
    time.sleep(chance.uniform(0.1, 0.3))


def drain(db: Connection, stress: Stress) -> None:
    """Ends what is prepared and delivers the rest; what cannot be claimed any more is lost."""
    for (gid,) in db.execute("select gid from pg_prepared_xacts where database = current_database()").fetchall():
        db.execute(f"commit prepared '{gid}'")
    patience = time.monotonic() + 10
    while db.execute("select true from outbox.message limit 1").fetchone():
        token = uuid.uuid4()
        ids = [id_ for id_, _ in claim(db, token, 500, "60 s", 8388608)]
        assert db.execute("select outbox.mark_sent(%s, %s)", [token, ids]).fetchall() == [(len(ids),)]
        for id_ in ids:
            stress.ends[id_].append("gone")
            patience = time.monotonic() + 10
        if time.monotonic() > patience:
            left = db.execute("select id, lane, due_at, key from outbox.message order by id limit 10").fetchall()
            pytest.fail(f"never handed out: {left}; {db.execute('table outbox.held_key').fetchall()}")
        time.sleep(0.02)


def misordered(db: Connection) -> list[tuple[Any, ...]]:
    """Messages of a key that left in a later transaction than a younger one of the same key."""
    return db.execute(
        """
        with left_in as (
            select g.id, g.key, min(g.n) over (partition by g.xid) as n
            from public.gone as g
            where g.key is not null
        ),
        before as (
            select l.*, max(l.id) over earlier as newest
            from left_in as l
            window earlier as (partition by l.key order by l.n range between unbounded preceding and 1 preceding)
        )
        select b.key, b.id, b.newest from before as b where b.newest > b.id order by b.n limit 10
        """
    ).fetchall()


@pytest.fixture
def books(db: Connection) -> Iterator[Connection]:
    db.execute(BOOKS)
    yield db
    # A prepared transaction would keep the database from being dropped.
    for (gid,) in db.execute("select gid from pg_prepared_xacts where database = current_database()").fetchall():
        with contextlib.suppress(errors.UndefinedObject):
            db.execute(f"rollback prepared '{gid}'")


@pytest.mark.timeout(60 + 3 * SECONDS)
def test_nothing_is_lost_doubled_or_misordered(dsn: str, books: Connection) -> None:
    keys = keys_of_few_lanes(books, EMITTERS * 3 + FAST_EMITTERS)
    stress = Stress(dsn)
    for number in range(EMITTERS):
        stress.start(emitter(keys[number * 3 : number * 3 + 3]))
    for number in range(FAST_EMITTERS):
        stress.start(fast_emitter([keys[EMITTERS * 3 + number]]))
    for work in [relay] * RELAYS + [slow_relay, writer, sweeper, canceller, requeuer]:
        stress.start(work)
    stress.join()
    drain(books, stress)

    def count(query: str) -> int:
        [(number,)] = books.execute(f"select count(*) from ({query}) as q").fetchall()
        return int(number)

    assert count("table public.emitted") > 20 * SECONDS, "the run was too small to mean anything"
    dead = "select id from outbox.dead_letter"
    assert count(f"select id from public.emitted except (select id from public.gone union {dead})") == 0, "lost"
    assert count("select id from public.gone except select id from public.emitted") == 0, "phantom"
    assert count("select id from public.handed except select id from public.emitted") == 0, "phantom"
    # A message leaves the table by being sent, dead or cancelled: once, and once more each time it was requeued.
    gone: dict[int, int] = dict(books.execute("select id, count(*) from public.gone group by id").fetchall())
    for id_, ends in stress.ends.items():
        assert ends.count("gone") + (id_ in stress.cancelled) == gone[id_], f"{id_} ended {ends}"
    handed: dict[int, int] = dict(books.execute("select id, count(*) from public.handed group by id").fetchall())
    assert handed == {id_: len(ends) for id_, ends in stress.ends.items()}, "handed out to two relays at once"
    assert misordered(books) == []
    # (Unless an older one of its key was refused after it: then it leaves as soon as that one is through.)
    early = """
        select from public.handed as h join public.refused as r using (id)
        where h.at > r.at and h.at < r.at + r.retry_in and not exists (
            select from public.refused as o join public.emitted as e using (id)
            where e.key = h.key and o.id < r.id and o.at > r.at and o.at < h.at
        )
    """
    assert count(early) == 0, "refused, and handed out again before its time"
    assert books.execute("select floor_repairs from outbox.horizon").fetchall() == [(0,)]
