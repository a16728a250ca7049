"""The guardian of private servers: a process in a session of its own that owns PostgreSQL, RabbitMQ and their data.

It stops everything when the process that asked for them ends, however it ends. When the guardian itself is killed, the
kernel signals the servers for it. It is started by servers.py, which keeps a line to it: requests and answers in JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".servers"
MARKER = "OUTBOX_SERVERS_RUN"  # carried by every process that works with private servers, so that none outlives them
TEMPORARY = Path("/tmp")  # noqa: S108  not TMPDIR, which may be a folder of root's own
RABBITMQ = Path("/usr/lib/rabbitmq/bin")
START_LIMIT = 120.0
STOP_LIMIT = 15.0


class ServerError(Exception):
    """Something about the servers went wrong; the text says what to do."""


# --- processes: a pid and the time of birth together identify one


def birth(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; none if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> list[int]:
    born = birth(pid)
    if born is None:
        raise ServerError(f"there is no process {pid}")
    return [pid, born]


def alive(process: Sequence[int]) -> bool:
    return birth(process[0]) == process[1]


def send(process: Sequence[int], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if alive(process):
            os.kill(process[0], signum)


def processes(chosen: Callable[[Path], bool]) -> list[list[int]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ServerError):
            if int(entry.name) != os.getpid() and chosen(entry):
                found.append(identify(int(entry.name)))
    return found


def children(pid: int) -> list[list[int]]:
    return processes(lambda entry: int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid)


def marked(run: str) -> list[list[int]]:
    """The processes that were started with this run's environment."""
    needle = f"{MARKER}={run}\0".encode()
    return processes(lambda entry: needle in (entry / "environ").read_bytes())


def end_marked(run: str) -> None:
    """Ends what still works with the servers; by force, and again and again, what does not heed a polite signal."""
    for process in marked(run):
        send(process, signal.SIGTERM)
    if not wait_until(lambda: not marked(run), STOP_LIMIT):
        while left := marked(run):
            for process in left:
                send(process, signal.SIGKILL)
            time.sleep(0.05)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def die_with_parent(signum: int) -> Callable[[], None]:
    """Lets the kernel signal a child when its parent ends. To be called after a change of user, which clears it."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def arrange() -> None:
        libc.prctl(1, signum, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def free_port() -> int:
    """A port nobody uses, below the range from which the kernel takes ports for outgoing connections."""
    while True:
        port = 15000 + secrets.randbelow(17000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# --- places and users


def server_user() -> pwd.struct_passwd:
    """PostgreSQL refuses to run as root, so root lends the servers another user."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def as_user(user: pwd.struct_passwd) -> dict[str, Any]:
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}


def temporary_prefix() -> str:
    return f"outbox-{ROOT.stat().st_ino:x}-"


def make_place(name: str, user: pwd.struct_passwd) -> tuple[Path, IO[str]]:
    """A folder for data, in the clone, or under /tmp if the servers' user cannot write there; and the lock on it."""
    place = None
    with contextlib.suppress(OSError):
        PLACE.mkdir(exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=PLACE))
        os.chown(place, user.pw_uid, user.pw_gid)
    if place and subprocess.run(["test", "-w", place], check=False, cwd="/", **as_user(user)).returncode:
        place.rmdir()
        place = None
    if place is None:
        place = Path(tempfile.mkdtemp(prefix=temporary_prefix(), dir=TEMPORARY))
        os.chown(place, user.pw_uid, user.pw_gid)
    lock = (place / "guardian").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(f"{os.getpid()}\n")  # only now, locked, does sweep() take an interest in it
    lock.flush()
    return place, lock


def sweep() -> None:
    """Removes what earlier runs of this clone left when everybody who could tidy up was killed."""
    for place in [*PLACE.glob("*/"), *TEMPORARY.glob(f"{temporary_prefix()}*/")]:
        with contextlib.suppress(OSError), (place / "guardian").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read():
                remove(place)


def remove(place: Path) -> None:
    """Again and again, because a server that is just ending may still write."""

    def gone() -> bool:
        shutil.rmtree(place, ignore_errors=True)
        return not place.exists()

    wait_until(gone, STOP_LIMIT)


# --- the servers, as their guardian sees them


class Server:
    title: ClassVar[str]
    death_signal: ClassVar[signal.Signals]
    port_taken: ClassVar[str]  # what its log says then
    stop_signals: ClassVar[dict[str, list[signal.Signals]]]

    def __init__(self, place: Path, user: pwd.struct_passwd, *, durable: bool) -> None:
        self.place, self.user, self.durable = place, user, durable
        self.password = secrets.token_urlsafe(18)
        self.log = place / f"{self.title}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        raise NotImplementedError

    def choose_ports(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def forget(self) -> None:
        """Clears what is not in the data folder."""

    def describe(self) -> dict[str, Any]:
        return {"pid": self.process and self.process.pid, "log": str(self.log), "environment": self.environment()}

    def environment(self) -> dict[str, str]:
        """Nothing is inherited: what the caller has set must not change how the servers work."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "HOME": str(self.place), "LC_ALL": "C.UTF-8"}

    def spawn(self, *command: str | Path) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.place,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(self.death_signal),  # noqa: PLW1509  the guardian has one thread
                **as_user(self.user),
            )

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.place / name
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, self.user.pw_uid, self.user.pw_gid)
        return path

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def await_ready(self, still_wanted: Callable[[], None]) -> None:
        """Waits; takes other ports when somebody was quicker to take those found free."""
        deadline = time.monotonic() + START_LIMIT
        while not self.ready():
            still_wanted()
            if time.monotonic() > deadline:
                raise ServerError(f"{self.title} did not start within {START_LIMIT:.0f} s:\n{self.log_tail()}")
            if self.process is None or self.process.poll() is not None:
                if not re.search(self.port_taken, self.log_tail()):
                    raise ServerError(f"{self.title} ended while starting:\n{self.log_tail()}")
                self.stop("kill")
                self.log.unlink()
                self.choose_ports()
                self.start()
            time.sleep(0.1)

    def stop(self, mode: str) -> None:
        """Stops as gently as asked; kills, with everything it has started, what does not stop in time or should not."""
        if self.process is None:
            return
        for signum in self.stop_signals[mode]:
            self.process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_LIMIT)
                break
        if self.process.poll() is None:
            family = children(self.process.pid)
            self.process.kill()
            self.process.wait()
            for child in family:
                send(child, signal.SIGKILL)
            wait_until(lambda: not any(alive(child) for child in family), STOP_LIMIT)
        self.process = None


class Postgres(Server):
    title = "PostgreSQL"
    death_signal = signal.SIGQUIT
    port_taken = "could not bind"
    stop_signals: ClassVar = {
        "smart": [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT],
        "fast": [signal.SIGINT, signal.SIGQUIT],
        "immediate": [signal.SIGQUIT],
        "kill": [],
    }

    def prepare(self) -> None:
        self.data = self.place / "postgres"
        self.make_prefix()
        self.choose_ports()
        password = self.write("password", self.password)
        done = self.spawn(
            *(self.bin / "initdb", "-D", self.data, "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}"),
            *("-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"),
        ).wait()
        password.unlink()
        if done != 0:
            raise ServerError(f"initdb failed:\n{self.log_tail()}")
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in self.settings().items())

    def make_prefix(self) -> None:
        """PostgreSQL looks for its share folder from where its executable really is. So a copied executable finds
        the extensions we put beside the system's ones, and the system's folders stay as they are."""
        if given := os.environ.get("OUTBOX_POSTGRES"):
            # Another major, in a folder by itself: copied whole, because the servers' user may not read it.
            prefix = self.place / "prefix"
            shutil.copytree(given, prefix, symlinks=True)
            self.bin, self.extensions = prefix / "bin", prefix / "share/postgresql/extension"
            self.system = {"BINDIR": self.bin}
            return
        self.system = postgres_folders()
        top = os.path.commonpath(self.system.values())
        own = {name: self.place / "prefix" / folder.relative_to(top) for name, folder in self.system.items()}
        self.bin, self.extensions = own["BINDIR"], own["SHAREDIR"] / "extension"
        self.bin.mkdir(parents=True)
        self.extensions.mkdir(parents=True)
        for program in ("postgres", "initdb"):
            shutil.copy2(self.system["BINDIR"] / program, self.bin)
        own["PKGLIBDIR"].symlink_to(self.system["PKGLIBDIR"])
        for folder in (Path(), Path("extension")):
            for entry in (self.system["SHAREDIR"] / folder).iterdir():
                if entry.name != "extension":
                    (own["SHAREDIR"] / folder / entry.name).symlink_to(entry)

    def choose_ports(self) -> None:
        self.port = free_port()

    def settings(self) -> dict[str, str | int]:
        settings: dict[str, str | int] = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # in the data folder, where it goes with the data
            "max_connections": 200,
            "max_prepared_transactions": 50,
            "shared_buffers": "256MB",
            "jit": "off",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        return settings if self.durable else settings | {"fsync": "off", "full_page_writes": "off"}

    def start(self) -> None:
        program = self.bin / "postgres"
        self.process = self.spawn(program, "-D", self.data, "-p", str(self.port))

    def ready(self) -> bool:
        """The server's pid file names its process in the first line and its state in the eighth."""
        with contextlib.suppress(OSError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return self.process is not None and lines[::7] == [str(self.process.pid), "ready   "]
        return False

    def forget(self) -> None:
        """A killed server leaves a small piece of shared memory behind, named in its pid file."""
        with contextlib.suppress(OSError, IndexError):
            memory = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", memory], check=False, capture_output=True)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "version": (self.data / "PG_VERSION").read_text().strip(),
            "port": self.port,
            "url": f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/postgres",
            "bin": str(self.system["BINDIR"]),
            "extensions": str(self.extensions),
            "ctl": [str(self.system["BINDIR"] / "pg_ctl"), "-D", str(self.data)],
        }


def postgres_folders() -> dict[str, Path]:
    """Where the newest PostgreSQL is that has a server and, before others, pgTAP; as its own pg_config says."""
    programs = ("postgres", "initdb", "pg_ctl", "psql", "pg_config")
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if all((path / p).exists() for p in programs)]
    if not found:
        raise ServerError("no PostgreSQL server is installed; `python3 tests/provision.py` installs what is missing")
    settings = []
    for path in found:
        lines = subprocess.run([path / "pg_config"], check=True, capture_output=True, text=True).stdout.splitlines()
        settings.append(dict(line.split(" = ", 1) for line in lines))
    best = max(
        settings,
        key=lambda s: (
            Path(s["SHAREDIR"], "extension/pgtap.control").exists(),
            int(re.findall(r"\d+", s["VERSION"])[0]),
        ),
    )
    return {name: Path(best[name]) for name in ("BINDIR", "SHAREDIR", "PKGLIBDIR")}


class Rabbitmq(Server):
    title = "RabbitMQ"
    death_signal = signal.SIGKILL
    port_taken = "eaddrinuse|already_used"
    stop_signals: ClassVar = {"fast": [signal.SIGTERM], "immediate": [], "kill": []}
    epmd: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        if not (RABBITMQ / "rabbitmq-server").exists():
            raise ServerError("RabbitMQ is not installed; `python3 tests/provision.py` installs what is missing")
        self.name = f"outbox-{secrets.token_hex(6)}"
        self.write(".erlang.cookie", secrets.token_hex(20), 0o400)
        self.write("plugins", "[rabbitmq_management].\n")
        self.write("rabbitmq-env.conf", "")
        self.choose_ports()

    def choose_ports(self) -> None:
        self.port, self.management_port, self.distribution_port, self.epmd_port = (free_port() for _ in range(4))
        self.write(
            "rabbitmq.conf",
            f"""
            listeners.tcp.1 = 127.0.0.1:{self.port}
            management.tcp.ip = 127.0.0.1
            management.tcp.port = {self.management_port}
            default_user = outbox
            default_pass = {self.password}
            log.console = false
            """,
        )

    def environment(self) -> dict[str, str]:
        """Names every place that RabbitMQ would otherwise look up in the system's configuration."""
        places = {
            "CONF_ENV_FILE": "rabbitmq-env.conf",
            "CONFIG_FILE": "rabbitmq.conf",
            "CONFIG_FILES": "rabbitmq.conf.d",
            "ADVANCED_CONFIG_FILE": "advanced.config",
            "ENABLED_PLUGINS_FILE": "plugins",
            "MNESIA_BASE": "rabbitmq",
            "LOG_BASE": "rabbitmq-log",
            "SCHEMA_DIR": "rabbitmq-schema",
            "GENERATED_CONFIG_DIR": "rabbitmq-config",
        }
        return super().environment() | {
            **{f"RABBITMQ_{name}": f"{self.place}/{place}" for name, place in places.items()},
            "RABBITMQ_NODENAME": f"{self.name}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_AFLAGS": "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false",
            "detached": "true",  # the start script becomes the server instead of waiting for it
        }

    def start(self) -> None:
        while not self.start_epmd():
            self.choose_ports()
        self.process = self.spawn(RABBITMQ / "rabbitmq-server")

    def start_epmd(self) -> bool:
        """Every Erlang node needs a port mapper; without one of its own it would share, or start, the machine's."""
        address = ("-address", "127.0.0.1", "-port", str(self.epmd_port))
        epmd = self.epmd = self.spawn("epmd", *address)
        wait_until(lambda: epmd.poll() is not None or self.epmd_answers(), STOP_LIMIT)
        time.sleep(0.05)  # another's may have answered, while ours is about to end because of it
        return epmd.poll() is None

    def epmd_answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.epmd_port), 1):
            return True
        return False

    def ready(self) -> bool:
        with contextlib.suppress(OSError, ServerError):
            manage(self.management_url(), "GET", f"health/checks/port-listener/{self.port}")
            return True
        return False

    def stop(self, mode: str) -> None:
        super().stop(mode)
        if self.epmd is not None:
            self.epmd.kill()
            self.epmd.wait()

    def management_url(self) -> str:
        return f"http://outbox:{self.password}@127.0.0.1:{self.management_port}"

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "version": manage(self.management_url(), "GET", "overview")["rabbitmq_version"],
            "port": self.port,
            "url": f"amqp://outbox:{self.password}@127.0.0.1:{self.port}/",
            "management": self.management_url(),
            "ctl": [str(RABBITMQ / "rabbitmqctl")],
            "epmd": self.epmd and self.epmd.pid,
        }


def manage(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One call of RabbitMQ's management API."""
    credentials, _, host = url.removeprefix("http://").rpartition("@")
    request = urllib.request.Request(
        f"http://{host}/api/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Basic {b64encode(credentials.encode()).decode()}", "Content-Type": "application/json"},
        method=method,
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise ServerError(f"RabbitMQ refused {method} {path}: {error.code} {error.read().decode()}") from error


# --- the guardian


class NoLongerWantedError(Exception):
    """Whoever asked for the servers has ended."""


class Guardian:
    def __init__(self, line: socket.socket, order: dict[str, Any]) -> None:
        self.line: socket.socket | None = line
        self.order = order
        self.received = b""
        self.signalled = False
        self.orphaned: float | None = None
        self.servers: dict[str, Server] = {}

    def work(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self.on_signal)
        sweep()
        user = server_user()
        place, lock = make_place(self.order["name"], user)
        with lock:
            try:
                self.start(place, user)
                while True:
                    self.listen()
            except NoLongerWantedError:
                pass
            except ServerError as error:
                self.say({"failed": str(error)})
            finally:
                self.wind_up(place)

    def on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.signalled = True

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            if self.line is not None:
                self.line.sendall(json.dumps(message).encode() + b"\n")

    def start(self, place: Path, user: pwd.struct_passwd) -> None:
        """RabbitMQ takes longest, so it starts first and PostgreSQL while it does."""
        begun = time.monotonic()
        for kind in (Rabbitmq, Postgres):
            if kind.__name__.lower() in self.order["kinds"]:
                server: Server = kind(place, user, durable=self.order["durable"])
                self.servers[kind.__name__.lower()] = server
                server.prepare()
                server.start()
        for name, server in reversed(self.servers.items()):
            server.await_ready(self.check)
            facts = server.describe()
            took = f"{time.monotonic() - begun:.1f} s"
            text = f"{server.title} {facts['version']} is ready on 127.0.0.1:{facts['port']} ({took})"
            self.say({"started": name, "facts": facts, "text": text})
        self.say({"ready": str(place), "guardian": identify(os.getpid())})

    def check(self) -> None:
        """Raises when the servers are no longer wanted."""
        if self.signalled:
            raise NoLongerWantedError
        if self.line is None:
            return
        if not self.line_is_open(self.line) or not alive(self.order["front"]):
            raise NoLongerWantedError
        if self.order["parent"] and not alive(self.order["parent"]):
            self.end_front()

    def line_is_open(self, line: socket.socket) -> bool:
        try:
            return not self.heard(0) or line.recv(1, socket.MSG_PEEK) != b""
        except ConnectionError:
            return False

    def end_front(self) -> None:
        """The front end survived its parent: it gets a while to unwind, and closes the line when it has."""
        if self.orphaned is None:
            self.orphaned = time.monotonic()
            send(self.order["front"], signal.SIGTERM)
        elif time.monotonic() > self.orphaned + STOP_LIMIT:
            send(self.order["front"], signal.SIGKILL)

    def heard(self, seconds: float) -> bool:
        return bool(select.select([self.line] if self.line else [], [], [], seconds)[0])

    def listen(self) -> None:
        self.check()
        if self.heard(0.2) and self.line is not None:
            self.received += self.line.recv(65536)
        while b"\n" in self.received:
            request, _, self.received = self.received.partition(b"\n")
            self.obey(**json.loads(request))

    def obey(self, do: str, server: str = "", mode: str = "") -> None:
        try:
            if do == "detach":
                self.say({"done": {}})
                self.line = None
            elif do == "stop":
                self.servers[server].stop(mode)
                self.say({"done": {"pid": None}})
            elif do == "start":
                if not self.servers[server].ready():
                    self.servers[server].stop("kill")
                    self.servers[server].start()
                    self.servers[server].await_ready(self.check)
                self.say({"done": self.servers[server].describe()})
        except ServerError as error:
            self.say({"failed": str(error)})

    def wind_up(self, place: Path) -> None:
        """Data that is thrown away needs no clean shutdown."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        end_marked(self.order["run"])
        for server in self.servers.values():
            server.stop("immediate")
            server.forget()
        remove(place)


if __name__ == "__main__":
    Guardian(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])).work()
