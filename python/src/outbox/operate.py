"""The commands of an operator: emit to try things, look, pause, and deal with dead letters."""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from outbox.config import RelaySettings
from outbox.emit import emit as emit_message
from outbox.errors import ConfigurationError, OutboxError
from outbox.options import add_options, read_dsn
from outbox.session import connection_settings, translate

STATS = "select * from outbox.stats()"
PAUSE = "select outbox.pause()"
RESUME = "select outbox.resume()"
CLEANUP = "select * from outbox.cleanup()"
DEAD_LIST = """
    select id, dead_at, reason, attempts, routing_key, key, error
    from outbox.dead_letter
    where reason = coalesce(%(reason)s, reason)
      and routing_key = coalesce(%(routing_key)s, routing_key)
    order by dead_at desc, id desc
    limit %(limit)s
"""
DEAD_IDS = """
    select id
    from outbox.dead_letter
    where reason = coalesce(%(reason)s, reason)
      and routing_key = coalesce(%(routing_key)s, routing_key)
    order by id
"""
DEAD_SHOW = """
    select id, message_id, dead_at, reason, error, attempts, exchange, routing_key, key, content_type, headers,
           properties, created_at, expires_at, emitted_by, parked, body
    from outbox.dead_letter
    where id = %(id)s
"""
REQUEUE_DEAD = "select outbox.requeue_dead(%(ids)s::bigint[]) as count"
PURGE_DEAD = "select outbox.purge_dead(%(older_than)s::interval) as count"

REASONS = ("max_attempts", "unroutable", "rejected", "expired", "killed_relay")
AT_A_TIME = 1000

HELP = """
exit status:
  0  done
  1  the database is unavailable; there is no such message
  2  something only you can put right: the message says what
  3  a bug: the log says where
"""

Db = psycopg.Connection[dict[str, Any]]
Run = Callable[[Db, argparse.Namespace], int]


class NothingThereError(OutboxError):
    """What was asked for does not exist."""


def add_commands(commands: Any) -> None:
    command = add(commands, "emit", emit, "emit", "emit one message, to try things")
    command.add_argument("routing_key", metavar="ROUTING_KEY")
    command.add_argument(
        "body", metavar="BODY", nargs="?", default="{}", help="JSON; - reads it from standard input [{}]"
    )
    command.add_argument("--text", action="store_true", help="the body is text, not JSON")
    for name, text in (("key", "messages with one key leave in order"), ("exchange", "another than the default"),
                       ("dedup-key", "a second emit with it returns the first one's id")):  # fmt: skip
        command.add_argument(f"--{name}", metavar="NAME", help=text)
    command.add_argument("--header", metavar="NAME=VALUE", action="append", default=[], help="can be repeated")
    command.add_argument("--delay", metavar="SECONDS", type=float, help="not before so long from now")
    command.add_argument("--expires-in", metavar="SECONDS", type=float, help="not sent after that")

    command = add(commands, "stats", stats, "monitor", "numbers: what waits, is in flight, fails or is dead")
    add_format(command)
    command.add_argument("--watch", metavar="SECONDS", nargs="?", type=float, const=2.0, help="again and again [2]")

    dead = commands.add_parser("dead", help="messages that could not be sent: look, send again, remove")
    kinds = dead.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = add(kinds, "list", dead_list, "admin", "list the last dead letters")
    add_format(command)
    add_choice(command)
    command.add_argument("--limit", metavar="N", type=int, default=50, help="at most so many [50]")
    command = add(kinds, "show", dead_show, "admin", "show one dead letter, whole")
    add_format(command)
    command.add_argument("id", metavar="ID", type=int)
    command = add(kinds, "requeue", dead_requeue, "admin", "send dead letters again")
    command.add_argument("ids", metavar="ID", type=int, nargs="*")
    command.add_argument("--all", action="store_true", help="all, or all with the given reason or routing key")
    add_choice(command)
    add_caution(command)
    command = add(kinds, "purge", dead_purge, "admin", "remove dead letters for good")
    command.add_argument("--older-than", metavar="INTERVAL", required=True, help="'30 days'; '0' means all")
    add_caution(command)

    command = add(
        commands, "cleanup", cleanup, "admin", "remove what is past its retention now; relays do it every minute"
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    add(commands, "pause", pause, "admin", "no relay claims anything; emits go on and wait")
    add(commands, "resume", resume, "admin", "end the pause")


def add(commands: Any, name: str, function: Run, part: str, text: str) -> argparse.ArgumentParser:
    """A command on one database; part names the right it takes."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_options(command, RelaySettings, "dsn")

    def run(options: argparse.Namespace) -> int:
        try:
            with connected(read_dsn(vars(options)), part) as db:
                return function(db, options)
        except NothingThereError as error:
            sys.stderr.write(f"outbox: {error}\n")
            return 1

    command.set_defaults(run=run)
    return command


def add_format(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=["table", "json"], default="table", help="for people or for programs")


def add_choice(command: argparse.ArgumentParser) -> None:
    command.add_argument("--reason", choices=REASONS, help="only those that died of it")
    command.add_argument("--routing-key", metavar="NAME", help="only those with it")


def add_caution(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dry-run", action="store_true", help="only say how many it would be")
    command.add_argument("--yes", action="store_true", help="do not ask")


@contextmanager
def connected(dsn: str, part: str) -> Iterator[Db]:
    try:
        db = psycopg.Connection[dict[str, Any]].connect(
            dsn, autocommit=True, row_factory=dict_row, **connection_settings(dsn)
        )
    except psycopg.Error as error:
        raise translate(error, None) from None
    with db:
        try:
            yield db
        except psycopg.DataError as error:
            raise ConfigurationError(error.diag.message_primary or "a value cannot be read") from None
        except psycopg.Error as error:
            raise translate(error, db, part) from None


# --- commands


def emit(db: Db, options: argparse.Namespace) -> int:
    text = sys.stdin.read() if options.body == "-" else options.body
    try:
        body: Any = text.encode() if options.text else json.loads(text)
    except ValueError:
        raise ConfigurationError("BODY is not JSON: write it in quotes, '{\"order\": 1}', or pass --text") from None
    if not all("=" in pair for pair in options.header):
        raise ConfigurationError("--header is written as name=value")
    headers = dict(pair.split("=", 1) for pair in options.header)
    made = emit_message(
        db,
        options.routing_key,
        body,
        key=options.key,
        headers=headers or None,
        exchange=options.exchange,
        eta=None if options.delay is None else timedelta(seconds=options.delay),
        expiration=None if options.expires_in is None else timedelta(seconds=options.expires_in),
        dedup_key=options.dedup_key,
        content_type="text/plain" if options.text else None,
    )
    sys.stdout.write(f"message {made} waits for a relay\n" if sys.stdout.isatty() else f"{made}\n")
    return 0


def stats(db: Db, options: argparse.Namespace) -> int:
    while True:
        found = one(db, STATS)
        if options.format == "json":
            write_json(found)
        else:
            if options.watch and sys.stdout.isatty():
                sys.stdout.write("\033[H\033[2J")
            failing = found.pop("top_failing") or []
            write_pairs(found)
            for row in failing:
                write_pairs({f"failing {row['routing_key']}": f"{row['retrying']} retrying, {row['dead']} dead"})
        if options.watch is None:
            return 0
        sys.stdout.flush()
        time.sleep(options.watch)


def dead_list(db: Db, options: argparse.Namespace) -> int:
    chosen = {"reason": options.reason, "routing_key": options.routing_key, "limit": options.limit}
    rows = db.execute(DEAD_LIST, chosen).fetchall()
    if options.format == "json":
        for row in rows:
            write_json(row)
    elif rows:
        write_table(rows)
    elif sys.stdout.isatty():
        sys.stdout.write("no dead letters\n")
    return 0


def dead_show(db: Db, options: argparse.Namespace) -> int:
    found = db.execute(DEAD_SHOW, {"id": options.id}).fetchone()
    if found is None:
        raise NothingThereError(f"there is no dead letter {options.id}: `outbox dead list` shows those there are")
    body = bytes(found.pop("body"))
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = None
    if options.format == "json":
        write_json(found | ({"body": text} if text is not None else {"body_base64": base64.b64encode(body).decode()}))
        return 0
    write_pairs({name: value for name, value in found.items() if value is not None})
    sys.stdout.write(f"\n{base64.b64encode(body).decode() if text is None else printable(text)}\n")
    return 0


def dead_requeue(db: Db, options: argparse.Namespace) -> int:
    chosen = {"reason": options.reason, "routing_key": options.routing_key}
    if bool(options.ids) == options.all or (options.ids and any(chosen.values())):
        raise ConfigurationError("name the dead letters by their ids, or pass --all, with --reason or --routing-key")
    ids = options.ids or [row["id"] for row in db.execute(DEAD_IDS, chosen)]
    if options.dry_run or options.all:
        count = tried(db, REQUEUE_DEAD, ids=ids)["count"]
        if options.dry_run:
            return said(f"would send {count} dead letters again")
        if not allowed(options, f"Send {count} dead letters of database {db.info.dbname} again?"):
            return said("nothing was done")
    done = 0
    for start in range(0, len(ids), AT_A_TIME):
        done += one(db, REQUEUE_DEAD, ids=ids[start : start + AT_A_TIME])["count"]
    if options.ids and done < len(set(ids)):
        said(f"sent {done} dead letters again")
        raise NothingThereError(
            f"{len(set(ids)) - done} of those ids are no dead letters: `outbox dead list` shows them"
        )
    return said(f"sent {done} dead letters again")


def dead_purge(db: Db, options: argparse.Namespace) -> int:
    count = tried(db, PURGE_DEAD, older_than=options.older_than)["count"]
    if options.dry_run:
        return said(f"would remove {count} dead letters")
    if not allowed(options, f"Remove {count} dead letters of database {db.info.dbname} for good?"):
        return said("nothing was done")
    return said(f"removed {one(db, PURGE_DEAD, older_than=options.older_than)['count']} dead letters")


def cleanup(db: Db, options: argparse.Namespace) -> int:
    if options.dry_run:
        total = tried(db, CLEANUP)
        more = " and more" if total.pop("more") else ""
        return said(f"would remove {listed(total)}{more}")
    total = one(db, CLEANUP)
    while total.pop("more"):
        again = one(db, CLEANUP)
        total = {name: count + total.get(name, 0) for name, count in again.items()}
    return said(f"removed {listed(total)}")


def pause(db: Db, _: argparse.Namespace) -> int:
    one(db, PAUSE)
    return said(f"database {db.info.dbname} is paused: emits wait until `outbox resume`")


def resume(db: Db, _: argparse.Namespace) -> int:
    one(db, RESUME)
    return said(f"relays of database {db.info.dbname} go on")


# --- the database


def one(db: Db, statement: LiteralString, **arguments: Any) -> dict[str, Any]:
    row = db.execute(statement, arguments).fetchone()
    assert row is not None
    return row


def tried(db: Db, statement: LiteralString, **arguments: Any) -> dict[str, Any]:
    """Does it and takes it back: what is foretold is what would happen."""
    with db.transaction(force_rollback=True):
        return one(db, statement, **arguments)


# --- the person, or the program that reads us


def allowed(options: argparse.Namespace, question: str) -> bool:
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody is there to ask: pass --yes to do it, or --dry-run to see what it would do")
    sys.stdout.write(f"{question} [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def said(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return 0


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def write_json(row: Mapping[str, Any]) -> None:
    def plain(value: Any) -> Any:
        return value.total_seconds() if isinstance(value, timedelta) else str(value)

    sys.stdout.write(json.dumps(row, default=plain, ensure_ascii=False) + "\n")


def write_pairs(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        shown = name.replace("_", " ")
        sys.stdout.write(
            f"{printable(shown):<20} {cell(value)}\n" if sys.stdout.isatty() else f"{name}\t{cell(value)}\n"
        )


def write_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns for a terminal; a pipe gets tabs and no head."""
    lines = [[cell(value) for value in row.values()] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(line) + "\n" for line in lines)
        return
    lines.insert(0, [name.replace("_", " ") for name in rows[0]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sys.stdout.writelines(padded(line, widths) + "\n" for line in lines)


def padded(line: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip()


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return (
            f"{value.total_seconds():.3f} s"
            if value.total_seconds() < 1
            else str(timedelta(seconds=round(value.total_seconds())))
        )
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, dict | list):
        return printable(json.dumps(value, ensure_ascii=False))
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def printable(text: str) -> str:
    """Without what could command a terminal: others choose routing keys and bodies."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
