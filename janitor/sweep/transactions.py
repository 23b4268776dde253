"""Facts about transactions in a run: the usable snapshot, and the invalid transactions that may still write.

The rules need two facts about a transaction: whether its pointer is invalid (then its rows are inverted), and whether
it may still commit (then its payloads are kept). Both need a snapshot that is complete, fresh and of this transaction
system (invariant S14). Without such a snapshot, no pointer is invalid, and a transaction may commit up to a given age.

The client of an invalid transaction may not know about the invalidation, and may publish until the lifetime ends.
Therefore a pointer is *open* from the time it is first seen in an invalid list. A full pass closes it if the pass
started after the transaction's last possible publish. Only then are the rows of the pointer known to be clean.

No table has the commit time of a transaction, and the messages of some topics stay until their transaction has ended
(property ``hold: transaction``). Therefore a run notes the start of the oldest transaction in progress. A few minutes
later, all messages published before that start have been decided for at least that time. Two such times are enough:
the time in force and the next time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from janitor.report import SnapshotUsed
from janitor.rules.policy import Frontier, Hold
from janitor.rules.ranges import Lifetime
from janitor.state.base import KnownIds, OpenIdRecord
from janitor.state.figures import KeptFigures
from janitor.state.records import Note
from tms_core.errors import NoSnapshot, SnapshotError
from tms_core.logs.printable import duration
from tms_core.rowkey import Cutoff
from tms_core.tables.base import PointerSet
from tms_core.transaction.model import VisibilityState, transaction_ms
from tms_core.transaction.source.source import SnapshotSource

#: The minimum time for which a closed pointer is remembered after it has left the invalid list.
REMEMBER_CLOSED_MS = 30 * 24 * 3600 * 1000
#: Pointers per comparison. Small blocks keep the sets small where the lists differ.
_BLOCK = 4096
#: The maximum number of invalid ids in the set of a search; about 10 MB.
MAX_SET_IDS = 100_000
#: The minimum time for which a message is kept after the end of its transaction, in milliseconds.
SEEN_MS = 300_000


class Problem(StrEnum):
    """The reason why there is no usable snapshot."""

    NOT_CONFIGURED = "not_configured"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    FUTURE = "future"
    STALE = "stale"
    OLDER = "older"


@dataclass(frozen=True, slots=True)
class TxState:
    """The transaction snapshot of a run.

    Attributes:
        snapshot: the data; None if there is no snapshot.
        name: the source of the snapshot, for display.
        problem: the reason why the snapshot is not used; None if it is used.
        message: the problem as a sentence with the next step; empty without a problem, or if the settings want no
            snapshots.
        rejected: newer snapshots that were rejected, each with a short reason.
        system: the id of its transaction system; empty if unknown.
    """

    snapshot: VisibilityState | None
    name: str = ""
    problem: Problem | None = None
    message: str = ""
    rejected: tuple[str, ...] = ()
    system: str = ""

    @property
    def usable(self) -> VisibilityState | None:
        """Return the snapshot if it may be used, else None."""
        return self.snapshot if self.problem is None else None

    @property
    def used(self) -> SnapshotUsed | None:
        """Return the reference to the usable snapshot for a report."""
        usable = self.usable
        return None if usable is None else SnapshotUsed(usable.timestamp_ms, self.name)


def refresh(
    source: SnapshotSource | None, now_ms: int, *, interval_seconds: int, allowance_ms: int, is_required: bool = True
) -> TxState:
    """Read the newest valid snapshot, and decide whether it may be used (invariant S14).

    Args:
        interval_seconds: the interval of the transaction service; a snapshot is stale after twice that time (as in
            Tephra's TransactionStateCache).
        allowance_ms: how far its clock may be ahead of the local clock.
        is_required: whether a missing source is reported.
    """
    if source is None:
        message = "no snapshots are configured: set transactions.directory or give --snapshots" if is_required else ""
        return TxState(None, problem=Problem.NOT_CONFIGURED, message=message)
    try:
        loaded = source.latest()
    except NoSnapshot as error:
        return TxState(None, problem=Problem.MISSING, message=str(error))
    except (SnapshotError, OSError) as error:
        return TxState(None, problem=Problem.UNREADABLE, message=str(error))
    rejected = tuple(f"{item.name}: {item.detail}" for item in loaded.rejected)
    state = TxState(loaded.snapshot, loaded.name, rejected=rejected, system=loaded.system)
    age_ms = now_ms - loaded.snapshot.timestamp_ms
    if age_ms < -allowance_ms:
        message = f"{loaded.name} is {duration(-age_ms)} ahead of this machine's clock; check the clocks of both"
        return replace(state, problem=Problem.FUTURE, message=message)
    if age_ms > 2 * interval_seconds * 1000:
        message = (
            f"{loaded.name} is {duration(age_ms)} old, more than twice transactions.snapshot_interval_seconds "
            f"({interval_seconds}); is the transaction service running?"
        )
        return replace(state, problem=Problem.STALE, message=message)
    return state


def reject_older(state: TxState) -> TxState:
    """Return the state with its snapshot rejected, because it is older than the last used snapshot."""
    message = f"{state.name} is older than the snapshot that was used last; the janitor waits for the next snapshot"
    return replace(state, problem=Problem.OLDER, message=message)


@dataclass(frozen=True, slots=True)
class TransactionView:
    """The facts about transactions for the rules (``janitor.rules.policy.Transactions``).

    Attributes:
        undecided_ms: how long after its start a transaction may commit, if there is no snapshot.
    """

    snapshot: VisibilityState | None
    now_ms: int
    undecided_ms: int

    def is_invalid(self, pointer: int) -> bool:
        return self.snapshot is not None and self.snapshot.is_invalid(pointer)

    def candidates(self) -> PointerSet:
        """Return a fast filter that matches all invalid pointers, and possibly other pointers."""
        ids: Sequence[int] = self.snapshot.invalid if self.snapshot is not None else ()
        if len(ids) <= MAX_SET_IDS:
            return PointerSet.of(frozenset(ids))
        return PointerSet(range(max(1, ids[0]), ids[-1] + 1))

    def is_undecided(self, pointer: int) -> bool:
        if self.snapshot is not None:
            return self.snapshot.is_undecided(pointer)
        return transaction_ms(pointer) + self.undecided_ms > self.now_ms


@dataclass(frozen=True, slots=True)
class InvalidListChange:
    """The differences between an invalid list and the pointers known before.

    Attributes:
        seen_ms: the time of the comparison.
        still_listed: open pointers that are still listed, sorted.
        new: listed pointers that were never seen before, sorted; at first contact up to a million.
        unlisted_open: open pointers that left the list: their clients aborted, or an operator truncated the list.
        unlisted_closed: closed pointers that left the list, truncated because of the boundary. They are remembered for
            some time, so that an audit can refute the boundary with them.
    """

    seen_ms: int
    still_listed: list[OpenIdRecord] = field(default_factory=list)
    new: array[int] = field(default_factory=lambda: array("q"))
    unlisted_open: list[int] = field(default_factory=list)
    unlisted_closed: array[int] = field(default_factory=lambda: array("q"))

    def open_ids(self) -> Iterator[OpenIdRecord]:
        """Yield the records of all listed open pointers."""
        yield from self.still_listed
        for pointer in self.new:
            yield OpenIdRecord(pointer, self.seen_ms)


def observe(known: KnownIds, invalid: array[int], now_ms: int) -> InvalidListChange:
    """Compare an invalid list with the pointers known so far.

    Args:
        invalid: the list, ascending (``VisibilityState.invalid``).
    """
    unlisted_closed, others = differences(known.closed, invalid)
    absent, new = differences(array("q", known.open_ids), others)
    # A pass that no longer counts (``State.known_ids``) closed these pointers. They can still refute its boundary.
    unlisted_closed.extend(pointer for pointer in absent if known.open_ids[pointer].closed_ms is not None)
    unlisted_open = [pointer for pointer in absent if known.open_ids[pointer].closed_ms is None]
    unlisted = set(absent)
    still_listed = [
        _without_future_times(record, now_ms) for pointer, record in known.open_ids.items() if pointer not in unlisted
    ]
    return InvalidListChange(now_ms, still_listed, new, unlisted_open, unlisted_closed)


def differences(first: array[int], second: array[int]) -> tuple[array[int], array[int]]:
    """Return the values that only the first, and the values that only the second of two sorted arrays has.

    Both arrays are cut into blocks at the same values. Equal blocks are skipped, and different blocks are compared as
    sets, so the comparison of two nearly equal arrays of a million values takes milliseconds.
    """
    only_first, only_second = array("q"), array("q")
    one = two = 0
    while one < len(first) and two < len(second):
        last = min(first[min(one + _BLOCK, len(first)) - 1], second[min(two + _BLOCK, len(second)) - 1])
        one_end, two_end = bisect_right(first, last, one), bisect_right(second, last, two)
        one_block, two_block = first[one:one_end], second[two:two_end]
        if one_block != two_block:
            only_first.extend(sorted(set(one_block).difference(two_block)))
            only_second.extend(sorted(set(two_block).difference(one_block)))
        one, two = one_end, two_end
    return only_first + first[one:], only_second + second[two:]


def search_since_ms(open_ids: Iterable[OpenIdRecord], lifetime: Lifetime) -> int | None:
    """Return the first publish time of the search for open pointers; None if no pointer is open.

    A pointer that was never searched for may have rows from its own start on, and a searched pointer only newer rows.
    """
    return min((_since_ms(record, lifetime) for record in open_ids), default=None)


def mark_searched(open_ids: Iterable[OpenIdRecord], since_ms: int | None) -> Iterator[OpenIdRecord]:
    """Yield the records as they apply to keys that passes since ``since_ms`` have covered; None: no such pass."""
    for record in open_ids:
        known = since_ms is not None and record.first_seen_ms <= since_ms
        yield replace(record, scanned_ms=since_ms) if known else record


def mark_covered(
    open_ids: Iterable[OpenIdRecord], started_ms: int, finished_ms: int, lifetime: Lifetime, settled_ms: int | None
) -> Iterator[OpenIdRecord]:
    """Yield the records after a complete pass: searched up to its start, and closed if their transactions can no longer
    publish.

    Only full passes close ids, since they read rows of all times. A pass that searches a window relies on the agreement
    of clocks, which is enough to invert early, but not for a boundary. An id is closed if each key was covered by a
    full pass that started when the id was already known and its client could no longer publish.

    Args:
        settled_ms: the start of the oldest full pass that covered some of the keys; None if this pass was not full.
    """
    for record in open_ids:
        over_ms = max(record.first_seen_ms, lifetime.window_end_ms(record.pointer))
        if settled_ms is not None and settled_ms >= over_ms:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, settled_ms, finished_ms)
        else:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, started_ms)


def _without_future_times(record: OpenIdRecord, now_ms: int) -> OpenIdRecord:
    """Return the record without times in the future, which a clock that was set back left: seen now, not searched."""
    if record.first_seen_ms > now_ms:
        record = replace(record, first_seen_ms=now_ms)
    is_future = record.scanned_ms is not None and record.scanned_ms > now_ms
    return replace(record, scanned_ms=None, closed_ms=None) if is_future else record


def _since_ms(record: OpenIdRecord, lifetime: Lifetime) -> int:
    if record.scanned_ms is None:
        return lifetime.window_start_ms(record.pointer)
    # A message published after the search may have an earlier time, from a slow clock.
    return record.scanned_ms - lifetime.allowance_ms


# -- decided transactions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecidedTransactions:
    """The times up to which messages belong to decided transactions.

    Attributes:
        before_ms: the transactions of messages published before this time ended at least :data:`SEEN_MS` ago.
        next_ms: the transactions of messages published before this time had ended at ``noted_ms``.
        noted_ms: the time of the snapshot that shows this.
    """

    before_ms: int
    next_ms: int
    noted_ms: int


DECIDED: KeptFigures[DecidedTransactions | None] = KeptFigures(Note.TRANSACTION_ENDS, DecidedTransactions, None)


def update_decided(
    now_ms: int, note: DecidedTransactions | None, snapshot: VisibilityState | None, lifetime: Lifetime
) -> DecidedTransactions:
    """Return the current times of decided transactions.

    Args:
        note: the times of the previous run; None if there is none.
        lifetime: how long a transaction may write. The transactions of older messages have ended in any case.
    """
    known = note or DecidedTransactions(0, 0, 0)
    if snapshot is not None:
        snapshot_ms = snapshot.timestamp_ms
        start_ms = oldest_open_ms(snapshot) - lifetime.allowance_ms
        # Wait from this snapshot on: it is the first one, or the clock of the transaction service was set back.
        if known.noted_ms == 0 or snapshot_ms < known.noted_ms:
            known = DecidedTransactions(known.before_ms, start_ms, snapshot_ms)
        elif snapshot_ms - known.noted_ms >= SEEN_MS:
            known = DecidedTransactions(max(known.before_ms, known.next_ms), start_ms, snapshot_ms)
    over_ms = now_ms - lifetime.max_ms - lifetime.allowance_ms - SEEN_MS
    return replace(known, before_ms=max(0, known.before_ms, over_ms))


def oldest_open_ms(snapshot: VisibilityState) -> int:
    """Return the start of the oldest transaction in progress; without any, the snapshot's time."""
    return min([snapshot.timestamp_ms, *map(transaction_ms, snapshot.open_pointers)])


def limit_to_decided(frontier: Frontier, decided_ms: int) -> Frontier:
    """Return a frontier that stops before messages of transactions that are in progress or were decided recently."""
    frontier = replace(frontier, decided_ms=decided_ms)
    if decided_ms >= frontier.cutoff.ms:
        return frontier
    return replace(frontier, cutoff=Cutoff(decided_ms), hold=frontier.hold or Hold.TRANSACTION)
