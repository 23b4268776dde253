"""The list of invalid transactions: ascending, each id once, and cheap to hand out.

Every transaction that starts is given the whole list, so readers share one array, and a change makes a new one. Tephra
keeps ids in the order in which they came, some of them twice (a checkpoint that was invalidated before its parent), and
counts both; here an id is invalid or it is not. The price is a copy of 8 bytes an id for each change.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from tms_core.transaction.model import ascending


class InvalidList:
    """The ids of failed transactions.

    Args:
        pointers: in any order, also with duplicates.

    Attributes:
        ids: all of them; never changed, only replaced.
    """

    def __init__(self, pointers: Iterable[int] = ()) -> None:
        self.ids = ascending(pointers)

    def __contains__(self, pointer: int) -> bool:
        at = bisect_left(self.ids, pointer)
        return at < len(self.ids) and self.ids[at] == pointer

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, pointers: Iterable[int]) -> None:
        """Put ids on the list; those on it already stay."""
        ids = self.ids[:]
        for pointer in pointers:
            at = bisect_left(ids, pointer)
            if at == len(ids) or ids[at] != pointer:
                ids.insert(at, pointer)
        self.ids = ids

    def remove(self, pointers: Iterable[int]) -> bool:
        """Take ids off the list; returns whether any was on it."""
        ids, start = array("q"), 0
        for pointer in sorted(set(pointers)):
            at = bisect_left(self.ids, pointer, start)
            if at < len(self.ids) and self.ids[at] == pointer:
                ids.extend(self.ids[start:at])
                start = at + 1
        return self._replace(ids + self.ids[start:] if start else self.ids)

    def remove_below(self, bound: int) -> bool:
        """Take off all ids below ``bound``; returns whether there were any."""
        return self._replace(self.ids[bisect_left(self.ids, bound) :])

    def _replace(self, ids: array[int]) -> bool:
        changed = len(ids) < len(self.ids)
        if changed:
            self.ids = ids
        return changed
