"""Benchmarks: ratios of things measured alternately in one run, on private servers that really sync to disk.

    make bench                        everything, in at most 30 minutes
    make bench ONLY=emit,claim        the cases of these names, or whose names begin so: a long run can be done in parts
    make bench QUICK=1                smaller sizes, at most 5 minutes, and more noise

Every case names what it is measured against and the ratio to reach. The table goes to the terminal, all numbers to
results/latest.json, and from there to docs/benchmarks.md and docs/charts. Nothing else should run meanwhile.
Absolute rates belong to the machine they were measured on; ratios travel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import databases  # noqa: E402 - the folder of the test tools is on the path only now
import servers  # noqa: E402
from bench import page  # noqa: E402
from bench.cases import CASES, selected  # noqa: E402
from bench.contenders import described  # noqa: E402
from bench.measure import PROGRESS, Bench, Case, Row, private_bench  # noqa: E402


def report(rows: list[Row]) -> None:
    print(f"\n{'case':<34} {'against':<26} {'ratio':>6}  {'spread':<13} {'reach':>6}  measured")
    for row in rows:
        verdict = "" if row.reach is None else f"{row.reach:.2f}" + ("" if row.ratio >= row.reach else " !")
        rates = page.values(asdict(row))
        spread = f"{row.low:.2f}-{row.high:.2f}"
        print(f"{row.case:<34} {row.against:<26} {row.ratio:>6.2f}  {spread:<13} {verdict:>6}  {rates}")
    print()
    for name in sorted({name for row in rows for name in page.names(asdict(row))}):
        print(f"{name}: {described(name)}")
    reached = [row.ratio >= row.reach for row in rows if row.reach is not None]
    print(f"\n{sum(reached)} of {len(reached)} ratios reach what they should" + ("" if all(reached) else ", see !"))


def save(name: str, rows: list[Row], seconds: float, bench: Bench, results: dict[str, Any]) -> None:
    """What was measured takes the place of what was there for the same case."""
    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "postgres": databases.query(bench.server, "show server_version").split()[0],
        "rabbitmq": servers.manage(bench.management, "GET", "overview")["rabbitmq_version"],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "quick": bench.quick,
    }
    kept = [row for row in results["rows"] if row["name"] in CASES and row["name"] != name]
    fresh = [{"name": name} | asdict(row) | facts for row in rows]
    order = list(CASES)
    results["rows"] = sorted(kept + fresh, key=lambda row: order.index(row["name"]))
    mode = results.setdefault("seconds", {}).setdefault("quick" if bench.quick else "usual", {})
    mode[name] = round(seconds, 1)
    page.RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def expected(chosen: dict[str, Case], seconds: dict[str, dict[str, float]], *, quick: bool) -> dict[str, float]:
    """How long each case took the last time; one never measured in this size, by the time of the other."""
    same, other = seconds.get("quick" if quick else "usual", {}), seconds.get("usual" if quick else "quick", {})
    factor = 1 / 6 if quick else 6
    return {name: same.get(name) or other.get(name, 60 if factor < 1 else 10) * factor for name in chosen}


def run(chosen: dict[str, Case], bench: Bench) -> list[Row]:
    results = page.load()
    PROGRESS.plan(expected(chosen, results.get("seconds", {}), quick=bench.quick))
    found: list[Row] = []
    for name, case in chosen.items():
        PROGRESS.begin(name)
        rows = list(case(bench))
        seconds = PROGRESS.end()
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
        save(name, rows, seconds, bench, results)
        found += rows
    page.write(page.load())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks of outbox against what one would use instead.")
    parser.add_argument("--parent", type=int, help="stop as soon as this process ends")
    parser.add_argument("--only", default="", help="beginnings of the names of cases, separated by commas")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    given = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if selected(name, given.only)}
    if not chosen:
        print(f"bench: no case begins with {given.only}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    with private_bench(quick=given.quick, parent=given.parent) as bench:
        rows = run(chosen, bench)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
