"""The runs of a janitor on one store, from the guards to the conclusion.

A run deletes and inverts by the rules, applies a plan file, or only makes a plan and saves it. Commands, daemon and
tests use this module; the engine inherits queries and decisions of operators.

A run saves its conclusions last, in one transaction, after the store's writes are durable. A run that dies before that
loses its report and conclusions; its deletions are in the ledger, and the next run continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from janitor import boundary
from janitor.report import Report
from janitor.run import conclude, feedback, guards, passes, record
from janitor.run.decisions import OperatorDecisions
from janitor.run.plan_file import PlanFile
from janitor.run.prepare import Deps, boundary_in_force, make_run, obstacles, prepare
from janitor.run.queries import make_plan, start_plan
from janitor.state.base import TopicCount
from janitor.state.ids import BATCH_IDS
from janitor.state.records import LINEAGE, OpenIdRecord
from janitor.sweep.executor import Pacer, Permission, StoreExecutor
from janitor.sweep.outcome import Ledger, Outcome
from janitor.sweep.run import PassKind, Preparation, Run
from janitor.sweep.sweep import Event, StepStarted, sweep_store
from tms_core.consumers.claim_rows import release_void_claims
from tms_core.errors import Interrupted, LeaseLost, StateError, StoreError, TmsError
from tms_core.messaging.producers.rows import IDLE_MS, clean_producer_rows
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)

#: The interval of full passes, in milliseconds.
FULL_EVERY_MS = 24 * 3600 * 1000


class Engine(OperatorDecisions):
    """The engine for one store: queries, decisions and runs.

    Args:
        deps: the dependencies. The store must be writable, except for queries and :meth:`rehearse`.
    """

    def run_once(self, *, adopt: bool = False, patterns: tuple[str, ...] = (), incremental: bool = False) -> Report:
        """Delete and invert the rows that the rules and the frontiers allow, in one pass.

        A run that a guard blocks changes nothing; its report has the reason. If a topic fails, its error is in the
        report, and the run continues with the other topics. A run that is interrupted or loses its lease keeps its
        changes; its report has the reason.

        Args:
            adopt: adopt an unknown store (:meth:`adopt`). This has no effect if the state knows any adopted store, or
                if a guard blocks the run: then an operator must adopt or approve.
            patterns: shell patterns of topics in scope; a pass with patterns publishes no boundary.
            incremental: skip topics in which few rows have come due; for a daemon, which runs again soon.

        Raises:
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self._run_lock:
            with record.record_failed_preparation(self.deps, "apply"):
                ready = self._adopt_if_unknown(prepare(self.deps), adopt=adopt)
                due: PassKind = "incremental" if incremental else "frequent"
                kind = "full" if self._is_full_due(ready) else due
                run = make_run(self.deps, ready, kind=kind, patterns=patterns, mode="apply")
            return SweepRun(self.deps, run, moves_frontiers=True).sweep()

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Apply a plan file: delete and invert only rows of the plan that the rules still allow.

        Raises:
            PlanRefused: the basis of the plan has changed; nothing was done.
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self._run_lock:
            with record.record_failed_preparation(self.deps, "apply"):
                ready = prepare(self.deps)
                present = make_run(self.deps, ready, kind="full")
                present.load_topics()
            wanted.check(ready.record.mark, self.deps.terms, present)
            ready = self._adopt_if_unknown(ready, adopt=adopt)
            # Use the time of the plan, so that rows that came due since then stay.
            now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
            ready = replace(ready, now=now)
            run = make_run(self.deps, ready, kind="full", limits=wanted.limits, mode="apply")
            return SweepRun(self.deps, run, moves_frontiers=False).sweep()

    def rehearse(self, *, patterns: tuple[str, ...] = ()) -> Report:
        """Make a plan and save it as a run, for a daemon that only plans (``janitor.apply: false``); return its report.

        Raises:
            StoreError, StopRequested: as for a plan.
        """
        with self._run_lock:
            with record.record_failed_preparation(self.deps, "plan"):
                ready = prepare(self.deps)
                known = self.deps.state.note(record.REHEARSED, int)
                is_recent = known is not None and 0 <= ready.now.wall_ms - known < FULL_EVERY_MS
                run, outcome = start_plan(self.deps, ready, "frequent" if is_recent else "full", patterns), Outcome()
            record.start(self.deps, run)
            try:
                report = make_plan(self.deps, run, outcome)
            except Exception as error:
                result = "interrupted" if isinstance(error, Interrupted) else "failed"
                record.close(self.deps, run, outcome, result, error=str(error))
                raise
            result = "partial" if report.errors else "done"
            record.close(self.deps, run, outcome, result, report)
            return report

    def _adopt_if_unknown(self, ready: Preparation, *, adopt: bool) -> Preparation:
        """Adopt the store if it is unknown and ``adopt`` is set; return the preparation, repeated after an adoption."""
        if not adopt or not ready.unknown:
            return ready
        conclude.adopt(self.deps, ready)
        return prepare(self.deps)

    def _is_full_due(self, ready: Preparation) -> bool:
        """Return whether this run must be full: once a day, after a plan, and if it can close gaps in the evidence."""
        state = self.deps.state
        if state.note(boundary.FULL_REQUEST) is not None:
            return True
        last = state.last_full_pass_ms()
        # A last time in the future was written by a clock that has been set back since.
        if last is None or not 0 <= ready.now.wall_ms - last < FULL_EVERY_MS:
            return True
        refuted = boundary.refutation(state)
        if refuted is not None and not refuted.searched:
            return True
        if ready.tx.usable is None or state.pauses():
            return False  # a full run could not prove anything now
        if guards.find_quarantined(state.strikes(), ready.now.wall_ms):
            return False
        evidence = state.evidence()
        return boundary.find_gap(evidence) is not None or any(item.started_ms < last for item in evidence)


class SweepRun:
    """One run that deletes and inverts.

    Args:
        run: the prepared run, before its topics are read.
        moves_frontiers: whether the run saves frontiers; False for a plan file.
    """

    def __init__(self, deps: Deps, run: Run, *, moves_frontiers: bool) -> None:
        self._deps = deps
        self._run = run
        self._moves_frontiers = moves_frontiers
        self._outcome = Outcome()
        self._costs = passes.Costs(deps)
        self._permission = Permission(deps.state, deps.lease, deps.clock, self._run.id, deps.is_stopping)
        self._counts: Mapping[TopicId, TopicCount] = {}
        self._coverage: conclude.Coverage | None = None

    def sweep(self) -> Report:
        """Carry out the run; return its report.

        Raises:
            StoreError, StateError: the store or the state failed as a whole; completed deletions are in the ledger.
        """
        deps, run = self._deps, self._run
        # S10: record the run first, so that the next process finds a run that died, and closes it as lost.
        record.start(deps, run)
        try:
            try:
                if not run.ready.is_blocked:
                    # S13: repeat this in each run, because the process may have died during the adoption.
                    conclude.record_adopter(deps, run.ready.record)
                    executor = self._executor()
                    with closing(executor.deleted):
                        self._finish(executor, self._run_pass(executor))
            except Interrupted as error:
                self._outcome.ended = error
            return self._close()
        # Close the run for a bug too: the ledger needs the deletions, and the run must not look alive.
        except Exception as error:
            record.close(deps, run, self._outcome, "failed", error=str(error))
            raise

    def _run_pass(self, executor: StoreExecutor) -> StateError | None:
        """Sweep the store; return the error of the state if the state failed.

        Raises:
            StoreError: the store failed as a whole.
        """
        deps, run, outcome = self._deps, self._run, self._outcome
        self._counts = passes.load_topics(deps, run)
        with deps.as_holder(), deps.state.transaction():
            deps.check_lease()
            clocks = guards.read_clocks(deps.clock)
            conclude.start_run(run, deps.state, clocks, self._stoppable, moves_frontiers=self._moves_frontiers)
        failure = None
        with closing(sweep_store(run, deps.division, executor, outcome)) as events:
            try:
                for event in events:
                    self._consume(event, executor)
                self._costs.start("")
            except TmsError as error:
                failure = error
        outcome.ended = failure or outcome.ended
        if isinstance(outcome.ended, StateError):
            failure, outcome.ended = outcome.ended, None
            return failure
        if outcome.ended is not None and outcome.interruption is None:
            raise outcome.ended
        return None

    def _executor(self) -> StoreExecutor:
        deps, run = self._deps, self._run
        usable = run.ready.tx.usable
        return StoreExecutor(
            deps.store.metadata,
            self._permission,
            Pacer(deps.terms.rows_per_second, deps.clock, self._permission.keep_alive),
            Ledger(deps.state, deps.clock, run.id, usable.timestamp_ms if usable else None),
            deps.archive.begin(run.id, run.transactions) if deps.archive else None,
            record.RunningCounters(deps.state, deps.clock, run.id).add,
        )

    def _consume(self, event: Event, executor: StoreExecutor) -> None:
        self._costs.consume(event)
        if isinstance(event, StepStarted) and event.step == "invert":
            executor.deleted.finish_table("message")
            if self._run.proves:
                # S4: before the first evidence, since the ids of existing claims must stay on the invalid list.
                self._release_void_claims()
                self._coverage = conclude.Coverage(self._deps, self._run, event.parts, self._stoppable)
        elif self._coverage is not None:
            self._coverage.consume(event)

    def _stoppable(self, records: Iterable[OpenIdRecord]) -> Iterator[OpenIdRecord]:
        """Yield the records of invalid ids, and check for a stop request between batches.

        Saving a million records takes ten seconds or more. A stop rolls back the state's transaction, and the next run
        saves the records.
        """
        for number, id_record in enumerate(records, 1):
            if not number % BATCH_IDS:
                self._permission.raise_if_stopping()
            yield id_record

    def _finish(self, executor: StoreExecutor, state_failed: StateError | None) -> None:
        """Sync the store, save the conclusions, compact, and report proven ids to the transaction manager."""
        deps, outcome = self._deps, self._outcome
        self._costs.start("sync")
        # S4: sync before all conclusions. A crash of the machine may undo unsynced deletions and inversions. A run that
        # deleted nothing and proves nothing needs no sync: the next run finds lost inversions again.
        if executor.deleted.slices or self._coverage is not None:
            deps.writable_store().sync()
        self._costs.start("")
        # L6: after the sync. A row that reappears after a crash without its expiry would stay for its topic's TTL.
        if self._run.expiries is not None:
            self._run.expiries.delete(outcome.expired)
        if self._coverage is None:
            self._release_void_claims()
        if state_failed is not None:
            # Raise the state's error only now, after the changes of the store are durable.
            with deps.as_holder():
                raise state_failed
        if outcome.archive_error is not None:
            outcome.failures["message", "archive"] += 1
            outcome.errors.append(
                f"the run stopped deleting, because rows could not be archived: {outcome.archive_error}"
            )
        if outcome.interruption is not None or not self._conclude():
            return
        # Compact after the conclusions: a failed compaction may close the store, but costs only disk space.
        self._costs.start("compact")
        outcome.compact(executor.deleted, partial(self._keep_alive, "compact", 0))
        self._costs.start("")
        if deps.feedback is not None and self._moves_frontiers and outcome.interruption is None:
            try:
                heartbeat = partial(self._keep_alive, "audit")
                feedback.remove_proven_ids(deps, deps.feedback, self._run, outcome, self._permission, heartbeat)
            except Interrupted as error:
                outcome.ended = error

    def _release_void_claims(self) -> None:
        """Release the claims of invalid transactions, and mark their producers' batches, before their ids can leave the
        invalid list (invariant S4). Also delete idle producers.

        A pass that proves a boundary does this before it saves its first evidence, so the evidence covers claims too.
        """
        deps, run = self._deps, self._run
        usable, topics = run.ready.tx.usable, run.topics
        if deps.side is None or usable is None or not self._moves_frontiers or self._outcome.interruption is not None:
            return

        def is_deleted(topic: TopicId, generation: int) -> bool:
            work = topics.get(topic.prefix)
            return work is not None and work.topic.is_old(generation)

        # S12: no executor checks the permission for these writes.
        with deps.as_holder():
            deps.check_lease()
        released = release_void_claims(
            deps.side, usable.is_invalid, lambda group: is_deleted(group.topic, group.generation)
        )
        if released:
            logger.info("released %d claims of failed transactions to their groups", released)
        idle_before_ms = run.ready.now.wall_ms - IDLE_MS
        deleted_producers = clean_producer_rows(
            deps.side, usable.is_invalid, usable.is_undecided, is_deleted, idle_before_ms
        )[1]
        if deleted_producers:
            logger.info("deleted the records of %d producers that were idle for a week", deleted_producers)

    def _conclude(self) -> bool:
        """Save the results of the pass, if this process still has the lease (invariants S4, S12)."""
        deps, run, state = self._deps, self._run, self._deps.state
        progress = self._coverage.round if self._coverage is not None else None
        blockers = obstacles(deps, run.ready) if progress is not None else ()
        clocks = guards.read_clocks(deps.clock)
        try:
            lineage = self._lineage()
            if lineage is None:
                return False
            with deps.as_holder(), state.transaction():
                # S12: check inside the transaction, so that it does not overwrite conclusions of the next holder.
                deps.check_lease()
                if self._moves_frontiers:
                    conclude.conclude_run(run, self._outcome, progress, state, clocks, blockers, self._stoppable)
                else:
                    conclude.conclude_apply(run, state, clocks, self._stoppable)
                if lineage != state.note(LINEAGE):
                    state.save_note(LINEAGE, lineage)
        except Interrupted as error:
            self._outcome.ended = error
            return False
        return True

    def _lineage(self) -> dict[str, Any] | None:
        """Return the facts that identify the store in later runs; None if a backup replaced it, or if it failed."""
        deps, run, outcome = self._deps, self._run, self._outcome
        with deps.as_holder():
            deps.check_lease()
        try:
            # S13: check again at the end. A backup that was restored during the run invalidates the run's evidence.
            with deps.as_holder():
                _, restore_note = guards.check_lineage(deps.state, deps.store, run.ready.record)
            if restore_note is None:
                return dict(deps.store.lineage())
            outcome.notes.append(restore_note)
        except StoreError as error:
            if passes.is_finished(run, outcome):
                raise
            # The pass has failed already, so only its evidence is lost.
            outcome.errors.append(f"the evidence of this run is not saved, because the store failed: {error}")
        return None

    def _keep_alive(self, phase: str, rows: int) -> None:
        self._deps.observer(phase, None, rows)
        self._permission.keep_alive()

    def _close(self) -> Report:
        """Record the result of the run; return its report."""
        deps, run, outcome = self._deps, self._run, self._outcome
        proven = boundary_in_force(deps, run.ready)
        report = passes.report(deps, run, outcome, self._costs, proven, self._counts)
        try:
            with deps.as_holder():
                record.close(deps, run, outcome, self._result(report), report)
        except LeaseLost as error:
            outcome.ended = error
            report = passes.report(deps, run, outcome, self._costs, proven, self._counts)
        return report

    def _result(self, report: Report) -> str:
        """Return the result of the run (``RunRecord.result``)."""
        if self._run.ready.is_blocked:
            return "blocked"
        if self._outcome.interruption is not None:
            return "interrupted"
        return "partial" if report.errors or self._outcome.withheld else "done"
