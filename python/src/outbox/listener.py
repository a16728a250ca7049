"""Who handles what: a binding key, a queue and a function, whose arguments say what it wants to be called with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any, get_type_hints

from outbox.decode import Decode, decoder
from outbox.errors import ConfigurationError

# What the library lets through as the name of an exchange or a queue.
NAME = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]+")
SHORT_STRING = 255  # bytes, AMQP's limit for a name
DEAD_SUFFIX = ".dlq"
SHORTEST_DELAY, LONGEST_DELAY = 0.001, 30 * 86400.0
# What a listener is given when it has an argument of this name. Any other argument is for the body.
KNOWN = frozenset({"routing_key", "message", "tracking_ids", "queue_name", "attempt_count", "tx"})


class Reject(Exception):  # noqa: N818 - a verdict, and the name that users of other libraries know
    """Raised by a listener: this message is not to be tried again, it goes to the dead letters."""


@dataclass(eq=False)
class Listener:
    """Calls a function for each message whose routing key matches; calling the listener calls the function."""

    binding_key: str
    callback: Callable[..., Any]
    queue: str = ""
    retry_delays: Sequence[float] | None = None
    _: KW_ONLY
    once: bool = False
    timeout: float | None = None
    is_async: bool = field(init=False, repr=False)
    wants: frozenset[str] = field(init=False, repr=False)
    body_argument: str = field(init=False, repr=False)
    decode: Decode = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.callback):
            raise ConfigurationError(
                f"a listener's callback must be a function, not {type(self.callback).__qualname__}"
            )
        called = self.callback if hasattr(self.callback, "__qualname__") else type(self.callback)
        self.queue = self.queue or f"{called.__module__}.{called.__qualname__}".replace(".<locals>", "")
        if not 1 <= len(self.binding_key.encode()) <= SHORT_STRING:
            raise self._wrong("its binding key must have 1 to 255 bytes")
        most = SHORT_STRING - len(DEAD_SUFFIX)
        if len(self.queue) > most or self.queue.startswith("amq.") or not NAME.fullmatch(self.queue):
            raise self._wrong(
                f"a queue's name has at most {most} letters, digits and -_.:@#,/+ or spaces, all of ASCII, and does not"
                " begin with amq.: pass queue=..."
            )
        if self.retry_delays is not None:
            self.retry_delays = delays(self.retry_delays)
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise self._wrong("timeout must be a number of seconds")
        self._read_signature()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.callback(*args, **kwargs)

    def _read_signature(self) -> None:
        function = self.callback
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - asked for what it is, not whether it is there
        )
        parameters = inspect.signature(function).parameters.values()
        for one in parameters:
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise self._wrong(f"its argument {one} cannot be filled by name")
        self.wants = frozenset(one.name for one in parameters if one.name in KNOWN)
        bodies = [one.name for one in parameters if one.name not in KNOWN]
        if len(bodies) != 1:
            found = f"it has {', '.join(bodies)}" if bodies else "it has none"
            others = ", ".join(sorted(KNOWN))
            raise self._wrong(f"it must have exactly one argument for the body, {found}; those known are {others}")
        if self.once and "tx" not in self.wants:
            raise self._wrong("with once=True it must have an argument tx, the transaction that holds its effects")
        if not self.once and "tx" in self.wants:
            raise self._wrong("its argument tx needs once=True")
        self.body_argument = bodies[0]
        try:
            hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
            self.decode = decoder(hints.get(self.body_argument, Any))
        except (TypeError, NameError) as error:
            raise self._wrong(f"the annotation of {self.body_argument} cannot be used: {error}") from error

    def _wrong(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"listener {self.queue}: {why}")


def listen(
    binding_key: str,
    *,
    queue: str = "",
    retry_delays: Sequence[float] | None = None,
    once: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[..., Any]], Listener]:
    """Makes a listener of the function below."""

    def decorate(callback: Callable[..., Any]) -> Listener:
        return Listener(binding_key, callback, queue, retry_delays, once=once, timeout=timeout)

    return decorate


def delays(given: Sequence[Any]) -> tuple[float, ...]:
    """Seconds, to the millisecond."""
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float) or not isfinite(one):
            raise ConfigurationError("retry_delays must be numbers of seconds")
        if not SHORTEST_DELAY <= one <= LONGEST_DELAY:
            raise ConfigurationError("each of retry_delays must lie between 1 ms and 30 days")
    return tuple(round(one, 3) for one in given)


def matches(binding_key: str, routing_key: str) -> bool:
    """As a topic exchange does: * is one word, # any number of them."""
    pattern, words = (key.split(".") if key else [] for key in (binding_key, routing_key))
    reached = {0}  # how many words the pattern so far can stand for
    for part in pattern:
        if part == "#":
            reached = set(range(min(reached), len(words) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(words) and part in ("*", words[at])}
    return len(words) in reached
