"""A store in memory that is divided by salt like HBase, for several threads."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any, TypeVar

from tms_core.rowkey import salt
from tms_core.tables.base import KeyRange, KeyReads, KeyTable, MessageTable, Origin, Page, Projection, Store, TxCell
from tms_core.tables.memory import MemoryStore
from tms_core.tables.wrapped import Hook, WrappedMessageTable, WrappedPayloadTable

T = TypeVar("T")

BUCKETS = 4


class _Salt(Hook):
    """One salt's rows of a table; a page holds fewer rows than were read, as every page may."""

    def __init__(self, number: int, lock: RLock) -> None:
        self._salt = bytes([number])
        self._lock = lock

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        with self._lock:
            page: Page[Any] = table.read(want, start, stop, limit)
        return page._replace(items=[item for item in page.items if self._is_mine(item)])

    def estimate_bytes(self, table: KeyReads, start: bytes, stop: bytes | None) -> int:
        return 0

    def delete(self, table: KeyTable, keys: Sequence[bytes], origin: Origin | None) -> None:
        assert all(map(self._is_mine, keys))
        with self._lock:
            table.delete(keys, origin)

    def invert(self, table: MessageTable, cells: Sequence[TxCell], origin: Origin | None) -> list[bool]:
        assert all(map(self._is_mine, cells))
        with self._lock:
            return table.invert(cells, origin)

    def _is_mine(self, item: Any) -> bool:
        return salt(item if isinstance(item, bytes) else item[0], BUCKETS) == self._salt


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
        hook = _Salt(number, self._lock)
        part.message = WrappedMessageTable(self.message, hook)
        part.payload = WrappedPayloadTable(self.payload, hook)
        part.message.keys_per_call = part.payload.keys_per_call = 100
        return part
