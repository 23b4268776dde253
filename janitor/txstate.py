"""What a run knows about transactions: the snapshot it may use, and which invalid ones may still write.

Two questions are asked of transactions while rows are judged: is this pointer invalid (then its rows are inverted), and
may this transaction still commit (then its payloads stay). Both need a snapshot that is whole, of this transaction
system and fresh (rule S14); without one the first answer is always no and the second is decided by age alone.

An invalid transaction's client may not know yet that it is invalid and may go on publishing until its lifetime ends.
So a pointer stays *open* from when it is first seen in an invalid list until a pass that began after that moment has
covered all the time in which it can have published. Only then do its rows count as clean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from janitor.references import Lifetime
from janitor.report import SnapshotUsed
from janitor.state.base import OpenIdRecord
from tms_core.errors import NoSnapshot, SnapshotError
from tms_core.transaction.model import VisibilityState, transaction_ms
from tms_core.transaction.source import SnapshotSource

#: How long a closed pointer is remembered that has left the invalid list.
REMEMBER_CLOSED_MS = 30 * 24 * 3600 * 1000


class Problem(StrEnum):
    """Why there is no usable snapshot."""

    NOT_CONFIGURED = "not_configured"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    FUTURE = "future"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class TxState:
    """The transaction snapshot of a run.

    Attributes:
        snapshot: what was read, None without one.
        name: where it was read from, for people.
        problem: why it is not used; None when it is.
        message: the problem in a sentence, with the next step; empty without one.
        rejected: newer snapshots that were passed over, each in a few words.
    """

    snapshot: VisibilityState | None
    name: str = ""
    problem: Problem | None = None
    message: str = ""
    rejected: tuple[str, ...] = ()

    @property
    def usable(self) -> VisibilityState | None:
        """The snapshot, if it may be judged by."""
        return self.snapshot if self.problem is None else None

    @property
    def used(self) -> SnapshotUsed | None:
        """The usable snapshot as a report shows it."""
        usable = self.usable
        return None if usable is None else SnapshotUsed(usable.timestamp_ms, self.name)


def refresh(source: SnapshotSource | None, now_ms: int, *, interval_seconds: int, allowance_ms: int) -> TxState:
    """Read the newest valid snapshot and say whether it may be used (rule S14).

    Args:
        source: where snapshots come from; None when none is configured.
        now_ms: the moment its age is measured at.
        interval_seconds: how often the transaction service writes one; twice that old is stale (Tephra's
            TransactionStateCache has the same bound).
        allowance_ms: how far its clock may be ahead of ours.
    """
    if source is None:
        message = "no snapshots are configured: set transactions.directory or give --snapshots"
        return TxState(None, problem=Problem.NOT_CONFIGURED, message=message)
    try:
        loaded = source.latest()
    except NoSnapshot as error:
        return TxState(None, problem=Problem.MISSING, message=str(error))
    except (SnapshotError, OSError) as error:
        return TxState(None, problem=Problem.UNREADABLE, message=str(error))
    rejected = tuple(f"{item.name}: {item.detail}" for item in loaded.rejected)
    state = TxState(loaded.snapshot, loaded.name, rejected=rejected)
    age_ms = now_ms - loaded.snapshot.timestamp_ms
    if age_ms < -allowance_ms:
        message = f"{loaded.name} is {-age_ms / 1000:.0f} s ahead of this machine's clock; check the clocks of both"
        return replace(state, problem=Problem.FUTURE, message=message)
    if age_ms > 2 * interval_seconds * 1000:
        message = (
            f"{loaded.name} is {age_ms / 1000:.0f} s old, more than twice transactions.snapshot_interval_seconds "
            f"({interval_seconds}); is the transaction service running?"
        )
        return replace(state, problem=Problem.STALE, message=message)
    return state


@dataclass(frozen=True, slots=True)
class TransactionView:
    """Answers the law's two questions (``janitor.policy.Transactions``).

    Attributes:
        snapshot: the usable snapshot, None without one.
        now_ms: the moment the run judges by.
        undecided_ms: how long after its begin a transaction counts as undecided without a snapshot.
    """

    snapshot: VisibilityState | None
    now_ms: int
    undecided_ms: int

    def is_invalid(self, pointer: int) -> bool:
        return self.snapshot is not None and self.snapshot.is_invalid(pointer)

    def is_undecided(self, pointer: int) -> bool:
        if self.snapshot is not None:
            return self.snapshot.is_undecided(pointer)
        return transaction_ms(pointer) + self.undecided_ms > self.now_ms


def observe(
    known: Mapping[int, OpenIdRecord], invalid: Iterable[int], now_ms: int, lifetime: Lifetime
) -> tuple[list[OpenIdRecord], list[int]]:
    """Compare an invalid list with the pointers known so far.

    Returns:
        Records of all pointers that are open and listed, new ones among them, and the pointers that left the list and
        need not be remembered. An open one was aborted by its client, or truncated by an operator; a closed one was
        truncated because of our claim, and is remembered for a while in which an audit can hold the claim against it.
    """
    listed = set(invalid)
    new = [OpenIdRecord(pointer, now_ms) for pointer in listed if pointer not in known]
    still = [_now(record, now_ms) for record in known.values() if record.pointer in listed]
    still = [record for record in still if not is_closed(record, lifetime)]
    left = [record for pointer, record in known.items() if pointer not in listed]
    gone = [r.pointer for r in left if r.closed_ms is None or r.closed_ms < now_ms - REMEMBER_CLOSED_MS]
    return sorted(still + new, key=lambda record: record.pointer), gone


def is_closed(record: OpenIdRecord, lifetime: Lifetime) -> bool:
    """Whether a thorough pass has covered all the time in which the pointer's client can have published.

    Judged by the lifetime that is configured now: one that was raised since opens the pointer again.
    """
    if record.closed_ms is None or record.scanned_ms is None:
        return False
    return record.scanned_ms >= lifetime.window_end_ms(record.pointer)


def search_since_ms(open_ids: Iterable[OpenIdRecord], lifetime: Lifetime) -> int | None:
    """From which publish time on message rows must be searched for open pointers; None when none is open.

    A pointer never searched for may have rows from its own begin on, one that was only newer ones.
    """
    return min((_since_ms(record, lifetime) for record in open_ids), default=None)


def covered(
    open_ids: Iterable[OpenIdRecord], started_ms: int, finished_ms: int, lifetime: Lifetime, *, thorough: bool
) -> list[OpenIdRecord]:
    """The records after a complete pass: searched up to its start.

    A thorough pass, which looked at rows of any time, closes those of which nothing can be published any more; one
    that searched a window rests on clocks agreeing, which is enough to invert promptly and not enough for a claim.
    """
    return [
        replace(
            record,
            scanned_ms=started_ms,
            closed_ms=finished_ms if thorough and started_ms >= lifetime.window_end_ms(record.pointer) else None,
        )
        for record in open_ids
    ]


def _now(record: OpenIdRecord, now_ms: int) -> OpenIdRecord:
    """The record, as never searched for if it was by a clock that has been set back since."""
    ahead = record.scanned_ms is not None and record.scanned_ms > now_ms
    return replace(record, scanned_ms=None, closed_ms=None) if ahead else record


def _since_ms(record: OpenIdRecord, lifetime: Lifetime) -> int:
    if record.scanned_ms is None:
        return lifetime.window_start_ms(record.pointer)
    return record.scanned_ms - lifetime.allowance_ms
