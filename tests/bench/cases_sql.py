"""What SQL costs: emitting, claiming and settling, against the simplest thing that could do the job."""

from __future__ import annotations

import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

import databases
from bench.measure import Bench, Case, Contender, Row, compare, progress, ratio, take_turns

Connection = psycopg.Connection[tuple[Any, ...]]

BATCH = 500
BODY = '{"x": "' + "0" * 247 + '"}'  # 256 bytes
LANE = "(date_part('epoch', clock_timestamp()) * 250)::bigint & 63"  # as emit() does
COLUMNS = (
    "t.id, t.message_id, t.exchange, t.routing_key, t.key, t.body, t.content_type, t.headers, t.properties, "
    "t.expires_at, t.attempts, t.created_at"
)


def insert_into(table: str, body: str = f"convert_to('{BODY}', 'UTF8')") -> str:
    return (
        f"insert into {table} (lane, message_id, routing_key, content_type, created_at, emitted_by, body) "
        f"select {LANE}, gen_random_uuid(), 'bench', 'application/json', now(), 'bench', {body}"
    )


def connect(dsn: str) -> Connection:
    # As the relay does: claim_batch() syncs to disk, and its sync covers what was settled before.
    return psycopg.connect(dsn, autocommit=True, options="-c synchronous_commit=off")


# --- emit


def pgbench(bench: Bench, dsn: str, statement: str, clients: int) -> float:
    with TemporaryDirectory() as folder:
        script = Path(folder, "script.sql")
        script.write_text(statement + ";\n")
        command = [databases.program("pgbench"), "-n", "-M", "prepared", "-c", str(clients), "-j", "2"]
        seconds = ["-T", str(bench.size(5, 2))]
        done = subprocess.run([*command, *seconds, "-f", script, dsn], capture_output=True, text=True, check=True)
    found = re.search(r"tps = ([0-9.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


@contextmanager
def listener(dsn: str) -> Iterator[None]:
    """Somebody who hears every notification, as a relay does; with nobody listening the server skips half the work."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("listen outbox")
        connection.execute("listen bench")
        ended = threading.Event()

        def hear() -> None:
            while not ended.is_set():
                for _ in connection.notifies(timeout=0.2):
                    pass

        thread = threading.Thread(target=hear)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def emit(clients: int) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        with bench.database() as dsn, listener(dsn):
            databases.query(
                dsn,
                """
                create table plain (like outbox.message including all);
                create table noisy (like outbox.message including all);
                create function notify() returns trigger language plpgsql as
                    $$ begin perform pg_notify('bench', ''); return null; end $$;
                create trigger notify after insert on noisy for each row execute function notify();
                """,
            )

            def rate(statement: str, table: str) -> Callable[[], float]:
                def measure() -> float:
                    databases.query(dsn, f"truncate {table}")
                    return pgbench(bench, dsn, statement, clients)

                return measure

            contenders = [
                Contender("emit", rate(f"select outbox.emit('bench', '{BODY}')", "outbox.message")),
                Contender("insert", rate(insert_into("plain"), "plain")),
                Contender("insert with NOTIFY trigger", rate(insert_into("noisy"), "noisy")),
            ]
            # The lock that NOTIFY takes at commit shows with company only.
            reach = {"insert": 0.75, "insert with NOTIFY trigger": 3.0} if clients == 16 else {}
            yield from compare(f"emit, {clients} clients", contenders, bench.size(5 if reach else 3, 3), reach)

    return case


def emit_many(bench: Bench) -> Iterator[Row]:
    """A thousand messages in one statement, against the same rows from arrays, ready made."""
    count, repeats = 1000, bench.size(40, 10)
    with bench.database() as dsn, connect(dsn) as connection:
        connection.execute("create table plain (like outbox.message including all)")
        messages = "[" + ",".join('{"routing_key": "bench", "payload": ' + BODY + "}" for _ in range(count)) + "]"
        bodies = [BODY.encode()] * count
        statement = insert_into("plain", "b") + " from unnest(%s::bytea[]) as b"

        def rate(table: str, sql: str, argument: object) -> Callable[[], float]:
            def measure() -> float:
                connection.execute(f"truncate {table}")
                begun = time.perf_counter()
                for _ in range(repeats):
                    connection.execute(sql, [argument])
                return count * repeats / (time.perf_counter() - begun)

            return measure

        contenders = [
            Contender("emit_many", rate("outbox.message", "select outbox.emit_many(%s)", messages)),
            Contender("insert select unnest", rate("plain", statement, bodies)),
        ]
        yield from compare("emit_many, 1000", contenders, bench.size(7, 3), {"insert select unnest": 0.6})


# --- claim and settle


def fill(connection: Connection, table: str, count: int) -> None:
    connection.execute(f"{insert_into(table)} from generate_series(1, {count})")
    connection.execute(f"vacuum analyze {table}")


def reset(connection: Connection, count: int) -> None:
    connection.execute("truncate outbox.message, outbox.held_key")
    connection.execute(
        "update outbox.lane set version = version + 1, token = null, relay = null, leased_until = null, handed = '{}'"
    )
    connection.execute("vacuum outbox.lane")
    fill(connection, "outbox.message", count)


def claim_and_mark(connection: Connection, batch: int = BATCH) -> int:
    token = uuid.uuid4()
    rows = connection.execute(
        "select * from outbox.claim_batch(%s, %s)", [token, batch], prepare=True, binary=True
    ).fetchall()
    if rows:
        ids = [row[0] for row in rows]
        connection.execute("select outbox.mark_sent(%s, %s)", [token, ids], prepare=True, binary=True)
    return len(rows)


def drain(step: Callable[[], int], most: int | None = None) -> float:
    """Messages per second until nothing is left, or so many are done."""
    done = 0
    begun = time.perf_counter()
    while (most is None or done < most) and (count := step()):
        done += count
    return done / (time.perf_counter() - begun)


def claim(bench: Bench) -> Iterator[Row]:
    count = bench.size(100_000, 30_000)
    with bench.database() as dsn, connect(dsn) as connection, psycopg.connect(dsn, autocommit=True) as synchronous:
        connection.execute(
            """
            create table held (like outbox.message including defaults, primary key (id));
            create table leased (
                like outbox.message including defaults,
                available_at timestamptz not null default clock_timestamp(),
                token uuid,
                leased_until timestamptz,
                primary key (id)
            ) with (fillfactor = 70);
            -- Retries and delays move available_at; what a claim changes is not indexed, so its updates are HOT.
            create index on leased (available_at, id);
            """
        )

        def ours() -> float:
            reset(connection, count)
            return drain(lambda: claim_and_mark(connection))

        def held_step() -> int:
            with synchronous.transaction():
                rows = synchronous.execute(
                    f"select {COLUMNS} from held as t order by id limit %s for update skip locked",
                    [BATCH],
                    prepare=True,
                    binary=True,
                ).fetchall()
                ids = [row[0] for row in rows]
                synchronous.execute("delete from held where id = any (%s)", [ids], prepare=True, binary=True)
            return len(rows)

        def held() -> float:
            connection.execute("truncate held")
            fill(connection, "held", count)
            return drain(held_step)

        def leased_step() -> int:
            token = uuid.uuid4()
            rows = synchronous.execute(
                "with next as materialized (select id from leased where available_at <= now() "
                "and (leased_until is null or leased_until < now()) "
                "order by available_at, id limit %s for update skip locked) "
                "update leased as t set token = %s, leased_until = now() + interval '30 s' from next "
                "where t.id = next.id "
                f"returning {COLUMNS}",
                [BATCH, token],
                prepare=True,
                binary=True,
            ).fetchall()
            ids = [row[0] for row in rows]
            connection.execute(
                "delete from leased where id = any (%s) and token = %s", [ids, token], prepare=True, binary=True
            )
            return len(rows)

        def leased() -> float:
            connection.execute("truncate leased")
            fill(connection, "leased", count)
            return drain(leased_step)

        contenders = [
            Contender("claim + mark", ours),
            Contender("held transaction", held),
            Contender("row leases", leased),
        ]
        yield from compare(
            "claim + mark, 500", contenders, bench.size(7, 3), {"held transaction": 0.7, "row leases": 1.8}
        )


@contextmanager
def snapshot(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from pg_class")
        yield
        holder.rollback()


@contextmanager
def writer(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn) as holder:
        holder.execute("create temporary table unrelated ()")
        yield
        holder.rollback()


def burden(connection: Connection, failing: int, scheduled: int) -> None:
    """Messages that fail and messages that wait, spread over all lanes."""
    connection.execute(
        f"""
        insert into outbox.message (
            lane, message_id, routing_key, content_type, created_at, emitted_by, body, due_at, attempts
        )
        select
            {LANE}, gen_random_uuid(), 'bench', 'application/json', clock_timestamp(), 'bench', '',
            clock_timestamp() + case when n <= %s then random() * interval '10 s' else interval '1 hour' end,
            (n <= %s)::integer
        from generate_series(1, %s) as n
        """,
        [failing, failing, failing + scheduled],
    )


def burdened_step(connection: Connection) -> int:
    """What has failed before fails again."""
    token = uuid.uuid4()
    rows = connection.execute(
        "select * from outbox.claim_batch(%s, %s)", [token, BATCH], prepare=True, binary=True
    ).fetchall()
    good = [row[0] for row in rows if row[10] == 0]
    bad = [row[0] for row in rows if row[10] != 0]
    if good:
        connection.execute("select outbox.mark_sent(%s, %s)", [token, good], prepare=True, binary=True)
    if bad:
        connection.execute(
            "select outbox.mark_failed(%s, %s, %s, null, %s)",
            [token, bad, ["no"] * len(bad), ["10 s"] * len(bad)],
            prepare=True,
        )
    return len(good) or -1 * (not rows)


def floor(bench: Bench) -> Iterator[Row]:
    """The same drain while something keeps vacuum from removing what was settled."""
    count, rounds = bench.size(500_000, 100_000), bench.size(4, 1)
    with bench.database() as dsn, connect(dsn) as connection:

        def under(hold: Callable[[str], AbstractContextManager[None]]) -> Callable[[], float]:
            def measure() -> float:
                reset(connection, count)
                with hold(dsn):
                    return drain(lambda: claim_and_mark(connection))

            return measure

        def everything() -> float:
            reset(connection, count)
            connection.execute("select outbox.configure('max_attempts', '1000000')")
            with snapshot(dsn):
                burden(connection, 10_000, 100_000)
                done = 0
                begun = time.perf_counter()
                while done < count:
                    done += max(burdened_step(connection), 0)
                return done / (time.perf_counter() - begun)

        alone = Contender("alone", under(lambda _: nullcontext()))
        others = [
            Contender("with a snapshot held", under(snapshot)),
            Contender("with a writer open", under(writer)),
            Contender("snapshot, failing and scheduled", everything),
        ]
        take_turns("floor", [alone, *others], rounds)
    for other, reach in zip(others, (0.9, 0.8, 0.8), strict=True):
        yield ratio(f"floor, {other.name}", other, alone, reach)


def small_batches(bench: Bench) -> Iterator[Row]:
    """Batches of five after eight thousand of them under one snapshot, and after none, in turn, by the median batch."""
    before, batches, rounds = bench.size(8_000, 2_400), bench.size(2_000, 600), bench.size(3, 1)
    late, early = Contender("under an old snapshot", lambda: 0), Contender("under a new one", lambda: 0)
    for number in range(rounds):
        with bench.database() as old, bench.database() as new, connect(old) as worn, connect(new) as fresh:
            reset(worn, (before + batches) * 5)
            reset(fresh, (before + batches) * 5)
            with snapshot(old), snapshot(new):
                for batch in range(before):
                    if batch % 100 == 0:
                        progress(f"small batches: round {number + 1} of {rounds}, {batch} of {before}")
                    claim_and_mark(worn, 5)
                claim_and_mark(fresh, 5)  # its first reads the catalog
                took: dict[str, list[float]] = {late.name: [], early.name: []}
                for _ in range(batches):
                    for contender, connection in ((late, worn), (early, fresh)):
                        begun = time.perf_counter()
                        claim_and_mark(connection, 5)
                        took[contender.name].append(time.perf_counter() - begun)
        for contender in (late, early):
            contender.rates.append(1 / median(took[contender.name]))
    yield ratio("batches of 5, snapshot", late, early, 0.9)


def backlog(bench: Bench) -> Iterator[Row]:
    """The cost of a message does not depend on how many wait."""
    many = bench.size(1_000_000, 200_000)
    with bench.database() as dsn, connect(dsn) as connection:

        def rate(count: int) -> Callable[[], float]:
            def measure() -> float:
                reset(connection, count)
                return drain(lambda: claim_and_mark(connection), min(count, 50_000))

            return measure

        contenders = [Contender(f"backlog of {many}", rate(many)), Contender("backlog of 10000", rate(10_000))]
        yield from compare("backlog", contenders, bench.size(5, 3), {"backlog of 10000": 0.87})


def retention(bench: Bench) -> Iterator[Row]:
    """mark_sent() when what was sent is kept, and when it is deleted, batch by batch in turn; claims do not count."""
    count, rounds = bench.size(100_000, 30_000), bench.size(7, 3)
    kept, deleted = Contender("kept for a day", lambda: 0), Contender("deleted", lambda: 0)
    with bench.database() as one, bench.database() as other, connect(one) as keeping, connect(other) as deleting:
        keeping.execute("select outbox.configure('retention', '1 day')")
        both = [(kept, keeping), (deleted, deleting)]
        for number in range(rounds):
            progress(f"retention: round {number + 1} of {rounds}")
            keeping.execute("truncate outbox.archive")
            for _, connection in both:
                reset(connection, count)
            spent = dict.fromkeys((kept.name, deleted.name), 0.0)
            done = dict.fromkeys(spent, 0)
            for _ in range(count // BATCH):
                for contender, connection in both:
                    marked, seconds = mark(connection)
                    done[contender.name] += marked
                    spent[contender.name] += seconds
            for name, rates in ((kept.name, kept.rates), (deleted.name, deleted.rates)):
                rates.append(done[name] / spent[name])
    yield ratio("mark_sent, 500, kept", kept, deleted, 0.5)


def mark(connection: Connection) -> tuple[int, float]:
    """How many messages of a batch, and how long it took."""
    token = uuid.uuid4()
    claim = "select id from outbox.claim_batch(%s, %s)"
    ids = [id_ for (id_,) in connection.execute(claim, [token, BATCH], prepare=True, binary=True)]
    begun = time.perf_counter()
    connection.execute("select outbox.mark_sent(%s, %s)", [token, ids], prepare=True, binary=True)
    return len(ids), time.perf_counter() - begun


def bloat(bench: Bench) -> Iterator[Row]:
    """The room that a backlog of constant size takes, after a tenth of the messages and after all of them."""
    count, waiting = bench.size(1_000_000, 200_000), 5_000
    part = count // 10
    room = """
        select sum(pg_total_relation_size(c.oid)) / 1048576.0
        from pg_class as c
        where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'r'
    """
    with bench.database() as dsn, connect(dsn) as connection:
        # As in a day, in less time: as many dead rows between two visits of autovacuum, or rather more.
        connection.execute("alter system set autovacuum_naptime = '1s'")
        connection.execute("select pg_reload_conf()")
        try:
            sizes = []
            fill(connection, "outbox.message", waiting)
            for _ in range(10):
                done = 0
                while done < part:
                    connection.execute(f"{insert_into('outbox.message')} from generate_series(1, {BATCH})")
                    done += claim_and_mark(connection)
                found = connection.execute(room).fetchone()
                assert found
                sizes.append(float(found[0]))
        finally:
            connection.execute("alter system reset autovacuum_naptime")
            connection.execute("select pg_reload_conf()")
        last = Contender("waiting messages, at the end", lambda: waiting / sizes[-1])
        first = Contender("after a tenth", lambda: waiting / sizes[0])
        yield from compare(f"bloat, {count} messages", [last, first], 1, {"after a tenth": 0.5}, unit="per MB")


CASES: dict[str, Case] = {
    "emit-1": emit(1),
    "emit-16": emit(16),
    "emit-64": emit(64),
    "emit-many": emit_many,
    "claim": claim,
    "floor": floor,
    "small-batches": small_batches,
    "backlog": backlog,
    "retention": retention,
    "bloat": bloat,
}
