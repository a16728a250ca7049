"""What a relay tells others while it works. Nothing they do stops it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol

from outbox.store import ClaimedMessage

logger = logging.getLogger(__name__)

SAY_EVERY = 60.0


class Failure(NamedTuple):
    """A message that the broker did not take, or that the database put aside, and why."""

    message: ClaimedMessage
    error: str
    reason: str | None


class Hooks(Protocol):
    """The calls there are. A hook is an object that has some of them; they run in the relay's loop, so it is quick."""

    def sent(self, messages: Sequence[ClaimedMessage]) -> None:
        """The broker confirmed them, and they are marked."""

    def failed(self, failures: Sequence[Failure]) -> None:
        """They are tried again later, or are dead."""

    def dead_lettered(self, failures: Sequence[Failure]) -> None:
        """They are not tried again: some of the failed, and what the database put aside when this relay claimed.

        The reason is that of outbox.dead_letter. What was put aside is expired or killed_relay; its error is empty,
        or that of an earlier try. Nothing is told twice, and nothing if the database is away at that moment.
        """

    def lease_lost(self, phase: str, count: int) -> None:
        """So many messages were no longer ours when they were to be published, or marked as sent or failed."""

    def settled(self, messages: Sequence[ClaimedMessage], seconds: float) -> None:
        """A batch is through; so long after its claim."""


class Teller:
    def __init__(self, hooks: Sequence[object]) -> None:
        self._hooks = hooks
        self._said: dict[tuple[int, str], float] = {}

    def __bool__(self) -> bool:
        """Whether anybody wants to know which messages died: that is asked of the database."""
        return any(hasattr(hook, "dead_lettered") for hook in self._hooks)

    def __call__(self, what: str, *arguments: Any) -> None:
        for hook in self._hooks:
            call = getattr(hook, what, None)
            if call is None:
                continue
            try:
                call(*arguments)
            except Exception:
                if monotonic() - self._said.get((id(hook), what), -SAY_EVERY) >= SAY_EVERY:
                    self._said[id(hook), what] = monotonic()
                    logger.exception("a hook failed", extra={"action": "hook", "hook": what})
