"""A run as the state records it: begun, closed, or recovered after its process died."""

from __future__ import annotations

import json
from typing import Any

from janitor.report import Report, held_before
from janitor.run import counters as figures
from janitor.run.deps import Deps
from janitor.run.passes import Pass, calls_made
from janitor.state.base import LedgerEntry, RunRecord
from janitor.sweep.outcome import ledger_entries, untold


def begin(deps: Deps, current: Pass) -> None:
    """Record that a run has begun, after closing one of this process whose end could not be written.

    That comes first, or its announcements would be cleared.
    """
    if (deps.lease is None or deps.lease.held) and deps.state.unfinished_runs():
        recover(deps)
    deps.state.begin_run(RunRecord(current.id, current.mode, current.started_ms, heartbeat_ms=current.started_ms))


def close(deps: Deps, current: Pass, result: str, history: dict[str, Any], report: Report | None = None) -> None:
    """Record how a run ended; unless its lease was lost and the next holder has closed it already."""
    state = deps.state
    with state.transaction():
        known = state.run(current.id)
        if known is None or known.finished_ms is not None:
            return
        if report is None:
            figures.save_unreported(state, current, result)
        if report is not None:
            held = figures.save(state, current, report, result, calls_made(current, deps.store))
            history = {**history, **held_before(held)}
        state.finish_run(current.id, deps.clock.now_ms(), result, json.dumps(history))
        state.add_ledger(_ledger_entries(deps, current))
        if not current.ready.stopped:
            # A clock in doubt would forget what is not old.
            state.prune_runs(current.started_ms - deps.history_ms)
    if current.mode == "apply":
        state.clear_intents()


def recover(deps: Deps) -> list[str]:
    """Close the runs of a janitor that has died; result and errors as of :meth:`janitor.run.runs.Runs.recover`."""
    state, clock = deps.state, deps.clock
    with state.transaction():
        state.save_created_ms(clock.now_ms())
        lost = {run.id for run in state.unfinished_runs()}
        state.add_ledger(entry for entry in state.intents() if entry.run_id in lost)
        for run_id in lost:
            state.add_counters(state.booked(run_id))
            error = {"error": "the process ended before the run did"}
            state.finish_run(run_id, clock.now_ms(), "lost", json.dumps(error))
        state.add_counters(figures.results("lost", len(lost)))
    state.clear_intents()
    return sorted(lost)


def _ledger_entries(deps: Deps, current: Pass) -> list[LedgerEntry]:
    """What a run took; what it announced and its outcome does not tell of goes in without a number of rows."""
    if current.mode == "plan":
        return []
    usable, outcome = current.ready.tx.usable, current.outcome
    taken = ledger_entries(outcome, current.id, usable.timestamp_ms if usable else None)
    own = [entry for entry in deps.state.intents() if entry.run_id == current.id]
    return taken + untold(own, taken)
