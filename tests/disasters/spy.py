"""LevelDB under observation: its open iterators, its unsynced writes, and events between two of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tms_core.tables.leveldb.library import plyvel

_DB = plyvel.DB


def _ignore(_: bytes) -> None:
    """Ignore the event."""


class LevelDBSpy:
    """An observer of every database opened after its creation.

    Attributes:
        open_iterators: the number of open iterators.
        unsynced_batches: the number of batches without ``sync``.
        after_get: called after each read of one row.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open_iterators = 0
        self.iterators = 0
        self.unsynced_batches = 0
        self.after_get: Callable[[bytes], None] = _ignore
        monkeypatch.setattr(plyvel, "DB", partial(_Database, self))


class _Database:
    def __init__(self, spy: LevelDBSpy, *arguments: Any, **options: Any) -> None:
        self._spy = spy
        self._db = _DB(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def get(self, key: bytes, **options: Any) -> bytes | None:
        value = self._db.get(key, **options)
        self._spy.after_get(key)
        return value

    def write_batch(self, **options: Any) -> Any:
        self._spy.unsynced_batches += not options.get("sync", False)
        return self._db.write_batch(**options)

    def iterator(self, **options: Any) -> _Iterator:
        return _Iterator(self._spy, self._db.iterator(**options))


class _Iterator:
    def __init__(self, spy: LevelDBSpy, iterator: Any) -> None:
        self._spy = spy
        self._iterator = iterator
        self._open = True
        spy.open_iterators += 1
        spy.iterators += 1

    def __enter__(self) -> _Iterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        found = next(self._iterator)
        if isinstance(found, tuple):
            self._spy.after_get(found[0])
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def close(self) -> None:
        self._spy.open_iterators -= self._open
        self._open = False
        self._iterator.close()
