"""A read-only view of a store that the same process also writes.

A LevelDB store that is open for writing cannot be cloned, because its files change all the time. Therefore readers (a
plan, an audit, the background count) get this view, whose tables cannot write (invariant S5).

The trade-off against a clone: a read sees the current rows, not a consistent snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from tms_core.errors import StoreError
from tms_core.tables.base import ALL_KEYS, UNREADABLE, Calls, KeyReads, MetadataReads, Page, Projection, Reads
from tms_core.tables.wrapped import Hook, WrappedMessageReads, WrappedPayloadReads, WrappedStore

T = TypeVar("T")


def read_only(store: Reads) -> Reads:
    """Return a read-only view of a store. Closing the view does nothing, because the caller closes the store."""
    return ReadOnlyStore(store)


class ReadOnlyStore(WrappedStore):
    """A read-only view of a store, made by :func:`read_only`.

    It has no method that writes. Its ``calls`` count only operations of the view and its parts.

    Args:
        calls: the counter of operations; None: a new counter.
    """

    def __init__(self, store: Reads, calls: Calls | None = None) -> None:
        store = store.with_own_counter()
        counted = Calls() if calls is None else calls
        hook = _CallCounter(counted, store.calls)
        super().__init__(
            store,
            ReadOnlyMetadataTable(store.metadata, counted),
            WrappedMessageReads(store.message, hook),
            WrappedPayloadReads(store.payload, hook),
        )
        self.calls = self._calls = counted

    def parts(self) -> Sequence[Reads]:
        """Return read-only views of the store's parts, so that a plan scans as many parts at once as a run does."""
        parts = self._store.parts()
        if [part.span for part in parts] == [ALL_KEYS]:
            return (self,)
        return [ReadOnlyStore(part, self._calls) for part in parts]


class _CallCounter(Hook):
    """A hook that counts pages, and their unreadable rows."""

    def __init__(self, calls: Calls, of_store: Counter[str]) -> None:
        self._calls = calls
        self._of_store = of_store

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        self._calls.count(want.call)
        before = self._of_store[UNREADABLE]
        page = table.read(want, start, stop, limit)
        self._calls.count(UNREADABLE, self._of_store[UNREADABLE] - before)
        return page


class ReadOnlyMetadataTable(MetadataReads):
    """A read-only view of the metadata table."""

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
    """Return the error for a run on a read-only view."""
    return StoreError(
        "This command only reads the store; it cannot write to it.",
        "The commands that write are janitor run and janitor apply.",
    )
