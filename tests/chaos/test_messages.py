"""Messages that the broker refuses, among thousands of good ones."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest

import servers
from chaos.oracle import Poison
from chaos.stage import TOTAL, Stage
from harness import Management, may

pytestmark = pytest.mark.timeout(240)


def unroutable(_: random.Random) -> dict[str, Any]:
    return {"routing_key": "nobody.listens"}


def missing_exchange(_: random.Random) -> dict[str, Any]:
    return {"exchange": "no-such-exchange"}


def forbidden(_: random.Random) -> dict[str, Any]:
    return {"exchange": "amq.topic"}


def oversized(_: random.Random) -> dict[str, Any]:
    return {"payload": {"key": "", "number": 0, "text": secrets.token_hex(40_000)}}


def give_up_soon(scene: Stage) -> None:
    """Dead after two attempts, so that the test sees it."""
    for name, value in {"max_attempts": "2", "retry_base": "200 ms", "retry_cap": "1 s"}.items():
        scene.execute("select outbox.configure(%s, %s)", name, value)


def suffer(scene: Stage, poison: Poison, *, amqp: str | None = None) -> None:
    give_up_soon(scene)
    emitters = scene.emit(poison=poison, poisonous=12 / TOTAL)
    scene.relay(amqp=amqp)
    scene.await_emitted()
    assert emitters.poison
    scene.await_empty()
    # Each attempt may cost a channel, with a window in flight; that of an unroutable one costs nothing.
    [(attempts,)] = scene.execute("select count(*) + (select count(*) from outbox.dead_letter) from public.refused")
    scene.unclean = 0 if poison is unroutable else attempts
    verdict = scene.finish(refused=True)
    assert 0 < verdict.dead < 0.01 * verdict.committed
    reasons = scene.execute("select distinct reason, error is not null from outbox.dead_letter")
    assert reasons
    assert all(said for _, said in reasons), reasons


@pytest.mark.parametrize(
    "poison", [missing_exchange, pytest.param(unroutable, marks=pytest.mark.long)], ids=lambda p: p.__name__
)
def test_refused_messages_harm_no_other(scene: Stage, poison: Poison) -> None:
    suffer(scene, poison)


@pytest.mark.long
def test_forbidden_exchange(scene: Stage, management: Management, broker_user: str) -> None:
    """The relay's user may write to one exchange and configure nothing."""
    may(management, broker_user, write="^outbox$")
    suffer(scene, forbidden, amqp=broker_user)


@pytest.mark.long
@pytest.mark.servers
def test_oversized(own: Stage, pair: servers.Servers) -> None:
    """A broker that takes less than we emit."""
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, max_message_size, 50000).")
    suffer(own, oversized)
    pair.rabbitmq.ctl("eval", "application:set_env(rabbit, max_message_size, 134217728).")
