"""The change keys of transactions and their conflicts: only one of two overlapping transactions with a common key
commits.

A transaction reports its changes before it commits, with keys that only clients interpret. The keys of committed
transactions are stored under the first pointer that was not issued at the commit. A transaction that started after the
commit has a higher id, and does not conflict. Entries below the first short transaction in progress cannot conflict any
longer, and each commit drops them (Tephra's ``TransactionManager``; long transactions do not keep entries).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tms_core.errors import ChangesTooLarge, Conflict
from tms_core.logs.printable import printable
from tms_core.transaction.model import NO_TX_IN_PROGRESS

#: Tephra's limit: the highest int, so in effect no limit.
COUNT_LIMIT = 2**31 - 1
BYTES_LIMIT = 2**63 - 1
#: The characters that a shown key contains unescaped, in addition to letters and digits (``Bytes.toStringBinary``).
_PRINTABLE = frozenset(b" `~!@#$%^&*()-_=+[]{}|;:'\",.<>/?")


@dataclass(slots=True)
class _Changes:
    keys: set[bytes]
    client: str


class CommittedChanges:
    """The change keys of recent commits, by commit pointer."""

    def __init__(self, changes: Mapping[int, Collection[bytes]] | None = None) -> None:
        self._by_pointer = {pointer: _Changes(set(keys), "") for pointer, keys in sorted((changes or {}).items())}

    def add(self, commit_pointer: int, keys: Collection[bytes], client: str) -> None:
        """Add a commit; of several commits at one pointer, errors name the client of the last."""
        is_last = not self._by_pointer or commit_pointer >= next(reversed(self._by_pointer))
        changes = self._by_pointer.setdefault(commit_pointer, _Changes(set(), client))
        changes.keys.update(keys)
        changes.client = client
        if not is_last:
            self._by_pointer = dict(sorted(self._by_pointer.items()))

    def check(self, transaction_id: int, keys: Collection[bytes]) -> None:
        """Check that no other transaction has committed one of the keys since the transaction started.

        Raises:
            Conflict: another transaction has.
        """
        for commit_pointer in reversed(self._by_pointer):
            if commit_pointer <= transaction_id:
                return
            changes = self._by_pointer[commit_pointer]
            if not changes.keys.isdisjoint(keys):
                raise _conflict(transaction_id, min(changes.keys.intersection(keys)), changes.client)

    def discard_below(self, bound: int) -> None:
        """Drop commits at pointers below ``bound``."""
        for commit_pointer in list(self._by_pointer):
            if commit_pointer >= bound:
                return
            del self._by_pointer[commit_pointer]

    def copy(self) -> dict[int, frozenset[bytes]]:
        """Return the keys by commit pointer."""
        return {pointer: frozenset(changes.keys) for pointer, changes in self._by_pointer.items()}


@dataclass(frozen=True, slots=True)
class ChangeLimits:
    """The limits of the changes of a transaction.

    Attributes:
        count: the largest number of keys (``data.tx.changeset.count.limit``).
        size_bytes: the largest total size of the keys (``data.tx.changeset.size.limit``).
    """

    count: int = field(default=COUNT_LIMIT)
    size_bytes: int = field(default=BYTES_LIMIT)

    def check(self, transaction_id: int, keys: Collection[bytes]) -> None:
        """Check that the changes are within the limits.

        Raises:
            ChangesTooLarge: the changes exceed a limit.
        """
        if len(keys) > self.count:
            raise ChangesTooLarge(
                f"Change set for transaction {transaction_id} has {len(keys)} entries and exceeds the limit of "
                f"{self.count}"
            )
        size_bytes = sum(map(len, keys))
        if size_bytes > self.size_bytes:
            raise ChangesTooLarge(
                f"Change set for transaction {transaction_id} has total size of {size_bytes} bytes and exceeds the "
                f"limit of {self.size_bytes} bytes"
            )


def first_short(entries: Iterable[tuple[int, bool]]) -> int:
    """Return the lowest of (pointer, whether it is long) that is not long, or ``NO_TX_IN_PROGRESS``."""
    return next((pointer for pointer, is_long in entries if not is_long), NO_TX_IN_PROGRESS)


def escape_key(key: bytes) -> str:
    r"""Return a change key for operators: printable bytes unchanged, all other bytes as ``\xHH`` (``ChangeId``)."""
    return "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 0x80) or byte in _PRINTABLE else f"\\x{byte:02X}" for byte in key
    )


def _conflict(transaction_id: int, key: bytes, client: str) -> Conflict:
    by = printable(client) or "unknown client"
    text = f"Transaction {transaction_id} conflicts on {escape_key(key)}, which {by} has committed since it began."
    return Conflict(text, transaction_id, escape_key(key), client)
