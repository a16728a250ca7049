"""A relay that has sent a million messages is no bigger than one that has sent two hundred thousand."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from chaos.stage import WINDOW, Relay, Stage

TOTAL = int(os.environ.get("OUTBOX_CHAOS_MESSAGES", "1000000"))
CHUNK = 5000
WARM = 0.2
GROWTH = 4 * 1024 * 1024


def resident(relay: Relay) -> int:
    with open(f"/proc/{relay.process.pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - no file of a disk
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(samples: list[tuple[int, int]]) -> float:
    """Bytes per message, by least squares."""
    count = len(samples)
    x = sum(sent for sent, _ in samples) / count
    y = sum(size for _, size in samples) / count
    return sum((a - x) * (b - y) for a, b in samples) / sum((a - x) ** 2 for a, _ in samples)


def emit_all(dsn: str) -> None:
    """Never more than a few chunks ahead of the relay."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for _ in range(TOTAL // CHUNK):
            while db.execute("select true from outbox.message offset %s limit 1", [4 * CHUNK]).fetchone():
                time.sleep(0.05)
            db.execute(
                """
                with made as (
                    select outbox.emit('chaos', to_jsonb(repeat('x', 256)), key => 'key-' || n %% 100)
                    from generate_series(1, %(chunk)s) as n
                )
                insert into public.ledger select gen_random_uuid(), count(*) from made
                """,
                {"chunk": CHUNK},
            )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_is_flat(dsn: str, amqp_url: str, management: Any, tmp_path: Path) -> None:
    with Stage(dsn, amqp_url, management.url, tmp_path) as scene:
        watch(scene)


def watch(scene: Stage) -> None:
    scene.manage("DELETE", "queues/{vhost}/inbox")
    scene.manage("PUT", "queues/{vhost}/inbox", {"durable": True, "arguments": {"x-max-length": WINDOW}})
    scene.manage("POST", "bindings/{vhost}/e/outbox/q/inbox", {"routing_key": "chaos"})
    emitter = threading.Thread(target=emit_all, args=(scene.dsn,))
    emitter.start()
    relay = scene.relay(batch_size=500, window=1000, lease=60, confirm_timeout=10)
    samples: list[tuple[int, int]] = []
    noted = 0
    while not samples or samples[-1][0] < TOTAL:
        time.sleep(0.5)
        assert relay.process.poll() is None
        samples.append((scene.left()[2], resident(relay)))
        if samples[-1][0] - noted >= TOTAL // 10:
            noted = samples[-1][0]
            scene.note(f"{noted} sent, {samples[-1][1] / 1e6:.1f} MB")
    emitter.join()
    scene.stop(relay)
    grown = slope([sample for sample in samples if sample[0] > WARM * TOTAL]) * TOTAL * (1 - WARM)
    scene.note(f"grown by {grown / 1e6:.2f} MB")
    assert abs(grown) < GROWTH, samples[:: len(samples) // 20]
