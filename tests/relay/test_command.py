"""The command line: which address wins, and what it says when something is not as it must be."""

from __future__ import annotations

import pytest

import databases
from harness import Management, Queue, RunOutbox
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError
from outbox.options import load

NOWHERE = "postgresql://127.0.0.1:1/none"
NO_BROKER = "amqp://127.0.0.1:1/"


def test_help_names_every_flag(outbox: RunOutbox) -> None:
    assert "relay" in outbox("--help").output
    text = outbox("relay", "--help").output
    for flag in ("--dsn", "--amqp-url", "--once", "--declare", "--lease", "OUTBOX_DSN", "exit status"):
        assert flag in text


def test_version_is_that_of_the_package(outbox: RunOutbox, dsn: str) -> None:
    assert outbox("--version").output.split() == ["outbox", databases.query(dsn, "select outbox.version()")]


def test_addresses_from_the_environment(outbox: RunOutbox, dsn: str, amqp_url: str, queue: Queue) -> None:
    databases.query(dsn, "select outbox.emit('order.created', '{}')")
    assert outbox("relay", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url).status == 0
    assert len(queue.receive(1)) == 1


def test_flag_wins_over_environment() -> None:
    environment = {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_BATCH_SIZE": "7"}
    assert load(RelaySettings, {}, environment).batch_size == 7
    assert load(RelaySettings, {"batch_size": 8}, environment).batch_size == 8


def test_settings_do_not_show_secrets() -> None:
    shown = repr(RelaySettings(dsn="postgresql://me:hidden@db/x", amqp_url="amqp://me:hidden@mq/"))
    assert "hidden" not in shown


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OUTBOX_AMQP_URL": NO_BROKER}, "no database given: pass --dsn or set OUTBOX_DSN"),
        ({"OUTBOX_DSN": NOWHERE}, "no broker given: pass --amqp-url or set OUTBOX_AMQP_URL"),
        ({"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": "http://x/"}, "must start with amqp://"),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_LEASE": "soon"},
            "OUTBOX_LEASE must be a number",
        ),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_ONCE": "maybe"},
            "OUTBOX_ONCE must be on or off",
        ),
        ({"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_POLL": "0"}, "--poll must be greater than 0"),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_LEASE": "30"},
            "--lease must be longer than 41.25 s",
        ),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_HEARTBEAT": "31"},
            "--confirm-timeout must not be shorter than --heartbeat",
        ),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_SEND_TIMEOUT": "31"},
            "--send-timeout must not be longer than --confirm-timeout",
        ),
        (
            {"OUTBOX_DSN": NOWHERE, "OUTBOX_AMQP_URL": NO_BROKER, "OUTBOX_WINDOW": "499"},
            "--batch-size must not be larger than --window",
        ),
        ({"OUTBOX_DSN_FILE": "/nowhere", "OUTBOX_AMQP_URL": NO_BROKER}, "OUTBOX_DSN_FILE names '/nowhere'"),
    ],
)
def test_bad_settings(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load(RelaySettings, {}, environment)


def test_unreadable_dsn(outbox: RunOutbox, amqp_url: str) -> None:
    for broken in (
        outbox("relay", "--dsn", "this is no dsn", OUTBOX_AMQP_URL=amqp_url),
        outbox("relay", OUTBOX_DSN="password=half a canary", OUTBOX_AMQP_URL=amqp_url),
    ):
        assert broken.status == 2
        (error,) = broken.errors
        assert error.startswith("outbox: --dsn cannot be read: write it as postgresql://user@host/name")
        assert "canary" not in broken.log


def test_package_not_installed(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    bare = databases.named(dsn, "postgres")
    done = outbox("relay", OUTBOX_DSN=bare, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    (error,) = done.errors
    assert error == (
        "outbox: database 'postgres' does not have the package outbox:"
        " run `create extension outbox` there, or `psql -f outbox-install.sql`"
    )


def test_missing_exchange(outbox: RunOutbox, dsn: str, amqp_url: str) -> None:
    done = outbox("relay", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    (error,) = done.errors
    assert error == (
        "outbox: the broker has no exchange 'outbox': create it, start with --declare to have it made,"
        " or name another with outbox.configure('default_exchange', ...)"
    )


def test_declare_makes_the_exchange(outbox: RunOutbox, dsn: str, amqp_url: str, management: Management) -> None:
    assert outbox("relay", "--declare", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url).status == 0
    exchange = management("GET", "/exchanges/{vhost}/outbox")
    assert (exchange["type"], exchange["durable"]) == ("topic", True)


def test_declare_leaves_another_kind_alone(outbox: RunOutbox, dsn: str, amqp_url: str, management: Management) -> None:
    management("PUT", "/exchanges/{vhost}/outbox", {"type": "fanout", "durable": True})
    assert outbox("relay", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url).status == 0
    done = outbox("relay", "--declare", "--once", OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert "exchange 'outbox' cannot be used" in done.errors[-1]


def test_role_without_rights(outbox: RunOutbox, dsn: str, roles: databases.Roles, amqp_url: str, queue: Queue) -> None:
    role = roles.make()
    done = outbox("relay", "--once", OUTBOX_DSN=databases.as_user(dsn, role), OUTBOX_AMQP_URL=amqp_url)
    assert done.status == 2
    assert f"role '{role}' may not do this: permission denied" in done.errors[-1]
    assert f"select outbox.grant_relay('{role}')" in done.errors[-1]
    assert queue.take() == []


@pytest.mark.parametrize("away", ["OUTBOX_DSN", "OUTBOX_AMQP_URL"])
def test_once_with_a_server_away(outbox: RunOutbox, dsn: str, amqp_url: str, away: str) -> None:
    at = {"OUTBOX_DSN": dsn, "OUTBOX_AMQP_URL": amqp_url} | {away: NOWHERE if away == "OUTBOX_DSN" else NO_BROKER}
    done = outbox("relay", "--once", **at)
    assert done.status == 1
    assert len(done.errors) == 1
    assert "Connection refused" in done.errors[0] or "Connect call failed" in done.errors[0]
