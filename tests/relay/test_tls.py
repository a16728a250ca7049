"""TLS on both sides, with certificates made here: only the good one will do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import guardian
import pytest

import databases
import servers
from harness import RunOutbox
from outbox import Worker, listen
from outbox.errors import ConfigurationError
from outbox.tls import database_tls

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]

ROLE = "outbox_test_tls"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
# What the server shows: who signed it, for which name, for how many days.
SHOWN = {
    "good": ("authority", "localhost", 10),
    "wrong-authority": ("stranger", "localhost", 10),
    "wrong-host": ("authority", "other.test", 10),
    "expired": ("authority", "localhost", -1),
}
SAYS = {
    "wrong-authority": "certificate verify failed",
    "wrong-host": "localhost",
    "expired": "certificate verify failed",
}


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("authority", "stranger"):
            openssl("req", "-x509", *CURVE, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt",
                    "-subj", f"/CN={name}", "-days", "10")  # fmt: skip
        for name, (authority, host, days) in (SHOWN | {"client": ("authority", "client", 10)}).items():
            self.sign(name, authority, host, days)

    def sign(self, name: str, authority: str, host: str, days: int) -> None:
        at = self.folder / name
        at.with_suffix(".ext").write_text(f"subjectAltName=DNS:{host}\n")
        openssl("req", *CURVE, "-keyout", f"{at}.key", "-out", f"{at}.csr", "-subj", f"/CN={host}")
        openssl("x509", "-req", "-in", f"{at}.csr", "-out", f"{at}.crt", "-days", str(days), "-extfile", f"{at}.ext",
                "-CA", self.folder / f"{authority}.crt", "-CAkey", self.folder / f"{authority}.key",
                "-CAcreateserial")  # fmt: skip

    def __call__(self, name: str) -> str:
        return str(self.folder / name)


@dataclass(frozen=True)
class Place:
    pair: servers.Servers
    files: Certificates
    plain: str  # the database, as the tests prepare it
    ports: dict[str, int]  # of the broker, by what it shows there

    @property
    def name(self) -> str:
        return urlsplit(self.plain).path[1:]

    def show(self, name: str, *, ask_client: bool = False) -> None:
        """From now on the database shows this certificate."""
        self.query(f"alter system set ssl_cert_file = '{self.files(name)}.crt'")
        self.query(f"alter system set ssl_key_file = '{self.files(name)}.key'")
        self.query(f"alter system set ssl_ca_file = '{self.files('authority')}.crt'")
        self.query("alter system set ssl = on")
        self.rule("hostssl", "clientcert=verify-ca" if ask_client else "")

    def rule(self, kind: str, more: str = "") -> None:
        """How the role of the tests must come."""
        rules = f"host all postgres all scram-sha-256\n{kind} all {ROLE} all scram-sha-256 {more}\n"
        Path(self.query("show hba_file")).write_text(rules)
        self.query("select pg_reload_conf()")

    def query(self, sql: str) -> str:
        return databases.query(self.plain, sql)

    def dsn(self, more: str = "") -> str:
        at = urlsplit(self.plain)
        return (f"host=localhost hostaddr=127.0.0.1 port={at.port} user={ROLE} password=x"
                f" dbname={self.name} {more}")  # fmt: skip

    def amqp(self, name: str, scheme: str = "amqps", more: str = "") -> str:
        at = urlsplit(self.pair.amqp_url)
        return (
            at._replace(scheme=scheme, netloc=f"{at.username}:{at.password}@localhost:{self.ports[name]}").geturl()
            + more
        )


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not below pytest's own folder: another user must reach it.
    with tempfile.TemporaryDirectory(prefix="outbox_test_tls_") as folder, servers.private(quiet=True) as pair:
        files = Certificates(Path(folder))
        owner = guardian.server_user()
        for path in (Path(folder), *Path(folder).iterdir()):
            path.chmod(0o755 if path.is_dir() or path.suffix != ".key" else 0o600)
            os.chown(path, owner.pw_uid, owner.pw_gid)
        ports = {"plain": urlsplit(pair.amqp_url).port or 0}
        for name in (*SHOWN, "asks-client"):
            ports[name] = guardian.free_port()
            shown = "good" if name == "asks-client" else name
            asked = (
                "{verify, verify_peer}, {fail_if_no_peer_cert, true}"
                if name == "asks-client"
                else "{verify, verify_none}"
            )
            pair.rabbitmq.ctl("eval", f"""
                rabbit_networking:ensure_ssl(),
                rabbit_networking:start_ssl_listener({{"127.0.0.1", {ports[name]}}}, [
                    {{cacertfile, "{files('authority')}.crt"}}, {{certfile, "{files(shown)}.crt"}},
                    {{keyfile, "{files(shown)}.key"}}, {asked}], 2).
            """)  # fmt: skip
        servers.manage(pair.management_url, "PUT", "exchanges/%2F/outbox", {"type": "topic", "durable": True})
        with databases.database(pair.dsn) as plain:
            databases.install(plain, "plain")
            databases.query(plain, f"create role {ROLE} superuser login password 'x'")
            yield Place(pair, files, plain, ports)


VERIFY = "sslmode=verify-full sslrootcert="


def test_good_certificates(place: Place, outbox: RunOutbox) -> None:
    place.show("good")
    place.query("select outbox.emit('nobody.listens', '{}')")
    done = outbox("relay", "--once", "-v", "--amqp-ca", place.files("authority.crt"),
                  OUTBOX_DSN=place.dsn(VERIFY + place.files("authority.crt")),
                  OUTBOX_AMQP_URL=place.amqp("good"))  # fmt: skip
    assert done.status == 0, done.log
    assert place.query("select attempts from outbox.message") == "1"  # returned: it got there
    place.query("delete from outbox.message")


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "good"])
def test_broker_with_a_bad_certificate(place: Place, outbox: RunOutbox, name: str) -> None:
    done = outbox("relay", "--once", "--amqp-ca", place.files("authority.crt"),
                  OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp(name))  # fmt: skip
    assert done.status == 1
    assert "certificate verify failed" in done.errors[0]
    assert SAYS[name] in done.errors[0]


def test_broker_whose_authority_nobody_named(place: Place, outbox: RunOutbox) -> None:
    done = outbox("relay", "--once", OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp("good"))
    assert done.status == 1
    assert "certificate verify failed" in done.errors[0]
    named = outbox("relay", "--once", OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp("good"),
                   SSL_CERT_FILE=place.files("authority.crt"))  # fmt: skip
    assert named.status == 0, named.log


def test_broker_without_tls(place: Place, outbox: RunOutbox) -> None:
    at = place.amqp("plain")
    done = outbox("relay", "--once", OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=at)
    assert done.status == 1
    assert len(done.errors) == 1


async def test_worker(place: Place, outbox: RunOutbox, caplog: pytest.LogCaptureFixture) -> None:
    @listen("a", queue="tls")
    async def handle(_body: Any) -> None: ...

    async def tried(url: str, ca: str = place.files("authority.crt"), **files: str) -> list[str]:
        """Until it is ready, or has found out that it cannot: why."""
        caplog.clear()
        worker = Worker(url, listeners=[handle], amqp_ca=ca, **files)  # type: ignore[arg-type]
        task = asyncio.create_task(worker.run())
        while not (worker.ready.is_set() or caplog.records or task.done()):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        worker.stop()
        await task
        return [record.error for record in caplog.records if record.levelname == "WARNING"]  # type: ignore[attr-defined]

    caplog.set_level("WARNING", "outbox")
    assert await tried(place.amqp("good")) == []
    assert await tried(f"amqps://127.0.0.1:1/, {place.amqp('good')}") == []  # of several, the first that answers
    client = {"amqp_cert": place.files("client.crt"), "amqp_key": place.files("client.key")}
    assert await tried(place.amqp("asks-client"), **client) == []
    for name in SAYS:
        assert "certificate verify failed" in (await tried(place.amqp(name)))[0]
    assert "certificate verify failed" in (await tried(place.amqp("good"), ca=""))[0]
    with pytest.raises(ConfigurationError, match="must not say 'no_verify_ssl'"):
        await tried(place.amqp("good", more="?no_verify_ssl=1"))
    at = {"OUTBOX_AMQP_URL": place.amqp("asks-client"), "OUTBOX_AMQP_CA": place.files("authority.crt")}
    assert outbox("dlq", "list", "tls", **at).status == 1
    shown = {f"OUTBOX_{name.upper()}": file for name, file in client.items()}
    done = outbox("dlq", "list", "tls", **at, **shown)
    assert done.status == 0, done.log


def test_broker_that_wants_a_certificate(place: Place, outbox: RunOutbox) -> None:
    at = {"OUTBOX_DSN": place.plain, "OUTBOX_AMQP_URL": place.amqp("asks-client"),
          "OUTBOX_AMQP_CA": place.files("authority.crt")}  # fmt: skip
    assert outbox("relay", "--once", **at).status == 1
    shown = {"OUTBOX_AMQP_CERT": place.files("client.crt"), "OUTBOX_AMQP_KEY": place.files("client.key")}
    done = outbox("relay", "--once", **at, **shown)
    assert done.status == 0, done.log


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "good"])
def test_database_with_a_bad_certificate(place: Place, outbox: RunOutbox, name: str) -> None:
    place.show(name)
    dsn = place.dsn(VERIFY + place.files("authority.crt"))
    for command in (["relay", "--once"], ["stats"]):
        done = outbox(*command, OUTBOX_DSN=dsn, OUTBOX_AMQP_URL=place.amqp("plain", "amqp"))
        assert done.status == 1
        assert SAYS[name] in done.errors[0]


def test_database_that_wants_a_certificate(place: Place, outbox: RunOutbox) -> None:
    place.show("good", ask_client=True)
    dsn = place.dsn(VERIFY + place.files("authority.crt"))
    done = outbox("stats", OUTBOX_DSN=dsn)
    assert done.status == 1
    assert "connection requires a valid client certificate" in done.errors[0]
    done = outbox("stats", OUTBOX_DSN=dsn, PGSSLCERT=place.files("client.crt"), PGSSLKEY=place.files("client.key"))
    assert done.status == 0, done.log


def test_verified_though_nobody_asked(place: Place, outbox: RunOutbox) -> None:
    """A host elsewhere, and a DSN that says nothing: certificates are verified, against what the system trusts."""
    place.show("wrong-host")
    other = place.dsn().replace("host=localhost", "host=other.test")
    trusted = {"SSL_CERT_FILE": place.files("authority.crt")}
    assert outbox("stats", OUTBOX_DSN=other, **trusted).status == 0
    assert "certificate verify failed" in outbox("stats", OUTBOX_DSN=other).errors[0]
    place.show("good")
    wrong = outbox("stats", OUTBOX_DSN=other, **trusted)
    assert (wrong.status, "other.test" in wrong.errors[0]) == (1, True)
    assert outbox("stats", OUTBOX_DSN=other + "sslmode=require").status == 0
    assert outbox("stats", OUTBOX_DSN=other, PGSSLMODE="require").status == 0


def test_database_without_tls(place: Place, outbox: RunOutbox) -> None:
    place.query("alter system set ssl = off")
    place.rule("host")
    dsn = place.dsn().replace("host=localhost", "host=db.test")
    done = outbox("stats", OUTBOX_DSN=dsn)
    assert done.status == 1
    assert "server does not support SSL, but SSL was required" in done.errors[0]
    assert outbox("stats", OUTBOX_DSN=dsn + "sslmode=disable").status == 0


@pytest.mark.parametrize(
    ("dsn", "environment", "mode"),
    [
        ("host=db.test", {}, "verify-full"),
        ("postgresql://db.test/shop", {}, "verify-full"),
        ("host=localhost,db.test", {}, "verify-full"),
        ("dbname=shop", {"PGHOST": "db.test"}, "verify-full"),
        ("hostaddr=192.0.2.1", {}, "verify-full"),
        ("host=db.test sslmode=require", {}, None),
        ("host=db.test", {"PGSSLMODE": "disable"}, None),
        ("service=shop", {}, None),
        ("host=localhost", {}, None),
        ("host=127.0.0.9", {}, None),
        ("host=/run/postgresql", {}, None),
        ("dbname=shop", {}, None),
        ("postgresql://[::1]/shop", {}, None),
    ],
)
def test_what_is_verified(dsn: str, environment: dict[str, str], mode: str | None) -> None:
    assert database_tls(dsn, environment).get("sslmode") == mode


@pytest.mark.parametrize("parameter", ["no_verify_ssl=1", "cafile=x", "verify=verify_none"])
def test_verification_cannot_be_turned_off(place: Place, outbox: RunOutbox, parameter: str) -> None:
    done = outbox("relay", OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp("good", more=f"?{parameter}"))
    assert done.status == 2
    assert f"--amqp-url must not say '{parameter.partition('=')[0]}'" in done.errors[0]


def test_files_that_are_none(place: Place, outbox: RunOutbox) -> None:
    for file in ("/nowhere", __file__):
        done = outbox("relay", "--amqp-ca", file, OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp("good"))
        assert done.status == 2
        assert "the files of --amqp-ca, --amqp-cert and --amqp-key cannot be used" in done.errors[0]
    for files, scheme, says in ((["--amqp-ca", "x"], "amqp", "are for amqps://"),
                                (["--amqp-key", "x"], "amqps", "--amqp-key is of no use without")):  # fmt: skip
        done = outbox("relay", *files, OUTBOX_DSN=place.plain, OUTBOX_AMQP_URL=place.amqp("plain", scheme))
        assert done.status == 2
        assert says in done.errors[0]
