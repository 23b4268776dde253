"""Those rows of a store that lie in some ranges of keys, beside the metadata of all: what one task scans, or a driver.

A scan asks for keys as if it were a whole store. Nothing outside is ever returned, so a scan needs to know
nothing of cuts, which may lie anywhere: each decision is on one row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from tms_core.tables.base import (
    KeyRange,
    KeyReads,
    KeyTable,
    MessageReads,
    MessageTable,
    MessageValue,
    Page,
    PayloadReads,
    PayloadTable,
    Reads,
    Store,
    TxCell,
)

K = TypeVar("K", bound=KeyReads)
M = TypeVar("M", bound=MessageReads)
P = TypeVar("P", bound=PayloadReads)
W = TypeVar("W", bound=KeyTable)
T = TypeVar("T")

#: No key at all.
NOTHING = KeyRange(b"\x00", b"\x00")


class RangedReads(Reads):
    """Some rows of a store. Closing it does nothing: the whole store is closed.

    Args:
        store: the whole, or a part of it.
        messages, payloads: which keys: ranges in their order, apart from one another.
    """

    def __init__(self, store: Reads, messages: Sequence[KeyRange], payloads: Sequence[KeyRange]) -> None:
        self._store = store
        self.calls = store.calls
        self.span = KeyRange(messages[0].start, messages[-1].stop) if messages else NOTHING
        self.metadata = store.metadata
        self.message = RangedMessageReads(store.message, messages)
        self.payload = RangedPayloadReads(store.payload, payloads)

    def identity(self) -> str:
        return self._store.identity()

    def lineage(self) -> Mapping[str, Any]:
        return self._store.lineage()

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        return self._store.restored_since(known)

    def close(self) -> None:
        """Nothing of its own is open."""


class RangedStore(RangedReads, Store):
    """Some rows of a store, to be written too; the arguments are those of :class:`RangedReads`."""

    def __init__(self, store: Store, messages: Sequence[KeyRange], payloads: Sequence[KeyRange]) -> None:
        super().__init__(store, messages, payloads)
        self.metadata = store.metadata
        self.message = RangedMessages(store.message, messages)
        self.payload = RangedPayloads(store.payload, payloads)


class _Ranged(Generic[K]):
    def __init__(self, table: K, reaches: Sequence[KeyRange]) -> None:
        self._table = table
        self._reaches = reaches
        self._starts = [reach.start for reach in reaches]
        self.keys_per_call = table.keys_per_call

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        return self._page(self._table.keys, start, stop, limit)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return sum(self._table.estimate_bytes(*reach) for reach in self._within(start, stop))

    def _page(
        self, read: Callable[[bytes, bytes | None, int], Page[T]], start: bytes, stop: bytes | None, limit: int
    ) -> Page[T]:
        """The rows of the first range that has some."""
        for first, last in self._within(start, stop):
            page = read(first, last, limit)
            if page.resume is not None:
                return page
            if page.items:
                return Page(page.items, None if last == stop else last)
        return Page([], None)

    def _within(self, start: bytes, stop: bytes | None) -> Iterator[KeyRange]:
        """What of the ranges lies between two keys."""
        at = max(0, bisect_right(self._starts, start) - 1)
        for reach in islice(self._reaches, at, None):
            if stop is not None and stop <= reach.start:
                return
            first, ends = max(start, reach.start), [end for end in (stop, reach.stop) if end is not None]
            last = min(ends, default=None)
            if last is None or first < last:
                yield KeyRange(first, last)


class _Written(_Ranged[W]):
    def __init__(self, table: W, reaches: Sequence[KeyRange]) -> None:
        super().__init__(table, reaches)
        self.weighs_compaction = table.weighs_compaction

    def delete(self, keys: Sequence[bytes]) -> None:
        self._table.delete(keys)

    def sync(self) -> None:
        self._table.sync()

    def compact(self, start: bytes, stop: bytes) -> None:
        self._table.compact(start, stop)


class RangedMessageReads(_Ranged[M], MessageReads):
    """Some rows of a message table."""

    name = "message"

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        return self._page(self._table.cells, start, stop, limit)

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        return self._page(partial(self._table.rows, most_bytes=most_bytes), start, stop, limit)


class RangedMessages(RangedMessageReads[MessageTable], _Written[MessageTable], MessageTable):
    """Some rows of a message table, to be written too."""

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        return self._table.invert(cells)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._table.put(rows)


class RangedPayloadReads(_Ranged[P], PayloadReads):
    """Some rows of a payload table."""

    name = "payload"

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        return self._page(partial(self._table.rows, most_bytes=most_bytes), start, stop, limit)


class RangedPayloads(RangedPayloadReads[PayloadTable], _Written[PayloadTable], PayloadTable):
    """Some rows of a payload table, to be written too."""

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._table.put(rows)
