"""Queries of a store that change nothing: plans, explanations, and proofs.

Every question starts the same way (``prepare``): read the clocks, the state and the snapshot, and run the guards. A
plan then goes over the store as a run does, with an act that does nothing. Queries get a clone of the store or a
read-only store, so nothing can write (rule S5).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from janitor.archive import index as archived
from janitor.archive import restore as archive
from janitor.archive.restore import Request, Restored
from janitor.boundary import claim as boundary
from janitor.boundary import coverage as rounds
from janitor.boundary.claim import Boundary, Limit
from janitor.inspect.answer import Why
from janitor.inspect.rows import Audit, Inspected, Table, messages, metadata, payloads, snapshot_figures
from janitor.inspect.why import why
from janitor.report import Report
from janitor.rules.policy import Hold
from janitor.run import feedback, passes
from janitor.run import plan_file as plan
from janitor.run.deps import Deps
from janitor.run.prepare import Prepared, claim_in_force, obstacles, prepare, run_context
from janitor.state.base import Claim
from janitor.sweep.act import Preview
from janitor.sweep.sweep import sweep_store
from janitor.sweep.transactions import TransactionView, TxState
from janitor.sweep.whatif import WhatIf, supposed
from tms_core.errors import Halted, NoSnapshot
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId


class Planned(NamedTuple):
    """A plan, and the document of its file (:func:`janitor.run.plan_file.save`)."""

    report: Report
    document: dict[str, Any]


class Questions:
    """Answers questions about one store."""

    def __init__(self, deps: Deps) -> None:
        self.deps = deps

    def plan(
        self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "", what_if: str = ""
    ) -> Planned:
        """Return the plan of a run; the next run then looks at everything, as this did.

        Args:
            at_ms: judge by another moment than the present; such a plan cannot be applied.
            patterns: shell patterns of the topics to look at; none for all.
            digest: names the settings in force, for the plan file.
            what_if: judge by other ttls (:class:`~janitor.sweep.whatif.WhatIf`); such a plan cannot be applied.

        Raises:
            ConfigurationError: what_if is no policy.
            Halted: the process is stopping.
            StoreError, StateError: the store or the state could not be read.
        """
        changes = WhatIf.parse(what_if)
        deps = replace(self.deps, store=supposed(self.deps.store, changes)) if changes else self.deps
        current = begin_plan(deps, prepare(deps, at_ms), patterns, thorough=True)
        report = make_plan(deps, current)
        store_id, only_to_look = current.ready.record.mark, at_ms is not None or bool(changes)
        if report.entries and not only_to_look:
            # A frequent run searches less, and would leave some of it for a day.
            self.deps.state.save_note(rounds.WANTED, current.ready.now.wall_ms)
        document = plan.document(
            report, current.outcome, current.context, store_id=store_id, digest=digest, what_if=only_to_look
        )
        return Planned(report, document)

    def inspect(self, table: Table, patterns: tuple[str, ...], limit: int) -> Inspected:
        """Return the rows of one table, the first ones decoded, all of them counted.

        Raises:
            StoreError: the store could not be read.
        """
        store = self.deps.store
        if table == "metadata":
            return metadata(store, patterns)
        read = messages if table == "message" else payloads
        return read(store, self.transactions().usable, patterns, limit, partial(heartbeat, self.deps))

    def why(self, topic: TopicId, message_id: MessageId) -> Why:
        """Return the rule that will delete a message, the time, and its hold; or which run has taken it.

        Raises:
            StoreError, StateError: the store or the state could not be read.
        """
        ready = prepare(self.deps)
        label = Hold.FIRST_CONTACT if ready.first_contact else None
        context = run_context(self.deps, ready, thorough=True, patterns=(str(topic),), label=label)
        context.load_topics()
        store, state, now_ms = self.deps.store, self.deps.state, ready.now.wall_ms
        return why(store, state, context, topic, message_id, now_ms, self.deps.history_days)

    def boundary(self) -> tuple[Claim | None, Boundary]:
        """Return the last boundary, and the limits of a present one.

        Raises:
            StoreError, StateError: the store or the state could not be read.
        """
        ready, state, lifetime = prepare(self.deps), self.deps.state, self.deps.terms.lifetime
        claim = claim_in_force(self.deps, ready)
        if barred := obstacles(self.deps, ready):
            return claim, Boundary.none(*barred)
        pointers = (record.pointer for record in ready.ids.open_ids())
        found = boundary.claim(state.evidence(), pointers, lifetime)
        refuted = rounds.refutation(state)
        if refuted is not None:
            found = replace(found, bound=None, obstacles=(refuted.message, *found.obstacles))
        return claim, replace(found, limits=tuple(map(self._with_region, found.limits)))

    def verify(self) -> Audit:
        """Read every transactional row, and prove the claim or refute it; one that is refuted is withdrawn.

        A pointer counts as invalid that is in the invalid list now, or was when it was last seen: an operator may
        have taken it off the list because of the claim.

        Raises:
            StoreError: the store could not be read, or the state not read or written.
        """
        found = feedback.audit(self.deps, prepare(self.deps), partial(heartbeat, self.deps))
        if found.refuted:
            rounds.refute(self.deps.state, found.refutation, self.deps.clock.now_ms())
        known = rounds.refutation(self.deps.state)
        found.withdrawn = known.message if known is not None else ""
        return found

    def transactions(self) -> TxState:
        """Return the snapshot a run would use now, or why it would use none."""
        return prepare(self.deps).tx

    def snapshot_figures(self, limit: int) -> dict[str, Any]:
        """That snapshot as JSON values, its longest lists cut to ``limit``; ``problem`` says why it is not used.

        Raises:
            NoSnapshot: there is none, and why.
        """
        tx = self.transactions()
        if tx.snapshot is None:
            raise NoSnapshot(f"There is no snapshot: {tx.message}")
        return {**snapshot_figures(tx.snapshot, tx.name, limit), "problem": tx.message or None}

    def restorable(self, folder: Path, request: Request) -> Restored:
        """What :meth:`~janitor.run.decisions.OperatorDecisions.restore` would do; raises as it does."""
        return self._restore(folder, replace(request, dry_run=True))

    def _restore(self, folder: Path, request: Request) -> Restored:
        deps = self.deps
        files, now_ms = archived.find_topic(folder, request.source), deps.clock.now_ms()
        transactions = TransactionView(prepare(deps).tx.usable, now_ms, deps.terms.lifetime.undecided_ms)
        told = partial(heartbeat, deps)
        return archive.restore(deps.store, deps.state, transactions, files, request, now_ms, told, deps.side)

    def _with_region(self, limit: Limit) -> Limit:
        return limit if limit.start is None else replace(limit, region=self.deps.store.region(limit.start))


def begin_plan(deps: Deps, ready: Prepared, patterns: tuple[str, ...], *, thorough: bool) -> passes.Pass:
    """Return a plan's pass that has read nothing yet."""
    label = Hold.FIRST_CONTACT if ready.first_contact else None
    current = passes.begin(
        deps, "plan", ready, run_context(deps, ready, thorough=thorough, patterns=patterns, label=label)
    )
    claim = claim_in_force(deps, ready)
    current.boundary = claim.bound if claim else None
    return current


def make_plan(deps: Deps, current: passes.Pass) -> Report:
    """Make the pass of a plan, which changes nothing.

    Raises:
        Halted: the process is stopping.
    """
    passes.load_topics(deps, current)
    current.add(sweep_store(passes.scope(deps, current), Preview(partial(stop_if_halted, deps), deps.observer)))
    if current.halted is not None:
        raise current.halted
    return passes.report(deps, current)


def stop_if_halted(deps: Deps) -> None:
    """Called between pages.

    Raises:
        Halted: the process is stopping.
    """
    if deps.halted():
        raise Halted("the janitor is stopping.", "Try again when it is back.")


def heartbeat(deps: Deps, rows: int) -> None:
    """Tell the observer that a read outside a pass has come so many rows further.

    Raises:
        Halted: the process is stopping.
    """
    deps.observer("read", None, rows)
    stop_if_halted(deps)
