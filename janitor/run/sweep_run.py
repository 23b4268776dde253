"""One run that deletes: announced, made, made durable, concluded and closed.

Results are saved last, in one transaction, after the store's own writes are durable. A run that dies in
between has forgotten nothing but its report: the next one finds the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from janitor.boundary import coverage as rounds
from janitor.boundary.coverage import Round
from janitor.report import Report
from janitor.run import conclude, feedback, guards, passes, record
from janitor.run.deps import Deps, Feedback
from janitor.run.prepare import Prepared, claim_in_force, obstacles
from janitor.state.ids import BATCH_IDS
from janitor.state.records import LINEAGE, OpenIdRecord
from janitor.sweep.act import Sweep
from janitor.sweep.compaction import DeletedRanges
from janitor.sweep.context import RunContext
from janitor.sweep.ledger import Booking, Ledger
from janitor.sweep.permission import Pacer, Permission
from janitor.sweep.sweep import sweep_store
from tms_core.consumers.claim_rows import free_void
from tms_core.errors import Interrupted, LeaseLost, StateBusy, StateError, StoreError
from tms_core.messaging.producers.rows import IDLE_MS, tidy
from tms_core.tables.base import KeyRange, Reads
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)

#: How often a run writes down how far it has come, in milliseconds of running time.
PROGRESS_MS = 10_000


class SweepRun:
    """One run that deletes.

    Args:
        ready: how it was prepared.
        context: its context; its topics are yet to be read.
        moves_frontiers: whether it is a run of the janitor's own, and not of a plan file.
    """

    def __init__(self, deps: Deps, ready: Prepared, context: RunContext, *, moves_frontiers: bool) -> None:
        self._deps = deps
        self._moves_frontiers = moves_frontiers
        self._current = passes.begin(deps, "apply", ready, context)
        self._permission = Permission(deps.state, deps.lease, deps.clock, self._current.id, deps.halted)
        self._saved_ms = 0

    def sweep(self) -> Report:
        """Do the run.

        Raises:
            StoreError, StateError: the store or the state failed as a whole; completed deletions are in the ledger.
        """
        deps, current = self._deps, self._current
        record.begin(deps, current)
        try:
            try:
                if not current.ready.stopped:
                    conclude.record_adopter(deps, current.ready.record)
                    act = self._act()
                    with closing(act.deleted):
                        self._sweep_store(act)
            except Interrupted as error:
                current.halted = error
            return self._close()
        # Also for a bug of ours: what was deleted has to be in the ledger, and the run must not look alive.
        except Exception as error:
            record.close(deps, current, "failed", {"error": str(error)})
            raise

    def _close(self) -> Report:
        """Record its result."""
        deps, current = self._deps, self._current
        claim = claim_in_force(deps, current.ready)
        current.boundary = claim.bound if claim else None
        report = passes.report(deps, current)
        try:
            with self._as_its_holder():
                record.close(deps, current, self._result(report), report.to_history(), report)
        except LeaseLost as error:
            current.halted = error
            report = passes.report(deps, current)
        return report

    def _result(self, report: Report) -> str:
        """Return the result of the run, in a word (``RunRecord.result``)."""
        if self._current.ready.stopped:
            return "stopped"
        if self._current.halted is not None:
            return "halted"
        return "partial" if report.errors or self._current.outcome.withheld else "done"

    def _sweep_store(self, act: Sweep) -> None:
        deps, current = self._deps, self._current
        passes.load_topics(deps, current)
        with self._as_its_holder(), deps.state.transaction():
            deps.check_lease()
            clocks = guards.read_clocks(deps.clock)
            conclude.begin_run(current, deps.state, clocks, self._stoppable, moves_frontiers=self._moves_frontiers)
        scope = passes.scope(deps, current, self._begin_round if current.proves else None)
        state_failed = None
        try:
            current.add(sweep_store(scope, act))
        except StateError as error:
            # The store works, so what was done there is made durable all the same.
            state_failed = error
        with passes.phase(deps, current, "sync"):
            # A run that took nothing and proves nothing has nothing that a crash may not take back.
            if act.deleted.slices or current.round is not None:
                self._sync()
        if deps.expiries is not None:
            deps.expiries.forget(current.outcome.expired)
        if current.round is None:
            self._free_void_claims()
        if state_failed is not None:
            with self._as_its_holder():
                raise state_failed
        if current.outcome.archive_error is not None:
            why = current.outcome.archive_error
            current.outcome.failures["message", "archive"] += 1
            current.outcome.errors.append(f"nothing more was deleted, because rows could not be archived: {why}")
        if current.halted is not None or not self._conclude():
            return
        with passes.phase(deps, current, "compact"):
            self._compact(act.deleted)
        if deps.feedback is not None and self._moves_frontiers and current.halted is None:
            self._feed_back(deps.feedback)

    def _free_void_claims(self) -> None:
        """Free what invalid transactions have claimed, and mark what producers have started in them, before their ids
        may leave the invalid list (rule S4); and forget idle producers.

        A pass that proves something does so before it writes down the first thing, so its evidence is of claims, too.
        """
        deps, current = self._deps, self._current
        usable, topics = current.ready.tx.usable, current.context.topics
        if deps.side is None or usable is None or not self._moves_frontiers or current.halted is not None:
            return

        def is_gone(topic: TopicId, generation: int) -> bool:
            work = topics.get(topic.prefix)
            return work is not None and work.topic.is_old(generation)

        with self._as_its_holder():
            deps.check_lease()
        freed = free_void(deps.side, usable.is_invalid, lambda group: is_gone(group.topic, group.generation))
        if freed:
            logger.info("%d claims of transactions that have failed were given back to their groups", freed)
        idle_before_ms = current.ready.now.wall_ms - IDLE_MS
        forgotten = tidy(deps.side, usable.is_invalid, usable.is_undecided, is_gone, idle_before_ms)[1]
        if forgotten:
            logger.info("%d producers that were idle for a week were forgotten", forgotten)

    def _act(self) -> Sweep:
        deps, current = self._deps, self._current
        usable = current.ready.tx.usable
        return Sweep(
            deps.store.metadata,
            self._permission,
            Pacer(deps.rows_per_second, deps.clock, self._permission.alive),
            Ledger(deps.state, deps.clock, current.id, usable.timestamp_ms if usable else None),
            deps.archive.begin(current.id, current.context.transactions) if deps.archive else None,
            deps.observer,
            Booking(partial(record.book, deps.state, current.id), deps.clock),
        )

    def _sync(self) -> None:
        """Wait until all deletions and inversions survive a crash, including those of an earlier run that stopped
        early.
        """
        store = self._deps.writable_store()
        store.message.sync()
        store.payload.sync()

    # -- what is proven on the way (rule S4) -----------------------------------------------------------------------

    def _begin_round(self, parts: Sequence[Reads]) -> Round:
        deps, current = self._deps, self._current
        self._free_void_claims()
        self._saved_ms = deps.clock.running_ms()
        with self._as_its_holder(), deps.state.transaction():
            deps.check_lease()
            begun = conclude.begin_round(current, deps.state, self._save_evidence, self._stoppable)
        if rounds.is_whole(parts):
            begun = replace(begun, is_due=self._is_due, payloads_done=self._save_payloads)
        current.round = begun
        return begun

    def _stoppable(self, records: Iterable[OpenIdRecord]) -> Iterator[OpenIdRecord]:
        """Yield records of invalid ids; a stop request is checked between them; the first batch is always saved.

        To save a million takes ten seconds and more. The state's transaction is undone then, and the next run saves
        them.
        """
        for number, one in enumerate(records, 1):
            if not number % BATCH_IDS:
                self._permission.stop_if_halted()
            yield one

    def _is_due(self) -> bool:
        return self._deps.clock.running_ms() - self._saved_ms >= PROGRESS_MS

    def _save_evidence(self, covered: Sequence[KeyRange], untouchable: int | None) -> None:
        deps = self._deps
        self._sync()
        with self._as_its_holder():
            # Not inside the state's transaction: other threads may be at work, which take the lease's lock first.
            deps.check_lease()
            conclude.save_evidence(self._current, deps.state, covered, untouchable)
        self._saved_ms = deps.clock.running_ms()

    def _save_payloads(self, upto: bytes) -> None:
        deps = self._deps
        if self._is_due():
            with self._as_its_holder():
                deps.check_lease()
                rounds.save_payloads(deps.state, self._current.id, upto)
            self._saved_ms = deps.clock.running_ms()

    # -- what is concluded -----------------------------------------------------------------------------------------

    def _conclude(self) -> bool:
        """Save the results of the pass, if this process still has the lease (rules S4, S12)."""
        deps, current, state = self._deps, self._current, self._deps.state
        barred = obstacles(deps, current.ready) if current.round is not None else ()
        clocks = guards.read_clocks(deps.clock)
        try:
            lineage = self._lineage()
            if lineage is None:
                return False
            with self._as_its_holder(), state.transaction():
                deps.check_lease()
                if self._moves_frontiers:
                    conclude.conclude_run(current, state, deps.terms, clocks, clocks.wall_ms, barred, self._stoppable)
                else:
                    conclude.conclude_apply(current, state, clocks, self._stoppable)
                if lineage != state.note(LINEAGE):
                    state.save_note(LINEAGE, lineage)
        except Interrupted as error:
            current.halted = error
            return False
        return True

    def _lineage(self) -> dict[str, Any] | None:
        """Save the facts that identify the store from now on; None where it was put back meanwhile, or has gone
        silent.
        """
        deps, current = self._deps, self._current
        with self._as_its_holder():
            deps.check_lease()
        try:
            with self._as_its_holder():
                _, put_back = guards.check_lineage(deps.state, deps.store, current.ready.record)
            if put_back is None:
                return dict(deps.store.lineage())
            current.notes.append(put_back)
        except StoreError as error:
            if current.finished:
                raise
            # It has failed in the pass already, so there is little to conclude.
            current.outcome.errors.append(f"what this run has proven is not saved, because the store failed: {error}")
        return None

    @contextmanager
    def _as_its_holder(self) -> Iterator[None]:
        """Translate a refusal of the state into the loss of the lease, if it is lost.

        Raises:
            LeaseLost: instead of the state's ``StateBusy``.
        """
        try:
            yield
        except StateBusy:
            self._deps.check_lease()
            raise

    # -- what follows ----------------------------------------------------------------------------------------------

    def _compact(self, deleted: DeletedRanges) -> None:
        current = self._current
        try:
            deleted.compact(partial(self._alive, "compact", 0))
        except Interrupted as error:
            current.halted = error
        except StoreError as error:
            # The rows are gone and what was reached is saved; only their space is not free yet.
            current.outcome.errors.append(
                "the rows are deleted, but the store could not be compacted, so the disk shows no free space yet: "
                f"{error}"
            )

    def _feed_back(self, told: Feedback) -> None:
        """Pass proven ids after a run over everything without an obstacle (rule S4)."""
        deps, current = self._deps, self._current
        try:
            feedback.hand_over(current, deps, told, self._permission.check_all, partial(self._alive, "audit"))
        except Interrupted as error:
            current.halted = error

    def _alive(self, phase: str, rows: int) -> None:
        self._deps.observer(phase, None, rows)
        self._permission.alive()
