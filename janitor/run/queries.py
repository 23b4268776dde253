"""Queries about a store: plans, explanations of messages, contents of tables, and the prune boundary.

A query starts like a run (``prepare``): it reads the clocks, the state and the snapshot, and runs the guards. A plan
then makes the pass of a run with an executor that changes nothing. Queries get a clone of the store or a read-only
store, so they have no object that can write to it (invariant S5).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from janitor import boundary
from janitor.archive import index as archived
from janitor.archive import restore as archive
from janitor.archive.restore import Request, RestoreResult
from janitor.boundary import Boundary, Limit
from janitor.inspect.answer import Why
from janitor.inspect.rows import Audit, InspectedRows, messages, metadata, payloads, snapshot_figures
from janitor.inspect.why import why
from janitor.report import Report
from janitor.rules.policy import Hold
from janitor.run import feedback, passes
from janitor.run import plan_file as plan
from janitor.run.plan_file import WhatIf, suppose_ttls
from janitor.run.prepare import Deps, boundary_in_force, make_run, obstacles, prepare
from janitor.state.base import ProvenBoundary
from janitor.sweep.executor import DryRun, raise_if_stopping
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import PassKind, Preparation, Run
from janitor.sweep.sweep import sweep_store
from janitor.sweep.transactions import TransactionView, TxState
from tms_core.errors import NoSnapshot
from tms_core.rowkey import MessageId
from tms_core.tables.base import TableName
from tms_core.topic import TopicId


class PlanResult(NamedTuple):
    """The report of a plan, and the contents of its file (:func:`janitor.run.plan_file.save`)."""

    report: Report
    document: dict[str, Any]


class Queries:
    """The queries about one store."""

    def __init__(self, deps: Deps) -> None:
        self.deps = deps

    def plan(
        self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "", what_if: str = ""
    ) -> PlanResult:
        """Make a plan of a full run; the next run is then also full.

        Args:
            at_ms: evaluate the rules at this time instead of now; such a plan cannot be applied.
            patterns: shell patterns of the topics in scope; empty: all.
            digest: the digest of the settings, for the plan file.
            what_if: use other TTLs (:class:`~janitor.run.plan_file.WhatIf`); such a plan cannot be applied.

        Raises:
            ConfigurationError: ``what_if`` cannot be parsed.
            StopRequested: the process is stopping.
            StoreError, StateError: the store or the state could not be read.
        """
        changes = WhatIf.parse(what_if)
        deps = replace(self.deps, store=suppose_ttls(self.deps.store, changes)) if changes else self.deps
        run, outcome = start_plan(deps, prepare(deps, at_ms), "full", patterns), Outcome()
        report = make_plan(deps, run, outcome)
        store_id, is_what_if = run.ready.record.mark, at_ms is not None or bool(changes)
        if report.topics and not is_what_if:
            # A frequent run searches less, and would leave some planned rows until the next full pass.
            self.deps.state.save_note(boundary.FULL_REQUEST, run.ready.now.wall_ms)
        document = plan.document(report, outcome, run, store_id=store_id, digest=digest, what_if=is_what_if)
        return PlanResult(report, document)

    def inspect(self, table: TableName, patterns: tuple[str, ...], limit: int) -> InspectedRows:
        """Return the number of rows of one table, and the first rows decoded.

        Raises:
            StoreError: the store could not be read.
        """
        store = self.deps.store
        if table == "metadata":
            return metadata(store, patterns)
        read = messages if table == "message" else payloads
        return read(store, self.transactions().usable, patterns, limit, partial(heartbeat, self.deps))

    def why(self, topic: TopicId, message_id: MessageId) -> Why:
        """Return the rule and time of a message's deletion with its hold, or the run that deleted the message.

        Raises:
            StoreError, StateError: the store or the state could not be read.
        """
        ready = prepare(self.deps)
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        run = make_run(self.deps, ready, kind="full", patterns=(str(topic),), label=label)
        run.load_topics()
        store, state, now_ms = self.deps.store, self.deps.state, ready.now.wall_ms
        return why(store, state, run, topic, message_id, now_ms, self.deps.terms.history_days)

    def boundary(self) -> tuple[ProvenBoundary | None, Boundary]:
        """Return the boundary in force, and the boundary that the present evidence proves, with its limits.

        Raises:
            StoreError, StateError: the store or the state could not be read.
        """
        ready, state, lifetime = prepare(self.deps), self.deps.state, self.deps.terms.lifetime
        proven = boundary_in_force(self.deps, ready)
        if blockers := obstacles(self.deps, ready):
            return proven, Boundary.none(*blockers)
        pointers = (record.pointer for record in ready.ids.open_ids())
        found = boundary.prove(state.evidence(), pointers, lifetime)
        refuted = boundary.refutation(state)
        if refuted is not None:
            found = replace(found, bound=None, obstacles=(refuted.message, *found.obstacles))
        return proven, replace(found, limits=tuple(map(self._with_region, found.limits)))

    def verify(self) -> Audit:
        """Read every transactional row, and confirm the boundary, or refute and withdraw it.

        A pointer counts as invalid if the present or the last seen invalid list has it, since an operator may have
        removed it because of the boundary.

        Raises:
            StoreError, StateError: the store or the state could not be read, or the state could not be written.
        """
        found = feedback.audit(self.deps, prepare(self.deps), partial(heartbeat, self.deps))
        if found.refuted:
            boundary.refute(self.deps.state, found.refutation, self.deps.clock.now_ms())
        known = boundary.refutation(self.deps.state)
        found.withdrawn = known.message if known is not None else ""
        return found

    def transactions(self) -> TxState:
        """Return the snapshot that a run would use now, or the reason why it would not use a snapshot."""
        return prepare(self.deps).tx

    def snapshot_figures(self, limit: int) -> dict[str, Any]:
        """Return that snapshot as JSON values, with lists cut to ``limit``; ``problem``: the reason not to use it.

        Raises:
            NoSnapshot: there is no snapshot; the message has the reason.
        """
        tx = self.transactions()
        if tx.snapshot is None:
            raise NoSnapshot(f"There is no snapshot: {tx.message}")
        return {**snapshot_figures(tx.snapshot, tx.name, limit), "problem": tx.message or None}

    def restorable(self, folder: Path, request: Request) -> RestoreResult:
        """Return the result of a dry run of :meth:`~janitor.run.engine.Engine.restore`; it raises the same errors."""
        return self._restore(folder, replace(request, dry_run=True))

    def _restore(self, folder: Path, request: Request) -> RestoreResult:
        deps = self.deps
        files, now_ms = archived.find_topic(folder, request.source), deps.clock.now_ms()
        transactions = TransactionView(prepare(deps).tx.usable, now_ms, deps.terms.lifetime.undecided_ms)
        on_rows = partial(heartbeat, deps)
        return archive.restore(deps.store, deps.state, transactions, files, request, now_ms, on_rows, deps.side)

    def _with_region(self, limit: Limit) -> Limit:
        return limit if limit.start is None else replace(limit, region=self.deps.store.region(limit.start))


def start_plan(deps: Deps, ready: Preparation, kind: PassKind, patterns: tuple[str, ...]) -> Run:
    """Return the run of a plan, before its topics are read."""
    label = Hold.FIRST_CONTACT if ready.first_contact else None
    return make_run(deps, ready, kind=kind, patterns=patterns, label=label, mode="plan")


def make_plan(deps: Deps, run: Run, outcome: Outcome) -> Report:
    """Make the pass of a plan, which changes nothing; return its report.

    Args:
        outcome: receives the findings.

    Raises:
        StopRequested: the process is stopping.
    """
    costs = passes.Costs(deps)
    proven, counts = boundary_in_force(deps, run.ready), passes.load_topics(deps, run)
    for event in sweep_store(run, deps.division, DryRun(deps.is_stopping), outcome):
        costs.consume(event)
    costs.start("")
    if outcome.ended is not None:
        raise outcome.ended
    return passes.report(deps, run, outcome, costs, proven, counts)


def heartbeat(deps: Deps, rows: int) -> None:
    """Report the rows of a read outside a pass to the observer.

    Raises:
        StopRequested: the process is stopping.
    """
    deps.observer("read", None, rows)
    raise_if_stopping(deps.is_stopping)
