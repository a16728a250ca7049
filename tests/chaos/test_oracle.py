"""The oracle can say no: each kind of misdeed is seen, alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chaos.oracle import Attempt, Evidence, Message, judge
from chaos.stage import Stage


def message(number: int, key: str = "a") -> Message:
    return Message(f"{key}-{number}", key, number)


def evidence() -> Evidence:
    """Three messages of one key and one of another, all well; and a transaction that was rolled back."""
    return Evidence(
        attempts=[
            Attempt("t1", (message(1), message(2)), "committed"),
            Attempt("t2", (message(3), message(1, "b")), "unknown"),
            Attempt("t3", (message(4),), "rolled back"),
            Attempt("t4", (message(5),), "unknown"),
        ],
        ledger={"t1", "t2"},
        received=[message(1), message(1, "b"), message(2), message(3)],
    )


def test_nothing_to_complain_about() -> None:
    verdict = judge(evidence(), 0)
    assert verdict.problems == []
    assert (verdict.committed, verdict.received, verdict.duplicates, verdict.dead) == (4, 4, 0, 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"received": [message(1), message(1, "b"), message(2)]}, "lost 1: a-3"),
        ({"received": [*evidence().received, message(4)]}, "phantoms 1: a-4"),
        ({"received": [*evidence().received, message(9)]}, "phantoms 1: a-9"),
        ({"received": [*evidence().received, message(5)]}, "phantoms 1: a-5"),
        ({"received": [message(2), message(1), message(1, "b"), message(3)]}, "out of order 1: a 1 after 2"),
        ({"received": [*evidence().received, message(1)]}, "1 duplicates, 0 are excused: a-1 x2"),
        ({"received": [*evidence().received[:3], replace(message(3), number=7)]}, "changed 1: Message("),
        ({"ledger": {"t2"}, "received": [message(3), message(1, "b")]}, "commits that the database forgot 1: t1"),
        ({"ledger": {"t1", "t2", "t3"}, "dead": {"a-4"}, "poison": {"a-4"}}, "rollbacks that the database committed"),
        ({"dead": {"a-4"}, "poison": {"a-4"}}, "phantoms among the dead 1: a-4"),
        ({"dead": {"a-3"}, "received": evidence().received[:3]}, "dead without a reason of ours 1: a-3"),
        ({"poison": {"a-3"}}, "poison that arrived 1: a-3"),
    ],
)
def test_every_misdeed_is_seen(change: dict[str, object], problem: str) -> None:
    (found,) = judge(replace(evidence(), **change), 0).problems  # type: ignore[arg-type]
    assert found.startswith(problem)


def test_excused_duplicates() -> None:
    twice = replace(evidence(), received=[*evidence().received, message(1), message(2)])
    assert judge(twice, 2).problems == []
    assert judge(twice, 1).problems == ["2 duplicates, 1 are excused: a-1 x2, a-2 x2"]


def test_dead_with_a_reason() -> None:
    dead = replace(evidence(), received=evidence().received[:3], dead={"a-3"}, poison={"a-3"})
    assert judge(dead, 0).problems == []


def test_sabotage_is_seen(scene: Stage) -> None:
    """The whole chain, on a relay that does its work: a row taken from under it, and a message nobody emitted."""
    scene.emit(total=500, seconds=0.1)
    scene.await_emitted()
    [(gone,)] = scene.execute(
        "delete from outbox.message where id = (select max(id) from outbox.message) returning message_id"
    )
    [(key,)] = scene.execute("select key from outbox.message order by id limit 1")
    forged = {"key": key, "number": 10_000}
    properties = {"message_id": "forged", "delivery_mode": 2}
    scene.manage(
        "POST",
        "exchanges/{vhost}/outbox/publish",
        {"routing_key": "chaos", "payload": json.dumps(forged), "payload_encoding": "string", "properties": properties},
    )
    scene.relay()
    with pytest.raises(AssertionError) as found:
        scene.finish()
    assert f"lost 1: {gone}" in str(found.value)
    assert "phantoms 1: forged" in str(found.value)
    assert "out of order" in str(found.value)
