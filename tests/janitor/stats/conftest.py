"""A store, a state and a clock, for what is counted in the background."""

from __future__ import annotations

import pytest

from janitor.state.base import State
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, NOW_MS
from tms_core.clock import ManualClock
from tms_core.tables.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def state() -> State:
    return SqliteState.in_memory()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS, running_ms=DAY)
