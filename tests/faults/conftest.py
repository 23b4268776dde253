"""Fixtures of tests with faulty disks, snapshots, clocks and processes, and with unrecognized rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tms_core.tables.base import Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore


@pytest.fixture(params=["memory", "leveldb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with MemoryStore() if request.param == "memory" else LevelDBStore(tmp_path / "messaging", create=True) as made:
        yield made
