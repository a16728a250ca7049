"""Hypothesis drives the real functions and a model of them side by side, transactions staying open across steps.

Three sessions emit, two relay, one looks on. Nothing waits for a clock, and no answer depends on one: the owner moves
due times, leases and the horizon's checks into the past, so that every settling call may move the floors, and prolongs
what the functions themselves shorten. The examples are the same each time; OUTBOX_LONG=1 makes others, and more.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

LONG = os.environ.get("OUTBOX_LONG") == "1"
EXAMPLES = int(os.environ.get("OUTBOX_MODEL_EXAMPLES", "400" if LONG else "40"))
STEPS = 50
MAX_ATTEMPTS = 3
EVERY = 7
KEYS = ("c", "c", "c", "d", "x", None)  # c and d share a lane

Connection = psycopg.Connection[tuple[Any, ...]]

FORGET = """
truncate outbox.message, outbox.dead_letter, outbox.dedup, outbox.held_key, outbox.relay, outbox.lane, outbox.horizon
restart identity;
alter sequence outbox.lane_turn restart;
select outbox.cleanup()
"""
# Every settling call looks at the horizon, and every claim at what is due.
NOW = """
update outbox.horizon
set checked_at = '-infinity', moved_at = '-infinity', noted_at = '-infinity', due_checked_at = '-infinity'
"""


@dataclass
class Message:
    id: int
    key: str | None
    lane: int
    timed: bool  # delayed or requeued: its place is when it is due
    emitted: int  # transactions that had ended when it was emitted, and when its own did
    committed: int = 0
    state: str = "waiting"  # waiting, sent, dead, cancelled
    failed: bool = False  # refused at least once since it was emitted or requeued
    asleep: bool = False  # waits for a time of its own, which has not come
    attempts: int = 0
    deaths: int = 0


@dataclass
class Session:
    """What a transaction has done so far, and how much of it when each savepoint was set."""

    db: Connection | None
    done: list[tuple[str, Message]] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)
    dedup: list[tuple[str, int, int]] = field(default_factory=list)  # key, id, length of done before it
    touched: set[str] = field(default_factory=set)  # dedup keys whose rows it has locked
    open: bool = False

    def undo(self, length: int) -> None:
        del self.done[length:]
        self.dedup = [one for one in self.dedup if one[2] < length]
        self.savepoints = [at for at in self.savepoints if at <= length]

    def emitted(self) -> list[Message]:
        gone = {message.id for what, message in self.done if what == "cancel"}
        return [message for what, message in self.done if what == "emit" and message.id not in gone]


@dataclass
class Lease:
    token: uuid.UUID
    ids: list[int]
    relay: int | None = None
    expired: bool = False


SESSION = st.integers(0, 2)
PICK = st.integers(0, 1000)
SIZE = st.sampled_from([1, 2, 3, 500, 500, 500])
ROOM = st.sampled_from([100, 4000, 8388608, 8388608])
PART = st.sampled_from([7, 7, 7, 1, 2, 3, 4, 5, 6, 0])  # which of every three messages


class Model(RuleBasedStateMachine):
    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.connections = [psycopg.connect(dsn, autocommit=True) for _ in range(7)]
        for db in self.connections:
            # The steps are made so that nobody waits: a wait is a bug, and must not become a hanging test. Only vacuum,
            # and sessions of the example before that have not ended yet, may hold up the beginning.
            db.execute("set lock_timeout = '30 s'")
            # The same steps must find the same lanes, or Hypothesis cannot shrink them.
            db.execute("select setseed(0.5)")
        self.sessions = [Session(db) for db in self.connections[:3]]
        # A session is granted its own life lock again: claiming without its key, it would take itself for dead.
        self.relay, self.nameless, self.owner, self.writer = self.connections[3:]
        self.prepared: dict[str, Session] = {}
        self.messages: dict[int, Message] = {}
        self.dedup: dict[str, int] = {}
        self.leases: dict[int, Lease] = {}  # by lane
        self.lost: list[Lease] = []
        self.life: int | None = None
        self.writing = False
        self.claims = 0
        self.ends = 0

    @initialize()
    def forget(self) -> None:
        self.owner.execute(FORGET)
        self.owner.execute("select outbox.configure('max_attempts', %s)", [str(MAX_ATTEMPTS)])

    # --- emitters

    def begin(self, session: Session) -> Connection:
        assert session.db
        if not session.open:
            session.db.execute("begin")
            session.open = True
        return session.db

    @rule(
        which=SESSION,
        key=st.sampled_from(KEYS),
        delay=st.sampled_from([None, None, None, "1 h"]),
        size=st.sampled_from([1, 10, 3000]),
        name=st.sampled_from([None, None, None, "p", "q"]),
    )
    def emit(self, which: int, key: str | None, delay: str | None, size: int, name: str | None) -> None:
        session = self.sessions[which]
        if name in self.touched(session):
            return  # it would wait
        if name:
            session.touched.add(name)
        self.emit_as(session, None if name else key, None if name else delay, size, name)

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def emit_and_commit(self, key: str | None, count: int) -> None:
        session = Session(self.owner)
        for _ in range(count):
            self.emit_as(session, key, None, 1, None)
        self.owner.execute("commit")
        self.ended(session, committed=True)

    def touched(self, but: Session | None = None) -> set[str]:
        others = [*self.sessions, *self.prepared.values()]
        return {name for other in others if other is not but for name in other.touched}

    def emit_as(self, session: Session, key: str | None, delay: str | None, size: int, name: str | None) -> None:
        db = self.begin(session)
        [(id_,)] = db.execute(
            "select outbox.emit('m', to_jsonb(repeat('x', %s)), key => %s, delay => %s, dedup_key => %s)",
            [size, key, delay, name],
        ).fetchall()
        known = self.dedup | {held: first for held, first, _ in session.dedup}
        if name in known:
            assert id_ == known[name], "a second emit of a dedup key returns the first one's id"
            return
        [(lane,)] = db.execute("select lane from outbox.message where id = %s", [id_]).fetchall()
        if name:
            session.dedup.append((name, id_, len(session.done)))
        session.done.append(("emit", Message(id_, key, lane, delay is not None, self.ends, asleep=delay is not None)))

    @precondition(lambda self: self.prepared or any(session.open for session in self.sessions))
    @rule(
        pick=PICK,
        how=st.sampled_from(
            ["all", "all", "commit", "rollback", "savepoint", "release", "undo", "cancel", "prepare", "finish"]
        ),
    )
    def end(self, pick: int, how: str) -> None:
        """A transaction ends, or a part of it."""
        able = [session for session in self.sessions if session.open]
        if not able or (how == "finish" and self.prepared):
            self.end_prepared(pick, commit=pick % 3 > 0)
            return
        session = able[pick % len(able)]
        if how == "all":
            for one in able:
                self.end_transaction(one, "commit")
        elif how == "savepoint":
            self.begin(session).execute(f"savepoint s{len(session.savepoints)}")
            session.savepoints.append(len(session.done))
        elif how in {"release", "undo"} and session.savepoints:
            self.end_savepoint(session, pick % len(session.savepoints), release=how == "release")
        elif how == "cancel" and session.emitted():
            self.cancel_own(session, session.emitted()[pick % len(session.emitted())])
        elif how in {"rollback", "prepare"}:
            self.end_transaction(session, how)
        else:
            self.end_transaction(session, "commit")

    def end_savepoint(self, session: Session, at: int, *, release: bool) -> None:
        db = self.begin(session)
        if release:
            db.execute(f"release savepoint s{at}")
        else:
            db.execute(f"rollback to savepoint s{at}")
            session.undo(session.savepoints[at])
            db.execute(f"release savepoint s{at}")
        del session.savepoints[at:]

    def end_transaction(self, session: Session, how: str) -> None:
        db = self.begin(session)
        if how == "prepare":
            gid = f"model-{uuid.uuid4()}"
            db.execute(f"prepare transaction '{gid}'")
            self.prepared[gid] = Session(None, session.done, dedup=session.dedup, touched=session.touched)
        else:
            db.execute(how)
            self.ended(session, committed=how == "commit")
        self.sessions[self.sessions.index(session)] = Session(db)

    def end_prepared(self, pick: int, *, commit: bool) -> None:
        gid = list(self.prepared)[pick % len(self.prepared)]
        self.owner.execute(f"{'commit' if commit else 'rollback'} prepared '{gid}'")
        self.ended(self.prepared.pop(gid), committed=commit)

    def ended(self, session: Session, *, committed: bool) -> None:
        self.ends += 1
        if committed:
            kept = session.emitted()
            for message in kept:
                message.committed = self.ends
            self.messages |= {message.id: message for message in kept}
            self.dedup |= {name: id_ for name, id_, _ in session.dedup if id_ in {message.id for message in kept}}

    def cancel_own(self, session: Session, message: Message) -> None:
        assert self.begin(session).execute("select outbox.cancel(%s)", [message.id]).fetchall() == [(True,)]
        session.dedup = [one for one in session.dedup if one[1] != message.id]
        session.done.append(("cancel", message))

    def cancel(self, pick: int) -> None:
        if not self.waiting():
            return
        message = self.waiting()[pick % len(self.waiting())]
        if any(self.dedup.get(name) == message.id for name in self.touched()):
            return  # it would wait
        [(ready,)] = self.owner.execute("select due_at is null from outbox.message where id = %s", [message.id])
        handed = self.holder(message.id) is not None
        [(cancelled,)] = self.owner.execute("select outbox.cancel(%s)", [message.id]).fetchall()
        assert cancelled == (not ready and not handed)
        if cancelled:
            message.state = "cancelled"
            self.dedup = {name: id_ for name, id_ in self.dedup.items() if id_ != message.id}

    def write_elsewhere(self) -> None:
        """Open, the writer holds back the proof by xid."""
        if self.writing:
            self.writer.execute("rollback")
        else:
            self.writer.execute("begin")
            self.writer.execute("select pg_current_xact_id()")
        self.writing = not self.writing

    # --- relays

    def waiting(self) -> list[Message]:
        return [message for message in self.messages.values() if message.state == "waiting"]

    def holder(self, id_: int) -> Lease | None:
        return next((lease for lease in self.leases.values() if id_ in lease.ids), None)

    def tokens(self) -> list[uuid.UUID]:
        return sorted({lease.token for lease in [*self.leases.values(), *self.lost]})

    def held_by(self, token: uuid.UUID) -> set[int]:
        return {id_ for lease in self.leases.values() if lease.token == token for id_ in lease.ids}

    @rule(size=SIZE, room=ROOM, named=st.booleans(), later=st.booleans())
    def claim(self, size: int, room: int, *, named: bool, later: bool) -> None:
        if later:
            self.time_passes()
        if named and self.life is None:
            [(self.life,)] = self.relay.execute("select outbox.hello('model')").fetchall()
        self.owner.execute(NOW)
        before = self.rows()
        self.claims += 1
        token = uuid.UUID(int=self.claims)
        life = self.life if named else None
        relay = self.relay if named else self.nameless
        found = relay.execute(
            "select id, key from outbox.claim_batch(%s, %s, '1 h', %s, %s)", [token, size, room, life]
        ).fetchall()
        self.prolong()
        ids = [id_ for id_, _ in found]

        assert len(ids) <= size
        assert len(ids) == len(set(ids))
        for id_ in ids:
            assert id_ in self.messages, f"{id_} was rolled back, or its transaction is open"
            assert self.messages[id_].state == "waiting", f"{id_} was settled before"
            assert not self.messages[id_].asleep, f"{id_} left before its time"
            lease = self.leases.get(self.messages[id_].lane)
            assert lease is None or lease.expired, f"the lane of {id_} is leased to a living token"
        self.check_order(ids)
        suspect = self.suspects()
        self.take_over(token, life, ids)
        self.check_deaths()
        if size == 500 and room > 100000 and not suspect:
            self.check_complete(ids, before)

    def rows(self) -> set[int]:
        """What the next claim must find: ready, in a free lane, and of no key that has a failing message."""
        ready = self.owner.execute(
            """
            select m.id from outbox.message as m
            where m.due_at is null
              and not exists (select from outbox.held_key as k where k.lane = m.lane and k.key = m.key)
            """
        )
        free = {id_ for (id_,) in ready}
        return {id_ for id_ in free if (lease := self.leases.get(self.messages[id_].lane)) is None or lease.expired}

    def suspects(self) -> bool:
        """Whether something may have killed its relay: it goes out alone, and a claim ends with it."""
        [(found,)] = self.owner.execute("select exists (select from outbox.lane where suspects <> '{}')").fetchall()
        return bool(found) or any(lease.relay not in {None, self.life} for lease in self.leases.values())

    def check_complete(self, ids: list[int], ready: set[int]) -> None:
        if self.suspects() or len({self.messages[id_].lane for id_ in ids}) >= 16:
            return
        missed = {id_ for id_ in ready - set(ids) if self.messages[id_].state == "waiting"}
        assert not missed, f"ready, in a free lane, and not handed out: {missed}"

    def check_order(self, ids: list[int]) -> None:
        """What leaves must not leave anything of its key behind; a failing message holds what follows it."""
        place = {id_: n for n, id_ in enumerate(ids)}
        for id_ in ids:
            message = self.messages[id_]
            if message.key is None:
                continue
            for other in self.waiting():
                if other.key != message.key or other.id >= id_ or place.get(other.id, len(ids)) < place[id_]:
                    continue
                holds = other.failed and not message.failed and message.timed
                assert not holds, f"{id_} overtook {other.id}, which holds their key"
                # Emits that overlap have no order; those of one transaction do.
                serial = other.committed <= message.emitted or other.committed == message.committed
                assert not serial or other.timed or message.timed, f"{id_} overtook {other.id} of its key"

    def take_over(self, token: uuid.UUID, life: int | None, ids: list[int]) -> None:
        """Lanes change hands whole; only those whose lease is over."""
        lanes = self.owner.execute("select lane, token, handed from outbox.lane").fetchall()
        assert len(lanes) == 64, "one row a lane"
        for lane, holder, handed in lanes:
            lease = self.leases.get(lane)
            if holder == token:
                assert lease is None or lease.expired
                self.lose(lane)
                self.leases[lane] = Lease(token, list(handed), life)
            elif lease and holder != lease.token:
                assert holder is None
                assert lease.expired, "a lease was taken away before its end"
                self.lose(lane)
        assert sorted(self.held_by(token)) == sorted(ids), "a lane knows what it handed out"

    def lose(self, lane: int) -> None:
        if lease := self.leases.pop(lane, None):
            self.lost.append(lease)

    def check_deaths(self) -> None:
        """A claim may bury what killed its relays; the model knows how often that was."""
        for (id_,) in self.owner.execute("select id from outbox.dead_letter where reason = 'killed_relay'").fetchall():
            message = self.messages[id_]
            if message.state == "waiting":
                assert message.deaths >= 6, f"{id_} died after {message.deaths} deaths"
                message.state = "dead"

    @rule(
        size=SIZE,
        room=ROOM,
        later=st.booleans(),
        sent=PART,
        failed=PART,
        reject=st.sampled_from([False, False, True]),
        over=st.booleans(),
    )
    def work(self, size: int, room: int, sent: int, failed: int, *, later: bool, reject: bool, over: bool) -> None:
        """What a relay does most of the time: it claims, settles, and gives back the rest."""
        if over:
            self.end_leases()
        self.claim(size, room, named=False, later=later)
        token = uuid.UUID(int=self.claims)
        self.mark_sent(token, self.choose(token, sent, foreign=False))
        if sent != EVERY:
            self.mark_failed(token, self.choose(token, failed, foreign=False), reject=reject)
            self.release(token)

    @precondition(lambda self: self.tokens())
    @rule(
        pick=PICK,
        how=st.sampled_from(["sent", "sent", "sent", "failed", "failed", "rejected", "release", "extend", "expire"]),
        which=PART,
        foreign=st.booleans(),
    )
    def settle_some(self, pick: int, how: str, which: int, *, foreign: bool) -> None:
        """Mostly by a token that holds something; but whoever had one may use it for ever."""
        held = sorted({lease.token for lease in self.leases.values()})
        tokens = held if held and pick % 4 else self.tokens()
        token = tokens[pick % len(tokens)]
        if how == "sent":
            self.mark_sent(token, self.choose(token, which, foreign=foreign))
        elif how in {"failed", "rejected"}:
            self.mark_failed(token, self.choose(token, which, foreign=foreign), reject=how == "rejected")
        elif how == "release":
            self.release(token)
        elif how == "extend":
            self.extend(token)
        else:
            self.expire(token)

    def mark_sent(self, token: uuid.UUID, ids: list[int]) -> None:
        self.owner.execute(NOW)
        mine = self.held_by(token) & set(ids)
        [(settled,)] = self.relay.execute("select outbox.mark_sent(%s, %s::bigint[])", [token, ids]).fetchall()
        assert settled == len(mine)
        for id_ in mine:
            self.messages[id_].state = "sent"
        self.settle(token, mine)

    def mark_failed(self, token: uuid.UUID, ids: list[int], *, reject: bool) -> None:
        self.owner.execute(NOW)
        mine = self.held_by(token) & set(ids)
        [(settled,)] = self.relay.execute(
            "select outbox.mark_failed(%s, %s::bigint[], %s::text[], %s::text[], %s::interval[])",
            [token, ids, ["x"] * len(ids), ["rejected" if reject else None] * len(ids), ["1 h"] * len(ids)],
        ).fetchall()
        assert settled == len(mine)
        for id_ in mine:
            message = self.messages[id_]
            message.attempts += 1
            message.failed = True
            if reject or message.attempts >= MAX_ATTEMPTS:
                message.state = "dead"
            message.asleep = message.state == "waiting"
        self.wait_in_line({self.messages[id_].key for id_ in mine})
        self.settle(token, mine)

    def wait_in_line(self, keys: set[str | None]) -> None:
        """Of the failing messages of a key the first waits for its time, the others for the first."""
        for key in keys - {None}:
            failing = sorted(message.id for message in self.waiting() if message.key == key and message.failed)
            for id_ in failing[1:]:
                self.messages[id_].asleep = False

    def choose(self, token: uuid.UUID, which: int, *, foreign: bool) -> list[int]:
        """A part of what a token was ever given, and ids that were not its own."""
        given = sorted(
            {id_ for lease in [*self.leases.values(), *self.lost] if lease.token == token for id_ in lease.ids}
        )
        chosen = [id_ for n, id_ in enumerate(given) if which >> (n % 3) & 1]
        return chosen + [id_ for id_ in list(self.messages)[:3] if id_ not in given and foreign]

    def settle(self, token: uuid.UUID, ids: set[int]) -> None:
        for lane, lease in list(self.leases.items()):
            if lease.token == token:
                left = [id_ for id_ in lease.ids if id_ not in ids]
                if left:
                    lease.ids = left
                else:
                    self.lose(lane)

    def release(self, token: uuid.UUID) -> None:
        self.owner.execute(NOW)
        [(released,)] = self.relay.execute("select outbox.release_batch(%s)", [token]).fetchall()
        assert released == len(self.held_by(token))
        for lane in [lane for lane, lease in self.leases.items() if lease.token == token]:
            self.lose(lane)

    def extend(self, token: uuid.UUID) -> None:
        [(extended,)] = self.relay.execute("select outbox.extend_lease(%s, '1 h')", [token]).fetchall()
        assert extended == bool(self.held_by(token))
        for lease in self.leases.values():
            if lease.token == token:
                lease.expired = False
                lease.relay = self.life if lease.relay is not None and self.life is not None else lease.relay

    def expire(self, token: uuid.UUID) -> None:
        self.owner.execute(
            "update outbox.lane set leased_until = clock_timestamp() - interval '1 ms' where token = %s", [token]
        )
        for lease in self.leases.values():
            lease.expired = lease.expired or lease.token == token

    def end_leases(self) -> None:
        for token in {lease.token for lease in self.leases.values()}:
            self.expire(token)

    def prolong(self) -> None:
        """A claim cuts the lease of a relay that is gone to 3 s; here only expire() and die() end one."""
        lanes = [lane for lane, lease in self.leases.items() if not lease.expired]
        cut = self.owner.execute(
            """
            update outbox.lane set leased_until = clock_timestamp() + interval '1 h'
            where lane = any (%s) and token is not null and leased_until < clock_timestamp() + interval '30 min'
            returning lane
            """,
            [lanes],
        ).fetchall()
        for (lane,) in cut:
            assert self.leases[lane].relay not in {None, self.life}, "the lease of a living relay was cut"

    @rule(pick=PICK, what=st.sampled_from(["cancel", "cancel", "requeue", "sweep", "writer", "die", "die"]))
    def meddle(self, pick: int, what: str) -> None:
        """What happens beside emitting and relaying."""
        if what == "cancel":
            self.cancel(pick)
        elif what == "requeue":
            self.requeue(pick)
        elif what == "sweep":
            self.sweep()
        elif what == "writer":
            self.write_elsewhere()
        elif self.life is not None:
            self.die()

    def die(self) -> None:
        """The relay's session ends, and then its leases do."""
        assert self.relay.execute("select pg_advisory_unlock(%s)", [self.life]).fetchall() == [(True,)]
        for lease in list(self.leases.values()):
            if lease.relay == self.life:
                for id_ in lease.ids:
                    self.messages[id_].deaths += 1
                self.expire(lease.token)
        self.life = None

    def time_passes(self) -> None:
        """What waits for a time is due."""
        self.owner.execute("update outbox.message set due_at = now() where due_at <> 'infinity'")
        for message in self.messages.values():
            message.asleep = False

    def requeue(self, pick: int) -> None:
        dead = [message for message in self.messages.values() if message.state == "dead"]
        chosen = dead[pick % len(dead) :] if dead else []
        ids = [message.id for message in chosen] + [message.id for message in self.waiting()[:1]]
        [(requeued,)] = self.owner.execute("select outbox.requeue_dead(%s::bigint[])", [ids]).fetchall()
        assert requeued == len(chosen)
        for message in chosen:
            message.state, message.timed, message.failed = "waiting", True, False
            message.attempts = message.deaths = 0
            message.asleep = False

    def sweep(self) -> None:
        self.owner.execute("select outbox.cleanup()")

    # --- what holds at any time

    @invariant()
    def nothing_lost(self) -> None:
        rows = {id_ for (id_,) in self.owner.execute("select id from outbox.message")}
        dead = {id_ for (id_,) in self.owner.execute("select id from outbox.dead_letter")}
        assert rows == {message.id for message in self.waiting()}
        assert dead == {message.id for message in self.messages.values() if message.state == "dead"}

    @invariant()
    def floors_hide_nothing(self) -> None:
        hidden = self.owner.execute(
            """
            select m.id from outbox.message as m join outbox.lane as l using (lane)
            where m.due_at is null and m.id < l.floor
            """
        ).fetchall()
        assert hidden == []
        repairs = self.owner.execute("select floor_repairs from outbox.horizon").fetchall()
        assert repairs == [(0,)]

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            for gid in self.prepared:
                self.owner.execute(f"rollback prepared '{gid}'")
            for db in self.connections:
                db.close()

    def drain(self) -> None:
        """Everything committed leaves in the end, whatever the history was."""
        for session in self.sessions:
            if session.open:
                self.begin(session).execute("commit")
                self.ended(session, committed=True)
        for gid in list(self.prepared):
            self.owner.execute(f"commit prepared '{gid}'")
            self.ended(self.prepared.pop(gid), committed=True)
        for _ in range(2 * len(self.messages) + 10):
            if not self.waiting():
                break
            self.end_leases()
            self.claim(500, 8388608, named=False, later=True)
            for token in {lease.token for lease in self.leases.values()}:
                ids = self.held_by(token)
                assert self.relay.execute("select outbox.mark_sent(%s, %s)", [token, list(ids)]).fetchall() == [
                    (len(ids),)
                ]
                for id_ in ids:
                    self.messages[id_].state = "sent"
                self.settle(token, ids)
        assert self.waiting() == [], "never handed out"
        self.sweep()
        self.nothing_lost()
        self.floors_hide_nothing()


@pytest.fixture
def no_leftovers(db: Connection) -> Iterator[None]:
    yield
    # A prepared transaction would keep the database from being dropped.
    for (gid,) in db.execute("select gid from pg_prepared_xacts where database = current_database()").fetchall():
        db.execute(f"rollback prepared '{gid}'")


@pytest.mark.timeout(300 + 5 * EXAMPLES)
@pytest.mark.usefixtures("no_leftovers")
def test_the_functions_do_what_the_model_does(dsn: str) -> None:
    class Here(Model):
        def __init__(self) -> None:
            super().__init__(dsn)

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not LONG,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
        ),
    )
