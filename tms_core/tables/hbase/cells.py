"""CDAP's cells in HBase: reads and writes of the three tables, by keys without salts.

``docs/reference/formats/tables.md`` describes the cells byte by byte.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any, TypeVar, cast

from tms_core.errors import StoreError, TooLarge
from tms_core.rowkey import salt
from tms_core.tables.base import (
    UNREADABLE,
    Calls,
    KeyTable,
    MessageColumns,
    MessageTable,
    MessageValue,
    MetadataTable,
    Origin,
    Page,
    PayloadTable,
    Projection,
    TableName,
    TxCell,
    filter_cells,
)
from tms_core.tables.hbase.rows import KEYS, POINTERS, ROWS, HBaseRows, Query, Row, batches
from tms_core.tables.hbase.salts import Buckets, SaltedRows, Salts
from tms_core.tables.hbase.schema import (
    METADATA_COLUMN,
    PAYLOAD_COLUMN,
    PAYLOAD_TABLE_COLUMN,
    POINTER_COLUMN,
)
from tms_core.tables.hbase.thrift import RAISE_CELL_LIMIT

T = TypeVar("T")

_POINTER_BYTES = 8
#: The size of a cell without its value: row key, column, lengths.
_KEY_BYTES = 1024
#: The metadata rows of a page.
_METADATA_ROWS = 1000


class CellLimit:
    """The size limit of a value.

    Args:
        max_cell_bytes: HBase's limit, which includes the key.
    """

    def __init__(self, max_cell_bytes: int) -> None:
        self.max_value_bytes = max_cell_bytes - _KEY_BYTES

    def lower(self, size: int) -> None:
        """Lower the limit below the size of a value that HBase has rejected."""
        self.max_value_bytes = min(self.max_value_bytes, size - 1)


class HBaseTable(KeyTable):
    """The common part of message table and payload table."""

    weighs_compaction = True
    #: A page takes three round trips, about 1 ms to a near server, and 100,000 keys arrive in a second.
    keys_per_call = 100

    def __init__(self, salts: Salts, calls: Calls, buckets: Buckets, limit: CellLimit) -> None:
        self._salts = salts
        self._calls = calls
        self._buckets = buckets
        self._limit = limit

    @property
    def max_value_bytes(self) -> int:
        return self._limit.max_value_bytes

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        self._calls.count(want.call)
        page = self._salts.page(start, stop, limit, _query(want))
        items = self._project(want, page.items)
        if want.call == "rows":
            self._calls.count(UNREADABLE, len(page.items.keys) - len(items))
        return cast(Page[T], page._replace(items=items, rows_read=len(page.items.keys)))

    @abstractmethod
    def _project(self, want: Projection[T], found: SaltedRows) -> Any:
        """Return the wanted part of the readable rows."""

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        """Delete rows. The deletion is durable on return.

        Raises:
            StoreError: a row still exists after all attempts; or as any call.
        """
        self._calls.count("delete")
        self._salts.delete(keys, origin)

    def sync(self) -> None:
        """Do nothing, because a write is durable when HBase acknowledges it."""
        self._calls.count("sync")

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """Return 0, because Thrift has no call for the size."""
        return 0

    def compact(self, start: bytes, stop: bytes) -> None:
        """Request a major compaction of the range's regions with enough deleted rows, including earlier deletes.

        HBase compacts whole regions in the background. A region is a bucket, so this also rewrites rows of other
        topics.
        """
        self._calls.count("compact")
        self._salts.rows.compact(self._salts.ranges(start, stop))

    def _put(self, rows: Iterable[tuple[bytes, dict[bytes, bytes | None]]], values: Iterable[bytes | None]) -> None:
        self._calls.count("put")
        buckets = self._buckets.check()
        try:
            self._salts.rows.put((salt(key, buckets) + key, cells) for key, cells in rows)
        except StoreError as error:
            # If only a later part was too large, it is the cause. A repeated write would store the first part again.
            if isinstance(error, TooLarge) or isinstance(error.__cause__, TooLarge):
                self._limit.lower(max(len(value or b"") for value in values))
            raise

    def _too_large(self, size: int, limit: int) -> TooLarge:
        return TooLarge(
            f"A message has {size} bytes, and HBase accepts {limit} (hbase.client.keyvalue.maxsize, less its key).",
            RAISE_CELL_LIMIT,
        )


class HBaseMessageTable(HBaseTable, MessageTable):
    """The message table."""

    name: TableName = "message"

    def __init__(self, salts: Salts, calls: Calls, buckets: Buckets, limit: CellLimit, threads: Executor) -> None:
        super().__init__(salts, calls, buckets, limit)
        self._threads = threads

    def _project(self, want: Projection[T], found: SaltedRows) -> Any:
        if want.part == "keys":
            return found.keys
        if want.part == "cells":
            pointers = [(key, _pointer(row)) for key, row in zip(*found, strict=True)]
            # `refers` is True, because the payload column was not read.
            cells = [TxCell(key, pointer, True) for key, pointer in pointers if pointer is not None]
            return filter_cells(Page(cells, None), want.pointers).items
        rows = [(key, value) for key, row in zip(*found, strict=True) if (value := _message(row))]
        return rows if want.part == "rows" else MessageColumns.of(rows)

    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        """Invert pointers as in all stores, over all connections at once; invert the rows of a key under all salts."""
        self._calls.count("invert")
        places = self._salts.places([cell.key for cell in cells], origin)
        changes = [
            (row, _pack_pointer(cell.pointer), _pack_pointer(-cell.pointer))
            for cell, rows in zip(cells, places, strict=True)
            for row in rows
        ]
        share = -(-len(changes) // self._salts.rows.pool.connections) or 1
        shares = self._threads.map(self._replace, batches(changes, share))
        done = iter([one for some in shares for one in some])
        return [any(list(islice(done, len(rows)))) for rows in places]

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._put(((key, _cells(value)) for key, value in rows), (value.payload for _, value in rows))

    def _replace(self, changes: list[tuple[bytes, bytes, bytes]]) -> list[bool]:
        """Replace pointers; keep further bytes of a cell, which CDAP does not read."""
        rows = self._salts.rows
        done = rows.replace(POINTER_COLUMN, changes)
        unchanged = [change for change, made in zip(changes, done, strict=True) if not made]
        values = rows.values([row for row, _, _ in unchanged], POINTER_COLUMN)
        longer = {
            row: (row, value, new + value[_POINTER_BYTES:])
            for row, old, new in unchanged
            if len(value := values.get(row, b"")) > _POINTER_BYTES and value.startswith(old)
        }
        made_longer = dict(zip(longer, rows.replace(POINTER_COLUMN, list(longer.values())), strict=True))
        return [made or made_longer.get(row, False) for made, (row, _, _) in zip(done, changes, strict=True)]


class HBasePayloadTable(HBaseTable, PayloadTable):
    """The payload table."""

    name: TableName = "payload"

    def _project(self, want: Projection[T], found: SaltedRows) -> Any:
        if want.part == "keys":
            return found.keys
        cells = [(key, row.columns.get(PAYLOAD_TABLE_COLUMN)) for key, row in zip(*found, strict=True)]
        return [(key, cell.value) for key, cell in cells if cell is not None]

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._put(((key, {PAYLOAD_TABLE_COLUMN: payload}) for key, payload in rows), (payload for _, payload in rows))


class HBaseMetadataTable(MetadataTable):
    """The metadata table, whose rows have no salt."""

    def __init__(self, rows: HBaseRows, calls: Calls) -> None:
        self._rows = rows
        self._calls = calls

    def rows(self) -> list[tuple[bytes, bytes]]:
        self._calls.count("metadata")
        found: list[Row] = []
        start, ended = b"", False
        while not ended:
            rows, ended = self._rows.fetch(start, None, _METADATA_ROWS, ROWS)
            found += rows
            start = rows[-1].row + b"\x00" if rows else start
        return [(row.row, value) for row in found if (value := _metadata(row)) is not None]

    def get(self, key: bytes) -> bytes | None:
        self._calls.count("get")
        return self._value(key)

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        """Write a row by compare-and-set, as in all stores.

        HBase's check does not distinguish an empty value from a missing cell. If that matters, the row is read first;
        no program writes an empty value in between.
        """
        self._calls.count("set")
        if not expected and self._value(key) != expected:
            return False
        with self._rows.pool.connection() as connection:
            return self._rows.check_and_put(connection, key, METADATA_COLUMN, expected or b"", value)

    def _value(self, key: bytes) -> bytes | None:
        value, _ = self._rows.get(key).get(METADATA_COLUMN, (None, 0))
        return value


def _query(want: Projection[Any]) -> Query:
    if want.call != "rows":
        return KEYS if want.part == "keys" else POINTERS
    return ROWS if want.max_bytes is None else ROWS._replace(page_bytes=min(want.max_bytes, ROWS.page_bytes))


def _metadata(row: Row) -> bytes | None:
    cell = row.columns.get(METADATA_COLUMN)
    value: bytes | None = cell.value if cell else None
    return value


def _pointer(row: Row) -> int | None:
    """Return a row's write pointer, as CDAP reads it: the first eight bytes of its cell; None without such a cell."""
    cell = row.columns.get(POINTER_COLUMN)
    if cell is None or len(cell.value) < _POINTER_BYTES:
        return None
    return int.from_bytes(cell.value[:_POINTER_BYTES], "big", signed=True)


def _message(row: Row) -> MessageValue | None:
    """Return a row's value; None if CDAP fails to read it: it has neither cell, or its pointer is truncated."""
    pointer, payload = _pointer(row), row.columns.get(PAYLOAD_COLUMN)
    if pointer is None and (payload is None or POINTER_COLUMN in row.columns):
        return None
    return MessageValue(pointer, payload.value if payload else None)


def _cells(value: MessageValue) -> dict[bytes, bytes | None]:
    """Return a row's cells, as CDAP writes them.

    Raises:
        ValueError: the value has neither pointer nor payload.
    """
    if value.pointer is None and value.payload is None:
        raise ValueError("a message has a write pointer, a payload or both")
    return {
        PAYLOAD_COLUMN: value.payload,
        POINTER_COLUMN: None if value.pointer is None else _pack_pointer(value.pointer),
    }


def _pack_pointer(pointer: int) -> bytes:
    return pointer.to_bytes(_POINTER_BYTES, "big", signed=True)
