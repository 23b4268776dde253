"""One janitor of one store: its runs, beside the queries and decisions that it inherits.

A run deletes and inverts, carries out a plan file, or only plans and saves the plan. The commands, the daemon and the
tests use this module.
"""

from __future__ import annotations

from dataclasses import replace

from janitor.boundary import claim as boundary
from janitor.report import Report
from janitor.run import conclude, guards, record
from janitor.run.decisions import OperatorDecisions
from janitor.run.plan_file import PlanFile
from janitor.run.prepare import make_run, prepare
from janitor.run.questions import begin_plan, make_plan
from janitor.run.sweep_run import SweepRun
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import PassKind, Preparation
from tms_core.errors import Interrupted

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
FULL_EVERY_MS = 24 * 3600 * 1000


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
            adopt: accept an unknown store (:meth:`adopt`). Without effect if the state knows any adopted store, or if a
                guard blocks the run: then an operator must adopt or approve.
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
