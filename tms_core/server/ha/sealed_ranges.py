"""Ids that stay empty forever: where rows come to lie, unseen, that come later than they should.

A write cannot be stopped once it was sent, and a process that was stopped in the middle of sending sends the rest when
it is woken. HBase takes such rows like any other. Their publishers never got an acknowledgement; but a reader
who has passed their place would not see them, and one who has not would, so the two would not agree.

So before a new leader uses a topic it *seals* it: it looks which of the ids that its predecessor may have given last
have rows, and writes down that all others up to its own first one have none. From then on no reader is shown a row
there, whichever server leads. One write under way has at most :data:`FRAME_ROWS` rows, next to each other, and HBase
may have done a part of them; therefore the rows at the end are looked at one by one.

A gap is written before the topic is read or written in the new term, and a row is acknowledged only if the new term had
not started. So no acknowledged row is ever in a gap.

A leader does the same for a write of its own that has failed: HBase may still do it, in part or whole, behind the time
that its client waits. Before the topic is read or written again it is decided whether all of its rows are there. They
count then; else none of them is ever shown. So at most one write is undecided when a term ends, no reader passes a row
that may yet come, and none sees a part of a request.

A thread may be held up for as long as it takes two other servers to lead one after the other. So the gaps are read
before the lease is read once more, and written only where they are still the data read; and each leader that seals a
topic changes them.
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
from tms_core.messaging.ids import POSITIONS, first_free, id_parts, position, tail
from tms_core.rowkey import MESSAGE_TAIL_BYTES
from tms_core.server.ha.leadership import REACH_MS, Term
from tms_core.tables.base import KEYS, MessageTable
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.side import SideTable

#: Rows in one write under way, at most.
FRAME_ROWS = 2000
#: How far ids may be ahead of their leader's clock, in milliseconds: a batch and more.
_SLACK_MS = 1_000
#: How far the former leader's clock is believed to be ahead of ours, in milliseconds, as of all clocks (rule S7).
_CLOCKS_MS = 300_000
#: How long a gap is kept in which there is no row, in milliseconds: nothing is under way for a month. Where there are
#: many, it is looked each time they are twice as many which of them are needed within the reach of a former leader.
_KEPT_MS, _MANY_SPANS = 30 * 86_400_000, 256
#: What keys begin with in the side table.
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
        spans: in order, none touches another.
    """

    spans: tuple[PositionRange, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[PositionRange]) -> Gaps:
        """Return all positions of some spans that may overlap."""
        joined: list[PositionRange] = []
        for first, stop in sorted(spans):
            if joined and first <= joined[-1].stop:
                joined[-1] = PositionRange(joined[-1].first, max(stop, joined[-1].stop))
            else:
                joined.append(PositionRange(first, stop))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, value: bytes | None) -> Gaps:
        """Read what :meth:`pack` wrote; nothing is no gap."""
        found = _SPAN.iter_unpack(value or b"")
        return cls(tuple(PositionRange(position(*parts[:2]), position(*parts[2:])) for parts in found))

    def pack(self) -> bytes:
        return b"".join(_SPAN.pack(*id_parts(span.first), *id_parts(span.stop)) for span in self.spans)

    @property
    def end(self) -> int:
        """Return the first position behind all of them; 0 without any."""
        return self.spans[-1].stop if self.spans else 0

    def hides(self, at: int) -> bool:
        """Return whether a row at a position is not to be seen."""
        index = bisect_right(self.spans, at, key=lambda span: span.first)
        return index > 0 and at < self.spans[index - 1].stop


class FailedWrite(NamedTuple):
    """A write that has failed, so that its rows may still come.

    Attributes:
        rows: how many it has in the span.
        term: in which it was sent.
        is_lost: whether nothing of it counts; what was sent to note that may be done late, too.
    """

    span: PositionRange
    rows: int
    term: Term
    is_lost: bool = False


@dataclass(slots=True)
class _SealedRange:
    """The gaps of one generation, and in which term they were looked for.

    Attributes:
        undecided: the last write, if it has failed and it is not noted what it has left.
        hidden: where one was of which nothing counts and behind which nothing was written yet.
        kept: how many gaps there were when those were last dropped that are not needed.
    """

    lock: Lock = field(default_factory=Lock)
    term: Term | None = None
    gaps: Gaps = Gaps()
    undecided: FailedWrite | None = None
    hidden: PositionRange | None = None
    kept: int = _MANY_SPANS


class SealedRanges:
    """The gaps of a store's topics; threads may share it.

    Args:
        table: the message table.
        side: where gaps are written down.
        clock: where the last rows are likely to be.
    """

    def __init__(self, table: MessageTable, side: SideTable, clock: Clock) -> None:
        self._table = table
        self._side = side
        self._clock = clock
        self._sealed: dict[bytes, _SealedRange] = {}
        self._lock = Lock()

    def known(self, term: Term, prefix: bytes) -> Gaps | None:
        """Return the gaps of a generation; None: they are to be settled first."""
        sealed = self._of(prefix)
        return sealed.gaps if sealed.term is term and sealed.undecided is None else None

    def settle(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> Gaps:
        """Seal a generation if this is the first time in a term, and decide what a failed write has left.

        Args:
            term: which has not ended when this returns, or what is returned means nothing.
            prefix: the start of the generation's row keys.
            confirm: see :meth:`Leadership.confirm`.

        Returns:
            Its gaps.

        Raises:
            StoreError: it could not be sealed or decided, or the term is over.
        """
        sealed = self._of(prefix)
        with sealed.lock:
            if sealed.term is not term:
                sealed.gaps, sealed.hidden = self._look(term, prefix, confirm), None
                sealed.term = term
            if (failed := sealed.undecided) is not None:
                # What is of another term was sealed since, and a part of it may have been acknowledged.
                if failed.term is term:
                    self._decide(sealed, failed, prefix, confirm)
                sealed.undecided = None
            return sealed.gaps

    def hide(self, term: Term, prefix: bytes, span: PositionRange, confirm: Callable[[Term], None]) -> None:
        """Hide the present and later rows of a span from all readers; raises as :meth:`settle`."""
        sealed = self._of(prefix)
        with sealed.lock:
            self._add(sealed, term, prefix, span, confirm)

    def doubt(self, prefix: bytes, failed: FailedWrite) -> None:
        """A write of rows has failed. Let the next write wait until the fate of this one is decided."""
        self._of(prefix).undecided = failed

    def wrote(self, prefix: bytes) -> None:
        """A write was done."""
        self._of(prefix).hidden = None

    def is_undecided(self, prefix: bytes) -> bool:
        """Return whether the fate of a failed write is undecided."""
        return self._of(prefix).undecided is not None

    def _of(self, prefix: bytes) -> _SealedRange:
        with self._lock:
            return self._sealed.setdefault(prefix, _SealedRange())

    def _look(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> Gaps:
        raw = self._read(term, prefix, confirm)
        gaps = Gaps.parse(raw)
        if term.former is None:
            return gaps
        kept = self._needed(prefix, gaps.spans, _KEPT_MS)
        # Ids are given behind all gaps, and behind all that consumers have read, which may lie ahead.
        end = max(gaps.end, first_unread(self._side, prefix))
        return self._written(prefix, raw, Gaps.of([*kept, *self._empty(prefix, term.former, end)]))

    def _decide(
        self, sealed: _SealedRange, failed: FailedWrite, prefix: bytes, confirm: Callable[[Term], None]
    ) -> None:
        """Have a failed write counted if all its rows are there; else none of them ever is."""
        if not failed.is_lost and len(self._positions(prefix, *failed.span)) == failed.rows:
            confirm(failed.term)
            sealed.hidden = None
        else:
            # That stays so, whatever comes: the gap may be written although no answer to it comes.
            sealed.undecided = failed._replace(is_lost=True)
            # Nothing is ever written between two of them, so that a store that fails for long leaves one gap.
            first = failed.span.first if sealed.hidden is None else sealed.hidden.first
            sealed.hidden = PositionRange(first, failed.span.stop)
            self._add(sealed, failed.term, prefix, sealed.hidden, confirm)

    def _add(
        self, sealed: _SealedRange, term: Term, prefix: bytes, span: PositionRange, confirm: Callable[[Term], None]
    ) -> None:
        """Write down one more gap."""
        raw = self._read(term, prefix, confirm)
        gaps = Gaps.of([*Gaps.parse(raw).spans, span])
        if len(gaps.spans) >= 2 * sealed.kept:
            gaps = Gaps(tuple(self._needed(prefix, gaps.spans, REACH_MS + _CLOCKS_MS)))
            sealed.kept = max(_MANY_SPANS, len(gaps.spans))
        sealed.gaps = self._written(prefix, raw, gaps)

    def _read(self, term: Term, prefix: bytes, confirm: Callable[[Term], None]) -> bytes | None:
        """Return the gaps as they stand there; another server that leads has not sealed the generation before that."""
        raw = self._side.get(_GAPS + prefix)
        confirm(term)
        return raw

    def _written(self, prefix: bytes, raw: bytes | None, gaps: Gaps) -> Gaps:
        """Gaps, once they are written down in the place of the data read."""
        value = gaps.pack()
        if value != (raw or b"") and not self._side.exchange(_GAPS + prefix, raw, value):
            raise StoreUnavailable("What readers are shown of the topic was changed meanwhile.", "Try again.")
        return gaps

    def _empty(self, prefix: bytes, former: LeaseRecord, end: int) -> list[PositionRange]:
        """Return where the former leader may have given ids, and there is no row; it gave none before ``end``
        lately.
        """
        now_ms = self._clock.now_ms()
        free = first_free(partial(self._table.read, KEYS), prefix, now_ms)
        last_ms = min(former.renewed_ms + former.seconds * 1000, now_ms + _CLOCKS_MS)
        stop = min(POSITIONS, max(free, end, position(last_ms)) + position(_SLACK_MS))
        first = max(0, free - FRAME_ROWS, position(max(0, former.renewed_ms - REACH_MS)))
        return _between(PositionRange(first, stop), self._positions(prefix, first, free))

    def _positions(self, prefix: bytes, first: int, stop: int) -> list[int]:
        found: list[int] = []
        start: bytes | None = prefix + tail(first)
        while start is not None and first < stop:
            page = self._table.read(KEYS, start, prefix + tail(stop), FRAME_ROWS)
            found += positions(prefix, page.items)
            start = page.resume
        return found

    def _needed(self, prefix: bytes, spans: Iterable[PositionRange], kept_ms: int) -> list[PositionRange]:
        """Return those gaps that are younger than so many milliseconds, or have rows."""
        since = position(max(0, self._clock.now_ms() - kept_ms))
        table = self._table
        return [
            span
            for span in spans
            if span.stop >= since or table.first(prefix + tail(span.first), prefix + tail(span.stop)) is not None
        ]


def _between(span: PositionRange, present: Sequence[int]) -> list[PositionRange]:
    """What of a span is not present."""
    firsts = [span.first, *(at + 1 for at in present)]
    return [PositionRange(a, b) for a, b in zip(firsts, [*present, span.stop], strict=True) if a < b]


def positions(prefix: bytes, keys: Sequence[bytes]) -> list[int]:
    """Return the positions of those keys that are rows of ours."""
    size = len(prefix) + MESSAGE_TAIL_BYTES
    return [int.from_bytes(key[-MESSAGE_TAIL_BYTES:], "big") for key in keys if len(key) == size]
