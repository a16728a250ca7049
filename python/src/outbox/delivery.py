"""A message from a queue, and what its headers tell of the way it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import time
from typing import Any

from aio_pika import IncomingMessage
from aiormq.abc import DeliveredMessage

from outbox.courier import ATTEMPT_HEADER, EXPIRES_HEADER, ROUTING_KEY_HEADER
from outbox.handle import Dead
from outbox.listener import Listener

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Delivery:
    """A message in our hands, and the channel on which it is to be acknowledged."""

    listener: Listener
    message: DeliveredMessage
    channel: Any
    raw: IncomingMessage | None = None
    came: float = field(default_factory=time)

    def as_aio_pika(self) -> IncomingMessage:
        self.raw = self.raw or IncomingMessage(self.message)
        return self.raw

    @property
    def headers(self) -> dict[str, Any]:
        return self.message.header.properties.headers or {}

    @property
    def routing_key(self) -> str:
        """The one it was published with: a retry comes by the name of its queue."""
        found = self.headers.get(ROUTING_KEY_HEADER)
        return found if isinstance(found, str) else self.message.routing_key or ""

    @property
    def attempt(self) -> int:
        found = self.headers.get(ATTEMPT_HEADER)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def returned(self) -> int:
        """How often it has come back, which only a quorum queue counts."""
        found = self.headers.get("x-delivery-count")
        return found if isinstance(found, int) else 0

    @property
    def expires_at(self) -> float:
        found = self.headers.get(EXPIRES_HEADER)
        return found / 1000 if isinstance(found, int) else NEVER


def autopsy(delivery: Delivery, outcome: Dead) -> dict[str, Any]:
    """The headers of a dead letter."""
    found = {
        ATTEMPT_HEADER: delivery.attempt,
        "x-outbox-queue": delivery.listener.queue,
        "x-outbox-dead-reason": outcome.reason,
        "x-outbox-dead-at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "x-outbox-error-class": outcome.kind,
        "x-outbox-error": outcome.text,
    }
    return {name: value for name, value in found.items() if value != ""}
