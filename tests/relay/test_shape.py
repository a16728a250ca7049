"""Rules about the relay's own code."""

from __future__ import annotations

import re
from typing import Any

import psycopg

import databases
from outbox.store import ClaimedMessage

SOURCE = databases.ROOT / "python" / "src" / "outbox"


def test_claimed_message_is_the_type_in_the_database(db: psycopg.Connection[Any]) -> None:
    rows = db.execute(
        "select attname from pg_attribute where attrelid = 'outbox.claimed_message'::regclass and attnum > 0"
        " and not attisdropped order by attnum"
    )
    assert list(ClaimedMessage._fields) == [name for (name,) in rows]


def test_drivers_stay_in_their_rooms() -> None:
    users = {
        driver: {
            path.name
            for path in SOURCE.glob("*.py")
            if re.search(rf"^\s*(import|from) {driver}", path.read_text(), re.MULTILINE)
        }
        for driver in ("psycopg", "aio_pika", "aiormq", "pamqp")
    }
    # Beside them only what reads an address, and commands that talk to the database themselves; never the loop.
    addresses, commands = {"check.py", "options.py", "supervise.py", "tls.py"}, {"database_commands.py", "operate.py"}
    assert users["psycopg"] == {"session.py", "store.py"} | addresses | commands
    relay = {"publish.py", "confirms.py", "frames.py"}
    consumers = {"courier.py", "dead_letters.py", "delivery.py", "source_amqp.py", "worker.py"}
    assert users["aio_pika"] | users["aiormq"] | users["pamqp"] == {"check.py"} | relay | consumers


def test_sql_names_no_table(db: psycopg.Connection[Any]) -> None:
    tables = {
        name for (name,) in db.execute("select relname from pg_class where relnamespace = 'outbox'::regnamespace")
    }
    text = (SOURCE / "store.py").read_text()
    assert {name for name in re.findall(r"outbox\.(\w+)", text) if name in tables} <= {"claimed_message"}
