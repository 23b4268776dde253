"""Executors, which carry out the findings of a pass. The executor of a plan changes nothing; the executor of a run
deletes and inverts rows in batches.

A Spark task that only reads has its own executor (``janitor/spark/sweep/task.py``).

Between the planning of a topic and the deletion of its rows, the topic may be deleted, recreated or get another TTL.
Therefore the executor reads the metadata again before each batch, and drops the batch if it differs (invariant S2), so
it deletes only rows that were due an instant ago. Before that, the executor checks whether this run may still write
(invariant S12): its lease may be lost, the topic paused, or a stop requested. After each page, a run renews its lease
and heartbeat (invariant S10). A run that hangs in a call renews neither: its lease expires, and the next holder closes
the run.

A run waits for the rate limit after it has written a batch, while it has no iterator open (invariant S11). Idle time
does not accumulate to a later burst.
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
#: The maximum length of one sleep in a longer wait; the run can be stopped between two sleeps.
MAX_SLEEP_SECONDS = 1.0


def never() -> bool:
    """Return False: no stop is requested."""
    return False


class Permission:
    """The permission of one run to write. ``StopRequested``, ``LeaseLost`` and ``StateError`` mean that the run is
    over.

    Args:
        state: the state with pauses and heartbeat.
        lease: the lease of the run; None if no other process can write.
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
        self._heartbeat_ms = clock.monotonic_ms()
        self._has_checked = False

    def allows(self, topic: TopicId) -> bool:
        """Return whether the next batch of a topic's rows may be written: the topic is not paused.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        return not topic.matches(pause.pattern for pause in self.pauses())

    def pauses(self) -> list[Pause]:
        """Return the current pauses, if the run may continue; without pauses, it may change the whole store.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        self.raise_if_stopping()
        # S12: read the lease record itself, not this process's clock: the next holder may be deleting already.
        if self._lease is not None:
            self._lease.check()
        self._beat()
        # Read the pauses for each batch, so that a pause applies from the next batch on.
        return self._state.pauses()

    def keep_alive(self) -> None:
        """Renew the lease and the heartbeat when they are due; called before and after each page, and in each wait.

        Raises:
            StopRequested, LeaseLost, StateError: the run is over.
        """
        self.raise_if_stopping()
        if self._lease is not None:
            self._lease.renew_if_due()
        self._beat()

    def _beat(self) -> None:
        """Save a heartbeat if it is due. First check the lease: a run that only reads must also stop without it."""
        now_ms = self._clock.monotonic_ms()
        due = now_ms - self._heartbeat_ms >= HEARTBEAT_MS
        if self._lease is not None and (due or not self._has_checked):
            self._lease.check()
        self._has_checked = True
        if due:
            # S10: only after the check. A run that lost its lease must not look alive to the next holder.
            self._heartbeat_ms = now_ms
            self._state.save_heartbeat(self._run_id, self._clock.now_ms())

    def raise_if_stopping(self) -> None:
        """Raise ``StopRequested`` if a stop was requested; read and write nothing."""
        if self._is_stopping():
            raise StopRequested("the run was stopped on request; its changes are kept, and the next run continues.")


class Pacer:
    """A rate limit for all callers together.

    Args:
        rows_per_second: the limit; None: no limit.
        keep_alive: called between two pieces of a wait, and before each page of a count; its error stops both.
    """

    def __init__(
        self, rows_per_second: float | None, clock: Clock, keep_alive: Callable[[], None] = lambda: None
    ) -> None:
        self._rate = rows_per_second
        self._clock = clock
        self.keep_alive = keep_alive
        self._free_at_ms = 0.0
        self._lock = Lock()

    def throttle(self, rows: int) -> None:
        """Wait until ``rows`` more rows are within the limit."""
        if not self._rate:
            return
        with self._lock:
            now_ms = float(self._clock.monotonic_ms())
            # max(): idle time does not accumulate. All threads of a run share one schedule.
            self._free_at_ms = max(self._free_at_ms, now_ms) + rows * 1000 / self._rate
            delay_seconds = max(0.0, (self._free_at_ms - now_ms) / 1000)
        # Outside the lock, and in pieces: each piece renews the lease and notices a stop request (S10).
        while delay_seconds > 0:
            self._clock.sleep(min(delay_seconds, MAX_SLEEP_SECONDS))
            self.keep_alive()
            delay_seconds -= MAX_SLEEP_SECONDS


# -- executors ---------------------------------------------------------------------------------------------------------


class Executor(Protocol):
    """An executor of findings. A method that raises ``Interrupted`` has done nothing, and the pass is over."""

    def keep_alive(self) -> None:
        """Check whether the pass continues; called before each jump and after each page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def apply(self, finding: Finding) -> Done:
        """Carry out a finding; ``Done.stop`` is the reason to skip the rest of the topic.

        Raises:
            StoreError: the store failed; nothing was done.
            Interrupted: the pass is over; nothing was done.
        """
        ...

    def throttle(self, deletions: DeletionCount) -> None:
        """Wait until the written rows are within the rate limit; called after each deletion or inversion.

        Raises:
            Interrupted: the pass is over.
        """
        ...


class ArchivedRows(Protocol):
    """Rows with a durable copy in the archive."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Return the keys of these rows; the caller deletes no other rows."""
        ...

    def discard(self) -> None:
        """Remove the copies, because the rows are not deleted."""
        ...


class RowArchive(Protocol):
    """An archive that copies rows before they are deleted (``janitor.archive``)."""

    def save(
        self, topic: TopicId, generation: int, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> ArchivedRows:
        """Archive rows; return when their copies are durable.

        Raises:
            ArchiveError: the rows are not archived; nothing may be deleted.
        """
        ...


def raise_if_stopping(is_stopping: Callable[[], bool]) -> None:
    """Stop a pass or a query that changes nothing; called between its pages.

    Raises:
        StopRequested: the process is stopping.
    """
    if is_stopping():
        raise StopRequested("the janitor is stopping.", "Try again after its restart.")


class DryRun:
    """The executor of a plan. It changes nothing and reports each finding as carried out."""

    def __init__(self, is_stopping: Callable[[], bool] = never) -> None:
        self._is_stopping = is_stopping

    def keep_alive(self) -> None:
        raise_if_stopping(self._is_stopping)

    def apply(self, finding: Finding) -> Done:
        """Report the rows as deleted or inverted, without a change."""
        match finding:
            case Due(hold=None):
                return Done(finding.batch.keys)
            case Invalid():
                return Done(cells=finding.cells)
            case _:
                return NOTHING_DONE

    def throttle(self, deletions: DeletionCount) -> None:
        """Return at once: a plan has no rate limit."""


class StoreExecutor:
    """The executor of a run. Threads that sweep different parts of the store may share it.

    Args:
        metadata: the metadata table; read before each batch.
        archive: archives rows before their deletion; None: no archive.
        on_batch: called after each batch with the number of its rows; None: the caller reads the outcome at the end.

    Attributes:
        deleted: the ranges of deleted rows, for the compaction; the caller closes it.
    """

    def __init__(
        self,
        metadata: MetadataReads,
        permission: Permission,
        pacer: Pacer,
        ledger: Ledger,
        archive: RowArchive | None = None,
        on_batch: Callable[[DeletionCount], None] | None = None,
    ) -> None:
        self._metadata = metadata
        self._permission = permission
        self._pacer = pacer
        self._ledger = ledger
        self._archive = archive
        self._on_batch = on_batch
        self.deleted = DeletedRanges()
        self._archive_error: ArchiveError | None = None

    def keep_alive(self) -> None:
        self._permission.keep_alive()

    def throttle(self, deletions: DeletionCount) -> None:
        if self._on_batch is not None:
            self._on_batch(deletions)
        self._pacer.throttle(deletions.rows)

    def apply(self, finding: Finding) -> Done:
        if isinstance(finding, Invalid):
            return self._invert(finding)
        if not isinstance(finding, Due) or finding.hold is not None:
            return NOTHING_DONE
        if (stopped := self._reason_to_stop(finding.work)) is not None:
            return stopped
        table, batch = finding.table, finding.batch
        allowed = batch.keys if self._archive is None else self._archive_rows(self._archive, finding)
        if isinstance(allowed, Done):
            return allowed
        if not isinstance(table, KeyTable):
            raise read_only_error()
        if not allowed:
            return NOTHING_DONE
        # Add the range before the deletion: an error here leaves all rows, and compactions cover earlier ranges only.
        self.deleted.add(table, allowed)
        # Write the announcement first: if the process dies during the deletion, the ledger still has the range.
        entry = self._ledger.announce(finding, allowed[0])
        try:
            table.delete(allowed, batch.origin)
        except StoreError as error:
            # Some of the rows may be deleted, so the ledger gets the range without a number of rows.
            return Done(entry=entry, stop="unsure", error=error)
        return Done(allowed, entry=entry)

    def _reason_to_stop(self, work: TopicWork) -> Done | None:
        """Return the reason why nothing may be deleted in this topic now; None: deletions are allowed."""
        if not self._permission.allows(work.topic.topic):
            return WITHHELD
        # S2: read the metadata last, to keep the time until the deletion as short as possible.
        has_moved = self._metadata.get(work.topic.topic.prefix) != work.raw
        return MOVED if has_moved else None

    def _archive_rows(self, archive: RowArchive, due: Due) -> list[bytes] | Done:
        """Archive the rows; return the keys of the archived rows, or the reason why nothing may be deleted."""
        if self._archive_error is not None:
            return WITHHELD._replace(error=self._archive_error)
        batch, source = due.batch, cast(MessageReads | PayloadReads, due.table)
        try:
            saved = archive.save(due.work.topic.topic, batch.generation, source, batch.rule, batch.keys)
        except ArchiveError as error:
            # S16: keep the error for the rest of the run, even if the archive recovers. Messages are deleted before
            # their payloads: if messages stay because of this error, a later success must not delete their payloads,
            # or a longer TTL would show messages without payloads. The next run tries again.
            self._archive_error = error
            return WITHHELD._replace(error=error)
        try:
            # During the archiving, the topic may have changed (S2) and the lease may have been lost (S12).
            stopped = self._reason_to_stop(due.work)
        except Exception:
            saved.discard()
            raise
        if stopped is not None:
            # The rows stay, so the archive must not contain them: a restore would treat them as deleted.
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
        # S6: the table negates a pointer only if it is unchanged, and skips rows that changed since they were read.
        changed = invalid.table.invert(invalid.cells)
        cells = [cell for cell, done in zip(invalid.cells, changed, strict=True) if done]
        return Done(cells=cells, entry=entry)
