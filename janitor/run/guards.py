"""Guards that block runs: a clock that jumped, an unknown store, a topic that fails repeatedly.

A janitor relies on the clock and on its state. If either is wrong, all rows look old. The wall clock is compared with
clocks that do not step: this machine's monotonic clock, saved between runs; and, if the state is on a cluster, the
clock of the cluster, since the last run may have been on another machine (invariant S7). Times in rows and snapshots
are not clocks, since their writers choose them. A snapshot's time can only show that the local clock is behind, and
then fewer rows are deleted.

Topics that fail repeatedly are quarantined, so that the other topics are processed and the log stays readable
(invariant S9). Every run retries a failure. After three failures in a row, runs skip the topic for an hour. Then one
run probes the topic, again after two hours, and so on up to a day. Failures do not count in a run in which no topic
succeeded. They also do not count if writes to several topics failed and no other topic was written, as with a full
disk: then the store is the cause.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from janitor.state.base import UNKNOWN_MS, ClockAnchor, KnownIds, State, StoreRecord, Strikes
from janitor.state.figures import GuardNote
from janitor.state.records import LINEAGE, RESTORED
from janitor.sweep.transactions import TxState
from tms_core.clock import OFF_MS, Clock
from tms_core.logs.printable import duration
from tms_core.tables.base import Reads
from tms_core.tables.record import SystemRecord
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState

#: The allowance for wall time across a reboot, where no monotonic clock is comparable.
REBOOT_ALLOWANCE_MS = OFF_MS
#: The effect of a clock that is behind, and the next step.
_LAG_EFFECT = (
    "fewer rows are deleted than are due; set the clock right; if the clock is right now, and was ahead before: "
    "janitor approve --clock"
)
#: The number of failures in a row after which a topic is quarantined.
STRIKES = 3
#: The time until the first probe, in milliseconds; doubled after each failed probe.
FIRST_PROBE_MS = 3_600_000
#: The maximum time between two probes.
LAST_PROBE_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class LastInProgress:
    """The ids in progress in the last used snapshot.

    Attributes:
        write_pointer: the highest pointer issued at the time of the snapshot.
        pointers: the pointers of transactions in progress and of their checkpoints.
    """

    write_pointer: int
    pointers: frozenset[int]

    def had_issued(self, pointer: int) -> bool:
        return pointer <= self.write_pointer


def read_clocks(clock: Clock) -> ClockAnchor:
    """Return the readings of all clocks of the machine."""
    return ClockAnchor(clock.now_ms(), clock.monotonic_ms(), clock.boot_id())


def measure_lead_ms(anchor: ClockAnchor | None, now: ClockAnchor) -> int | None:
    """Return how far wall time is ahead of the machine's monotonic clock since the last run; None if unknown."""
    return now.wall_ms - _expected_ms(anchor, now) if anchor is not None and _same_boot(anchor, now) else None


def check_clock(anchor: ClockAnchor | None, now: ClockAnchor, allowance_ms: int) -> GuardNote | None:
    """Return a note if wall time differs from the time that the saved clock readings predict (invariant S7)."""
    if anchor is None:
        return None
    if not _same_boot(anchor, now):
        return _check_across_boots(now.wall_ms - anchor.wall_ms)
    lead_ms = now.wall_ms - _expected_ms(anchor, now)
    if lead_ms > allowance_ms:
        message = f"the clock is {duration(lead_ms)} ahead of the machine's monotonic clock since the last run"
        return GuardNote(
            "clock", True, f"{message}; correct the clock; if the clock is right now: janitor approve --clock"
        )
    if lead_ms < -allowance_ms:
        message = f"the clock is {duration(-lead_ms)} behind the machine's monotonic clock since the last run"
        return GuardNote("clock", False, f"{message}; {_LAG_EFFECT}")
    return None


def check_clocks(state: State, now: ClockAnchor, allowance_ms: int) -> GuardNote | None:
    """Return a note if wall time differs from another available clock (invariant S7).

    Args:
        now: the clock readings, taken just before the call.

    Raises:
        StateError: the state could not be read.
    """
    server_note = check_server_clock(state.clock_ms(), now, allowance_ms)
    return server_note or check_clock(state.anchor(), now, allowance_ms)


def check_server_clock(server_ms: int | None, now: ClockAnchor, allowance_ms: int) -> GuardNote | None:
    """Return a note if wall time is ahead of the clock of the state's server (invariant S7).

    Wall time behind that clock is harmless: fewer rows are deleted.

    Args:
        server_ms: the reading of that clock, taken after ``now``; None if the state has no server.
    """
    if server_ms is None or now.wall_ms - server_ms <= allowance_ms:
        return None
    message = f"the clock is {duration(now.wall_ms - server_ms)} ahead of that of HBase's servers"
    return GuardNote("clock", True, f"{message}; correct the wrong clock, and the next run continues")


def _check_across_boots(passed_ms: int) -> GuardNote | None:
    if passed_ms > REBOOT_ALLOWANCE_MS:
        message = f"according to this machine's clock, the last run was {duration(passed_ms)} ago, before a reboot"
        return GuardNote("clock", True, f"{message}; if the clock is right: janitor approve --clock")
    if passed_ms < -REBOOT_ALLOWANCE_MS:
        message = f"the last run, before a reboot, was {duration(-passed_ms)} later than this machine's clock shows now"
        return GuardNote("clock", False, f"{message}; {_LAG_EFFECT}")
    return None


def next_anchor(anchor: ClockAnchor | None, now: ClockAnchor) -> ClockAnchor:
    """Return the clock reading to save after a run.

    Within a boot, the saved wall time advances with the monotonic clock only, so that many small steps of the wall
    clock add up to a detected jump.
    """
    if anchor is None:
        return now
    if not _same_boot(anchor, now):
        # If a machine boots with its clock in the past, a later correction of the clock must not look like a jump.
        return now if now.wall_ms >= anchor.wall_ms else anchor
    return replace(now, wall_ms=_expected_ms(anchor, now))


def elapsed_clock(anchor: ClockAnchor | None, now: ClockAnchor) -> ClockAnchor:
    """Return the clock reading for elapsed time: the saved wall time, advanced by the monotonic clock.

    In a boot whose clock is before the last saved time, the time is unknown. Such a reading is comparable within that
    boot only; compared with later readings, no time has passed.
    """
    if anchor is not None and _same_boot(anchor, now):
        return replace(now, wall_ms=_expected_ms(anchor, now))
    if anchor is None or now.wall_ms >= anchor.wall_ms:
        return now
    return replace(now, wall_ms=UNKNOWN_MS + now.monotonic_ms)


def check_store(record: StoreRecord, identity: str) -> GuardNote | None:
    """Return a note if the store is not the store of this state (invariant S13)."""
    if record.identity == identity:
        return None
    message = f"the state belongs to {record.identity}, but this store is {identity}: a copy, a backup or another store"
    return GuardNote("identity", True, f"{message}; look at janitor plan, then: janitor adopt")


def check_lineage(state: State, store: Reads, record: StoreRecord) -> tuple[StoreRecord, GuardNote | None]:
    """Withdraw the adoption if the store was restored from a backup since its lineage was saved (invariant S13).

    The next run may no longer detect the restore, because writers change the store. Therefore the adoption, and with it
    all records and the boundary, is withdrawn at once.

    Returns:
        The new record, and a note if the store was restored.

    Raises:
        StoreError, StateError: the store or the state could not be read or written.
    """
    reason = state.note(RESTORED, str)
    if reason is None and record.adopted_ms is not None:
        reason = store.find_restore_evidence(state.note(LINEAGE) or {})
        if reason is not None:
            record = StoreRecord(successor_mark(record.mark, record.identity), record.identity)
            with state.transaction():
                state.save_store(record)
                state.save_note(RESTORED, reason)
    if reason is None:
        return record, None
    message = f"the store was restored from a backup, or replaced by another store: {reason}"
    return record, GuardNote("identity", True, f"{message}; look at janitor plan, then: janitor adopt")


def successor_mark(mark: str, identity: str) -> str:
    """Return the mark of a store that replaced another store; it is the same each time, until the store is adopted."""
    return hashlib.sha256(f"{mark} {identity}".encode()).hexdigest()[: len(mark)]


def check_transaction_system(record: StoreRecord, snapshot: VisibilityState) -> GuardNote | None:
    """Return a note if the snapshot is of another transaction system, since its pointers only grow (invariant S13)."""
    known = record.snapshot_write_pointer
    if known is None or snapshot.write_pointer >= known:
        return None
    message = f"the snapshot's write pointer {snapshot.write_pointer} is below {known}, which was seen before"
    advice = (
        "do these snapshots belong to another transaction system? then correct transactions.directory; if it is "
        "correct: janitor adopt"
    )
    return GuardNote("identity", True, f"{message}; {advice}")


def check_recorded(recorded: SystemRecord | None, tx: TxState) -> GuardNote | None:
    """Return a note if the snapshot is not of the transaction system that the store records (invariant S13).

    Args:
        recorded: the store's record, read before the snapshot; None if the store has no record.
    """
    usable = tx.usable
    if recorded is None or usable is None or usable.timestamp_ms < recorded.taken_ms:
        return None
    difference = recorded.differs(tx.system, usable.write_pointer)
    if difference is None:
        return None
    advice = f"set transactions.directory to {recorded.place}; if these are its transactions now: janitor adopt"
    return GuardNote("identity", True, f"the snapshot is {difference}; {advice}")


def check_state(recorded: SystemRecord | None, record: StoreRecord) -> GuardNote | None:
    """Return a note if another state has adopted the store, according to the store's record (invariant S13)."""
    if recorded is None or recorded.id == record.mark:
        return None
    message = f"another state has adopted this store: {recorded.place}; the configured state lacks its holds and pauses"
    return GuardNote("identity", True, f"{message}; set janitor.state to it; if it is lost: janitor adopt")


def check_history(
    before: LastInProgress | None, snapshot: VisibilityState, known: KnownIds, new: Iterable[int]
) -> GuardNote | None:
    """Return a note if the snapshot cannot follow the previous snapshot (invariant S13).

    A pointer up to the previous snapshot was in progress, invalid or decided. It can be invalid now only if it was
    invalid or in progress. It can be in progress now only under the same condition: a manager that recovers from its
    log may find a transaction in progress that had just timed out. The same is true for pointers of checkpoints.

    Args:
        before: ids in progress in the previous snapshot; None if unknown.
        known: ids that were invalid in the previous snapshot or earlier.
        new: new invalid ids, ascending.
    """
    if before is None:
        return None
    in_progress = (pointer for pointer in sorted(snapshot.open_pointers) if pointer not in known)
    for status, pointers in (("invalid", new), ("in progress", in_progress)):
        for pointer in takewhile(before.had_issued, pointers):
            if pointer not in before.pointers:
                message = f"transaction {pointer} is {status} in the snapshot, but had ended in an earlier snapshot"
                advice = (
                    "does the snapshot belong to another transaction system, or is its file damaged? if it is the "
                    "right snapshot: janitor adopt"
                )
                return GuardNote("identity", True, f"{message}; {advice}")
    return None


def _same_boot(anchor: ClockAnchor, now: ClockAnchor) -> bool:
    return bool(now.boot_id) and anchor.boot_id == now.boot_id and anchor.monotonic_ms <= now.monotonic_ms


def _expected_ms(anchor: ClockAnchor, now: ClockAnchor) -> int:
    return anchor.wall_ms + now.monotonic_ms - anchor.monotonic_ms


# -- topics in quarantine (invariant S9) -------------------------------------------------------------------------------


def strike(known: Strikes | None, error: str, now_ms: int) -> Strikes:
    """Return a topic's failure record after another failure.

    Args:
        known: the saved record; None before the first failure.
    """
    count = 1 if known is None else known.count + 1
    if count < STRIKES:
        return Strikes(count, now_ms, error)
    since_ms = now_ms if known is None or known.quarantined_ms is None else known.quarantined_ms
    wait_ms = min(LAST_PROBE_MS, FIRST_PROBE_MS << min(count - STRIKES, 10))
    return Strikes(count, now_ms, error, since_ms, now_ms + wait_ms)


def find_quarantined(strikes: Mapping[TopicId, Strikes], now_ms: int) -> frozenset[TopicId]:
    """Return the quarantined topics whose probe is not due yet.

    A probe time more than the maximum wait in the future comes from a wrong clock; then the probe is due.
    """
    return frozenset(
        topic
        for topic, record in strikes.items()
        if record.probe_ms is not None and now_ms < record.probe_ms <= now_ms + LAST_PROBE_MS
    )


def judge_failures(
    strikes: Mapping[TopicId, Strikes],
    failed: Mapping[TopicId, str],
    done: Iterable[TopicId],
    written: Iterable[TopicId],
    now_ms: int,
    *,
    write_failed: bool = True,
) -> dict[TopicId, Strikes | None]:
    """Return the changed failure records after a run.

    Args:
        written: topics in which rows were deleted or inverted.
        write_failed: whether a write failed; then several failures may have the same cause.

    Returns:
        The new records; None for a topic whose record is to be deleted.
    """
    changed: dict[TopicId, Strikes | None] = dict.fromkeys(set(done) & set(strikes))
    succeeded = set(done) - set(failed)
    has_common_cause = write_failed and len(failed) > 1 and set(written) <= set(failed)
    if succeeded and not has_common_cause:
        changed.update((topic, strike(strikes.get(topic), error, now_ms)) for topic, error in failed.items())
    return changed
