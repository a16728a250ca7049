"""The assertions for users of pgTAP: what passes, what fails, and what a failure shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import databases

SCRIPT = databases.ROOT / "sql" / "testing" / "pgtap.sql"


@pytest.fixture(scope="module")
def tested() -> Iterator[str]:
    with databases.database(databases.SERVER) as dsn:
        databases.install(dsn, "plain")
        databases.query(dsn, "create schema tap; create extension pgtap schema tap")
        databases.psql(dsn, "-f", SCRIPT)
        yield dsn


def tap(dsn: str, *statements: str) -> list[str]:
    script = "\n".join(["set search_path = tap; begin; select * from no_plan();", *statements, "rollback;"])
    return databases.psql(dsn, text=script).stdout.splitlines()


EMIT = """
select outbox.emit('order.created', '{"order": 1, "item": {"name": "teapot", "price": 3}}', key => 'customer 7',
    headers => '{"tenant": "north"}', delay => '1 hour') as id \\gset
select outbox.emit_bytes('order.created', '\\x00ff') as id \\gset
"""


@pytest.mark.parametrize(
    "assertion",
    [
        "emitted('order.created')",
        """emitted('order.created', '{"item": {"name": "teapot"}}')""",
        """emitted('order.created', headers => '{"tenant": "north"}', key => 'customer 7', description => 'mine')""",
        "emitted_count('order.created', 2)",
        """emitted_count('order.created', 1, '{"order": 1}')""",
        "emitted_count('order.paid', 0)",
    ],
)
def test_passes(tested: str, assertion: str) -> None:
    assert tap(tested, EMIT, f"select outbox_test.{assertion};")[0].startswith("ok 1 - ")


@pytest.mark.parametrize(
    "assertion",
    [
        "emitted('order.paid')",
        """emitted('order.created', '{"order": 2}')""",
        """emitted('order.created', headers => '{"tenant": "south"}')""",
        "emitted('order.created', key => 'customer 8')",
        "emitted_count('order.created', 1)",
        "nothing_emitted()",
    ],
)
def test_fails_and_shows_what_was_emitted(tested: str, assertion: str) -> None:
    first, *rest = tap(tested, EMIT, f"select outbox_test.{assertion};")
    assert first.startswith("not ok 1 - ")
    shown = "\n".join(rest)
    assert 'order.created, key customer 7, {"item": {"name": "teapot", "price": 3}, "order": 1}' in shown
    assert "order.created, 00ff" in shown
    assert all(line.startswith("#") for line in rest)


def test_nothing(tested: str) -> None:
    assert tap(tested, "select outbox_test.nothing_emitted();") == ["ok 1 - nothing is emitted"]
    assert tap(tested, "select outbox_test.emitted('a');")[-1].strip("# ") == "nothing"


def test_it_is_no_part_of_the_package() -> None:
    assert not any("outbox_test" in path.read_text() for path in databases.BUILD.glob("outbox*"))
