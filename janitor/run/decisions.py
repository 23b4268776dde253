"""Actions outside runs: decisions of operators, and housekeeping between two runs.

An operator decides that a store is adopted, that held rows may go, that archived rows come back.
"""

from __future__ import annotations

from pathlib import Path

from janitor.archive.restore import Request, Restored
from janitor.rules import frontier
from janitor.rules.policy import Hold
from janitor.run import record
from janitor.run.conclude import adopt
from janitor.run.prepare import prepare, run_context
from janitor.run.questions import Questions
from janitor.state import decided
from janitor.state.topic_history import save_topics
from janitor.sweep.context import parse_or_none
from janitor.sweep.ledger import KEPT_ENTRIES
from tms_core.errors import GuardTripped, LeaseHeld, NotAdopted
from tms_core.topic import TopicId


class OperatorDecisions(Questions):
    """The executor of decisions and housekeeping."""

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Args:
            once_for: do it once for this text; the state remembers it in the transaction that adopts.
            store_id: adopt no other store (``store_id`` of a plan).

        Returns:
            The topics whose rows may go from now on as they come due.

        Raises:
            NotAdopted: this is another store; nothing was changed.
        """
        with self.deps.turn:
            ready = prepare(self.deps)
            if store_id is not None and store_id != ready.record.mark:
                raise NotAdopted(
                    f"The store that is meant is {store_id}, and this one is {ready.record.mark}: it was not adopted.",
                    "See that the settings name the store that is meant, then: janitor plan",
                )
            return adopt(self.deps, ready, once_for)

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Let held frontiers go with the next run, accept the machine's clock, or both.

        Args:
            patterns: shell patterns of the topics whose held rows may go; none lets no topic go.
            clock: accept this machine's clock as it is now.
            once_for: do it once for this text; the state remembers it in the same transaction.

        Raises:
            NotAdopted: there is nothing to approve before the store is adopted.
            GuardTripped: topics are named while the clock is in doubt and not accepted with them; due rows by it is
                not known.
        """
        state, ready = self.deps.state, prepare(self.deps)
        if not ready.adopted:
            raise NotAdopted("This store is not adopted yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if not clock and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        context = run_context(self.deps, ready, thorough=False, patterns=patterns)
        context.load_topics()
        held = {
            work.topic.topic: frontier.approve(work.record, work.topic)
            for work in context.topics.values()
            if patterns and work.frontier.hold is Hold.FRONTIER and context.in_scope(work.topic.topic.prefix)
        }
        with state.transaction():
            state.save_frontiers(held)
            if clock:
                state.save_anchor(ready.now)
                state.retire_times(ready.now.wall_ms)
            if once_for is not None:
                decided.note_done(state, decided.approval(patterns, clock=clock), once_for)
        return sorted(held)

    def restore(self, folder: Path, request: Request) -> Restored:
        """Bring archived rows back (:func:`janitor.archive.restore.restore`).

        Args:
            folder: the archive's.

        Raises:
            Refused, ArchiveError, StoreError: as that says; the writes until then stays.
        """
        with self.deps.turn:
            try:
                return self._restore(folder, request)
            finally:
                self.deps.restored(request.target or request.source)

    def at_work(self) -> bool:
        """Return whether a run, or a decision that excludes one, is under way in another thread."""
        if not self.deps.turn.acquire(blocking=False):
            return True
        self.deps.turn.release()
        return False

    # -- between runs --------------------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Close the runs of a dead janitor; called once this one holds the store and the lease.

        Its runs are closed as lost, and its announcements go to the ledger, without a number of rows.

        Returns:
            The ids of those runs.
        """
        with self.deps.turn:
            return record.recover(self.deps)

    def renew_lease(self) -> None:
        """Hold the lease for another while between runs; a run renews it by itself.

        Raises:
            LeaseLost: another process has taken it.
        """
        lease, turn = self.deps.lease, self.deps.turn
        # Never beside a run: that takes the state's lock before the lease's, and this the other way round.
        if lease is None or not turn.acquire(blocking=False):
            return
        try:
            if lease.held:
                lease.renew_if_due()
        finally:
            turn.release()

    def regain_lease(self) -> bool:
        """Take the lease again after it was lost; returns whether this process holds it."""
        lease = self.deps.lease
        with self.deps.turn:
            if lease is None or lease.held:
                return True
            try:
                lease.acquire()
            except LeaseHeld:
                return False
            record.recover(self.deps)
            return True

    def remember_topics(self) -> None:
        """Read the metadata table, so that a topic is shown before the next sweep has come to it."""
        parsed = (parse_or_none(key, value) for key, value in self.deps.store.metadata.rows())
        save_topics(self.deps.state, [topic for topic in parsed if topic is not None], self.deps.clock.now_ms())

    def keep_house(self) -> None:
        """Delete old history and archived days, unless a guard doubts the clock."""
        ready = prepare(self.deps)
        if ready.stopped:
            return
        self.deps.state.prune_ledger(ready.now.wall_ms - self.deps.history_ms, KEPT_ENTRIES)
        if self.deps.archive is not None:
            self.deps.archive.expire(self.deps.archive_days, ready.now.wall_ms)
