from __future__ import annotations

import argparse
import asyncio
from dataclasses import fields
from typing import Any, get_type_hints

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from psycopg.conninfo import make_conninfo

from outbox import cli
from outbox.config import RelaySettings, default_of, flag, variable
from outbox.errors import OutboxError


class Command(BaseCommand):
    help = "Forwards messages from this project's database to RabbitMQ until it is stopped."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default="default", help="the database in settings.DATABASES [default]")
        types = get_type_hints(RelaySettings)
        for item in fields(RelaySettings):
            choices: dict[str, Any] = {"default": None, "help": item.metadata["help"]}
            if types[item.name] is bool:
                choices["action"] = argparse.BooleanOptionalAction
            else:
                choices |= {"type": types[item.name], "metavar": item.metadata["unit"]}
                choices["help"] += f" [{default_of(item) or variable(item.name)}]"
            parser.add_argument(flag(item.name), **choices)

    def handle(self, *_: Any, **options: Any) -> None:
        cli.set_up_logging(verbose=options["verbosity"] > 1)
        try:
            settings = RelaySettings.load({"dsn": dsn_of(options["database"])} | given(options))
            asyncio.run(cli.relay(settings))
        except OutboxError as error:
            raise CommandError(str(error)) from error


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def dsn_of(alias: str) -> str:
    """How Django connects, for the relay's own connection: as the same user, unless --dsn names another."""
    settings = connections[alias].settings_dict
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    return make_conninfo(**{name: str(settings[key]) for name, key in names.items() if settings.get(key)})
