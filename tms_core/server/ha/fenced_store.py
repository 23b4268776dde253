"""The store with a fence: every call checks that this server leads the topic.

A write is acknowledged only after the lease is read again, and late rows are hidden
(:mod:`tms_core.server.ha.leadership` explains why that suffices). The messaging service does not depend on leadership:
in a server that does not lead, the store raises errors.

Metadata is not fenced: each change is a compare-and-set, so any server may make it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from tms_core.errors import StoreError, TooLarge, Unavailable
from tms_core.messaging.producers.rows import is_of_producer
from tms_core.rowkey import GENERATION_BYTES, MESSAGE_TAIL_BYTES, topic_prefix
from tms_core.server.ha.leadership import Leadership, Term, not_leader_error, unknown_outcome_error
from tms_core.server.ha.sealed_ranges import FRAME_ROWS, FailedWrite, Gaps, PositionRange, SealedRanges
from tms_core.server.ha.slot_assignment import Slots
from tms_core.tables.base import (
    KeyReads,
    KeyTable,
    MessageColumns,
    MessageReads,
    MessageTable,
    MetadataTable,
    Origin,
    Page,
    PayloadTable,
    Projection,
    Store,
    TxCell,
    partial_write_error,
)
from tms_core.tables.side import SideChange, SideTable
from tms_core.tables.wrapped import Hook, WrappedMessageTable, WrappedPayloadTable, WrappedStore

T = TypeVar("T")
V = TypeVar("V")


class FencedStore(WrappedStore, Store):
    """A store whose messages only the leader reads and writes.

    Args:
        store: the tables; the caller closes them.
        slots: the leadership of each slot.
        sealed_ranges: the gaps with hidden rows.
    """

    metadata: MetadataTable
    message: MessageTable
    payload: PayloadTable

    def __init__(self, store: Store, slots: Slots, sealed_ranges: SealedRanges) -> None:
        message = WrappedMessageTable(store.message, MessageFence(slots, sealed_ranges))
        super().__init__(store, store.metadata, message, WrappedPayloadTable(store.payload, TableFence(slots)))


class _Fence:
    """The checks before and after each read and each change of a topic's rows.

    Args:
        slots: the leadership of each slot.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @contextmanager
    def changing(self, key: bytes) -> Iterator[None]:
        """Run a change of existing rows, such as a rollback, and confirm the term after it."""
        with ExitStack() as stack:
            leadership = self._slots.of(key)
            try:
                term = stack.enter_context(leadership.writing())
            except Unavailable as error:
                raise unknown_outcome_error() from error
            try:
                yield
            except StoreError:
                leadership.note_failed_write()
                raise
            leadership.confirm(term)

    @contextmanager
    def reading(self, key: bytes) -> Iterator[Term]:
        """Run a read, and check that the term was valid until it finished.

        Raises:
            Unavailable: this server does not lead, so the result may be outdated.
        """
        leadership = self._slots.of(key)
        term = leadership.term()
        yield term
        if not leadership.is_valid(term):
            raise not_leader_error()


class TableFence(Hook):
    """The fence of the payload table: only the leader reads and writes it.

    Late payloads need no gap: either the transaction cannot be committed, or the producer has stored the payload again
    at the same position (:class:`~tms_core.messaging.publish.pipeline.PayloadWriteBatch`).
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        fence = _Fence(slots)
        self._changing, self._reading = fence.changing, fence.reading

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        with self._reading(start):
            return table.read(want, start, stop, limit)

    def delete(self, table: KeyTable, keys: Sequence[bytes], origin: Origin | None) -> None:
        for group in self._slots.group_by_slot(keys, lambda key: key):
            with self._changing(group[0]):
                table.delete(group, origin)

    def put(self, table: MessageTable | PayloadTable, rows: Sequence[tuple[bytes, Any]]) -> None:
        leadership = self._slots.of(rows[0][0] if rows else b"")
        pieces = (rows[first : first + FRAME_ROWS] for first in range(0, len(rows), FRAME_ROWS))
        with leadership.writing() as term:
            self._send(leadership, term, pieces, table.put)

    def _send(
        self,
        leadership: Leadership,
        term: Term,
        pieces: Iterable[Sequence[tuple[bytes, Any]]],
        put: Callable[[Sequence[tuple[bytes, Any]]], None],
    ) -> None:
        """Write rows of one topic, piece by piece, and confirm the term after the last piece."""
        try:
            for number, piece in enumerate(pieces):
                if number and not leadership.is_valid(term):
                    raise unknown_outcome_error()
                try:
                    put(piece)
                except TooLarge as error:
                    if number:
                        raise partial_write_error(error) from error
                    raise
        except TooLarge:
            # Nothing of this piece was sent to HBase, so no row can be late.
            raise
        except BaseException:
            leadership.note_failed_write()
            raise
        leadership.confirm(term)


class MessageFence(TableFence):
    """The fence of the message table, which also hides late rows."""

    def __init__(self, slots: Slots, sealed_ranges: SealedRanges) -> None:
        super().__init__(slots)
        self._sealed_ranges = sealed_ranges

    def reserved(self, table: MessageReads, prefix: bytes) -> int:
        with self._reading(prefix) as term:
            return self._gaps(term, prefix).end

    def read(self, table: KeyReads, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        with self._reading(start) as term:
            # Settle the gaps before the read: a row that appears between a read and a later settlement would be visible
            # to one reader and hidden from another.
            is_visible = self._visible_keys(term, start)
            page = table.read(want, start, stop, limit)
        if is_visible is None or want.part == "cells":
            # Cells include hidden rows, because a rollback must invert hidden rows as well.
            return page
        return page._replace(items=_keep_visible(page.items, is_visible))

    def invert(self, table: MessageTable, cells: Sequence[TxCell], origin: Origin | None) -> list[bool]:
        self._settle_all([cell.key for cell in cells])
        with self._changing(cells[0].key if cells else b""):
            return table.invert(cells, origin)

    def delete(self, table: KeyTable, keys: Sequence[bytes], origin: Origin | None) -> None:
        self._settle_all(keys)
        super().delete(table, keys, origin)

    def hide(self, table: MessageTable, keys: Sequence[bytes]) -> None:
        prefix = keys[0][:-MESSAGE_TAIL_BYTES]
        with self._reading(prefix) as term, self._change_gaps(prefix, term) as confirm:
            self._sealed_ranges.hide(term, prefix, _span(keys[0], keys[-1]), confirm)

    def put(self, table: MessageTable | PayloadTable, rows: Sequence[tuple[bytes, Any]]) -> None:
        """Write rows of one generation, in the order of their positions."""
        if not rows:
            return
        first, last = rows[0][0], rows[-1][0]
        prefix = first[:-MESSAGE_TAIL_BYTES]
        leadership = self._slots.of(prefix)
        self._settle(prefix)
        with leadership.writing() as term:
            try:
                self._send(leadership, term, _pieces(rows), table.put)
            except TooLarge:
                raise
            except BaseException:
                # Inside `writing`, so that the lease is not released before the failed write is recorded.
                self._sealed_ranges.note_failed_write(prefix, FailedWrite(_span(first, last), len(rows), term))
                raise
        self._sealed_ranges.note_written(prefix)

    def _settle(self, prefix: bytes) -> None:
        """Decide an undecided failed write of a generation."""
        if self._sealed_ranges.is_undecided(prefix):
            with self._reading(prefix) as term:
                self._gaps(term, prefix)

    def _settle_all(self, keys: Sequence[bytes]) -> None:
        """Decide failed writes, before rows of their generations are changed."""
        try:
            for prefix in {key[:-MESSAGE_TAIL_BYTES] for key in keys}:
                self._settle(prefix)
        except Unavailable as error:
            raise unknown_outcome_error() from error

    def _gaps(self, term: Term, prefix: bytes) -> Gaps:
        """Return the gaps of a generation in a term, after an undecided write is settled."""
        if (known := self._sealed_ranges.known(term, prefix)) is not None:
            return known
        with self._change_gaps(prefix, term) as confirm:
            return self._sealed_ranges.settle(term, prefix, confirm)

    @contextmanager
    def _change_gaps(self, prefix: bytes, term: Term) -> Iterator[Callable[[Term], None]]:
        """Run a change of the gaps in a term; yield the function that confirms the term."""
        leadership = self._slots.of(prefix)
        with leadership.writing() as now:
            if now is not term:
                raise not_leader_error()
            try:
                yield leadership.confirm
            except BaseException:
                leadership.note_failed_write()
                raise

    def _visible_keys(self, term: Term, start: bytes) -> Callable[[bytes], bool] | None:
        """Return a predicate for the keys of a generation that readers see; None: they see all keys."""
        prefix = _generation(start)
        if prefix is None:
            return None
        size = len(prefix) + MESSAGE_TAIL_BYTES
        gaps = self._gaps(term, prefix)
        if not gaps.spans:
            return None
        return lambda key: len(key) != size or not key.startswith(prefix) or not gaps.hides(_position(key))


class FencedSide(SideTable):
    """The side table with a fence: access to positions, claims and producers requires leadership of their topic.

    Registrations and transactions of producers can be read without leadership, because a producer publishes to topics
    of other leaders.

    Late writes of a former leader are harmless: a position is written by compare-and-set, and a claim whose poll got no
    response becomes void, because the client invalidates the transaction.

    Args:
        side: the table; the caller closes it.
        slots: the leadership of each slot.
    """

    def __init__(self, side: SideTable, slots: Slots) -> None:
        self._fence = _Fence(slots)
        self._slots = slots
        self._side = side

    def get(self, key: bytes) -> bytes | None:
        if is_of_producer(key):
            return self._side.get(key)
        with self._fence.reading(_strip_kind(key)):
            return self._side.get(key)

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        # A scan over all topics needs no leadership; a later change of a row needs the leadership of its topic.
        if is_of_producer(start) or (stop is not None and not _strip_kind(stop)):
            return self._side.rows(start, stop, limit)
        with self._fence.reading(_strip_kind(start)):
            return self._side.rows(start, stop, limit)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        for group in self._slots.group_by_slot(rows, lambda row: _strip_kind(row[0])):
            with self._fence.changing(_strip_kind(group[0][0])):
                self._side.put(group)

    def delete(self, keys: Sequence[bytes]) -> None:
        for group in self._slots.group_by_slot(keys, _strip_kind):
            with self._fence.changing(_strip_kind(group[0])):
                self._side.delete(group)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        # The first row of each change belongs to the same topic; additional rows may belong to the producer's home.
        with self._fence.changing(_strip_kind(changes[0].key)):
            return self._side.exchange_each(changes)

    def have_one_leader(self, *keys: bytes) -> bool:
        return len({self._slots.number(_strip_kind(key)) for key in keys}) == 1

    def close(self) -> None:
        """Do nothing: the caller closes the table."""


def _keep_visible(items: Any, is_visible: Callable[[bytes], bool]) -> Any:
    """Return the visible items of a page."""
    if isinstance(items, MessageColumns):
        return items.select(list(map(is_visible, items.keys)))
    return [item for item in items if is_visible(item if isinstance(item, bytes) else item[0])]


def _position(key: bytes) -> int:
    """Return the position of a row."""
    return int.from_bytes(key[-MESSAGE_TAIL_BYTES:], "big")


def _span(first: bytes, last: bytes) -> PositionRange:
    """Return the range of positions from one row to another, inclusive."""
    return PositionRange(_position(first), _position(last) + 1)


def _pieces(rows: Sequence[tuple[bytes, V]]) -> Iterator[Sequence[tuple[bytes, V]]]:
    """Yield rows in pieces that span at most :data:`FRAME_ROWS` positions each."""
    first = 0
    while first < len(rows):
        end = _position(rows[first][0]) + FRAME_ROWS
        stop = bisect_left(rows, end, first, key=lambda row: _position(row[0]))
        yield rows[first:stop]
        first = stop


def _strip_kind(key: bytes) -> bytes:
    """Return the key of a side table's row without the kind byte; it starts with the topic."""
    return key[1:]


def _generation(key: bytes) -> bytes | None:
    """Return the row key prefix of the generation of a key; None: the key has no generation."""
    prefix = topic_prefix(key)
    if prefix is None or len(key) < len(prefix) + GENERATION_BYTES:
        return None
    return key[: len(prefix) + GENERATION_BYTES]
