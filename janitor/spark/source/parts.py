"""Pieces of a table, one for each task.

Topics are not suitable units: one topic may have 90 % of all rows, and a thousand topics a few rows each. A piece
consists of key ranges, and a cut may be inside a topic or a generation, because each decision is about one row. LevelDB
returns the bytes between two keys within microseconds, so pieces have about equal sizes. In HBase the salt is a hash of
the whole key, so salts have about equal sizes. A sweep cuts a large salt by the counted rows of topics; a query for the
rows between two times cuts each salt into equal periods.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from janitor.spark.source.selection import RowSelection
from janitor.state.base import TopicCount
from tms_core.rowkey import pointer_prefix, time_prefix
from tms_core.tables.base import KeyRange, KeyReads, Reads
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS

#: The size of a piece on disk in bytes, if no number of pieces is set.
PIECE_BYTES = 16 << 20
#: The number of messages in a piece of a salt of HBase, if no number of pieces is set; about 30 s of work.
PIECE_ROWS = 1_000_000
#: The minimum size of a piece: LevelDB estimates sizes in blocks of about 4 KiB, too coarse for smaller pieces.
MIN_PIECE_BYTES = 64 << 10
#: The size of a LevelDB block, which is read and compressed as a whole.
_BLOCK_BYTES = 4096
#: The divisor of a piece's size that gives the tolerance of a cut.
_TOLERANCE = 20
#: The number of key bytes in the search for the middle between two keys; enough for a name, a generation and a time.
_WIDTH = 96


class Piece(NamedTuple):
    """The rows of one task.

    Attributes:
        salt: the salt of the rows; None if the store has no salts.
        ranges: the key ranges, in order.
        times_ms: the half-open interval of the rows' times; None for all times.
    """

    salt: int | None
    ranges: tuple[KeyRange, ...]
    times_ms: tuple[int, int] | None = None

    def __str__(self) -> str:
        salt = "" if self.salt is None else f"salt {self.salt}, "
        first, last = self.ranges[0].start, self.ranges[-1].stop
        several = f", in {len(self.ranges)} ranges" if len(self.ranges) > 1 else ""
        times = "" if self.times_ms is None else ", from {} until {} ms".format(*self.times_ms)
        end = "the last" if last is None else _describe_key(last)
        return f"{salt}keys {_describe_key(first) or 'from the first'} to {end}{several}{times}"

    def of(self, selection: RowSelection) -> RowSelection:
        """Return the selection, limited to this piece."""
        return (
            selection if self.times_ms is None else replace(selection, from_ms=self.times_ms[0], to_ms=self.times_ms[1])
        )


#: The piece without rows.
NOTHING = Piece(None, ())


def pieces(parts: Sequence[tuple[int | None, Reads]], selection: RowSelection, number: int | None) -> list[Piece]:
    """Return the pieces to read for a selection.

    Args:
        parts: the parts of the store by their salts.
        number: the approximate number of pieces, at least one per salt. None: by the bytes in LevelDB, one per salt in
            HBase.
    """
    ranges = selection.ranges()
    tables = [
        (salt, part.message if selection.table == "message" else part.payload)
        for salt, part in parts
        if selection.salts is None or salt in selection.salts
    ]
    if not ranges or not tables:
        return []
    salt, table = tables[0]
    if salt is None:
        cuts = cut_keys(table, selection.stretches(table), number)
        return [Piece(None, some) for some in between(ranges, cuts) if some]
    times = _times(selection, round((number or 0) / len(tables)))
    return [Piece(salt, tuple(ranges), some) for salt, _ in tables for some in times]


def cut_evenly(table: KeyReads, reach: KeyRange, number: int | None) -> list[KeyRange]:
    """Cut a range of a LevelDB table into pieces of about as many bytes.

    Args:
        number: the number of pieces; fewer if they would be too small. None: by size.
    """
    return [one for some in between([reach], cut_keys(table, [reach], number)) for one in some]


def cut_keys(table: KeyReads, stretches: Sequence[KeyRange], number: int | None) -> list[bytes]:
    """Return the keys at which to cut a LevelDB table.

    Args:
        stretches: the ranges to read, in key order and disjoint.
        number: the number of pieces; fewer if they would become too small. None: by the bytes.
    """
    ruler = _MeasuredRanges(table, stretches)
    number = min(number or -(-ruler.length // PIECE_BYTES), ruler.length // MIN_PIECE_BYTES)
    if number < 2:
        return []
    tolerance = ruler.length // number // _TOLERANCE
    return sorted({ruler.key(ruler.length * at // number, tolerance) for at in range(1, number)})


def cut_by_counts(
    counts: Mapping[TopicId, TopicCount], topics: Iterable[TopicMetadata], salts: int, number: int | None
) -> list[bytes]:
    """Return the keys at which to cut each salt of a store in HBase, which does not report sizes.

    Cuts divide the counted messages evenly, as if the messages of a topic were evenly distributed over time. Payloads
    sort by transaction, so each cut has a second key for them.

    Args:
        counts: the counts of counted topics.
        topics: the topics of the store, in any order.
        salts: the number of salts, at least 1.
        number: the approximate number of pieces, at least one for each salt. None: one for each ``PIECE_ROWS``.
    """
    known = [
        (topic, count)
        for topic in sorted(topics, key=lambda topic: topic.topic.prefix)
        if topic.generation > 0 and (count := counts.get(topic.topic)) is not None and count.messages
    ]
    total = sum(count.messages for _, count in known)
    pieces = -(-total // (salts * PIECE_ROWS)) if number is None else number // salts
    marks = deque(total * at // pieces for at in range(1, pieces))
    keys: set[bytes] = set()
    before = 0
    for topic, count in known:
        while marks and marks[0] < before + count.messages:
            share = (marks.popleft() - before) / count.messages
            oldest_ms = count.oldest_ms or 0
            middle_ms = oldest_ms + round(share * ((count.newest_ms or 0) - oldest_ms))
            keys.add(time_prefix(topic.topic.prefix, topic.generation, middle_ms))
            keys.add(pointer_prefix(topic.topic.prefix, topic.generation, middle_ms * TX_PER_MS))
        before += count.messages
    return sorted(keys)


def between(ranges: Sequence[KeyRange], cuts: Sequence[bytes]) -> Iterator[tuple[KeyRange, ...]]:
    """Yield the ranges before the first cut, between two cuts, and after the last cut; some may be empty.

    Args:
        ranges: the ranges, sorted and disjoint.
        cuts: the keys, sorted.
    """
    rest = deque(ranges)
    for cut in (*cuts, None):
        some: list[KeyRange] = []
        while rest and (cut is None or rest[0].start < cut):
            start, stop = rest.popleft()
            if cut is not None and (stop is None or cut < stop):
                some.append(KeyRange(start, cut))
                rest.appendleft(KeyRange(cut, stop))
            else:
                some.append(KeyRange(start, stop))
        yield tuple(some)


def _times(selection: RowSelection, share: int) -> list[tuple[int, int] | None]:
    """Return the time intervals into which each salt is cut, of equal length if possible.

    Payloads are not cut: their keys do not sort by time, so a task could not skip rows.
    """
    if share < 2 or selection.table == "payload" or selection.from_ms is None or selection.to_ms is None:
        return [None]
    first, length = selection.from_ms, selection.to_ms - selection.from_ms
    if length < share:
        return [None]
    return [*pairwise(first + length * at // share for at in range(share + 1))]


class _MeasuredRanges:
    """Consecutive ranges of a table, with their sizes.

    Attributes:
        length: the total size on disk in bytes.
    """

    def __init__(self, table: KeyReads, stretches: Sequence[KeyRange]) -> None:
        self._table = table
        self._stretches = stretches
        self._ends = list(accumulate(_size(table, *stretch) for stretch in stretches))
        self.length = self._ends[-1] if self._ends else 0

    def key(self, mark: int, tolerance: int) -> bytes:
        """Return a key before which the ranges have ``mark`` bytes, with a tolerance in bytes plus a block."""
        at = bisect_right(self._ends, mark)
        start, stop = self._stretches[at]
        share = mark - (self._ends[at - 1] if at else 0)
        low, high = _number(start), 256**_WIDTH - 1 if stop is None else _number(stop)
        while high - low > 1:
            middle = (low + high) // 2
            before = _size(self._table, start, _key(middle))
            if abs(before - share) <= tolerance + _BLOCK_BYTES:
                return max(start, _key(middle))
            low, high = (middle, high) if before < share else (low, middle)
        return max(start, _key(high))


def _describe_key(key: bytes) -> str:
    return key[:32].hex()


def _size(table: KeyReads, start: bytes, stop: bytes | None) -> int:
    return table.estimate_bytes(start, stop)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_WIDTH].ljust(_WIDTH, b"\x00"), "big")


def _key(number: int) -> bytes:
    return number.to_bytes(_WIDTH, "big").rstrip(b"\x00")
