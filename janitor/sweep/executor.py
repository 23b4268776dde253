"""Executors: what a pass does with a finding. A plan's changes nothing; a run's deletes and inverts, batch by batch.

A Spark task that may only look has an executor of its own (``janitor/spark/sweep/task.py``).

Between planning a topic and deleting its rows, the topic may be deleted, created again or given another ttl. So each
batch reads the topic's metadata again and is dropped when it has moved (rule S2); what a reader then loses is never
more than what the metadata allowed an instant before. Before that the executor asks whether this run may still write at
all (rule S12): its lease may be lost, an operator may have paused the topic or asked the process to stop. After every
page a run shows that it is alive (rule S10): a run that hangs in a call stops showing it, its lease runs out, and the
next holder closes it.

The rate is a plain account of rows against time. Each batch is paid for after it was written, with nothing open (rule
S11), and the wait is as long as the batch was worth. No burst is saved up while idle, so a store that sat still for an
hour is not hit by an hour's worth of deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol, cast

from janitor.rules.policy import Rule
from janitor.state.base import Pause, State
from janitor.sweep.compaction import DeletedRanges
from janitor.sweep.findings import MOVED, NOTHING_DONE, WITHHELD, DeletionCount, Done, Due, Finding, Invalid, Read
from janitor.sweep.ledger import Ledger, LedgerSums
from janitor.sweep.run import TopicWork
from tms_core.clock import Clock
from tms_core.errors import ArchiveError, StopRequested, StoreError
from tms_core.tables.base import KeyTable, MessageReads, MessageTable, MetadataReads, PayloadReads
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
    """The permission of one run to write; ``StopRequested``, ``LeaseLost`` and ``StateError`` say that the run is over.

    Args:
        state: where pauses and the heartbeat are.
        lease: the lease the run works under; None where there is none to lose.
        clock: what the heartbeat is timed and dated by.
        is_stopping: whether the run was asked to stop.
    """

    def __init__(
        self, state: State, lease: Lease | None, clock: Clock, run_id: str, is_stopping: Callable[[], bool] = never
    ) -> None:
        self._state = state
        self._lease = lease
        self._clock = clock
        self._run_id = run_id
        self._is_stopping = is_stopping
        # When it began it was written down as alive already.
        self._beaten_ms = clock.monotonic_ms()
        self._begun = False

    def allows(self, topic: TopicId) -> bool:
        """Return whether the next batch of a topic's rows may be written: the topic is not paused.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        return not topic.matches(pause.pattern for pause in self._pauses())

    def allows_all(self) -> bool:
        """Return whether the whole store may be changed: nothing is paused.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        return not self._pauses()

    def alive(self) -> None:
        """Called before and after every page, and in every wait.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        self.raise_if_stopping()
        if self._lease is not None:
            self._lease.renew_if_due()
        self._beat()

    def _pauses(self) -> list[Pause]:
        """Return the pauses, if the run may continue."""
        self.raise_if_stopping()
        # S12: read the lease record itself, not this process's clock: the next holder may be deleting already.
        if self._lease is not None:
            self._lease.check()
        self._beat()
        # Read for each batch, so a pause holds from the next batch on.
        return self._state.pauses()

    def _beat(self) -> None:
        """Say that the run is alive, and check whether it may be: a reading run must stop with its lease too."""
        now_ms = self._clock.monotonic_ms()
        due = now_ms - self._beaten_ms >= HEARTBEAT_MS
        if self._lease is not None and (due or not self._begun):
            self._lease.check()
        self._begun = True
        if due:
            # S10: only after the check. A run that lost its lease must not look alive to the next holder.
            self._beaten_ms = now_ms
            self._state.beat(self._run_id, self._clock.now_ms())

    def raise_if_stopping(self) -> None:
        """Raise ``StopRequested`` if a stop was requested; nothing is read or written."""
        if self._is_stopping():
            raise StopRequested("the run was asked to stop; what was done is done, the next one goes on from there.")


class Pacer:
    """Keeps the rate of all who share it at or under a limit.

    Args:
        rows_per_second: the limit; None for no limit.
        clock: what time is measured and waited by.
        alive: called between two pieces of a wait, and before each page of a count; its error stops both.
    """

    def __init__(self, rows_per_second: float | None, clock: Clock, alive: Callable[[], None] = lambda: None) -> None:
        self._rate = rows_per_second
        self._clock = clock
        self.alive = alive
        self._free_at_ms = 0.0
        self._lock = Lock()

    def pay(self, rows: int) -> float:
        """Wait until ``rows`` more are within the limit.

        Returns:
            Seconds waited.
        """
        if not self._rate:
            return 0.0
        with self._lock:
            now_ms = float(self._clock.monotonic_ms())
            # max(): idle time is not saved up. The threads of a run queue up behind one account.
            self._free_at_ms = max(self._free_at_ms, now_ms) + rows * 1000 / self._rate
            seconds = max(0.0, (self._free_at_ms - now_ms) / 1000)
        left = seconds
        # Outside the lock, and in pieces: each piece renews the lease and notices a stop request (S10).
        while left > 0:
            self._clock.sleep(min(left, LONGEST_SLEEP_SECONDS))
            self.alive()
            left -= LONGEST_SLEEP_SECONDS
        return seconds


# -- executors ---------------------------------------------------------------------------------------------------------


class Executor(Protocol):
    """Carries out findings. Every method raises ``Interrupted`` when the pass is over, and has then done nothing."""

    def alive(self) -> None:
        """Called before every jump.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def after_page(self, read: Read) -> None:
        """Called after every page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def apply(self, finding: Finding) -> Done:
        """Carry out a finding; ``Done.stop`` says why the rest of the topic is left.

        Raises:
            StoreError: the store failed; nothing was done.
            Interrupted: the pass is over; nothing was done.
        """
        ...

    def pay(self, taken: DeletionCount) -> None:
        """Called after rows were deleted or inverted; waits until they are within the rate.

        Raises:
            Interrupted: the pass is over.
        """
        ...


class Saved(Protocol):
    """Rows that are safe elsewhere."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Whose rows; nothing else may be deleted."""
        ...

    def discard(self) -> None:
        """Forget them again, because they stay where they are."""
        ...


class Keeper(Protocol):
    """Keeps rows that are about to be deleted (``janitor.archive``)."""

    def save(
        self, topic: TopicId, generation: int, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> Saved:
        """Return when the rows are safe.

        Raises:
            ArchiveError: they are not; nothing may be deleted.
        """
        ...


def raise_if_stopping(is_stopping: Callable[[], bool]) -> None:
    """Stop a pass or an answer that changes nothing; called between its pages.

    Raises:
        StopRequested: the process is stopping.
    """
    if is_stopping():
        raise StopRequested("the janitor is stopping.", "Try again when it is back.")


class DryRun:
    """The executor of a plan: it changes nothing, and everything counts as done.

    Args:
        is_stopping: whether the process is ending.
    """

    def __init__(self, is_stopping: Callable[[], bool] = never) -> None:
        self._is_stopping = is_stopping

    def alive(self) -> None:
        raise_if_stopping(self._is_stopping)

    def after_page(self, read: Read) -> None:
        self.alive()

    def apply(self, finding: Finding) -> Done:
        """Leave the rows where they are."""
        match finding:
            case Due(hold=None):
                return Done(finding.batch.keys)
            case Invalid():
                return Done(cells=finding.cells)
            case _:
                return NOTHING_DONE

    def pay(self, taken: DeletionCount) -> None:
        """Reading costs nothing."""


class StoreExecutor:
    """The executor of a run; threads that sweep different parts of the store may share it.

    Args:
        metadata: read again before every batch.
        permission: asked before every batch.
        pacer: limits the rate.
        ledger: where batches are announced.
        keeper: where rows go before they are deleted; None for nowhere.
        booking: sums up what was deleted; None: that is known at the end of the run.

    Attributes:
        deleted: where rows were; to be closed.
    """

    def __init__(
        self,
        metadata: MetadataReads,
        permission: Permission,
        pacer: Pacer,
        ledger: Ledger,
        keeper: Keeper | None = None,
        booking: LedgerSums | None = None,
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

    def after_page(self, read: Read) -> None:
        if read.phase == "invert":
            # The first page of this step shows that all deletions of messages are done (STEPS).
            self.deleted.no_more("message")
        self._permission.alive()

    def pay(self, taken: DeletionCount) -> None:
        if self._booking is not None:
            self._booking.add(taken)
        self._pacer.pay(taken.rows)

    def apply(self, finding: Finding) -> Done:
        if isinstance(finding, Invalid):
            return self._invert(finding)
        if not isinstance(finding, Due) or finding.hold is not None or not finding.batch.keys:
            return NOTHING_DONE
        table, allowed = finding.table, self._allowed(finding)
        if isinstance(allowed, Done):
            return allowed
        if not isinstance(table, KeyTable):
            raise read_only_error()
        if not allowed:
            return NOTHING_DONE
        # Before they are: an error here leaves nothing done, and only ranges before this one are worked on yet.
        self.deleted.add(table, allowed)
        # The announcement is written first: if the process dies during the deletion, its ledger still has the range.
        at_ms = self._ledger.announce(finding.work, finding.batch._replace(keys=allowed))
        try:
            table.delete(allowed, finding.batch.origin)
        except StoreError as error:
            # Some of the rows may be gone, so the ledger gets the range without a number of rows.
            return Done(at_ms=at_ms, stop="unsure", error=error)
        return Done(allowed, at_ms=at_ms)

    def _allowed(self, due: Due) -> list[bytes] | Done:
        """Return the keys of those rows that may be deleted now: all of a batch, or those that are archived.

        Returns:
            Or why none of them may.
        """
        if (stopped := self._stopped(due.work)) is not None:
            return stopped
        return due.batch.keys if self._keeper is None else self._archive(self._keeper, due)

    def _stopped(self, work: TopicWork) -> Done | None:
        """Return why nothing may be deleted in this topic now; None: it may."""
        if not self._permission.allows(work.topic.topic):
            return WITHHELD
        # S2: last, so that as little time as possible lies between this read and the deletion.
        return MOVED if self._has_moved(work) else None

    def _has_moved(self, work: TopicWork) -> bool:
        return self._metadata.get(work.topic.topic.prefix) != work.raw

    def _archive(self, keeper: Keeper, due: Due) -> list[bytes] | Done:
        """Archive the rows; return the keys of those that are."""
        if self._archive_error is not None:
            return WITHHELD._replace(error=self._archive_error)
        batch, source = due.batch, cast(MessageReads | PayloadReads, due.table)
        try:
            saved = keeper.save(due.work.topic.topic, batch.generation, source, batch.rule, batch.keys)
        except ArchiveError as error:
            # S16: kept for all further batches, since without an archive nothing may be deleted.
            self._archive_error = error
            return WITHHELD._replace(error=error)
        try:
            # To archive takes a while, in which the topic may have moved (S2) or the lease may be lost (S12).
            stopped = self._stopped(due.work)
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
        at_ms = self._ledger.announce_inverting(invalid)
        # S6: the table compares each pointer as it negates it. A row that changed since it was read is left alone.
        changed = invalid.table.invert(invalid.cells)
        cells = [cell for cell, done in zip(invalid.cells, changed, strict=True) if done]
        return Done(cells=cells, at_ms=at_ms)
