"""The ledger of rows that messaging has written in transactions and not rolled back.

Readers treat the pointer of an aborted transaction as committed, so an abort is safe only if no row has the pointer.
Tephra's manager cannot check that. This manager shares a process with the writing server, so it counts the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

#: The place of a write that may have been under way when its transaction was decided.
_LATE = "a write that was under way"
#: The number of pointers kept in addition to twice the needed ones, and the largest number of pointers. A pointer needs
#: about 300 bytes, twenty times its size on the invalid list.
_MARGIN, _MAX_POINTERS = 100, 50_000


class WriteLedger:
    """A ledger of written rows by pointer and place; for one thread at a time.

    Attributes:
        unknown_to: pointers up to this one may have uncounted rows; 0: all rows are counted.
    """

    def __init__(self) -> None:
        self.unknown_to = 0
        self._under_way: Counter[int] = Counter()
        self._places: dict[int, Counter[str]] = {}

    def begin(self, pointer: int) -> None:
        """Record the start of a write."""
        self._under_way[pointer] += 1

    def end(self, pointer: int, *, late: bool) -> None:
        """Record that a write has finished.

        Args:
            late: whether its transaction was decided before; if so, its rows may never be rolled back.
        """
        count = self._under_way.pop(pointer) - 1
        if count:
            self._under_way[pointer] = count
        if late:
            self.add(pointer, _LATE, 1)

    @property
    def under_way(self) -> frozenset[int]:
        """Return the pointers with a write under way."""
        return frozenset(self._under_way)

    def add(self, pointer: int, place: str, number: int) -> None:
        """Add rows with a pointer in a place."""
        self._places.setdefault(pointer, Counter())[place] += number

    def subtract(self, pointer: int, place: str, number: int | None) -> None:
        """Subtract rolled back rows; None: all rows of the place."""
        places = self._places.get(pointer)
        if places is None:
            return
        places[place] = 0 if number is None else places[place] - number
        if places[place] <= 0:
            del places[place]
        if not places:
            del self._places[pointer]

    def places(self, pointers: Iterable[int]) -> list[str]:
        """Return the places with rows of some pointers, sorted; empty if all rows were rolled back."""
        found: set[str] = set()
        for pointer in pointers:
            if pointer in self._under_way:
                found.add(_LATE)
            if pointer <= self.unknown_to:
                found.add("writes that the ledger has forgotten")
            found.update(self._places.get(pointer, ()))
        return sorted(found)

    def discard(self, pointers: Iterable[int]) -> None:
        """Discard pointers whose outcome is final."""
        for pointer in pointers:
            self._places.pop(pointer, None)

    def prune(self, needed: int, is_needed: Callable[[int], bool]) -> None:
        """Discard unneeded pointers if the ledger has many more pointers than needed.

        If too many pointers are needed, the oldest are discarded too, and count as unknown.

        Args:
            needed: the largest number of needed pointers.
        """
        if len(self._places) > min(2 * needed + _MARGIN, _MAX_POINTERS):
            self._places = {pointer: places for pointer, places in self._places.items() if is_needed(pointer)}
            # Reduce to half of the limit, so that sorts are rare.
            for pointer in sorted(self._places)[: max(0, len(self._places) - _MAX_POINTERS // 2)]:
                del self._places[pointer]
                self.unknown_to = max(self.unknown_to, pointer)
