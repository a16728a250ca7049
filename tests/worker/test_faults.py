"""Faults around a message: of its retry, of the broker, of the process. Nothing is lost, nothing idles silently."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import pytest
from worker.conftest import Broker, Process, StartProcess, eventually, running, worker_on

from harness import Proxy
from outbox import Listener, Reject, listen
from outbox.errors import ConfigurationError


def failing(queue: str = "q", **options: Any) -> tuple[Listener, list[int]]:
    """A listener that fails at the first attempt, and its attempts."""
    attempts: list[int] = []

    async def callback(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        if attempt_count == 1:
            raise ValueError

    return Listener("a", callback, queue, **{"retry_delays": (0.1,)} | options), attempts


# --- the copy for a retry


async def test_w2_retry_that_no_queue_takes(broker: Broker, queue_type: str, caplog: Any) -> None:
    """The delay queue is gone: the original is not acknowledged before a copy is in a queue."""
    listener, attempts = failing()
    async with running(worker_on(broker, listener, queue_type=queue_type)):
        broker.management("DELETE", "/queues/{vhost}/outbox.delay_100ms")
        await broker.publish("a")
        await eventually(lambda: attempts == [1, 2], "a second attempt, when the queue was made again")
    assert "no queue takes what is sent to exchange 'outbox.delay_100ms'" in [
        getattr(record, "error", "") for record in caplog.records
    ]


async def test_w2_retry_that_no_queue_takes_and_none_may_be_made(broker: Broker, queue_type: str) -> None:
    listener, attempts = failing()
    async with running(worker_on(broker, listener, queue_type=queue_type)):
        pass
    worker = worker_on(broker, listener, declare=False, shutdown=0.5, queue_type=queue_type)
    async with running(worker):
        broker.management("DELETE", "/queues/{vhost}/outbox.delay_100ms")
        await broker.publish("a")
        await eventually(lambda: attempts, "an attempt")
        await asyncio.sleep(0.5)
        assert attempts == [1]
    assert await broker.ready("q") == 1


async def test_w3_retry_that_may_not_be_published(broker: Broker, management: Any, queue_type: str) -> None:
    """The right to write is taken and given back: the message stays in hand, and its place is not lost for ever."""
    user = urlsplit(broker.url).username or ""
    path = f"/permissions/{{vhost}}/{quote(user, safe='')}"
    listener, attempts = failing(retry_delays=(0.1, 0.1))
    async with running(worker_on(broker, listener, prefetch_count=1, queue_type=queue_type)):
        await broker.publish("a")
        await eventually(lambda: attempts == [1, 2], "a retry")
        attempts.clear()
        await broker.publish("a")
        management("PUT", path, {"configure": "^$", "write": "^$", "read": ".*"})
        await asyncio.sleep(0.5)
        management("PUT", path, {"configure": ".*", "write": ".*", "read": ".*"})
        await eventually(lambda: attempts == [1, 2], "the retry, when it is permitted again")


async def test_w4_a_copy_keeps_all_properties(broker: Broker, queue_type: str) -> None:
    properties: dict[str, Any] = {
        "content_type": "text/plain",
        "content_encoding": "utf-8",
        "priority": 7,
        "correlation_id": "c",
        "reply_to": "r",
        "timestamp": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
        "type": "t",
        "app_id": "app",
        "user_id": urlsplit(broker.url).username,
        "delivery_mode": 1,
    }
    headers = {"tenant": "north", "n": 2**40, "yes": True, "none": None, "list": [1, "a"], "object": {"a": 1}}
    seen: list[Any] = []

    @listen("a.b", queue="q", retry_delays=(0.05,))
    async def handle(_body: bytes, message: Any, routing_key: str) -> None:
        seen.append((message, routing_key))
        raise ValueError

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        identity = await broker.publish("a.b", b"\x00\xff", headers=headers, **properties)
        [dead] = await broker.dead("q")
    for (message, routing_key), attempt in zip(seen, (1, 2), strict=True):
        assert routing_key == "a.b"
        assert message.message_id == identity
        assert message.body == b"\x00\xff"
        for name, value in properties.items():
            if name != "delivery_mode":
                assert getattr(message, name) == value, name
        assert {name: message.headers.get(name) for name in headers} == headers
        assert message.headers.get("x-outbox-attempt") == (None if attempt == 1 else 2)
    assert seen[1][0].delivery_mode == 2, "a transient message becomes persistent"
    assert dead["properties"]["correlation_id"] == "c"
    assert dead["properties"]["delivery_mode"] == 2


async def test_w4_a_user_id_that_is_not_ours(broker: Broker, management: Any, queue_type: str) -> None:
    """As a property of the copy it would close the channel; so it goes into a header."""
    user = f"producer_{uuid4().hex}"
    management("PUT", f"/users/{user}", {"password": "p", "tags": "impersonator"})
    management("PUT", f"/permissions/{{vhost}}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
    at = urlsplit(broker.url)
    producer = Broker(management, at._replace(netloc=f"{user}:p@{at.hostname}:{at.port}").geturl())
    seen: list[Any] = []

    @listen("a", queue="q", retry_delays=(0.05,))
    async def handle(_body: Any, message: Any, attempt_count: int) -> None:
        seen.append((message.user_id, message.headers.get("x-outbox-user-id")))
        if attempt_count == 1:
            raise ValueError

    try:
        async with running(worker_on(broker, handle, queue_type=queue_type)):
            await producer.publish("a", user_id=user)
            await eventually(lambda: seen == [(user, None), (None, user)], "a retry")
    finally:
        await producer.close()
        management("DELETE", f"/users/{user}")


async def test_w5_a_foreign_count_means_nothing(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05,))
    async def handle(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ValueError

    deaths = [{"queue": "q", "reason": "expired", "count": 9, "exchange": "", "routing-keys": ["q"]}]
    for headers in (
        {"x-delivery-count": 99, "x-death": deaths},
        {"x-outbox-attempt": "many"},
        {"x-outbox-attempt": -3},
    ):
        attempts.clear()
        async with running(worker_on(broker, handle, queue_type=queue_type)):
            await broker.publish("a", headers=headers)
            [dead] = await broker.dead("q")
        assert attempts == [1, 2]
        assert "x-death" not in dead["properties"]["headers"]


async def test_w6_a_short_delay_does_not_wait_behind_a_long_one(broker: Broker, queue_type: str) -> None:
    times: dict[str, list[float]] = {"long": [], "short": []}

    def listener(name: str, seconds: float) -> Listener:
        async def callback(_body: Any) -> None:
            times[name].append(time.monotonic())
            raise ValueError

        return Listener(name, callback, name, (seconds,))

    async with running(worker_on(broker, listener("long", 3), listener("short", 0.1), queue_type=queue_type)):
        await broker.publish("long")
        await eventually(lambda: times["long"], "the first attempt")
        await broker.publish("short")
        await broker.dead("short")
    assert times["short"][1] - times["short"][0] < 2
    assert len(times["long"]) == 1


async def test_w7_dead_letters_without_a_queue_for_them(broker: Broker, queue_type: str) -> None:
    @listen("a", queue="q")
    async def handle(_body: Any) -> None:
        raise Reject

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        broker.management("DELETE", "/queues/{vhost}/q.dlq")
        broker.management("DELETE", "/exchanges/{vhost}/outbox.dlx")
        await broker.publish("a")
        await broker.filled("q.dlq")  # both are made again


async def test_w7_a_queue_that_takes_no_dead_letters(broker: Broker, queue_type: str) -> None:
    """It is full: the original is not acknowledged before the copy is taken."""
    attempts: list[int] = []

    @listen("a", queue="q")
    async def handle(body: int) -> None:
        attempts.append(body)
        raise Reject

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        full = {"pattern": r"^q\.dlq$", "definition": {"max-length": 1, "overflow": "reject-publish"}}
        broker.management("PUT", "/policies/{vhost}/full", full)
        for number in range(1, 50):  # a quorum queue takes a few more than its limit
            await broker.publish("a", number)
            await eventually(lambda: max(attempts, default=0) == number, "an attempt of each")  # noqa: B023 - at once
            await asyncio.sleep(0.3)
            if await broker.ready("q.dlq") < number:
                break
        else:
            pytest.fail("the queue was never full")
        found = await broker.dead("q", number)  # which makes room
    numbers = list(range(1, number + 1))
    assert sorted(json.loads(one["body"]) for one in found) == sorted(attempts) == numbers


async def test_w12_a_body_that_cannot_be_read(broker: Broker, queue_type: str) -> None:
    @listen("a", queue="q")
    async def handle(body: dict[str, int]) -> None:
        pytest.fail(f"called with {body}")

    bodies = [b"", b"{", b"\xff\xfe", b"null", b"[]", b'{"a": "1"}', b"[" * 500, b'"\\ud800"', b"{}{}", b"1e999"]
    async with running(worker_on(broker, handle, queue_type=queue_type)):
        for body in bodies:
            await broker.publish("a", body)
        found = await broker.dead("q", len(bodies))
    assert sorted(one["body"] for one in found) == sorted(bodies)
    assert {one["properties"]["headers"]["x-outbox-dead-reason"] for one in found} == {"unreadable"}


async def test_w13_a_life_that_ends_in_the_meantime(broker: Broker, queue_type: str) -> None:
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.05, 5))
    async def handle(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        raise ValueError

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await broker.publish("a", expiration=1)
        [dead] = await broker.dead("q")
    assert attempts == [1, 2], "the second delay would have ended after the message's life"
    assert dead["properties"]["headers"]["x-outbox-dead-reason"] == "expired"
    assert "expiration" not in dead["properties"], "a dead letter stays"


async def test_w13_a_listener_uses_up_its_life(broker: Broker, queue_type: str) -> None:
    """It counts from when the message came, not from when it failed."""
    attempts: list[int] = []

    @listen("a", queue="q", retry_delays=(0.5,))
    async def handle(_body: Any, attempt_count: int) -> None:
        attempts.append(attempt_count)
        await asyncio.sleep(0.6)
        raise ValueError

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await broker.publish("a", expiration=1)
        [dead] = await broker.dead("q")
    assert attempts == [1]
    assert dead["properties"]["headers"]["x-outbox-dead-reason"] == "expired"


async def test_w13_expired_before_anybody_took_it(broker: Broker, start: StartProcess, queue_type: str) -> None:
    """Then it is the broker that makes it a dead letter; it can be put back like others."""
    seen: list[tuple[str, int]] = []

    @listen("a.*", queue="q")
    async def handle(_body: Any, routing_key: str, attempt_count: int) -> None:
        seen.append((routing_key, attempt_count))

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        pass
    identity = await broker.publish("a.b", expiration=0.05)
    await broker.filled("q.dlq")
    listed = start("dlq", "list", "q", OUTBOX_AMQP_URL=broker.url)
    assert await listed.ended() == 0
    name, _, *rest = listed.log.rstrip("\n").split("\t")
    assert [name, *rest] == [identity, "a.b", "expired", ""]
    assert await start("dlq", "requeue", "q", "--all", OUTBOX_AMQP_URL=broker.url).ended() == 0
    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await eventually(lambda: seen == [("a.b", 1)], "the message")


async def test_w13_expired_when_it_comes_back(broker: Broker, queue_type: str) -> None:
    @listen("a", queue="q")
    async def handle(_body: Any) -> None:
        pytest.fail("its time was over")

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await broker.publish("a", headers={"x-outbox-expires-at": round(time.time() * 1000) - 1})
        [dead] = await broker.dead("q")
    assert dead["properties"]["headers"]["x-outbox-dead-reason"] == "expired"


# --- the process, and the end of it


POISON = """
import os
from outbox import Worker, listen

@listen("a", queue="q")
async def handle(body: int) -> None:
    if body == 13:
        os._exit(1)
    with open("handled", "a") as file:
        file.write(f"{body}\\n")

@listen("b", queue="other")
async def other(body: int) -> None:
    with open("handled", "a") as file:
        file.write(f"other {body}\\n")

worker = Worker(
    os.environ["OUTBOX_AMQP_URL"], listeners=[handle, other], delivery_limit=1, queue_type=os.environ["QUEUE_TYPE"]
)
"""


async def test_w8_a_message_that_kills_ends_among_the_dead(broker: Broker, start: StartProcess, tmp_path: Path) -> None:
    """And those that were in hand with it do not."""
    (tmp_path / "app.py").write_text(POISON)
    handled = tmp_path / "handled"
    at = {"OUTBOX_AMQP_URL": broker.url, "QUEUE_TYPE": "quorum"}
    first = start("worker", "app:worker", **at)
    await first.await_log("worker ready")
    first.process.terminate()
    assert await first.ended() == 0
    for number in range(8, 18):
        await broker.publish("a", number)
        await broker.publish("b", number)
    deaths = 0
    for _ in range(12):
        one = start("worker", "app:worker", **at)

        def over(one: Process = one) -> bool:
            return one.process.poll() is not None or (handled.exists() and len(handled.read_text().split("\n")) > 19)

        await eventually(over, "an end")
        await asyncio.sleep(0.3)
        if one.process.poll() is None:
            break
        deaths += 1
    [dead] = await broker.dead("q")
    assert json.loads(dead["body"]) == 13
    assert dead["properties"]["headers"]["x-death"][0]["reason"] == "delivery_limit"
    assert deaths == 2, "each time it counts, and only it"
    lines = handled.read_text().split()
    wanted = {str(number) for number in range(8, 18)} - {"13"}
    assert wanted <= set(lines)
    assert await broker.ready("other.dlq") == 0


async def test_w8_on_a_classic_queue_it_comes_back_for_ever(
    broker: Broker, start: StartProcess, tmp_path: Path
) -> None:
    """Which counts nothing. It stays where it was, and is not lost."""
    (tmp_path / "app.py").write_text(POISON)
    for number in range(4):
        one = start("worker", "app:worker", OUTBOX_AMQP_URL=broker.url, QUEUE_TYPE="classic")
        if number == 0:
            await one.await_log("worker ready")
            await broker.publish("a", 13)
        assert await one.ended() == 1
    await broker.filled("q")
    assert (await broker.ready("q"), await broker.ready("q.dlq")) == (1, 0)


async def test_w10_acknowledging_on_a_connection_that_is_gone(
    broker: Broker, queue_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(broker.url)
    seen: list[int] = []
    go_on = asyncio.Event()

    @listen("a", queue="q")
    async def handle(body: int) -> None:
        seen.append(body)
        await go_on.wait()

    worker = worker_on(broker, handle, queue_type=queue_type)
    broken = worker_on(Broker(broker.management, proxy.url), handle, queue_type=queue_type)
    async with running(worker):
        pass
    async with running(broken):
        await broker.publish("a", 1)
        await eventually(lambda: seen, "a message")
        proxy.cut()
        await eventually(lambda: len(seen) == 2, "the message again")
        go_on.set()
        await eventually(
            lambda: "could not acknowledge a message: it comes again" in caplog.messages, "a word about the first"
        )
    proxy.close()
    assert await broker.ready("q") == 0


async def test_w11_deleted_queue_is_made_again(broker: Broker, queue_type: str) -> None:
    seen: list[int] = []

    @listen("a", queue="q")
    async def handle(body: int) -> None:
        seen.append(body)

    async with running(worker_on(broker, handle, queue_type=queue_type)) as one:
        one.worker.ready.clear()
        broker.management("DELETE", "/queues/{vhost}/q")
        async with asyncio.timeout(20):
            await one.worker.ready.wait()
        await broker.publish("a", 1)
        await eventually(lambda: seen, "a message")


async def test_w11_deleted_queue_that_may_not_be_made_again(broker: Broker, queue_type: str) -> None:
    listener, _ = failing()
    async with running(worker_on(broker, listener, queue_type=queue_type)):
        pass
    async with running(worker_on(broker, listener, declare=False, queue_type=queue_type)) as one:
        broker.management("DELETE", "/queues/{vhost}/q")
        with pytest.raises(ConfigurationError, match="the broker lacks queue 'q': `outbox topology` writes down"):
            await asyncio.wait_for(one.task, 20)


async def test_a_channel_that_is_closed(broker: Broker, queue_type: str) -> None:
    """By a listener that acknowledges a second time, for instance."""
    seen: list[int] = []

    @listen("a", queue="q")
    async def handle(body: int, message: Any) -> None:
        seen.append(body)
        if len(seen) == 1:
            await message.channel.basic_ack(message.delivery_tag)
            await message.channel.basic_ack(message.delivery_tag)

    async with running(worker_on(broker, handle, queue_type=queue_type)):
        await broker.publish("a", 1)
        await eventually(lambda: seen, "a message")
        await broker.publish("a", 2)
        await eventually(lambda: 2 in seen, "the next message, on another channel")


async def test_w14_the_end_does_not_wait_for_what_never_ends(
    broker: Broker, start: StartProcess, tmp_path: Path, queue_type: str
) -> None:
    (tmp_path / "app.py").write_text(
        "import os, time\nfrom outbox import Worker, listen\n"
        "@listen('a', queue='thread')\ndef wedged(_body):\n    print('begun', flush=True)\n    time.sleep(600)\n"
        "@listen('a', queue='task')\nasync def stubborn(_body):\n    import asyncio\n"
        "    print('waiting', flush=True)\n    await asyncio.sleep(600)\n"
        "worker = Worker(os.environ['OUTBOX_AMQP_URL'], listeners=[wedged, stubborn], shutdown=0.5,\n"
        "    queue_type=os.environ['QUEUE_TYPE'])\n"
    )
    one = start("worker", "app:worker", OUTBOX_AMQP_URL=broker.url, QUEUE_TYPE=queue_type)
    await one.await_log("worker ready")
    await broker.publish("a", 1)
    await one.await_log("begun")
    await one.await_log("waiting")
    begun = time.monotonic()
    one.process.terminate()
    assert await one.ended() == 0
    assert time.monotonic() - begun < 6
    assert one.log.count("stopped before a listener had ended: its message comes again") == 2
    assert (await broker.ready("thread"), await broker.ready("task")) == (1, 1)


PATIENT = """
import asyncio, os, pathlib
from outbox import Worker, listen

@listen("a", queue="q")
async def handle(body: int):
    print("begun", body, flush=True)
    while not pathlib.Path(f"go on {body}").exists():
        await asyncio.sleep(0.01)

worker = Worker(os.environ["OUTBOX_AMQP_URL"], listeners=[handle], queue_type=os.environ["QUEUE_TYPE"])
"""


async def test_the_first_signal_lets_it_finish_the_second_does_not(
    broker: Broker, start: StartProcess, tmp_path: Path, queue_type: str
) -> None:
    (tmp_path / "app.py").write_text(PATIENT)
    # Either signal may come first; that has nothing to do with the queue, so each kind has one way round.
    both = [signal.SIGINT, signal.SIGTERM] if queue_type == "quorum" else [signal.SIGTERM, signal.SIGINT]
    for number, first in enumerate(both):
        one = start("worker", "app:worker", OUTBOX_AMQP_URL=broker.url, QUEUE_TYPE=queue_type)
        await one.await_log("worker ready")
        await broker.publish("a", number)
        await one.await_log(f"begun {number}")
        one.process.send_signal(first)
        await one.await_log("stopping")
        if first == both[0]:
            assert one.process.poll() is None
            (tmp_path / f"go on {number}").touch()
            assert await one.ended() == 0
            assert await broker.ready("q") == 0
        else:
            one.process.send_signal(first)
            assert await one.ended() == 128 + first
            await broker.filled("q")


async def test_what_runs_is_finished_and_what_came_late_goes_back(broker: Broker, queue_type: str) -> None:
    begun: list[int] = []
    done: list[int] = []
    finish = asyncio.Event()

    @listen("a", queue="q")
    async def handle(body: int) -> None:
        begun.append(body)
        await finish.wait()
        done.append(body)

    async with running(worker_on(broker, handle, queue_type=queue_type, prefetch_count=1)) as one:
        await broker.publish("a", 1)
        await eventually(lambda: begun, "a message")
        one.worker.stop()
        await broker.publish("a", 2)
        await asyncio.sleep(0.2)
        assert not one.task.done()
        finish.set()
    assert (begun, done) == ([1], [1])
    assert await broker.ready("q") == 1


async def test_what_comes_before_the_broker_has_heard_goes_back_at_once(broker: Broker, queue_type: str) -> None:
    """To another worker, while this one still finishes what it began."""
    proxy = Proxy(broker.url)
    begun: list[int] = []
    others: list[int] = []
    finish = asyncio.Event()

    async def handle(body: int) -> None:
        begun.append(body)
        await finish.wait()

    async def other(body: int) -> None:
        others.append(body)

    ours = worker_on(Broker(broker.management, proxy.url), Listener("a", handle, "q"), queue_type=queue_type)
    async with running(ours) as one:
        await broker.publish("a", 1)
        await eventually(lambda: begun, "a message")
        proxy.stuck.set()
        one.worker.stop()
        await broker.publish("a", 2)
        assert await broker.ready("q") == 0, "the broker has sent it"
        proxy.stuck.clear()
        await broker.filled("q")
        await broker.publish("a", 3)
        async with running(worker_on(broker, Listener("a", other, "q"), queue_type=queue_type)):
            await eventually(lambda: sorted(others) == [2, 3], "both messages")
            assert not one.task.done()
        finish.set()
    proxy.close()
    assert begun == [1]
    assert await broker.ready("q") == 0


async def test_w15_channels_do_not_grow(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.source_amqp.CHECK_EVERY", 0.02)
    listener, attempts = failing(retry_delays=(0.05,))
    worker = worker_on(broker, listener)
    async with running(worker):
        await broker.publish("a")
        await eventually(lambda: attempts == [1, 2], "a retry")
        await asyncio.sleep(1)
        source: Any = worker._source  # noqa: SLF001 - the broker shows its channels only seconds later
        opened = source._courier._connection.transport.connection.channels  # noqa: SLF001
        assert len([one for one in opened.values() if one is not None]) == 2  # for copies, and for questions


async def test_a_broker_that_is_away_at_first(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    at = urlsplit(broker.url)
    listener, _ = failing()
    caplog.set_level(logging.INFO)
    nowhere = Broker(broker.management, at._replace(netloc=f"{at.netloc.rpartition(':')[0]}:1").geturl())
    worker = worker_on(nowhere, listener)
    task = asyncio.create_task(worker.run())
    await eventually(lambda: "broker unavailable, trying again" in caplog.messages, "a word about it")
    assert not worker.ready.is_set()
    worker.stop()
    await asyncio.wait_for(task, 5)


async def test_a_login_that_is_refused(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    at = urlsplit(broker.url)
    stranger = Broker(broker.management, at._replace(netloc=f"nobody:canary@{at.hostname}:{at.port}").geturl())
    worker = worker_on(stranger, failing()[0])
    with pytest.raises(ConfigurationError, match="refuses the login") as raised:
        await asyncio.wait_for(worker.run(), 20)
    source: Any = worker._source  # noqa: SLF001 - what a traceback with local values would show
    assert "canary" not in f"{raised.value} {caplog.text} {source._settings}"  # noqa: SLF001 - as above


async def test_a_queue_that_is_there_and_differs(broker: Broker, queue_type: str) -> None:
    other = "quorum" if queue_type == "classic" else "classic"
    broker.management("PUT", "/queues/{vhost}/q", {"durable": True, "arguments": {"x-queue-type": other}})
    with pytest.raises(ConfigurationError, match=r"queue 'q' differs from what is needed.*delete it, or use another"):
        await asyncio.wait_for(worker_on(broker, failing()[0], queue_type=queue_type).run(), 20)
