"""What a run knows about transactions: the snapshot it may use, and which invalid ones may still write.

Two questions are asked of transactions while rows are judged: is this pointer invalid (then its rows are inverted), and
may this transaction still commit (then its payloads stay). Both need a snapshot that is whole, of this transaction
system and fresh (rule S14); without one the first answer is always no and the second is decided by age alone.

An invalid transaction's client may not know yet that it is invalid and may go on publishing until its lifetime ends.
So a pointer stays *open* from when it is first seen in an invalid list until a pass that began after that moment has
covered all the time in which it can have published. Only then do its rows count as clean.

When a transaction was committed is written down nowhere, and the messages of some topics wait until theirs has ended
(property ``hold: transaction``). So a run notes the begin of the oldest one in progress, and once that note is some
minutes old, whatever was published before that begin was decided at least so long ago. Two such moments are enough: the
one that counts, and the next one, which is growing old.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from janitor.report import SnapshotUsed
from janitor.rules.policy import Frontier, Hold
from janitor.rules.ranges import Lifetime
from janitor.state.base import KnownIds, OpenIdRecord
from janitor.state.records import Note
from tms_core.errors import NoSnapshot, SnapshotError
from tms_core.logs.printable import duration
from tms_core.rowkey import Cutoff
from tms_core.tables.base import PointerSet
from tms_core.transaction.model import VisibilityState, transaction_ms
from tms_core.transaction.source.source import SnapshotSource

#: How long a closed pointer is remembered, at the least, that has left the invalid list.
REMEMBER_CLOSED_MS = 30 * 24 * 3600 * 1000
#: PointerSet compared at a time; as few as that need no large sets where the lists differ.
_BLOCK = 4096
#: Invalid ids that are put in a set, for the time of a search; about 10 MB.
MOST_IN_A_SET = 100_000
#: The note that has the two moments by which transactions have ended.
DECIDED = Note.TRANSACTION_ENDS
#: How long after the end of its transaction a message is there at least, in milliseconds.
SEEN_MS = 300_000


class Problem(StrEnum):
    """Why there is no usable snapshot."""

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
        snapshot: the data read, None without one.
        name: where it was read from, for people.
        problem: why it is not used; None when it is.
        message: the problem in a sentence, with the next step; empty without one, and where no snapshots are wanted.
        rejected: newer snapshots that were passed over, each in a few words.
        system: the id of its transaction system; empty where that is not known.
    """

    snapshot: VisibilityState | None
    name: str = ""
    problem: Problem | None = None
    message: str = ""
    rejected: tuple[str, ...] = ()
    system: str = ""

    @property
    def usable(self) -> VisibilityState | None:
        """Return the snapshot, if it may be judged by."""
        return self.snapshot if self.problem is None else None

    @property
    def used(self) -> SnapshotUsed | None:
        """Return the usable snapshot as a report shows it."""
        usable = self.usable
        return None if usable is None else SnapshotUsed(usable.timestamp_ms, self.name)


def refresh(
    source: SnapshotSource | None, now_ms: int, *, interval_seconds: int, allowance_ms: int, wanted: bool = True
) -> TxState:
    """Read the newest valid snapshot and say whether it may be used (rule S14).

    Args:
        source: where snapshots come from; None when none is configured.
        now_ms: the moment its age is measured at.
        interval_seconds: how often the transaction service writes one; twice that old is stale (Tephra's
            TransactionStateCache has the same bound).
        allowance_ms: how far its clock may be ahead of ours.
        wanted: whether a missing source is reported.
    """
    if source is None:
        message = "no snapshots are configured: set transactions.directory or give --snapshots" if wanted else ""
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
    """Return the state, not to be used: it is of a snapshot from before the one last used, which may have been
    removed.
    """
    message = f"{state.name} is older than the snapshot that was used last; the janitor waits for the next snapshot"
    return replace(state, problem=Problem.OLDER, message=message)


@dataclass(frozen=True, slots=True)
class TransactionView:
    """Answers the rules' two questions (``janitor.rules.policy.Transactions``).

    Attributes:
        snapshot: the usable snapshot, None without one.
        now_ms: the moment the run judges by.
        undecided_ms: how long after its start a transaction counts as undecided without a snapshot.
    """

    snapshot: VisibilityState | None
    now_ms: int
    undecided_ms: int

    def is_invalid(self, pointer: int) -> bool:
        return self.snapshot is not None and self.snapshot.is_invalid(pointer)

    def candidates(self) -> PointerSet:
        """What tells quickly, for very many pointers, which of them may be invalid."""
        ids: Sequence[int] = self.snapshot.invalid if self.snapshot is not None else ()
        if len(ids) <= MOST_IN_A_SET:
            return PointerSet.of(frozenset(ids))
        return PointerSet(range(max(1, ids[0]), ids[-1] + 1))

    def is_undecided(self, pointer: int) -> bool:
        if self.snapshot is not None:
            return self.snapshot.is_undecided(pointer)
        return transaction_ms(pointer) + self.undecided_ms > self.now_ms


@dataclass(frozen=True, slots=True)
class Observed:
    """An invalid list, compared with the pointers known before.

    Attributes:
        seen_ms: when it was seen.
        still: open ones that are listed, in order.
        new: listed ones never seen before, ascending; at first contact there may be a million.
        gone: open ones that left the list: aborted by their clients, or truncated by an operator.
        left: closed ones that did: truncated because of our claim, and remembered for a while in which an audit can
            hold the claim against them.
    """

    seen_ms: int
    still: list[OpenIdRecord] = field(default_factory=list)
    new: array[int] = field(default_factory=lambda: array("q"))
    gone: list[int] = field(default_factory=list)
    left: array[int] = field(default_factory=lambda: array("q"))

    def open_ids(self) -> Iterator[OpenIdRecord]:
        """Records of all that are open and listed."""
        yield from self.still
        for pointer in self.new:
            yield OpenIdRecord(pointer, self.seen_ms)


def observe(known: KnownIds, invalid: array[int], now_ms: int) -> Observed:
    """Compare an invalid list with the pointers known so far.

    Args:
        invalid: the list, ascending (``VisibilityState.invalid``).
    """
    left, others = differences(known.closed, invalid)
    absent, new = differences(array("q", known.open_ids), others)
    # Closed by a pass that no longer counts (``State.known_ids``): that its claim can be held against them still does.
    left.extend(pointer for pointer in absent if known.open_ids[pointer].closed_ms is not None)
    gone = [pointer for pointer in absent if known.open_ids[pointer].closed_ms is None]
    unlisted = set(absent)
    still = [_now(record, now_ms) for pointer, record in known.open_ids.items() if pointer not in unlisted]
    return Observed(now_ms, still, new, gone, left)


def differences(first: array[int], second: array[int]) -> tuple[array[int], array[int]]:
    """What only the first and what only the second of two ascending arrays holds, ascending.

    Two arrays of a million that are nearly the same take milliseconds: they are cut at the same values into blocks,
    which are compared as wholes, and only where they differ as sets.
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
    """From which publish time on message rows must be searched for open pointers; None when none is open.

    A pointer never searched for may have rows from its own start on, one that was only newer ones.
    """
    return min((_since_ms(record, lifetime) for record in open_ids), default=None)


def searched(open_ids: Iterable[OpenIdRecord], since_ms: int | None) -> Iterator[OpenIdRecord]:
    """Yield the records as they are for keys that were covered by passes none of which started before; None: by no
    pass.
    """
    for record in open_ids:
        known = since_ms is not None and record.first_seen_ms <= since_ms
        yield replace(record, scanned_ms=since_ms) if known else record


def covered(
    open_ids: Iterable[OpenIdRecord], started_ms: int, finished_ms: int, lifetime: Lifetime, settled_ms: int | None
) -> Iterator[OpenIdRecord]:
    """The records after a complete pass: searched up to its start, and closed where nothing can be published any more.

    Only full passes close ids, since they look at rows of any time. One that searched a window rests on clocks
    agreeing, which is enough to invert promptly and not enough for a claim. And every key must have been covered by one
    that began when the id was known already, and nothing could be published under it any more.

    Args:
        settled_ms: when the oldest full pass began that covered some of the keys; None: it was not full.
    """
    for record in open_ids:
        over_ms = max(record.first_seen_ms, lifetime.window_end_ms(record.pointer))
        if settled_ms is not None and settled_ms >= over_ms:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, settled_ms, finished_ms)
        else:
            yield OpenIdRecord(record.pointer, record.first_seen_ms, started_ms)


def _now(record: OpenIdRecord, now_ms: int) -> OpenIdRecord:
    """Return the record, without times of a clock that has been set back since: it is seen now, and was not searched
    for.
    """
    if record.first_seen_ms > now_ms:
        record = replace(record, first_seen_ms=now_ms)
    ahead = record.scanned_ms is not None and record.scanned_ms > now_ms
    return replace(record, scanned_ms=None, closed_ms=None) if ahead else record


def _since_ms(record: OpenIdRecord, lifetime: Lifetime) -> int:
    if record.scanned_ms is None:
        return lifetime.window_start_ms(record.pointer)
    return record.scanned_ms - lifetime.allowance_ms


# -- when they ended ---------------------------------------------------------------------------------------------------


class Decided(NamedTuple):
    """The facts about decided transactions.

    Attributes:
        before_ms: published messages before this moment was decided :data:`SEEN_MS` ago.
        next_ms: published messages before this one was decided by ``noted_ms``.
        noted_ms: the time of the snapshot that said so.
    """

    before_ms: int
    next_ms: int
    noted_ms: int


def decided(
    now_ms: int, note: Mapping[str, int] | None, snapshot: VisibilityState | None, lifetime: Lifetime
) -> Decided:
    """Return the present facts.

    Args:
        now_ms: the moment rows are judged by.
        note: the facts of the previous run; None: nothing.
        snapshot: the facts about transactions now; None: nothing.
        lifetime: how long a transaction may write. Older messages were decided in any case.
    """
    known = Decided(0, 0, 0) if note is None else Decided(**note)
    if snapshot is not None:
        taken_ms = snapshot.timestamp_ms
        begun_ms = oldest_open_ms(snapshot) - lifetime.allowance_ms
        if known.noted_ms == 0 or taken_ms < known.noted_ms:
            known = Decided(known.before_ms, begun_ms, taken_ms)
        elif taken_ms - known.noted_ms >= SEEN_MS:
            known = Decided(max(known.before_ms, known.next_ms), begun_ms, taken_ms)
    over_ms = now_ms - lifetime.max_ms - lifetime.allowance_ms - SEEN_MS
    return known._replace(before_ms=max(0, known.before_ms, over_ms))


def oldest_open_ms(snapshot: VisibilityState) -> int:
    """Start of the oldest transaction that may be in progress; where none is, the snapshot's time."""
    return min([snapshot.timestamp_ms, *map(transaction_ms, snapshot.open_pointers)])


def until_decided(frontier: Frontier, decided_ms: int) -> Frontier:
    """Return a frontier that stops where transactions may are over only now."""
    frontier = replace(frontier, decided_ms=decided_ms)
    if decided_ms >= frontier.cutoff.ms:
        return frontier
    return replace(frontier, cutoff=Cutoff(decided_ms), hold=frontier.hold or Hold.TRANSACTION)
