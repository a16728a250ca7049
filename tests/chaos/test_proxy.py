"""The proxy itself: a fault that does not happen proves nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from chaos.proxy import Amqp, Plain, Postgres, Proxy


@pytest.fixture
def server() -> Iterator[tuple[str, list[socket.socket]]]:
    """Repeats what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def run(one: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                one.sendall(data)
        except OSError:
            return

    def accept() -> None:
        try:
            while True:
                accepted.append(listener.accept()[0])
                threading.Thread(target=run, args=(accepted[-1],), daemon=True).start()
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", accepted
    for one in [listener, *accepted]:
        one.close()


def connect(proxy: Proxy) -> socket.socket:
    port = int(proxy.url.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), 5)
    client.settimeout(1)
    return client


Server = tuple[str, list[socket.socket]]


def test_passes(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        client.sendall(b"x" * 200_000)
        got = b""
        while len(got) < 200_000:
            got += client.recv(65536)


def test_reset_is_a_reset(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


@pytest.mark.parametrize("up", [True, False])
def test_stall_keeps_and_release_delivers(server: Server, *, up: bool) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.stall(up=up, down=not up)
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.release()
        assert client.recv(1) == b"b"


def test_black_hole_says_nothing(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.blackhole()
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_half_open_and_half_closed(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client, connect(proxy) as other:
        for one in (client, other):
            one.sendall(b"a")
            assert one.recv(1) == b"a"
        proxy.half_open()
        time.sleep(0.2)
        client.sendall(b"b")  # nobody tells it
        with pytest.raises(TimeoutError):
            client.recv(1)
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.half_close()
        assert client.recv(1) == b""
        client.sendall(b"b")


def test_refuses_and_slows_down(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy:
        proxy.refusing = True
        with pytest.raises(ConnectionResetError), connect(proxy) as client:
            client.recv(1)
        proxy.refusing = False
        proxy.delay = 0.2
        with connect(proxy) as client:
            begun = time.monotonic()
            client.sendall(b"a")
            assert client.recv(1) == b"a"
            assert time.monotonic() - begun > 0.35


def test_cut_after_bytes(server: Server) -> None:
    with Proxy(server[0], Plain) as proxy, connect(proxy) as client:
        proxy.cut_after = 10
        client.sendall(b"a" * 4)
        assert client.recv(4) == b"aaaa"
        client.sendall(b"b" * 4)
        with pytest.raises(ConnectionResetError):
            client.recv(4) and client.recv(4)


def test_frames_are_counted_as_messages() -> None:
    """A publish is a method, a header and as many bodies as it takes; however the bytes are chopped."""

    def frame(kind: int, payload: bytes) -> bytes:
        return bytes([kind, 0, 1]) + len(payload).to_bytes(4) + payload + b"\xce"

    method = frame(1, (60).to_bytes(2) + (40).to_bytes(2) + b"rest")
    header = [frame(2, bytes(4) + size.to_bytes(8) + b"flags") for size in (0, 5)]
    bodies = frame(3, b"abc") + frame(3, b"de")
    stream = b"AMQP\0\0\x09\x01" + method + header[0] + method + header[1] + bodies + frame(8, b"")
    for size in (1, 7, len(stream)):
        amqp = Amqp()
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        packets = [packet for chunk in chunks for packet in amqp.split(up=True, data=chunk)]
        assert b"".join(packet.data for packet in packets) == stream
        kinds = ["protocol header", "publish begins", "publish", "publish begins", "content", "content", "publish"]
        assert [packet.kind for packet in packets] == [*kinds, "heartbeat"]


def test_lost_answer_is_committed(dsn: str) -> None:
    """And a lost statement is not."""
    with psycopg.connect(dsn, autocommit=True) as db, Proxy(dsn, Postgres) as proxy:
        db.execute("create table t (n integer)")
        answer = proxy.when("answer", text="values (2)", do="cut")
        statement = proxy.when("statement", text="values (3)", do="cut")
        with psycopg.connect(proxy.url, autocommit=True, prepare_threshold=None) as relay:
            relay.execute("insert into t values (%s), (1)", [0])
            with pytest.raises(psycopg.OperationalError):
                relay.execute("insert into t values (2)")
        with psycopg.connect(proxy.url, autocommit=True) as relay, pytest.raises(psycopg.OperationalError):
            relay.execute("insert into t values (3)")
        answer.wait()
        statement.wait()
        assert db.execute("select n from t order by n").fetchall() == [(0,), (1,), (2,)]
