"""The store on one machine: three LevelDB folders side by side, byte for byte as CDAP 4.0-5.1 keeps them (layout A).

A folder is read and written through C++ LevelDB, which is fast and needs no JVM; what CDAP's Java library needs beyond
that is put right when the store opens and closes (:mod:`tms_core.tables.leveldb_manifest`). Nothing is ever put into
the three folders but LevelDB's own files. One process at a time may hold the store, which is LevelDB's rule.

Traded for speed: deletes are not synced batch by batch, :meth:`~LevelDBTable.sync` makes them durable. Block checksums
are verified on every read, because rows are deleted by what is read; that costs less than can be measured.
Value layouts: ``docs/formats/leveldb.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path

from tms_core.errors import StoreError
from tms_core.tables.base import (
    UNREADABLE,
    MessageTable,
    MessageValue,
    MetadataTable,
    Page,
    PayloadTable,
    Store,
    TableName,
    TxCell,
)
from tms_core.tables.leveldb_database import PAGE_BYTES, Columns, Database, WritableDatabase
from tms_core.tables.leveldb_folder import sync, translated
from tms_core.tables.leveldb_layout import find_tables, holds_database, identity
from tms_core.tables.leveldb_manifest import prepare, rename_tables
from tms_core.tables.memory import MemoryMessageTable, MemoryPayloadTable

#: First byte of a message row's value (LevelDBMessageTable).
_PLAIN, _TRANSACTIONAL, _REFERENCE = 0, 1, 2
_PLAIN_TAG = bytes([_PLAIN])
#: Tag and write pointer.
_TX_BYTES = 9
#: A value from its two parts, without a call in between.
_plain = partial(tuple.__new__, MessageValue)


class LevelDBStore(Store):
    """Three tables in three LevelDB folders.

    Rows of the message table whose value is empty, cut short or of an unknown tag are never touched and never
    returned; each one met counts in ``calls["unreadable"]``. Their keys are listed like all others.

    Args:
        path: the folder that holds the three (CDAP's ``messaging.local.data.dir``).
        create: make what is missing. Without it a missing message or payload folder is an empty table and stays
            missing: CDAP makes them when they are first needed.

    Raises:
        StoreNotFound: there is no metadata table, so nothing can be known about any topic.
        StoreLayoutError: the store is in a layout of CDAP 6.
        StoreBusy: another process has the store open, or this one has.
        StoreError: a folder is damaged or cannot be written.
    """

    def __init__(self, path: Path | str, *, create: bool = False) -> None:
        self.path = Path(path)
        self.calls = Counter()
        if create:
            with translated(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        found = find_tables(self.path, create=create)
        with ExitStack() as stack:
            databases = {name: _open(folder, stack) for name, folder in found.items()}
            self._open = stack.pop_all()
        self._lay_out(databases)

    def _lay_out(self, databases: Mapping[TableName, WritableDatabase]) -> None:
        calls, self._databases = self.calls, databases
        message, payload = databases.get("message"), databases.get("payload")
        self.metadata = LevelDBMetadataTable(databases["metadata"], calls)
        self.message = LevelDBMessageTable(message, calls) if message else AbsentMessageTable(calls)
        self.payload = LevelDBPayloadTable(payload, calls) if payload else AbsentPayloadTable(calls)

    def apart(self) -> LevelDBStore:
        other = copy(self)
        other.calls, other._open = Counter(), ExitStack()
        other._lay_out(self._databases)
        return other

    def identity(self) -> str:
        return identity(self.path)

    def close(self) -> None:
        """Let go of the store and leave it as CDAP can read it: all tables named ``.sst``.

        Raises:
            StoreError: a table could not be renamed. The store is closed all the same.
        """
        self._open.close()


def release(path: Path | str) -> None:
    """Make a store readable for CDAP again, without a sweep: after a crash, or after another LevelDB program.

    Raises:
        StoreNotFound, StoreLayoutError, StoreBusy, StoreError: as :class:`LevelDBStore`.
    """
    LevelDBStore(path).close()


def _open(folder: Path, stack: ExitStack) -> WritableDatabase:
    present = holds_database(folder)
    if present:
        prepare(folder)
    else:
        with translated(folder):
            folder.mkdir(exist_ok=True)
            sync(folder.parent)
    # Also after an opening that failed, since that may have made tables already.
    stack.callback(rename_tables, folder)
    database = WritableDatabase(folder, create=not present)
    stack.callback(database.close)
    return database


class LevelDBKeys:
    """What reading the message table and reading the payload table have in common."""

    def __init__(self, database: Database, calls: Counter[str]) -> None:
        self._database = database
        self._calls = calls

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        self._calls["keys"] += 1
        return self._database.keys(start, stop, limit)

    def columns(self, start: bytes, stop: bytes | None, limit: int) -> Columns:
        """Whole rows with their values as they lie there, for whoever takes them apart by the page."""
        self._calls["rows"] += 1
        return self._database.columns(start, stop, limit)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._database.estimate_bytes(start, stop)


class LevelDBMessageReads(LevelDBKeys):
    """Reading the message table."""

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        self._calls["cells"] += 1
        page = self._database.rows(start, stop, limit)
        return Page(
            [
                TxCell(key, _pointer(value), value[0] == _REFERENCE)
                for key, value in page.items
                if _is_transactional(value)
            ],
            page.resume,
        )

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        self._calls["rows"] += 1
        page = self._database.rows(start, stop, limit, most_bytes or PAGE_BYTES)
        # Nearly all rows of most tables are plain, and this is where a fetch spends its time.
        rows = [
            (key, value)
            for key, raw in page.items
            if (value := _plain((None, raw[1:])) if raw[:1] == _PLAIN_TAG else decode(raw)) is not None
        ]
        if len(rows) < len(page.items):
            self._calls[UNREADABLE] += len(page.items) - len(rows)
        return Page(rows, page.resume)


class LevelDBPayloadReads(LevelDBKeys):
    """Reading the payload table, whose values are the payloads as they are."""

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        self._calls["rows"] += 1
        return self._database.rows(start, stop, limit, most_bytes or PAGE_BYTES)


class LevelDBMetadataReads:
    """Reading the metadata table, whose values are the JSON as it is."""

    def __init__(self, database: Database, calls: Counter[str]) -> None:
        self._database = database
        self._calls = calls

    def rows(self) -> list[tuple[bytes, bytes]]:
        self._calls["metadata"] += 1
        return self._database.all()

    def get(self, key: bytes) -> bytes | None:
        self._calls["get"] += 1
        return self._database.get(key)


class LevelDBTable(LevelDBKeys):
    """What writing the message table and writing the payload table have in common."""

    def __init__(self, database: WritableDatabase, calls: Counter[str]) -> None:
        super().__init__(database, calls)
        self._writable = database

    def delete(self, keys: Sequence[bytes]) -> None:
        self._calls["delete"] += 1
        self._writable.delete(keys)

    def sync(self) -> None:
        self._calls["sync"] += 1
        self._writable.sync()

    def compact(self, start: bytes, stop: bytes) -> None:
        self._calls["compact"] += 1
        self._writable.compact(start, stop)


class LevelDBMessageTable(LevelDBTable, LevelDBMessageReads, MessageTable):
    """The message table."""

    name: TableName = "message"

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        self._calls["invert"] += 1
        return self._writable.rewrite((cell.key, partial(_negated, cell.pointer)) for cell in cells)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._calls["put"] += 1
        self._writable.put((key, encode(value)) for key, value in rows)


class LevelDBPayloadTable(LevelDBTable, LevelDBPayloadReads, PayloadTable):
    """The payload table."""

    name: TableName = "payload"

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._calls["put"] += 1
        self._writable.put(rows)


class LevelDBMetadataTable(LevelDBMetadataReads, MetadataTable):
    """The metadata table."""

    def __init__(self, database: WritableDatabase, calls: Counter[str]) -> None:
        super().__init__(database, calls)
        self._writable = database

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes) -> bool:
        self._calls["set"] += 1
        [written] = self._writable.rewrite([(key, lambda present: value if present == expected else None)])
        return written


class AbsentMessageTable(MemoryMessageTable):
    """A message table whose folder is not there: empty, and it cannot be written."""

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        raise _absent("message")


class AbsentPayloadTable(MemoryPayloadTable):
    """A payload table whose folder is not there: empty, and it cannot be written."""

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        raise _absent("payload")


def encode(value: MessageValue) -> bytes:
    """A message row's value, as CDAP writes it.

    Raises:
        ValueError: neither pointer nor payload; such a message does not exist.
    """
    pointer, payload = value
    if pointer is None:
        if payload is None:
            raise ValueError("a message has a write pointer, a payload or both")
        return _PLAIN_TAG + payload
    tag = _REFERENCE if payload is None else _TRANSACTIONAL
    return bytes([tag]) + pointer.to_bytes(8, "big", signed=True) + (payload or b"")


def decode(raw: bytes) -> MessageValue | None:
    """A message row's value, or None when it is empty, cut short or of an unknown tag."""
    if raw[:1] == _PLAIN_TAG:
        return MessageValue(None, raw[1:])
    if _is_transactional(raw):
        return MessageValue(_pointer(raw), None if raw[0] == _REFERENCE else raw[_TX_BYTES:])
    return None


def _is_transactional(raw: bytes) -> bool:
    return len(raw) >= _TX_BYTES and raw[0] in (_TRANSACTIONAL, _REFERENCE)


def _pointer(raw: bytes) -> int:
    return int.from_bytes(raw[1:_TX_BYTES], "big", signed=True)


def _negated(pointer: int, raw: bytes | None) -> bytes | None:
    """The value with its pointer negated, if it still carries ``pointer``."""
    if raw is None or not _is_transactional(raw) or _pointer(raw) != pointer:
        return None
    return raw[:1] + (-pointer).to_bytes(8, "big", signed=True) + raw[_TX_BYTES:]


def _absent(table: TableName) -> StoreError:
    return StoreError(f"The store has no {table} table.", "Open it with create=True, as tms serve does.")
