"""Broker and database restarted, killed and starved, on servers of our own."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import servers
from chaos.stage import LEASE, Stage

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

Fault = Callable[[servers.Servers], None]


def restart_broker(pair: servers.Servers) -> None:
    pair.rabbitmq.restart()


def kill_broker(pair: servers.Servers) -> None:
    pair.rabbitmq.kill()
    time.sleep(2)
    pair.rabbitmq.start()


def memory_alarm(pair: servers.Servers) -> None:
    pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0")
    time.sleep(LEASE * 1.3)
    pair.rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")


def disk_alarm(pair: servers.Servers) -> None:
    pair.rabbitmq.ctl("set_disk_free_limit", "100000GB")
    time.sleep(LEASE * 1.3)
    pair.rabbitmq.ctl("set_disk_free_limit", "50MB")


def restart_database(pair: servers.Servers) -> None:
    pair.postgres.restart()


def crash_database(pair: servers.Servers) -> None:
    pair.postgres.kill()
    time.sleep(1)
    pair.postgres.start()


def restart_both(pair: servers.Servers) -> None:
    pair.postgres.kill()
    pair.rabbitmq.kill()
    pair.rabbitmq.start()
    pair.postgres.start()


def suffer(own: Stage, pair: servers.Servers, fault: Fault, times: int = 1) -> None:
    if fault in (kill_broker, restart_both):
        own.await_registered()
    own.relay()
    for _ in own.rounds(times):
        own.note(f"{fault.__name__} begins")
        fault(pair)
        own.note(f"{fault.__name__} is over")
        own.unclean += 2 if fault is restart_both else 1
    own.finish()


def test_broker_killed(own: Stage, pair: servers.Servers) -> None:
    suffer(own, pair, kill_broker)


def test_memory_alarm(own: Stage, pair: servers.Servers) -> None:
    """Each round of a relay that reconnects would park another window in the broker."""
    suffer(own, pair, memory_alarm)


def test_database_crashes_under_lazy_emitters(own: Stage, pair: servers.Servers) -> None:
    """They do not wait for the disk, so the crash forgets commits; nothing that it forgets may have been published."""
    own.execute("alter system set wal_writer_delay = '10s'")
    own.execute("select pg_reload_conf()")
    own.relay()
    for _ in own.rounds(2, synchronous=False):
        own.note("crash")
        crash_database(pair)
        own.unclean += 1
    own.finish()
    own.execute("alter system reset all")


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [restart_broker, disk_alarm, restart_database, crash_database, restart_both], ids=lambda f: f.__name__
)
def test_server(own: Stage, pair: servers.Servers, fault: Fault) -> None:
    suffer(own, pair, fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", [memory_alarm, kill_broker, crash_database], ids=lambda f: f.__name__)
def test_server_with_two_relays(own: Stage, pair: servers.Servers, fault: Fault) -> None:
    own.relay()
    own.unclean += 1  # a window for each
    suffer(own, pair, fault)


@pytest.mark.long
def test_database_restarted_again_and_again(own: Stage, pair: servers.Servers) -> None:
    """The pause between attempts is short again after each success."""
    suffer(own, pair, restart_database, times=4)
