"""Every example of docs/emitting.md and docs/testing.md runs, as it stands there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pytest

import databases
from emitter.documents import examples, write
from emitter.kinds import Waiting, url
from outbox import tracking

Db = psycopg.Connection[Any]


def load(folder: Path, name: str) -> ModuleType:
    write(folder, {name: examples("emitting.md")[name]})
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", folder / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _orders(cleaner: Db, dsn: str) -> None:
    assert dsn
    cleaner.execute(
        "drop table if exists orders; drop function if exists order_events;"
        "create table orders (id bigserial primary key, item text not null check (item <> ''))"
    )


@pytest.mark.usefixtures("_orders")
def test_psycopg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, waiting: Waiting) -> None:
    monkeypatch.setenv("OUTBOX_DSN", dsn)
    shop = load(tmp_path, "shop.py")
    made = shop.place(1, "teapot")
    with pytest.raises(psycopg.errors.UniqueViolation):
        shop.place(1, "cup")
    (message,) = waiting()
    assert (message.id, message.key, message.payload) == (made, "order 1", {"order": 1, "item": "teapot"})


@pytest.mark.usefixtures("_orders")
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_fastapi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, waiting: Waiting, driver: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", url(dsn, driver))
    api = load(tmp_path, "api.py")
    transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        done = await client.post("/orders", json={"item": "teapot"})
        failed = await client.post("/orders", json={"item": ""})
    await api.engine.dispose()
    assert (done.status_code, failed.status_code) == (201, 500)
    (message,) = waiting()
    assert message.payload == done.json() == {"order": 1, "item": "teapot"}


@pytest.mark.usefixtures("_orders")
def test_trigger(db: Db, waiting: Waiting) -> None:
    db.execute(examples("emitting.md")["order_events.sql"].encode())
    db.execute("insert into orders (item) values ('teapot')")
    db.execute("update orders set item = 'cup'")
    assert [(message.routing_key, message.key, message.payload["item"]) for message in waiting()] == [
        ("order.insert", "order 1", "teapot"),
        ("order.update", "order 1", "cup"),
    ]


def test_arguments(tmp_path: Path, db: Db, waiting: Waiting) -> None:
    load(tmp_path, "arguments.py").examples(db, {"order": 1})
    found = waiting()
    assert len(found) == 8 + 1000
    assert [message.content_type for message in found].count("application/pdf") == 1


def test_tracking(tmp_path: Path, db: Db, waiting: Waiting) -> None:
    with tracking() as outer:
        (first, second) = load(tmp_path, "tracked.py").entry_point(db)
    (message,) = waiting()
    assert outer == (first,)
    assert message.headers == {"x-outbox-tracking-ids": [first, second, str(message.message_id)]}


def run_pytest(folder: Path, dsn: str, *options: str) -> str:
    # As in a project of its own: without the settings of this one.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, *options, folder],
        cwd=folder,
        env=clean | {"OUTBOX_DSN": dsn},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_pytest_plugin(tmp_path: Path, dsn: str, waiting: Waiting) -> None:
    files = examples("testing.md")
    del files["orders_test.sql"]
    write(tmp_path / "orders", files)
    write(tmp_path / "unfinished", {"test_a.py": "def test_a(outbox):\n    outbox.drain()\n"})
    shown = run_pytest(tmp_path, dsn)
    assert "3 passed, 1 error" in shown, shown
    assert "define a fixture outbox_connection that returns the connection or session" in shown
    assert waiting() == []


def test_pytest_plugin_shows_what_is_different(tmp_path: Path, dsn: str) -> None:
    files = examples("testing.md")
    test = files["test_orders.py"].replace('{"item": "teapot"}, key', '{"item": "cup", "n": 1}, key')
    test = test.replace("place_order(outbox_connection, None)", 'place_order(outbox_connection, "pot")')
    write(tmp_path, {"conftest.py": files["conftest.py"], "test_orders.py": test})
    shown = run_pytest(tmp_path, dsn, "--disable-plugin-autoload", "-p", "outbox.pytest_plugin")
    assert "2 failed, 1 passed" in shown, shown
    assert "no message like that emitted: 'order.created', payload {'item': 'cup', 'n': 1}, key 'customer 7'" in shown
    assert re.search(r"\d+: 'order.created', key 'customer 7', \{'item': 'teapot', 'lines': \[\{'n': 1\}\]\}", shown)
    assert "payload.item: expected 'cup', emitted 'teapot'" in shown
    assert "payload.n: expected 1, missing" in shown
    assert "1 emitted, expected none:" in shown
    assert "testing.py" not in shown  # the traceback ends in the user's test


def test_pgtap() -> None:
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, "plain")
        databases.query(dsn, "create extension pgtap")
        databases.psql(dsn, "-f", databases.ROOT / "sql/testing/pgtap.sql")
        shown = databases.psql(dsn, text=examples("testing.md")["orders_test.sql"]).stdout
    assert re.findall(r"^(ok|not ok)", shown, re.MULTILINE) == ["ok"] * 3
