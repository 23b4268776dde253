"""A store with failing calls, crashes and restored backups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tms_core.errors import StoreError, WriteRefused
from tms_core.tables.base import MESSAGES, PAYLOADS, Origin, TxCell
from tms_core.tables.memory import MemoryMessageTable, MemoryMetadataTable, MemoryPayloadTable, MemoryStore

#: A row limit above that of any history.
ALL = 1_000_000
#: Calls that write.
_WRITES = ("put", "delete", "invert", "set")


class CallTrigger(Counter[str]):
    """A counter of store calls that runs an action before a given call."""

    left = 0
    action: Callable[[str], None] | None = None

    def set(self, calls: int, action: Callable[[str], None]) -> None:
        """Run the action, with the name of the call, before the given call from now."""
        self.left, self.action = calls, action

    def clear(self) -> None:
        self.action = None

    def __setitem__(self, name: str, value: int) -> None:
        super().__setitem__(name, value)
        if self.action is not None:
            self.left -= 1
            if self.left <= 0:
                action, self.action = self.action, None
                action(name)


class WriteFaults(set[bytes]):
    """Prefixes of topics whose writes fail; all writes fail if ``full``."""

    full = False

    def check(self, key: bytes) -> None:
        if self.full:
            raise WriteRefused("No space left on device.")
        if any(key.startswith(prefix) for prefix in self):
            raise StoreError("a block is damaged.")


class _MessageTable(MemoryMessageTable):
    def __init__(self, calls: Counter[str], faults: WriteFaults) -> None:
        super().__init__(calls)
        self._faults = faults

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        self._faults.check(keys[0])
        super().delete(keys)

    def invert(self, cells: Sequence[TxCell], origin: Origin | None = None) -> list[bool]:
        self._faults.check(cells[0].key)
        return super().invert(cells)


class _PayloadTable(MemoryPayloadTable):
    def __init__(self, calls: Counter[str], faults: WriteFaults) -> None:
        super().__init__(calls)
        self._faults = faults

    def delete(self, keys: Sequence[bytes], origin: Origin | None = None) -> None:
        self._faults.check(keys[0])
        super().delete(keys)


class SimulatedStore(MemoryStore):
    """A store that can be interrupted at any call, damaged per topic, copied, and replaced by a copy.

    As in LevelDB, sequence numbers of writes only grow, and a copy continues from the number of its original.
    """

    def __init__(self, number: int = 1) -> None:
        super().__init__(f"store {number}")
        self.number = number
        self.trigger = CallTrigger()
        self.calls = self.trigger
        self.metadata = MemoryMetadataTable(self.trigger)
        self.faults = WriteFaults()
        self.message = _MessageTable(self.trigger, self.faults)
        self.payload = _PayloadTable(self.trigger, self.faults)
        self._before = self._opened = 0
        self._recognised = False

    @property
    def sequence(self) -> int:
        """The sequence number of the last write."""
        return self._before + sum(self.trigger[name] for name in _WRITES)

    def lineage(self) -> Mapping[str, Any]:
        self._recognised = True
        return {"sequence": self.sequence}

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        if (self.sequence if self._recognised else self._opened) < known.get("sequence", 0):
            return "it went back"
        self._recognised = True
        return None

    def copy(self, number: int) -> SimulatedStore:
        """Return a copy of all rows with the identity ``number``."""
        twin = SimulatedStore(number)
        for key, value in self.metadata.rows():
            twin.metadata.compare_and_set(key, None, value)
        twin.message.put(self.message.read(MESSAGES, b"", None, ALL).items)
        twin.payload.put(self.payload.read(PAYLOADS, b"", None, ALL).items)
        twin._before = self.sequence - twin.sequence
        twin._opened = self.sequence
        return twin
