"""Facts about transactions in a run: the usable snapshot, and the invalid transactions that may still write.

The rules ask two questions about transactions: is this pointer invalid (then its rows are inverted), and may this
transaction still commit (then its payloads stay). Both need a snapshot that is complete, of this transaction system and
fresh (invariant S14). Without one, no pointer is invalid, and the second question is decided by age.

The client of an invalid transaction may not know that it is invalid, and may publish until the lifetime ends. Therefore
a pointer is *open* from the time it is first seen in an invalid list. It is closed after a pass that started later has
covered all times at which it can have published. Only then do its rows count as clean.

No table has the commit time of a transaction, and the messages of some topics stay until their transaction has ended
(property ``hold: transaction``). Therefore a run notes the start of the oldest transaction in progress. A few minutes
later, everything published before that start was decided at least so long ago. Two such times are enough: the one in
force, and the next one.
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

#: The least time for which a closed pointer that has left the invalid list is remembered.
REMEMBER_CLOSED_MS = 30 * 24 * 3600 * 1000
#: Pointers compared at a time. Small blocks keep the sets small where the lists differ.
_BLOCK = 4096
#: Invalid ids that are put in a set, for the time of a search; about 10 MB.
MOST_IN_A_SET = 100_000
#: The least time for which a message stays after the end of its transaction, in milliseconds.
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
        snapshot: the data; None: there is no snapshot.
        name: its source, for people.
        problem: the reason why it is not used; None: it is used.
        message: the problem in a sentence, with the next step; empty without a problem, and if no snapshots are wanted.
        rejected: newer snapshots that were rejected, each with a short reason.
        system: the id of its transaction system; empty: not known.
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
        """Return the usable snapshot for a report."""
        usable = self.usable
        return None if usable is None else SnapshotUsed(usable.timestamp_ms, self.name)


def refresh(
    source: SnapshotSource | None, now_ms: int, *, interval_seconds: int, allowance_ms: int, is_required: bool = True
) -> TxState:
    """Read the newest valid snapshot, and decide whether it may be used (invariant S14).

    Args:
        interval_seconds: the interval of the transaction service; a snapshot is stale after twice that time (as in
            Tephra's TransactionStateCache).
        allowance_ms: how far its clock may be ahead of ours.
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


def older(state: TxState) -> TxState:
    """Return the state of a snapshot that is older than the last used snapshot, which may have been removed; not
    usable.
    """
    message = f"{state.name} is older than the snapshot that was used last; the janitor waits for the next snapshot"
    return replace(state, problem=Problem.OLDER, message=message)


@dataclass(frozen=True, slots=True)
class TransactionView:
    """Answers the rules' two questions (``janitor.rules.policy.Transactions``).

    Attributes:
        undecided_ms: how long after its start a transaction counts as undecided without a snapshot.
    """

    snapshot: VisibilityState | None
    now_ms: int
    undecided_ms: int

    def is_invalid(self, pointer: int) -> bool:
        return self.snapshot is not None and self.snapshot.is_invalid(pointer)

    def candidates(self) -> PointerSet:
        """Return a fast filter for the pointers that may be invalid."""
        ids: Sequence[int] = self.snapshot.invalid if self.snapshot is not None else ()
        if len(ids) <= MOST_IN_A_SET:
            return PointerSet.of(frozenset(ids))
        return PointerSet(range(max(1, ids[0]), ids[-1] + 1))

    def is_undecided(self, pointer: int) -> bool:
        if self.snapshot is not None:
            return self.snapshot.is_undecided(pointer)
        return transaction_ms(pointer) + self.undecided_ms > self.now_ms


@dataclass(frozen=True, slots=True)
class InvalidListChange:
    """An invalid list, compared with the pointers known before.

    Attributes:
        seen_ms: the time of the comparison.
        still: open pointers that are still listed, sorted.
        new: listed pointers that were never seen before, sorted; at first contact there may be a million.
        unlisted_open: open pointers that left the list: their clients aborted, or an operator truncated the list.
        unlisted_closed: closed pointers that left the list, truncated because of the boundary. They are remembered for
            some time, so that an audit can use them as evidence against it.
    """

    seen_ms: int
    still: list[OpenIdRecord] = field(default_factory=list)
    new: array[int] = field(default_factory=lambda: array("q"))
    unlisted_open: list[int] = field(default_factory=list)
    unlisted_closed: array[int] = field(default_factory=lambda: array("q"))

    def open_ids(self) -> Iterator[OpenIdRecord]:
        """Yield the records of all listed open pointers."""
        yield from self.still
        for pointer in self.new:
            yield OpenIdRecord(pointer, self.seen_ms)


def observe(known: KnownIds, invalid: array[int], now_ms: int) -> InvalidListChange:
    """Compare an invalid list with the pointers known so far.

    Args:
        invalid: the list, ascending (``VisibilityState.invalid``).
    """
    unlisted_closed, others = differences(known.closed, invalid)
    absent, new = differences(array("q", known.open_ids), others)
    # Closed by a pass that no longer counts (``State.known_ids``). They can still refute its boundary.
    unlisted_closed.extend(pointer for pointer in absent if known.open_ids[pointer].closed_ms is not None)
    unlisted_open = [pointer for pointer in absent if known.open_ids[pointer].closed_ms is None]
    unlisted = set(absent)
    still = [
        _without_future_times(record, now_ms) for pointer, record in known.open_ids.items() if pointer not in unlisted
    ]
    return InvalidListChange(now_ms, still, new, unlisted_open, unlisted_closed)


def differences(first: array[int], second: array[int]) -> tuple[array[int], array[int]]:
    """Return the values that only the first, and those that only the second of two sorted arrays has.

    Two arrays of a million that are nearly equal take milliseconds: both are cut at the same values into blocks. Equal
    blocks are skipped, and different blocks are compared as sets.
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
    """Return the first publish time of the search for open pointers; None: none is open.

    A pointer that was never searched for may have rows from its own start on; a searched pointer only newer rows.
    """
    return min((_since_ms(record, lifetime) for record in open_ids), default=None)


def mark_searched(open_ids: Iterable[OpenIdRecord], since_ms: int | None) -> Iterator[OpenIdRecord]:
    """Yield the records as they are for keys that were covered by passes that started at or after ``since_ms``; None:
    no pass.
    """
    for record in open_ids:
        known = since_ms is not None and record.first_seen_ms <= since_ms
        yield replace(record, scanned_ms=since_ms) if known else record


def mark_covered(
    open_ids: Iterable[OpenIdRecord], started_ms: int, finished_ms: int, lifetime: Lifetime, settled_ms: int | None
) -> Iterator[OpenIdRecord]:
    """Yield the records after a complete pass: searched up to its start, and closed if their transactions can
    no longer publish.

    Only full passes close ids, since they read rows of all times. A pass that searches a window relies on the agreement
    of clocks; that is enough to invert early, but not for a boundary. Each key must have been covered by a full pass
    that started when the id was known already and its client could no longer publish.

    Args:
        settled_ms: the start of the oldest full pass that covered some of the keys; None: this pass was not full.
    """
    for record in open_ids:
        over_ms = max(record.first_seen_ms, lifetime.window_end_ms(record.pointer))
        if settled_ms is not None and settled_ms >= over_ms:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, settled_ms, finished_ms)
        else:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, started_ms)


def _without_future_times(record: OpenIdRecord, now_ms: int) -> OpenIdRecord:
    """Return the record without times that are in the future because the clock was set back; it then counts as seen
    now, and not searched.
    """
    if record.first_seen_ms > now_ms:
        record = replace(record, first_seen_ms=now_ms)
    is_future = record.scanned_ms is not None and record.scanned_ms > now_ms
    return replace(record, scanned_ms=None, closed_ms=None) if is_future else record


def _since_ms(record: OpenIdRecord, lifetime: Lifetime) -> int:
    if record.scanned_ms is None:
        return lifetime.window_start_ms(record.pointer)
    # A message published after the search may have an earlier time, from a clock that is slow.
    return record.scanned_ms - lifetime.allowance_ms


# -- decided transactions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecidedTransactions:
    """The facts about decided transactions.

    Attributes:
        before_ms: messages published before this time were decided :data:`SEEN_MS` ago.
        next_ms: messages published before this time were decided by ``noted_ms``.
        noted_ms: the time of the snapshot with that fact.
    """

    before_ms: int
    next_ms: int
    noted_ms: int


DECIDED: KeptFigures[DecidedTransactions | None] = KeptFigures(Note.TRANSACTION_ENDS, DecidedTransactions, None)


def decided(
    now_ms: int, note: DecidedTransactions | None, snapshot: VisibilityState | None, lifetime: Lifetime
) -> DecidedTransactions:
    """Return the present facts about decided transactions.

    Args:
        note: the facts of the previous run; None: there are none.
        lifetime: how long a transaction may write. Older messages were decided in any case.
    """
    known = note or DecidedTransactions(0, 0, 0)
    if snapshot is not None:
        snapshot_ms = snapshot.timestamp_ms
        start_ms = oldest_open_ms(snapshot) - lifetime.allowance_ms
        # There is no time to wait from, or the clock of the transaction service was set back: wait from this snapshot
        # on.
        if known.noted_ms == 0 or snapshot_ms < known.noted_ms:
            known = DecidedTransactions(known.before_ms, start_ms, snapshot_ms)
        elif snapshot_ms - known.noted_ms >= SEEN_MS:
            known = DecidedTransactions(max(known.before_ms, known.next_ms), start_ms, snapshot_ms)
    over_ms = now_ms - lifetime.max_ms - lifetime.allowance_ms - SEEN_MS
    return replace(known, before_ms=max(0, known.before_ms, over_ms))


def oldest_open_ms(snapshot: VisibilityState) -> int:
    """Return the start of the oldest transaction in progress; if there is none, the snapshot's time."""
    return min([snapshot.timestamp_ms, *map(transaction_ms, snapshot.open_pointers)])


def until_decided(frontier: Frontier, decided_ms: int) -> Frontier:
    """Return a frontier that stops before messages whose transactions have not been decided long enough."""
    frontier = replace(frontier, decided_ms=decided_ms)
    if decided_ms >= frontier.cutoff.ms:
        return frontier
    return replace(frontier, cutoff=Cutoff(decided_ms), hold=frontier.hold or Hold.TRANSACTION)
