"""A streaming replica takes over while emitters and relays are at work, and what it needs to be able to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import guardian
import psycopg
import pytest

import databases
import servers
from chaos.stage import LONG, Stage

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

REPEAT = int(os.environ.get("OUTBOX_REPEAT", "10")) if LONG else 1
STREAMING = "select count(*) from pg_stat_replication where application_name = 'replica' and state = 'streaming'"
EMIT = "select outbox.emit('chaos', '{{\"key\": \"{0}\", \"number\": {1}}}', key => '{0}')"


@dataclass
class Cluster:
    """A primary and its replica."""

    primary: servers.Servers
    replica: servers.Servers

    def __post_init__(self) -> None:
        at, port = urlsplit(self.primary.dsn), self.replica.postgres.facts["port"]
        # A copy has the primary's password.
        self.replica_dsn = at._replace(netloc=f"{at.username}:{at.password}@127.0.0.1:{port}").geturl()
        # A client that is given both takes the one that can be written to.
        both = at._replace(netloc=f"{at.netloc},127.0.0.1:{port}", query="target_session_attrs=read-write")
        self.dsn = both.geturl()

    def make(self, *, synchronous: bool) -> None:
        """The replica begins as a copy of the primary at rest; what either was before is forgotten."""
        source, target = (Path(one.postgres.facts["ctl"][-1]) for one in (self.primary, self.replica))
        self.replica.postgres.stop("immediate")
        if self.primary.postgres.pid is None:
            self.primary.postgres.start()
        self.execute("alter system reset all")
        self.primary.postgres.stop()
        shutil.rmtree(target)
        shutil.copytree(source, target)
        (target / "standby.signal").touch()
        with (target / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{self.primary.dsn}?application_name=replica'\n")
        user = guardian.server_user()
        for path in [target, *target.rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid)
        self.primary.postgres.start()
        self.replica.postgres.start()
        self.await_replica()
        if synchronous:
            self.execute("alter system set synchronous_standby_names = 'replica'")
            self.execute("select pg_reload_conf()")

    def await_replica(self) -> None:
        whole = f"{STREAMING} and replay_lsn = pg_current_wal_lsn()"
        assert guardian.wait_until(lambda: self.execute(whole) == [(1,)], 30), "the replica does not follow"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.primary.dsn, autocommit=True) as db:
            # Also while a synchronous replica is away.
            db.execute("set synchronous_commit = local")
            done = db.execute(statement.encode())
            return done.fetchall() if done.description else []

    def fail_over(self) -> None:
        self.primary.postgres.kill()
        self.replica.postgres.ctl("promote")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        servers.private(name="primary", rabbitmq=False, durable=True, quiet=True) as primary,
        servers.private(name="replica", rabbitmq=False, durable=True, quiet=True) as replica,
    ):
        yield Cluster(primary, replica)


@pytest.fixture
def scene(
    cluster: Cluster, request: pytest.FixtureRequest, amqp_url: str, management: Any, tmp_path: Path
) -> Iterator[Stage]:
    cluster.make(synchronous=request.param == "synchronous")
    with databases.database(cluster.dsn) as dsn:
        databases.install(dsn, "plain")
        with Stage(dsn, amqp_url, management.url, tmp_path) as running:
            yield running
            # The database is dropped where it can be, and nobody is waited for.
            databases.query(cluster.dsn, "alter system reset synchronous_standby_names")
            databases.query(cluster.dsn, "select pg_reload_conf()")


synchronous = pytest.mark.parametrize("scene", ["synchronous"], indirect=True)
asynchronous = pytest.mark.parametrize("scene", ["asynchronous"], indirect=True)


@synchronous
@pytest.mark.parametrize("round_", range(REPEAT))
def test_synchronous_replica_is_promoted_under_load(scene: Stage, cluster: Cluster, round_: int) -> None:
    """Lost 0, phantom 0, and what comes twice is at most a window for each relay."""
    scene.note(f"round {round_}")
    scene.relay()
    scene.relay()
    for _ in scene.rounds(1):
        scene.note("the primary is killed")
        cluster.fail_over()
        scene.note("the replica is promoted")
        scene.unclean += 2
    scene.finish()


def emit_without_the_replica(scene: Stage) -> None:
    """The transaction does not wait for it, so only the claim can."""
    with scene.connect() as db:
        db.execute("set synchronous_commit = local")
        db.execute(EMIT.format("late", 1).encode())


@synchronous
def test_nothing_is_published_that_a_synchronous_replica_lacks(scene: Stage, cluster: Cluster) -> None:
    """Not even when somebody cancels the claim that waits for it, which makes the claim succeed."""
    waits = "from pg_stat_activity where application_name = 'outbox relay' and wait_event = 'SyncRep'"
    relay = scene.relay()
    assert guardian.wait_until(lambda: "relay ready" in relay.log, 20), relay.log
    cluster.replica.postgres.stop()
    emit_without_the_replica(scene)
    for _ in range(2):
        assert guardian.wait_until(lambda: cluster.execute(f"select count(*) > 0 {waits}") == [(True,)], 20), relay.log
        assert scene.received() == []
        cluster.execute(f"select pg_cancel_backend(pid) {waits}")
    assert guardian.wait_until(lambda: "its wait was cancelled" in relay.log, 20), relay.log
    assert scene.received() == []
    cluster.replica.postgres.start()
    cluster.await_replica()
    scene.await_empty()
    assert [one.key for one in scene.received()] == ["late"]
    scene.stop(relay)


@asynchronous
def test_asynchronous_replica_lacks_what_had_not_reached_it(scene: Stage, cluster: Cluster) -> None:
    """Lost what waited, a phantom what was published, with all that those transactions did; the rest arrives."""
    scene.emit(400, 0.5)
    relay = scene.relay()
    scene.await_emitted()
    scene.await_empty()
    cluster.await_replica()
    known = scene.left()[2]
    cluster.replica.postgres.stop()
    scene.execute(EMIT.format("published", 1))
    scene.await_empty()
    scene.kill(relay)
    scene.execute(EMIT.format("waiting", 1))
    cluster.primary.postgres.kill()
    cluster.replica.postgres.start()
    cluster.replica.postgres.ctl("promote")
    scene.execute(EMIT.format("after", 1))
    scene.relay()
    scene.await_empty()
    received = scene.received()
    assert [one.key for one in received if one.key in ("published", "waiting", "after")] == ["published", "after"]
    assert len({one.message_id for one in received}) == known + 2


@asynchronous
def test_a_replica_refuses_to_emit_and_to_relay(scene: Stage, cluster: Cluster) -> None:
    """In the server's own words, which every driver knows; looking is permitted."""
    scene.execute(EMIT.format("waiting", 1))
    replica = databases.named(cluster.replica_dsn, urlsplit(scene.dsn).path[1:])
    cluster.await_replica()
    with psycopg.connect(replica, autocommit=True) as db:
        for call in ("emit('a', '1')", "claim_batch(gen_random_uuid())", "hello('a')", "cleanup()"):
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                db.execute(f"select outbox.{call}".encode())
        assert db.execute("select waiting from outbox.stats()").fetchone() == (1,)
        assert db.execute("select status from outbox.message_status").fetchall() == [("waiting",)]
    relay = scene.relay(pg=replica)
    assert guardian.wait_until(lambda: "target_session_attrs=read-write" in relay.log, 20), relay.log
    assert relay.process.poll() is None
    relay.assert_calm()
    scene.kill(relay)
