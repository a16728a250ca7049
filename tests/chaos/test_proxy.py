"""The proxy itself: a fault that does not happen proves nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from chaos.proxy import Amqp, Plain, Postgres, Proxy
from harness import eventually


class Server:
    """Repeats what it hears."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self.lost = threading.Semaphore(0)  # connections, each by a reset
        self._accepted: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._accepted.append(self._listener.accept()[0])
                threading.Thread(target=self._serve, args=(self._accepted[-1],), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                self.heard += data
                one.sendall(data)
        except ConnectionResetError:
            self.lost.release()
        except OSError:  # closed below
            return

    def close(self) -> None:
        for one in [self._listener, *self._accepted]:
            one.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as running:
        yield running


def connect(proxy: Proxy) -> socket.socket:
    port = int(proxy.url.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), 5)
    client.settimeout(1)
    return client


def test_passes(server: Server) -> None:
    said = bytes(n % 251 for n in range(200_000))
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
        client.sendall(said)
        got = b""
        while len(got) < len(said) and (data := client.recv(65536)):
            got += data
    assert got == said


def test_reset_is_a_reset(server: Server) -> None:
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


@pytest.mark.parametrize("up", [True, False])
def test_stall_keeps_and_release_delivers(server: Server, *, up: bool) -> None:
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.stall(up=up, down=not up)
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.release()
        assert client.recv(1) == b"b"


def test_black_hole_says_nothing(server: Server) -> None:
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.blackhole()
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert server.heard == b"a"


def test_half_open_and_half_closed(server: Server) -> None:
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client, connect(proxy) as other:
        for one in (client, other):
            one.sendall(b"a")
            assert one.recv(1) == b"a"
        proxy.half_open()
        for _ in range(2):
            assert server.lost.acquire(timeout=5)
        client.sendall(b"b")  # nobody tells it
        with pytest.raises(TimeoutError):
            client.recv(1)
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        proxy.half_close()
        assert client.recv(1) == b""
        client.sendall(b"c")
        eventually(lambda: server.heard.endswith(b"c"), "what the client says")


def test_refuses_and_slows_down(server: Server) -> None:
    with Proxy(server.url, Plain) as proxy:
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
    with Proxy(server.url, Plain) as proxy, connect(proxy) as client:
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
