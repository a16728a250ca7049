"""docs/benchmarks.md and docs/charts, from results/latest.json: between markers in the page stands what was measured.

.venv/bin/python tests/bench/page.py    writes them anew; a run of the benchmarks does so itself
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from bench import charts  # noqa: E402 - the folder of the test tools is on the path only now
from bench.cases import selected  # noqa: E402
from bench.contenders import described  # noqa: E402

RESULTS = ROOT / "tests/bench/results/latest.json"
PAGE = ROOT / "docs/benchmarks.md"
CHARTS = ROOT / "docs/charts"
SECTION = re.compile(r"(<!-- measured: ([\w,-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Measured = dict[str, Any]


def load() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    return results


def write(results: dict[str, Any]) -> None:
    PAGE.write_text(filled(PAGE.read_text(), results["rows"]))
    for name, text in charts.drawn(results["rows"]).items():
        (CHARTS / name).write_text(text)


def filled(page: str, rows: list[Measured]) -> str:
    return SECTION.sub(lambda found: found[1] + section(chosen(rows, found[2]), found[2]) + found[3], page)


def chosen(rows: list[Measured], only: str) -> list[Measured]:
    return [row for row in rows if selected(row["name"], only)]


def section(rows: list[Measured], only: str) -> str:
    """A table, what its names mean, and how to measure it again."""
    lines = ["| | against | ratio | spread | to reach | measured |", "|---|---|---:|---|---:|---|"]
    lines += [table_row(row) for row in rows]
    if rows:
        places = sorted({place(row) for row in rows})
        lines += ["", f"{'; '.join(places)}. Again: `make bench ONLY={only}`", ""]
        known = {name: described(name) for row in rows for name in names(row)}
        lines += [f"- **{name}**: {text}." for name, text in known.items()]
    return "\n".join(lines) + "\n"


def table_row(row: Measured) -> str:
    reach = "" if row["reach"] is None else f"{row['reach']:g}" + (" (short)" if row["ratio"] < row["reach"] else "")
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return f"| {row['case']} | {row['against']} | {row['ratio']:.2f} | {spread} | {reach} | {values(row)} |"


def values(row: Measured) -> str:
    if is_series(row):  # the first and the last: the chart has them all
        ends = [list(row["rates"].items())[position] for position in (0, -1)]
        return ", ".join(f"{number(rate)} {row['unit']} after {count}" for count, rate in ends)
    return ", ".join(f"{name} {number(rate)}" for name, rate in row["rates"].items()) + f" {row['unit']}"


def place(row: Measured) -> str:
    how = ", quick sizes" if row["quick"] else ""
    return f"{row['machine']}, PostgreSQL {row['postgres']}, RabbitMQ {row['rabbitmq']}, {row['date']}{how}"


def names(row: Measured) -> list[str]:
    """The contenders of a row, ours first."""
    return [row["against"]] if is_series(row) else list(row["rates"])


def is_series(row: Measured) -> bool:
    """One thing measured again and again, and compared with itself."""
    return row["against"] not in row["rates"]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    write(load())
