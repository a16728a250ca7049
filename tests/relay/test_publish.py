# ruff: noqa: SLF001 - the channel and the frame size are looked at from inside
"""What the publisher says about each message, from a real broker's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import aiormq
import pytest
from pamqp import commands
from pamqp.frame import marshal

from harness import Management, Proxy, Queue, message
from outbox.config import RelaySettings
from outbox.confirms import BEHIND, EXPIRED, REFUSED, SENT, UNROUTABLE, Failed, Outcome, Unknown
from outbox.errors import BrokerUnavailableError
from outbox.publish import Publisher
from outbox.store import ClaimedMessage

QUICK: dict[str, Any] = {"confirm_timeout": 1.0, "send_timeout": 0.5, "heartbeat": 1}


async def in_trouble(publisher: Publisher) -> str:
    async with asyncio.timeout(10):
        while not (trouble := publisher.trouble):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    return trouble


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def yes() -> bool:
    return True


async def publish(publisher: Publisher, messages: Sequence[ClaimedMessage], *, alone: bool = False) -> list[Outcome]:
    async with asyncio.timeout(20):
        return await publisher.publish(messages, monotonic(), yes, alone=alone)


@pytest.fixture(autouse=True)
def orders(management: Management) -> Queue:
    return Queue(management, binding="order.*")


@pytest.fixture
async def publisher(amqp_url: str) -> AsyncIterator[Publisher]:
    opened = await Publisher(RelaySettings(dsn="unused", amqp_url=amqp_url)).open(amqp_url, "outbox")
    yield opened
    await opened.close()


@pytest.fixture
async def behind_proxy(proxy: Proxy) -> AsyncIterator[Publisher]:
    opened = await Publisher(RelaySettings(dsn="unused", amqp_url=proxy.url, **QUICK)).open(proxy.url, "outbox")
    yield opened
    await opened.close()


async def test_each_message_gets_its_own_outcome(publisher: Publisher) -> None:
    assert not publisher.proven
    assert await publish(publisher, [message(), message("nobody.listens"), message()]) == [SENT, UNROUTABLE, SENT]
    assert publisher.proven


async def test_a_batch_of_the_window_stays_back(amqp_url: str) -> None:
    settings = RelaySettings(dsn="unused", amqp_url=amqp_url, window=1500, batch_size=500)
    publisher = await Publisher(settings).open(amqp_url, "outbox")
    channel, most = publisher._channel, 0
    write = channel.write

    def watched(messages: Sequence[ClaimedMessage], payload: bytes) -> Any:
        nonlocal most
        written = write(messages, payload)
        most = max(most, sum(flight.open for flight in channel.flights))
        return written

    channel.write = watched  # type: ignore[method-assign]
    for outcomes in await asyncio.gather(*(publish(publisher, [message("order.a")] * 500) for _ in range(6))):
        assert outcomes == [SENT] * 500
    assert 500 < most <= 1000
    await publisher.close()


async def test_many_messages_at_once(publisher: Publisher, orders: Queue) -> None:
    batches = [[message("order.a" if n % 7 else "nobody", body=b"%d" % n) for n in range(b, b + 500)] for b in range(6)]
    for outcomes, batch in zip(await asyncio.gather(*(publish(publisher, b) for b in batches)), batches, strict=True):
        assert outcomes == [SENT if m.routing_key == "order.a" else UNROUTABLE for m in batch]
    wanted = sorted(m.body for batch in batches for m in batch if m.routing_key == "order.a")
    assert sorted(m.body for m in orders.receive(len(wanted))) == wanted


async def test_equal_message_ids_are_told_apart(publisher: Publisher, orders: Queue) -> None:
    same = str(uuid4())
    names = ["nobody.listens", "order.created", "nobody.listens", "order.created", "order.created"]
    outcomes = await publish(publisher, [message(name, message_id=same) for name in names])
    assert outcomes == [UNROUTABLE, SENT, UNROUTABLE, SENT, SENT]
    assert len(orders.receive(3)) == 3


async def test_full_queue_gives_back(publisher: Publisher, management: Management) -> None:
    Queue(management, "full", "full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    assert await publish(publisher, [message("full")]) == [SENT]
    outcomes = await publish(publisher, [message("full"), message(), message("full")])
    assert outcomes == [REFUSED, SENT, REFUSED]


@pytest.mark.parametrize(
    ("bad", "code"),
    [({"exchange": "missing"}, 404), ({"exchange": "internal"}, 403), ({"headers": {"CC": 1}}, 406)],
)
async def test_what_closes_the_channel_leaves_all_unknown_and_alone_tells(
    publisher: Publisher, management: Management, bad: dict[str, Any], code: int
) -> None:
    management("PUT", "/exchanges/{vhost}/internal", {"type": "topic", "internal": True})
    batch = [message(), message(**bad), message()]
    outcomes = await publish(publisher, batch)
    assert isinstance(outcomes[1], Unknown)
    assert outcomes[1].code == code
    assert outcomes[2] == outcomes[1]
    assert outcomes[0] in (SENT, outcomes[1])
    # The same session goes on, on another channel.
    alone = [(await publish(publisher, [one], alone=True))[0] for one in batch]
    assert alone == [SENT, outcomes[1], SENT]
    assert await publish(publisher, batch[:1]) == [SENT]


async def test_closed_channels_do_not_end_the_connection(publisher: Publisher) -> None:
    """What is written to a channel after it has answered the close would: with code 504."""
    for _ in range(20):
        batches = [[message(exchange="missing")] + [message()] * 50, [message()] * 100, [message(exchange="missing")]]
        for outcomes in await asyncio.gather(*(publish(publisher, batch) for batch in batches)):
            assert {o.code for o in outcomes if isinstance(o, Unknown)} <= {404}
        assert publisher.is_open


async def test_connection_closed_by_a_message_carries_the_code(publisher: Publisher) -> None:
    channel = publisher._channel
    # A frame on a channel that was never opened: what a bad frame does to all that are in flight.
    channel.write([message()], marshal(commands.Basic.Qos(), 99))
    outcomes = await publish(publisher, [message()])
    assert isinstance(outcomes[0], Unknown)
    assert outcomes[0].code == 504
    assert not publisher.is_open


async def test_what_amqp_cannot_carry_is_rejected_and_holds_its_key(publisher: Publisher) -> None:
    batch = [message(key="a"), message(key="a", headers={"n": 2**70}), message(key="a"), message(key="b"), message()]
    batch += [message(headers={f"h{n}": "x" * 1000 for n in range(200)})]
    outcomes = await publish(publisher, batch)
    assert [outcomes[n] for n in (0, 2, 3, 4)] == [SENT, BEHIND, SENT, SENT]
    for place in (1, 5):
        rejected = outcomes[place]
        assert isinstance(rejected, Failed)
        assert rejected.reason == "rejected"


async def test_expiration_is_what_is_left(publisher: Publisher, orders: Queue) -> None:
    lives = [timedelta(seconds=60), timedelta(seconds=10), timedelta(days=5000), timedelta(seconds=10, microseconds=1)]
    batch = [message(expires_in=life) for life in lives]
    outcomes = await publisher.publish(batch, monotonic() - 10, yes)
    assert outcomes[:3] == [SENT, EXPIRED, SENT]
    assert outcomes[3] in (SENT, EXPIRED)
    found = sorted(int(received.properties["expiration"]) for received in orders.receive(2))
    assert found[-1] == 315_360_000_000
    assert 45_000 < found[-2] <= 50_000


async def test_wire_format(publisher: Publisher, amqp_url: str) -> None:
    headers = {
        "text": "ä", "yes": True, "no": False, "none": None, "list": [1, "two", True, None], "deep": {"a": 1},
        **{f"n{n}": n for n in (0, 1, -1, 127, 128, -129, 40_000, 70_000, -70_000, 3 * 10**9, 2**63 - 1, -(2**63))},
    }  # fmt: skip
    properties = {"priority": 7, "type": "t", "correlation_id": "c", "reply_to": "r", "app_id": "a"}
    full = message(headers=headers, properties=properties, expires_in=timedelta(hours=1), content_type="text/plain")
    assert await publish(publisher, [full]) == [SENT]
    connection = await aiormq.connect(amqp_url)
    got = await (await connection.channel()).basic_get("inbox", no_ack=True)
    await connection.close()
    found = got.header.properties
    assert found.headers == headers
    assert {name: type(value) for name, value in found.headers.items()} == {n: type(v) for n, v in headers.items()}
    assert {name: getattr(found, name if name != "type" else "message_type") for name in properties} == properties
    assert (found.delivery_mode, found.content_type, found.message_id) == (2, "text/plain", full.message_id)
    assert found.timestamp == full.created_at.replace(microsecond=0)
    assert 3_590_000 < int(found.expiration or 0) <= 3_600_000


async def test_bodies_of_any_size_arrive_unchanged(publisher: Publisher, orders: Queue) -> None:
    frame = publisher.connection.connection_tune.frame_max - 8
    sizes = [0, 1, frame - 1, frame, frame + 1, 2 * frame, 2 * frame + 1, 3_000_000]
    bodies = [bytes(n % 251 for n in range(size)) for size in sizes]
    assert await publish(publisher, [message(body=body) for body in bodies]) == [SENT] * len(sizes)
    assert [received.body for received in orders.receive(len(sizes))] == bodies


async def test_nothing_is_sent_when_the_lease_is_lost(publisher: Publisher, orders: Queue) -> None:
    async def no() -> bool:
        return False

    assert await publisher.publish([message()], monotonic(), no) == [Unknown("the lease was lost")]
    assert orders.take() == []


async def test_late_confirms_are_waited_for(behind_proxy: Publisher, proxy: Proxy, orders: Queue) -> None:
    proxy.held.set()
    first = asyncio.create_task(publish(behind_proxy, [message()]))
    assert await in_trouble(behind_proxy) == "no confirm within 1 s"
    second = asyncio.create_task(publish(behind_proxy, [message()]))
    await asyncio.sleep(0.3)
    assert len(orders.take()) == 1, "nothing more is sent while confirms are late"
    proxy.held.clear()
    assert await first == await second == [SENT]
    assert behind_proxy.trouble is None
    assert len(orders.receive(1)) == 1


async def test_socket_that_does_not_drain(behind_proxy: Publisher, proxy: Proxy) -> None:
    proxy.stuck.set()
    task = asyncio.create_task(publish(behind_proxy, [message(body=bytes(1_000_000))] * 16))
    assert await in_trouble(behind_proxy) == "the socket did not drain in 0.5 s"
    proxy.stuck.clear()
    assert await task == [SENT] * 16


async def test_confirms_that_never_come(behind_proxy: Publisher, proxy: Proxy) -> None:
    proxy.deaf.set()
    begun = monotonic()
    (outcome,) = await publish(behind_proxy, [message()])
    assert isinstance(outcome, Unknown)
    assert outcome.code == 0
    assert 1.9 < monotonic() - begun < 6
    assert not behind_proxy.is_open


async def test_blocked_connection_is_kept(behind_proxy: Publisher, proxy: Proxy, orders: Queue) -> None:
    proxy.say(marshal(commands.Connection.Blocked("low on memory"), 0))
    assert await in_trouble(behind_proxy) == "the broker has blocked the connection"
    task = asyncio.create_task(publish(behind_proxy, [message()]))
    await asyncio.sleep(2.5)  # longer than any time-out
    assert not task.done()
    assert orders.take() == []
    proxy.say(marshal(commands.Connection.Unblocked(), 0))
    assert await task == [SENT]


async def test_lost_connection_is_unknown(behind_proxy: Publisher, proxy: Proxy) -> None:
    proxy.held.set()
    task = asyncio.create_task(publish(behind_proxy, [message(), message()]))
    await asyncio.sleep(0.2)
    proxy.cut()
    proxy.held.clear()
    assert [type(outcome) for outcome in await task] == [Unknown, Unknown]
    assert not behind_proxy.is_open
    assert [type(outcome) for outcome in await publish(behind_proxy, [message()])] == [Unknown]


async def test_heartbeats_that_stay_away_end_it(proxy: Proxy) -> None:
    settings = RelaySettings(dsn="unused", amqp_url=proxy.url, heartbeat=1)
    publisher = await Publisher(settings).open(proxy.url, "outbox")
    proxy.deaf.set()
    (outcome,) = await publish(publisher, [message()])
    assert isinstance(outcome, Unknown)
    assert not publisher.is_open
    await publisher.close()


async def test_closing_never_waits_for_a_dead_peer(behind_proxy: Publisher, proxy: Proxy) -> None:
    proxy.stuck.set()
    task = asyncio.create_task(publish(behind_proxy, [message(body=bytes(1_000_000))] * 16))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(8):
        await behind_proxy.close()
        assert [type(outcome) for outcome in await task] == [Unknown] * 16


async def test_connecting_leaves_nothing_behind(amqp_url: str) -> None:
    async def attempt(url: str) -> None:
        publisher = Publisher(RelaySettings(dsn="unused", amqp_url=url))
        try:
            await publisher.open(url, "outbox")
        except BrokerUnavailableError:
            return
        await publish(publisher, [message()])
        await publisher.close()

    wrong = amqp_url.replace(":", ":x", 2).replace("amqp:x", "amqp:")  # another password
    for url in (amqp_url, wrong):
        await attempt(url)
    before = open_files()
    tasks = len(asyncio.all_tasks())
    for _ in range(10):
        await attempt(amqp_url)
        await attempt(wrong)
    assert open_files() <= before
    assert len(asyncio.all_tasks()) <= tasks
