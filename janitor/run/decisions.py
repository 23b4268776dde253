"""Decisions of operators about one store, and housekeeping between its runs.

A decision that must not change the state during a run waits until the run has ended: both take one lock.
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
from janitor.run.questions import Questions
from janitor.state import decided
from janitor.state.topic_history import save_topics
from janitor.sweep.run import parse_or_none
from tms_core.errors import GuardTripped, LeaseHeld, NotAdopted
from tms_core.topic import TopicId

#: The most entries that the ledger keeps, whatever ``history_days`` says: about 250 MB.
MAX_ENTRIES = 1_000_000


class OperatorDecisions(Questions):
    """Carries out decisions of operators, and housekeeping."""

    def __init__(self, deps: Deps) -> None:
        super().__init__(deps)
        # Held by a run, and by a decision that excludes runs.
        self._turn = RLock()

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Args:
            once_for: do this once for this text; the transaction that adopts also saves the text.
            store_id: adopt no other store (``store_id`` of a plan).

        Returns:
            The topics whose rows may be deleted from now on, when they come due.

        Raises:
            NotAdopted: this is another store; nothing was changed.
        """
        with self._turn:
            ready = prepare(self.deps)
            if store_id is not None and store_id != ready.record.mark:
                raise NotAdopted(
                    f"The intended store is {store_id}, but this store is {ready.record.mark}: it was not adopted.",
                    "Check that the settings name the intended store, then: janitor plan",
                )
            return adopt(self.deps, ready, once_for)

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Release held frontiers for the next run, accept the machine's clock, or both.

        Args:
            patterns: shell patterns of the topics whose held rows may be deleted; empty: no topic.
            clock: accept this machine's clock as it is now.
            once_for: do this once for this text; the same transaction saves the text.

        Raises:
            NotAdopted: there is nothing to approve before the store is adopted.
            GuardTripped: topics are named, but the clock is in doubt and not accepted too; so it is not known which
                rows are due.
        """
        # Without the lock of a run: a run keeps approvals that arrive before it saves its frontiers
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
        """Write archived rows back (:func:`janitor.archive.restore.restore`).

        Args:
            folder: the folder of the archive.

        Raises:
            Refused, ArchiveError, StoreError: as that function; rows that were already written stay.
        """
        with self._turn:
            try:
                return self._restore(folder, request)
            finally:
                self.deps.restored(request.target or request.source)

    def at_work(self) -> bool:
        """Return whether another thread is in a run, or in a decision that excludes runs."""
        if not self._turn.acquire(blocking=False):
            return True
        self._turn.release()
        return False

    # -- between runs --------------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Close the runs of a dead janitor; called once this one holds the store and the lease.

        The runs are closed as lost, and their announcements are added to the ledger without a number of rows.

        Returns:
            The ids of those runs.
        """
        with self._turn:
            return record.recover(self.deps)

    def renew_lease(self) -> None:
        """Renew the lease between runs; a run renews it by itself.

        Raises:
            LeaseLost: another process has taken it.
        """
        lease, turn = self.deps.lease, self._turn
        # Never during a run, which takes the state's lock before the lease's lock: the reverse order could deadlock.
        if lease is None or not turn.acquire(blocking=False):
            return
        try:
            if lease.held:
                lease.renew_if_due()
        finally:
            turn.release()

    def regain_lease(self) -> bool:
        """Acquire the lease again after it was lost; return whether this process holds it."""
        lease = self.deps.lease
        with self._turn:
            if lease is None or lease.held:
                return True
            try:
                lease.acquire()
            except LeaseHeld:
                return False
            # The holder in between may have died in a run.
            record.recover(self.deps)
            return True

    def remember_topics(self) -> None:
        """Save the topics of the metadata table, so that the status shows topics before a run has reached them."""
        parsed = (parse_or_none(key, value) for key, value in self.deps.store.metadata.rows())
        save_topics(self.deps.state, [topic for topic in parsed if topic is not None], self.deps.clock.now_ms())

    def prune_history(self) -> None:
        """Delete old history and archived days, unless a guard doubts the clock."""
        ready = prepare(self.deps)
        if ready.is_blocked:
            return
        self.deps.state.prune_ledger(ready.now.wall_ms - self.deps.terms.history_ms, MAX_ENTRIES)
        if self.deps.archive is not None:
            self.deps.archive.expire(self.deps.terms.archive_days, ready.now.wall_ms)
