"""What travels with a message without being passed: the chain of messages that led to it, and the current trace."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID, uuid4

_LONGEST = 100  # as in SQL: a longer chain loses its beginning

_chain: ContextVar[tuple[str, ...]] = ContextVar("outbox_tracking", default=())


def get_tracking_ids() -> tuple[str, ...]:
    """The chain that a message emitted now continues, oldest first; in a handler its own message is the last."""
    return _chain.get()


@contextmanager
def tracking(ids: Iterable[UUID | str] | None = None) -> Iterator[tuple[str, ...]]:
    """Messages emitted in this block continue a chain: the current one and a new id, or the ids given."""
    given = (*_chain.get(), uuid4()) if ids is None else ids
    chain = tuple(str(one if isinstance(one, UUID) else UUID(str(one))) for one in given)[-_LONGEST:]
    token = _chain.set(chain)
    try:
        yield chain
    finally:
        _chain.reset(token)


def trace_headers() -> dict[str, Any]:
    """W3C trace context and baggage of the current OpenTelemetry or Sentry trace; empty if neither is in use."""
    headers: dict[str, Any] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject  # noqa: PLC0415 - only if the application has loaded OpenTelemetry

        inject(headers)
    sentry = sys.modules.get("sentry_sdk")
    if sentry is not None and sentry.is_initialized():
        trace, baggage = sentry.get_traceparent(), sentry.get_baggage()
        if trace:
            trace_id, span_id, *sampled = trace.split("-")
            headers["sentry-trace"] = trace
            headers.setdefault("traceparent", f"00-{trace_id}-{span_id}-{'01' if sampled == ['1'] else '00'}")
        if baggage:
            headers["baggage"] = ",".join(filter(None, (headers.get("baggage"), baggage)))
    return headers


def log_headers() -> dict[str, Any]:
    """structlog's context variables as one header; empty if there are none."""
    contextvars = sys.modules.get("structlog.contextvars")
    context = contextvars.get_contextvars() if contextvars else {}
    return {"log_context": {name: _scalar(value) for name, value in context.items()}} if context else {}


def _scalar(value: Any) -> str | bool | int | None:
    return value if isinstance(value, str | bool | int | None) else str(value)
