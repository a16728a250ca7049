"""Events you write in a PostgreSQL transaction reach RabbitMQ, or the transaction rolled back."""

from __future__ import annotations

from importlib.metadata import version

from outbox.errors import (
    BrokerUnavailableError,
    ConfigurationError,
    DatabaseUnavailableError,
    ExchangeMissingError,
    NotInstalledError,
    OutboxError,
    UnavailableError,
)
from outbox.relay import MessageRelay

__version__ = version("pg-outbox")

__all__ = [
    "BrokerUnavailableError",
    "ConfigurationError",
    "DatabaseUnavailableError",
    "ExchangeMissingError",
    "MessageRelay",
    "NotInstalledError",
    "OutboxError",
    "UnavailableError",
    "__version__",
]
