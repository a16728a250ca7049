"""Connections that break, stall and lie, to the broker and to the database."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from chaos.proxy import Amqp, Proxy
from chaos.stage import LEASE, Stage

pytestmark = pytest.mark.timeout(240)


def delayed(proxy: Proxy) -> None:
    proxy.delay = 0.2
    time.sleep(2)
    proxy.delay = 0.0


def stalled(*, up: bool, down: bool, seconds: float) -> Callable[[Proxy], None]:
    def stall(proxy: Proxy) -> None:
        proxy.stall(up=up, down=down)
        time.sleep(seconds)
        proxy.release()

    return stall


def refused(proxy: Proxy) -> None:
    """Reset, and nobody may come back for a while."""
    proxy.refusing = True
    proxy.reset()
    time.sleep(2)
    proxy.refusing = False


def cut_after_bytes(proxy: Proxy) -> None:
    proxy.cut_after = 30_000
    while proxy.cut_after is not None:
        time.sleep(0.05)


FAULTS: dict[str, Callable[[Proxy], None]] = {
    "reset": Proxy.reset,
    "refused": refused,
    "half closed": Proxy.half_close,
    "half open": Proxy.half_open,
    "black hole": Proxy.blackhole,
    "stalled for a moment": stalled(up=True, down=True, seconds=1),
    "stalled for longer than the lease": stalled(up=True, down=True, seconds=LEASE * 1.5),
    "stalled from the relay": stalled(up=True, down=False, seconds=LEASE * 1.5),
    "stalled to the relay": stalled(up=False, down=True, seconds=LEASE * 1.5),
    "cut after some bytes": cut_after_bytes,
    "slow": delayed,
}


def suffer(scene: Stage, proxy: Proxy, fault: Callable[[Proxy], None], times: int) -> None:
    """A fault in the midst of traffic, so often; each may end a session with a window in flight."""
    if proxy.protocol is Amqp:
        scene.relay(amqp=proxy.url)
    else:
        scene.relay(pg=proxy.url)
    for _ in scene.rounds(times):
        fault(proxy)
        scene.unclean += 1
    scene.finish()


def test_broker_connection_reset_stalled_and_black(scene: Stage) -> None:
    """Some of the faults below, one after another."""
    proxy = scene.amqp_proxy()
    scene.relay(amqp=proxy.url)
    faults = ("reset", "stalled for a moment", "half closed", "black hole")
    for number in scene.rounds(len(faults)):
        FAULTS[faults[number]](proxy)
        scene.unclean += 1
    scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_broker_connection(scene: Stage, fault: str) -> None:
    proxy = scene.amqp_proxy()
    suffer(scene, proxy, FAULTS[fault], 2)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_database_connection(scene: Stage, fault: str) -> None:
    proxy = scene.pg_proxy()
    suffer(scene, proxy, FAULTS[fault], 2)


@pytest.mark.parametrize("number", [1, 50, 123])
@pytest.mark.long
def test_cut_after_a_publish(scene: Stage, number: int) -> None:
    proxy = scene.amqp_proxy()

    def cut(proxy: Proxy) -> None:
        proxy.when("publish", do="cut", nth=number, after=True).wait()
        proxy.forget()

    suffer(scene, proxy, cut, 4)


def swallow(proxy: Proxy) -> None:
    rule = proxy.when("ack", do="drop", forever=True)
    rule.wait()
    time.sleep(4)
    proxy.forget()


def test_confirms_swallowed(scene: Stage) -> None:
    """What is not confirmed is sent again, and not again and again while nothing is confirmed."""
    proxy = scene.amqp_proxy()
    suffer(scene, proxy, swallow, 1)


@pytest.mark.long
def test_confirms_swallowed_with_a_second_relay(scene: Stage) -> None:
    proxy = scene.amqp_proxy()
    scene.relay()
    suffer(scene, proxy, swallow, 2)


@pytest.mark.long
def test_broker_says_blocked(scene: Stage) -> None:
    """Nothing is wrong but that the broker says so: nobody is disconnected, so nothing comes twice."""
    proxy = scene.amqp_proxy()
    scene.relay(amqp=proxy.url)
    for _ in scene.rounds(2):
        proxy.inject(Amqp.blocked("low on memory"))
        time.sleep(LEASE * 1.2)
        proxy.inject(Amqp.unblocked())
    scene.finish()


@pytest.mark.parametrize(
    "calls",
    [
        ["claim_batch", "mark_sent"],
        pytest.param(["claim_batch"] * 5, marks=pytest.mark.long),
        pytest.param(["mark_sent"] * 5, marks=pytest.mark.long),
    ],
    ids=lambda calls: " ".join(sorted(set(calls))),
)
def test_answer_lost(scene: Stage, calls: list[str]) -> None:
    """The database has done it, and the relay never hears of it."""
    proxy = scene.pg_proxy()
    scene.relay(pg=proxy.url)
    for number in scene.rounds(len(calls)):
        proxy.when("answer", text=calls[number], do="cut").wait()
        scene.unclean += 1
        proxy.forget()
    scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("call", ["claim_batch", "mark_sent", "hello"])
def test_statement_lost(scene: Stage, call: str) -> None:
    """The database never hears of it."""
    proxy = scene.pg_proxy()
    rule = proxy.when("statement", text=call, do="cut")
    scene.emit()
    scene.relay(pg=proxy.url)
    rule.wait()
    scene.unclean += 1
    scene.finish()
