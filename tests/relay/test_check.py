"""`outbox relay --check` says what is wrong, what to do about it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote, urlsplit

import pytest

import databases
from databases import Roles, as_user
from harness import Db, Finished, Management, Queue, RunOutbox, may
from outbox.check import CALLED

Check = Callable[..., Finished]


@pytest.fixture
def check(outbox: RunOutbox, dsn: str, amqp_url: str) -> Check:
    return lambda **more: outbox("relay", "--check", **{"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url, **more})


def test_all_is_well(check: Check, queue: Queue, db: Db) -> None:
    db.execute("select outbox.emit('order.created', '{}')")
    done = check()
    assert done.status == 0, done.log
    assert [line.split(" ", 1)[0] for line in done.output.splitlines()] == ["ok"] * 7
    assert "notifications arrive" in done.output
    assert "exchange 'outbox' is there, and the user may write to it" in done.output
    assert done.output.endswith("ready to relay\n")
    assert queue.take() == []
    row = db.execute("select count(*) from outbox.relay").fetchone()
    assert row == (0,)


def test_every_function_is_looked_at() -> None:
    assert {"claim_batch", "mark_sent", "mark_failed", "hello", "cleanup", "stats", "dead_among"} <= set(CALLED)


@pytest.mark.usefixtures("queue")
def test_role_without_rights(check: Check, dsn: str, roles: Roles, db: Db) -> None:
    name = roles.make()
    db.execute(f"grant usage on schema outbox to {name}")
    db.execute(f"grant execute on function outbox.version to {name}")
    done = check(OUTBOX_DSN=as_user(dsn, name))
    assert done.status == 2
    line = next(line for line in done.output.splitlines() if line.startswith("FAIL"))
    assert f"role '{name}' may not call arm_wakeup, claim_batch, cleanup" in line
    db.execute(line.partition("`")[2].rstrip("`").encode())
    done = check(OUTBOX_DSN=as_user(dsn, name))
    assert done.status == 0, done.output


def test_broker_user_without_rights(check: Check, broker_user: str, management: Management, queue: Queue) -> None:
    name = urlsplit(broker_user).username
    done = check(OUTBOX_AMQP_URL=broker_user)
    assert done.status in {1, 2}
    may(management, broker_user, read=".*")
    done = check(OUTBOX_AMQP_URL=broker_user)
    assert done.status == 2
    assert f"user '{name}' may not write to exchange 'outbox'" in done.output
    may(management, broker_user, write="^outbox$")
    assert check(OUTBOX_AMQP_URL=broker_user).status == 0
    assert queue.take() == []


def test_missing_exchange(check: Check) -> None:
    done = check(OUTBOX_DECLARE="on")
    assert done.status == 2
    assert "the broker has no exchange 'outbox': create it, start with --declare" in done.output
    assert done.output.endswith("a relay would not work\n")
    assert check().status == 2  # it was not made meanwhile


@pytest.mark.usefixtures("queue")
def test_missing_package(check: Check, dsn: str) -> None:
    done = check(OUTBOX_DSN=databases.named(dsn, "postgres"))
    assert done.status == 2
    assert "database 'postgres' does not have the package outbox" in done.output
    assert "FAIL  a relay would not work" in done.output


@pytest.mark.usefixtures("queue")
def test_servers_away(check: Check) -> None:
    done = check(OUTBOX_DSN="postgresql://127.0.0.1:1/none", OUTBOX_AMQP_URL="amqp://127.0.0.1:1/")
    assert done.status == 1
    assert done.output.count("FAIL") == 3


@pytest.mark.usefixtures("queue")
def test_behind_a_pooler(check: Check, pooled: str) -> None:
    done = check(OUTBOX_DSN=pooled)
    assert done.status == 0, done.output
    assert "notifications do not arrive" in done.output
    assert "messages leave within --poll 1 s" in done.output


@pytest.mark.usefixtures("queue")
def test_what_can_be_read_on_the_way(check: Check, dsn: str) -> None:
    at = urlsplit(dsn)
    named = (
        f"host=db.test hostaddr=127.0.0.1 port={at.port} user={at.username} password={quote(at.password or '')}"
        f" dbname={at.path[1:]} sslmode=disable"
    )
    done = check(OUTBOX_DSN=named)
    assert done.status == 0
    assert "its certificate is not verified; sslmode=verify-full does that" in done.output
