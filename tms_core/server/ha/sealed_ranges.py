"""Gaps: ranges of ids that are hidden forever, because late rows of failed writes may appear there.

A write cannot be cancelled after it was sent. A process that is suspended during a write sends the rest when it wakes
up, and HBase stores such late rows. Their publishers got no acknowledgement, but a reader that has passed their
positions would not see them, while another reader would.

Therefore a new leader *seals* a topic before the first use. It determines which of the last ids of the former leader
have rows, and stores a gap of all other ids before its own first id. From then on, no reader sees a row in the gap,
whichever server leads. A running write has at most :data:`FRAME_ROWS` adjoining rows, and HBase may have stored a part
of them, so the last rows are checked one by one.

A gap is stored before the topic is read or written in the new term, and a row is acknowledged only before the new term
starts. Therefore an acknowledged row is never in a gap.

A leader treats its own failed write in the same way, because HBase may still execute it after the client's timeout.
Before the next read or write of the topic, the leader checks the rows of the write. If all rows exist, they are valid;
otherwise all are hidden. Therefore at most one write is undecided when a term stops. Readers do not pass rows that may
appear later, and never see a part of a request.

A thread may be suspended while two other servers lead one after the other. Therefore the gaps are read before the lease
is confirmed, they are written by compare-and-set, and each leader that seals a topic changes them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple

from tms_core.clock import Clock
from tms_core.consumers.claim_rows import first_unread
from tms_core.errors import StoreUnavailable
from tms_core.messaging.ids import POSITIONS, find_next_free, id_parts, position, tail
from tms_core.rowkey import MESSAGE_TAIL_BYTES
from tms_core.server.ha.leadership import REACH_MS, Term
from tms_core.tables.base import KEYS, MessageTable, iterate_items
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.side import SideTable

#: The maximum number of rows in one write.
FRAME_ROWS = 2000
#: The maximum distance of ids from their leader's clock, in milliseconds: more than a batch.
_SLACK_MS = 1_000
#: The maximum clock difference to the former leader, in milliseconds (invariant S7).
_CLOCKS_MS = 300_000
#: The retention of empty gaps in milliseconds. When the number of gaps has doubled beyond 256, only gaps in which late
#: writes are still possible are kept.
_RETENTION_MS, _MANY_SPANS = 30 * 86_400_000, 256
#: The first key byte of gaps in the side table.
_GAPS = b"g"
_SPAN = struct.Struct(">QHQH")


class PositionRange(NamedTuple):
    """Positions from ``first`` to before ``stop``."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of one generation of a topic.

    Attributes:
        spans: the ranges, in order and not adjoining.
    """

    spans: tuple[PositionRange, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[PositionRange]) -> Gaps:
        """Return the union of ranges that may overlap."""
        joined: list[PositionRange] = []
        for first, stop in sorted(spans):
            if joined and first <= joined[-1].stop:
                joined[-1] = PositionRange(joined[-1].first, max(stop, joined[-1].stop))
            else:
                joined.append(PositionRange(first, stop))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, value: bytes | None) -> Gaps:
        """Parse the result of :meth:`pack`; None: no gaps."""
        found = _SPAN.iter_unpack(value or b"")
        return cls(tuple(PositionRange(position(*parts[:2]), position(*parts[2:])) for parts in found))

    def pack(self) -> bytes:
        return b"".join(_SPAN.pack(*id_parts(span.first), *id_parts(span.stop)) for span in self.spans)

    @property
    def end(self) -> int:
        """Return the first position after all gaps; 0 without gaps."""
        return self.spans[-1].stop if self.spans else 0

    def hides(self, at: int) -> bool:
        """Return whether a row at a position is hidden."""
        index = bisect_right(self.spans, at, key=lambda span: span.first)
        return index > 0 and at < self.spans[index - 1].stop


class FailedWrite(NamedTuple):
    """A failed write whose rows may appear later.

    Attributes:
        rows: the number of rows in the span.
        term: the term of the write.
        is_lost: whether the write is decided as lost; the write of its gap may be late as well.
    """

    span: PositionRange
    rows: int
    term: Term
    is_lost: bool = False


@dataclass(slots=True)
class _SealedRange:
    """The gaps of one generation, and the term in which it was sealed.

    Attributes:
        undecided: the failed write that is not decided yet.
        hidden: the span of lost writes since the last successful write.
        span_limit: at twice this number of gaps, unnecessary gaps are dropped.
    """

    lock: Lock = field(default_factory=Lock)
    term: Term | None = None
    gaps: Gaps = Gaps()
    undecided: FailedWrite | None = None
    hidden: PositionRange | None = None
    span_limit: int = _MANY_SPANS


class SealedRanges:
    """The gaps of a store's topics; threads may share it.

    Args:
        table: the message table.
        side: the table of the gaps.
        clock: estimates the position of the last rows.
    """

    def __init__(self, table: MessageTable, side: SideTable, clock: Clock) -> None:
        self._table = table
        self._side = side
        self._clock = clock
        self._sealed: dict[bytes, _SealedRange] = {}
        self._lock = Lock()

    def known(self, term: Term, prefix: bytes) -> Gaps | None:
        """Return the gaps of a generation; None: call :meth:`settle` first."""
        sealed = self._get_or_create(prefix)
        return sealed.gaps if sealed.term is term and sealed.undecided is None else None

    def settle(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> Gaps:
        """Seal a generation if this is its first use in a term, and decide a failed write.

        Args:
            term: the current term; if it is over on return, the result is invalid.
            prefix: the row key prefix of the generation.
            confirm: see :meth:`Leadership.confirm`.

        Returns:
            The gaps of the generation.

        Raises:
            StoreError: the store failed, or the term is over.
        """
        sealed = self._get_or_create(prefix)
        with sealed.lock:
            if sealed.term is not term:
                sealed.gaps, sealed.hidden = self._seal(term, prefix, confirm), None
                sealed.term = term
            if (failed := sealed.undecided) is not None:
                # A write of an older term is sealed already, and another leader may have acknowledged some of its
                # rows, so it must not be decided here.
                if failed.term is term:
                    self._decide(sealed, failed, prefix, confirm)
                sealed.undecided = None
            return sealed.gaps

    def hide(self, term: Term, prefix: bytes, span: PositionRange, confirm: Callable[[Term], None]) -> None:
        """Hide the existing and future rows of a span from all readers; raises as :meth:`settle`."""
        sealed = self._get_or_create(prefix)
        with sealed.lock:
            self._add(sealed, term, prefix, span, confirm)

    def note_failed_write(self, prefix: bytes, failed: FailedWrite) -> None:
        """Record a failed write, which the next read or write of the generation decides first."""
        self._get_or_create(prefix).undecided = failed

    def note_written(self, prefix: bytes) -> None:
        """Record a successful write."""
        self._get_or_create(prefix).hidden = None

    def is_undecided(self, prefix: bytes) -> bool:
        """Return whether a failed write is undecided."""
        return self._get_or_create(prefix).undecided is not None

    def _get_or_create(self, prefix: bytes) -> _SealedRange:
        with self._lock:
            return self._sealed.setdefault(prefix, _SealedRange())

    def _seal(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> Gaps:
        raw = self._read(term, prefix, confirm)
        gaps = Gaps.parse(raw)
        if term.previous is None:
            return gaps
        spans = self._gaps_to_keep(prefix, gaps.spans, _RETENTION_MS)
        # The former leader assigned ids after all gaps and all positions of consumers, which may be in the future.
        end = max(gaps.end, first_unread(self._side, prefix))
        return self._replace_gaps(prefix, raw, Gaps.of([*spans, *self._empty(prefix, term.previous, end)]))

    def _decide(
        self, sealed: _SealedRange, failed: FailedWrite, prefix: bytes, confirm: Callable[[Term], None]
    ) -> None:
        """Keep a failed write if all its rows exist; otherwise hide all of them forever."""
        if not failed.is_lost and len(self._positions(prefix, *failed.span)) == failed.rows:
            confirm(failed.term)
            sealed.hidden = None
        else:
            # Record the decision before the gap is written: the gap may be stored although the response is lost.
            sealed.undecided = failed._replace(is_lost=True)
            # No row was written between consecutive lost writes, so one gap covers them: an outage leaves a single gap.
            first = failed.span.first if sealed.hidden is None else sealed.hidden.first
            sealed.hidden = PositionRange(first, failed.span.stop)
            self._add(sealed, failed.term, prefix, sealed.hidden, confirm)

    def _add(
        self, sealed: _SealedRange, term: Term, prefix: bytes, span: PositionRange, confirm: Callable[[Term], None]
    ) -> None:
        """Add a gap to the stored gaps."""
        raw = self._read(term, prefix, confirm)
        gaps = Gaps.of([*Gaps.parse(raw).spans, span])
        if len(gaps.spans) >= 2 * sealed.span_limit:
            gaps = Gaps(tuple(self._gaps_to_keep(prefix, gaps.spans, REACH_MS + _CLOCKS_MS)))
            sealed.span_limit = max(_MANY_SPANS, len(gaps.spans))
        sealed.gaps = self._replace_gaps(prefix, raw, gaps)

    def _read(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> bytes | None:
        """Return the stored gaps of a generation; no later leader has changed them."""
        # Read, and then confirm: if the term is valid, a later leader changes the gaps after this read, and the
        # compare-and-set with these bytes fails.
        raw = self._side.get(_GAPS + prefix)
        confirm(term)
        return raw

    def _replace_gaps(self, prefix: bytes, raw: bytes | None, gaps: Gaps) -> Gaps:
        """Replace the stored gaps by compare-and-set, and return the new gaps.

        Raises:
            StoreUnavailable: another server has changed the gaps.
        """
        value = gaps.pack()
        if value != (raw or b"") and not self._side.exchange(_GAPS + prefix, raw, value):
            raise StoreUnavailable("Another server changed the topic's gaps during the request.", "Try again.")
        return gaps

    def _empty(self, prefix: bytes, previous: LeaseRecord, end: int) -> list[PositionRange]:
        """Return the ranges without rows in which the former leader may have assigned ids.

        Args:
            end: a position after which the former leader assigned its last ids.
        """
        now_ms = self._clock.now_ms()
        next_free = find_next_free(partial(self._table.read, KEYS), prefix, now_ms)
        last_ms = min(previous.renewed_ms + previous.seconds * 1000, now_ms + _CLOCKS_MS)
        stop = min(POSITIONS, max(next_free, end, position(last_ms)) + position(_SLACK_MS))
        first = max(0, next_free - FRAME_ROWS, position(max(0, previous.renewed_ms - REACH_MS)))
        return _between(PositionRange(first, stop), self._positions(prefix, first, next_free))

    def _positions(self, prefix: bytes, first: int, stop: int) -> list[int]:
        if first >= stop:
            return []
        keys = iterate_items(partial(self._table.read, KEYS), prefix + tail(first), prefix + tail(stop), FRAME_ROWS)
        return positions(prefix, list(keys))

    def _gaps_to_keep(self, prefix: bytes, spans: Iterable[PositionRange], retention_ms: int) -> list[PositionRange]:
        """Return the gaps that have rows, or are younger than ``retention_ms``."""
        since = position(max(0, self._clock.now_ms() - retention_ms))
        table = self._table
        return [
            span
            for span in spans
            if span.stop >= since or table.first(prefix + tail(span.first), prefix + tail(span.stop)) is not None
        ]


def _between(span: PositionRange, present: Sequence[int]) -> list[PositionRange]:
    """Return the parts of a span between positions that have rows."""
    firsts = [span.first, *(at + 1 for at in present)]
    return [PositionRange(a, b) for a, b in zip(firsts, [*present, span.stop], strict=True) if a < b]


def positions(prefix: bytes, keys: Sequence[bytes]) -> list[int]:
    """Return the positions of the keys that are message rows."""
    size = len(prefix) + MESSAGE_TAIL_BYTES
    return [int.from_bytes(key[-MESSAGE_TAIL_BYTES:], "big") for key in keys if len(key) == size]
