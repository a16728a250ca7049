"""The commands of an operator, as programs: what they print, what they ask, how they end."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable

import pytest

from databases import Roles, as_user
from harness import (
    PATIENCE,
    Db,
    Finished,
    Queue,
    StartRelay,
    emit,
    environment_with,
    on_terminal,
    run_outbox_here,
    waiting,
)

Run = Callable[..., Finished]


@pytest.fixture
def run(dsn: str) -> Run:
    return lambda *arguments, **more: run_outbox_here(arguments, environment_with(**{"OUTBOX_DSN": dsn, **more}))


@pytest.fixture
def type_in(dsn: str) -> Callable[..., tuple[int, str]]:
    return lambda *arguments, keys="": on_terminal(arguments, os.environ | {"OUTBOX_DSN": dsn}, keys)


@pytest.fixture
def dead(db: Db) -> Callable[[str], int]:
    """Makes a dead letter, of the routing key given, that died an hour ago."""

    def make(routing_key: str) -> int:
        made, _ = emit(db, routing_key, {"order": 1}, key=f"customer {routing_key}", headers='{"tenant": "north"}')
        token = secrets.token_hex(16)
        db.execute("select outbox.claim_batch(%s::uuid)", [token])
        db.execute("select outbox.mark_failed(%s::uuid, %s, '{no such queue}', '{rejected}')", [token, [made]])
        db.execute("update outbox.dead_letter set dead_at = dead_at - interval '1 hour' where id = %s", [made])
        return made

    return make


def dead_count(db: Db) -> int:
    row = db.execute("select count(*) from outbox.dead_letter").fetchone()
    assert row is not None
    return int(row[0])


def test_emit_arrives(run: Run, queue: Queue, start_relay: StartRelay) -> None:
    start_relay()
    done = run("emit", "order.created", '{"order": 1}', "--key", "customer 7", "--header", "tenant=north")
    assert (done.status, done.output) == (0, "1\n")
    (message,) = queue.receive(1)
    assert json.loads(message.body) == {"order": 1}
    assert message.properties["headers"]["tenant"] == "north"
    assert run("emit", "order.created", "plain ✓", "--text").status == 0
    (message,) = queue.receive(1)
    assert (message.body, message.properties["content_type"]) == ("plain ✓".encode(), "text/plain")


def test_emit_later(run: Run, db: Db) -> None:
    assert run("emit", "order.created", "--delay", "3600", "--expires-in", "7200", "--dedup-key", "a").output == "1\n"
    assert run("emit", "order.created", "--delay", "3600", "--dedup-key", "a").output == "1\n"
    row = db.execute(
        "select due_at > now() + interval '59 min', expires_at > now() + interval '1 hour' from outbox.message"
    ).fetchone()
    assert row == (True, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "{"], "BODY is not JSON"),
        (["a", "--header", "tenant"], "--header is written as name=value"),
        (["a", "--header", "CC=other"], "headers contain a reserved name"),
        (["a" * 256], "routing_key must have 1 to 255 bytes"),
    ],
)
def test_emit_refuses(run: Run, db: Db, arguments: list[str], says: str) -> None:
    done = run("emit", *arguments)
    assert done.status == 2
    assert says in done.errors[0], done.log
    assert waiting(db) == 0


def test_stats(run: Run, type_in: Callable[..., tuple[int, str]], db: Db, dead: Callable[[str], int]) -> None:
    dead("order.lost")
    for _ in range(3):
        emit(db)
    done = run("stats", "--format", "json")
    assert done.status == 0
    found = json.loads(done.output)
    assert (found["waiting"], found["dead"], found["exact"], found["relays"]) == (3, 1, True, 0)
    assert 0 < found["oldest_age"] < PATIENCE
    assert found["top_failing"] == [{"routing_key": "order.lost", "retrying": 0, "dead": 1}]
    piped = dict(line.split("\t") for line in run("stats").output.splitlines())
    assert (piped["waiting"], piped["mean_time_to_send"], piped["exact"]) == ("3", "-", "yes")
    status, shown = type_in("stats")
    assert status == 0
    assert "waiting              3\n" in shown
    assert "failing order.lost   0 retrying, 1 dead\n" in shown


def test_stats_again_and_again(dsn: str, db: Db) -> None:
    command = [sys.executable, "-m", "outbox", "stats", "--watch", "0.1", "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OUTBOX_DSN": dsn}) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["waiting"] == 0
        emit(db)
        while json.loads(child.stdout.readline())["waiting"] != 1:
            pass
        child.send_signal(2)
        child.stdout.close()
        assert child.wait(PATIENCE) == 130


def test_dead_list_and_show(run: Run, type_in: Callable[..., tuple[int, str]], dead: Callable[[str], int]) -> None:
    assert run("dead", "list").output == ""
    assert type_in("dead", "list") == (0, "no dead letters\n")
    first, second = dead("order.lost"), dead("order.\x1b[31mred")
    lines = run("dead", "list").output.splitlines()
    assert [line.split("\t")[0] for line in lines] == [str(second), str(first)]
    assert lines[1].split("\t")[2:] == ["rejected", "1", "order.lost", "customer order.lost", "no such queue"]
    assert run("dead", "list", "--routing-key", "order.lost", "--limit", "1").output.count("\n") == 1
    assert run("dead", "list", "--reason", "expired").output == ""
    assert [json.loads(line)["id"] for line in run("dead", "list", "--format", "json").output.splitlines()] == [
        second,
        first,
    ]
    status, shown = type_in("dead", "list")
    assert status == 0
    assert shown.startswith("id  dead at")
    assert "\x1b" not in shown
    assert "order.\\x1b[31mred" in shown
    shown = run("dead", "show", str(first)).output
    assert 'headers\t{"tenant": "north"}' in shown
    assert shown.endswith('\n\n{"order": 1}\n')
    assert json.loads(run("dead", "show", str(first), "--format", "json").output)["body"] == '{"order": 1}'
    done = run("dead", "show", "99")
    assert done.status == 1
    assert done.errors == ["outbox: there is no dead letter 99: `outbox dead list` shows those there are"]


def test_dead_show_of_bytes(run: Run, db: Db, dead: Callable[[str], int]) -> None:
    made = dead("order.lost")
    db.execute("update outbox.dead_letter set body = '\\xff00'")
    assert run("dead", "show", str(made)).output.endswith("\n\n/wA=\n")
    assert json.loads(run("dead", "show", str(made), "--format", "json").output)["body_base64"] == "/wA="


def test_requeue(run: Run, type_in: Callable[..., tuple[int, str]], db: Db, dead: Callable[[str], int]) -> None:
    ids = [dead(f"order.{number}") for number in range(4)]
    assert run("dead", "requeue", str(ids[0]), "--dry-run").output == "would send 1 dead letters again\n"
    assert dead_count(db) == 4
    assert run("dead", "requeue", str(ids[0])).output == "sent 1 dead letters again\n"
    done = run("dead", "requeue", str(ids[0]), str(ids[1]))
    assert (done.status, done.output) == (1, "sent 1 dead letters again\n")
    assert "1 of those ids are no dead letters" in done.errors[0]
    assert waiting(db) == 2
    for wrong in ([], [str(ids[2]), "--all"], [str(ids[2]), "--reason", "rejected"]):
        assert "by their ids, or pass --all" in run("dead", "requeue", *wrong).errors[0]
    done = run("dead", "requeue", "--all")
    assert (done.status, dead_count(db)) == (2, 2)
    assert "nobody is there to ask: pass --yes" in done.errors[0]
    status, shown = type_in("dead", "requeue", "--all", keys="n\n")
    assert (status, dead_count(db)) == (0, 2)
    assert "Send 2 dead letters of database" in shown
    assert "nothing was done" in shown
    assert type_in("dead", "requeue", "--all", "--routing-key", "order.2", keys="y\n")[0] == 0
    assert run("dead", "requeue", "--all", "--yes").output == "sent 1 dead letters again\n"
    assert (dead_count(db), waiting(db)) == (0, 4)


def test_purge(run: Run, type_in: Callable[..., tuple[int, str]], db: Db, dead: Callable[[str], int]) -> None:
    dead("order.lost")
    assert run("dead", "purge", "--older-than", "2 hours", "--yes").output == "removed 0 dead letters\n"
    assert run("dead", "purge", "--older-than", "0", "--dry-run").output == "would remove 1 dead letters\n"
    done = run("dead", "purge", "--older-than", "0")
    assert (done.status, dead_count(db)) == (2, 1)
    assert type_in("dead", "purge", "--older-than", "30 min", keys="no\n")[0] == 0
    assert dead_count(db) == 1
    done = run("dead", "purge", "--older-than", "soon", "--yes")
    assert done.status == 2
    assert 'invalid input syntax for type interval: "soon"' in done.errors[0]
    assert type_in("dead", "purge", "--older-than", "30 min", keys="y\n")[0] == 0
    assert dead_count(db) == 0


def test_cleanup(run: Run, db: Db, dead: Callable[[str], int]) -> None:
    dead("order.lost")
    db.execute("select outbox.configure('dead_retention', '1 minute')")
    assert run("cleanup", "--dry-run").output == (
        "would remove 1 dead letters, 0 dedup keys, 0 archive days, 0 archive rows, 0 inbox rows\n"
    )
    assert dead_count(db) == 1
    db.execute(
        "insert into outbox.dedup (dedup_key, id, created_at)"
        " select n::text, n, now() - interval '1 day' from generate_series(1, 20001) as n"
    )
    assert (
        run("cleanup").output
        == "removed 1 dead letters, 20001 dedup keys, 0 archive days, 0 archive rows, 0 inbox rows\n"
    )


def test_pause_and_resume(run: Run, db: Db, queue: Queue, start_relay: StartRelay) -> None:
    relay = start_relay()
    relay.await_log("relay ready")
    assert run("pause").status == 0
    emit(db)
    emit(db)
    assert waiting(db) == 2
    assert queue.take() == []
    assert run("resume").status == 0
    assert len(queue.receive(2)) == 2


@pytest.mark.parametrize(
    ("command", "part"),
    [(["emit", "a"], "emit"), (["stats"], "monitor"), (["dead", "list"], "admin"), (["pause"], "admin")],
)
def test_rights(run: Run, db: Db, dsn: str, roles: Roles, command: list[str], part: str) -> None:  # noqa: PLR0917 - fixtures
    role = roles.make()
    done = run(*command, OUTBOX_DSN=as_user(dsn, role))
    assert done.status == 2
    assert f"role '{role}' may not do this: permission denied" in done.errors[0]
    hint = done.errors[0].partition("`")[2].rstrip("`")
    assert hint == f"select outbox.grant_{part}('{role}')"
    db.execute(hint.encode())
    assert run(*command, OUTBOX_DSN=as_user(dsn, role)).status == 0


def test_which_database(run: Run) -> None:
    assert run("stats", OUTBOX_DSN="").errors == ["outbox: no database given: pass --dsn or set OUTBOX_DSN"]
    two = run("stats", OUTBOX_DSN="dbname=a\n# a comment\n\ndbname=b")
    assert two.errors == ["outbox: 2 databases given: this is about one, name it with --dsn"]
    away = run("stats", "--dsn", "postgresql://127.0.0.1:1/none")
    assert away.status == 1
    assert "Connection refused" in away.errors[0]


def test_reader_that_has_seen_enough(dsn: str) -> None:
    command = f"{sys.executable} -m outbox stats --watch 0.05 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env=os.environ | {"OUTBOX_DSN": dsn}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("waiting\t")
    assert (done.returncode, done.stderr) == (1, "")
