"""How rows are spread over the keys of a table that tells no sizes: a walk along some of its pages, with leaps.

HBase counts nothing for us. But every salt has the same share of every topic, so one of them is looked at for all, and
not all of it: as long as little is known every page is read, then leaps over keys become longer, by as many rows as
the pages read so far show for their stretch of time. A leap is never over more rows than a small share of all that was
met, nor over more than were met of its topic, so no topic is missed and none is taken for much more than it has. Of a
hundred million rows under a salt that reads one in two hundred.

The trade: what is leapt over is a guess. Rows that came in bursts longer than a leap make pieces uneven; nothing else
rests on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from janitor.spark.columns import split
from janitor.spark.wanted import Wanted
from tms_core.rowkey import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES
from tms_core.tables.base import KeyTable

#: Rows read at once: as many as show a rate in spite of batches of some hundred messages each.
PAGE_ROWS = 1024
#: Rows counted together.
_STEP_ROWS = 16
#: A leap is at most over this share of all that was met so far, or over an eighth of a piece.
_LEAP_SHARE, _LEAPS = 64, 8
#: For how much the pages before the last one count in a rate: all together for as much as three of them.
_KEPT = 3 / 4

_TAIL = {"message": MESSAGE_TAIL_BYTES, "payload": PAYLOAD_TAIL_BYTES}


class Mark(NamedTuple):
    """About how many wanted rows there are from a key to that of the next mark."""

    key: bytes
    rows: int


def survey(table: KeyTable, wanted: Wanted, number: int) -> list[bytes]:
    """Keys that cut the wanted rows of a table into so many pieces, each of about as many rows.

    Args:
        table: of one salt.

    Raises:
        StoreError: the table could not be read.
    """
    marks = list(walked(table, wanted, max(_LEAP_SHARE, _LEAPS * number)))
    ends = list(accumulate(mark.rows for mark in marks))
    if not ends:
        return []
    places = (bisect_left(ends, ends[-1] * piece // number) + 1 for piece in range(1, number))
    return sorted({marks[at].key for at in places if at < len(marks)})


def walked(table: KeyTable, wanted: Wanted, leap_share: int) -> Iterator[Mark]:
    """What a walk along a table shows, in key order.

    Args:
        leap_share: a leap is at most over this share of all rows met so far.
    """
    rows, course = 0, _Course(_TAIL[wanted.table])
    for reach in wanted.ranges():
        start: bytes | None = reach.start
        leapt: Mark | None = None
        while start is not None and (not reach.stop or start < reach.stop):
            page = table.keys(start, reach.stop or None, PAGE_ROWS)
            keys = page.items
            if leapt is not None:
                # One that ended behind its topic was too long, by nobody knows how much.
                yield leapt if keys and course.has(keys[0]) else Mark(leapt.key, leapt.rows // 2)
                leapt = None
            if keys:
                keep = wanted.mask(split(wanted.table, keys))
                for at in range(0, len(keys), _STEP_ROWS):
                    yield Mark(keys[at], int(keep[at : at + _STEP_ROWS].sum()))
                course.met(start, keys)
                rows += len(keys)
            start = page.resume
            if start is None or not keys:
                continue
            behind = wanted.behind(keys[-1])
            if behind is not None:
                start = max(start, behind)
                continue
            skipped = min(rows // leap_share, course.rows)
            if skipped >= PAGE_ROWS:
                leapt = Mark(start, skipped)
                rows += skipped
                start = max(start, min(course.ahead(skipped), wanted.through(keys[-1]) or b"\xff"))


class _Course:
    """How fast keys go by in one generation of a topic.

    Args:
        tail: bytes of a key behind its generation.

    Attributes:
        rows: of the generation, met or leapt over.
    """

    def __init__(self, tail: int) -> None:
        self._tail = tail
        self._prefix = b""
        self._last = 0
        self._seen = self._span = 0.0
        self.rows = 0

    def has(self, key: bytes) -> bool:
        """Whether a key is of the same generation."""
        return key[: -self._tail] == self._prefix

    def met(self, start: bytes, keys: Sequence[bytes]) -> None:
        """Take a page in, which was read from ``start`` on."""
        if not self.has(keys[0]) or not self.has(keys[-1]):
            self._prefix = keys[-1][: -self._tail]
            self._seen = self._span = 0.0
            self.rows = 0
            keys = keys[bisect_left(keys, self._prefix) :]
            start = keys[0]
        self._last = self._number(keys[-1])
        self._seen = self._seen * _KEPT + len(keys)
        self._span = self._span * _KEPT + self._last - self._number(start)
        self.rows += len(keys)

    def ahead(self, rows: int) -> bytes:
        """A key before which about so many rows lie, counted from the last one met."""
        self.rows += rows
        number: int = min(self._last + int(self._span * rows / self._seen), (1 << 8 * self._tail) - 1)
        return self._prefix + number.to_bytes(self._tail, "big")

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[len(self._prefix) :][: self._tail].ljust(self._tail, b"\x00"), "big")
