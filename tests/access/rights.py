"""What roles may."""

from __future__ import annotations

from typing import Any

import psycopg

import databases


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
