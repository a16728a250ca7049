"""Where the settings of a command come from: a flag, the environment, a file; the first that is given wins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yarl import URL

from outbox.errors import ConfigurationError

T = TypeVar("T")

# With one of these set, libpq knows where to go without being told.
LIBPQ = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
AS_LIBPQ_SAYS = "postgresql://"
UNREADABLE = {
    "dsn": "write it as postgresql://user@host/name, or as host=... dbname=...; special characters as %XX",
    "amqp_url": "write it as amqp://user@host:5672/vhost; special characters as %XX",
}


def knob(default: Any, text: str, unit: str = "") -> Any:
    return field(default=default, metadata={"help": text, "unit": unit})


def secret(text: str, *, several: bool = False) -> Any:
    """What can also be read from a file, and is never shown."""
    return field(default="", repr=False, metadata={"help": text, "unit": "URL", "secret": True, "several": several})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "OUTBOX_" + name.upper()


def add_options(command: argparse.ArgumentParser, settings: type, *only: str) -> None:
    """A flag for each field of the dataclass, or for those named."""
    types = get_type_hints(settings)
    for item in fields(settings):
        if only and item.name not in only:
            continue
        text, default = item.metadata["help"], None if item.default is MISSING else item.default
        choices: dict[str, Any] = {"default": None, "help": text}
        if types[item.name] is bool:
            choices["action"] = argparse.BooleanOptionalAction
        else:
            choices |= {"type": types[item.name], "metavar": item.metadata["unit"]}
            choices["help"] = f"{text} [{default or variable(item.name)}]"
        if item.metadata.get("several"):
            choices["action"] = "append"
        command.add_argument(*(["-v"] if item.name == "verbose" else []), flag(item.name), **choices)
        if item.metadata.get("secret"):
            what = f"file to read {flag(item.name)} from [{variable(item.name)}_FILE]"
            command.add_argument(f"{flag(item.name)}-file", metavar="PATH", help=what)


def load(settings: type[T], given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> T:
    types = get_type_hints(settings)
    values: dict[str, Any] = {}
    for item in fields(settings):  # type: ignore[arg-type]  # T is a dataclass
        text = read_secret(item.name, given, environment) if item.metadata.get("secret") else given.get(item.name)
        if text is not None:
            values[item.name] = text
        elif environment.get(variable(item.name)):
            values[item.name] = parse(variable(item.name), environment[variable(item.name)], types[item.name])
    return settings(**values)


def read_secret(name: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    if (text := given.get(name)) is not None:
        for one in [text] if isinstance(text, str) else text:
            refuse_password(name, one)
        return text if isinstance(text, str) else "\n".join(text)
    if path := given.get(f"{name}_file"):
        return read_file(f"{flag(name)}-file", path)
    if text := environment.get(variable(name)):
        return str(text)
    if path := environment.get(f"{variable(name)}_FILE"):
        return read_file(f"{variable(name)}_FILE", path)
    if name == "dsn" and any(environment.get(word) for word in LIBPQ):
        return AS_LIBPQ_SAYS
    return None


def read_file(source: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{source} names {path!r}, which cannot be read: {reason}") from error


def refuse_password(name: str, text: str) -> None:
    """Whoever can list the processes of this machine reads their command lines."""
    try:
        if name == "dsn":
            parts = conninfo_to_dict(text)
            shown = bool(parts.get("password") or parts.get("sslpassword"))
        else:
            shown = any(URL(url.strip()).password for url in text.split(","))
    except (psycopg.Error, ValueError):
        raise ConfigurationError(f"{flag(name)} cannot be read: {UNREADABLE[name]}") from None
    if shown:
        other = ", or into PGPASSWORD, a PGPASSFILE or a PGSERVICE" if name == "dsn" else ""
        raise ConfigurationError(
            f"{flag(name)} has a password in it, which everybody can read in the process list: put it into"
            f" {variable(name)}, or into a file that {variable(name)}_FILE or {flag(name)}-file names{other}"
        )


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


def read_dsn(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str:
    """The one database that a command is about."""
    text = read_secret("dsn", given, environment)
    if not text:
        raise ConfigurationError(f"no database given: pass {flag('dsn')} or set {variable('dsn')}")
    if len(lines := split_lines(text)) != 1:
        raise ConfigurationError(f"{len(lines)} databases given: this is about one, name it with {flag('dsn')}")
    return lines[0]


def split_lines(text: str) -> list[str]:
    """Several addresses stand on lines of their own; empty lines and comments are passed over."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
