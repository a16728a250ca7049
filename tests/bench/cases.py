"""Every case by its name, in the order of the table."""

from __future__ import annotations

from bench import cases_emit_python, cases_latency, cases_processes, cases_relay, cases_sql, cases_worker
from bench.measure import Case

CASES: dict[str, Case] = {
    **cases_sql.CASES,
    **cases_emit_python.CASES,
    **cases_relay.CASES,
    **cases_processes.CASES,
    **cases_latency.CASES,
    **cases_worker.CASES,
}


def selected(name: str, only: str) -> bool:
    """Whether a list of names, or of their beginnings, means this case; a whole name means that case alone."""
    return any(name == word or (word not in CASES and name.startswith(word)) for word in only.split(","))
