"""Databases to test in, made on the server of a DSN through psql. Standard library only: the runner starts with it."""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
Mode = Literal["extension", "plain"]
SERVER = os.environ.get("OUTBOX_DSN", "")
MODES: tuple[Mode, ...] = ("extension", "plain")
PARTS = ("emit", "relay", "consume", "monitor", "admin")
# Of the users that tests make. No word that could be in what a command says.
PASSWORD = secrets.token_hex(8)


def program(name: str) -> str:
    """Finds a PostgreSQL client program beside the server under test, or on PATH."""
    folder = os.environ.get("OUTBOX_PG_BIN")
    return str(Path(folder) / name) if folder and (Path(folder) / name).exists() else name


def named(dsn: str, database: str) -> str:
    """The same server and user, another database."""
    if "://" not in dsn:
        raise ValueError("OUTBOX_DSN must be a URL: postgresql://user:password@host:port/database")
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


def as_user(url: str, name: str, password: str = PASSWORD) -> str:
    """The same server, another user; a broker's too."""
    at = urlsplit(url)
    login = f"{quote(name, safe='')}:{quote(password, safe='')}"
    return urlunsplit(at._replace(netloc=f"{login}@{at.netloc.rpartition('@')[2]}"))


def psql(
    dsn: str, *arguments: str | Path, text: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs psql without the user's own settings; its error message is the exception's."""
    command = [program("psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *map(str, arguments), dsn]
    done = subprocess.run(command, input=text or "", capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"psql {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done


def query(dsn: str, sql: str) -> str:
    return psql(dsn, "-c", sql).stdout.strip()


def install(dsn: str, mode: Mode) -> None:
    if mode == "extension":
        psql(dsn, "-c", "create extension outbox")
    else:
        psql(dsn, "-f", BUILD / "outbox-install.sql")


@contextlib.contextmanager
def database(server: str, *, template: str | None = None, options: str = "") -> Iterator[str]:
    """A database of its own for as long as the block runs; yields its DSN."""
    name = f"outbox_test_{secrets.token_hex(6)}"
    source = f"template {template}" if template else ""
    query(server, f"create database {name} {source} {options}")
    try:
        yield named(server, name)
    finally:
        query(server, f"drop database if exists {name} with (force)")


class Roles:
    """Makes roles that may log in, and nothing else; and removes them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def make(self, word: str = "role") -> str:
        return self.add(f"outbox_test_{word}_{secrets.token_hex(6)}")

    def add(self, name: str) -> str:
        query(SERVER, f"create role {name} login password '{PASSWORD}'")
        self.made.append(name)
        return name

    def remove(self) -> None:
        for name in self.made:
            query(SERVER, f"drop role if exists {name}")


def fingerprint(dsn: str, *, marks: bool = True) -> list[str]:
    """One line per catalog fact; without marks, without those that only an extension has."""
    lines = psql(dsn, "-f", ROOT / "sql/packaging/fingerprint.sql").stdout.splitlines()
    return [line for line in lines if marks or not line.startswith("dump mark ")]


def assert_same(one: list[str], other: list[str], hint: str = "") -> None:
    difference = list(difflib.unified_diff(one, other, lineterm="", n=0))
    assert not difference, "\n".join([*difference, hint])


def restore(dsn: str, target: str) -> None:
    """Dumps one database into another, which is empty."""
    dump = subprocess.run([program("pg_dump"), dsn], capture_output=True, text=True, check=True)
    psql(target, text=dump.stdout)
