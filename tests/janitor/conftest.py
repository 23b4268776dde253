"""What tests of the janitor start from."""

from __future__ import annotations

import pytest

from tms_core.tables.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    """Return an empty store in memory."""
    return MemoryStore()
