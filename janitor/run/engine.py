"""One janitor of one store: its runs, and beside them what else is done there, over the same things.

A run deletes and inverts, carries out a plan file, or only plans and remembers it. The commands, the daemon and the
tests all come through here.
"""

from __future__ import annotations

from dataclasses import replace

from janitor.boundary import claim as boundary
from janitor.boundary import coverage as rounds
from janitor.report import Report
from janitor.run import conclude, guards, record
from janitor.run.decisions import OperatorDecisions
from janitor.run.plan_file import PlanFile
from janitor.run.prepare import Prepared, prepare, run_context
from janitor.run.questions import begin_plan, make_plan
from janitor.run.sweep_run import SweepRun
from tms_core.errors import Interrupted

#: A pass that looks at everything, whatever the pointers say, is due this long after the last one.
THOROUGH_EVERY_MS = 24 * 3600 * 1000


class Engine(OperatorDecisions):
    """The engine for one store: queries, decisions and runs.

    Args:
        deps: the store must be one that can be written, but for questions and for :meth:`rehearse`.
    """

    def run_once(self, *, adopt: bool = False, patterns: tuple[str, ...] = (), lazy: bool = False) -> Report:
        """Make one pass that deletes and inverts rows as the rules and frontiers allow.

        A run that a guard stops changes nothing and says so in its report; a topic that fails is in the report's
        errors and the others are done; a run that is interrupted or loses its lease keeps its work, and reports that.

        Args:
            adopt: accept a store met for the first time (:meth:`~janitor.run.decisions.OperatorDecisions.adopt`).
                Without effect where the state knows an adopted store, be it this one or not, and also when a guard
                stops the run: only an operator's own adopting and approving settles that.
            patterns: shell patterns of the topics to do; such a pass claims nothing.
            lazy: leave topics for later in which little has come due; for a daemon, which comes again soon.

        Raises:
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self.deps.turn:
            with record.preparing(self.deps, "apply"):
                ready = self._adopted(prepare(self.deps), wanted=adopt)
                thorough = self._thorough_is_due(ready)
                context = run_context(
                    self.deps, ready, thorough=thorough, patterns=patterns, lazy=lazy and not thorough, deletes=True
                )
            return SweepRun(self.deps, ready, context, moves_frontiers=True).sweep()

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Carry out a plan file: at most its rows, and nothing that the rules no longer allow.

        Raises:
            PlanRefused: its basis has changed; nothing was done.
            StoreError, StateError: the store or the state failed as a whole.
        """
        with self.deps.turn:
            with record.preparing(self.deps, "apply"):
                ready = prepare(self.deps)
                present = run_context(self.deps, ready, thorough=True)
                present.load_topics()
            wanted.check(ready.record.mark, self.deps.terms, present)
            ready = self._adopted(ready, wanted=adopt)
            now = replace(ready.now, wall_ms=min(ready.now.wall_ms, wanted.effective_now_ms))
            ready = replace(ready, now=now)
            context = run_context(self.deps, ready, thorough=True, limits=wanted.limits, deletes=True)
            return SweepRun(self.deps, ready, context, moves_frontiers=False).sweep()

    def rehearse(self, *, patterns: tuple[str, ...] = ()) -> Report:
        """Return a plan that is remembered as a run is, for a daemon that only plans (``janitor.apply: false``).

        Raises:
            StoreError, Halted: as of a plan.
        """
        with self.deps.turn:
            with record.preparing(self.deps, "plan"):
                ready = prepare(self.deps)
                known = self.deps.state.note(record.REHEARSED)
                thorough = known is None or not 0 <= ready.now.wall_ms - known < THOROUGH_EVERY_MS
                current = begin_plan(self.deps, ready, patterns, thorough=thorough)
            record.begin(self.deps, current)
            try:
                report = make_plan(self.deps, current)
            except Exception as error:
                result = "halted" if isinstance(error, Interrupted) else "failed"
                record.close(self.deps, current, result, {"error": str(error)})
                raise
            record.close(self.deps, current, "partial" if report.errors else "done", report.to_history(), report)
            return report

    def _adopted(self, ready: Prepared, *, wanted: bool) -> Prepared:
        """Return the preparation, repeated after an unknown store was adopted."""
        if not wanted or not ready.unknown:
            return ready
        conclude.adopt(self.deps, ready)
        return prepare(self.deps)

    def _thorough_is_due(self, ready: Prepared) -> bool:
        """Return whether this run looks at everything: daily, after a plan, and when the last such run could prove
        nothing.
        """
        state = self.deps.state
        if state.note(rounds.WANTED) is not None:
            return True
        last = state.last_thorough_ms()
        # A last time that lies ahead was written by a clock that has been set back since.
        if last is None or not 0 <= ready.now.wall_ms - last < THOROUGH_EVERY_MS:
            return True
        refuted = rounds.refutation(state)
        if refuted is not None and not refuted.searched:
            return True
        if ready.tx.usable is None or state.pauses():
            return False  # it could prove nothing either
        if guards.quarantined(state.strikes(), ready.now.wall_ms):
            return False
        evidence = state.evidence()
        return boundary.find_gap(evidence) is not None or any(item.started_ms < last for item in evidence)
