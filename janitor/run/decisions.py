"""Decisions of operators about one store, and housekeeping between runs.

A decision that must not change the state during a run waits for the end of the run: both take the same lock.
"""

from __future__ import annotations

from pathlib import Path
from threading import RLock

from janitor.archive.restore import Request, RestoreResult
from janitor.rules import policy
from janitor.rules.policy import Hold
from janitor.run import record
from janitor.run.conclude import adopt
from janitor.run.prepare import Deps, make_run, prepare
from janitor.run.queries import Queries
from janitor.state import decided
from janitor.state.topic_history import save_topics
from janitor.sweep.run import parse_or_none
from tms_core.errors import GuardTripped, LeaseHeld, NotAdopted
from tms_core.topic import TopicId

#: The maximum number of entries in the ledger, independent of ``history_days``; about 250 MB.
MAX_ENTRIES = 1_000_000


class OperatorDecisions(Queries):
    """The decisions of operators, and housekeeping."""

    def __init__(self, deps: Deps) -> None:
        super().__init__(deps)
        # A run holds this lock, and so does a decision that excludes runs.
        self._run_lock = RLock()

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Adopt the store with its present transaction system and clock.

        Args:
            once_for: the key of a decision that is carried out once; the adopting transaction saves it.
            store_id: the only store to adopt (``store_id`` of a plan).

        Returns:
            The topics whose due rows may be deleted from now on.

        Raises:
            NotAdopted: this is another store; nothing was changed.
        """
        with self._run_lock:
            ready = prepare(self.deps)
            if store_id is not None and store_id != ready.record.mark:
                raise NotAdopted(
                    f"The store was not adopted: the intended store is {store_id}, but this store is "
                    f"{ready.record.mark}.",
                    "Check that the settings name the intended store, then: janitor plan",
                )
            return adopt(self.deps, ready, once_for)

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Release held rows of topics to the next run, accept the machine's clock, or both.

        Args:
            patterns: shell patterns of the topics whose held rows may be deleted; empty: no topic.
            clock: whether to accept the machine's present clock.
            once_for: the key of a decision that is carried out once; the same transaction saves it.

        Raises:
            NotAdopted: the store is not adopted, so nothing is held for approval.
            GuardTripped: the clock guard has tripped and the clock is not accepted too, so due rows are unknown.
        """
        # Do not take the lock of a run: a run keeps approvals that arrive before it saves its frontiers
        # (``conclude._frontier_records``).
        state, ready = self.deps.state, prepare(self.deps)
        if not ready.adopted:
            raise NotAdopted("This store is not adopted yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if not clock and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        run = make_run(self.deps, ready, kind="frequent", patterns=patterns)
        run.load_topics()
        frontiers = {
            work.topic.topic: policy.approve(work.record, work.topic)
            for work in run.topics.values()
            if patterns and work.frontier.hold is Hold.FRONTIER and run.in_scope(work.topic.topic.prefix)
        }
        with state.transaction():
            state.save_frontiers(frontiers)
            if clock:
                state.save_anchor(ready.now)
                state.retire_times(ready.now.wall_ms)
            if once_for is not None:
                decided.note_done(state, decided.approval(patterns, clock=clock), once_for)
        return sorted(frontiers)

    def restore(self, folder: Path, request: Request) -> RestoreResult:
        """Restore archived rows (:func:`janitor.archive.restore.restore`).

        Args:
            folder: the folder of the archive.

        Raises:
            Refused, ArchiveError, StoreError: as that function; rows that were written before the error stay.
        """
        with self._run_lock:
            try:
                return self._restore(folder, request)
            finally:
                self.deps.restored(request.target or request.source)

    def is_running(self) -> bool:
        """Return whether another thread executes a run, or a decision that excludes runs."""
        if not self._run_lock.acquire(blocking=False):
            return True
        self._run_lock.release()
        return False

    # -- between runs --------------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Close the runs of a janitor that died; call this when this process holds the store and the lease.

        The runs are closed as lost, and their announcements are added to the ledger without a number of rows.

        Returns:
            The ids of the closed runs.
        """
        with self._run_lock:
            return record.recover(self.deps)

    def renew_lease(self) -> None:
        """Renew the lease between runs; a run renews the lease itself.

        Raises:
            LeaseLost: another process has the lease.
        """
        lease, run_lock = self.deps.lease, self._run_lock
        # Never during a run, which takes the state's lock before the lease's lock: the reverse order could deadlock.
        if lease is None or not run_lock.acquire(blocking=False):
            return
        try:
            if lease.held:
                lease.renew_if_due()
        finally:
            run_lock.release()

    def regain_lease(self) -> bool:
        """Acquire the lease again after it was lost; return whether this process holds it."""
        lease = self.deps.lease
        with self._run_lock:
            if lease is None or lease.held:
                return True
            try:
                lease.acquire()
            except LeaseHeld:
                return False
            # The previous holder may have died in a run.
            record.recover(self.deps)
            return True

    def remember_topics(self) -> None:
        """Save the topics of the metadata table, so that the status shows topics before the first run."""
        parsed = (parse_or_none(key, value) for key, value in self.deps.store.metadata.rows())
        save_topics(self.deps.state, [topic for topic in parsed if topic is not None], self.deps.clock.now_ms())

    def prune_history(self) -> None:
        """Delete old history and archived days, unless a guard blocks runs: the clock may be wrong."""
        ready = prepare(self.deps)
        if ready.is_blocked:
            return
        self.deps.state.prune_ledger(ready.now.wall_ms - self.deps.terms.history_ms, MAX_ENTRIES)
        if self.deps.archive is not None:
            self.deps.archive.expire(self.deps.terms.archive_days, ready.now.wall_ms)
