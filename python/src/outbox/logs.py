"""How the log is written: constant messages, facts as fields, as text for people or as JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

# Set where a process serves several databases: whose line it is.
database: ContextVar[str] = ContextVar("outbox_database")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in STANDARD_FIELDS}


# What stands in every line of this process.
common: dict[str, Any] = {}


def add_common(record: logging.LogRecord) -> bool:
    vars(record).update(common)
    if (name := database.get(None)) and not hasattr(record, "database"):
        record.database = name
    return True


class FieldsFormatter(logging.Formatter):
    """The constant message first, then its fields as name=value."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        pairs = (
            f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in fields_of(record).items()
        )
        return " ".join([super().formatMessage(record), *pairs])


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up(*, verbose: bool = False, log_format: str = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = FieldsFormatter("%(asctime)s %(levelname)-7s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    handler.addFilter(add_common)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    # What they warn of we report ourselves.
    for name in ("aio_pika", "aiormq"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
