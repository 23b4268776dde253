"""A mapping with a bounded number of keys."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlySet(OrderedDict[K, V]):
    """A mapping of the keys that were set last; a new key displaces the key that was set first.

    Threads may share it. A lookup does not change the order, so it is one step in C; each publish needs several
    lookups. The next use of a displaced key sets it again.
    """

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self._max_keys = max_keys

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        # Before the move, an existing key may still be the oldest, and another thread may remove it.
        with suppress(KeyError):
            self.move_to_end(key)
        if len(self) > self._max_keys:
            with suppress(KeyError):
                self.popitem(last=False)
