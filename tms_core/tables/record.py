"""The records in the side table about the folders of a store: its transaction log, and the janitor's state.

Settings name both folders, so a wrong setting can combine a store with another transaction log. With an empty log, the
transactions of stored messages are unknown, and readers see messages that were never committed. Therefore the store
records its transaction system and last write pointer, and the server rejects another log. The record costs a row at
each transaction snapshot, and nothing at each transaction.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NamedTuple

from tms_core.errors import FormatError, StoreNotFound
from tms_core.tables.side import SideTable

_TRANSACTIONS, _STATE = b"it", b"is"


class SystemRecord(NamedTuple):
    """A transaction system, or a janitor's state.

    Attributes:
        id: a random name; empty for a transaction service of CDAP, which has no id.
        place: its folder or address, for operators.
        pointer: the highest write pointer in its newest snapshot; 0: any value is accepted.
        taken_ms: the time of that snapshot.
    """

    id: str
    place: str
    pointer: int = 0
    taken_ms: int = 0

    def differs(self, system: str, pointer: int) -> str | None:
        """Return why another id or write pointer shows another transaction system; None if it may be the recorded one.

        Args:
            system: the id that was found; empty: unknown.
        """
        if self.pointer and self.id and system and self.id != system:
            return f"of transaction system {system}, and the store belongs to {self.id}"
        if pointer < self.pointer:
            return f"at write pointer {pointer}, and the store has seen {self.pointer}"
        return None


def recorded_transactions(side: SideTable) -> SystemRecord | None:
    """Return the recorded transaction system of a store; None without a record.

    Raises:
        FormatError: the row cannot be read.
    """
    return _read(side, _TRANSACTIONS)


def recorded_state(side: SideTable) -> SystemRecord | None:
    """Return the recorded janitor's state of a store; None without a record.

    Raises:
        FormatError: the row cannot be read.
    """
    return _read(side, _STATE)


def record_transactions(side: SideTable, system: SystemRecord) -> None:
    """Record the transaction system of a store. Durable on return."""
    _write(side, _TRANSACTIONS, system)


def record_state(side: SideTable, state: SystemRecord) -> None:
    """Record the janitor's state of a store, if it is not recorded yet. Durable on return."""
    if recorded_state(side) != state:
        _write(side, _STATE, state)


def _read(side: SideTable, key: bytes) -> SystemRecord | None:
    value = side.get(key)
    if value is None:
        return None
    try:
        found = SystemRecord(**json.loads(value))
        if [type(field) for field in found] != [str, str, int, int]:
            raise ValueError("a field has a wrong type")
    except (ValueError, TypeError) as error:
        raise FormatError(f"row {key.decode()} of the side table cannot be read: {error}") from error
    return found


def _write(side: SideTable, key: bytes, recorded: SystemRecord) -> None:
    # A janitor does not create the side table: it works without the table, and may lack the permission to create it.
    with suppress(StoreNotFound):
        side.put([(key, json.dumps(recorded._asdict()).encode())])
