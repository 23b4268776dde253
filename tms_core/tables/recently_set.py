"""A mapping that holds a bounded number of keys."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlySet(OrderedDict[K, V]):
    """The keys that were set last; the key that was set first makes room.

    Threads may look up and set keys. A lookup does not count, so it is one step in C; each publish needs several. A key
    in use that is dropped is set again at its next use.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        # Until it is moved, a key that was set before may be the oldest, and another thread may drop it.
        with suppress(KeyError):
            self.move_to_end(key)
        if len(self) > self._most:
            with suppress(KeyError):
                self.popitem(last=False)
