"""Where settings come from, and that a password on the command line is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

import databases
from harness import Queue, RunOutbox
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError
from outbox.options import load

BROKER = {"OUTBOX_AMQP_URL": "amqp://mq/"}


def test_order_of_the_sources(tmp_path: Path) -> None:
    for name in ("named-by-flag", "named-by-variable"):
        (tmp_path / name).write_text(f"dbname={name}\n")
    sources: list[tuple[dict[str, str], dict[str, str]]] = [
        ({}, {"PGDATABASE": "by-libpq"}),
        ({}, {"OUTBOX_DSN_FILE": str(tmp_path / "named-by-variable")}),
        ({}, {"OUTBOX_DSN": "dbname=by-variable"}),
        ({"dsn_file": str(tmp_path / "named-by-flag")}, {}),
        ({"dsn": "dbname=by-flag"}, {}),
    ]
    given: dict[str, str] = {}
    environment = BROKER
    seen = []
    for more_given, more_environment in sources:
        given, environment = given | more_given, environment | more_environment
        seen.append(load(RelaySettings, given, environment).dsn)
    assert seen == [
        "postgresql://", "dbname=named-by-variable", "dbname=by-variable", "dbname=named-by-flag", "dbname=by-flag",
    ]  # fmt: skip


def test_libpq_variables_are_enough(outbox: RunOutbox, dsn: str, amqp_url: str, queue: Queue, tmp_path: Path) -> None:
    databases.query(dsn, "select outbox.emit('order.created', '{}')")
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    passwords = tmp_path / "passwords"
    passwords.write_text(f"*:*:*:*:{parts['password']}\n")
    passwords.chmod(0o600)
    named = {f"PG{name}": parts[key] for name, key in
             (("HOST", "host"), ("PORT", "port"), ("USER", "user"), ("DATABASE", "dbname"))}  # fmt: skip
    done = outbox("relay", "--once", OUTBOX_AMQP_URL=amqp_url, PGPASSFILE=str(passwords), **named)
    assert done.status == 0, done.log
    assert len(queue.receive(1)) == 1


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:canary@db/shop",
        "postgresql://db/shop?password=canary",
        "host=db password='canary'",
        "host=db sslpassword=canary",
    ],
)
def test_password_in_the_dsn_flag(outbox: RunOutbox, dsn: str) -> None:
    done = outbox("relay", "--dsn", "dbname=first", "--dsn", dsn, **BROKER)
    assert done.status == 2
    (error,) = done.errors
    assert error == (
        "outbox: --dsn has a password in it, which everybody can read in the process list: put it into OUTBOX_DSN,"
        " or into a file that OUTBOX_DSN_FILE or --dsn-file names, or into PGPASSWORD, a PGPASSFILE or a PGSERVICE"
    )


def test_password_in_the_amqp_flag(outbox: RunOutbox) -> None:
    done = outbox("relay", "--amqp-url", "amqp://mq1/,amqp://me:canary@mq2/", OUTBOX_DSN="dbname=x")
    assert done.status == 2
    (error,) = done.errors
    assert "--amqp-url has a password in it" in error
    assert "canary" not in done.log


def test_unreadable_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for path, reason in ((tmp_path / "none", "No such file"), (binary, "it is not UTF-8")):
        with pytest.raises(ConfigurationError, match=f"--dsn-file names .* cannot be read: {reason}"):
            load(RelaySettings, {"dsn_file": str(path)}, BROKER)
