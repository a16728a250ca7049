"""What the worker needs on the broker, as data: exchanges, queues, bindings; and the ways to write that down."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outbox.listener import DEAD_SUFFIX, Listener


@dataclass(frozen=True, slots=True)
class Exchange:
    name: str
    kind: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Queue:
    name: str
    arguments: dict[str, Any]
    purpose: str


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Topology:
    """In the order in which they are to be made. Everything is durable."""

    exchanges: list[Exchange]
    queues: list[Queue]
    bindings: list[Binding]

    @property
    def rights(self) -> dict[str, str]:
        """What a worker needs that declares nothing: regular expressions for RabbitMQ's permissions."""
        written = [re.escape(one.name) for one in self.exchanges[1:]]
        read = [re.escape(one.queue) for one in self.bindings if one.exchange == self.exchanges[0].name]
        return {"configure": "^$", "write": _one_of(written), "read": _one_of(read)}


def _one_of(names: Sequence[str]) -> str:
    return f"^({'|'.join(dict.fromkeys(names))})$" if names else "^$"


def delay_name(exchange: str, seconds: float) -> str:
    """Arguments of a queue never change, so its name holds them."""
    milliseconds = round(seconds * 1000)
    text = f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"
    return f"{exchange}.delay_{text}"


def dead_letter_exchange(exchange: str) -> str:
    return f"{exchange}.dlx"


def topology(
    exchange: str,
    listeners: Sequence[Listener],
    retry_delays: Sequence[float],
    *,
    queue_type: str = "quorum",
    delivery_limit: int = 20,
) -> Topology:
    """Derived from the listeners, and from nothing else."""
    dlx = dead_letter_exchange(exchange)
    # A quorum queue hands over at least once if it may refuse instead of dropping; without that pair it drops silently.
    careful = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    safe = {"x-queue-type": queue_type} | (careful if queue_type == "quorum" else {})
    found = Topology(
        [Exchange(exchange, "topic", "where messages arrive"), Exchange(dlx, "direct", "where dead letters go")], [], []
    )
    used = {
        one
        for listener in listeners
        for one in (retry_delays if listener.retry_delays is None else listener.retry_delays)
    }
    for seconds in sorted(used):
        name = delay_name(exchange, seconds)
        # Back to the listener's queue by its name, which is the routing key of what waits here.
        back = {"x-message-ttl": round(seconds * 1000), "x-dead-letter-exchange": ""}
        found.exchanges.append(Exchange(name, "fanout", f"retries after {seconds:g} s"))
        found.queues.append(Queue(name, safe | back, f"retries that wait {seconds:g} s"))
        found.bindings.append(Binding(name, name, ""))
    limit = {"x-delivery-limit": delivery_limit} if queue_type == "quorum" else {}
    for listener in listeners:
        dead = listener.queue + DEAD_SUFFIX
        last = {"x-dead-letter-exchange": dlx, "x-dead-letter-routing-key": listener.queue}
        found.queues.append(Queue(dead, {"x-queue-type": queue_type}, "dead letters"))
        found.bindings.append(Binding(dlx, dead, listener.queue))
        found.queues.append(Queue(listener.queue, safe | last | limit, f"messages for {listener.binding_key}"))
        found.bindings.append(Binding(exchange, listener.queue, listener.binding_key))
    return found


# --- ways to write it down


def as_table(given: Topology) -> str:
    rows = [("exchange", one.name, one.kind, one.purpose) for one in given.exchanges]
    rows += [("queue", one.name, _arguments(one.arguments), one.purpose) for one in given.queues]
    rows += [("binding", one.queue, one.routing_key or "(all)", f"from {one.exchange}") for one in given.bindings]
    rows += [("right", name, "", text) for name, text in given.rights.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    )


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('x-')} {value}" for name, value in arguments.items() if value != "")


def as_definitions(given: Topology, vhost: str) -> str:
    """What `rabbitmqctl import_definitions` and the management API take."""
    made = {"vhost": vhost, "durable": True, "auto_delete": False}
    found = {
        "exchanges": [
            {"name": one.name, **made, "type": one.kind, "internal": False, "arguments": {}} for one in given.exchanges
        ],
        "queues": [{"name": one.name, **made, "arguments": one.arguments} for one in given.queues],
        "bindings": [
            {
                "source": one.exchange,
                "vhost": vhost,
                "destination": one.queue,
                "destination_type": "queue",
                "routing_key": one.routing_key,
                "arguments": {},
            }
            for one in given.bindings
        ],
    }
    return json.dumps(found, indent=2)


def as_terraform(given: Topology, vhost: str) -> str:
    """For the provider cyrilgdn/rabbitmq. Arguments as JSON, which keeps numbers numbers."""
    where = f"  vhost = {_text(vhost)}"
    parts = []
    for exchange in given.exchanges:
        settings = f"  settings {{\n    type    = {_text(exchange.kind)}\n    durable = true\n  }}"
        parts.append(
            _resource("rabbitmq_exchange", exchange.name, f"  name  = {_text(exchange.name)}", where, settings)
        )
    for queue in given.queues:
        lines = ",\n".join(f"      {json.dumps(name)} = {_text(value)}" for name, value in queue.arguments.items())
        settings = (
            f"  settings {{\n    durable        = true\n    arguments_json = jsonencode({{\n{lines}\n    }})\n  }}"
        )
        parts.append(_resource("rabbitmq_queue", queue.name, f"  name  = {_text(queue.name)}", where, settings))
    for binding in given.bindings:
        lines = (
            f"  source           = rabbitmq_exchange.{_label(binding.exchange)}.name\n"
            f"  destination      = rabbitmq_queue.{_label(binding.queue)}.name\n"
            '  destination_type = "queue"\n'
            f"  routing_key      = {_text(binding.routing_key)}"
        )
        parts.append(_resource("rabbitmq_binding", f"{binding.exchange} to {binding.queue}", where, lines))
    return "\n\n".join(parts)


def _resource(kind: str, name: str, *lines: str) -> str:
    return "\n".join([f'resource "{kind}" "{_label(name)}" {{', *lines, "}"])


def _label(name: str) -> str:
    label = re.sub(r"\W", "_", name, flags=re.ASCII)
    return label if label[0].isalpha() or label[0] == "_" else f"_{label}"


def _text(value: Any) -> str:
    # ${ and %{ begin a template there.
    return json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")
