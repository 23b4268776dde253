"""Cutting a table into pieces of about the same size, so that no task is at work when all others have long ended.

Topics are no unit: one of them may hold nine tenths of all rows. So LevelDB is asked how many bytes lie between two
keys, and the key space is halved until each piece has its share; a cut may lie inside a topic or a generation, since
every verdict is on one row. In HBase the salt is a hash of the whole key and has done this already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from janitor.ranges import Range
from janitor.spark.wanted import Wanted
from tms_core.tables.base import KeyTable, Store

#: How many bytes, as they lie on disk, one piece should have where nobody says how many pieces there should be.
PIECE_BYTES = 16 << 20
#: LevelDB tells sizes by the block, about 4 KiB: a piece of fewer bytes could not be cut evenly.
LEAST_BYTES = 64 << 10
#: How near a piece has to come to its share.
_TOLERANCE = 20
#: Bytes of a key that are looked at when the middle between two keys is sought; as long as a name, a generation and a
#: time are.
_WIDTH = 96


class Piece(NamedTuple):
    """Rows of one task; an empty stop is the table's end.

    Attributes:
        salt: under which they lie; None where there are no salts.
    """

    salt: int | None
    start: bytes
    stop: bytes

    def __str__(self) -> str:
        salt = "" if self.salt is None else f"salt {self.salt}, "
        return f"{salt}keys {_shown(self.start) or 'from the first'} to {_shown(self.stop) or 'the last'}"


def pieces(parts: Sequence[tuple[int | None, Store]], wanted: Wanted, number: int | None) -> list[Piece]:
    """What is to be read for some rows, in pieces.

    Args:
        parts: the store's, by their salts.
        number: about how many pieces; None: as many as there are bytes for.
    """
    found: list[Piece] = []
    for salt, part in parts:
        if wanted.salts is not None and salt not in wanted.salts:
            continue
        table = part.message if wanted.table == "message" else part.payload
        for reach in wanted.ranges():
            if salt is None:
                found += [Piece(None, *cut) for cut in cut_evenly(table, reach, number)]
            else:
                found.append(Piece(salt, *reach))
    return found


def cut_evenly(table: KeyTable, reach: Range, number: int | None) -> list[Range]:
    """Cut a range into pieces of about the same size.

    Args:
        reach: an empty stop is the table's end.
        number: how many; fewer where they would become too small. None: as many as there are bytes for.
    """

    def size(start: bytes, stop: bytes) -> int:
        return table.estimate_bytes(start, stop or None)

    total = size(*reach)
    number = min(number or -(-total // PIECE_BYTES), total // LEAST_BYTES)
    cuts = [_cut(size, reach, total * at // number, total // number // _TOLERANCE) for at in range(1, number)]
    edges = [reach.start, *sorted({cut for cut in cuts if reach.start < cut}), reach.stop]
    return [Range(start, stop) for start, stop in pairwise(edges)]


def _cut(size: Callable[[bytes, bytes], int], reach: Range, share: int, tolerance: int) -> bytes:
    """A key before which about ``share`` bytes of the range lie."""
    low, high = _number(reach.start), _number(reach.stop) if reach.stop else 256**_WIDTH - 1
    while high - low > 1:
        middle = (low + high) // 2
        before = size(reach.start, _key(middle))
        if abs(before - share) <= tolerance:
            return _key(middle)
        low, high = (middle, high) if before < share else (low, middle)
    return _key(high)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_WIDTH].ljust(_WIDTH, b"\x00"), "big")


def _key(number: int) -> bytes:
    return number.to_bytes(_WIDTH, "big").rstrip(b"\x00")


def _shown(key: bytes) -> str:
    return key[:32].hex()
