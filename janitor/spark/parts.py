"""Cutting a table into pieces that take about as long, so that no task is at work when all others have long ended.

Topics are no unit: one of them may hold nine tenths of all rows, and a thousand others a handful each. So a piece is
whatever lies between two keys, in one range or in many, and a cut may lie inside a topic or a generation, since every
verdict is on one row. Weighed are only rows that somebody wants. Where cuts lie is told by bytes and rows in LevelDB
(:mod:`janitor.spark.weights`). In HBase the salt is a hash of the whole key and has cut already; where more pieces are
asked for, each salt is cut by its keys, at those that a look at one of them tells (:mod:`janitor.spark.survey`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from janitor.ranges import Range
from janitor.spark.survey import PAGE_ROWS, survey
from janitor.spark.wanted import Wanted
from janitor.spark.weights import between, cut_keys
from tms_core.tables.base import KeyTable, Store

#: A salt with so many times fewer rows than another one has no rows of its own, or hardly any.
_FEW = 4


class Piece(NamedTuple):
    """Rows of one task.

    Attributes:
        salt: under which they lie; None where there are no salts.
        ranges: their keys, in order; an empty stop is the table's end.
    """

    salt: int | None
    ranges: tuple[Range, ...]

    def __str__(self) -> str:
        salt = "" if self.salt is None else f"salt {self.salt}, "
        first, last = self.ranges[0].start, self.ranges[-1].stop
        several = f", in {len(self.ranges)} ranges" if len(self.ranges) > 1 else ""
        return f"{salt}keys {_shown(first) or 'from the first'} to {_shown(last) or 'the last'}{several}"


#: No rows at all.
NOTHING = Piece(None, ())


def pieces(parts: Sequence[tuple[int | None, Store]], wanted: Wanted, number: int | None) -> list[Piece]:
    """What is to be read for some rows, in pieces.

    Args:
        parts: the store's, by their salts.
        number: about how many pieces; never fewer than there are salts. None: in LevelDB as many as there are bytes
            for, in HBase one for each salt.
    """
    ranges = wanted.ranges()
    tables = [
        (salt, part.message if wanted.table == "message" else part.payload)
        for salt, part in parts
        if wanted.salts is None or salt in wanted.salts
    ]
    if not ranges or not tables:
        return []
    salt, table = tables[0]
    if salt is None:
        cuts: Mapping[int | None, list[bytes]] = {None: cut_keys(table, wanted.stretches(table), number)}
    else:
        cuts = _cuts_of_salts(tables, wanted, round((number or 0) / len(tables)))
    return [Piece(salt, some) for salt, _ in tables for some in between(ranges, cuts[salt]) if some]


def cut_evenly(table: KeyTable, reach: Range, number: int | None) -> list[Range]:
    """Cut a range of a LevelDB table into pieces of about the same weight.

    Args:
        reach: an empty stop is the table's end.
        number: how many; fewer where they would become too small. None: as many as there are bytes for.
    """
    return [one for some in between([reach], cut_keys(table, [reach], number)) for one in some]


def _cuts_of_salts(
    tables: Sequence[tuple[int | None, KeyTable]], wanted: Wanted, share: int
) -> Mapping[int | None, list[bytes]]:
    """Where each salt is to be cut into so many pieces: all of them at the same keys, since rows are spread evenly.

    Rows that were put under a wrong salt are few; what has next to none stays whole.
    """
    if share < 2:
        return {salt: [] for salt, _ in tables}
    rows = {salt: len(table.keys(b"", None, PAGE_ROWS).items) for salt, table in tables}
    most, (_, table) = max(rows.values()), max(tables, key=lambda one: rows[one[0]])
    cuts = survey(table, wanted, share)
    return {salt: cuts if number * _FEW > most else [] for salt, number in rows.items()}


def _shown(key: bytes) -> str:
    return key[:32].hex()
