"""What a running relay shows: metrics, probes, the liveness file, hooks, and its log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import outbox.metrics
from harness import PATIENCE, Db, Page, Proxy, Queue, RunOutbox, StartRelay, emit, eventually, leased, waiting
from outbox import MessageRelay, health
from outbox.config import RelaySettings
from outbox.errors import DatabaseUnavailableError
from outbox.hooks import Failure
from outbox.store import ClaimedMessage, Store

QUICK = ("--lease", "3", "--confirm-timeout", "1", "--heartbeat", "1", "--send-timeout", "1")
CANARY = "canary-in-a-body"


def test_metrics(db: Db, queue: Queue, start_relay: StartRelay, page: Page, management: Callable[..., Any]) -> None:
    management("PUT", "/exchanges/{vhost}/other", {"type": "fanout", "durable": True})
    start_relay("--http", page.address)
    for _ in range(3):
        emit(db)
    emit(db, exchange="other")
    emit(db, delay="1 hour")
    name = db.info.dbname
    queue.receive(3)
    page.shows('outbox_messages_published_total{exchange_name="outbox"}', 3)
    page.shows(
        'outbox_publish_failures_total{exchange_name="other",failure_type="returned",error_type="unroutable"}', 1
    )
    page.shows('outbox_table_backlog{exchange_name="outbox"}', 2)
    page.shows(f'outbox_messages{{database="{name}",state="scheduled"}}', 1)
    page.shows(f'outbox_messages{{database="{name}",state="retrying"}}', 1)
    found = page.metrics()
    assert found['outbox_message_age_seconds_count{exchange_name="outbox"}'] == 3
    assert found['outbox_message_age_seconds_bucket{exchange_name="outbox",le="+Inf"}'] == 3
    assert 0 < found['outbox_message_age_seconds_sum{exchange_name="outbox"}'] < PATIENCE
    assert found['outbox_poll_duration_seconds_count{exchange_name="outbox"}'] >= 1
    for gauge in ("relay_up", "database_up", "broker_up", "listening", "relays"):
        assert found[f'outbox_{gauge}{{database="{name}"}}'] == 1, gauge
    assert found[f'outbox_lease_lost_total{{database="{name}"}}'] == 0
    assert abs(found[f'outbox_last_sent_timestamp_seconds{{database="{name}"}}'] - time.time()) < PATIENCE
    assert found[f'outbox_oldest_message_age_seconds{{database="{name}"}}'] == 0


def test_metrics_are_what_prometheus_reads(db: Db, queue: Queue, start_relay: StartRelay, page: Page) -> None:
    """Its own parser is the judge, and the names are those promised."""
    parser = pytest.importorskip("prometheus_client.parser")
    start_relay("--http", page.address)
    emit(db)
    queue.receive(1)
    page.shows('outbox_messages_published_total{exchange_name="outbox"}', 1)
    page.shows('outbox_table_backlog{exchange_name="outbox"}', 0)
    families = {found.name: found for found in parser.text_string_to_metric_families(page.get("/metrics")[1])}
    kinds = {
        name: (found.type, {label for s in found.samples for label in s.labels}) for name, found in families.items()
    }
    assert kinds["outbox_messages_published"] == ("counter", {"exchange_name"})
    assert kinds["outbox_publish_failures"][0] == "counter"
    assert kinds["outbox_message_age_seconds"] == ("histogram", {"exchange_name", "le"})
    assert kinds["outbox_poll_duration_seconds"] == ("histogram", {"exchange_name", "le"})
    assert kinds["outbox_table_backlog"] == ("gauge", {"exchange_name"})


async def test_metrics_of_a_program_of_its_own(dsn: str, db: Db, amqp_url: str, queue: Queue) -> None:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - the extra

    emit(db)
    metrics, registry = outbox.metrics.Metrics(), CollectorRegistry()
    relay = MessageRelay(dsn=dsn, amqp_url=amqp_url, once=True, hooks=[metrics])
    outbox.metrics.register(metrics, {"shop": relay}, registry)
    await relay.run()
    queue.receive(1)
    assert registry.get_sample_value("outbox_messages_published_total", {"exchange_name": "outbox"}) == 1
    assert registry.get_sample_value("outbox_relay_up", {"database": "shop"}) == 1


def test_readiness_follows_the_servers(  # noqa: PLR0917 - fixtures
    start_relay: StartRelay, page: Page, db: Db, queue: Queue, proxy: Proxy, pg_proxy: Proxy
) -> None:
    start_relay("--http", page.address, *QUICK, pg=pg_proxy.url, amqp=proxy.url)
    name = db.info.dbname

    def is_(**state: object) -> bool:
        status, text = page.get("/readyz")
        found = json.loads(text)["databases"][name] if text else {}
        assert status in {0, 200 if found.get("ready") else 503}
        return all(found.get(key, "none") == value for key, value in state.items())

    eventually(lambda: is_(ready=True, database="up", broker="up", last_sent=None), "ready")
    emit(db)
    queue.receive(1)
    eventually(lambda: not is_(last_sent=None), "the time of the last success")
    for server, link in (("broker", proxy), ("database", pg_proxy)):
        link.deaf.set()
        link.cut()
        eventually(lambda server=server: is_(ready=False, **{server: "down"}), f"{server} down")  # type: ignore[misc]
        assert page.get("/healthz") == (200, "ok\n")
        link.deaf.clear()
        link.cut()
        eventually(lambda: is_(ready=True), "ready again")


@pytest.mark.usefixtures("queue")
def test_other_requests(start_relay: StartRelay, page: Page) -> None:
    start_relay("--http", page.address)
    eventually(lambda: page.get("/healthz")[0], "an answer")
    assert page.get("/other") == (404, "there are /metrics, /healthz and /readyz\n")
    assert page.get("/metrics", "DELETE")[0] == 405
    assert page.get("/healthz", "HEAD") == (200, "")
    host, _, port = page.address.partition(":")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(b"no request\r\n\r\n")
        assert link.recv(100) == b""
    with socket.create_connection((host, int(port))) as link:
        link.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 20000 + b"\r\n\r\n")
    assert page.get("/healthz")[0] == 200


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:"])
@pytest.mark.usefixtures("queue")
def test_address_that_cannot_be(outbox: RunOutbox, dsn: str, amqp_url: str, address: str) -> None:
    done = outbox("relay", "--http", address, OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert done.errors == [f"outbox: --http cannot listen at {address!r}: write it as HOST:PORT"]


@pytest.mark.usefixtures("queue")
def test_address_that_is_taken(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = outbox("relay", "--http", address, OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert "Address already in use" in done.errors[0] or "address already in use" in done.errors[0]


def test_loop_that_does_not_turn() -> None:
    state = {"silent": 61.5, "ready": True}
    assert health.why_ill({"databases": {"shop": [state]}}, 1.0) == "the loop of database shop does not turn"
    assert health.why_ill({"databases": {"shop": [state]}}, 2.0) is None
    assert health.why_ill({"databases": {}, "missing": 1}, 1.0) == "1 workers do not answer"


@pytest.mark.usefixtures("queue")
async def test_a_stuck_loop_shows(dsn: str, amqp_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process answers, and yet its relay hangs."""

    async def hang(*_: Any) -> None:
        await asyncio.sleep(3600)

    relay = MessageRelay(dsn=dsn, amqp_url=amqp_url)
    running = asyncio.create_task(relay.run())

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    def turns() -> bool:
        """Whether its silence has ended since the last look."""
        seen.append(relay.state["silent"])
        return seen[-1] < seen[-2]

    await until(lambda: relay.state["ready"])
    seen = [0.0]
    for _ in range(2):
        await until(turns)
    monkeypatch.setattr(relay, "_claim", hang)
    await until(lambda: relay.state["silent"] > 2)  # twice as long as it sleeps at most
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.usefixtures("queue")
def test_liveness_file(start_relay: StartRelay, tmp_path: Path) -> None:
    file = tmp_path / "alive"
    start_relay("--liveness-file", str(file))
    eventually(file.exists, "the file")


async def test_liveness_file_tells_of_a_loop_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "TOUCH_EVERY", 0.01)
    file, state, looks = tmp_path / "alive", {"silent": 0.0}, asyncio.Semaphore(0)

    async def look() -> dict[str, Any]:
        looks.release()
        return {"databases": {"shop": [state]}}

    async def rounds(count: int) -> None:
        """So many more; the one that is under way may have looked before."""
        while not looks.locked():
            await looks.acquire()
        async with asyncio.timeout(PATIENCE):
            for _ in range(count + 1):
                await looks.acquire()

    keeper = asyncio.create_task(health.keep_file(str(file), look, 1.0))
    for silent, touched in ((0.0, True), (61.5, False), (0.0, True)):
        state["silent"] = silent
        await rounds(2)
        os.utime(file, (0, 0))
        await rounds(3)
        assert (file.stat().st_mtime > 0) is touched, silent
    keeper.cancel()
    await asyncio.wait({keeper})


@pytest.mark.usefixtures("queue")
def test_liveness_file_that_cannot_be(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    done = outbox("relay", "--liveness-file", "/nowhere/file", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert done.errors == ["outbox: --liveness-file '/nowhere/file' cannot be written: No such file or directory"]


class Heard:
    """A hook that notes, and one whose every call fails stands before it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], list[str | None]]] = []

    def sent(self, messages: Sequence[ClaimedMessage]) -> None:
        self.calls.append(("sent", [message.routing_key for message in messages], []))

    def failed(self, failures: Sequence[Failure]) -> None:
        self.calls.append(("failed", [f.message.routing_key for f in failures], [f.reason for f in failures]))

    def dead_lettered(self, failures: Sequence[Failure]) -> None:
        self.calls.append(("dead", [f.message.routing_key for f in failures], [f.reason for f in failures]))


class Broken:
    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise ZeroDivisionError(name)

        return fail


async def test_hooks(
    dsn: str, db: Db, amqp_url: str, management: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(management, binding="good")
    heard = Heard()
    emit(db, "bad")
    emit(db, "good")
    db.execute("select outbox.configure('max_attempts', '2')")
    for _ in range(2):
        await MessageRelay(dsn=dsn, amqp_url=amqp_url, once=True, hooks=[Broken(), heard]).run()
        db.execute("update outbox.message set due_at = clock_timestamp()")
        db.execute("update outbox.horizon set due_checked_at = '-infinity', version = version + 1")
    queue.receive(1)
    assert sorted(heard.calls) == [
        ("dead", ["bad"], ["unroutable"]),
        ("failed", ["bad"], ["unroutable"]),
        ("failed", ["bad"], ["unroutable"]),
        ("sent", ["good"], []),
    ]
    assert waiting(db) == 0
    said = [record.hook for record in caplog.records if record.message == "a hook failed"]  # type: ignore[attr-defined]
    assert sorted(set(said)) == ["dead_lettered", "failed", "sent", "settled"]
    assert len(said) == len(set(said)) + 2  # once a minute for each kind and relay


class Letters:
    """A hook that keeps what died, and what was sent."""

    def __init__(self) -> None:
        self.dead: list[Failure] = []
        self.keys: list[str] = []

    def dead_lettered(self, failures: Sequence[Failure]) -> None:
        self.dead += failures

    def sent(self, messages: Sequence[ClaimedMessage]) -> None:
        self.keys += [message.routing_key for message in messages]


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not look():  # noqa: ASYNC110 - what is looked at tells nobody
            await asyncio.sleep(0.02)


def expired(db: Db, number: int, **more: object) -> int:
    """The id of a message that no relay will see alive."""
    with db.transaction():
        id_, _ = emit(db, "late", {"n": number}, expires_in="1 hour", **more)
        db.execute("update outbox.message set expires_at = clock_timestamp() where id = %s", [id_])
    return id_


async def test_hooks_are_told_what_a_claim_puts_aside(dsn: str, db: Db, amqp_url: str, queue: Queue) -> None:
    # What is set for everybody does not keep the notice from a relay.
    db.execute(f"alter database {db.info.dbname} set client_min_messages = error")
    ids = [expired(db, number, headers='{"h": 1}') for number in range(45)]
    killer, message_id = emit(db, "killer", {"n": 45}, key="k", exchange="other")
    db.execute(
        "update outbox.lane as l set suspects = array[m.id], trial = 1, kills = 5, version = version + 1"
        " from outbox.message as m where m.id = %s and l.lane = m.lane",
        [killer],
    )
    emit(db, "good")
    heard, metrics = Letters(), outbox.metrics.Metrics()
    relay = MessageRelay(dsn=dsn, amqp_url=amqp_url, hooks=[Broken(), heard, metrics])
    running = asyncio.create_task(relay.run())
    await until(lambda: heard.keys and not waiting(db))
    relay.stop()
    await running
    await MessageRelay(dsn=dsn, amqp_url=amqp_url, once=True, hooks=[heard]).run()
    assert len(queue.receive(1)) == 1
    found = {failure.message.id: failure for failure in heard.dead}
    assert sorted(found) == [*ids, killer]
    assert len(heard.dead) == len(found), "once each"
    for number, (message, error, reason) in enumerate(found[id_] for id_ in ids):
        assert (message.routing_key, json.loads(message.body), message.exchange) == ("late", {"n": number}, "outbox")
        assert (message.headers, message.key, error, reason) == ({"h": 1}, None, "", "expired")
    message, error, reason = found[killer]
    assert message.message_id == message_id
    assert (message.routing_key, message.body, message.exchange) == ("killer", b'{"n": 45}', "other")
    assert (message.key, reason) == ("k", "killed_relay")
    assert error == "the relay died with it 5 times, nothing else in its hands"
    # Nobody refused them: among the dead they are counted, among the failures they are not.
    assert [row[0] for row in metrics.snapshot({})["counters"]] == ["outbox_messages_published_total"]


def test_metrics_count_what_a_claim_puts_aside(db: Db, start_relay: StartRelay, page: Page, queue: Queue) -> None:
    start_relay("--http", page.address)
    emit(db)
    queue.receive(1)
    expired(db, 1)
    page.shows(f'outbox_messages{{database="{db.info.dbname}",state="dead"}}', 1)


@pytest.mark.usefixtures("queue")
async def test_hooks_are_told_though_the_answer_was_lost(
    dsn: str, db: Db, amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Letters()
    relay = MessageRelay(dsn=dsn, amqp_url=amqp_url, hooks=[heard])
    claim = Store.claim
    lost: list[UUID] = []

    async def lose(store: Store, token: UUID, size: int) -> list[ClaimedMessage]:
        answer = await claim(store, token, size)
        if store.put_aside and not lost:
            lost.append(token)
            raise DatabaseUnavailableError("lost")
        return answer

    monkeypatch.setattr(Store, "claim", lose)
    expired(db, 1)
    running = asyncio.create_task(relay.run())
    await until(lambda: heard.dead)
    emit(db)
    await until(lambda: heard.keys)
    relay.stop()
    await running
    assert lost
    assert [failure.message.routing_key for failure in heard.dead] == ["late"]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_put_aside_holds_up_no_message(
    dsn: str, db: Db, amqp_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Claimed in the same call: it is sent before anybody is told, also when that fails."""
    heard = Letters()
    relay = MessageRelay(dsn=dsn, amqp_url=amqp_url, hooks=[heard])
    ask = Store.dead_messages
    asked: list[Sequence[int]] = []

    async def slow(store: Store, ids: Sequence[int]) -> Any:
        asked.append(ids)
        await until(lambda: "first" in heard.keys)
        if fails:
            raise DatabaseUnavailableError("away")
        return await ask(store, ids)

    monkeypatch.setattr(Store, "dead_messages", slow)
    expired(db, 1, key="k")
    emit(db, "first", key="k")
    running = asyncio.create_task(relay.run())
    await until(lambda: asked and "first" in heard.keys)
    emit(db, "second", key="k")
    await until(lambda: "second" in heard.keys)
    relay.stop()
    await running
    assert len(queue.receive(2)) == 2
    assert [failure.reason for failure in heard.dead] == ([] if fails else ["expired"])
    assert len(asked) == 1


NOTICE = """
create function public.chatter() returns trigger language plpgsql
    as $$begin raise notice 'other' using detail = '{77}'; return null; end$$;
create trigger chatter after insert on outbox.dead_letter execute function public.chatter()
"""


async def test_other_notices_name_no_messages(dsn: str, db: Db, amqp_url: str) -> None:
    """The code of its own is OB016."""
    db.execute(NOTICE)
    late = expired(db, 1)
    store = Store(RelaySettings(dsn=dsn, amqp_url=amqp_url))
    assert await store.claim(uuid4(), 10) == []
    assert store.put_aside == [late]
    await store.close()


HOOKS = """
class Note:
    def sent(self, messages):
        with open("noted", "a") as file:
            file.writelines(message.message_id + "\\n" for message in messages)
"""


def test_hooks_of_the_command(  # noqa: PLR0917 - fixtures
    outbox: RunOutbox, db: Db, dsn: str, amqp_url: str, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    _, message_id = emit(db)
    at = {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url}
    assert outbox("relay", "--once", "--hooks", "notes:Note", **at).status == 0
    queue.receive(1)
    assert (tmp_path / "noted").read_text() == message_id + "\n"
    done = outbox("relay", "--hooks", "notes:Missing", **at)
    assert done.status == 2
    assert "--hooks 'notes:Missing' cannot be loaded" in done.errors[0]


def test_lease_lost_is_an_event(db: Db, queue: Queue, start_relay: StartRelay, page: Page, proxy: Proxy) -> None:
    relay = start_relay("--http", page.address, "--log-format", "json", amqp=proxy.url)
    emit(db)
    queue.receive(1)
    eventually(lambda: not leased(db), "that the first is through")
    proxy.held.set()
    for _ in range(3):
        emit(db, key="a")
    eventually(lambda: leased(db), "a claim")
    db.execute("update outbox.lane set token = gen_random_uuid(), version = version + 1 where token is not null")
    proxy.held.clear()
    relay.await_log("lease lost")
    (line,) = [json.loads(line) for line in relay.log.splitlines() if "lease lost" in line]
    assert (line["level"], line["event"], line["phase"]) == ("WARNING", "lease_lost", "sent")
    assert line["count"] in {1, 2, 3}
    page.shows(f'outbox_lease_lost_total{{database="{db.info.dbname}"}}', line["count"])


def test_json_lines(start_relay: StartRelay, queue: Queue, db: Db) -> None:
    relay = start_relay("--log-format", "json", "-v")
    relay.await_log("relay ready")
    emit(db)
    queue.receive(1)
    relay.await_log("batch settled")
    relay.stop()
    lines = [json.loads(line) for line in relay.log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    (settled,) = [line for line in lines if line["message"] == "batch settled"]
    assert (settled["level"], settled["action"], settled["sent"]) == ("DEBUG", "settle", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", settled["time"])


NOISY = """
import asyncio, logging, os, sys
logging.basicConfig(level=logging.DEBUG)
from outbox import MessageRelay, health
logging.getLogger().setLevel(logging.DEBUG)
asyncio.run(MessageRelay(dsn=os.environ["OUTBOX_DSN"], amqp_url=os.environ["OUTBOX_AMQP_URL"], once=True).run())
"""


@pytest.mark.parametrize("binding", ["order.*", "nothing"])
def test_no_library_logs_a_body(  # noqa: PLR0917 - fixtures
    dsn: str, db: Db, amqp_url: str, management: Callable[..., Any], tmp_path: Path, binding: str
) -> None:
    """Sent or returned, in a program that logs everything."""
    Queue(management, binding=binding)
    emit(db, payload={"secret": CANARY}, headers=json.dumps({"h": CANARY}))
    done = subprocess.run(
        [sys.executable, "-c", NOISY], cwd=tmp_path, timeout=PATIENCE, capture_output=True, text=True, check=True,
        env=os.environ | {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url},
    )  # fmt: skip
    assert "DEBUG" in done.stderr
    assert CANARY not in done.stderr + done.stdout
