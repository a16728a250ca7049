"""The fixture `outbox`; pytest finds it by itself."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.testing import Outbox


@pytest.fixture
def outbox_connection() -> Any:
    """To be overridden by the application's conftest.py."""
    raise pytest.UsageError(
        "define a fixture outbox_connection that returns the connection or session your test emits with"
    )


@pytest.fixture
def outbox(outbox_connection: Any) -> Outbox:
    """What the test emitted: assert_emitted(), assert_nothing_emitted(), messages(), drain()."""
    return Outbox(outbox_connection)
