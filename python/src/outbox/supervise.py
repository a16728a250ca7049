"""The command `outbox relay`: runs the loop until a signal ends it, and watches that it turns."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from outbox.config import RelaySettings
from outbox.options import add_options, load
from outbox.relay import MessageRelay

HELP = """\
Claims messages from the database, publishes them to RabbitMQ and marks those sent that
the broker confirmed. Run as many as you like: they share the work. SIGTERM and SIGINT end it
after what is in flight; a second signal ends it at once.

exit status:
  0  stopped by a signal, or nothing left to send (--once)
  1  a server was unavailable (--once)
  2  something only you can put right: the message says what
  3  a bug in the relay: the log says where

Each flag can be given in the environment: --batch-size as OUTBOX_BATCH_SIZE. The two addresses
can also be read from a file, named by --dsn-file and OUTBOX_DSN_FILE, --amqp-url-file and
OUTBOX_AMQP_URL_FILE; that is where passwords go. libpq's own variables (PGHOST, PGSERVICE,
PGPASSFILE ...) are honoured. A flag wins over the environment, the environment over a file.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "relay",
        help="forward messages from PostgreSQL to RabbitMQ",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-v", "--verbose", action="store_true", help="log more")
    command.add_argument("--log-format", choices=["text", "json"], default="text", help="for people or for machines")
    add_options(command, RelaySettings)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return asyncio.run(relay(load(RelaySettings, vars(options))))


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
