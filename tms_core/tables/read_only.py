"""A store that can only be read, over a store that the same process also writes.

A LevelDB store that is open for writing cannot be cloned, because its files change all the time. So what only reads (a
plan, an audit, the background count) is given this store, whose tables have no way to write (rule S5).

The trade against a clone: a face shows the store as it is while one reads, not as it was at one moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from tms_core.errors import StoreError
from tms_core.tables.base import (
    ALL_KEYS,
    UNREADABLE,
    Calls,
    KeyReads,
    MessageReads,
    MessageValue,
    MetadataReads,
    Page,
    PayloadReads,
    PointerSet,
    Reads,
    Search,
    TableName,
    TxCell,
)

K = TypeVar("K", bound=KeyReads)


def read_only(store: Reads) -> Reads:
    """The store for reading only. Closing it does nothing: the caller that opened the store closes it."""
    return ReadOnlyStore(store)


class ReadOnlyStore(Reads):
    """A store that can be read and not changed; :func:`read_only` makes one.

    Nothing of it can write. Its ``calls`` are those made through it and its parts, and no others.

    Args:
        calls: where operations are counted; None: in a count of its own.
    """

    def __init__(self, store: Reads, calls: Calls | None = None) -> None:
        store = store.apart()
        calls = Calls() if calls is None else calls
        self.calls = self._calls = calls
        self.span, self._parts = store.span, store.parts
        self._identity, self._obstacles, self._disk_bytes = store.identity, store.obstacles, store.disk_bytes
        self._region, self._lineage, self._restored_since = store.region, store.lineage, store.restored_since
        self.metadata = ReadOnlyMetadataTable(store.metadata, calls)
        self.message = ReadOnlyMessageTable(store.message, calls, store.calls)
        self.payload = ReadOnlyPayloadTable(store.payload, calls)

    def parts(self) -> Sequence[Reads]:
        """The parts of the store itself, for reading only: a plan scans as many at once as a run does."""
        parts = self._parts()
        if [part.span for part in parts] == [ALL_KEYS]:
            return (self,)
        return [ReadOnlyStore(part, self._calls) for part in parts]

    def disk_bytes(self) -> int | None:
        """That of the store itself."""
        return self._disk_bytes()

    def identity(self) -> str:
        """That of the store itself."""
        return self._identity()

    def lineage(self) -> Mapping[str, Any]:
        """That of the store itself."""
        return self._lineage()

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        """Whether the store itself was."""
        return self._restored_since(known)

    def obstacles(self) -> Sequence[str]:
        """The obstacles of the store itself."""
        return self._obstacles()

    def region(self, row: bytes) -> str:
        """As the store itself says."""
        return self._region(row)

    def close(self) -> None:
        """Do nothing: the store belongs to the caller."""


class _Face(Generic[K]):
    """The reads that message and payload table allow, and the writes they refuse."""

    def __init__(self, table: K, calls: Calls) -> None:
        self._table = table
        self._calls = calls
        self.keys_per_call = table.keys_per_call

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        self._calls.count("keys")
        return self._table.keys(start, stop, limit)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._table.estimate_bytes(start, stop)


class ReadOnlyMessageTable(_Face[MessageReads], MessageReads):
    """The message table, to be read."""

    name: TableName = "message"

    def __init__(self, table: MessageReads, calls: Calls, behind: Counter[str]) -> None:
        super().__init__(table, calls)
        self._behind = behind

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        self._calls.count("cells")
        return self._table.cells(start, stop, limit)

    def search(self, start: bytes, stop: bytes | None, limit: int, pointers: PointerSet) -> Search:
        self._calls.count("cells")
        return self._table.search(start, stop, limit, pointers)

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        self._calls.count("rows")
        before = self._behind[UNREADABLE]
        page = self._table.rows(start, stop, limit, most_bytes)
        self._calls.count(UNREADABLE, self._behind[UNREADABLE] - before)
        return page


class ReadOnlyPayloadTable(_Face[PayloadReads], PayloadReads):
    """The payload table, to be read."""

    name: TableName = "payload"

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        self._calls.count("rows")
        return self._table.rows(start, stop, limit, most_bytes)


class ReadOnlyMetadataTable(MetadataReads):
    """The metadata table, to be read."""

    def __init__(self, table: MetadataReads, calls: Calls) -> None:
        self._table = table
        self._calls = calls

    def rows(self) -> list[tuple[bytes, bytes]]:
        self._calls.count("metadata")
        return self._table.rows()

    def get(self, key: bytes) -> bytes | None:
        self._calls.count("get")
        return self._table.get(key)


def read_only_error() -> StoreError:
    """The error for a run that was given a store for reading only."""
    return StoreError(
        "This command only reads the store; it cannot write to it.",
        "The commands that write are janitor run and janitor apply.",
    )
