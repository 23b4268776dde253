"""Fixtures of a store, a state and a clock for background counts."""

from __future__ import annotations

from typing import Any

import pytest

from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, NOW_MS, Topic, topic
from tms_core.clock import ManualClock
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide


class CountKit:
    """A store to count, with the state of the counts and a clock."""

    def __init__(self) -> None:
        self.store, self.side = MemoryStore(), MemorySide()
        self.state: State = SqliteState.in_memory()
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)

    def topic(self, name: str, *, ttl_seconds: int = 60, **given: Any) -> Topic:
        return topic(self.store, f"default:{name}", ttl_seconds=ttl_seconds, **given)


@pytest.fixture
def kit() -> CountKit:
    return CountKit()
