"""One janitor of one store: its runs, and the other operations on the store and the state.

A run deletes and inverts, carries out a plan file, or only plans and saves the plan. The commands, the daemon and the
tests use this module.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import RLock

from janitor.archive.restore import Request, RestoreResult
from janitor.boundary import claim as boundary
from janitor.report import Report
from janitor.rules import frontier
from janitor.rules.policy import Hold
from janitor.run import conclude, guards, record
from janitor.run.conclude import adopt
from janitor.run.plan_file import PlanFile
from janitor.run.prepare import Deps, make_run, prepare
from janitor.run.questions import Questions, begin_plan, make_plan
from janitor.run.sweep_run import SweepRun
from janitor.state import decided
from janitor.state.topic_history import save_topics
from janitor.sweep.ledger import KEPT_ENTRIES
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import PassKind, Preparation, parse_or_none
from tms_core.errors import GuardTripped, Interrupted, LeaseHeld, NotAdopted
from tms_core.topic import TopicId

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
FULL_EVERY_MS = 24 * 3600 * 1000


class OperatorDecisions(Questions):
    """Carries out decisions of operators, and housekeeping."""

    def __init__(self, deps: Deps) -> None:
        super().__init__(deps)
        # Held by a run, and by a decision that excludes one.
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
        state, ready = self.deps.state, prepare(self.deps)
        if not ready.adopted:
            raise NotAdopted("This store is not adopted yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if not clock and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        run = make_run(self.deps, ready, kind="frequent", patterns=patterns)
        run.load_topics()
        held = {
            work.topic.topic: frontier.approve(work.record, work.topic)
            for work in run.topics.values()
            if patterns and work.frontier.hold is Hold.FRONTIER and run.in_scope(work.topic.topic.prefix)
        }
        with state.transaction():
            state.save_frontiers(held)
            if clock:
                state.save_anchor(ready.now)
                state.retire_times(ready.now.wall_ms)
            if once_for is not None:
                decided.note_done(state, decided.approval(patterns, clock=clock), once_for)
        return sorted(held)

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
        # Never beside a run: that takes the state's lock before the lease's, and this the other way round.
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
        self.deps.state.prune_ledger(ready.now.wall_ms - self.deps.terms.history_ms, KEPT_ENTRIES)
        if self.deps.archive is not None:
            self.deps.archive.expire(self.deps.terms.archive_days, ready.now.wall_ms)


class Engine(OperatorDecisions):
    """The engine for one store: queries, decisions and runs.

    Args:
        deps: the dependencies. The store must be writable, except for questions and :meth:`rehearse`.
    """

    def run_once(self, *, adopt: bool = False, patterns: tuple[str, ...] = (), incremental: bool = False) -> Report:
        """Make one pass that deletes and inverts what the rules and the frontiers allow.

        A run that a guard blocks changes nothing; its report has the reason. If a topic fails, its error is in the
        report, and the other topics are done. A run that is interrupted or loses its lease keeps its changes; its
        report has the reason.

        Args:
            adopt: accept an unknown store (:meth:`~janitor.run.engine.OperatorDecisions.adopt`). Without effect if the
                state knows any adopted store, or if a guard blocks the run: then an operator must adopt or approve.
            patterns: shell patterns of topics in scope; a pass with patterns publishes no boundary.
            incremental: skip topics in which few rows have come due; for a daemon, whose next run is soon.

        Raises:
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self._turn:
            with record.preparing(self.deps, "apply"):
                ready = self._adopted(prepare(self.deps), wanted=adopt)
                due: PassKind = "incremental" if incremental else "frequent"
                kind = "full" if self._is_full_due(ready) else due
                run = make_run(self.deps, ready, kind=kind, patterns=patterns, deletes=True)
            return SweepRun(self.deps, run, moves_frontiers=True).sweep()

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Carry out a plan file: at most its rows, and nothing that the rules no longer allow.

        Raises:
            PlanRefused: its basis has changed; nothing was done.
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self._turn:
            with record.preparing(self.deps, "apply"):
                ready = prepare(self.deps)
                present = make_run(self.deps, ready, kind="full")
                present.load_topics()
            wanted.check(ready.record.mark, self.deps.terms, present)
            ready = self._adopted(ready, wanted=adopt)
            now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
            ready = replace(ready, now=now)
            run = make_run(self.deps, ready, kind="full", limits=wanted.limits, deletes=True)
            return SweepRun(self.deps, run, moves_frontiers=False).sweep()

    def rehearse(self, *, patterns: tuple[str, ...] = ()) -> Report:
        """Make a plan and save it as a run, for a daemon that only plans (``janitor.apply: false``); return its report.

        Raises:
            StoreError, StopRequested: as for a plan.
        """
        with self._turn:
            with record.preparing(self.deps, "plan"):
                ready = prepare(self.deps)
                known = self.deps.state.note(record.REHEARSED)
                is_recent = known is not None and 0 <= ready.now.wall_ms - known < FULL_EVERY_MS
                run, outcome = begin_plan(self.deps, ready, "frequent" if is_recent else "full", patterns), Outcome()
            record.begin(self.deps, run)
            try:
                report = make_plan(self.deps, run, outcome)
            except Exception as error:
                result = "interrupted" if isinstance(error, Interrupted) else "failed"
                record.close(self.deps, run, outcome, result, error=str(error))
                raise
            result = "partial" if report.errors else "done"
            record.close(self.deps, run, outcome, result, report)
            return report

    def _adopted(self, ready: Preparation, *, wanted: bool) -> Preparation:
        """Return the preparation, repeated after an unknown store was adopted."""
        if not wanted or not ready.unknown:
            return ready
        conclude.adopt(self.deps, ready)
        return prepare(self.deps)

    def _is_full_due(self, ready: Preparation) -> bool:
        """Return whether this run must read everything: daily, after a plan, and if the last full run could prove
        nothing.
        """
        state = self.deps.state
        if state.note(boundary.WANTED) is not None:
            return True
        last = state.last_full_pass_ms()
        # A last time that lies ahead was written by a clock that has been set back since.
        if last is None or not 0 <= ready.now.wall_ms - last < FULL_EVERY_MS:
            return True
        refuted = boundary.refutation(state)
        if refuted is not None and not refuted.searched:
            return True
        if ready.tx.usable is None or state.pauses():
            return False  # it could prove nothing either
        if guards.quarantined(state.strikes(), ready.now.wall_ms):
            return False
        evidence = state.evidence()
        return boundary.find_gap(evidence) is not None or any(item.started_ms < last for item in evidence)
