"""Tables and stores that wrap others: each read and each change calls a hook, and all other calls are forwarded.

A read-only view, the part of a store that a Spark task scans, and the store of a leader are hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tms_core.tables.base import (
    KeyReads,
    KeyTable,
    MessageReads,
    MessageTable,
    MessageValue,
    MetadataReads,
    Origin,
    Page,
    PayloadReads,
    PayloadTable,
    Projection,
    Reads,
    RowsOfRequest,
    TxCell,
)

K = TypeVar("K", bound=KeyReads)
T = TypeVar("T")
V = TypeVar("V")
W = TypeVar("W", bound=KeyTable)


class Hook:
    """A hook around reads and changes of a table; by default each method calls the table."""

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        """Read a page, as :meth:`KeyReads.read`."""
        return table.read(want, start, stop, limit)

    def estimate_bytes(self, table: KeyReads, start: bytes, stop: bytes | None) -> int:
        """Estimate the size of a range, as :meth:`KeyReads.estimate_bytes`."""
        return table.estimate_bytes(start, stop)

    def reserved(self, table: MessageReads, prefix: bytes) -> int:
        """Return reserved ids, as :meth:`MessageReads.reserved`."""
        return table.reserved(prefix)

    def delete(self, table: KeyTable, keys: Sequence[bytes], origin: Origin | None) -> None:
        """Delete rows, as :meth:`KeyTable.delete`."""
        table.delete(keys, origin)

    def invert(self, table: MessageTable, cells: Sequence[TxCell], origin: Origin | None) -> list[bool]:
        """Invert pointers, as :meth:`MessageTable.invert`."""
        return table.invert(cells, origin)

    def put(self, table: MessageTable | PayloadTable, rows: Sequence[tuple[bytes, Any]]) -> None:
        """Write rows, as ``put`` of the table."""
        table.put(rows)

    def hide(self, table: MessageTable, keys: Sequence[bytes]) -> None:
        """Hide rows, as :meth:`MessageTable.hide`."""
        table.hide(keys)


class WrappedTable(KeyReads, Generic[K]):
    """A readable table that wraps another table."""

    def __init__(self, table: K, hook: Hook) -> None:
        self._table = table
        self._hook = hook
        self.name = table.name
        self.keys_per_call = table.keys_per_call

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        return self._hook.read(self._table, want, start, stop, limit)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._hook.estimate_bytes(self._table, start, stop)


class _WrappedKeyTable(WrappedTable[W], KeyTable):
    def __init__(self, table: W, hook: Hook) -> None:
        super().__init__(table, hook)
        self.weighs_compaction = table.weighs_compaction

    @property
    def max_value_bytes(self) -> int | None:
        return self._table.max_value_bytes

    def check_sizes(self, values: Sequence[bytes]) -> None:
        self._table.check_sizes(values)

    @property
    def can_compact_concurrently(self) -> bool:
        return self._table.can_compact_concurrently

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        self._hook.delete(self._table, keys, origin)

    def sync(self) -> None:
        self._table.sync()

    def compact(self, start: bytes, stop: bytes) -> None:
        self._table.compact(start, stop)


class WrappedMessageReads(WrappedTable[MessageReads], MessageReads):
    """A readable message table that wraps another one."""

    def reserved(self, prefix: bytes) -> int:
        return self._hook.reserved(self._table, prefix)


class WrappedPayloadReads(WrappedTable[PayloadReads], PayloadReads):
    """A readable payload table that wraps another one."""


class WrappedMessageTable(_WrappedKeyTable[MessageTable], MessageTable):
    """A message table that wraps another one."""

    def reserved(self, prefix: bytes) -> int:
        return self._hook.reserved(self._table, prefix)

    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        return self._hook.invert(self._table, cells, origin)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        self._hook.put(self._table, rows)

    def hide(self, keys: Sequence[bytes]) -> None:
        self._hook.hide(self._table, keys)

    def rows_of(self, requests: Iterable[RowsOfRequest]) -> Sequence[tuple[bytes, MessageValue]]:
        return self._table.rows_of(requests)


class WrappedPayloadTable(_WrappedKeyTable[PayloadTable], PayloadTable):
    """A payload table that wraps another one."""

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._hook.put(self._table, rows)


class WrappedStore(Reads):
    """A store with other tables than the wrapped store. Closing does nothing: the caller closes the wrapped store."""

    def __init__(self, store: Reads, metadata: MetadataReads, message: MessageReads, payload: PayloadReads) -> None:
        self._store = store
        self.calls, self.span = store.calls, store.span
        self.metadata, self.message, self.payload = metadata, message, payload

    def region(self, row: bytes) -> str:
        return self._store.region(row)

    def obstacles(self) -> Sequence[str]:
        return self._store.obstacles()

    def disk_bytes(self) -> int | None:
        return self._store.disk_bytes()

    def identity(self) -> str:
        return self._store.identity()

    def lineage(self) -> Mapping[str, Any]:
        return self._store.lineage()

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        return self._store.find_restore_evidence(known)

    def close(self) -> None:
        """Do nothing, because the caller closes the wrapped store."""
