"""What docs/ shows is what was measured."""

from __future__ import annotations

import re

import databases
from bench import charts, contenders, page
from bench.cases import CASES, selected

ROWS = page.load()["rows"]
TEXT = page.PAGE.read_text()
HINT = "run `.venv/bin/python tests/bench/page.py`"


def test_the_page_shows_the_results() -> None:
    databases.assert_same(TEXT.splitlines(), page.filled(TEXT, ROWS).splitlines(), HINT)


def test_the_charts_show_the_results() -> None:
    drawn = charts.drawn(ROWS)
    assert drawn.keys() == charts.CHARTS.keys(), "not everything was measured"
    assert {path.name for path in page.CHARTS.iterdir()} == drawn.keys()
    for name, text in drawn.items():
        assert (page.CHARTS / name).read_text() == text, f"{name}: {HINT}"


def test_every_case_stands_in_one_section() -> None:
    sections = [found[2] for found in page.SECTION.finditer(TEXT)]
    for name in CASES:
        assert sum(selected(name, section) for section in sections) == 1, name
    assert {row["name"] for row in ROWS} <= CASES.keys()


def test_every_chart_is_shown() -> None:
    assert set(re.findall(r"\]\(charts/([\w.]+)\)", TEXT)) == charts.CHARTS.keys()
    assert "docs/charts/drain.svg" in (databases.ROOT / "README.md").read_text()


def test_every_contender_is_described() -> None:
    used = {name for row in ROWS for name in page.names(row)}
    assert not [name for name in used if not name.startswith(tuple(contenders.CONTENDERS))]


def test_a_changed_result_is_noticed() -> None:
    changed = [row | {"ratio": row["ratio"] + 1} for row in ROWS]
    assert page.filled(TEXT, changed) != TEXT
    faster = [row | {"rates": {name: 2 * rate for name, rate in row["rates"].items()}} for row in ROWS]
    assert all(text != charts.drawn(ROWS)[name] for name, text in charts.drawn(faster).items())
