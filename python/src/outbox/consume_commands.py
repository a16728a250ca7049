"""The commands of the consumer's side: outbox worker, outbox topology, outbox dlq."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from outbox import logs
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError
from outbox.options import add_options, read_secret, variable

TLS_OPTIONS = ("amqp_ca", "amqp_cert", "amqp_key")
HEARTBEAT = 60
APP_HELP = "where the worker is: package.module:name, looked for in the current folder as well"

WORKER_HELP = """\
Runs a worker until SIGTERM or SIGINT: then it takes no more messages, waits for the listeners that are
running, and ends. A second signal ends it at once.

exit status:
  0  stopped by a signal
  2  something only you can put right: the message says what
  3  a bug: the log says where
"""

TOPOLOGY_HELP = """\
Prints the exchanges, queues and bindings that the listeners of a worker need. The worker declares them itself;
where it may not, import the definitions (rabbitmqctl import_definitions) or apply the Terraform, and run the
worker with declare=False.
"""

DLQ_HELP = """\
QUEUE is the queue of a listener. list prints a line for each dead letter: message_id, time, routing key,
reason, error class. show prints them whole. requeue puts them back into the queue, with all attempts
before them again. purge throws them away. Messages that the relay could not publish are elsewhere:
outbox dead.

exit status:
  0  done
  1  the broker is unavailable
  2  something only you can put right: the message says what
"""


def add_commands(commands: Any) -> None:
    """Each sets run, which is called with the parsed options and returns the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    worker = commands.add_parser(
        "worker", help="call listeners for messages", description=WORKER_HELP, formatter_class=raw
    )
    worker.add_argument("app", metavar="APP", help=APP_HELP)
    worker.set_defaults(run=run_worker)
    topology = commands.add_parser(
        "topology", help="print what a worker needs on the broker", description=TOPOLOGY_HELP, formatter_class=raw
    )
    topology.add_argument("app", metavar="APP", help=APP_HELP)
    topology.add_argument(
        "--format", choices=["table", "definitions", "terraform"], default="table", help="how to print it [table]"
    )
    topology.add_argument("--vhost", help="the vhost to write down [that of OUTBOX_AMQP_URL, else /]")
    topology.set_defaults(run=run_topology)
    dlq = commands.add_parser(
        "dlq",
        help="messages that a listener could not handle: list, show, requeue, purge",
        description=DLQ_HELP,
        formatter_class=raw,
    )
    dlq.add_argument("what", choices=["list", "show", "requeue", "purge"])
    dlq.add_argument("queue", metavar="QUEUE", help="the queue of a listener")
    dlq.add_argument("ids", metavar="MESSAGE_ID", nargs="*", help="only these (show, requeue)")
    dlq.add_argument("--all", action="store_true", help="all of them (requeue, purge)")
    dlq.add_argument("--dry-run", action="store_true", help="only say how many it would be (purge)")
    add_options(dlq, RelaySettings, "amqp_url", *TLS_OPTIONS)
    dlq.set_defaults(run=run_dlq)
    for command in (worker, topology, dlq):
        command.add_argument("-v", "--verbose", action="store_true", help="log more")


def run_worker(options: argparse.Namespace) -> int:
    logs.set_up(verbose=options.verbose)
    asyncio.run(serve(options.app))
    return 0


async def serve(app: str) -> None:
    await load(app).run()  # loaded inside the loop: a worker made by a function may need one


def run_topology(options: argparse.Namespace) -> int:
    logs.set_up(verbose=options.verbose)
    from outbox.topology import as_definitions, as_table, as_terraform  # noqa: PLC0415 - each command loads its own

    found = load(options.app).topology
    vhost = options.vhost or unquote(urlsplit((amqp_url({}) or "").partition(",")[0]).path[1:]) or "/"
    forms = {
        "table": lambda: as_table(found),
        "definitions": lambda: as_definitions(found, vhost),
        "terraform": lambda: as_terraform(found, vhost),
    }
    sys.stdout.write(forms[options.format]() + "\n")
    return 0


def run_dlq(options: argparse.Namespace) -> int:
    logs.set_up(verbose=options.verbose)
    url = amqp_url(vars(options))
    if not url:
        raise ConfigurationError("no broker given: pass --amqp-url or set OUTBOX_AMQP_URL")
    if options.what == "requeue" and bool(options.ids) == options.all:
        raise ConfigurationError("which ones? pass their message_ids, or --all")
    if options.what == "purge" and (options.ids or not (options.all or options.dry_run)):
        raise ConfigurationError("purge throws all dead letters of the queue away: say so with --all")
    if options.what in ("list", "show") and options.all:
        raise ConfigurationError("--all is for requeue and purge")
    if options.what != "purge" and options.dry_run:
        raise ConfigurationError("--dry-run is for purge")
    ca, cert, key = (getattr(options, name) or os.environ.get(variable(name), "") for name in TLS_OPTIONS)
    what = "count" if options.dry_run else options.what
    asyncio.run(attend(url, (ca, cert, key), what, options.queue, set(options.ids)))
    return 0


async def attend(url: str, files: tuple[str, str, str], what: str, queue: str, ids: set[str]) -> None:
    from outbox.courier import Address  # noqa: PLC0415 - each command loads its own
    from outbox.dead_letters import DeadLetters  # noqa: PLC0415 - as above

    async with DeadLetters(Address(url, HEARTBEAT, *files), queue).opened() as letters:
        if what == "count":
            sys.stdout.write(f"would throw {letters.count} away\n")
        elif what == "purge":
            sys.stdout.write(f"{await letters.purge()} thrown away\n")
        elif what == "requeue":
            count = await letters.requeue(lambda letter: not ids or letter.message_id in ids)
            sys.stdout.write(f"{count} put back\n")
        else:
            async for letter in letters.each():
                if not ids or letter.message_id in ids:
                    sys.stdout.write((letter.line if what == "list" else letter.whole) + "\n")


def amqp_url(given: Mapping[str, Any]) -> str | None:
    return read_secret("amqp_url", given, os.environ)


def load(app: str) -> Any:
    """The worker that is there, or that a function there makes."""
    from outbox.worker import Worker  # noqa: PLC0415 - each command loads its own

    module, colon, name = app.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"{app!r} does not name a worker: write it as package.module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(f"there is no module {error.name!r}: run this in the folder that holds it") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{module} has no {name}")
        found = getattr(found, part)
    made = found if isinstance(found, Worker) else found() if callable(found) else None
    if not isinstance(made, Worker):
        raise ConfigurationError(f"{app} is no worker, nor a function that returns one")
    return made
