"""Private PostgreSQL and RabbitMQ servers for tests, the demo and development.

    python3 tests/servers.py run [--parent PID] -- COMMAND...   servers for one command
    python3 tests/servers.py up | down | env                    servers that stay
    with servers.private() as s: ...                            servers for a block of Python

Whatever happens to the process that asks for them, guardian.py stops them and removes their data.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import guardian
from guardian import MARKER, PLACE, ROOT, STOP_LIMIT, ServerError, alive, identify, manage

__all__ = ["ServerError", "Servers", "manage", "private"]

STATE = PLACE / "up.json"


# --- the front end: the process that asks for servers


class Handle:
    """One server."""

    def __init__(self, servers: Servers, name: str, facts: dict[str, Any]) -> None:
        self.servers, self.name, self.facts = servers, name, facts

    @property
    def pid(self) -> int | None:
        """The server's main process; none while it is stopped."""
        pid: int | None = self.facts["pid"]
        return pid

    def start(self) -> None:
        self.facts = self.servers.ask(do="start", server=self.name)

    def stop(self, mode: str = "fast") -> None:
        """Modes are fast, immediate and kill; PostgreSQL also knows smart."""
        self.facts |= self.servers.ask(do="stop", server=self.name, mode=mode)

    def kill(self) -> None:
        self.stop("kill")

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def ctl(self, *arguments: str) -> str:
        """Runs pg_ctl or rabbitmqctl for this server and returns what it printed."""
        command: list[str] = [*self.facts["ctl"], *arguments]
        done = subprocess.run(
            command,
            check=False,
            cwd="/",
            env=self.facts["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **guardian.as_user(guardian.server_user()),
        )
        output = str(done.stdout.decode(errors="replace"))
        if done.returncode:
            raise ServerError(f"{shlex.join(command)} failed:\n{output}")
        return output


class Servers:
    """A private pair of servers."""

    def __init__(self, kinds: Sequence[str], name: str, parent: int | None, *, durable: bool) -> None:
        self.run = secrets.token_hex(16)
        self.handles: dict[str, Handle] = {}
        self.place: Path | None = None
        self.guardian: list[int] = []
        self.detached = False
        order = {"kinds": kinds, "name": name, "durable": durable, "run": self.run}
        order |= {"front": identify(os.getpid()), "parent": parent and identify(parent)}
        self.line, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, guardian.__file__, str(theirs.fileno()), json.dumps(order)],
                cwd="/",
                env={name: value for name, value in os.environ.items() if name != MARKER},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self.lines = self.line.makefile("r")
        assert self.process.stderr is not None
        self.errors = self.process.stderr

    def await_ready(self, *, quiet: bool) -> None:
        while "ready" not in (message := self.hear()):
            self.handles[message["started"]] = Handle(self, message["started"], message["facts"])
            if not quiet:
                print(message["text"], file=sys.stderr, flush=True)
        self.place, self.guardian = Path(message["ready"]), message["guardian"]

    def hear(self) -> dict[str, Any]:
        text = self.lines.readline()
        if not text:
            errors = self.errors.read().decode(errors="replace")
            raise ServerError(f"the guardian of the private servers ended unexpectedly\n{errors}")
        message: dict[str, Any] = json.loads(text)
        if "failed" in message:
            raise ServerError(message["failed"])
        return message

    def ask(self, **request: str) -> dict[str, Any]:
        self.line.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = self.hear()["done"]
        return answer

    @property
    def postgres(self) -> Handle:
        return self.handles["postgres"]

    @property
    def rabbitmq(self) -> Handle:
        return self.handles["rabbitmq"]

    @property
    def dsn(self) -> str:
        return str(self.postgres.facts["url"])

    @property
    def amqp_url(self) -> str:
        return str(self.rabbitmq.facts["url"])

    @property
    def management_url(self) -> str:
        return str(self.rabbitmq.facts["management"])

    def environment(self) -> dict[str, str]:
        """What a command needs to find these servers, and what lets the guardian find the command."""
        found = {MARKER: self.run}
        if "postgres" in self.handles:
            facts = self.postgres.facts
            found |= {"OUTBOX_DSN": self.dsn}
            found |= {"OUTBOX_PG_BIN": facts["bin"], "OUTBOX_EXTENSION_DIR": facts["extensions"]}
        if "rabbitmq" in self.handles:
            found |= {"OUTBOX_AMQP_URL": self.amqp_url, "OUTBOX_MANAGEMENT_URL": self.management_url}
        return found

    def install_extension(self, build: Path | str) -> None:
        """Puts the built extension where only this server looks."""
        for path in [*Path(build).glob("outbox--*.sql"), Path(build) / "outbox.control"]:
            shutil.copy(path, self.postgres.facts["extensions"])

    def detach(self) -> None:
        """Lets the servers outlive this process."""
        self.ask(do="detach")
        self.detached = True

    def close(self) -> None:
        """Waits until the guardian has stopped everything; tidies up for it if it was killed."""
        for open_end in (self.lines, self.line, self.errors):
            open_end.close()
        if self.detached:
            return
        self.process.wait()
        if self.place is not None and self.place.exists():
            guardian.end_marked(self.run)
            guardian.remove(self.place)


def exit_on_signal(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack. Only a main thread can arrange that; the guardian copes without."""
    changed = []
    for signum in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, exit_on_signal)
                changed.append(signum)
    try:
        yield
    finally:
        for signum in changed:
            signal.signal(signum, signal.SIG_DFL)


@contextlib.contextmanager
def private(
    *,
    postgres: bool = True,
    rabbitmq: bool = True,
    name: str = "test",
    parent: int | None = None,
    durable: bool = False,
    quiet: bool = False,
) -> Iterator[Servers]:
    """Servers that live as long as the block, and no longer than this process and the process `parent`."""
    kinds = [kind for kind, wanted in (("postgres", postgres), ("rabbitmq", rabbitmq)) if wanted]
    with signals_unwind(), contextlib.closing(Servers(kinds, name, parent, durable=durable)) as servers:
        servers.await_ready(quiet=quiet)
        yield servers


# --- commands


def run(command: Sequence[str], parent: int | None, only: str | None) -> int:
    with private(postgres=only != "rabbitmq", rabbitmq=only != "postgres", name="run", parent=parent) as servers:
        try:
            child = subprocess.Popen(command, env=os.environ | servers.environment())
        except OSError as error:
            raise ServerError(f"cannot run {command[0]}: {error.strerror}") from error
        try:
            while servers.process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(0.2)
                    return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # the command heard it too, if it came from the keyboard
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            raise
    raise ServerError("the guardian of the private servers was killed; the command was ended with the servers")


def up() -> None:
    if running() is not None:
        print("The private servers are up already.")
    else:
        stop_running()
        start_running()
    print('Next: eval "$(make -s env)" connects this shell, psql "$OUTBOX_DSN" looks inside, make down stops them.')


def down() -> None:
    stopped = stop_running()
    print("The private servers are stopped, their data is removed." if stopped else "No private servers are up.")


def env() -> None:
    state = running()
    if state is None:
        raise ServerError("the private servers are down; `make up` starts them")
    print("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in state["environment"].items()))


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    PLACE.mkdir(exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_state() -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads(STATE.read_text())
        return state
    return None


def running() -> dict[str, Any] | None:
    """What `up` started, if all of it lives."""
    state = read_state()
    return state if state and all(alive(process) for process in state["processes"]) else None


def start_running() -> None:
    with private(name="up", durable=True) as servers:
        create_outbox(servers)
        pids = (servers.postgres.pid, servers.rabbitmq.pid, servers.rabbitmq.facts["epmd"])
        environment = servers.environment() | {"OUTBOX_DSN": outbox_dsn(servers)}
        del environment[MARKER]
        state = {
            "processes": [servers.guardian, *(identify(pid) for pid in pids if pid)],
            "place": str(servers.place),
            "environment": environment,
        }
        STATE.touch(0o600)
        STATE.write_text(json.dumps(state))
        servers.detach()


def stop_running() -> bool:
    """Stops what the state file names, nothing else: the guardian stops the rest; without it nothing is running."""
    state = read_state()
    if state is None:
        return False
    guardian.send(state["processes"][0], signal.SIGTERM)
    if not guardian.wait_until(lambda: not any(alive(process) for process in state["processes"]), 4 * STOP_LIMIT):
        raise ServerError(f"the private servers do not stop; look at the processes {state['processes']}")
    guardian.remove(Path(state["place"]))
    STATE.unlink()
    return True


def outbox_dsn(servers: Servers) -> str:
    return servers.dsn.removesuffix("postgres") + "outbox"


def do_or_fail(what: str, *command: str | Path) -> None:
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise ServerError(f"could not {what}; the lines above say why")


def create_outbox(servers: Servers) -> None:
    """A database with the package and an exchange, both named outbox."""
    psql = (f"{servers.postgres.facts['bin']}/psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-c")
    do_or_fail("build the extension", sys.executable, ROOT / "sql/packaging/build.py")
    servers.install_extension(ROOT / "build")
    do_or_fail("create the database", *psql, "create database outbox", servers.dsn)
    do_or_fail("create the extension", *psql, "create extension outbox", outbox_dsn(servers))
    manage(servers.management_url, "PUT", "exchanges/%2F/outbox", {"type": "topic", "durable": True})


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Private PostgreSQL and RabbitMQ servers.")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("up", help="start servers that stay, with a database and an exchange named outbox")
    commands.add_parser("down", help="stop them and remove their data")
    commands.add_parser("env", help="print the shell line that connects to them")
    runner = commands.add_parser("run", help="run a command with servers of its own")
    runner.add_argument("--parent", type=int, help="stop as soon as this process ends")
    runner.add_argument("--only", choices=["postgres", "rabbitmq"], help="start one of the two")
    runner.add_argument("command", nargs="+")
    return parser.parse_args()


def main() -> int:
    given = read_arguments()
    try:
        if given.what == "run":
            return run(given.command, given.parent, given.only)
        if given.what == "env":
            env()
        else:
            with one_at_a_time():
                {"up": up, "down": down}[given.what]()
    except ServerError as error:
        print(f"servers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
