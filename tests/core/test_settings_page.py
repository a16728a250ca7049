"""The table of settings in docs/tuning.md is what configure() takes."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

import databases

ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def test_settings_are_those_of_the_page(db: psycopg.Connection[Any]) -> None:
    rows = ROW.findall((databases.ROOT / "docs/tuning.md").read_text().partition("\n## Settings\n")[2])
    with pytest.raises(psycopg.Error) as unknown:
        db.execute("select outbox.configure('unknown', '1')")
    known = re.findall(r"\w+_\w+|retention", str(unknown.value.diag.message_hint))
    assert [name for name, _, _ in rows] == known
    for name, default, taken in rows:
        assert db.execute("select outbox.configure(%s, null)", [name]).fetchone() == (default,)
        for value in re.findall(r"`([^`]+)`", taken):
            assert db.execute("select outbox.configure(%s, %s)", [name, value]).fetchone() == (value,)
