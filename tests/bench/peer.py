"""faststream-outbox: its environment, its table and its process."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import databases
from bench.place import body

HERE = Path(__file__).resolve().parent
VENV = databases.BUILD / "bench-peer"
PACKAGES = ("faststream-outbox[asyncpg]==0.19.0", "faststream[rabbit]==0.7.8", "uvloop==0.23.0")

# peer_settings.py compares them with others. From 32 workers on its own core is full.
DRAIN = {
    "max_workers": 32,
    "fetch_batch_size": 500,
    "terminal_flush_batch_size": 200,
    "min_fetch_interval": 0.01,
    "max_fetch_interval": 1.0,
}
# By transactions a second; the best of 1 to 32 workers. To delete one by one is quicker, until it cannot keep up.
LATENCY = {
    10: DRAIN | {"max_workers": 16, "terminal_flush_batch_size": 1},
    100: DRAIN | {"max_workers": 16, "terminal_flush_batch_size": 1},
    1000: DRAIN | {"max_workers": 4, "fetch_batch_size": 100, "terminal_flush_batch_size": 100},
}
SETTINGS = (
    f"{PACKAGES[0]} with {PACKAGES[1]} and {PACKAGES[2]}, in a process of its own: "
    "max_workers=32, fetch_batch_size=500, terminal_flush_batch_size=200 for drains; "
    "4, 100 and 100 for latency at 1,000/s, 16, 500 and 1 below; "
    "LISTEN, its own autovacuum settings, no logging, no validation of arguments; "
    "persistent, mandatory, confirmed, returns raise"
)
INSERT = "insert into outbox (queue, payload, headers) "
NOTIFY = " returning id, pg_notify('outbox_outbox', queue)"
HEADERS = "jsonb_build_object('content-type', 'application/json', 'correlation_id', gen_random_uuid())"


@functools.cache
def python() -> str:
    """The interpreter of an environment that has it, made at first use; the project itself does not depend on it."""
    stamp = VENV / "stamp"
    if not stamp.exists() or stamp.read_text() != repr(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install"]
        subprocess.run([*pip, *PACKAGES], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stamp.write_text(repr(PACKAGES))
    return str(VENV / "bin/python")


def command(dsn: str, amqp_url: str, settings: dict[str, float]) -> list[str]:
    return [python(), str(HERE / "faststream_relay.py"), dsn, amqp_url, json.dumps(settings)]


def create(dsn: str) -> None:
    subprocess.run([python(), str(HERE / "faststream_relay.py"), dsn, "", "create"], check=True)


def fill(dsn: str, count: int) -> None:
    """Rows as its publish() writes them."""
    databases.query(dsn, "truncate outbox")
    databases.query(
        dsn,
        f"{INSERT} select 'bench', convert_to('{body(256)}', 'UTF8'), {HEADERS} from generate_series(1, {count})",
    )
    databases.query(dsn, "vacuum analyze outbox")
