"""The private servers: where they listen, that they stand beside others, and that nothing of them is ever left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import guardian
import pytest

import servers

pytestmark = pytest.mark.servers
ROOT = Path(__file__).resolve().parents[2]
STANDARD_PORTS = (5432, 5672, 4369, 15672, 25672)


# --- what the tests look at


def family(pid: int) -> list[list[int]]:
    """A process and all its descendants."""
    return [guardian.identify(pid), *(member for child in guardian.children(pid) for member in family(child[0]))]


def listening(pid: int) -> set[str]:
    """The addresses, as the kernel writes them, on which the guardian's processes accept connections."""
    inodes = set()
    for member, _ in family(pid):
        for link in Path(f"/proc/{member}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and fields[6] in inodes:
            found.add(f"unix {fields[7:]}")
    return found


def psql(dsn: str, sql: str) -> str:
    command = ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql, dsn]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def places(clone: Path) -> list[Path]:
    """The data folders of a clone's servers."""
    prefix = f"outbox-{clone.stat().st_ino:x}-"
    return [*clone.glob(".servers/*/"), *guardian.TEMPORARY.glob(f"{prefix}*/")]


def command(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "tests/servers.py", *arguments]
    return subprocess.run(program, check=False, cwd=clone, capture_output=True, text=True)


class Run:
    """`make wait` in a clone: a command that works with private servers until somebody interrupts it."""

    def __init__(self, clone: Path, only: str = "") -> None:
        self.told = clone / "told"
        # As a terminal starts it: whoever runs the tests in the background has these signals ignored.
        reset = "import os, signal, sys; [signal.signal(s, 0) for s in (1, 2)]; os.execvp(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", reset, "make", "wait", f"ONLY={only}"],
            cwd=clone,
            process_group=0,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    @property
    def front(self) -> int:
        """The process that make started."""
        assert guardian.wait_until(lambda: bool(guardian.children(self.process.pid)), 30)
        return guardian.children(self.process.pid)[0][0]

    def await_command(self) -> None:
        assert guardian.wait_until(lambda: self.told.exists() or self.process.poll() is not None, 90)
        assert self.told.exists(), self.process.communicate()[1].decode()
        told = dict(line.split("=", 1) for line in self.told.read_text().splitlines())
        self.marker = told[guardian.MARKER]
        self.place = Path(told["OUTBOX_EXTENSION_DIR"]).parents[4]
        self.guardian = int((self.place / "guardian").read_text())
        self.family = family(self.guardian)
        assert guardian.marked(self.marker)
        assert len(self.family) > 5

    def left(self) -> list[object]:
        alive = filter(guardian.alive, self.family)
        return [*guardian.marked(self.marker), *alive, *filter(Path.exists, [self.place])]

    def assert_nothing_is_left(self) -> None:
        guardian.wait_until(lambda: not self.left(), 30)
        assert self.left() == []


def make_clone(folder: Path, *needed: str) -> Path:
    """As much of this repository as the servers need, in another place."""
    clone = folder / "a clone"
    (clone / "tests").mkdir(parents=True)
    for name in ("tests/servers.py", "tests/guardian.py", *needed):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    run = "tests/servers.py run --parent $$PPID $(ONLY) -- sh -c 'env | grep OUTBOX > t; mv t told; sleep 60'"
    (clone / "Makefile").write_text(f"wait:\n\t@exec {sys.executable} {run}\n")
    return clone


@pytest.fixture
def hidden_clone(tmp_path: Path) -> Path:
    """A clone in a folder that nobody but its owner can enter."""
    tmp_path.chmod(0o700)
    return make_clone(tmp_path)


@pytest.fixture(scope="module")
def pair() -> Iterator[servers.Servers]:
    """A pair that was started while others had the standard ports."""
    with contextlib.ExitStack() as stack:
        for port in STANDARD_PORTS:
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                taken.listen()
        with servers.private(quiet=True) as started:
            yield started


# --- where they are


def test_they_listen_on_loopback_only(pair: servers.Servers) -> None:
    found = listening(pair.guardian[0])
    ports = {int(address.rpartition(":")[2], 16) for address in found}
    assert {address.rpartition(":")[0] for address in found} <= {"0100007F", "00000000000000000000000001000000"}
    facts = [handle.facts for handle in (pair.postgres, pair.rabbitmq)]
    assert ports > {facts[0]["port"], facts[1]["port"]}
    assert len(ports) == 5, "PostgreSQL, AMQP, management, distribution, epmd"
    assert not ports & set(STANDARD_PORTS)


def test_a_wrong_password_is_refused(pair: servers.Servers) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        psql(re.sub(":[^:]*@", ":wrong@", pair.dsn), "select 1")
    with pytest.raises(servers.ServerError, match="401"):
        servers.manage(re.sub(":[^:]*@", ":wrong@", pair.management_url), "GET", "overview")


def test_an_extension_is_installed_for_them_alone(pair: servers.Servers, tmp_path: Path) -> None:
    (tmp_path / "outbox.control").write_text("default_version = '7'\nrelocatable = true\n")
    (tmp_path / "outbox--7.sql").write_text("create function made_up() returns int language sql return 7;")
    pair.install_extension(tmp_path)
    assert psql(pair.dsn, "create extension outbox; select made_up(); drop extension outbox") == "7"
    assert psql(pair.dsn, "create extension pgtap; select pgtap_version() > 1; drop extension pgtap") == "t"


def test_a_second_pair_stands_beside_the_first(pair: servers.Servers) -> None:
    with servers.private(rabbitmq=False, quiet=True) as second:
        assert psql(second.dsn, "select 1") == psql(pair.dsn, "select 1") == "1"
        started, place = family(second.guardian[0]), second.place
    assert not any(map(guardian.alive, started))
    assert place is not None
    assert not place.exists()
    assert psql(pair.dsn, "select 1") == "1"


def test_each_can_be_stopped_killed_and_started_again(pair: servers.Servers) -> None:
    before = pair.postgres.pid
    psql(pair.dsn, "create table kept as select 1 as it")
    pair.postgres.kill()
    assert pair.postgres.pid is None
    with pytest.raises(subprocess.CalledProcessError):
        psql(pair.dsn, "select 1")
    pair.postgres.start()
    assert pair.postgres.pid != before
    assert psql(pair.dsn, "table kept") == "1"
    pair.postgres.restart("smart")
    assert psql(pair.dsn, "drop table kept; show fsync") == "off"
    assert "server is running" in pair.postgres.ctl("status")
    assert "Ping succeeded" in pair.rabbitmq.ctl("ping")
    servers.manage(pair.management_url, "PUT", "vhosts/kept")
    pair.rabbitmq.restart("kill")
    assert servers.manage(pair.management_url, "GET", "vhosts/kept")["name"] == "kept"
    servers.manage(pair.management_url, "DELETE", "vhosts/kept")


@pytest.mark.parametrize(("kind", "port"), [(guardian.Postgres, "port"), (guardian.Rabbitmq, "distribution_port")])
def test_a_port_taken_at_the_last_moment_is_replaced(kind: type[guardian.Server], port: str) -> None:
    user = guardian.server_user()
    place, lock = guardian.make_place("race", user)
    with lock, socket.socket() as quicker:
        server = kind(place, user, durable=False)
        try:
            server.prepare()
            quicker.bind(("127.0.0.1", getattr(server, port)))
            quicker.listen()
            server.start()
            server.await_ready(lambda: None)
            assert getattr(server, port) != quicker.getsockname()[1]
        finally:
            server.stop("kill")
            server.forget()
            guardian.remove(place)


# --- that nothing is left


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_make_is_interrupted(hidden_clone: Path, signum: int) -> None:
    with Run(hidden_clone, "--only postgres") as run:
        run.await_command()
        os.killpg(run.process.pid, signum)  # as a terminal does it: to everybody in the foreground
        run.assert_nothing_is_left()
        assert run.process.wait(30) != 0


def test_nothing_is_left_after_make_is_killed(hidden_clone: Path) -> None:
    with Run(hidden_clone) as run:
        run.await_command()
        run.process.kill()
        run.assert_nothing_is_left()


def test_nothing_is_left_after_the_front_end_is_killed(hidden_clone: Path) -> None:
    with Run(hidden_clone, "--only postgres") as run:
        run.await_command()
        os.kill(run.front, signal.SIGKILL)
        run.assert_nothing_is_left()


def test_nothing_is_left_after_the_guardian_is_killed(hidden_clone: Path) -> None:
    with Run(hidden_clone) as run:
        run.await_command()
        os.kill(run.guardian, signal.SIGKILL)
        run.assert_nothing_is_left()
        assert run.process.wait(30) != 0


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_nothing_is_left_of_a_start_that_was_killed(hidden_clone: Path, seconds: float) -> None:
    with Run(hidden_clone) as run:
        assert guardian.wait_until(lambda: bool(guardian.children(run.front)), 30)
        time.sleep(seconds)
        started = family(run.front)
        run.process.kill()
        assert guardian.wait_until(lambda: not any(map(guardian.alive, started)), 30)
        assert not places(hidden_clone)


def test_what_a_kill_of_both_leaves_is_removed_by_the_next_run(hidden_clone: Path) -> None:
    with Run(hidden_clone, "--only postgres") as run:
        run.await_command()
        front = run.front
        os.kill(front, signal.SIGSTOP)
        os.kill(run.guardian, signal.SIGKILL)
        os.kill(front, signal.SIGKILL)
        assert run.place.exists()
        guardian.end_marked(run.marker)
        assert command(hidden_clone, "run", "--only", "postgres", "--", "true").returncode == 0
        run.assert_nothing_is_left()


def test_the_exit_code_is_passed_on_and_what_the_command_left_is_ended(hidden_clone: Path) -> None:
    leaver = "sleep 90 & echo $! > left; exit 7"
    assert command(hidden_clone, "run", "--only", "postgres", "--", "sh", "-c", leaver).returncode == 7
    assert guardian.birth(int((hidden_clone / "left").read_text())) is None


def test_a_command_that_does_not_exist_is_named(hidden_clone: Path) -> None:
    done = command(hidden_clone, "run", "--only", "postgres", "--", "no-such-command")
    assert done.returncode == 1
    assert "cannot run no-such-command" in done.stderr
    assert not places(hidden_clone)


# --- servers that stay


def test_up_env_and_down() -> None:
    with tempfile.TemporaryDirectory(dir=guardian.TEMPORARY) as folder:
        Path(folder).chmod(0o755)
        clone = make_clone(Path(folder), "sql", "outbox.control")
        try:
            up_env_and_down(clone)
        finally:
            command(clone, "down")


def up_env_and_down(clone: Path) -> None:
    assert "make up" in command(clone, "env").stderr
    up = command(clone, "up")
    assert up.returncode == 0, up.stderr
    assert 'eval "$(make -s env)"' in up.stdout
    assert [place.parent for place in places(clone)] == [clone / ".servers"], "the servers' user can reach this clone"
    exported = command(clone, "env").stdout
    shell = (
        f'{exported}psql -XqAt -c "select outbox.version(); show fsync" "$OUTBOX_DSN"; echo "$OUTBOX_MANAGEMENT_URL"'
    )
    version, fsync, url = subprocess.run(["sh", "-c", shell], check=True, capture_output=True, text=True).stdout.split()
    assert f"default_version = '{version}'" in (clone / "outbox.control").read_text()
    assert fsync == "on"
    exchange = servers.manage(url, "GET", "exchanges/%2F/outbox")
    assert (exchange["type"], exchange["durable"]) == ("topic", True)

    assert "up already" in command(clone, "up").stdout
    assert command(clone, "env").stdout == exported
    assert command(clone, "run", "--only", "postgres", "--", "true").returncode == 0, "beside those that stay"
    state = json.loads((clone / ".servers/up.json").read_text())
    assert all(map(guardian.alive, state["processes"]))

    with servers.private(rabbitmq=False, quiet=True) as other:
        down = command(clone, "down")
        assert psql(other.dsn, "select 1") == "1", "down stops what up started, nothing else"
    assert down.returncode == 0, down.stderr
    assert not any(map(guardian.alive, state["processes"]))
    assert not places(clone)
    assert command(clone, "env").returncode == 1
    assert "No private servers" in command(clone, "down").stdout


def test_a_state_from_before_a_reboot_ends_nobody(hidden_clone: Path) -> None:
    """After a reboot other processes have the pids that the state file names."""
    place = hidden_clone / ".servers" / "up-before"
    place.mkdir(parents=True)
    with subprocess.Popen(["sleep", "300"]) as stranger:
        state = {"processes": [[stranger.pid, 1]] * 4, "place": str(place), "environment": {}}
        (hidden_clone / ".servers/up.json").write_text(json.dumps(state))
        assert command(hidden_clone, "env").returncode == 1
        assert command(hidden_clone, "down").returncode == 0
        assert stranger.poll() is None
        assert not place.exists()
        stranger.kill()
