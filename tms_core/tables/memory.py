"""A store in memory, for tests and experiments; it is also the simplest implementation of the interface."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from threading import RLock
from typing import Any, Generic, TypeVar, cast

from tms_core.tables.base import (
    MessageColumns,
    MessageTable,
    MessageValue,
    MetadataTable,
    Origin,
    Page,
    PayloadTable,
    Projection,
    Store,
    TableName,
    TxCell,
    filter_cells,
)

T = TypeVar("T")
V = TypeVar("V")


class _Rows(Generic[V]):
    """The common part of message and payload table: rows by key; threads may share it."""

    def __init__(self, calls: Counter[str]) -> None:
        self._lock = RLock()
        self._calls = calls
        self._values: dict[bytes, V] = {}
        self._order: list[bytes] | None = []

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        self._calls[want.call] += 1
        page = self._page(start, stop, limit)
        if want.call == "rows" and want.max_bytes is not None:
            page = self._bounded(page, want.max_bytes)
        return cast(Page[T], self._project(want, page))

    def _project(self, want: Projection[T], page: Page[list[tuple[bytes, V]]]) -> Page[Any]:
        """Return the wanted part of the rows."""
        return page if want.part == "rows" else Page([key for key, _ in page.items], page.resume)

    def _bounded(self, page: Page[list[tuple[bytes, V]]], max_bytes: int) -> Page[list[tuple[bytes, V]]]:
        sizes = accumulate(len(self._payload(value) or b"") for _, value in page.items)
        full = next((number for number, size in enumerate(sizes, 1) if size >= max_bytes), len(page.items))
        return Page(page.items[:full], page.items[full - 1][0] + b"\x00") if full < len(page.items) else page

    @abstractmethod
    def _payload(self, value: V) -> bytes | None:
        """Return the payload of a row."""

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        self._calls["delete"] += 1
        with self._lock:
            for key in keys:
                if self._values.pop(key, None) is not None:
                    self._order = None

    def put(self, rows: Sequence[tuple[bytes, V]]) -> None:
        self._calls["put"] += 1
        with self._lock:
            self._values.update(rows)
            self._order = None

    def sync(self) -> None:
        self._calls["sync"] += 1

    def compact(self, start: bytes, stop: bytes) -> None:
        self._calls["compact"] += 1

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return sum(len(key) + len(repr(value)) for key, value in self._page(start, stop, len(self._values)).items)

    def _page(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, V]]]:
        with self._lock:
            if self._order is None:
                self._order = sorted(self._values)
            first = bisect_left(self._order, start)
            last = len(self._order) if stop is None else bisect_left(self._order, stop)
            keys = self._order[first : min(last, first + limit)]
            resume = keys[-1] + b"\x00" if first + limit < last else None
            return Page([(key, self._values[key]) for key in keys], resume)


class MemoryMessageTable(_Rows[MessageValue], MessageTable):
    """Message rows in memory."""

    name: TableName = "message"

    def _payload(self, value: MessageValue) -> bytes | None:
        return value.payload

    def _project(self, want: Projection[T], page: Page[list[tuple[bytes, MessageValue]]]) -> Page[Any]:
        if want.part == "columns":
            return Page(MessageColumns.of(page.items), page.resume)
        if want.part != "cells":
            return super()._project(want, page)
        transactional = [(key, value.pointer, value.payload is None) for key, value in page.items]
        cells = [TxCell(key, pointer, refers) for key, pointer, refers in transactional if pointer is not None]
        return filter_cells(Page(cells, page.resume), want.pointers)

    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        self._calls["invert"] += 1
        return [self._invert(cell) for cell in cells]

    def _invert(self, cell: TxCell) -> bool:
        with self._lock:
            value = self._values.get(cell.key)
            if value is None or value.pointer != cell.pointer:
                return False
            self._values[cell.key] = value._replace(pointer=-cell.pointer)
            return True


class MemoryPayloadTable(_Rows[bytes], PayloadTable):
    """Payload rows in memory."""

    name: TableName = "payload"

    def _payload(self, value: bytes) -> bytes:
        return value


class MemoryMetadataTable(MetadataTable):
    """Metadata rows in memory."""

    def __init__(self, calls: Counter[str]) -> None:
        self._lock = RLock()
        self._calls = calls
        self._values: dict[bytes, bytes] = {}

    def rows(self) -> list[tuple[bytes, bytes]]:
        self._calls["metadata"] += 1
        return sorted(self._values.items())

    def get(self, key: bytes) -> bytes | None:
        self._calls["get"] += 1
        return self._values.get(key)

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        self._calls["set"] += 1
        with self._lock:
            if self._values.get(key) != expected:
                return False
            self._values[key] = value
            return True


class MemoryStore(Store):
    """Three tables in the memory of the process.

    Args:
        identity: the result of :meth:`identity`.
    """

    def __init__(self, identity: str = "memory") -> None:
        self.calls = Counter()
        self.metadata = MemoryMetadataTable(self.calls)
        self.message = MemoryMessageTable(self.calls)
        self.payload = MemoryPayloadTable(self.calls)
        self._identity = identity

    def identity(self) -> str:
        return self._identity

    def lineage(self) -> Mapping[str, Any]:
        """Return no marks, because a store in memory is never restored from a backup."""
        return {}

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        """Return None, because a store in memory is never restored from a backup."""
        return None

    def close(self) -> None:
        """Do nothing, because no file is open."""
