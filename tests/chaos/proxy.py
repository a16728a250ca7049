"""A TCP proxy that understands enough of AMQP and of PostgreSQL's protocol to fail at a chosen moment.

    with Proxy(amqp_url, Amqp) as proxy:
        rule = proxy.when("publish", nth=100, do="cut", after=True)
        ... start the relay with proxy.url ...
        rule.wait()

It runs in a thread of its own. Kinds of packets are those that Amqp and Postgres below name. What is passed on is
always whole packets, so that something may be injected between two of them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, cast
from urllib.parse import urlsplit

T = TypeVar("T")

Do = Literal["drop", "hold", "cut"]
PATIENCE = 30.0


@dataclass(slots=True)
class Packet:
    up: bool  # from the client to the server
    kind: str
    data: bytes
    text: str = ""  # the statement it carries or answers


@dataclass
class Rule:
    """At the nth packet of a kind: drop it, hold it and all that follows it, or cut the connection."""

    kind: str
    do: Do
    text: str = ""
    nth: int = 1
    after: bool = False  # the packet itself still passes
    forever: bool = False
    seen: int = 0
    reached: threading.Event = field(default_factory=threading.Event)

    def fits(self, packet: Packet) -> bool:
        return packet.kind == self.kind and self.text in packet.text

    def fires(self, packet: Packet) -> bool:
        """Counts the packets that fit; says whether it is this one's turn."""
        if not self.fits(packet) or (self.reached.is_set() and not self.forever):
            return False
        self.seen += 1
        if self.seen < self.nth:
            return False
        self.reached.set()
        return True

    def wait(self, timeout: float = PATIENCE) -> None:
        if not self.reached.wait(timeout):
            raise AssertionError(f"saw {self.seen} packets {self.kind} {self.text}, and waits for {self.nth}")


class Plain:
    """Bytes as they come."""

    def split(self, *, up: bool, data: bytes) -> Iterator[Packet]:
        yield Packet(up, "bytes", data)

    def last_words(self) -> bytes:
        """What the server said before it went, and is not a whole packet."""
        return b""


class Amqp(Plain):
    """Frames. The end of a published message is a "publish", so that whoever counts them counts whole ones."""

    NAMES: dict[tuple[int, int], str] = {  # noqa: RUF012 - a constant
        (10, 60): "blocked",
        (10, 61): "unblocked",
        (20, 40): "channel close",
        (60, 40): "publish begins",
        (60, 50): "return",
        (60, 80): "ack",
        (60, 120): "nack",
    }

    def __init__(self) -> None:
        self._rest = {True: b"", False: b""}
        self._body = {True: 0, False: 0}

    def split(self, *, up: bool, data: bytes) -> Iterator[Packet]:
        data = self._rest[up] + data
        at = 0
        while len(data) - at >= 8:
            size = 8 if data[at : at + 4] == b"AMQP" else 8 + int(struct.unpack_from(">I", data, at + 3)[0])
            if len(data) - at < size:
                break
            frame = data[at : at + size]
            at += size
            yield Packet(up, self._kind(frame, up=up), frame)
        self._rest[up] = data[at:]

    def _kind(self, frame: bytes, *, up: bool) -> str:
        if frame[0] == 1:
            return self.NAMES.get(struct.unpack_from(">HH", frame, 7), "method")
        if frame[0] == 2:
            self._body[up] = int(struct.unpack_from(">Q", frame, 11)[0])
        elif frame[0] == 3:
            self._body[up] -= len(frame) - 8
        else:
            return "heartbeat" if frame[0] == 8 else "protocol header"
        return "content" if self._body[up] > 0 else "publish" if up else "delivery"

    @staticmethod
    def blocked(reason: str) -> bytes:
        """The frame by which a broker says that it reads no more."""
        payload = struct.pack(">HHB", 10, 60, len(reason)) + reason.encode()
        return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"

    @staticmethod
    def unblocked() -> bytes:
        return struct.pack(">BHIHH", 1, 0, 4, 10, 61) + b"\xce"


class Postgres(Plain):
    """Messages. "statement" is what carries a statement's text, "answer" the end of what the server says to it.

    The server commits before it says that it is ready again, and what it says before that is held with it: whoever cuts
    at an answer loses all of it, and the transaction is committed.
    """

    def __init__(self) -> None:
        self._rest = {True: b"", False: b""}
        self._started = False
        self._single = 0  # answers of one byte that are due: those to a request for encryption
        self._prepared: dict[bytes, str] = {}
        self._open: deque[str] = deque()
        self._answer: list[bytes] = []

    def split(self, *, up: bool, data: bytes) -> Iterator[Packet]:
        data = self._rest[up] + data
        at = 0
        while at < len(data):
            if not up and self._single:
                self._single -= 1
                size = 1
            else:
                head = 0 if up and not self._started else 1
                if len(data) - at < 4 + head:
                    break
                size = head + int(struct.unpack_from(">I", data, at + head)[0])
            if len(data) - at < size:
                break
            message = data[at : at + size]
            at += size
            yield from self._from_client(message) if up else self._from_server(message)
        self._rest[up] = data[at:]

    def _from_client(self, message: bytes) -> Iterator[Packet]:
        kind = "message"
        text = ""
        if not self._started:
            code = struct.unpack_from(">I", message, 4)[0]
            if code in {80877103, 80877104}:
                self._single += 1
            else:
                self._started = True
        else:
            text = self._text(message)
            if text:
                self._open.append(text)
                kind = "statement"
        yield Packet(up=True, kind=kind, data=message, text=text)

    def _text(self, message: bytes) -> str:
        """Of the statement that is carried out with this message; nothing if that comes with another."""
        first, second = [*message[5:].split(b"\0"), b""][:2]
        if message[:1] == b"Q":  # the text alone
            return first.decode(errors="replace")
        if message[:1] == b"P":  # a name, the text, types of parameters
            self._prepared[first] = second.decode(errors="replace")
            return "" if first else self._prepared[first]
        if message[:1] == b"B" and second:  # a portal, the name
            return self._prepared[second]
        return ""

    def _from_server(self, message: bytes) -> Iterator[Packet]:
        if not self._open:
            yield Packet(up=False, kind="message", data=message)
            return
        self._answer.append(message)
        if message[:1] == b"Z":
            text = self._open.popleft()
            self._open.clear()  # a driver that sends several statements gets one answer to all
            answer, self._answer = b"".join(self._answer), []
            yield Packet(up=False, kind="answer", data=answer, text=text)

    def last_words(self) -> bytes:
        return b"".join(self._answer)


class End(asyncio.Protocol):
    """One of the two sockets of a link; `up` is what it reads: true at the client's."""

    transport: asyncio.Transport

    def __init__(self, link: Link, *, up: bool) -> None:
        self._link, self._up = link, up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._link.made(self, up=self._up)

    def data_received(self, data: bytes) -> None:
        self._link.received(data, up=self._up)

    def eof_received(self) -> bool:
        return self._link.ended(up=self._up)

    def connection_lost(self, _: Exception | None) -> None:
        self._link.lost(up=self._up)

    def pause_writing(self) -> None:
        self._link.throttle(up=not self._up, on=True)

    def resume_writing(self) -> None:
        self._link.throttle(up=not self._up, on=False)

    def reset(self) -> None:
        """Closes without a farewell: the other one gets a RST."""
        if not self.transport.is_closing():
            own: socket.socket = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._protocol = proxy.protocol()
        self._ends: dict[bool, End] = {}
        self._held: dict[bool, list[bytes] | None] = {True: None, False: None}
        self._late: dict[bool, deque[bytes]] = {True: deque(), False: deque()}
        self._finished: set[bool] = set()
        self._passed = 0
        self.black = False
        for up in proxy.stalled:
            self.hold(up=up)

    def made(self, end: End, *, up: bool) -> None:
        self._ends[up] = end
        if up:
            if self._proxy.refusing:
                end.reset()
                return
            end.transport.pause_reading()
            self._proxy.links.append(self)
            self._proxy.spawn(self._connect(end))
        else:
            self._ends[True].transport.resume_reading()

    async def _connect(self, client: End) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: End(self, up=False), *self._proxy.target)
        except OSError:
            client.reset()

    def received(self, data: bytes, *, up: bool) -> None:
        if self.black:
            return
        for packet in self._protocol.split(up=up, data=data):
            if not self._apply(packet):
                return

    def _apply(self, packet: Packet) -> bool:
        """Passes a packet on as the rules say; false when there is no connection any more."""
        rule = next((rule for rule in list(self._proxy.rules) if rule.fires(packet)), None)
        if rule is None:
            self.send(packet.data, up=packet.up)
        else:
            self._proxy.log(f"{rule.do} {'after' if rule.after else 'at'} {packet.kind} {rule.text} number {rule.seen}")
            if rule.do == "hold" and not rule.after:
                self.hold(up=packet.up)
            if rule.after or rule.do == "hold":
                self.send(packet.data, up=packet.up)
            if rule.do == "hold" and rule.after:
                self.hold(up=packet.up)
            if rule.do == "cut":
                self.cut()
                return False
        self._passed += len(packet.data)
        if self._proxy.cut_after is not None and self._passed >= self._proxy.cut_after:
            self._proxy.log(f"cut after {self._passed} bytes")
            self._proxy.cut_after = None
            self.cut()
            return False
        return True

    def send(self, data: bytes, *, up: bool) -> None:
        held = self._held[up]
        if held is not None:
            held.append(data)
        elif self._proxy.delay or self._late[up]:
            self._late[up].append(data)
            asyncio.get_running_loop().call_later(self._proxy.delay, self._send_late, up)
        else:
            self._write(data, up=up)

    def _send_late(self, up: bool) -> None:  # noqa: FBT001 - called by the loop
        self._write(self._late[up].popleft(), up=up)

    def _write(self, data: bytes, *, up: bool) -> None:
        end = self._ends.get(not up)
        if end is not None and not end.transport.is_closing() and not self.black and up not in self._finished:
            end.transport.write(data)

    def hold(self, *, up: bool) -> None:
        if self._held[up] is None:
            self._held[up] = []

    def release(self) -> None:
        for up, held in self._held.items():
            self._held[up] = None
            for data in held or []:
                self.send(data, up=up)

    def throttle(self, *, up: bool, on: bool) -> None:
        end = self._ends.get(up)
        if end is not None and not end.transport.is_closing():
            (end.transport.pause_reading if on else end.transport.resume_reading)()

    def ended(self, *, up: bool) -> bool:
        """One of them has no more to say: passed on, unless a fault is under way."""
        if self.black or self._held[up] is not None:
            return True
        if not up:
            self._write(self._protocol.last_words(), up=False)
        self._finish(up=up)
        return True

    def _finish(self, *, up: bool) -> None:
        end = self._ends.get(not up)
        if end is not None and not end.transport.is_closing() and up not in self._finished:
            self._finished.add(up)
            end.transport.write_eof()

    def lost(self, *, up: bool) -> None:
        """One of them is gone. What it said before still reaches the other, what was held does not."""
        other = self._ends.get(not up)
        if other is not None and not (self.black and not up):
            other.transport.close()
        if up and self in self._proxy.links:
            self._proxy.links.remove(self)

    def cut(self) -> None:
        """The client gets a RST; what the server was sent it still reads."""
        self._held = {True: None, False: None}
        for up, end in self._ends.items():
            if up:
                end.reset()
            else:
                end.transport.close()

    def reset(self) -> None:
        for end in self._ends.values():
            end.reset()

    def half_close(self) -> None:
        """The client is told that no more will come; what it says still reaches the server."""
        self._finish(up=False)

    def half_open(self) -> None:
        """The server is gone, and nobody tells the client."""
        self.black = True
        if False in self._ends:
            self._ends[False].reset()


class Proxy:
    """Stands between a client and the server of a URL; `url` leads to it."""

    def __init__(
        self,
        url: str,
        protocol: Callable[[], Plain] = Plain,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        at = urlsplit(url)
        assert at.hostname, url
        assert at.port, url
        self.target = (at.hostname, at.port)
        self.protocol = protocol
        self.log = log
        self.rules: list[Rule] = []
        self.links: list[Link] = []
        self.stalled: set[bool] = set()
        self.refusing = False
        self.delay = 0.0
        self.cut_after: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        listener = socket.create_server(("127.0.0.1", 0))
        login = at.netloc.rpartition("@")[0]
        self.url = at._replace(netloc=f"{login}@127.0.0.1:{listener.getsockname()[1]}").geturl()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._do(self._listen(listener))

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: End(Link(self), up=True), sock=listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for link in list(self.links):
            link.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0.05)  # aborted transports tell their protocols in the next round

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def _each(self, work: Callable[[Link], None], what: str) -> None:
        async def run() -> None:
            for link in list(self.links):
                work(link)

        self.log(f"{what}, {len(self.links)} connections")
        self._do(run())

    # --- faults

    def when(
        self, kind: str, *, do: Do, text: str = "", nth: int = 1, after: bool = False, forever: bool = False
    ) -> Rule:
        rule = Rule(kind, do, text, nth, after, forever)
        self.rules.append(rule)
        return rule

    def forget(self) -> None:
        """No more rules; what is held stays held until release()."""
        self.rules.clear()

    def reset(self) -> None:
        self._each(Link.reset, "reset")

    def half_close(self) -> None:
        self._each(Link.half_close, "half close")

    def half_open(self) -> None:
        self._each(Link.half_open, "half open")

    def blackhole(self) -> None:
        """The connections stay open, and nothing passes through them ever again."""

        def blacken(link: Link) -> None:
            link.black = True

        self._each(blacken, "black hole")

    def stall(self, *, up: bool = False, down: bool = False) -> None:
        """Holds everything in one direction or both, also in new connections, until release()."""
        ways = {way for way, wanted in ((True, up), (False, down)) if wanted}
        self.stalled |= ways

        def hold(link: Link) -> None:
            for way in ways:
                link.hold(up=way)

        self._each(hold, f"stall {'up ' * up}{'down' * down}")

    def release(self) -> None:
        self.stalled.clear()
        self._each(Link.release, "release")

    def inject(self, data: bytes) -> None:
        """Says something to the clients that the server did not say."""

        def say(link: Link) -> None:
            link.send(data, up=False)

        self._each(say, "inject")
