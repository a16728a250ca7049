"""Benchmarks: ratios of things measured alternately in one run, on private servers that really sync to disk.

    make bench                        everything
    make bench ONLY=emit,claim        the cases whose names begin so
    make bench QUICK=1                smaller sizes: minutes instead of a quarter of an hour, and more noise

Every case names what it is measured against and the ratio to reach. The table goes to the terminal, all numbers to
results/latest.json. Absolute rates belong to the machine they were measured on; ratios travel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import databases  # noqa: E402 - the folder of the test tools is on the path only now
import servers  # noqa: E402
from bench import cases_emit_python, cases_relay, cases_sql, cases_worker  # noqa: E402
from bench.measure import Bench, Row, progress  # noqa: E402


def report(rows: list[Row]) -> None:
    print(f"\n{'case':<34} {'against':<34} {'ratio':>6}  {'spread':<13} {'reach':>5}  rates per second")
    for row in rows:
        verdict = "" if row.reach is None else f"{row.reach:.2f}" + ("" if row.ratio >= row.reach else " !")
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in row.rates.items())
        spread = f"{row.low:.2f}-{row.high:.2f}"
        print(f"{row.case:<34} {row.against:<34} {row.ratio:>6.2f}  {spread:<13} {verdict:>5}  {rates}")
    short = [row for row in rows if row.reach is not None and row.ratio < row.reach]
    print(f"\n{len(rows) - len(short)} of {len(rows)} ratios reach what they should" + (", see !" if short else ""))


def save(rows: list[Row], bench: Bench) -> None:
    path = HERE / "results/latest.json"
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    measured = {row.case for row in rows}
    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "postgres": databases.query(bench.server, "show server_version").strip(),
        "quick": bench.quick,
    }
    stamp = time.strftime("%Y-%m-%d", time.gmtime())
    fresh = [asdict(row) | facts | {"date": stamp} for row in rows]
    kept = [row for row in before if row["case"] not in measured]
    path.write_text(json.dumps({"rows": kept + fresh}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks of outbox against what one would use instead.")
    parser.add_argument("--parent", type=int, help="stop as soon as this process ends")
    parser.add_argument("--only", default="", help="beginnings of the names of cases, separated by commas")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    given = parser.parse_args()
    cases = cases_sql.CASES | cases_emit_python.CASES | cases_relay.CASES | cases_worker.CASES
    wanted = tuple(given.only.split(",")) if given.only else ("",)
    chosen = {name: case for name, case in cases.items() if name.startswith(wanted)}
    if not chosen:
        print(f"bench: no case begins with {given.only}; there are {', '.join(cases)}", file=sys.stderr)
        return 2
    subprocess.run([sys.executable, HERE.parents[1] / "sql/packaging/build.py"], check=True, stdout=subprocess.DEVNULL)
    rows: list[Row] = []
    with servers.private(name="bench", parent=given.parent, durable=True) as private:
        os.environ |= private.environment()
        private.install_extension(HERE.parents[1] / "build")
        bench = Bench(private.dsn, private.amqp_url, private.management_url, given.quick)
        for name, case in chosen.items():
            begun = time.monotonic()
            rows += case(bench)
            progress("")
            print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        save(rows, bench)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
