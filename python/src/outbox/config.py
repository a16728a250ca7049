"""The knobs of one relay process. What two relays must agree on lives in the database, in outbox.setting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from outbox.errors import ConfigurationError

# The database gets this share of a lease to answer one call, and so many seconds at most; the rest is kept twice.
STATEMENT_SHARE, STATEMENT_MOST = 8, 15.0


def knob(default: Any, text: str, unit: str = "") -> Any:
    return field(default=default, metadata={"help": text, "unit": unit})


def secret(text: str) -> Any:
    return field(default="", repr=False, metadata={"help": text, "unit": "URL", "secret": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    dsn: str = secret("database that has the package, postgresql://user@host/name")
    amqp_url: str = secret("broker and vhost, amqp://user@host/vhost; several, with commas between, are tried in turn")
    declare: bool = knob(default=False, text="create the default exchange if it is missing: topic, durable")
    once: bool = knob(default=False, text="send what is ready now, then exit")
    batch_size: int = knob(500, "messages claimed at a time", "N")
    max_bytes: int = knob(8 * 1024 * 1024, "bytes of bodies claimed at a time", "N")
    window: int = knob(1000, "messages claimed and not yet marked, at most: so many can come twice after a crash", "N")
    lease: float = knob(120.0, "how long a claimed batch is ours", "SECONDS")
    confirm_timeout: float = knob(30.0, "after so long without a confirm, stop sending and wait", "SECONDS")
    send_timeout: float = knob(10.0, "the same when the socket does not take the data", "SECONDS")
    heartbeat: int = knob(15, "AMQP heartbeat; the connection is dropped after three without a sign", "SECONDS")
    poll: float = knob(1.0, "longest sleep without looking for messages", "SECONDS")
    shutdown: float = knob(30.0, "how long a stop may take to finish what is in flight", "SECONDS")

    def __post_init__(self) -> None:
        for name in ("dsn", "amqp_url"):
            if not getattr(self, name):
                what = "database" if name == "dsn" else "broker"
                raise ConfigurationError(f"no {what} given: pass {flag(name)} or set {variable(name)}")
        if not all(url.startswith(("amqp://", "amqps://")) for url in self.brokers):
            raise ConfigurationError(f"{flag('amqp_url')} must start with amqp:// or amqps://")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigurationError(f"{flag(item.name)} must be greater than 0")
        needed = self.confirm_timeout + 3 * self.statement_timeout
        if needed >= self.lease:
            raise ConfigurationError(
                f"{flag('lease')} must be longer than {needed:g} s, which is {flag('confirm_timeout')} and the time"
                " to settle: a batch whose lease has run out is sent again by another relay"
            )
        if self.confirm_timeout < self.heartbeat:
            raise ConfigurationError(
                f"{flag('confirm_timeout')} must not be shorter than {flag('heartbeat')}:"
                " a broker that is only slow would pass for a dead one"
            )
        if self.send_timeout > self.confirm_timeout:
            raise ConfigurationError(
                f"{flag('send_timeout')} must not be longer than {flag('confirm_timeout')}:"
                " what was not sent cannot be confirmed"
            )
        if self.batch_size > self.window:
            raise ConfigurationError(f"{flag('batch_size')} must not be larger than {flag('window')}: it would not fit")

    @property
    def brokers(self) -> list[str]:
        return [url.strip() for url in self.amqp_url.split(",")]

    @property
    def statement_timeout(self) -> float:
        return min(self.lease / STATEMENT_SHARE, STATEMENT_MOST)

    @classmethod
    def load(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> RelaySettings:
        """What was given on the command line wins over the environment, which wins over a secret's file."""
        types = get_type_hints(cls)
        values: dict[str, Any] = {}
        for item in fields(cls):
            if given.get(item.name) is not None:
                values[item.name] = given[item.name]
            elif (text := from_environment(item, environment)) is not None:
                values[item.name] = parse(variable(item.name), text, types[item.name])
        return cls(**values)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "OUTBOX_" + name.upper()


def default_of(item: Field[Any]) -> Any:
    return None if item.default is MISSING else item.default


def from_environment(item: Field[Any], environment: Mapping[str, str]) -> str | None:
    name = variable(item.name)
    if environment.get(name):
        return environment[name]
    path = environment.get(name + "_FILE") if item.metadata.get("secret") else None
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"{name}_FILE names {path!r}, which cannot be read: {error.strerror}") from error


def parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() in {"on", "true", "yes", "1"}:
            return True
        if text.lower() in {"off", "false", "no", "0"}:
            return False
        raise ConfigurationError(f"{name} must be on or off")
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} must be a number") from error
