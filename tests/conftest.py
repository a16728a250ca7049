"""Fixtures: for each test a database cloned from a template and a vhost, on the servers that the environment names."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pytest_postgresql import factories

import build
import databases
import servers

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = databases.SERVER
BROKER = os.environ.get("OUTBOX_AMQP_URL", "")
NAME_THE_SERVERS = (
    "OUTBOX_DSN and OUTBOX_AMQP_URL name the servers to test on: run `make up`, then "
    '`eval "$(make -s env)"`; or run `make test`, which brings its own.'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write what is found as what is expected")


def pytest_configure(config: pytest.Config) -> None:
    """Builds what is installed below, once and not in each worker."""
    if hasattr(config, "workerinput"):
        return
    if not SERVER:
        pytest.exit(NAME_THE_SERVERS, returncode=pytest.ExitCode.USAGE_ERROR)
    built = build.build(databases.ROOT, databases.BUILD)
    if folder := os.environ.get("OUTBOX_EXTENSION_DIR"):
        build.copy_extension(built, Path(folder))


def install_plain(**connection: Any) -> None:
    """Makes the template: called by pytest-postgresql with the parts of a connection."""
    databases.install(databases.named(SERVER, connection["dbname"]), "plain")


_at = conninfo_to_dict(SERVER)
template = factories.postgresql_noproc(
    host=str(_at.get("host", "")),
    port=str(_at.get("port", "5432")),
    user=str(_at.get("user", "")),
    password=str(_at.get("password", "")),
    # Two runs may share a server.
    dbname=f"outbox_test_{secrets.token_hex(6)}",
    maintenance_dbname=str(_at.get("dbname", "postgres")),
    load=[install_plain],
)
clone = factories.postgresql("template")


@pytest.fixture
def roles() -> Iterator[databases.Roles]:
    """Whatever makes a database asks for it: a role can be dropped when none is left in which it has rights."""
    made = databases.Roles()
    yield made
    made.remove()


@pytest.fixture
def dsn(roles: databases.Roles, clone: psycopg.Connection[Any]) -> str:
    """A database with the package installed; nobody is connected to it."""
    del roles  # there before it, and so gone after it
    name = clone.info.dbname
    clone.close()
    return databases.named(SERVER, name)


@pytest.fixture
def db(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the test's database, in autocommit mode."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def empty(roles: databases.Roles) -> Iterator[str]:
    """A database without the package."""
    del roles  # there before it, and so gone after it
    with databases.database(SERVER) as dsn:
        yield dsn


@pytest.fixture(params=databases.MODES)
def mode(request: pytest.FixtureRequest) -> databases.Mode:
    chosen: databases.Mode = request.param
    return chosen


@pytest.fixture
def installed(empty: str, mode: databases.Mode) -> str:
    """A database with the package, once in each mode."""
    databases.install(empty, mode)
    return empty


@dataclass(frozen=True)
class Management:
    """RabbitMQ's management API: management("GET", "/queues/{vhost}/name"), where {vhost} is the test's own."""

    url: str
    vhost: str

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return servers.manage(self.url, method, path[1:].replace("{vhost}", quote(self.vhost, safe="")), body)


@pytest.fixture
def management() -> Iterator[Management]:
    """The management API, for a vhost that is the test's own."""
    assert BROKER, NAME_THE_SERVERS
    at = urlsplit(BROKER)
    url = os.environ.get("OUTBOX_MANAGEMENT_URL") or f"http://{at.netloc.rpartition(':')[0]}:15672"
    call = Management(url, f"outbox_test_{secrets.token_hex(6)}")
    call("PUT", "/vhosts/{vhost}")
    try:
        user = quote(unquote(at.username or "guest"), safe="")
        call("PUT", f"/permissions/{{vhost}}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
        yield call
    finally:
        call("DELETE", "/vhosts/{vhost}")


@pytest.fixture
def amqp_url(management: Management) -> str:
    return urlunsplit(urlsplit(BROKER)._replace(path="/" + quote(management.vhost, safe="")))


@pytest.fixture
def broker_user(management: Management, amqp_url: str) -> Iterator[str]:
    """A user of the broker that may do nothing yet; its URL."""
    name = f"outbox_test_{secrets.token_hex(6)}"
    management("PUT", f"/users/{name}", {"password": databases.PASSWORD, "tags": ""})
    yield databases.as_user(amqp_url, name)
    management("DELETE", f"/users/{name}")
