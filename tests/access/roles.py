"""Roles to test with, and what they may."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import urlsplit

import psycopg

import databases

PARTS = ("emit", "relay", "consume", "monitor", "admin")


class Roles:
    """Makes roles that log in with the password x, and removes them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def make(self, word: str = "role") -> str:
        name = f"outbox_test_{word}_{secrets.token_hex(6)}"
        databases.query(databases.SERVER, f"create role {name} login password 'x'")
        self.made.append(name)
        return name

    def remove(self) -> None:
        for name in self.made:
            databases.query(databases.SERVER, f"drop role if exists {name}")


def as_role(dsn: str, role: str) -> str:
    at = urlsplit(dsn)
    return at._replace(netloc=f"{role}:x@{at.netloc.rpartition('@')[2]}").geturl()


def rights(dsn: str, role: str) -> set[str]:
    """What is given to a role in schema outbox."""
    found = databases.query(
        dsn,
        "select o.privilege || ' ' || o.object from outbox._objects() as o cross join aclexplode(o.acl) as g"
        f" where g.grantee = '{role}'::regrole",
    )
    return set(found.splitlines())


def granted(dsn: str, role: str) -> set[str]:
    """The parts recorded for a role."""
    found = databases.query(dsn, f"select g.part from outbox._granted() as g where g.role = '{role}'::regrole")
    return set(found.splitlines())


def refused(connection: psycopg.Connection[Any], statement: str) -> str:
    """The code of the error; empty when there was none."""
    try:
        with connection.transaction():
            connection.execute(statement.encode())
    except psycopg.Error as error:
        return error.sqlstate or "unknown"
    return ""
