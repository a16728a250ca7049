"""What the worker needs on the broker: the same as data, declared, imported, and found by who may not make it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from worker.conftest import Broker, StartProcess, eventually, running, worker_on

from outbox import Listener, Worker, listen
from outbox.errors import ConfigurationError
from outbox.topology import as_definitions, as_table, as_terraform, delay_name, topology


async def handle(_body: Any) -> None:
    raise ValueError


def listeners() -> list[Listener]:
    return [Listener("user.*", handle, "users"), Listener("#", handle, "all", retry_delays=(0.5, 10))]


def test_derived_from_the_listeners() -> None:
    found = topology("outbox", listeners(), (1, 10))
    assert [(one.name, one.kind) for one in found.exchanges] == [
        ("outbox", "topic"),
        ("outbox.dlx", "direct"),
        ("outbox.delay_500ms", "fanout"),
        ("outbox.delay_1s", "fanout"),
        ("outbox.delay_10s", "fanout"),
    ]
    careful: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    assert {one.name: one.arguments for one in found.queues} == {
        "outbox.delay_500ms": careful | {"x-message-ttl": 500, "x-dead-letter-exchange": ""},
        "outbox.delay_1s": careful | {"x-message-ttl": 1000, "x-dead-letter-exchange": ""},
        "outbox.delay_10s": careful | {"x-message-ttl": 10000, "x-dead-letter-exchange": ""},
        **{
            name: careful
            | {
                "x-dead-letter-exchange": "outbox.dlx",
                "x-dead-letter-routing-key": name,
                "x-delivery-limit": 20,
            }
            for name in ("users", "all")
        },
        "users.dlq": {"x-queue-type": "quorum"},
        "all.dlq": {"x-queue-type": "quorum"},
    }
    assert {(one.exchange, one.queue, one.routing_key) for one in found.bindings} == {
        ("outbox", "users", "user.*"),
        ("outbox", "all", "#"),
        ("outbox.dlx", "users.dlq", "users"),
        ("outbox.dlx", "all.dlq", "all"),
        *((name, name, "") for name in ("outbox.delay_500ms", "outbox.delay_1s", "outbox.delay_10s")),
    }
    assert found.rights == {
        "configure": "^$",
        "write": r"^(outbox\.dlx|outbox\.delay_500ms|outbox\.delay_1s|outbox\.delay_10s)$",
        "read": "^(users|all)$",
    }


def test_classic_queues_have_no_limit_and_no_strategy() -> None:
    found = topology("outbox", listeners(), (1,), queue_type="classic")
    names = {name for one in found.queues for name in one.arguments}
    assert names == {"x-queue-type", "x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key"}


def test_a_delay_without_listeners_that_use_it_is_not_made() -> None:
    found = topology("outbox", [Listener("a", handle, "q", retry_delays=())], (1, 10))
    assert [one.name for one in found.queues] == ["q.dlq", "q"]


@pytest.mark.parametrize(("seconds", "text"), [(1, "1s"), (300, "300s"), (0.05, "50ms"), (1.5, "1500ms"), (2.0, "2s")])
def test_names_of_delays(seconds: float, text: str) -> None:
    assert delay_name("outbox", seconds) == f"outbox.delay_{text}"


async def test_declared_on_the_broker(broker: Broker, queue_type: str) -> None:
    """All that a worker needs and nothing else, with the delays it has unless told otherwise."""
    async with running(worker_on(broker, Listener("user.*", handle, "users"), queue_type=queue_type)):
        pass
    delays = {f"outbox.delay_{seconds}s": {"x-message-ttl": seconds * 1000} for seconds in (1, 10, 60, 300)}
    exchanges = {one["name"]: one for one in broker.management("GET", "/exchanges/{vhost}")}
    kinds = {name: one["type"] for name, one in exchanges.items() if name and not name.startswith("amq.")}
    assert kinds == {"outbox": "topic", "outbox.dlx": "direct", **dict.fromkeys(delays, "fanout")}
    queues = {one["name"]: one for one in broker.management("GET", "/queues/{vhost}")}
    safe = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"} if queue_type == "quorum" else {}
    limit = {"x-delivery-limit": 20} if queue_type == "quorum" else {}
    last = {"x-dead-letter-exchange": "outbox.dlx", "x-dead-letter-routing-key": "users"}
    assert {name: one["arguments"] for name, one in queues.items()} == {
        "users": {"x-queue-type": queue_type, **safe, **last, **limit},
        "users.dlq": {"x-queue-type": queue_type},
        **{
            name: {"x-queue-type": queue_type, "x-dead-letter-exchange": "", **safe, **ttl}
            for name, ttl in delays.items()
        },
    }
    assert {one["type"] for one in queues.values()} == {queue_type}
    assert all(made["durable"] for name, made in (exchanges | queues).items() if name)
    bindings = broker.management("GET", "/bindings/{vhost}")
    assert {(one["source"], one["destination"], one["routing_key"]) for one in bindings if one["source"]} == {
        ("outbox", "users", "user.*"),
        ("outbox.dlx", "users.dlq", "users"),
        *((name, name, "") for name in delays),
    }


@pytest.fixture
def restricted(broker: Broker) -> Iterator[Broker]:
    """A user who may configure nothing, and has the rights that the topology lists."""
    name = f"restricted_{secrets.token_hex(4)}"
    rights = topology("outbox", listeners(), (0.1,)).rights
    broker.management("PUT", f"/users/{name}", {"password": "p", "tags": ""})
    broker.management("PUT", f"/permissions/{{vhost}}/{name}", rights)
    at = urlsplit(broker.url)
    yield Broker(broker.management, at._replace(netloc=f"{name}:p@{at.hostname}:{at.port}").geturl())
    broker.management("DELETE", f"/users/{name}")


async def test_definitions_imported_and_a_restricted_user(broker: Broker, restricted: Broker, queue_type: str) -> None:
    attempts: list[str] = []

    @listen("user.*", queue="users")
    async def fails(_body: Any, routing_key: str) -> None:
        attempts.append(routing_key)
        raise ValueError

    chosen = [fails, listeners()[1]]
    found = topology("outbox", chosen, (0.1,), queue_type=queue_type)
    definitions = json.loads(as_definitions(found, broker.management.vhost))  # type: ignore[attr-defined]
    broker.management("POST", "/definitions", definitions)
    await broker.publish("user.created")
    async with running(worker_on(restricted, *chosen, retry_delays=(0.1,), declare=False, queue_type=queue_type)):
        await broker.dead("users")
    assert attempts == ["user.created"] * 2
    async with running(worker_on(broker, *chosen, retry_delays=(0.1,), queue_type=queue_type)):
        pass  # what was imported is what would be declared


async def test_all_that_is_missing_is_named(restricted: Broker) -> None:
    with pytest.raises(ConfigurationError) as raised:
        await asyncio.wait_for(worker_on(restricted, *listeners(), retry_delays=(0.1,), declare=False).run(), 20)
    assert str(raised.value) == (
        "the broker lacks exchange 'outbox', exchange 'outbox.dlx', exchange 'outbox.delay_100ms',"
        " exchange 'outbox.delay_500ms', exchange 'outbox.delay_10s', queue 'outbox.delay_100ms',"
        " queue 'outbox.delay_500ms', queue 'outbox.delay_10s', queue 'users.dlq', queue 'users', queue 'all.dlq',"
        " queue 'all': `outbox topology` writes down what is needed; or pass declare=True to have it made"
    )
    with pytest.raises(ConfigurationError, match=r"exchange 'outbox' is refused.*pass declare=False"):
        await asyncio.wait_for(worker_on(restricted, *listeners(), retry_delays=(0.1,)).run(), 20)


APP = """
from outbox import Worker, listen
@listen("user.*", queue="users", retry_delays=(1,))
async def handle(user): ...
worker = Worker("amqp://localhost/", listeners=[handle])
def make():
    return worker
number = 1
"""


@pytest.mark.parametrize(("form", "words"), [("table", "x-"), ("definitions", ""), ("terraform", "")])
async def test_the_command_prints_it(start: StartProcess, tmp_path: Path, form: str, words: str) -> None:
    (tmp_path / "app.py").write_text(APP)
    one = start("topology", "app:worker", "--format", form, "--vhost", "v", OUTBOX_AMQP_URL="")
    assert await one.ended() == 0, one.log
    given = topology("outbox", Worker("amqp://x/", listeners=[Listener("user.*", handle, "users", (1,))]).listeners, ())
    wanted = {
        "table": as_table(given),
        "definitions": as_definitions(given, "v"),
        "terraform": as_terraform(given, "v"),
    }
    assert one.log == wanted[form] + "\n"
    assert "users.dlq" in one.log
    assert words == "" or words not in one.log


def test_terraform_is_balanced_and_names_each_resource_once() -> None:
    text = as_terraform(topology("out${x}", listeners(), (1,)), "/")
    assert text.count("{") == text.count("}")
    names = [line for line in text.splitlines() if line.startswith("resource")]
    assert len(names) == len(set(names)) == 5 + 7 + 7
    assert "$${x}" in text
    assert '"x-message-ttl" = 1000' in text


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("app", "'app' does not name a worker: write it as package.module:name"),
        ("nowhere:worker", "there is no module 'nowhere': run this in the folder that holds it"),
        ("app:nobody", "app has no nobody"),
        ("app:number", "app:number is no worker, nor a function that returns one"),
        ("broken:worker", "No module named 'missing_library'"),
    ],
)
async def test_an_app_that_is_not_there(start: StartProcess, tmp_path: Path, app: str, words: str) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "broken.py").write_text("import missing_library\n")
    one = start("topology", app)
    assert await one.ended() == (3 if app.startswith("broken") else 2)
    assert words in one.log


async def test_a_function_that_makes_the_worker(start: StartProcess, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    one = start("topology", "app:make")
    await eventually(lambda: one.process.poll() is not None, "the end")
    assert "users.dlq" in one.log
