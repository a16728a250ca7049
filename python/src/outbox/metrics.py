"""What Prometheus reads: counted while the relay works, and asked of outbox.stats(), which counts no table.

A snapshot is plain data, so that a process can add up those of its workers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.hooks import Failure
from outbox.store import ClaimedMessage

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import CollectorRegistry

    from outbox.relay import MessageRelay

Snapshot = dict[str, Any]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
STATES = ("waiting", "scheduled", "in_flight", "retrying", "parked", "dead")

COUNTERS = {
    "outbox_messages_published_total": "Messages that the broker confirmed.",
    "outbox_publish_failures_total": "Messages that the broker refused or returned, or that could not be sent.",
}
HISTOGRAMS = {
    "outbox_message_age_seconds": "Time from emit until sent.",
    "outbox_poll_duration_seconds": "Time from the claim of a batch until it was settled.",
}
# Of a database, as this process sees it: name, help, field, and how those of several workers make one.
PER_DATABASE = (
    ("outbox_relay_up", "gauge", "Relays of this process that can send now.", "ready", sum),
    ("outbox_database_up", "gauge", "Whether the database answers.", "database", min),
    ("outbox_broker_up", "gauge", "Whether the broker is connected.", "broker", min),
    ("outbox_listening", "gauge", "Whether notifications arrive; otherwise the relay polls.", "listening", min),
    ("outbox_in_flight", "gauge", "Messages that this process has claimed and not settled.", "in_flight", sum),
    ("outbox_last_claim_timestamp_seconds", "gauge", "When a claim last succeeded.", "last_claim", max),
    ("outbox_last_sent_timestamp_seconds", "gauge", "When a message was last sent.", "last_sent", max),
    ("outbox_lease_lost_total", "counter", "Messages whose lease was lost: they are sent again.", "lease_lost", sum),
    ("outbox_relay_restarts_total", "counter", "How often the loop of this database was begun anew.", "restarts", sum),
)  # fmt: skip


class Family(NamedTuple):
    name: str
    kind: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]  # what follows the name, labels, value


class Metrics:
    """A hook that counts."""

    def __init__(self) -> None:
        self._counters: Counter[tuple[str, ...]] = Counter()
        self._buckets: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(BUCKETS) + 2))
        self.clock = 0.0  # how far the database's clock is ahead of ours

    def sent(self, messages: Sequence[ClaimedMessage]) -> None:
        now = time() + self.clock
        for exchange, some in by_exchange(messages):
            self._counters["outbox_messages_published_total", exchange] += len(some)
            cells = self._buckets["outbox_message_age_seconds", exchange]
            for message in some:
                observe(cells, max(now - message.created_at.timestamp(), 0.0))

    def failed(self, failures: Sequence[Failure]) -> None:
        for message, _, reason in failures:
            kind = "returned" if reason == "unroutable" else "unsendable" if reason else "refused"
            self._counters["outbox_publish_failures_total", message.exchange, kind, reason or "refused"] += 1

    def settled(self, messages: Sequence[ClaimedMessage], seconds: float) -> None:
        observe(self._buckets["outbox_poll_duration_seconds", messages[0].exchange], seconds)

    def snapshot(self, databases: Mapping[str, Mapping[str, Any]]) -> Snapshot:
        return {
            "counters": [[*key, value] for key, value in self._counters.items()],
            "buckets": [[*key, cells] for key, cells in self._buckets.items()],
            "databases": {name: [dict(state)] for name, state in databases.items()},
        }


def by_exchange(messages: Sequence[ClaimedMessage]) -> Iterable[tuple[str, Sequence[ClaimedMessage]]]:
    if all(message.exchange == messages[0].exchange for message in messages):
        return [(messages[0].exchange, messages)]
    found: defaultdict[str, list[ClaimedMessage]] = defaultdict(list)
    for message in messages:
        found[message.exchange].append(message)
    return found.items()


def observe(cells: list[float], value: float) -> None:
    """One cell for each bucket, one for what is larger, and the sum."""
    cells[bisect_left(BUCKETS, value)] += 1
    cells[-1] += value


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    counters: Counter[tuple[str, ...]] = Counter()
    buckets: dict[tuple[str, ...], list[float]] = {}
    databases: defaultdict[str, list[Any]] = defaultdict(list)
    for snapshot in snapshots:
        for *key, value in snapshot["counters"]:
            counters[tuple(key)] += value
        for *key, cells in snapshot["buckets"]:
            before = buckets.get(tuple(key), [0.0] * len(cells))
            buckets[tuple(key)] = [a + b for a, b in zip(before, cells, strict=True)]
        for name, states in snapshot["databases"].items():
            databases[name] += states
    return {
        "counters": [[*key, value] for key, value in counters.items()],
        "buckets": [[*key, cells] for key, cells in buckets.items()],
        "databases": dict(databases),
    }


def families(snapshot: Snapshot) -> Iterator[Family]:
    labels = ("exchange_name", "failure_type", "error_type")
    for name, text in COUNTERS.items():
        rows = [row[1:] for row in snapshot["counters"] if row[0] == name]
        yield Family(name, "counter", text, [("", dict(zip(labels, row[:-1], strict=False)), row[-1]) for row in rows])
    for name, text in HISTOGRAMS.items():
        rows = [row[1:] for row in snapshot["buckets"] if row[0] == name]
        yield Family(name, "histogram", text, [sample for row in rows for sample in histogram(*row)])
    databases = snapshot["databases"]
    for name, kind, text, field, combine in PER_DATABASE:
        found = [
            ("", {"database": database}, float(combine(state[field] for state in states)))
            for database, states in databases.items()
        ]
        yield Family(name, kind, text, found)
    stats = {name: state["stats"] for name, states in databases.items() for state in states if state["stats"]}
    yield from from_stats(stats, {name: states[0]["exchange"] for name, states in databases.items()})


def from_stats(stats: Mapping[str, Mapping[str, Any]], exchanges: Mapping[str, str]) -> Iterator[Family]:
    backlog: Counter[str] = Counter()
    for name, found in stats.items():
        backlog[exchanges[name]] += sum(found[state] for state in STATES if state != "dead")
    yield Family(
        "outbox_table_backlog", "gauge", "Messages not sent; beyond 10,000 an estimate.",
        [("", {"exchange_name": exchange}, float(count)) for exchange, count in backlog.items()],
    )  # fmt: skip
    yield Family(
        "outbox_messages", "gauge", "Messages by their state; beyond 10,000 an estimate.",
        [("", {"database": n, "state": state}, float(found[state])) for n, found in stats.items() for state in STATES],
    )  # fmt: skip
    for name, text, field in (
        ("outbox_oldest_message_age_seconds", "How long the oldest message that could leave has waited.", "oldest_age"),
        ("outbox_relays", "Relays whose session the database sees, of all processes.", "relays"),
        (
            "outbox_open_emitter_seconds",
            "How long the oldest transaction with a message in it is open.",
            "open_emitter",
        ),
    ):
        yield Family(name, "gauge", text, [("", {"database": n}, float(found[field])) for n, found in stats.items()])


def histogram(exchange: str, cells: Sequence[float]) -> Iterator[tuple[str, dict[str, str], float]]:
    count = 0.0
    for bound, value in zip((*map(str, BUCKETS), "+Inf"), cells, strict=False):
        count += value
        yield "_bucket", {"exchange_name": exchange, "le": bound}, count
    yield "_sum", {"exchange_name": exchange}, cells[-1]
    yield "_count", {"exchange_name": exchange}, count


def render(snapshot: Snapshot) -> str:
    """In Prometheus' text format."""
    lines: list[str] = []
    for family in families(snapshot):
        lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
        for suffix, labels, value in family.samples:
            pairs = ",".join(f'{name}="{escape(text)}"' for name, text in labels.items())
            lines.append(f"{family.name}{suffix}{{{pairs}}} {value!r}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def register(metrics: Metrics, relays: Mapping[str, MessageRelay], registry: CollectorRegistry | None = None) -> None:
    """For a program that runs relays itself: the same numbers in a registry of prometheus_client, or the global one.

    Those of outbox.stats() are there if the program asks for them, with MessageRelay.stats(), and hands them on.
    """
    import prometheus_client  # noqa: PLC0415 - the extra [metrics]

    class Collector:
        def collect(self) -> Iterator[Metric]:
            states = {name: relay.state | {"restarts": 0, "stats": None} for name, relay in relays.items()}
            for family in families(metrics.snapshot(states)):
                found = prometheus_client.Metric(family.name.removesuffix("_total"), family.text, family.kind)
                for suffix, labels, value in family.samples:
                    found.add_sample(family.name + suffix, labels, value)
                yield found

    (registry or prometheus_client.REGISTRY).register(Collector())
