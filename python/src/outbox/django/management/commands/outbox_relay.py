from __future__ import annotations

import os
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections
from psycopg.conninfo import make_conninfo

from outbox.config import RelaySettings
from outbox.errors import OutboxError
from outbox.options import add_options, load, variable
from outbox.supervise import ProcessSettings, start


class Command(BaseCommand):
    help = "Forwards messages from this project's database to RabbitMQ until it is stopped."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", default="default", help="the database in settings.DATABASES [default]")
        add_options(parser, RelaySettings)
        add_options(parser, ProcessSettings, "http", "liveness_file", "hooks", "log_format")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            addressed = {variable("dsn"): dsn_of(options["database"])}
            settings = load(RelaySettings, options, os.environ | addressed)
            process = load(ProcessSettings, options | {"verbose": options["verbosity"] > 1, "workers": 1})
            start(settings, process)
        except OutboxError as error:
            raise CommandError(str(error)) from error


def dsn_of(alias: str) -> str:
    """How Django connects, for the relay's own connection: as the same user, unless --dsn names another."""
    settings = connections[alias].settings_dict
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    return make_conninfo(**{name: str(settings[key]) for name, key in names.items() if settings.get(key)})
