"""How long to wait for a server that is away: longer each time, and not everybody equally long."""

from __future__ import annotations

import random
from time import monotonic

FIRST, LAST = 0.2, 10.0


class Backoff:
    """The pauses between tries of one server, until one succeeds."""

    def __init__(self, last: float | None = None) -> None:
        self._last = LAST if last is None else last
        self.reset()

    def reset(self) -> None:
        """After a success."""
        self._at, self._seconds = 0.0, FIRST / 2

    @property
    def is_on(self) -> bool:
        """Whether the next try is still to come."""
        return monotonic() < self._at

    def pause(self) -> float:
        """Seconds until the next try. Whoever asks before that time shares it."""
        if not self.is_on:
            self._seconds = min(self._seconds * 2, self._last)
            # Spread out, so that those which lost one server together do not come back together.
            self._at = monotonic() + self._seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it
        return self._at - monotonic()
