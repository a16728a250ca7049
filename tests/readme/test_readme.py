"""README.md is run as a reader would: every block in order, in one shell, and what it shows must be what comes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import guardian
import pytest

import databases
import servers
from harness import Management, Queue

README = databases.ROOT / "README.md"
DOCS = databases.ROOT / "docs"
# Roles belong to the whole server: a block that makes some says in a comment that it is not to last.
FENCE = re.compile(r"^(<!-- rolled back -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What differs from run to run.
VARIES = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d)?"), "<time>"),
)
PATIENCE = 20.0


class ReadmeError(Exception):
    """A block does not do what the README says."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(readme: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(readme):
        text = f"begin;\n{match[3]}rollback;\n" if match[1] else match[3]
        found.append(Block(match[2], text, readme.count("\n", 0, match.start()) + 1))
    return found


def normalised(text: str) -> str:
    for pattern, name in VARIES:
        text = pattern.sub(name, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class Terminal:
    """One bash for the whole README; what is started in the background goes on writing to it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._errors = folder / "errors.log"
        with self._errors.open("wb") as errors:
            self._bash = subprocess.Popen(
                ["bash", "-e"], cwd=folder, env=environment, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._bash.stdout is not None
        while data := os.read(self._bash.stdout.fileno(), 65536):
            self._output += data.decode()

    def type(self, commands: str) -> None:
        """Returns when the commands are through; raises if one of them failed."""
        assert self._bash.stdin is not None
        mark = f"done-{secrets.token_hex(8)}"
        with suppress(BrokenPipeError):
            self._bash.stdin.write(f"{commands}\necho {mark}\n")
            self._bash.stdin.flush()
        self._wait(mark)
        self._output = self._output.replace(mark + "\n", "")

    def _wait(self, mark: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while mark not in self._output:
            if time.monotonic() > deadline or self._bash.poll() is not None:
                raise ReadmeError(f"failed:\n{self._output}\n{self._errors.read_text()}")
            time.sleep(0.01)

    def expect(self, text: str) -> None:
        """What the commands so far wrote, up to here, must be this text."""
        deadline = time.monotonic() + PATIENCE
        while (seen := normalised(self._output)) != normalised(text):
            if time.monotonic() > deadline or len(seen) > len(normalised(text)):
                raise ReadmeError(f"shown:\n{text}\nseen:\n{seen}\n{self._errors.read_text()}")
            time.sleep(0.01)
        self._output = ""

    def forget(self) -> None:
        self._output = ""

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        self._reader.join(PATIENCE)
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdout.close()
        with suppress(BrokenPipeError):
            self._bash.stdin.close()


def check_make(line: str) -> None:
    """A make target is looked up, not made."""
    for target in re.findall(r"\bmake (?:-s )?([a-z-]+)", line):
        found = subprocess.run(
            ["make", "-n", "-C", databases.ROOT, target], capture_output=True, text=True, check=False
        )
        if found.returncode:
            raise ReadmeError(f"make {target}: {found.stderr}")


def run_block(terminal: Terminal, block: Block) -> None:
    if block.language == "sql":
        terminal.forget()
        terminal.type(f'psql -X -q -A -t -v ON_ERROR_STOP=1 "$OUTBOX_DSN" <<"END OF BLOCK"\n{block.text}END OF BLOCK')
    elif block.language == "sh":
        terminal.forget()
        lines = block.text.splitlines()
        for line in lines:
            check_make(line)
        terminal.type("\n".join(line for line in lines if not re.search(r"^make |\$\(make ", line)))
    elif block.language == "python":
        name = block.text.splitlines()[0].removeprefix("# ")
        terminal.type(f'cat > {name} <<"END OF BLOCK"\n{block.text}END OF BLOCK')
    elif block.language == "text":
        terminal.expect(block.text)
    elif block.language:
        raise ReadmeError(f"nobody knows how to run a block of {block.language}")


def run_readme(readme: str, terminal: Terminal, name: str = "README.md") -> int:
    """Returns how many blocks ran."""
    found = blocks(readme)
    for block in found:
        try:
            run_block(terminal, block)
        except ReadmeError as error:
            raise ReadmeError(f"{name} line {block.line}: {error}") from error
    return len(found)


@contextmanager
def opened(folder: Path, amqp_url: str) -> Iterator[Terminal]:
    """A terminal in an empty folder, with a database that does not have the package yet."""
    (folder / "build").symlink_to(databases.BUILD)
    programs = [Path(sys.executable).parent, Path(databases.program("psql")).parent]
    with databases.database(os.environ["OUTBOX_DSN"]) as dsn:
        environment = {
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
            "OUTBOX_DSN": dsn,
            "OUTBOX_AMQP_URL": amqp_url,
            "PGTZ": "UTC",
            "PYTHONUNBUFFERED": "1",
            "LC_ALL": "C.UTF-8",
            "HOME": str(folder),
        }
        terminal = Terminal(folder, environment | servers_run())
        try:
            yield terminal
        finally:
            terminal.close()


def servers_run() -> dict[str, str]:
    """Whoever owns the servers ends every process that carries this."""
    return {name: value for name, value in os.environ.items() if name == "OUTBOX_SERVERS_RUN"}


@pytest.fixture
def terminal(tmp_path: Path, amqp_url: str) -> Iterator[Terminal]:
    with opened(tmp_path, amqp_url) as one:
        yield one


def test_every_block_runs_and_shows_what_comes(terminal: Terminal) -> None:
    assert run_readme(README.read_text(), terminal) >= 10


def test_getting_started(terminal: Terminal) -> None:
    assert run_readme((DOCS / "getting-started.md").read_text(), terminal, "docs/getting-started.md") >= 15


INSTALL = 'psql "$OUTBOX_DSN" -qf build/outbox-install.sql'


@pytest.mark.parametrize("name", ["security.md", "tuning.md", "moving.md"])
def test_guide(terminal: Terminal, management: Management, name: str) -> None:
    """Pages for somebody who has installed the package and bound a queue."""
    terminal.type(INSTALL)
    Queue(management)
    assert run_readme((DOCS / name).read_text(), terminal, f"docs/{name}") >= 2


@pytest.mark.servers
def test_rabbitmq_guide(tmp_path: Path) -> None:
    """On a broker of its own, because users are the broker's."""
    with servers.private(postgres=False, quiet=True) as pair, opened(tmp_path, pair.amqp_url) as terminal:
        facts = pair.rabbitmq.facts
        command = shlex.join(["env", "-i", *(f"{k}={v}" for k, v in facts["environment"].items()), *facts["ctl"]])
        terminal.type(INSTALL)
        terminal.type(f'rabbitmqctl() {{ {command} "$@" < /dev/null; }}')
        text = (DOCS / "rabbitmq.md").read_text().replace("localhost/", f"127.0.0.1:{urlsplit(pair.amqp_url).port}/")
        assert run_readme(text, terminal, "docs/rabbitmq.md") >= 10


def test_operating_guide(terminal: Terminal, tmp_path: Path) -> None:
    """With a port that is free; and what it wrote to files is what the commands say."""
    text = (DOCS / "operating.md").read_text()
    text = text.replace("9187", str(guardian.free_port()))
    assert run_readme(text, terminal, "docs/operating.md") >= 15
    (ready,) = json.loads((tmp_path / "ready.json").read_text())["databases"].values()
    assert (ready["ready"], ready["database"], ready["broker"]) == (True, "up", "up")
    letter = json.loads((tmp_path / "letter.json").read_text())
    assert (letter["reason"], letter["body"]) == ("unroutable", '{"order":3}')
    assert "is paused" in (tmp_path / "paused.txt").read_text()
    assert all(json.loads(line)["level"] for line in (tmp_path / "relay.log").read_text().splitlines())


@pytest.mark.parametrize("name", ["operating.md", "guarantees.md", "security.md", "tuning.md"])
def test_every_command_and_flag_of_the_guide_exists(name: str) -> None:
    """Those that stand in the text, and not in a block."""
    text = (DOCS / name).read_text()
    inline = {tuple(words.split()) for words in re.findall(r"`outbox ([a-z]+(?: [a-z]+)*)[^`]*`", text)}
    if name == "operating.md":
        assert {("resume",), ("dead", "requeue"), ("install",)} <= inline
    helps = "".join(
        subprocess.run(
            [sys.executable, "-m", "outbox", *words, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for words in {(), ("relay",), ("stats",), ("emit",), ("dead", "purge")} | inline
    )
    flags = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", text)) - {"--help"}
    assert flags
    assert [flag for flag in sorted(flags) if flag not in helps] == []
    variables = set(re.findall(r"OUTBOX_[A-Z_]+", text))
    known = {f"OUTBOX_{flag[2:].replace('-', '_').upper()}" for flag in re.findall(r"--[a-z-]+", helps)}
    assert variables <= known


def test_first_sixty_lines_lead_to_a_message() -> None:
    seen = [
        block for block in blocks("\n".join(README.read_text().splitlines()[:60]) + "\n") if block.language == "text"
    ]
    assert "order.created " in seen[-1].text


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    text = (databases.ROOT / name).read_text()
    quoted = re.findall(r"`[^`\n]*make [^`\n]*`|^make .*|^eval .*", text, re.MULTILINE)
    assert quoted
    for line in quoted:
        check_make(line)


def headings(page: Path) -> set[str]:
    """As the addresses that a page has within itself."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        if not urlsplit(target).scheme and not (there.exists() and (not heading or heading in headings(there))):
            lost.append(target)
    assert lost == []


def test_every_page_is_one_click_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+)", README.read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - linked == set()


WRONG = {
    "sql that fails": "```sql\nselect 1/0;\n```\n",
    "sql that shows something else": "```sql\nselect 1 as one;\n```\n```text\n one\n-----\n   2\n(1 row)\n```\n",
    "less shown than comes": "```sh\necho one; echo two\n```\n```text\none\n```\n",
    "a command that fails": "```sh\nfalse\n```\n",
    "a command that does not exist": "```sh\noutbox-no-such-command\n```\n",
    "a flag that does not exist": "```sh\noutbox relay --no-such-flag\n```\n",
    "a missing target": "```sh\nmake no-such-target\n```\n",
    "a missing target that is evaluated": '```sh\neval "$(make -s no-such-target)"\n```\n',
    "a python file that fails": "```python\n# broken.py\nraise SystemExit(3)\n```\n```sh\npython broken.py\n```\n",
    "an unknown language": "```ruby\nputs 1\n```\n",
}


@pytest.mark.parametrize("readme", WRONG.values(), ids=WRONG.keys())
def test_wrong_block_is_found(readme: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 2.0)
    with pytest.raises(ReadmeError, match=r"^README.md line \d+: "):
        run_readme(readme, terminal)
