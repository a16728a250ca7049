"""Events you write in a PostgreSQL transaction reach RabbitMQ, or the transaction rolled back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.emit import Emitter, emit, emit_many
from outbox.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    ExchangeMissingError,
    NotInstalledError,
    OutboxError,
    RefusedError,
    UnavailableError,
)
from outbox.install import install_sql
from outbox.message import OutboxMessage
from outbox.tracking import get_tracking_ids, tracking

if TYPE_CHECKING:
    from outbox.listener import Listener, Reject, listen
    from outbox.relay import MessageRelay
    from outbox.source_postgres import PostgresSource
    from outbox.worker import Worker

    __version__: str

__all__ = [
    "BrokerUnavailableError",
    "ConfigurationError",
    "DatabaseUnavailableError",
    "Emitter",
    "ExchangeMissingError",
    "Listener",
    "MessageRelay",
    "NotInstalledError",
    "OutboxError",
    "OutboxMessage",
    "PostgresSource",
    "RefusedError",
    "Reject",
    "UnavailableError",
    "Worker",
    "__version__",
    "emit",
    "emit_many",
    "get_tracking_ids",
    "install_sql",
    "listen",
    "tracking",
]


_LATE = {
    "Listener": "outbox.listener",
    "MessageRelay": "outbox.relay",
    "PostgresSource": "outbox.source_postgres",
    "Reject": "outbox.listener",
    "Worker": "outbox.worker",
    "listen": "outbox.listener",
}


def __getattr__(name: str) -> Any:
    """What loads a driver, or takes long to load, is loaded when it is asked for: an emitter needs none of it."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("pg-outbox")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
