"""A walk with leaps: the cuts it tells are even, and it reads a small part of what is there."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest

from janitor.spark.survey import PAGE_ROWS, survey
from janitor.spark.wanted import Wanted
from tests.builders import NOW_MS
from tms_core.rowkey import MessageKey
from tms_core.tables.base import KeyTable, Page
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

#: When the message of a number was published, and its sequence id.
Times = Callable[[int], tuple[int, int]]


class _Vast(KeyTable):
    """More keys than there is time to write, in formulas.

    Args:
        topics: in key order: name, rows, and when they were published.
    """

    def __init__(self, *topics: tuple[str, int, Times]) -> None:
        self._topics = [(TopicId("a", name), rows, times) for name, rows, times in topics]
        self._ends = list(accumulate(rows for _, rows, _ in self._topics))
        self.rows = self._ends[-1]
        self.read = 0

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        first, end = self.rank(start), self.rows if stop is None else self.rank(stop)
        last = min(end, first + limit)
        found = [self._key(number) for number in range(first, last)]
        self.read += len(found)
        return Page(found, found[-1] + b"\x00" if last < end else None)

    def rank(self, key: bytes) -> int:
        """How many keys there are before this one."""
        return bisect_left(range(self.rows), key, key=self._key)

    def _key(self, number: int) -> bytes:
        at = bisect_right(self._ends, number)
        topic, rows, times = self._topics[at]
        return MessageKey(topic, 1, *times(number - self._ends[at] + rows)).pack()

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return 0

    def delete(self, keys: Sequence[bytes]) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def compact(self, start: bytes, stop: bytes) -> None:
        raise NotImplementedError


def steady(step_ms: int) -> Times:
    return lambda number: (NOW_MS + number * step_ms, 0)


def in_batches(rows: int, pause_ms: int) -> Times:
    return lambda number: (NOW_MS + number // rows * pause_ms, number % rows)


def ever_faster(rows: int) -> Times:
    return lambda number: (NOW_MS + int((number / rows) ** 0.5 * 10**9), 0)


def parts(table: Any, wanted: Wanted, number: int) -> list[int]:
    """How many rows lie in each piece."""
    edges = [0, *map(table.rank, survey(table, wanted, number)), table.rows]
    return [last - first for first, last in pairwise(edges)]


VAST = {
    "one topic": [("huge", 2_000_000, steady(7))],
    "one topic with nine tenths": [
        ("huge", 1_800_000, steady(7)),
        *((f"tiny{at}", 5000, steady(100)) for at in range(40)),
    ],
    "one topic and many of some size": [
        ("huge", 300_000, steady(7)),
        *((f"some{at:03}", 1050, steady(100)) for at in range(300)),
    ],
    "topics of different rates": [
        ("batches", 800_000, in_batches(2000, 40_000)),
        ("fast", 800_000, steady(1)),
        ("slow", 400_000, steady(1000)),
    ],
    "a topic that grows": [("growing", 2_000_000, ever_faster(2_000_000))],
}


@pytest.mark.parametrize("spread", VAST)
def test_given_millions_of_rows_when_looked_over_then_pieces_are_even_and_many_rows_were_leapt_over(
    spread: str,
) -> None:
    table = _Vast(*VAST[spread])
    found = parts(table, Wanted("message"), 6)
    assert len(found) == 6
    assert max(found) <= 1.5 * statistics.median(found), found
    assert table.read < table.rows * 0.8


def test_given_moments_when_looked_over_then_only_rows_between_them_weigh() -> None:
    table = _Vast(*((f"t{at}", 300_000, steady(10)) for at in range(3)))
    wanted = Wanted("message", from_ms=NOW_MS + 2_000_000, to_ms=NOW_MS + 2_011_000)
    [cut] = survey(table, wanted, 2)
    between = [range(300_000 * at + 200_000, 300_000 * at + 201_100) for at in range(3)]
    assert sum(bisect_left(rows, table.rank(cut)) for rows in between) == pytest.approx(1650, abs=16)
    assert table.read < 10_000


def test_given_few_rows_when_looked_over_then_each_is_counted() -> None:
    table = _Vast(("few", 640, steady(1)))
    assert parts(table, Wanted("message"), 4) == [160, 160, 160, 160]
    assert table.read == 640 < PAGE_ROWS


def test_given_no_rows_when_looked_over_then_there_is_nothing_to_cut() -> None:
    assert survey(MemoryStore().message, Wanted("message"), 4) == []
    assert survey(_Vast(("one", 1, steady(1))), Wanted("message"), 4) == []
