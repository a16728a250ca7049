"""The event loop: uvloop where it is installed (the extra `speed`), else that of the standard library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
try:
    import uvloop

    new_loop = uvloop.new_event_loop
except ImportError:
    pass


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
