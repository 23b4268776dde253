"""The store as the server that leads may use it: every call says first whether it still leads the topic.

Writes are acknowledged only after the lease was read again behind them, and rows that came late are not shown
(:mod:`tms_core.server.ha.leadership` says why that is enough). The messaging service above knows nothing of all this: a
server that does not lead gets errors from its store.

Topics are not fenced: each change of theirs compares what is there with what was read, so any server may make it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from tms_core.errors import StoreError, TooLarge, Unavailable
from tms_core.messaging.producers.rows import is_of_producer
from tms_core.rowkey import GENERATION_BYTES, MESSAGE_TAIL_BYTES, topic_prefix
from tms_core.server.ha.leadership import Leadership, Term, not_leading, undecided
from tms_core.server.ha.rota import Slots
from tms_core.server.ha.sealed_ids import FRAME_ROWS, FailedWrite, Gaps, PositionRange, Seals
from tms_core.tables.base import (
    KeyTable,
    MessageTable,
    MessageValue,
    Page,
    PayloadTable,
    Store,
    TableName,
    TxCell,
    partly_written,
)
from tms_core.tables.side import SideChange, SideTable

K = TypeVar("K", bound=KeyTable)
V = TypeVar("V")


class FencedStore(Store):
    """A store whose messages only the leader reads and writes.

    Args:
        store: the tables; stays the caller's.
        slots: know who leads.
        seals: know which rows are not shown.
    """

    def __init__(self, store: Store, slots: Slots, seals: Seals) -> None:
        self.calls = store.calls
        self.metadata = store.metadata
        self.message = FencedMessageTable(store.message, slots, seals)
        self.payload = FencedPayloadTable(store.payload, slots)
        self._store = store

    def identity(self) -> str:
        """That of the store itself."""
        return self._store.identity()

    def lineage(self) -> Mapping[str, Any]:
        return self._store.lineage()

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        return self._store.restored_since(known)

    def close(self) -> None:
        """Nothing was opened."""


class _Fence:
    """What surrounds each read and each change of rows of one topic.

    Args:
        slots: know who leads the topic.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @contextmanager
    def changing(self, key: bytes) -> Iterator[None]:
        """A change of rows that are there, be it to take back what was put."""
        with ExitStack() as stack:
            leadership = self._slots.of(key)
            try:
                term = stack.enter_context(leadership.writing())
            except Unavailable as error:
                raise undecided() from error
            try:
                yield
            except StoreError:
                leadership.doubt()
                raise
            leadership.confirm(term)

    @contextmanager
    def reading(self, key: bytes) -> Iterator[Term]:
        """What was read counts only if this server led until it had it."""
        leadership = self._slots.of(key)
        term = leadership.term()
        yield term
        if not leadership.is_still(term):
            raise not_leading()


class _Fenced(Generic[K]):
    """What the message and the payload table let a leader do."""

    def __init__(self, table: K, slots: Slots) -> None:
        self._table = table
        self._slots = slots
        fence = _Fence(slots)
        self._changing, self._reading = fence.changing, fence.reading
        self.keys_per_call = table.keys_per_call

    @property
    def most_value_bytes(self) -> int | None:
        return self._table.most_value_bytes

    def check_sizes(self, values: Sequence[bytes]) -> None:
        self._table.check_sizes(values)

    def delete(self, keys: Sequence[bytes]) -> None:
        for some in self._slots.divided(keys, lambda key: key):
            with self._changing(some[0]):
                self._table.delete(some)

    def sync(self) -> None:
        self._table.sync()

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._table.estimate_bytes(start, stop)

    def compact(self, start: bytes, stop: bytes) -> None:
        self._table.compact(start, stop)

    def _send(
        self,
        leadership: Leadership,
        term: Term,
        pieces: Iterable[Sequence[tuple[bytes, V]]],
        put: Callable[[Sequence[tuple[bytes, V]]], None],
    ) -> None:
        """Write rows of one topic, piece by piece, and make sure behind the last one that all of them count."""
        try:
            for number, piece in enumerate(pieces):
                if number and not leadership.is_still(term):
                    raise undecided()
                try:
                    put(piece)
                except TooLarge as error:
                    if number:
                        raise partly_written(error) from error
                    raise
        except TooLarge:
            # Nothing was sent to HBase, so nothing can come late.
            raise
        except BaseException:
            leadership.doubt()
            raise
        leadership.confirm(term)


class FencedMessageTable(_Fenced[MessageTable], MessageTable):
    """The message table, as a leader sees it."""

    name: TableName = "message"

    def __init__(self, table: MessageTable, slots: Slots, seals: Seals) -> None:
        super().__init__(table, slots)
        self._seals = seals

    def reserved(self, prefix: bytes) -> int:
        with self._reading(prefix) as term:
            return self._gaps(term, prefix).end

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        with self._reading(start) as term:
            is_shown = self._shown(term, start)
            page = self._table.keys(start, stop, limit)
        return Page(list(filter(is_shown, page.items)), page.resume) if is_shown else page

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, MessageValue]]:
        with self._reading(start) as term:
            is_shown = self._shown(term, start)
            page = self._table.rows(start, stop, limit, most_bytes)
        return Page([row for row in page.items if is_shown(row[0])], page.resume) if is_shown else page

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[TxCell]:
        """Those of rows that no reader is shown, too: they are negated as all others."""
        with self._reading(start) as term:
            self._shown(term, start)
            return self._table.cells(start, stop, limit)

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        self._settle_all([cell.key for cell in cells])
        with self._changing(cells[0].key if cells else b""):
            return self._table.invert(cells)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._settle_all(keys)
        super().delete(keys)

    def hide(self, keys: Sequence[bytes]) -> None:
        prefix = keys[0][:-MESSAGE_TAIL_BYTES]
        with self._reading(prefix) as term, self._settling(prefix, term) as confirm:
            self._seals.hide(term, prefix, _span(keys[0], keys[-1]), confirm)

    def put(self, rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        """Write rows of one generation, in the order of their positions."""
        if not rows:
            return
        first, last = rows[0][0], rows[-1][0]
        prefix = first[:-MESSAGE_TAIL_BYTES]
        leadership = self._slots.of(prefix)
        self._settle(prefix)
        with leadership.writing() as term:
            try:
                self._send(leadership, term, _pieces(rows), self._table.put)
            except TooLarge:
                raise
            except BaseException:
                self._seals.doubt(prefix, FailedWrite(_span(first, last), len(rows), term))
                raise
        self._seals.wrote(prefix)

    def _settle(self, prefix: bytes) -> None:
        """Decide what a failed write has left."""
        if self._seals.is_undecided(prefix):
            with self._reading(prefix) as term:
                self._gaps(term, prefix)

    def _settle_all(self, keys: Sequence[bytes]) -> None:
        """Decide what failed writes have left, before rows are changed that are there."""
        try:
            for prefix in {key[:-MESSAGE_TAIL_BYTES] for key in keys}:
                self._settle(prefix)
        except Unavailable as error:
            raise undecided() from error

    def _gaps(self, term: Term, prefix: bytes) -> Gaps:
        """The gaps of a generation in a term, settled before."""
        if (known := self._seals.known(term, prefix)) is not None:
            return known
        with self._settling(prefix, term) as confirm:
            return self._seals.settle(term, prefix, confirm)

    @contextmanager
    def _settling(self, prefix: bytes, term: Term) -> Iterator[Callable[[Term], None]]:
        """What surrounds a change of the gaps; gives what confirms that the term runs."""
        leadership = self._slots.of(prefix)
        with leadership.writing() as now:
            if now is not term:
                raise not_leading()
            try:
                yield leadership.confirm
            except BaseException:
                leadership.doubt()
                raise

    def _shown(self, term: Term, start: bytes) -> Callable[[bytes], bool] | None:
        """Tell which keys readers are shown, by where the gaps of a generation are; None: all of them.

        Asked before the table is read: of a row that comes between, it would not be known whether it is there.
        """
        prefix = _generation(start)
        if prefix is None:
            return None
        size = len(prefix) + MESSAGE_TAIL_BYTES
        gaps = self._gaps(term, prefix)
        if not gaps.spans:
            return None
        return lambda key: len(key) != size or not key.startswith(prefix) or not gaps.hides(_position(key))


class FencedPayloadTable(_Fenced[PayloadTable], PayloadTable):
    """The payload table, as a leader sees it.

    A late payload needs no gap. Its transaction cannot be committed, or its producer has stored it once more; and that
    is in the same place (:class:`~tms_core.messaging.publish.writer.PayloadWriter`).
    """

    name: TableName = "payload"

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        with self._reading(start):
            return self._table.keys(start, stop, limit)

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int | None = None
    ) -> Page[tuple[bytes, bytes]]:
        with self._reading(start):
            return self._table.rows(start, stop, limit, most_bytes)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        leadership = self._slots.of(rows[0][0] if rows else b"")
        pieces = (rows[first : first + FRAME_ROWS] for first in range(0, len(rows), FRAME_ROWS))
        with leadership.writing() as term:
            self._send(leadership, term, pieces, self._table.put)


class FencedSide(SideTable):
    """The side table, as a leader sees it: for positions, claims and producers, each behind the lead of its topic.

    But which generation of a producer counts, and what it has begun, is read by the leaders of all topics that it
    publishes to.

    What a deposed leader still sends changes nothing: a position is only written where the one that was read still is,
    and a claim of a poll that was not answered is void, because its client invalidates the transaction.

    Args:
        side: the table; stays the caller's.
        slots: know who leads.
    """

    def __init__(self, side: SideTable, slots: Slots) -> None:
        self._fence = _Fence(slots)
        self._slots = slots
        self._side = side

    def get(self, key: bytes) -> bytes | None:
        if is_of_producer(key):
            return self._side.get(key)
        with self._fence.reading(_about(key)):
            return self._side.get(key)

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[tuple[bytes, bytes]]:
        # A search through all topics is for what is of one; the change that follows is behind the lead of that.
        if is_of_producer(start) or (stop is not None and not _about(stop)):
            return self._side.rows(start, stop, limit)
        with self._fence.reading(_about(start)):
            return self._side.rows(start, stop, limit)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        for some in self._slots.divided(rows, lambda row: _about(row[0])):
            with self._fence.changing(_about(some[0][0])):
                self._side.put(some)

    def delete(self, keys: Sequence[bytes]) -> None:
        for some in self._slots.divided(keys, _about):
            with self._fence.changing(_about(some[0])):
                self._side.delete(some)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        # All are about one topic; what goes with them may be about the home of the producer.
        with self._fence.changing(_about(changes[0].key)):
            return self._side.exchange_each(changes)

    def have_one_leader(self, *keys: bytes) -> bool:
        return len({self._slots.number(_about(key)) for key in keys}) == 1

    def close(self) -> None:
        """Nothing was opened."""


def _position(key: bytes) -> int:
    """Where a row lies on its generation's line."""
    return int.from_bytes(key[-MESSAGE_TAIL_BYTES:], "big")


def _span(first: bytes, last: bytes) -> PositionRange:
    """From one row to another, both included."""
    return PositionRange(_position(first), _position(last) + 1)


def _pieces(rows: Sequence[tuple[bytes, V]]) -> Iterator[Sequence[tuple[bytes, V]]]:
    """Rows in writes that have :data:`FRAME_ROWS` positions each at most."""
    first = 0
    while first < len(rows):
        end = _position(rows[first][0]) + FRAME_ROWS
        stop = bisect_left(rows, end, first, key=lambda row: _position(row[0]))
        yield rows[first:stop]
        first = stop


def _about(key: bytes) -> bytes:
    """The topic that a row of the side table is about: its key behind the byte that says what kind it is."""
    return key[1:]


def _generation(key: bytes) -> bytes | None:
    """The start of the rows of a key's generation; None where it has none."""
    prefix = topic_prefix(key)
    if prefix is None or len(key) < len(prefix) + GENERATION_BYTES:
        return None
    return key[: len(prefix) + GENERATION_BYTES]
