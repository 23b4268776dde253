"""Fixtures of all tests of the janitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from janitor.state.sqlite.state import SqliteState
from tms_core.tables.memory import MemoryStore


@pytest.fixture
def state() -> Iterator[SqliteState]:
    """Return an empty state in memory."""
    with SqliteState.in_memory() as opened:
        yield opened


@pytest.fixture
def store() -> MemoryStore:
    """Return an empty store in memory."""
    return MemoryStore()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened
