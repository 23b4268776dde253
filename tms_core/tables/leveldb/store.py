"""The store on one machine: three LevelDB folders, byte for byte as CDAP 4.0-5.1 stores them (layout A).

C++ LevelDB reads and writes the folders; it is fast and needs no JVM. The differences to CDAP's Java library are
repaired when the store opens and closes (:mod:`tms_core.tables.leveldb.manifest`). The three folders contain LevelDB's
own files only. LevelDB allows one process at a time to open the store.

The trade-off for speed: deletes are not synced batch by batch; :meth:`~LevelDBTable.sync` makes them durable. Every
read verifies block checksums, because reads decide about deletions; the cost is not measurable.
``docs/reference/formats/tables.md`` has the layouts of values.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from tms_core.errors import StoreError
from tms_core.tables.base import (
    UNREADABLE,
    KeyReads,
    KeyTable,
    MessageColumns,
    MessageReads,
    MessageTable,
    MessageValue,
    MetadataReads,
    MetadataTable,
    Origin,
    Page,
    PayloadReads,
    PayloadTable,
    PointerSet,
    Projection,
    RowsOfRequest,
    Store,
    TableName,
    TxCell,
    filter_cells,
)
from tms_core.tables.leveldb.database import PAGE_BYTES, Change, Database, StoredColumns, WritableDatabase
from tms_core.tables.leveldb.layout import disk_bytes, find_tables, holds_database, identity
from tms_core.tables.leveldb.lineage import FolderTrace, StoreTrace, trace_folder
from tms_core.tables.leveldb.lock import convert_errors, hold_lock, sync
from tms_core.tables.leveldb.manifest import prepare, rename_tables
from tms_core.tables.leveldb.side import side_path
from tms_core.tables.memory import MemoryMessageTable, MemoryPayloadTable

T = TypeVar("T")

#: First byte of a message row's value (LevelDBMessageTable). CDAP writes these three, and reads others as a reference.
_PLAIN, _TRANSACTIONAL, _REFERENCE = 0, 1, 2
_PLAIN_TAG, _TX_TAG, _REFERENCE_TAG = bytes([_PLAIN]), bytes([_TRANSACTIONAL]), bytes([_REFERENCE])
_PLAIN_ONLY, _TX_ONLY = {_PLAIN_TAG}, {_TX_TAG}
_POINTER_BYTES = 8
#: Tag and write pointer.
_TX_BYTES = 1 + _POINTER_BYTES
_POINTER = slice(1, _TX_BYTES)
_TX_POINTER = struct.Struct(">q")
#: Parts of a value, for loops in C: tag, pointer, and the payloads of plain and transactional values.
_tag_in, _pointer_in = itemgetter(slice(1)), itemgetter(_POINTER)
_plain_payload, _tx_payload = itemgetter(slice(1, None)), itemgetter(slice(_TX_BYTES, None))
#: Constructs a value from its fields faster than the class does.
_plain = partial(tuple.__new__, MessageValue)


class LevelDBStore(Store):
    """Three tables in three LevelDB folders.

    The store never inverts or returns rows of the message table that CDAP cannot read either (:func:`decode`), but
    counts them in ``calls["unreadable"]``. It lists their keys as all other keys.

    Args:
        path: the folder of the three folders (CDAP's ``messaging.local.data.dir``).
        create: create missing folders. Otherwise a missing message or payload folder is an empty table, and is not
            created: CDAP creates these folders on demand.

    Raises:
        StoreNotFound: the store has no metadata table, so its topics are unknown.
        StoreLayoutError: the store is in a layout of CDAP 6.
        StoreBusy: this or another process has the store open.
        StoreError: a folder is damaged or cannot be written.
    """

    def __init__(self, path: Path | str, *, create: bool = False) -> None:
        self.path = Path(path)
        self.calls = Counter()
        if create:
            with convert_errors(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = find_tables(self.path, create=create)
        present = {name: folder for name, folder in found.items() if holds_database(folder)}
        opened = {name: _trace(folder) for name, folder in present.items()}
        side = side_path(self.path)
        # Check and repair all folders before the first is opened, because opening a folder changes it.
        prepare(*present.values(), side=side if holds_database(side) else None)
        with ExitStack() as stack:
            databases = {name: _open(folder, stack, create=name not in opened) for name, folder in found.items()}
            self._open = stack.pop_all()
        self._trace = StoreTrace(self.path, opened)
        self._open_tables(databases)

    def _open_tables(self, databases: Mapping[TableName, WritableDatabase]) -> None:
        calls, self._databases = self.calls, databases
        message, payload = databases.get("message"), databases.get("payload")
        self.metadata = LevelDBMetadataTable(databases["metadata"], calls)
        self.message = LevelDBMessageTable(message, calls) if message else AbsentMessageTable(calls)
        self.payload = LevelDBPayloadTable(payload, calls) if payload else AbsentPayloadTable(calls)

    def with_own_counter(self) -> LevelDBStore:
        other = copy(self)
        other.calls, other._open = Counter(), ExitStack()
        other._open_tables(self._databases)
        return other

    @contextmanager
    def block_writes(self) -> Iterator[None]:
        """Block all writes to the three tables during the block."""
        with ExitStack() as stack:
            for database in self._databases.values():
                stack.enter_context(database.block_writes())
            yield

    def disk_bytes(self) -> int | None:
        return disk_bytes(self.path)

    def identity(self) -> str:
        return identity(self.path)

    def lineage(self) -> Mapping[str, Any]:
        return self._trace.current_marks()

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        return self._trace.find_restore_evidence(known)

    def close(self) -> None:
        """Close the store in the form that CDAP can read, with all tables named ``.sst``.

        Raises:
            StoreError: a table could not be renamed. The store is closed nevertheless.
        """
        self._open.close()


def release(path: Path | str) -> None:
    """Make a store readable for CDAP again without a sweep, after a crash or after another program with LevelDB.

    Raises:
        StoreNotFound, StoreLayoutError, StoreBusy, StoreError: as :class:`LevelDBStore`.
    """
    LevelDBStore(path).close()


def _trace(folder: Path) -> FolderTrace:
    """Return the marks of a folder before it is repaired for C++ LevelDB."""
    with hold_lock(folder):
        return trace_folder(folder)


def _open(folder: Path, stack: ExitStack, *, create: bool) -> WritableDatabase:
    if create:
        with convert_errors(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync(folder.parent)
    # Also after a failed opening, which may have made tables.
    stack.callback(rename_tables, folder)
    database = WritableDatabase(folder, create=create)
    stack.callback(database.close)
    return database


#: Whole rows with stored values, for callers that decode them page by page; LevelDB only.
STORED: Projection[StoredColumns] = Projection("stored")


class LevelDBReads(KeyReads):
    """The reads of message table and payload table."""

    def __init__(self, database: Database, calls: Counter[str]) -> None:
        self._database = database
        self._calls = calls

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        self._calls[want.call] += 1
        return cast(Page[T], self._page(want, start, stop, limit))

    def _page(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[Any]:
        if want.part == "keys":
            return self._database.keys(start, stop, limit)
        if want.part == "stored":
            return self._database.fast_columns(start, stop, limit)
        return self._database.rows(start, stop, limit, want.max_bytes or PAGE_BYTES)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._database.estimate_bytes(start, stop)


class LevelDBMessageReads(LevelDBReads, MessageReads):
    """The reads of the message table."""

    name: TableName = "message"

    def _page(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[Any]:
        if want.part == "cells":
            return self._cells(start, stop, limit, want.pointers)
        if want.part not in ("rows", "columns"):
            return super()._page(want, start, stop, limit)
        page = self._database.columns(start, stop, limit, want.max_bytes or PAGE_BYTES)
        if want.part == "rows":
            return Page(self._decode_rows(page.items), page.resume)
        return Page(self._columns(page.items), page.resume)

    def _cells(self, start: bytes, stop: bytes | None, limit: int, pointers: PointerSet | None) -> Page[list[TxCell]]:
        # A full pass reads every row here.
        if pointers is None or pointers.stored is None:
            page = self._database.rows(start, stop, limit)
            return filter_cells(Page(_cells(page.items), page.resume), pointers)
        found = self._database.search(start, stop, limit, pointers.stored, _POINTER)
        cells = [cell for cell in _cells(found.items) if cell.pointer in pointers.members]
        return Page(cells, found.resume, None, found.rows_read, found.gap)

    def _columns(self, stored: StoredColumns) -> MessageColumns:
        keys, values = stored
        # Fast paths for the two usual kinds of pages: a fetch spends most of its time here.
        tags = set(map(_tag_in, values))
        if tags <= _PLAIN_ONLY:
            return MessageColumns(keys, None, list(map(_plain_payload, values)))
        if tags == _TX_ONLY and min(map(len, values)) >= _TX_BYTES:
            pointers = list(struct.unpack(f">{len(values)}q", b"".join(map(_pointer_in, values))))
            return MessageColumns(keys, pointers, list(map(_tx_payload, values)))
        return MessageColumns.of(self._decode_rows(stored))

    def _decode_rows(self, stored: StoredColumns) -> list[tuple[bytes, MessageValue]]:
        """Return the readable rows; count the others."""
        rows = [
            (key, value)
            for key, raw in zip(stored.keys, stored.values, strict=True)
            if (value := _plain((None, raw[1:])) if raw[:1] == _PLAIN_TAG else decode(raw)) is not None
        ]
        if len(rows) < len(stored.keys):
            self._calls[UNREADABLE] += len(stored.keys) - len(rows)
        return rows


class LevelDBPayloadReads(LevelDBReads, PayloadReads):
    """The reads of the payload table, whose values are the payloads."""

    name: TableName = "payload"


class LevelDBMetadataReads(MetadataReads):
    """The reads of the metadata table, whose values are JSON."""

    def __init__(self, database: Database, calls: Counter[str]) -> None:
        self._database = database
        self._calls = calls

    def rows(self) -> list[tuple[bytes, bytes]]:
        self._calls["metadata"] += 1
        return self._database.all()

    def get(self, key: bytes) -> bytes | None:
        self._calls["get"] += 1
        return self._database.get(key)


class LevelDBTable(LevelDBReads, KeyTable):
    """The writes of message table and payload table."""

    def __init__(self, database: WritableDatabase, calls: Counter[str]) -> None:
        super().__init__(database, calls)
        self._writable = database

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        self._calls["delete"] += 1
        self._writable.delete(keys)

    def sync(self) -> None:
        self._calls["sync"] += 1
        self._writable.sync()

    @property
    def can_compact_concurrently(self) -> bool:
        return self._writable.can_compact()

    def compact(self, start: bytes, stop: bytes) -> None:
        self._calls["compact"] += 1
        self._writable.compact(start, stop)


class LevelDBMessageTable(LevelDBTable, LevelDBMessageReads, MessageTable):
    """The message table."""

    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        self._calls["invert"] += 1
        changes = [(cell.key, _negation(cell.pointer)) for cell in cells]
        return self._writable.rewrite(changes, repeatable=True)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._calls["put"] += 1
        stored = rows.stored if isinstance(rows, _StoredRows) else [(key, encode(value)) for key, value in rows]
        self._writable.put(stored)

    def rows_of(self, requests: Iterable[RowsOfRequest]) -> Sequence[tuple[bytes, MessageValue]]:
        stored: list[tuple[bytes, bytes]] = []
        for keys, pointer, payloads in requests:
            if payloads is None:
                stored += [(key, encode(MessageValue(pointer, None))) for key in keys]
            else:
                # The rows of a request share the first bytes of their values.
                head = _PLAIN_TAG if pointer is None else _head(_TRANSACTIONAL, pointer)
                stored += zip(keys, map(head.__add__, payloads), strict=True)
        return _StoredRows(stored)


class _StoredRows(Sequence[tuple[bytes, MessageValue]]):
    """Rows with encoded values, which are decoded on access."""

    def __init__(self, stored: list[tuple[bytes, bytes]]) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return _StoredRows(self.stored[at])
        key, raw = self.stored[at]
        return key, decode(raw)


class LevelDBPayloadTable(LevelDBTable, LevelDBPayloadReads, PayloadTable):
    """The payload table."""

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._calls["put"] += 1
        self._writable.put(rows)


class LevelDBMetadataTable(LevelDBMetadataReads, MetadataTable):
    """The metadata table."""

    def __init__(self, database: WritableDatabase, calls: Counter[str]) -> None:
        super().__init__(database, calls)
        self._writable = database

    @property
    def version(self) -> int | None:
        return self._writable.version

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        self._calls["set"] += 1
        [written] = self._writable.rewrite([(key, lambda present: value if present == expected else None)])
        return written


class AbsentMessageTable(MemoryMessageTable):
    """A message table without a folder: it is empty and cannot be written."""

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        raise _absent("message")


class AbsentPayloadTable(MemoryPayloadTable):
    """A payload table without a folder: it is empty and cannot be written."""

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        raise _absent("payload")


def encode(value: MessageValue) -> bytes:
    """Return a message row's value, as CDAP writes it.

    Raises:
        ValueError: the value has neither pointer nor payload.
    """
    pointer, payload = value
    if pointer is None:
        if payload is None:
            raise ValueError("a message has a write pointer, a payload or both")
        return _PLAIN_TAG + payload
    return _head(_REFERENCE, pointer) if payload is None else _head(_TRANSACTIONAL, pointer) + payload


@lru_cache(maxsize=64)
def _head(tag: int, pointer: int) -> bytes:
    """Return the first bytes of a value with a pointer, cached for all rows of a request."""
    return bytes([tag]) + pointer.to_bytes(_POINTER_BYTES, "big", signed=True)


def decode(raw: bytes) -> MessageValue | None:
    """Return a message row's value as CDAP reads it; None if CDAP fails to read an empty or truncated value.

    Every tag except the first two is a reference. Bytes after a reference's pointer are ignored, and missing bytes are
    zeros (Java's ``Arrays.copyOfRange``).
    """
    if raw[:1] == _PLAIN_TAG:
        return MessageValue(None, raw[1:])
    if _is_transactional(raw):
        return MessageValue(pointer_of(raw), raw[_TX_BYTES:] if raw[0] == _TRANSACTIONAL else None)
    return None


def pointer_of(raw: bytes) -> int:
    """Return the write pointer in a transactional row's value."""
    return int.from_bytes(raw[1:_TX_BYTES].ljust(_POINTER_BYTES, b"\x00"), "big", signed=True)


def _cells(rows: Sequence[tuple[bytes, bytes]]) -> list[TxCell]:
    """Return the transactional rows as cells."""
    # Fast path for complete transactional rows, which are most of the rows.
    new, pointer_in = tuple.__new__, _TX_POINTER.unpack_from
    return [
        new(TxCell, (key, pointer_in(value, 1)[0], False))
        if value[:1] == _TX_TAG and len(value) >= _TX_BYTES
        else new(TxCell, (key, pointer_of(value), value[0] != _TRANSACTIONAL))
        for key, value in rows
        if value[:1] != _PLAIN_TAG and (len(value) >= _TX_BYTES or _is_transactional(value))
    ]


def _is_transactional(raw: bytes) -> bool:
    return (len(raw) >= _TX_BYTES and raw[0] == _TRANSACTIONAL) or raw[:1] >= _REFERENCE_TAG


@lru_cache(maxsize=64)
def _negation(pointer: int) -> Change:
    """Return the change that inverts a pointer if the value still has it (invariant S6), cached for a transaction."""
    usual_head, inverted = _TX_TAG + _TX_POINTER.pack(pointer), _TX_POINTER.pack(-pointer)

    def invert(raw: bytes | None) -> bytes | None:
        if raw is None:
            return None
        if raw[:_TX_BYTES] != usual_head and (not _is_transactional(raw) or pointer_of(raw) != pointer):
            return None
        return raw[:1] + inverted + raw[_TX_BYTES:]

    return invert


def _absent(table: TableName) -> StoreError:
    return StoreError(f"The store has no {table} table.", "Open the store with create=True, as tms serve does.")
