"""The rows of a store in some ranges of keys, with all metadata, for the scan of a task or a driver.

It has the interface of a whole store, and never returns a row outside the ranges. Therefore a scan does not depend on
the cuts, which may be anywhere: each verdict is about one row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from tms_core.tables.base import (
    KeyRange,
    KeyReads,
    MessageTable,
    MetadataTable,
    Page,
    PayloadTable,
    Projection,
    Reads,
    Store,
)
from tms_core.tables.wrapped import (
    Hook,
    WrappedMessageReads,
    WrappedMessageTable,
    WrappedPayloadReads,
    WrappedPayloadTable,
    WrappedStore,
)

T = TypeVar("T")

#: The empty range.
NOTHING = KeyRange(b"\x00", b"\x00")


class RangedReads(WrappedStore):
    """Ranges of a store. Closing it has no effect: the caller closes the whole store.

    Args:
        store: the whole store, or the rows of one salt.
        messages, payloads: the ranges of keys, sorted and disjoint.
    """

    def __init__(self, store: Reads, messages: Sequence[KeyRange], payloads: Sequence[KeyRange]) -> None:
        message = WrappedMessageReads(store.message, _Ranges(messages))
        super().__init__(store, store.metadata, message, WrappedPayloadReads(store.payload, _Ranges(payloads)))
        self.span = _span(store.span, messages)


def _span(whole: KeyRange, ranges: Sequence[KeyRange]) -> KeyRange:
    """Return the stored keys from the start of the first range to the stop of the last."""
    if not ranges:
        return NOTHING
    # The span of a salt starts with the salt, which keys of its part do not have.
    salt, stop = whole.start, ranges[-1].stop
    return KeyRange(salt + ranges[0].start, whole.stop if stop is None else salt + stop)


class RangedStore(RangedReads, Store):
    """Ranges of a writable store; arguments as for :class:`RangedReads`."""

    metadata: MetadataTable
    message: MessageTable
    payload: PayloadTable

    def __init__(self, store: Store, messages: Sequence[KeyRange], payloads: Sequence[KeyRange]) -> None:
        super().__init__(store, messages, payloads)
        self.metadata = store.metadata
        self.message = WrappedMessageTable(store.message, _Ranges(messages))
        self.payload = WrappedPayloadTable(store.payload, _Ranges(payloads))


class _Ranges(Hook):
    """A hook that limits reads to some ranges."""

    def __init__(self, reaches: Sequence[KeyRange]) -> None:
        self._reaches = reaches
        self._starts = [reach.start for reach in reaches]

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        """Return a page of the first range with rows."""
        for first, last in self._intersect(start, stop):
            # Do not return the first key after a range.
            page = table.read(want, first, last, limit)._replace(gap=None)
            if page.resume is not None:
                return page
            if page.items:
                return page._replace(resume=None if last == stop else last)
        return want.empty_page()

    def estimate_bytes(self, table: KeyReads, start: bytes, stop: bytes | None) -> int:
        return sum(table.estimate_bytes(*reach) for reach in self._intersect(start, stop))

    def _intersect(self, start: bytes, stop: bytes | None) -> Iterator[KeyRange]:
        """Yield the parts of the ranges between two keys."""
        at = max(0, bisect_right(self._starts, start) - 1)
        for reach in islice(self._reaches, at, None):
            if stop is not None and stop <= reach.start:
                return
            first, ends = max(start, reach.start), [end for end in (stop, reach.stop) if end is not None]
            last = min(ends, default=None)
            if last is None or first < last:
                yield KeyRange(first, last)
