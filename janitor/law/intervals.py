"""Intervals of keys, ``[start, stop)``; a stop of None is the end of the table (rule S1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """Keys from ``start`` until before ``stop``."""

    start: bytes
    stop: bytes | None


EVERYTHING = Interval(b"", None)


def remainder(whole: Interval, taken: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval without others, in key order."""
    left = []
    position: bytes | None = whole.start
    for start, stop in sorted(taken, key=lambda interval: interval.start):
        if position is None or (whole.stop is not None and start >= whole.stop):
            break
        if stop is not None and stop <= max(start, position):
            continue
        if start > position:
            left.append(Interval(position, start))
        position = stop
    if position is not None and (whole.stop is None or position < whole.stop):
        left.append(Interval(position, whole.stop))
    return left
