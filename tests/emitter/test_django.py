"""The Django app: what its checks say, and the relay as a management command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import databases
from databases import Roles, as_user, query
from emitter.documents import write
from emitter.kinds import Waiting, django_connection, django_place
from outbox import emit

Db = psycopg.Connection[Any]


def findings(dsn: str) -> list[str]:
    django_connection(dsn)
    from outbox.django.apps import check_database  # noqa: PLC0415 - needs Django's settings

    return [f"{found.id} {found.msg}" for found in check_database(databases=["default"])]


def test_checks(empty: str) -> None:
    assert findings(empty) == ["outbox.W001 outbox is not installed in database 'default'"]
    databases.install(empty, "plain")
    assert findings(empty) == []
    query(empty, "create or replace function outbox.version() returns text language sql as $$ select '0.0.7' $$")
    (found,) = findings(empty)
    assert found.startswith("outbox.W002 database 'default' has outbox 0.0.7, and pg-outbox is ")


@pytest.fixture
def role(roles: Roles, dsn: str) -> Iterator[str]:
    name = roles.make()
    yield name
    # The database stays, and so does Django's connection to it.
    django_connection(dsn)
    query(dsn, f"drop owned by {name}")


def test_check_of_the_rights(role: str, dsn: str, cleaner: Db) -> None:
    as_role = as_user(dsn, role)
    refused = [f"outbox.W003 user '{role}' may not emit in database 'default'"]
    assert findings(as_role) == refused
    cleaner.execute(f"grant usage on schema outbox to {role}; grant execute on function outbox.emit_bytes to {role}")
    assert findings(as_role) == refused
    cleaner.execute(f"grant execute on function outbox.emit_many to {role}")
    assert findings(as_role) == []


def test_hint_about_the_rights_helps(role: str, dsn: str, cleaner: Db) -> None:
    """Rights given by hand would go with the next upgrade: it names the function that grants them."""
    as_role = as_user(dsn, role)
    django_connection(as_role)
    from outbox.django.apps import check_database  # noqa: PLC0415 - needs Django's settings

    (found,) = check_database(databases=["default"])
    cleaner.execute("select outbox.grant_emit" + found.hint.partition("outbox.grant_emit")[2])
    assert findings(as_role) == []


def test_relay(tmp_path: Path, dsn: str, db: Db, amqp_url: str, waiting: Waiting) -> None:
    settings = f"DATABASES = {{'default': {django_place(dsn)}}}\nINSTALLED_APPS = ['outbox.django']\n"
    write(tmp_path, {"settings.py": settings})
    clean = {name: text for name, text in os.environ.items() if not name.startswith("OUTBOX")}

    def relay(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "django", "outbox_relay", "--once", *arguments],
            env=clean | environment | {"PYTHONPATH": str(tmp_path), "DJANGO_SETTINGS_MODULE": "settings"},
            capture_output=True,
            text=True,
            check=False,
        )

    emit(db, "nobody.listens", 1)
    nowhere = relay()
    assert nowhere.returncode == 1
    assert "CommandError: no broker given: pass --amqp-url or set OUTBOX_AMQP_URL" in nowhere.stderr
    done = relay("--declare", OUTBOX_AMQP_URL=amqp_url)
    assert done.returncode == 0, done.stderr
    # Sent, and returned, since no queue is bound.
    (message,) = waiting()
    assert message.eta is not None
