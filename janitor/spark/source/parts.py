"""Where a LevelDB table is to be cut, so that what lies between two cuts takes about as long to be read.

LevelDB tells how many bytes lie between two keys, which costs microseconds, so a key with so many bytes before it is
found by halving. Bytes alone mislead: of small rows a hundred times as many fit into them. So bytes are a ruler only:
along it lie bins of equal length, a few rows in each tell how many it has, and cuts are made by the weight of both.

The trade: a few hundred rows stand for a bin, which may be a quarter of a piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from janitor.ranges import Range
from tms_core.tables.base import KeyTable

#: How many bytes, as they lie on disk, one piece should have where nobody says how many pieces there should be.
PIECE_BYTES = 16 << 20
#: LevelDB tells sizes by the block, about 4 KiB: a piece of fewer bytes could not be cut evenly.
LEAST_BYTES = 64 << 10
#: Bytes that take as long as a row does besides.
ROW_BYTES = 1024
#: Bins for each piece, and at most, as long as there are not more pieces.
_BINS, _MOST_BINS = 4, 1024
#: Rows that tell what a bin holds.
_SAMPLE_ROWS = 1024
#: What LevelDB reads and compresses at once.
_BLOCK_BYTES = 4096
#: How near a cut has to come to its place, as a share of what is cut.
_TOLERANCE = 20
#: Bytes of a key that are looked at when the middle between two keys is sought; as long as a name, a generation and a
#: time are.
_WIDTH = 96


def cut_keys(table: KeyTable, stretches: Sequence[Range], number: int | None) -> list[bytes]:
    """Keys at which to cut.

    Args:
        stretches: where the rows lie that are to be read, in key order and apart; an empty stop is the table's end.
        number: how many pieces; fewer where they would become too small. None: as many as there are bytes for.
    """
    ruler = _Ruler(table, stretches)
    number = min(number or -(-ruler.length // PIECE_BYTES), ruler.length // LEAST_BYTES)
    if number < 2:
        return []
    bins = min(number * _BINS, max(number, _MOST_BINS))
    marks = [ruler.length * at // bins for at in range(bins + 1)]
    edges = sorted(ruler.key(mark, ruler.length // bins // _TOLERANCE) for mark in marks[1:-1])
    weights = [_weight(table, some) for some in between(stretches, edges)]
    tolerance = ruler.length // number // _TOLERANCE
    return sorted({ruler.key(mark, tolerance) for mark in _even(marks, weights, number)})


def between(ranges: Sequence[Range], cuts: Sequence[bytes]) -> Iterator[tuple[Range, ...]]:
    """What lies before the first cut, between two cuts each, and behind the last; some of it may be nothing.

    Args:
        ranges: in key order and apart; an empty stop is the table's end.
        cuts: in key order.
    """
    rest = deque(ranges)
    for cut in (*cuts, b""):
        some: list[Range] = []
        while rest and (not cut or rest[0].start < cut):
            start, stop = rest.popleft()
            if cut and (not stop or cut < stop):
                some.append(Range(start, cut))
                rest.appendleft(Range(cut, stop))
            else:
                some.append(Range(start, stop))
        yield tuple(some)


class _Ruler:
    """Stretches of a table laid end to end, measured in bytes.

    Attributes:
        length: of all, in bytes on disk.
    """

    def __init__(self, table: KeyTable, stretches: Sequence[Range]) -> None:
        self._table = table
        self._stretches = stretches
        self._ends = list(accumulate(_size(table, *stretch) for stretch in stretches))
        self.length = self._ends[-1] if self._ends else 0

    def key(self, mark: int, tolerance: int) -> bytes:
        """A key before which so many bytes lie, give or take as many and a block."""
        at = bisect_right(self._ends, mark)
        start, stop = self._stretches[at]
        share = mark - (self._ends[at - 1] if at else 0)
        low, high = _number(start), _number(stop) if stop else 256**_WIDTH - 1
        while high - low > 1:
            middle = (low + high) // 2
            before = _size(self._table, start, _key(middle))
            if abs(before - share) <= tolerance + _BLOCK_BYTES:
                return max(start, _key(middle))
            low, high = (middle, high) if before < share else (low, middle)
        return max(start, _key(high))


def _even(marks: Sequence[int], weights: Sequence[int], number: int) -> Iterator[int]:
    """Marks between so many pieces of the same weight, where each bin is alike throughout."""
    ends = list(accumulate(weights))
    for piece in range(1, number):
        share = ends[-1] * piece // number
        at = bisect_right(ends, share)
        before = ends[at - 1] if at else 0
        yield marks[at] + (marks[at + 1] - marks[at]) * (share - before) // weights[at]


def _weight(table: KeyTable, some: Sequence[Range]) -> int:
    """Of a bin: its bytes, and what its rows take besides."""
    seen, seen_bytes, whole = 0, 0, sum(_size(table, *reach) for reach in some)
    for start, stop in some:
        page = table.keys(start, stop or None, _SAMPLE_ROWS - seen)
        seen += len(page.items)
        seen_bytes += _size(table, start, page.resume or stop)
        if page.resume is not None:
            # The rest is taken for more of the same.
            return whole + seen * max(whole, seen_bytes) // max(seen_bytes, _BLOCK_BYTES) * ROW_BYTES
    return whole + seen * ROW_BYTES


def _size(table: KeyTable, start: bytes, stop: bytes) -> int:
    return table.estimate_bytes(start, stop or None)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_WIDTH].ljust(_WIDTH, b"\x00"), "big")


def _key(number: int) -> bytes:
    return number.to_bytes(_WIDTH, "big").rstrip(b"\x00")
