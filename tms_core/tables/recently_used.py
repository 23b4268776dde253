"""A mapping that holds a bounded number of keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class RecentlyUsed(OrderedDict[K, V]):
    """The keys that were used last; the key that was not used for longest makes room.

    Threads may look up keys while one thread at a time changes the mapping. Only :meth:`get` counts as use.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    @overload
    def get(self, key: K, default: None = None) -> V | None: ...

    @overload
    def get(self, key: K, default: V | D) -> V | D: ...

    def get(self, key: K, default: object = None) -> object:
        """Return the value of a key, or the default."""
        try:
            self.move_to_end(key)
            return self[key]
        except KeyError:
            # Another thread may have dropped it since.
            return default
