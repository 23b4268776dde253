"""The ledger of what messaging has written with transactions and not taken back.

Readers take the pointer of an aborted transaction for a committed one, so an abort is right only if nothing is left
that carries the pointer. Tephra's manager cannot know that. This one shares a process with the server that writes, so
it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

#: Where something was written that may still have been under way when its transaction ended.
_LATE = "a write that was under way"
#: How many pointers are kept beyond twice those that can still be asked for, and how many at most. A pointer takes some
#: 300 bytes, twenty times what the invalid list takes for it.
_SPARE, _MOST = 100, 50_000


class WriteLedger:
    """Writes by pointer, and by the place they went to; for one thread at a time.

    Attributes:
        unknown_to: pointers up to this one may have written more than is counted; 0: all is counted.
    """

    def __init__(self) -> None:
        self.unknown_to = 0
        self._under_way: Counter[int] = Counter()
        self._left: dict[int, Counter[str]] = {}

    def begin(self, pointer: int) -> None:
        """Count a write that starts."""
        self._under_way[pointer] += 1

    def end(self, pointer: int, *, late: bool) -> None:
        """Count a write that is over.

        Args:
            late: whether its transaction is over before; then something of it may be left for good.
        """
        left = self._under_way.pop(pointer) - 1
        if left:
            self._under_way[pointer] = left
        if late:
            self.add(pointer, _LATE, 1)

    @property
    def under_way(self) -> frozenset[int]:
        """Return the pointers with which something is being written."""
        return frozenset(self._under_way)

    def add(self, pointer: int, place: str, number: int) -> None:
        """Count the writes with a pointer to a place."""
        self._left.setdefault(pointer, Counter())[place] += number

    def take_back(self, pointer: int, place: str, number: int | None) -> None:
        """Count rolled back rows; None: all there was."""
        places = self._left.get(pointer)
        if places is None:
            return
        places[place] = 0 if number is None else places[place] - number
        if places[place] <= 0:
            del places[place]
        if not places:
            del self._left[pointer]

    def places(self, pointers: Iterable[int]) -> list[str]:
        """Return where something may be left of some pointers, in order; empty: everything was rolled back."""
        found: set[str] = set()
        for pointer in pointers:
            if pointer in self._under_way:
                found.add(_LATE)
            if pointer <= self.unknown_to:
                found.add("writes that the ledger has forgotten")
            found.update(self._left.get(pointer, ()))
        return sorted(found)

    def forget(self, pointers: Iterable[int]) -> None:
        """Forget pointers that are decided for good."""
        for pointer in pointers:
            self._left.pop(pointer, None)

    def prune(self, most: int, is_needed: Callable[[int], bool]) -> None:
        """Forget pointers that nobody can ask for, once there are many more than those that are needed.

        Of too many that are needed the oldest are forgotten, too, and count as unknown from then on.

        Args:
            most: how many may be needed.
        """
        if len(self._left) > min(2 * most + _SPARE, _MOST):
            self._left = {pointer: places for pointer, places in self._left.items() if is_needed(pointer)}
            # Half of them, so that this sorts seldom.
            for pointer in sorted(self._left)[: max(0, len(self._left) - _MOST // 2)]:
                del self._left[pointer]
                self.unknown_to = max(self.unknown_to, pointer)
