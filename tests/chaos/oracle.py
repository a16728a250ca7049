"""Who knows the truth: emitters that remember what they did, and the comparison with what was received.

Each transaction of an emitter also writes a row of its own into public.ledger. So what was committed is known for
certain, also when the answer to a COMMIT was lost or the server crashed.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg

LEDGER = """
create table public.ledger (txn uuid primary key, messages integer not null);
create table public.refused (id bigint, attempts integer, error text);
create function public.note_attempt() returns trigger language plpgsql security definer as $$
begin
    insert into public.refused values (new.id, new.attempts, new.error);
    return null;
end $$;
create trigger note_attempt after update on outbox.message for each row
    when (new.attempts > old.attempts) execute function public.note_attempt();
"""
KEYS = 100
EMITTERS = 4


@dataclass(frozen=True, slots=True)
class Message:
    message_id: str
    key: str
    number: int  # counts up within its key


@dataclass(frozen=True, slots=True)
class Attempt:
    """One transaction, as its client saw it end."""

    txn: str
    messages: tuple[Message, ...]
    end: Literal["committed", "rolled back", "unknown"]


@dataclass(frozen=True)
class Verdict:
    committed: int
    received: int
    duplicates: int
    dead: int
    problems: list[str]

    def __str__(self) -> str:
        counts = f"{self.committed} committed, {self.received} received, {self.duplicates} duplicates, {self.dead} dead"
        return "\n".join([counts, *self.problems])


@dataclass
class Evidence:
    """Everything that is compared."""

    attempts: Sequence[Attempt]
    ledger: set[str]
    received: Sequence[Message]  # in the order of arrival
    dead: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)  # what the broker must refuse
    durable: bool = True  # the emitters waited for the disk


def some(items: Iterable[object]) -> str:
    found = sorted(map(str, items))
    return f"{len(found)}: {', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"


def judge(evidence: Evidence, duplicates: int) -> Verdict:
    """Compares; `duplicates` is how many deliveries too many the faults excuse."""
    problems: list[str] = []

    def must_be_empty(what: str, items: Iterable[object]) -> None:
        found = list(items)
        if found:
            problems.append(f"{what} {some(found)}")

    committed: dict[str, Message] = {}
    for attempt in evidence.attempts:
        if attempt.txn in evidence.ledger:
            committed |= {message.message_id: message for message in attempt.messages}
    ends = {end: {a.txn for a in evidence.attempts if a.end == end} for end in ("committed", "rolled back")}
    if evidence.durable:
        must_be_empty("commits that the database forgot", ends["committed"] - evidence.ledger)
    must_be_empty("rollbacks that the database committed", ends["rolled back"] & evidence.ledger)

    times = Counter(message.message_id for message in evidence.received)
    extra = times.total() - len(times)
    must_be_empty("lost", committed.keys() - times.keys() - evidence.dead)
    must_be_empty("phantoms", times.keys() - committed.keys())
    must_be_empty("phantoms among the dead", evidence.dead - committed.keys())
    must_be_empty("dead without a reason of ours", evidence.dead - evidence.poison)
    must_be_empty("poison that arrived", times.keys() & evidence.poison)
    must_be_empty("changed", (m for m in evidence.received if committed.get(m.message_id, m) != m))
    if extra > duplicates:
        often = [f"{message_id} x{count}" for message_id, count in times.most_common(5) if count > 1]
        problems.append(f"{extra} duplicates, {duplicates} are excused: {', '.join(often)}")
    must_be_empty("out of order", out_of_order(evidence.received))
    return Verdict(len(committed), len(evidence.received), extra, len(evidence.dead), problems)


def out_of_order(received: Sequence[Message]) -> list[str]:
    """First occurrences that came after a later one of their key."""
    newest: dict[str, int] = defaultdict(lambda: -1)
    seen: set[str] = set()
    wrong: list[str] = []
    for message in received:
        if message.message_id in seen:
            continue
        seen.add(message.message_id)
        if message.number < newest[message.key]:
            wrong.append(f"{message.key} {message.number} after {newest[message.key]}")
        newest[message.key] = max(newest[message.key], message.number)
    return wrong


Poison = Callable[[random.Random], dict[str, Any]]


class Emitters:
    """Threads that emit until so many messages are committed: the first part as fast as they can, the rest spread out.

    A key belongs to one thread, so its emits are serialised.
    """

    def __init__(
        self,
        dsn: str,
        seed: int,
        total: int,
        seconds: float,
        *,
        synchronous: bool = True,
        poison: Poison | None = None,
        poisonous: float = 0.002,
    ) -> None:
        self._dsn, self._seed, self.total = dsn, seed, total
        self.burst = total * 2 // 5
        self._pause = seconds * EMITTERS / (total - self.burst)
        self.synchronous = synchronous
        self._make_poison, self._poisonous = poison, poisonous
        self.attempts: list[Attempt] = []
        self.poison: set[str] = set()
        self.committed = 0
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), name=f"emitter {n}") for n in range(EMITTERS)]
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> bool:
        """True when all is emitted."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        self._stop.set()

    def _run(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")  # noqa: S311 - to be repeated, not to be secret
        numbers = {f"{self._seed}-{key}": 0 for key in range(number, KEYS, EMITTERS)}
        while self.committed < self.total and not self._stop.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as db:
                    if not self.synchronous:
                        db.execute("set synchronous_commit = off")
                    while self.committed < self.total and not self._stop.is_set():
                        messages = self._transaction(db, chance, numbers)
                        if self.committed > self.burst:
                            time.sleep(self._pause * messages)
            except psycopg.OperationalError as error:
                self.errors.append(" ".join(str(error).split())[:100])
                time.sleep(0.1)

    def _transaction(self, db: psycopg.Connection[Any], chance: random.Random, numbers: dict[str, int]) -> int:
        """Some messages with emit_many, perhaps more in a savepoint that perhaps is undone; then, mostly, a COMMIT."""
        txn = str(uuid.UUID(int=chance.getrandbits(128), version=4))
        undone = chance.random() < 0.1
        committing = False
        messages: list[Message] = []
        end: Literal["committed", "rolled back", "unknown"] = "rolled back"
        try:
            db.execute("begin")
            messages += self._emit(db, chance, numbers, chance.randint(1, 20))
            if chance.random() < 0.2:
                db.execute("savepoint s")
                more = self._emit(db, chance, numbers, chance.randint(1, 3))
                if chance.random() < 0.5:
                    db.execute("rollback to savepoint s")
                else:
                    messages += more
            db.execute("insert into public.ledger values (%s, %s)", [txn, len(messages)])
            committing = not undone
            db.execute("rollback" if undone else "commit")
            end = "rolled back" if undone else "committed"
        except psycopg.Error:
            end = "unknown" if committing else "rolled back"
            raise
        finally:
            with self._lock:
                self.attempts.append(Attempt(txn, tuple(messages), end))
                self.committed += len(messages) if end == "committed" else 0
        return len(messages)

    def _emit(
        self, db: psycopg.Connection[Any], chance: random.Random, numbers: dict[str, int], count: int
    ) -> list[Message]:
        made: list[Message] = []
        fields: list[dict[str, Any]] = []
        for _ in range(count):
            key = chance.choice(list(numbers))
            numbers[key] += 1
            made.append(Message(str(uuid.UUID(int=chance.getrandbits(128), version=4)), key, numbers[key]))
            fields.append(
                {
                    "routing_key": "chaos",
                    "payload": {"key": key, "number": numbers[key]},
                    "key": key,
                    "message_id": made[-1].message_id,
                }
            )
            if self._make_poison is not None and chance.random() < self._poisonous:
                fields[-1] |= self._make_poison(chance)
                with self._lock:
                    self.poison.add(made[-1].message_id)
        db.execute("select outbox.emit_many(%s::jsonb)", [json.dumps(fields)])
        return made
