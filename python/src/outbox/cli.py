"""The command `outbox`: finds the subcommand and turns what happened into an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from outbox import __version__, consume_commands, database_commands, logs, operate, supervise
from outbox.errors import OutboxError, UnavailableError

# Each adds its subcommands; a subcommand sets `run`, which takes the options and returns the exit status.
PARTS = (supervise, consume_commands, operate, database_commands)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        logs.set_up()
        status: int = options.run(options)
        sys.stdout.flush()
    except OutboxError as error:
        sys.stderr.write(f"outbox: {error}\n")
        return 1 if isinstance(error, UnavailableError) else 2
    except BrokenPipeError:  # whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # crash early: whoever supervises this starts it again, and the leases run out
        logging.getLogger(__name__).exception("internal error", extra={"action": "crash"})
        sys.stderr.write(f"outbox: internal error, please report it: {type(error).__name__}: {error}\n")
        return 3
    return status


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="outbox", description="Events you write in a transaction reach RabbitMQ, or the transaction rolled back."
    )
    main_parser.add_argument("--version", action="version", version=f"outbox {__version__}")
    commands = main_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for part in PARTS:
        part.add_commands(commands)
    return main_parser
