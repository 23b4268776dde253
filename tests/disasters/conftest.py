"""The safety invariants, each tested by the disaster that it prevents, in a file named after it.

`docs/reference/safety-invariants.md` defines them.

Invariants of several processes (S10, S12) are tested with several janitors on one store in one process. Then a test can
stop each janitor at any call of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tms_core.tables.base import Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore

MakeStore = Callable[[], Store]


@pytest.fixture(params=["memory", "leveldb"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    made: list[Store] = []
    folders = (tmp_path / f"messaging{number}" for number in count())

    def make() -> Store:
        made.append(MemoryStore() if request.param == "memory" else LevelDBStore(next(folders), create=True))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()
