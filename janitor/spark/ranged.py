"""A part of a store that was cut out by keys: the rows of one task, beside the metadata of all.

Whoever walks a part asks for keys as if it were a whole store. Nothing outside is ever returned, so a walk needs to
know nothing of cuts, which may lie anywhere: each verdict is on one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from janitor.ranges import Range
from tms_core.tables.base import KeyTable, MessageTable, MessageValue, Page, PayloadTable, Store, TxCell

K = TypeVar("K", bound=KeyTable)
T = TypeVar("T")

#: No key at all.
NOTHING = Range(b"\x00", b"\x00")


class RangedStore(Store):
    """Some rows of a store. Closing it does nothing: the whole store is closed.

    Args:
        store: the whole, or a part of it.
        messages, payloads: which keys; an empty stop is the table's end.
    """

    def __init__(self, store: Store, messages: Range, payloads: Range) -> None:
        self._store = store
        self.calls = store.calls
        self.span = (messages.start, messages.stop or None)
        self.metadata = store.metadata
        self.message = RangedMessages(store.message, messages)
        self.payload = RangedPayloads(store.payload, payloads)

    def identity(self) -> str:
        return self._store.identity()

    def close(self) -> None:
        """Nothing of its own is open."""


class _Ranged(Generic[K]):
    def __init__(self, table: K, reach: Range) -> None:
        self._table = table
        self._reach = reach
        self.weighs_compaction = table.weighs_compaction
        self.keys_per_call = table.keys_per_call

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        first, last = self._within(start, stop)
        return self._table.keys(first, last, limit) if _holds(first, last) else Page([], None)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        first, last = self._within(start, stop)
        return self._table.estimate_bytes(first, last) if _holds(first, last) else 0

    def delete(self, keys: Sequence[bytes]) -> None:
        self._table.delete(keys)

    def sync(self) -> None:
        self._table.sync()

    def compact(self, start: bytes, stop: bytes) -> None:
        self._table.compact(start, stop)

    def _within(self, start: bytes, stop: bytes | None) -> tuple[bytes, bytes | None]:
        ends = [end for end in (stop, self._reach.stop or None) if end is not None]
        return max(start, self._reach.start), min(ends, default=None)


class RangedMessages(_Ranged[MessageTable], MessageTable):
    """Some rows of a message table."""

    name = "message"

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        first, last = self._within(start, stop)
        return self._table.cells(first, last, limit) if _holds(first, last) else Page([], None)

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        first, last = self._within(start, stop)
        return self._table.rows(first, last, limit, most_bytes) if _holds(first, last) else Page([], None)

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        return self._table.invert(cells)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._table.put(rows)


class RangedPayloads(_Ranged[PayloadTable], PayloadTable):
    """Some rows of a payload table."""

    name = "payload"

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        first, last = self._within(start, stop)
        return self._table.rows(first, last, limit, most_bytes) if _holds(first, last) else Page([], None)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._table.put(rows)


def _holds(start: bytes, stop: bytes | None) -> bool:
    return stop is None or start < stop
