"""Executors carry out the findings of a pass. The executor of a plan changes nothing; that of a run deletes and
inverts, batch by batch.

A Spark task that only reads has its own executor (``janitor/spark/sweep/task.py``).

Between the planning of a topic and the deletion of its rows, the topic may be deleted, created again or given another
TTL. Therefore the executor reads the metadata again before each batch, and drops the batch if it differs (invariant
S2). A reader then loses at most what the metadata allowed an instant before. Before that, the executor checks whether
this run may still write (invariant S12): its lease may be lost, the topic paused, or a stop requested. After each page,
a run renews its lease and heartbeat (invariant S10). A run that hangs in a call does not; its lease expires, and the
next holder closes the run.

The rate limit is an account of rows and time. A run waits for each batch after it has written it, while nothing is open
(invariant S11), for as long as the rate requires. Idle time does not add up to a later burst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol, cast

from janitor.rules.policy import Rule
from janitor.state.base import Pause, State
from janitor.sweep.findings import MOVED, NOTHING_DONE, WITHHELD, DeletionCount, Done, Due, Finding, Invalid
from janitor.sweep.outcome import Ledger
from janitor.sweep.run import TopicWork
from tms_core.clock import Clock
from tms_core.errors import ArchiveError, StopRequested, StoreError
from tms_core.tables.base import KeyTable, MessageReads, MessageTable, MetadataReads, PayloadReads
from tms_core.tables.compaction import DeletedRanges
from tms_core.tables.lease import Lease
from tms_core.tables.read_only import read_only_error
from tms_core.topic import TopicId

#: How often a run's heartbeat is written, in milliseconds of monotonic time.
HEARTBEAT_MS = 5_000
#: A wait is taken in pieces, so that the run can be stopped in between.
LONGEST_SLEEP_SECONDS = 1.0


def never() -> bool:
    """Never request a stop."""
    return False


class Permission:
    """The permission of one run to write. ``StopRequested``, ``LeaseLost`` and ``StateError`` mean that the run is
    over.

    Args:
        state: has the pauses and the heartbeat.
        lease: the lease of the run; None: no other process can write.
    """

    def __init__(
        self, state: State, lease: Lease | None, clock: Clock, run_id: str, is_stopping: Callable[[], bool] = never
    ) -> None:
        self._state = state
        self._lease = lease
        self._clock = clock
        self._run_id = run_id
        self._is_stopping = is_stopping
        # The start of the run has saved a heartbeat.
        self._beaten_ms = clock.monotonic_ms()
        self._has_checked = False

    def allows(self, topic: TopicId) -> bool:
        """Return whether the next batch of a topic's rows may be written: the topic is not paused.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        return not topic.matches(pause.pattern for pause in self.pauses())

    def pauses(self) -> list[Pause]:
        """Return the present pauses, if the run may continue; without any, the whole store may be changed.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        self.raise_if_stopping()
        # S12: read the lease record itself, not this process's clock: the next holder may be deleting already.
        if self._lease is not None:
            self._lease.check()
        self._beat()
        # Read for each batch, so a pause holds from the next batch on.
        return self._state.pauses()

    def alive(self) -> None:
        """Renew the lease and the heartbeat when they are due; called before and after each page, and in each wait.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        self.raise_if_stopping()
        if self._lease is not None:
            self._lease.renew_if_due()
        self._beat()

    def _beat(self) -> None:
        """Save a heartbeat if it is due, after a check of the lease: a run that only reads must stop without it too."""
        now_ms = self._clock.monotonic_ms()
        due = now_ms - self._beaten_ms >= HEARTBEAT_MS
        if self._lease is not None and (due or not self._has_checked):
            self._lease.check()
        self._has_checked = True
        if due:
            # S10: only after the check. A run that lost its lease must not look alive to the next holder.
            self._beaten_ms = now_ms
            self._state.beat(self._run_id, self._clock.now_ms())

    def raise_if_stopping(self) -> None:
        """Raise ``StopRequested`` if a stop was requested; nothing is read or written."""
        if self._is_stopping():
            raise StopRequested(
                "the run was asked to stop; completed changes are kept, the next run continues from there."
            )


class Pacer:
    """Keeps the common rate of all its callers at or below a limit.

    Args:
        rows_per_second: the limit; None: no limit.
        alive: called between two pieces of a wait, and before each page of a count; its error stops both.
    """

    def __init__(self, rows_per_second: float | None, clock: Clock, alive: Callable[[], None] = lambda: None) -> None:
        self._rate = rows_per_second
        self._clock = clock
        self.alive = alive
        self._free_at_ms = 0.0
        self._lock = Lock()

    def pay(self, rows: int) -> None:
        """Wait until ``rows`` more are within the limit."""
        if not self._rate:
            return
        with self._lock:
            now_ms = float(self._clock.monotonic_ms())
            # max(): idle time is not saved up. The threads of a run queue up behind one account.
            self._free_at_ms = max(self._free_at_ms, now_ms) + rows * 1000 / self._rate
            delay_seconds = max(0.0, (self._free_at_ms - now_ms) / 1000)
        # Outside the lock, and in pieces: each piece renews the lease and notices a stop request (S10).
        while delay_seconds > 0:
            self._clock.sleep(min(delay_seconds, LONGEST_SLEEP_SECONDS))
            self.alive()
            delay_seconds -= LONGEST_SLEEP_SECONDS


# -- executors ---------------------------------------------------------------------------------------------------------


class Executor(Protocol):
    """Carries out findings. Each method raises ``Interrupted`` if the pass is over; then it has done nothing."""

    def alive(self) -> None:
        """Check whether the pass continues; called before each jump and after each page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def apply(self, finding: Finding) -> Done:
        """Carry out a finding; ``Done.stop`` is the reason to leave the rest of the topic.

        Raises:
            StoreError: the store failed; nothing was done.
            Interrupted: the pass is over; nothing was done.
        """
        ...

    def pay(self, deletions: DeletionCount) -> None:
        """Wait until deleted or inverted rows are within the rate; called after the executor has written them.

        Raises:
            Interrupted: the pass is over.
        """
        ...


class Saved(Protocol):
    """Rows with a durable copy in the archive."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Return the keys of these rows; the caller deletes no other rows."""
        ...

    def discard(self) -> None:
        """Remove the copies, because the rows are not deleted."""
        ...


class Keeper(Protocol):
    """Archives rows before they are deleted (``janitor.archive``)."""

    def save(
        self, topic: TopicId, generation: int, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> Saved:
        """Archive rows; return when their copies are durable.

        Raises:
            ArchiveError: they are not archived; nothing may be deleted.
        """
        ...


def raise_if_stopping(is_stopping: Callable[[], bool]) -> None:
    """Stop a pass or an answer that changes nothing; called between its pages.

    Raises:
        StopRequested: the process is stopping.
    """
    if is_stopping():
        raise StopRequested("the janitor is stopping.", "Try again after its restart.")


class DryRun:
    """The executor of a plan. It changes nothing, and counts everything as done."""

    def __init__(self, is_stopping: Callable[[], bool] = never) -> None:
        self._is_stopping = is_stopping

    def alive(self) -> None:
        raise_if_stopping(self._is_stopping)

    def apply(self, finding: Finding) -> Done:
        """Count the rows as deleted or inverted, without a change."""
        match finding:
            case Due(hold=None):
                return Done(finding.batch.keys)
            case Invalid():
                return Done(cells=finding.cells)
            case _:
                return NOTHING_DONE

    def pay(self, deletions: DeletionCount) -> None:
        """Return at once: a plan has no rate limit."""


class StoreExecutor:
    """The executor of a run. Threads that sweep different parts of the store may share it.

    Args:
        metadata: the metadata table; read before each batch.
        keeper: archives rows before their deletion; None: no archive.
        booking: called with deletions and inversions while the run works; None: the caller has them at the end.

    Attributes:
        deleted: the ranges of deleted rows, for the compaction; the caller closes it.
    """

    def __init__(
        self,
        metadata: MetadataReads,
        permission: Permission,
        pacer: Pacer,
        ledger: Ledger,
        keeper: Keeper | None = None,
        booking: Callable[[DeletionCount], None] | None = None,
    ) -> None:
        self._metadata = metadata
        self._permission = permission
        self._pacer = pacer
        self._ledger = ledger
        self._keeper = keeper
        self._booking = booking
        self.deleted = DeletedRanges()
        self._archive_error: ArchiveError | None = None

    def alive(self) -> None:
        self._permission.alive()

    def pay(self, deletions: DeletionCount) -> None:
        if self._booking is not None:
            self._booking(deletions)
        self._pacer.pay(deletions.rows)

    def apply(self, finding: Finding) -> Done:
        if isinstance(finding, Invalid):
            return self._invert(finding)
        if not isinstance(finding, Due) or finding.hold is not None:
            return NOTHING_DONE
        if (stopped := self._reason_to_stop(finding.work)) is not None:
            return stopped
        table, batch = finding.table, finding.batch
        allowed = batch.keys if self._keeper is None else self._archive(self._keeper, finding)
        if isinstance(allowed, Done):
            return allowed
        if not isinstance(table, KeyTable):
            raise read_only_error()
        if not allowed:
            return NOTHING_DONE
        # Before they are: an error here leaves nothing done, and only ranges before this one are worked on yet.
        self.deleted.add(table, allowed)
        # The announcement is written first: if the process dies during the deletion, its ledger still has the range.
        entry = self._ledger.announce(finding, allowed[0])
        try:
            table.delete(allowed, batch.origin)
        except StoreError as error:
            # Some of the rows may be gone, so the ledger gets the range without a number of rows.
            return Done(entry=entry, stop="unsure", error=error)
        return Done(allowed, entry=entry)

    def _reason_to_stop(self, work: TopicWork) -> Done | None:
        """Return the reason why nothing may be deleted in this topic now; None: deletions are allowed."""
        if not self._permission.allows(work.topic.topic):
            return WITHHELD
        # S2: last, so that as little time as possible lies between this read and the deletion.
        has_moved = self._metadata.get(work.topic.topic.prefix) != work.raw
        return MOVED if has_moved else None

    def _archive(self, keeper: Keeper, due: Due) -> list[bytes] | Done:
        """Archive the rows; return the keys of the archived rows, or the reason why nothing may be deleted."""
        if self._archive_error is not None:
            return WITHHELD._replace(error=self._archive_error)
        batch, source = due.batch, cast(MessageReads | PayloadReads, due.table)
        try:
            saved = keeper.save(due.work.topic.topic, batch.generation, source, batch.rule, batch.keys)
        except ArchiveError as error:
            # S16: kept for the rest of the run, even if the archive works again. Messages are deleted before their
            # payloads: if messages stay because of this error, a later success must not delete their payloads, or a
            # longer TTL would show messages without payloads. The next run tries again.
            self._archive_error = error
            return WITHHELD._replace(error=error)
        try:
            # During the archiving, the topic may have changed (S2) or the lease may be lost (S12).
            stopped = self._reason_to_stop(due.work)
        except Exception:
            saved.discard()
            raise
        if stopped is not None:
            # The rows stay, so the archive must not have them: a restore would take them for deleted.
            saved.discard()
            return stopped
        # Not the batch's keys: a row without a copy in the archive stays (S16).
        return list(saved.keys)

    def _invert(self, invalid: Invalid) -> Done:
        if not self._permission.allows(invalid.topic):
            return WITHHELD
        if not isinstance(invalid.table, MessageTable):
            raise read_only_error()
        entry = self._ledger.announce(invalid, invalid.cells[0].key)
        # S6: the table compares each pointer as it negates it. A row that changed since it was read is left alone.
        changed = invalid.table.invert(invalid.cells)
        cells = [cell for cell, done in zip(invalid.cells, changed, strict=True) if done]
        return Done(cells=cells, entry=entry)
