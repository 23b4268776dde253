"""The visibility of transactions: Tephra's rules as values, without I/O and without a clock.

A :class:`Transaction` is the view that a client gets at its start. A :class:`VisibilityState` is the state of all
transactions at the time of a snapshot; the janitor needs no other part of a snapshot. Lists of excluded ids are sorted
when they are read. Tephra uses binary search on them, and its releases 0.11 and 0.12 wrote them unsorted, so that
invalid data counted as committed. The cost is one comparison per id for each loaded snapshot.

``docs/reference/formats/tephra.md`` explains the rules.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import merge
from itertools import groupby, islice
from operator import lt

#: Transaction ids per millisecond: an id divided by this is the start of its transaction, in milliseconds.
TX_PER_MS = 1_000_000
#: The value of "first transaction in progress" without such a transaction, and of the pointers of a dummy transaction.
NO_TX_IN_PROGRESS = 2**63 - 1
#: The default timeout of a short transaction, as in Tephra.
DEFAULT_TIMEOUT_SECONDS = 30
#: The longest timeout of a short transaction, in seconds (``data.tx.max.timeout``).
MAX_TIMEOUT_SECONDS = 2**31 - 1
#: The client name of a transaction whose client has not sent a name.
UNKNOWN_CLIENT = "unknown"
#: The number of ids sorted at once; the sort of a million ids would need 40 MB.
_RUN_IDS = 65_536


class TransactionType(IntEnum):
    """The expected duration of a transaction, with the values of logs; Thrift counts from 1."""

    SHORT = 0
    LONG = 1


class InProgressType(IntEnum):
    """The kind of an in-progress entry, with the values of snapshots."""

    SHORT = 0
    LONG = 1
    CHECKPOINT = 2


class VisibilityLevel(IntEnum):
    """The visibility of a transaction's own writes; Thrift counts from 1."""

    SNAPSHOT = 0
    SNAPSHOT_EXCLUDE_CURRENT = 1
    SNAPSHOT_ALL = 2


@dataclass(frozen=True, slots=True)
class Transaction:
    """A client's view of its transaction (Tephra's ``Transaction``).

    Attributes:
        read_pointer: the highest version that it may read.
        transaction_id: the pointer that was issued at its start.
        write_pointer: the version of its new writes: its id, or its newest checkpoint.
        invalids: the invalid list at its start, ascending (see :func:`ascending`).
        in_progress: the pointers of other transactions in progress at its start, including checkpoints; ascending.
        first_short_in_progress: the lowest pointer of a short transaction in ``in_progress``, or ``NO_TX_IN_PROGRESS``.
        type: short or long.
        checkpoint_write_pointers: its checkpoints, including the current one; ascending.
        visibility_level: the visibility of its own writes.
    """

    read_pointer: int
    transaction_id: int
    write_pointer: int
    invalids: Sequence[int] = field(default=(), repr=False)
    in_progress: Sequence[int] = ()
    first_short_in_progress: int = NO_TX_IN_PROGRESS
    type: TransactionType = TransactionType.SHORT
    checkpoint_write_pointers: Sequence[int] = ()
    visibility_level: VisibilityLevel = VisibilityLevel.SNAPSHOT

    def is_in_progress(self, version: int) -> bool:
        """Return whether the version's transaction was in progress when this transaction started."""
        return _contains(self.in_progress, version)

    def is_excluded(self, version: int) -> bool:
        """Return whether the version is invalid or was in progress."""
        return self.is_in_progress(version) or _contains(self.invalids, version)

    def is_checkpoint(self, version: int) -> bool:
        """Return whether the version is a checkpoint of this transaction."""
        return _contains(self.checkpoint_write_pointers, version)

    def is_current_write(self, version: int) -> bool:
        """Return whether this transaction itself wrote the version."""
        own = version == self.transaction_id or version == self.write_pointer
        return own or (bool(self.checkpoint_write_pointers) and self.is_checkpoint(version))

    def is_visible(self, version: int) -> bool:
        """Return whether this transaction may read the version. There is no lower bound."""
        if version <= self.read_pointer and not self.is_excluded(version):
            return True
        if not self.is_current_write(version):
            return False
        return version != self.write_pointer or self.visibility_level != VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT

    def visibility_upper_bound(self) -> int:
        """Return the highest version up to which every version is either visible to this transaction or invalid."""
        if self.in_progress:
            return self.in_progress[0] - 1
        return min(self.transaction_id - 1, self.read_pointer)

    def prune_upper_bound(self) -> int:
        """Return the highest invalid id that may leave the invalid list after a cleanup up to it (``TxUtils``)."""
        if not self.invalids and not self.in_progress:
            return self.read_pointer - 1
        first_in_progress = self.in_progress[0] if self.in_progress else NO_TX_IN_PROGRESS
        last_invalid = self.invalids[-1] if self.invalids else NO_TX_IN_PROGRESS
        return min(last_invalid, first_in_progress - 1)


@dataclass(frozen=True, slots=True)
class InProgress:
    """A pointer of a transaction in progress: its id, or one of its checkpoints.

    Attributes:
        write_pointer: the pointer.
        expiration_ms: the time of its timeout; negative for long transactions in very old snapshots.
        visibility_upper_bound: the visibility upper bound of the transaction at its start.
        type: the kind of the pointer; None in snapshots of version 1, which do not contain it.
        checkpoints: the pointers of its checkpoints, ascending.
    """

    write_pointer: int
    expiration_ms: int
    visibility_upper_bound: int
    type: InProgressType | None
    checkpoints: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        """Return whether the transaction is long; without a type, a negative expiration means that it is."""
        return self.expiration_ms < 0 if self.type is None else self.type is InProgressType.LONG


@dataclass(frozen=True, slots=True)
class VisibilityState:
    """The part of a snapshot that determines which writes readers see.

    Attributes:
        timestamp_ms: the wall time at which the state was copied.
        read_pointer: the highest version that new transactions read.
        write_pointer: the highest issued pointer.
        invalid: ids of failed transactions, in any order. The constructor sorts them and removes duplicates; it does
            not copy a sorted array, which must not change afterwards.
        in_progress: pointers in progress, in any order; the constructor sorts them by write pointer.
    """

    timestamp_ms: int
    read_pointer: int
    write_pointer: int
    invalid: array[int] = field(default_factory=lambda: array("q"), repr=False)
    in_progress: tuple[InProgress, ...] = ()
    _open: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = tuple(sorted(self.in_progress, key=lambda entry: entry.write_pointer))
        object.__setattr__(self, "invalid", ascending(self.invalid))
        object.__setattr__(self, "in_progress", entries)
        object.__setattr__(self, "_open", frozenset(_pointers(entries)))

    def is_invalid(self, pointer: int) -> bool:
        """Return whether the transaction failed, so that no reader may see its writes."""
        return _contains(self.invalid, pointer)

    def is_undecided(self, pointer: int) -> bool:
        """Return whether the pointer's transaction may still commit.

        True for ids in progress, for their checkpoints (which have no separate entry before Tephra 0.10), and for
        pointers that were issued after the snapshot.
        """
        return pointer > self.write_pointer or pointer in self._open

    @property
    def open_pointers(self) -> frozenset[int]:
        """Return all pointers in progress: ids and checkpoints."""
        return self._open

    def implausible(self) -> str:
        """Return a short description of values that no manager writes; empty: all values are plausible.

        Ids are positive, and none is above the write pointer, which is the highest issued id.
        """
        for name, pointers in (("invalid", self.invalid), ("in progress", sorted(self._open))):
            if pointers and pointers[0] <= 0:
                return f"{pointers[0]} is {name}, which is not a transaction"
            if pointers and pointers[-1] > self.write_pointer:
                return f"{pointers[-1]} is {name}, and its write pointer is {self.write_pointer}"
        return ""

    def visibility_upper_bound(self) -> int:
        """Return the visibility upper bound of the oldest transaction in progress, else the read pointer.

        The result is lower than the bound of :meth:`dummy_transaction` if a transaction has committed in between.
        """
        return self.in_progress[0].visibility_upper_bound if self.in_progress else self.read_pointer

    def prune_upper_bound(self) -> int:
        """Return the highest invalid id that may leave the invalid list after a cleanup up to it; 0 or less: none."""
        return self.dummy_transaction().prune_upper_bound()

    def dummy_transaction(self) -> Transaction:
        """Return a transaction that reads as a transaction started at the snapshot, and writes nothing."""
        short = (entry.write_pointer for entry in self.in_progress if not entry.is_long)
        return Transaction(
            read_pointer=self.read_pointer,
            transaction_id=NO_TX_IN_PROGRESS,
            write_pointer=NO_TX_IN_PROGRESS,
            invalids=self.invalid,
            in_progress=tuple(sorted(self._open)),
            first_short_in_progress=next(short, NO_TX_IN_PROGRESS),
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a snapshot file: visibility, and the facts for conflict detection after a restart.

    Attributes:
        committing: change keys of transactions after ``canCommit``, by transaction id.
        committed: change keys of committed transactions, by commit pointer.
    """

    visibility: VisibilityState
    committing: Mapping[int, frozenset[bytes]] = field(default_factory=dict)
    committed: Mapping[int, frozenset[bytes]] = field(default_factory=dict)


def transaction_ms(pointer: int) -> int:
    """Return the time at which a pointer was issued, in milliseconds since the epoch."""
    return pointer // TX_PER_MS


def ascending(pointers: Iterable[int]) -> array[int]:
    """Return the pointers as sorted 64-bit numbers without duplicates.

    Args:
        pointers: pointers in any order, also with duplicates. A strictly ascending array is returned unchanged.
    """
    values = pointers if isinstance(pointers, array) else array("q", pointers)
    if all(map(lt, values, islice(values, 1, None))):
        return values
    runs = (array("q", sorted(values[start : start + _RUN_IDS])) for start in range(0, len(values), _RUN_IDS))
    return array("q", (pointer for pointer, _ in groupby(merge(*runs))))


def _contains(values: Sequence[int], value: int) -> bool:
    at = bisect_left(values, value)
    return at < len(values) and values[at] == value


def _pointers(entries: Iterable[InProgress]) -> Iterator[int]:
    for entry in entries:
        yield entry.write_pointer
        yield from entry.checkpoints


@dataclass(frozen=True, slots=True)
class LateTransaction:
    """A transaction in progress whose messages block readers in transactions.

    Attributes:
        pointer: its id.
        client: its client; empty: unknown.
        topics: the topics of its messages, sorted, with the time of the first message in milliseconds.
    """

    pointer: int
    client: str
    topics: tuple[tuple[str, int], ...]

    @property
    def since_ms(self) -> int:
        """Return the publish time of its first message."""
        return min(publish_ms for _, publish_ms in self.topics)


def late_transactions(
    published: Mapping[int, Mapping[str, int]], clients: Mapping[int, str], before_ms: int
) -> list[LateTransaction]:
    """Return transactions in progress that published before a time, in the order of their first publish.

    Args:
        published: the topics of the messages of transactions in progress, as the transaction manager reports them.
        clients: the clients of the transactions, by id.
    """
    found = [
        LateTransaction(pointer, clients.get(pointer, ""), tuple(sorted(topics.items())))
        for pointer, topics in published.items()
        if topics and min(topics.values()) <= before_ms
    ]
    return sorted(found, key=lambda one: (one.since_ms, one.pointer))
