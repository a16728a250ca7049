"""kill -9 and SIGSTOP of the relay, at every step from claim to mark."""

from __future__ import annotations

import signal
import time

import pytest

from chaos.proxy import Proxy, Rule
from chaos.stage import LEASE, TOTAL, Stage

STEPS = {
    "before the claim": ("pg", "statement", "claim_batch", 1, False),
    "claimed, the answer on its way": ("pg", "answer", "claim_batch", 1, False),
    "before the first publish": ("amqp", "publish begins", "", 1, False),
    "in the midst of publishing": ("amqp", "publish", "", 37, True),
    "published, no confirm yet": ("amqp", "ack", "", 1, False),
    "one confirm came": ("amqp", "ack", "", 1, True),
    "before the mark": ("pg", "statement", "mark_sent", 1, False),
    "marked, the answer on its way": ("pg", "answer", "mark_sent", 1, False),
}


def hold_at(step: str, pg: Proxy, amqp: Proxy) -> Rule:
    where, kind, text, nth, after = STEPS[step]
    proxy = pg if where == "pg" else amqp
    return proxy.when(kind, do="hold", text=text, nth=nth, after=after)


def kill_at(scene: Stage, step: str, pg: Proxy, amqp: Proxy, messages: int) -> None:
    """Lets a relay work for a while, holds it at the step, kills it there."""
    scene.emit(total=messages, seconds=2)
    relay = scene.relay(pg=pg.url, amqp=amqp.url)
    scene.await_progress(150)
    scene.note(f"next: {step}")
    rule = hold_at(step, pg, amqp)
    rule.wait()
    time.sleep(0.1)  # whatever it can still do, it does
    scene.kill(relay)
    pg.forget()
    amqp.forget()


@pytest.mark.timeout(240)
def test_killed_at_every_step(scene: Stage) -> None:
    pg, amqp = scene.pg_proxy(), scene.amqp_proxy()
    for step in STEPS:
        kill_at(scene, step, pg, amqp, messages=TOTAL // 5)
    scene.relay()
    scene.finish()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", STEPS)
def test_killed_again_and_again(scene: Stage, step: str) -> None:
    pg, amqp = scene.pg_proxy(), scene.amqp_proxy()
    for _ in range(4):
        kill_at(scene, step, pg, amqp, messages=2500)
    scene.relay()
    scene.relay()
    scene.finish()


@pytest.mark.timeout(240)
def test_stopped_longer_than_its_lease(scene: Stage) -> None:
    """It wakes up with a batch that another has sent meanwhile, and must not settle it."""
    pg, amqp = scene.pg_proxy(), scene.amqp_proxy()
    scene.emit()
    relay = scene.relay(pg=pg.url, amqp=amqp.url)
    scene.await_progress(500)
    rule = hold_at("published, no confirm yet", pg, amqp)
    rule.wait()
    relay.process.send_signal(signal.SIGSTOP)
    scene.note("relay 0 frozen")
    scene.unclean += 1
    amqp.release()
    scene.relay()
    time.sleep(LEASE * 1.5)
    relay.process.send_signal(signal.SIGCONT)
    scene.note("relay 0 thawed")
    scene.finish()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", STEPS)
def test_stopped_at_every_step(scene: Stage, step: str) -> None:
    pg, amqp = scene.pg_proxy(), scene.amqp_proxy()
    relay = scene.relay(pg=pg.url, amqp=amqp.url)
    for number in range(2):
        rule = hold_at(step, pg, amqp)
        scene.emit(total=5000, seconds=4)
        rule.wait()
        relay.process.send_signal(signal.SIGSTOP)
        scene.note("relay 0 frozen")
        scene.unclean += 1
        pg.forget()
        amqp.forget()
        pg.release()
        amqp.release()
        if number == 0:
            scene.relay()
        time.sleep(LEASE * scene.chance.uniform(0.5, 1.5))
        relay.process.send_signal(signal.SIGCONT)
        scene.note("relay 0 thawed")
    scene.finish()
