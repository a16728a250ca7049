"""The command `outbox relay`: a loop for each database, several processes if asked for, until a signal ends them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from outbox import logs, loop
from outbox.check import check
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError, OutboxError
from outbox.health import Look, keep_file, serving
from outbox.metrics import Metrics, Snapshot, merge
from outbox.options import add_options, flag, knob, load, split_lines
from outbox.processes import PAUSE_FIRST, PAUSE_LAST, WORKER, Worker, report_to
from outbox.relay import MessageRelay

logger = logging.getLogger(__name__)

STATS_EVERY, STATS_ON_TERMINAL, STATS_SHARE = 5.0, 1.0, 50
OPEN_LONG = 60.0

HELP = """\
Claims messages from the database, publishes them to RabbitMQ and marks those sent that
the broker confirmed. Run as many as you like: they share the work. SIGTERM and SIGINT end it
after what is in flight; a second signal ends it at once.

exit status:
  0  stopped by a signal, or nothing left to send (--once)
  1  a server was unavailable (--once, --check), or the broker's queues were full (--once)
  2  something only you can put right: the message says what
  3  a bug in the relay: the log says where

Each flag can be given in the environment: --batch-size as OUTBOX_BATCH_SIZE. The two addresses
can also be read from a file, named by --dsn-file and OUTBOX_DSN_FILE, --amqp-url-file and
OUTBOX_AMQP_URL_FILE; that is where passwords go. libpq's own variables (PGHOST, PGSERVICE,
PGPASSFILE ...) are honoured. A flag wins over the environment, the environment over a file.

Several databases: give --dsn more than once, or one on each line of the file or the variable.
Each has a loop of its own, and one that fails does not stop the others.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    workers: int = knob(1, "processes; each serves all databases", "N")
    http: str = knob("", "answer at this address: /metrics, /healthz, /readyz", "HOST:PORT")
    liveness_file: str = knob("", "touch this file every 5 s while all loops turn", "PATH")
    hooks: str = knob("", "object that is told what was sent, failed and died", "MODULE:NAME")
    log_format: str = knob("text", "text for people, json for machines", "FORMAT")
    verbose: bool = knob(default=False, text="log more")
    check: bool = knob(default=False, text="try servers, rights and topology, say what is wrong, and exit")

    def __post_init__(self) -> None:
        if self.log_format not in {"text", "json"}:
            raise ConfigurationError(f"{flag('log_format')} must be text or json")
        if self.workers <= 0:
            raise ConfigurationError(f"{flag('workers')} must be greater than 0")


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "relay",
        help="forward messages from PostgreSQL to RabbitMQ",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(command, RelaySettings)
    add_options(command, ProcessSettings)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return start(load(RelaySettings, vars(options)), load(ProcessSettings, vars(options)))


def start(settings: RelaySettings, process: ProcessSettings) -> int:
    line, _, number = os.environ.pop(WORKER, "").partition(":")
    if number:
        logs.common["worker"] = int(number)
    logs.set_up(verbose=process.verbose, log_format=process.log_format)
    if process.check:
        return asyncio.run(check(each(settings)))
    if line:
        return loop.run(serve(settings, process, socket.socket(fileno=int(line)), first=number == "1"))
    if process.workers > 1:
        return loop.run(lead(settings, process))
    return loop.run(serve(settings, process))


# --- one process


class Served:
    """One database, and the relay that serves it at the moment."""

    def __init__(self, settings: RelaySettings, name: str, hooks: Sequence[object]) -> None:
        self.name, self._settings, self._hooks = name, settings, hooks
        self.relay = self._new()
        self.stats: dict[str, Any] | None = None
        self.refused: Exception | None = None
        self.restarts = 0
        self._running = self._open_long = False

    def _new(self) -> MessageRelay:
        return MessageRelay(hooks=self._hooks, **asdict(self._settings))

    @property
    def state(self) -> dict[str, Any]:
        return self.relay.state | {"restarts": self.restarts, "stats": self.stats}

    async def run(self, over: asyncio.Event, hopeless: Callable[[], bool]) -> None:
        """Begins anew what failed, as long as another database can be served."""
        if self.name:
            logs.database.set(self.name)
        pause = PAUSE_FIRST
        while True:
            begun = time.monotonic()
            self._running = True
            try:
                await self.relay.run()
            except Exception as error:
                self.refused = error
                if self._settings.once or hopeless():
                    over.set()
                    raise
                known = isinstance(error, OutboxError)
                logger.error(  # noqa: TRY400 - a known error needs no traceback
                    "database not served, trying again",
                    extra={"action": "restart", "error": str(error), "kind": type(error).__name__},
                    exc_info=None if known else error,
                )
            else:
                return
            finally:
                self._running, self.stats = False, None
            pause = PAUSE_FIRST if time.monotonic() - begun > PAUSE_LAST else min(2 * pause, PAUSE_LAST)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await over.wait()
            if over.is_set():
                if hopeless():
                    raise self.refused
                return
            self.relay = self._new()
            self.restarts += 1

    async def watch(self, every: float, metrics: Metrics) -> None:
        """Asks for the numbers of the database, while it answers: never so often that claims would feel it."""
        took = 0.0
        while True:
            if self.relay.state["ready"]:
                self.refused = None
            if self._running and self.relay.state["database"]:
                begun = time.monotonic()
                with contextlib.suppress(OutboxError):
                    self.stats = await self.relay.stats()
                    took = time.monotonic() - begun
                    metrics.clock = self.stats["at"] - time.time()
                    self._report()
            else:
                self.stats = None
            await asyncio.sleep(max(every, took * STATS_SHARE) if self.stats else min(every, 0.5))

    def _report(self) -> None:
        assert self.stats is not None
        long, before = self.stats["open_emitter"] > OPEN_LONG, self._open_long
        self._open_long = long
        if long and not before:
            fields = {"action": "open_emitter", "pid": self.stats["oldest_emitter_pid"], "seconds": OPEN_LONG}
            logger.warning("a transaction that emitted stays open: claims become slower", extra=fields)


async def serve(
    settings: RelaySettings, process: ProcessSettings, line: socket.socket | None = None, *, first: bool = True
) -> int:
    """Serves all databases; line leads to the process that this one is a worker of."""
    metrics, over = Metrics(), asyncio.Event()
    every = each(settings)
    hooks = [metrics, *find_hooks(process.hooks)]
    served = [Served(one, name if len(every) > 1 else "", hooks) for name, one in every.items()]
    names = dict(zip(every, served, strict=True))

    def stop() -> None:
        over.set()
        for one in served:
            one.relay.stop()

    async def look() -> Snapshot:
        return metrics.snapshot({name: one.state for name, one in names.items()})

    handle_signals(stop)
    threading.Thread(target=watch, args=(asyncio.get_running_loop(), 2 * settings.lease), daemon=True).start()
    loops = [
        asyncio.create_task(one.run(over, lambda: all(other.refused is not None for other in served))) for one in served
    ]
    beside = []
    if line is not None:
        beside.append(report_to(line, look, stop))
    if first and (sys.stderr.isatty() or process.http):
        seconds = STATS_ON_TERMINAL if sys.stderr.isatty() else STATS_EVERY
        beside += [one.watch(seconds, metrics) for one in served]
    alone = process if line is None else ProcessSettings()
    ends = await until_over(loops, shown(alone, settings, look, *beside), stop)
    for kind in (Exception, ConfigurationError, OutboxError):  # the first is a bug
        for error in ends:
            if isinstance(error, kind) and (kind is not Exception or not isinstance(error, OutboxError)):
                raise error
    return 0


@contextlib.asynccontextmanager
async def shown(
    process: ProcessSettings, settings: RelaySettings, look: Look, *beside: Coroutine[Any, Any, None]
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """What lets others see how it goes, and what else runs beside the loops."""
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.create_task(one) for one in beside]
        try:
            if process.http:
                await stack.enter_async_context(serving(process.http, look, settings.poll))
            if process.liveness_file:
                tasks.append(asyncio.create_task(keep_file(process.liveness_file, look, settings.poll)))
            if sys.stderr.isatty() and "worker" not in logs.common:
                tasks.append(asyncio.create_task(show_progress(look)))
            yield tasks
        finally:
            for task in tasks:
                task.cancel()


async def until_over(
    loops: Sequence[asyncio.Task[Any]],
    beside: AbstractAsyncContextManager[list[asyncio.Task[None]]],
    stop: Callable[[], None],
) -> list[BaseException]:
    """What the loops raised. If something beside them fails, that ends them too: a bug, or a setting that cannot be."""
    failed: list[BaseException] = []
    try:
        async with beside as helpers:
            waiting: set[asyncio.Task[Any]] = {*loops, *helpers}
            while not all(loop.done() for loop in loops):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.exception() for task in done if task in helpers and not task.cancelled()]
                failed += [error for error in errors if error is not None]
                if failed:
                    stop()
    except ConfigurationError as error:  # nobody can be answered at this address
        failed.append(error)
        stop()
        await asyncio.wait(loops)
    ends = [loop.exception() for loop in loops]
    return failed + [end for end in ends if end is not None]


def each(settings: RelaySettings) -> dict[str, RelaySettings]:
    """The settings for each database, by the name under which it appears in logs and metrics."""
    found: dict[str, RelaySettings] = {}
    lines = split_lines(settings.dsn)
    try:
        parts = [conninfo_to_dict(line) for line in lines]
    except psycopg.Error:
        parts = [{} for _ in lines]  # said where it is used
    plain = [
        str(part.get("dbname") or os.environ.get("PGDATABASE") or part.get("service") or "default") for part in parts
    ]
    for line, part, name in zip(lines, parts, plain, strict=True):
        unique = name if plain.count(name) == 1 else f"{part.get('host') or ''}:{part.get('port') or 5432}/{name}"
        if unique in found:
            raise ConfigurationError(
                f"database {unique!r} is given twice: one loop serves it, and {flag('workers')} more"
            )
        found[unique] = replace(settings, dsn=line)
    return found


def find_hooks(name: str) -> list[object]:
    if not name:
        return []
    module, _, path = name.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as python -m does
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{flag('hooks')} {name!r} cannot be loaded: {error}; write it as MODULE:NAME"
        ) from error
    return [found() if isinstance(found, type) else found]


def handle_signals(stop: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        at_once()
        os._exit(128 + number)

    def begin(number: int) -> None:
        for again in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(again, end, number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin, number)


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


async def show_progress(look: Look) -> None:
    """One line that is rewritten every second."""
    before = None
    while True:
        states = [state for found in (await look())["databases"].values() for state in found]
        sent, failed, in_flight = (sum(state[name] for state in states) for name in ("sent", "failed", "in_flight"))
        stats = [state["stats"] for state in states if state["stats"]]
        parts = [f"{sent - (sent if before is None else before):,} a second"]
        if stats:
            parts.append(f"{sum(found['waiting'] for found in stats):,} waiting")
            parts.append(f"oldest {max(found['oldest_age'] for found in stats):.1f} s")
        parts += [f"{in_flight:,} in flight", f"{sent:,} sent", f"{failed:,} failed"]
        before = sent
        sys.stderr.write(f"\r\033[K{', '.join(parts)}\r")
        sys.stderr.flush()
        await asyncio.sleep(1)


# --- several processes


async def lead(settings: RelaySettings, process: ProcessSettings) -> int:
    over = asyncio.Event()
    workers = [Worker(number) for number in range(1, process.workers + 1)]

    def send(number: int) -> None:
        over.set()
        for worker in workers:
            worker.send(number)

    async def look() -> Snapshot:
        found = await asyncio.gather(*(worker.look() for worker in workers))
        answers = [one for one in found if one is not None]
        return merge(answers) | {"missing": len(found) - len(answers)}

    def stop() -> None:
        send(signal.SIGTERM)

    handle_signals(stop, lambda: send(signal.SIGKILL))
    loops = [asyncio.create_task(worker.run(over, stop, once=settings.once)) for worker in workers]
    for error in await until_over(loops, shown(process, settings, look), stop):
        raise error
    return max(max(loop.result(), 0) for loop in loops)
