"""One run that deletes: it is recorded, made, synced, concluded and closed.

Its conclusions are saved at the end, in one transaction, after the store's writes are durable. A run that dies before
that loses only its report; the next run finds the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from janitor.boundary import claim as boundary
from janitor.boundary.claim import Round
from janitor.report import Report
from janitor.run import conclude, feedback, guards, passes, record
from janitor.run.prepare import Deps, Feedback, claim_in_force, obstacles
from janitor.state.base import TopicCount
from janitor.state.ids import BATCH_IDS
from janitor.state.records import LINEAGE, OpenIdRecord
from janitor.sweep.executor import Pacer, Permission, StoreExecutor
from janitor.sweep.outcome import Ledger, Outcome
from janitor.sweep.run import Run
from janitor.sweep.scan import Part, SearchScope
from janitor.sweep.sweep import Advance, Event, StepFinished, StepStarted, sweep_store
from tms_core.consumers.claim_rows import free_void
from tms_core.errors import Interrupted, LeaseLost, StateBusy, StateError, StoreError, TmsError
from tms_core.messaging.producers.rows import IDLE_MS, tidy
from tms_core.tables.base import KeyRange
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)

#: How often a run writes down how far it has come, in milliseconds of monotonic time.
PROGRESS_MS = 10_000


class SweepRun:
    """One run that deletes.

    Args:
        run: as prepared; its topics are not read yet.
        moves_frontiers: whether this is a run of the janitor itself, not of a plan file.
    """

    def __init__(self, deps: Deps, run: Run, *, moves_frontiers: bool) -> None:
        self._deps = deps
        self._run = passes.begin(deps, "apply", run)
        self._moves_frontiers = moves_frontiers
        self._outcome = Outcome()
        self._costs = passes.Costs(deps)
        self._permission = Permission(deps.state, deps.lease, deps.clock, self._run.id, deps.is_stopping)
        self._counts: Mapping[TopicId, TopicCount] = {}
        self._round: Round | None = None
        self._is_whole = False
        self._saved_ms = 0

    def sweep(self) -> Report:
        """Make the run; return its report.

        Raises:
            StoreError, StateError: the store or the state failed as a whole; completed deletions are in the ledger.
        """
        deps, run = self._deps, self._run
        # S10: before anything else, so that a run that dies at any later point is found and closed as lost.
        record.begin(deps, run)
        try:
            try:
                if not run.ready.is_blocked:
                    conclude.record_adopter(deps, run.ready.record)
                    executor = self._executor()
                    with closing(executor.deleted):
                        self._settle(executor, self._make_pass(executor))
            except Interrupted as error:
                self._outcome.ended = error
            return self._close()
        # Also for a bug of ours: what was deleted has to be in the ledger, and the run must not look alive.
        except Exception as error:
            record.close(deps, run, self._outcome, "failed", error=str(error))
            raise

    def _close(self) -> Report:
        """Record the result of the run; return its report."""
        deps, run, outcome = self._deps, self._run, self._outcome
        claim = claim_in_force(deps, run.ready)
        report = passes.report(deps, run, outcome, self._costs, claim, self._counts)
        try:
            with self._as_its_holder():
                record.close(deps, run, outcome, self._result(report), report)
        except LeaseLost as error:
            outcome.ended = error
            report = passes.report(deps, run, outcome, self._costs, claim, self._counts)
        return report

    def _result(self, report: Report) -> str:
        """Return the result of the run as a word (``RunRecord.result``)."""
        if self._run.ready.is_blocked:
            return "blocked"
        if self._outcome.interruption is not None:
            return "interrupted"
        return "partial" if report.errors or self._outcome.withheld else "done"

    def _make_pass(self, executor: StoreExecutor) -> StateError | None:
        """Make the pass over the store; return the state's error if the state failed.

        Raises:
            StoreError: the store failed as a whole.
        """
        deps, run, outcome = self._deps, self._run, self._outcome
        self._counts = passes.load_topics(deps, run)
        with self._as_its_holder(), deps.state.transaction():
            deps.check_lease()
            clocks = guards.read_clocks(deps.clock)
            conclude.begin_run(run, deps.state, clocks, self._stoppable, moves_frontiers=self._moves_frontiers)
        failure = None
        with closing(sweep_store(run, deps.division, executor, deps.expiries, outcome)) as events:
            try:
                for event in events:
                    if isinstance(event, StepStarted) and event.step == "invert":
                        executor.deleted.no_more("message")
                    self._consume(event)
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

    def _settle(self, executor: StoreExecutor, state_failed: StateError | None) -> None:
        """Sync the store, save the conclusions, compact, and report proven ids to the transaction manager."""
        deps, outcome = self._deps, self._outcome
        self._costs.start("sync")
        # S4: before anything is concluded. A crash of the machine may take back unsynced deletions and inversions.
        # A run that deleted nothing and proves nothing has nothing that a crash may not take back.
        if executor.deleted.slices or self._round is not None:
            self._sync()
        self._costs.start("")
        # L6: only after the sync. A row that comes back without its expiry would live as long as its topic's TTL.
        if deps.expiries is not None:
            deps.expiries.forget(outcome.expired)
        if self._round is None:
            self._free_void_claims()
        if state_failed is not None:
            # The store works, so what was done there was made durable all the same.
            with self._as_its_holder():
                raise state_failed
        if outcome.archive_error is not None:
            outcome.failures["message", "archive"] += 1
            outcome.errors.append(
                f"nothing more was deleted, because rows could not be archived: {outcome.archive_error}"
            )
        if outcome.interruption is not None or not self._conclude():
            return
        # After the conclusions: a compaction that fails may close the store, and costs only space.
        self._costs.start("compact")
        outcome.compact(executor.deleted, partial(self._alive, "compact", 0))
        self._costs.start("")
        if deps.feedback is not None and self._moves_frontiers and outcome.interruption is None:
            self._feed_back(deps.feedback)

    def _free_void_claims(self) -> None:
        """Free the claims of invalid transactions, and mark their producers' batches, before their ids can leave the
        invalid list (invariant S4). Also forget idle producers.

        A pass that proves something does this before it saves its first evidence, so the evidence covers claims too.
        """
        deps, run = self._deps, self._run
        usable, topics = run.ready.tx.usable, run.topics
        if deps.side is None or usable is None or not self._moves_frontiers or self._outcome.interruption is not None:
            return

        def is_gone(topic: TopicId, generation: int) -> bool:
            work = topics.get(topic.prefix)
            return work is not None and work.topic.is_old(generation)

        # S12: these writes have no batch whose permission is checked.
        with self._as_its_holder():
            deps.check_lease()
        freed = free_void(deps.side, usable.is_invalid, lambda group: is_gone(group.topic, group.generation))
        if freed:
            logger.info("%d claims of transactions that have failed were given back to their groups", freed)
        idle_before_ms = run.ready.now.wall_ms - IDLE_MS
        forgotten = tidy(deps.side, usable.is_invalid, usable.is_undecided, is_gone, idle_before_ms)[1]
        if forgotten:
            logger.info("%d producers that were idle for a week were forgotten", forgotten)

    def _executor(self) -> StoreExecutor:
        deps, run = self._deps, self._run
        usable = run.ready.tx.usable
        return StoreExecutor(
            deps.store.metadata,
            self._permission,
            Pacer(deps.terms.rows_per_second, deps.clock, self._permission.alive),
            Ledger(deps.state, deps.clock, run.id, usable.timestamp_ms if usable else None),
            deps.archive.begin(run.id, run.transactions) if deps.archive else None,
            record.RunningCounters(deps.state, deps.clock, run.id).add,
        )

    def _sync(self) -> None:
        """Sync all deletions and inversions, also those of an earlier run that stopped early."""
        store = self._deps.writable_store()
        store.message.sync()
        store.payload.sync()

    # -- evidence of covered intervals (invariant S4)
    # -----------------------------------------------------------------------

    def _consume(self, event: Event) -> None:
        """Consume an event of the pass: show progress, and save covered intervals."""
        self._costs.see(event)
        match event:
            case StepStarted("invert") if self._run.proves:
                self._begin_round(event.parts)
            case StepStarted("payload", [part]) if self._round is not None and self._is_whole:
                part.search = part.search._replace(covered=self._round.payloads_from)
            case Advance():
                self._save_advance(event)
            case StepFinished() if event.part.step == "invert":
                self._save_finished(event)

    def _begin_round(self, parts: Sequence[Part]) -> None:
        """Begin or continue a round, and limit the search to intervals that are not covered yet."""
        deps, stores = self._deps, [part.store for part in parts]
        # S4: before the first evidence, since an id of a claim that is still there must stay on the invalid list.
        self._free_void_claims()
        self._saved_ms = deps.clock.monotonic_ms()
        with self._as_its_holder(), deps.state.transaction():
            deps.check_lease()
            progress = self._round = conclude.begin_round(self._run, deps.state, self._stoppable)
        self._is_whole = boundary.is_whole(stores)
        if gaps := boundary.gaps(stores):
            self._save_evidence(gaps, None)
        for part in parts:
            if progress.has_done(part.store):
                part.search = SearchScope(progress.since_ms, everything=False)
            elif self._is_whole:
                covered = progress.first_undone(part.store)
                part.search = SearchScope(part.search.since_ms, True, covered, progress.since_ms)

    def _save_advance(self, event: Advance) -> None:
        """Save from time to time how far a store of one part was searched, or its payloads were read (invariant S4)."""
        progress = self._round
        if progress is None or not self._is_whole or event.part.step == "ttl" or not self._is_due():
            return
        if event.part.step == "payload":
            # A later run starts at this key, so a topic before it that failed would not be tried again.
            if not any(outcome.failed for outcome in event.so_far):
                with self._as_its_holder():
                    self._deps.check_lease()
                    boundary.save_payloads(self._deps.state, self._run.id, event.key)
                self._saved_ms = self._deps.clock.monotonic_ms()
            return
        start = progress.first_undone(event.part.store)
        has_room = not progress.has_done(event.part.store) and start < event.key
        if has_room and not any(outcome.undone for outcome in event.so_far):
            met = [outcome.untouchable for outcome in event.so_far if outcome.untouchable is not None]
            self._save_evidence([KeyRange(start, event.key)], min(met, default=None))

    def _save_finished(self, event: StepFinished) -> None:
        """Save that a part was covered, if it was covered completely (invariant S4)."""
        progress, store, outcome = self._round, event.part.store, event.outcome
        if progress is None or outcome.undone or progress.has_done(store):
            return
        try:
            self._save_evidence([KeyRange(progress.first_undone(store), store.span.stop)], outcome.untouchable)
        except TmsError as error:
            # It ends the pass; what other parts have done meanwhile is still to be counted.
            outcome.ended = error

    def _stoppable(self, records: Iterable[OpenIdRecord]) -> Iterator[OpenIdRecord]:
        """Yield records of invalid ids; a stop request is checked between batches, and the first batch is always saved.

        To save a million takes ten seconds and more. A stop undoes the state's transaction, and the next run saves
        them.
        """
        for number, one in enumerate(records, 1):
            if not number % BATCH_IDS:
                self._permission.raise_if_stopping()
            yield one

    def _is_due(self) -> bool:
        return self._deps.clock.monotonic_ms() - self._saved_ms >= PROGRESS_MS

    def _save_evidence(self, covered: Sequence[KeyRange], untouchable: int | None) -> None:
        deps = self._deps
        # S4: first the rows, then the evidence about them. After a crash in between, the interval is searched again.
        self._sync()
        with self._as_its_holder():
            # Not inside the state's transaction: other threads may be at work, which take the lease's lock first.
            deps.check_lease()
            conclude.save_evidence(self._run, deps.state, covered, untouchable)
        self._saved_ms = deps.clock.monotonic_ms()

    # -- what is concluded -----------------------------------------------------------------------------------------

    def _conclude(self) -> bool:
        """Save the results of the pass, if this process still has the lease (invariants S4, S12)."""
        deps, run, state = self._deps, self._run, self._deps.state
        barred = obstacles(deps, run.ready) if self._round is not None else ()
        clocks = guards.read_clocks(deps.clock)
        try:
            lineage = self._lineage()
            if lineage is None:
                return False
            with self._as_its_holder(), state.transaction():
                # S12: inside the transaction, so the next holder's conclusions are not overwritten.
                deps.check_lease()
                if self._moves_frontiers:
                    conclude.conclude_run(run, self._outcome, self._round, state, clocks, barred, self._stoppable)
                else:
                    conclude.conclude_apply(run, state, clocks, self._stoppable)
                if lineage != state.note(LINEAGE):
                    state.save_note(LINEAGE, lineage)
        except Interrupted as error:
            self._outcome.ended = error
            return False
        return True

    def _lineage(self) -> dict[str, Any] | None:
        """Return the facts that identify the store from now on; None if it was put back meanwhile, or failed."""
        deps, run, outcome = self._deps, self._run, self._outcome
        with self._as_its_holder():
            deps.check_lease()
        try:
            # S13: once more at the end. A backup that was put back during the run undoes what the run has proven.
            with self._as_its_holder():
                _, put_back = guards.check_lineage(deps.state, deps.store, run.ready.record)
            if put_back is None:
                return dict(deps.store.lineage())
            outcome.notes.append(put_back)
        except StoreError as error:
            if passes.is_finished(run, outcome):
                raise
            # It has failed in the pass already, so there is little to conclude.
            outcome.errors.append(f"what this run has proven is not saved, because the store failed: {error}")
        return None

    @contextmanager
    def _as_its_holder(self) -> Iterator[None]:
        """Convert the state's refusal into a loss of the lease, if the lease is lost.

        Raises:
            LeaseLost: instead of the state's ``StateBusy``.
        """
        try:
            yield
        except StateBusy:
            self._deps.check_lease()
            raise

    # -- what follows ----------------------------------------------------------------------------------------------

    def _feed_back(self, told: Feedback) -> None:
        """Report proven ids to the transaction manager after a complete run without obstacles (invariant S4)."""
        try:
            heartbeat = partial(self._alive, "audit")
            feedback.hand_over(self._deps, told, self._run, self._outcome, self._permission, heartbeat)
        except Interrupted as error:
            self._outcome.ended = error

    def _alive(self, phase: str, rows: int) -> None:
        self._deps.observer(phase, None, rows)
        self._permission.alive()
