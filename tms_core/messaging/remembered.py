"""Rows of the side table as they were read last, for the server that alone writes them; threads may share it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from tms_core.tables.side import SideChange, SideTable

#: How many rows are remembered, and for how long: the janitor changes those of producers that were idle for days.
_ROWS, _KEPT_MS = 20_000, 3_600_000
#: Stands for what is not known of a row.
_NOT_READ = b"not read"


class RememberedRows:
    """Reads rows once, and changes them."""

    def __init__(self, side: SideTable) -> None:
        self._side = side
        self._rows: dict[bytes, bytes | None] = {}
        self._since_ms = 0
        self._changes = 0
        self._lock = Lock()

    def get(self, key: bytes, *, again: bool = False) -> bytes | None:
        """A row's value; what was read while it was changed is not remembered.

        Args:
            again: read it, remembered or not.

        Raises:
            StoreError: it could not be read.
        """
        known = _NOT_READ if again else self._rows.get(key, _NOT_READ)
        if known is not _NOT_READ:
            return known
        changes = self._changes
        value = self._side.get(key)
        with self._lock:
            if changes == self._changes:
                self._rows[key] = value
        return value

    def change(self, changes: Sequence[SideChange]) -> list[bool]:
        """Change rows as :meth:`SideTable.exchange_each` does; what was written is remembered, if nothing else was."""
        keys = [key for change in changes for key in _changed(change)]
        before = self._drop(keys)
        made: list[bool] = []
        try:
            made = self._side.exchange_each(changes)
        finally:
            alone = self._drop(keys) == before + 1
        if alone and all(made):
            with self._lock:
                if self._changes == before + 1:
                    self._rows.update((change.key, change.value) for change in changes)
        return made

    def forget_old(self, now_ms: int) -> None:
        """Forget what was read long ago, or is too much."""
        if not 0 <= now_ms - self._since_ms < _KEPT_MS or len(self._rows) >= _ROWS:
            self.forget()
            self._since_ms = now_ms

    def forget(self) -> None:
        """Forget what was read."""
        with self._lock:
            self._changes += 1
            self._rows.clear()

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Forget rows that are being changed; returns how often any were."""
        with self._lock:
            self._changes += 1
            for key in keys:
                self._rows.pop(key, None)
            return self._changes


def _changed(change: SideChange) -> Sequence[bytes]:
    """The keys of the rows that it changes."""
    if not change.puts and not change.deletes:
        return (change.key,)
    return (change.key, *(key for key, _ in change.puts), *change.deletes)
