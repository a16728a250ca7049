"""What others may ask of a running process over HTTP: /metrics, /healthz, /readyz; and the liveness file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from outbox.errors import ConfigurationError
from outbox.metrics import Snapshot, render

logger = logging.getLogger(__name__)

# A loop that turns does so at least this often, also in an outage.
SILENT_MOST = 60.0
LAST_PORT = 65535
PATIENCE = 5.0
TOUCH_EVERY = 5.0

Look = Callable[[], Awaitable[Snapshot]]


def why_ill(snapshot: Snapshot, poll: float) -> str | None:
    """What does not turn; None: all is well."""
    if snapshot.get("missing"):
        return f"{snapshot['missing']} workers do not answer"
    for name, states in snapshot["databases"].items():
        if any(state["silent"] > SILENT_MOST + poll for state in states):
            return f"the loop of database {name} does not turn"
    return None


def readiness(snapshot: Snapshot) -> dict[str, Any]:
    def of(states: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "ready": all(state["ready"] for state in states),
            **{name: "up" if all(state[name] for state in states) else "down" for name in ("database", "broker")},
            **{name: moment(max(state[name] for state in states)) for name in ("last_claim", "last_sent")},
        }

    found = {name: of(states) for name, states in snapshot["databases"].items()}
    return {"ready": not snapshot.get("missing") and all(one["ready"] for one in found.values()), "databases": found}


def moment(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None


async def answer(path: str, look: Look, poll: float) -> tuple[HTTPStatus, str, str]:
    if path not in {"/metrics", "/healthz", "/readyz"}:
        return HTTPStatus.NOT_FOUND, "text/plain", "there are /metrics, /healthz and /readyz\n"
    snapshot = await look()
    if path == "/metrics":
        return HTTPStatus.OK, "text/plain; version=0.0.4", render(snapshot)
    if path == "/healthz":
        ill = why_ill(snapshot, poll)
        return HTTPStatus.SERVICE_UNAVAILABLE if ill else HTTPStatus.OK, "text/plain", f"{ill or 'ok'}\n"
    found = readiness(snapshot)
    status = HTTPStatus.OK if found["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
    return status, "application/json", json.dumps(found) + "\n"


def to_port(text: str) -> int:
    """Checked here: uvloop takes what is left of a number that is too large."""
    if not 0 <= int(text) <= LAST_PORT:
        raise ValueError(text)
    return int(text)


@contextlib.asynccontextmanager
async def serving(address: str, look: Look, poll: float) -> Any:
    """Answers at HOST:PORT while the block runs."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, _ = head.split("\r\n", 1)[0].split(" ", 2)
                if method in {"GET", "HEAD"}:
                    status, kind, text = await answer(target.partition("?")[0], look, poll)
                else:
                    status, kind, text = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "only GET\n"
                body = text.encode()
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}; charset=utf-8\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                writer.write(b"" if method == "HEAD" else body)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    try:
        server = await asyncio.start_server(serve, host.strip("[]") or None, to_port(port), limit=8192)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "write it as HOST:PORT"
        raise ConfigurationError(f"--http cannot listen at {address!r}: {reason}") from error
    async with server:
        logger.info("answering over HTTP", extra={"action": "http", "address": address})
        yield server


async def keep_file(path: str, look: Look, poll: float) -> None:
    """Touches the file while all is well: a probe that can only look at files takes its age."""
    while True:
        if why_ill(await look(), poll) is None:
            try:
                await asyncio.to_thread(Path(path).touch)
            except OSError as error:
                raise ConfigurationError(f"--liveness-file {path!r} cannot be written: {error.strerror}") from error
        await asyncio.sleep(TOUCH_EVERY)
