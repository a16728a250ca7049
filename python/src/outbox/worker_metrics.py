"""Counts for Prometheus, under the names that dashboards of such workers know. Without prometheus_client: nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

from outbox.handle import Dead, Done, Outcome

try:
    import prometheus_client
except ImportError:  # the extra [metrics] brings it
    prometheus_client = None  # type: ignore[assignment]

KINDS = {
    "outbox_messages_received_total": ("Counter", "Messages received", "queue", "exchange_name"),
    "outbox_messages_processed_total": ("Counter", "Messages by outcome", "queue", "exchange_name", "status"),
    "outbox_retry_attempts_total": ("Counter", "Retries by delay", "queue", "delay_seconds"),
    "outbox_message_processing_duration_seconds": ("Histogram", "Time a listener took", "queue", "exchange_name"),
    "outbox_dlq_messages": ("Gauge", "Messages among the dead letters", "queue"),
    "outbox_active_consumers": ("Gauge", "Consumers of this process", "queue", "exchange_name"),
}


@cache
def registered(name: str) -> Any:
    """In the global registry, where a name can stand once in a process."""
    kind, text, *labels = KINDS[name]
    return getattr(prometheus_client, kind)(name, text, labels)


class Metrics:
    def __init__(self, exchange: str, *, enabled: bool) -> None:
        self._exchange = exchange
        self._enabled = enabled and prometheus_client is not None
        self._series: dict[tuple[str, ...], Any] = {}

    def _one(self, name: str, *labels: str) -> Any:
        """One time series, looked up once."""
        key = (name, *labels)
        if key not in self._series:
            self._series[key] = registered(name).labels(*labels)
        return self._series[key]

    def received(self, queue: str) -> None:
        if self._enabled:
            self._one("outbox_messages_received_total", queue, self._exchange).inc()

    def processed(self, queue: str, outcome: Outcome) -> None:
        if self._enabled:
            rejected = isinstance(outcome, Dead)
            status = "success" if isinstance(outcome, Done) else "rejected" if rejected else "failed"
            self._one("outbox_messages_processed_total", queue, self._exchange, status).inc()

    def handled(self, queue: str, seconds: float) -> None:
        if self._enabled:
            self._one("outbox_message_processing_duration_seconds", queue, self._exchange).observe(seconds)

    def retried(self, queue: str, delay: float) -> None:
        if self._enabled:
            self._one("outbox_retry_attempts_total", queue, f"{delay:g}").inc()

    def dead(self, queue: str, count: int) -> None:
        if self._enabled:
            self._one("outbox_dlq_messages", queue).set(count)

    def consumers(self, queue: str, count: int) -> None:
        if self._enabled:
            self._one("outbox_active_consumers", queue, self._exchange).set(count)
