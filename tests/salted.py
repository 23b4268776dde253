"""A store in memory that is cut into parts by salt, as one in HBase is, and may be walked by several threads."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any, TypeVar

from tms_core.rowkey import salt
from tms_core.tables.base import KeyRange, MessageValue, Page, Store, TxCell
from tms_core.tables.memory import MemoryMessageTable, MemoryPayloadTable, MemoryStore

T = TypeVar("T")

BUCKETS = 4


class _Part:
    """One salt's rows of a table; a page holds fewer rows than were read, as every page may."""

    keys_per_call = 100

    def __init__(self, whole: Any, number: int, lock: RLock) -> None:
        self._whole = whole
        self._salt = bytes([number])
        self._lock = lock

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        with self._lock:
            page: Page[bytes] = self._whole.keys(start, stop, limit)
        return Page([key for key in page.items if self._is_mine(key)], page.resume)

    def delete(self, keys: Sequence[bytes]) -> None:
        assert all(self._is_mine(key) for key in keys)
        with self._lock:
            self._whole.delete(keys)

    def sync(self) -> None:
        self._whole.sync()

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return 0

    def compact(self, start: bytes, stop: bytes) -> None:
        self._whole.compact(start, stop)

    def _is_mine(self, key: bytes) -> bool:
        return salt(key, BUCKETS) == self._salt


class _Messages(_Part, MemoryMessageTable):
    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        with self._lock:
            page: Page[tuple[bytes, MessageValue]] = self._whole.rows(start, stop, limit, most_bytes)
        return Page([(key, value) for key, value in page.items if self._is_mine(key)], page.resume)

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        with self._lock:
            page: Page[TxCell] = self._whole.cells(start, stop, limit)
        return Page([cell for cell in page.items if self._is_mine(cell.key)], page.resume)

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        assert all(self._is_mine(cell.key) for cell in cells)
        with self._lock:
            found: list[bool] = self._whole.invert(cells)
        return found


class _Payloads(_Part, MemoryPayloadTable):
    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        with self._lock:
            page: Page[tuple[bytes, bytes]] = self._whole.rows(start, stop, limit, most_bytes)
        return Page([(key, value) for key, value in page.items if self._is_mine(key)], page.resume)


class SaltedStore(MemoryStore):
    """A store in memory with ``BUCKETS`` parts."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()

    def parts(self) -> Sequence[Store]:
        return [self._part(number) for number in range(BUCKETS)]

    def _part(self, number: int) -> Store:
        part = MemoryStore()
        part.span = KeyRange(bytes([number]), bytes([number + 1]))
        part.metadata = self.metadata
        part.message = _Messages(self.message, number, self._lock)
        part.payload = _Payloads(self.payload, number, self._lock)
        return part
