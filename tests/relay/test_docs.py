"""The files of docs/ for an operator: the unit, and the alert rules on the real /metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import guardian
import pytest

import databases
from harness import PATIENCE, Db, Page, Proxy, Queue, StartRelay, emit, eventually, leased, waiting
from outbox import cli

DOCS = databases.ROOT / "docs"
RULES = DOCS / "alerts.yml"


def test_unit(tmp_path: Path) -> None:
    """With the command where it is here; systemd itself looks at the rest."""
    command = Path(sys.executable).parent / "outbox"
    unit = (DOCS / "outbox-relay.service").read_text()
    (line,) = re.findall(r"^ExecStart=/opt/outbox/bin/outbox (.*)$", unit, re.MULTILINE)
    cli.parser().parse_args(line.split())
    place = tmp_path / "outbox-relay.service"
    place.write_text(unit.replace("/opt/outbox/bin/outbox", str(command)))
    done = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True, check=False)
    about = [text for text in (done.stdout + done.stderr).splitlines() if "outbox-relay" in text]
    assert about == []
    place.write_text(
        unit.replace("Restart=always", "Restart=sometimes").replace("/opt/outbox/bin/outbox", str(command))
    )
    done = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True, check=False)
    assert "outbox-relay" in done.stdout + done.stderr  # it does look


def test_rules_can_be_read() -> None:
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rules found" in done.stdout


class Prometheus:
    """A real one, which scrapes a relay every 200 ms and evaluates the rules as they stand, but for what they wait."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = f"127.0.0.1:{guardian.free_port()}"
        rules = folder / "alerts.yml"
        rules.write_text(re.sub(r"^ +for: .*\n", "", RULES.read_text(), flags=re.MULTILINE))
        (folder / "prometheus.yml").write_text(
            f"global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}\nrule_files: ['{rules}']\n"
            f"scrape_configs: [{{job_name: outbox, static_configs: [{{targets: ['{address}']}}]}}]\n"
        )
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={self.address}"], stdout=log, stderr=log,
            )  # fmt: skip

    def firing(self) -> dict[str, str | None]:
        """The names of the alerts, each with its database."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{self.address}/api/v1/alerts", timeout=PATIENCE) as answer:
                found = json.loads(answer.read())["data"]["alerts"]
        except OSError:
            return {}
        return {one["labels"]["alertname"]: one["labels"].get("database") for one in found if one["state"] == "firing"}


@contextmanager
def watching(address: str, folder: Path) -> Iterator[Prometheus]:
    prometheus = Prometheus(address, folder)
    try:
        yield prometheus
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(PATIENCE)


@pytest.mark.timeout(180)
def test_alerts_on_a_real_relay(  # noqa: PLR0917 - fixtures
    db: Db, start_relay: StartRelay, page: Page, proxy: Proxy, management: Callable[..., Any], tmp_path: Path
) -> None:
    assert shutil.which("prometheus")
    queue = Queue(management, binding="good")
    name = db.info.dbname

    def comes(alert: str, database: str | None = name) -> None:
        eventually(
            lambda: prometheus.firing().get(alert, "none") == database, f"{alert}; there is {prometheus.firing()}"
        )

    def goes(alert: str) -> None:
        eventually(lambda: alert not in prometheus.firing(), f"the end of {alert}")

    with watching(page.address, tmp_path) as prometheus:
        comes("OutboxNoRelay", None)
        relay = start_relay("--http", page.address, amqp=proxy.url)
        emit(db, "good")
        queue.receive(1)
        goes("OutboxNoRelay")
        time.sleep(1)
        assert prometheus.firing() == {}

        # A message that died.
        db.execute("select outbox.configure('max_attempts', '1')")
        emit(db, "bad")
        eventually(lambda: not waiting(db), "a dead letter")
        # A lease taken from a relay that waits for confirms.
        proxy.held.set()
        emit(db, "good")
        eventually(lambda: leased(db), "a claim")
        db.execute("update outbox.lane set token = gen_random_uuid(), version = version + 1 where token is not null")
        proxy.held.clear()
        relay.await_log("lease lost")
        freed = "token = null, relay = null, leased_until = null, handed = '{}', version = version + 1"
        db.execute(f"update outbox.lane set {freed}")
        # Messages that nobody fetches.
        db.execute("select outbox.pause()")
        emit(db, "good")
        db.execute("update outbox.message set created_at = created_at - interval '301 seconds'")
        for alert in ("OutboxDeadLetters", "OutboxLeaseLost", "OutboxLag"):
            comes(alert)
        db.execute("select outbox.purge_dead('0')")
        db.execute("select outbox.resume()")
        goes("OutboxDeadLetters")
        goes("OutboxLag")

        # Alive, and of no use.
        proxy.deaf.set()
        proxy.cut()
        comes("OutboxNoRelay")
        proxy.deaf.clear()
        proxy.cut()
        goes("OutboxNoRelay")
        relay.stop(signal.SIGKILL)
        comes("OutboxNoRelay", None)
