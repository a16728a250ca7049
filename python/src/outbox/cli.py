"""The command `outbox`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_type_hints

from outbox import __version__
from outbox.config import RelaySettings, default_of, flag, variable
from outbox.errors import ConfigurationError, OutboxError
from outbox.relay import MessageRelay

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

RELAY_HELP = """\
Claims messages from the database, publishes them to RabbitMQ and marks those sent that
the broker confirmed. Run as many as you like: they share the work. SIGTERM and SIGINT end it
after what is in flight; a second signal ends it at once.

exit status:
  0  stopped by a signal, or nothing left to send (--once)
  1  a server was unavailable (--once)
  2  something only you can put right: the message says what
  3  a bug in the relay: the log says where

Each flag can be given in the environment: --batch-size as OUTBOX_BATCH_SIZE. The two addresses
can also be read from a file named by OUTBOX_DSN_FILE and OUTBOX_AMQP_URL_FILE.
A flag wins over the environment, the environment over a file.
"""


class FieldsFormatter(logging.Formatter):
    """The constant message first, then its fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in STANDARD_FIELDS}
        pairs = (f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in extra.items())
        return " ".join([super().format(record), *pairs])


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    set_up_logging(verbose=options.pop("verbose"))
    try:
        return asyncio.run(relay(RelaySettings.load(options)))
    except OutboxError as error:
        sys.stderr.write(f"outbox: {error}\n")
        return 2 if isinstance(error, ConfigurationError) else 1
    except Exception as error:  # crash early: whoever supervises this starts it again, and the leases run out
        logging.getLogger(__name__).exception("internal error", extra={"action": "crash"})
        sys.stderr.write(f"outbox: internal error, please report it: {type(error).__name__}: {error}\n")
        return 3


async def relay(settings: RelaySettings) -> int:
    message_relay = MessageRelay(**asdict(settings))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        for again in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(again, os._exit, 128 + number)
        message_relay.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    threading.Thread(target=watch, args=(loop, 2 * settings.lease), daemon=True).start()
    progress = asyncio.create_task(show_progress(message_relay)) if sys.stderr.isatty() else None
    try:
        await message_relay.run()
    finally:
        if progress is not None:
            progress.cancel()
    return 0


def watch(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Ends the process when its loop has not turned for so long: a relay that hangs looks as if it had nothing to do.

    Counts what it has waited itself, so that a process which was stopped and continued is not taken for one.
    """
    silent = 0
    turned = threading.Event()
    with contextlib.suppress(RuntimeError):  # the loop is closed
        while silent < seconds:
            turned.clear()
            loop.call_soon_threadsafe(turned.set)
            silent = 0 if turned.wait(1) else silent + 1
            if turned.is_set():
                time.sleep(1)
        faulthandler.dump_traceback()
        sys.stderr.write(f"outbox: internal error, please report it: nothing has moved for {seconds:g} s\n")
        sys.stderr.flush()
        os._exit(3)


async def show_progress(message_relay: MessageRelay) -> None:
    """One line that is rewritten every second."""
    before = message_relay.sent
    while True:
        await asyncio.sleep(1)
        rate, before = message_relay.sent - before, message_relay.sent
        counts = f"{message_relay.in_flight:,} in flight, {before:,} sent, {message_relay.failed:,} failed"
        sys.stderr.write(f"\r\033[K{rate:,} a second, {counts}\r")
        sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="outbox", description="Events you write in a transaction reach RabbitMQ, or the transaction rolled back."
    )
    main_parser.add_argument("--version", action="version", version=f"outbox {__version__}")
    commands = main_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "relay",
        help="forward messages from PostgreSQL to RabbitMQ",
        description=RELAY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log more")
    types = get_type_hints(RelaySettings)
    for item in fields(RelaySettings):
        text, default = item.metadata["help"], default_of(item)
        choices: dict[str, Any] = {"default": None, "help": text}
        if types[item.name] is bool:
            choices["action"] = argparse.BooleanOptionalAction
        else:
            choices |= {"type": types[item.name], "metavar": item.metadata["unit"]}
            choices["help"] = f"{text} [{default or variable(item.name)}]"
        command.add_argument(flag(item.name), **choices)
    return main_parser


def set_up_logging(*, verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(FieldsFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    # At DEBUG these write whole messages into the log, and what they warn of we report ourselves.
    for name in ("aio_pika", "aiormq"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
