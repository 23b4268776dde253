"""A run as the state records it: started, closed or recovered after its process died, with its counters and notes.

Counters and notes are made from the run's report and from nothing else (rule S15). Counters live in the state and not
in a process, so that they mean the same in a daemon, in a CronJob's runs and after a restart. Notes are small facts
that the status page and the metrics show between runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from janitor.report import DataTable, Entry, EntryKey, Mode, Report, held_before
from janitor.rules.policy import Hold, Rule
from janitor.run.deps import Deps
from janitor.run.passes import Pass, calls_made, new_id
from janitor.state.base import CounterKey, LedgerEntry, RunRecord, State
from janitor.state.records import Note
from janitor.state.topic_history import save_topics
from janitor.sweep.ledger import Sums, untold
from janitor.sweep.outcome import ledger_entries
from tms_core.clock import Clock
from tms_core.errors import Interrupted, Refused, StateError

#: Which table's rows are read in a phase of a pass.
_TABLE_OF_PHASE = {"message": "message", "invert": "message", "references": "message", "payload": "payload"}

#: The note that says when a daemon that only plans last looked at everything.
REHEARSED = Note.REHEARSED

#: How many topics' overdue rows are remembered, those with the most first; the totals are of these.
NAMED_OVERDUE = 20_000


def begin(deps: Deps, current: Pass) -> None:
    """Record the start of a run, after closing an unrecorded one of this process.

    That comes first, or its announcements would be cleared.
    """
    if (deps.lease is None or deps.lease.held) and deps.state.unfinished_runs():
        recover(deps)
    deps.state.begin_run(RunRecord(current.id, current.mode, current.started_ms, heartbeat_ms=current.started_ms))


def fail(state: State, clock: Clock, token_hex: Callable[[int], str], mode: Mode, error: Exception) -> None:
    """Record a run that failed before it started, so that status and history show it.

    Raises:
        StateError: the state could not be written.
    """
    now_ms = clock.now_ms()
    run_id = new_id(now_ms, token_hex)
    with state.transaction():
        state.begin_run(RunRecord(run_id, mode, now_ms))
        state.finish_run(run_id, now_ms, "failed", json.dumps({"error": str(error)}))
        state.add_counters(_results("failed", 1))


@contextmanager
def preparing(deps: Deps, mode: Mode) -> Iterator[None]:
    """Record a run that fails in the block, which prepares it."""
    try:
        yield
    except (Interrupted, Refused):
        raise
    except Exception as error:
        # Where the state has failed as well, the caller still gets the first error.
        with suppress(StateError):
            fail(deps.state, deps.clock, deps.token_hex, mode, error)
        raise


def close(deps: Deps, current: Pass, result: str, history: dict[str, Any], report: Report | None = None) -> None:
    """Record the result of a run; unless its lease was lost and the next holder has closed it already."""
    state = deps.state
    with state.transaction():
        known = state.run(current.id)
        if known is None or known.finished_ms is not None:
            return
        if report is None:
            _save_unreported(state, current, result)
        else:
            held = _save_reported(state, current, report, result, calls_made(current, deps.store))
            history = {**history, **held_before(held)}
        state.finish_run(current.id, deps.clock.now_ms(), result, json.dumps(history))
        state.add_ledger(_taken_entries(deps, current))
        if not current.ready.stopped:
            # A clock in doubt would forget what is not old.
            state.prune_runs(current.started_ms - deps.history_ms)
    if current.mode == "apply":
        state.clear_intents()


def recover(deps: Deps) -> list[str]:
    """Close the runs of a janitor that has died; result and errors as of :meth:`janitor.run.engine.Engine.recover`."""
    state, clock = deps.state, deps.clock
    with state.transaction():
        state.save_created_ms(clock.now_ms())
        lost = {run.id for run in state.unfinished_runs()}
        state.add_ledger(entry for entry in state.intents() if entry.run_id in lost)
        for run_id in lost:
            state.add_counters(state.booked(run_id))
            error = {"error": "the process ended before the run did"}
            state.finish_run(run_id, clock.now_ms(), "lost", json.dumps(error))
        state.add_counters(_results("lost", len(lost)))
    state.clear_intents()
    return sorted(lost)


def _results(result: str, runs: int) -> dict[CounterKey, float]:
    """Return the counter of runs with this result."""
    return {CounterKey("sweeps_total", (("result", result),)): float(runs)}


def _save_reported(
    state: State, current: Pass, report: Report, result: str, calls: Mapping[str, int]
) -> Sequence[dict[str, Any]]:
    """Add a finished run to counters and notes; call it inside the state's transaction.

    Args:
        calls: store operations of the run, by name.

    Returns:
        Return held rows that an earlier run counted and this one did not.
    """
    state.add_counters({**_results(result, 1), **_counters(current, report, calls)})
    state.save_note(Note.SNAPSHOT, _snapshot(current))
    if current.mode == "plan":
        _save_plan(state, current, report)
    if current.mode == "plan" or current.ready.stopped or current.halted is not None:
        return ()
    found = (work.topic for _, work in sorted(current.context.topics.items()))
    save_topics(state, found, current.ready.now.wall_ms)
    if result == "done":
        finished_ms = report.effective_now_ms
        state.save_note(Note.SUCCESS, {"message": finished_ms, "payload": finished_ms})
    if current.context.limits is not None:
        return ()  # a plan file says nothing of what else is due
    if report.thorough and not current.context.patterns:
        state.save_note(Note.KEPT, report.to_json()["totals"]["kept"])
    counted = [(key, entry) for key, entry in report.entries.items() if _is_overdue(key, entry)]
    named = {(key.topic.namespace, key.topic.topic) for key, _ in counted}
    known = _still_held(state.note(Note.OVERDUE) or [], current, named)
    state.save_note(Note.OVERDUE, [*known, *(_overdue_item(key, entry) for key, entry in _most(counted))])
    return known


def _save_plan(state: State, current: Pass, report: Report) -> None:
    """Save the plan of a daemon that only plans; all that is due in them is overdue."""
    if report.thorough:
        state.save_note(Note.KEPT, report.to_json()["totals"]["kept"])
        state.save_note(REHEARSED, current.ready.now.wall_ms)
    due = [(key, entry) for key, entry in report.entries.items() if entry.rows and key.held is not Hold.PROTECTED]
    state.save_note(Note.OVERDUE, [_overdue_item(key, entry) for key, entry in _most(due)])


def _counters(current: Pass, report: Report, calls: Mapping[str, int]) -> dict[CounterKey, float]:
    outcome = current.outcome
    amounts: Counter[CounterKey] = taken(report.entries) if report.mode == "apply" else Counter()
    for phase, rows in outcome.scanned.items():
        amounts[CounterKey("rows_scanned_total", (("table", _TABLE_OF_PHASE[phase]),))] += rows
    for (table, reason), times in outcome.failures.items():
        amounts[CounterKey("delete_errors_total", (("table", table), ("reason", reason)))] += times
    for call, times in calls.items():
        amounts[CounterKey("store_calls_total", (("call", call),))] += times
    for note in report.guards:
        amounts[CounterKey("guard_trips_total", (("guard", note.guard),))] += note.tripped
    if current.ready.tx.problem is not None:
        amounts[CounterKey("snapshot_errors_total", (("reason", str(current.ready.tx.problem)),))] += 1
    found = {key: float(amount) for key, amount in amounts.items() if amount}
    for phase, seconds in report.phase_seconds.items():
        found[CounterKey("sweep_phase_duration_seconds_sum", (("phase", phase),))] = seconds
        found[CounterKey("sweep_phase_duration_seconds_count", (("phase", phase),))] = 1.0
    return found


def taken(entries: Mapping[EntryKey, Entry]) -> Counter[CounterKey]:
    """Return counts of deleted and inverted rows; held rows are not counters."""
    amounts: Counter[CounterKey] = Counter()
    for key, entry in entries.items():
        if key.held is None:
            amounts.update(_taken(key.table, key.rule, entry.rows, entry.size_bytes))
    return amounts


def book(state: State, run_id: str, sums: Sums) -> None:
    """Update the counters with the progress of a run.

    Raises:
        StateError: the state could not be written.
    """
    amounts: Counter[CounterKey] = Counter()
    for (table, rule), (rows, size_bytes) in sums.items():
        amounts.update(_taken(table, rule, rows, size_bytes))
    state.book(run_id, {key: float(amount) for key, amount in amounts.items()})


def _save_unreported(state: State, current: Pass, result: str) -> None:
    """Add a run that failed as a whole, with its deletions; call it inside the state's transaction, before it stops."""
    known = {key: float(amount) for key, amount in taken(current.outcome.entries).items()}
    state.add_counters({**_results(result, 1), **(known or state.booked(current.id))})


def _taken(table: DataTable, rule: Rule, rows: int, size_bytes: int) -> dict[CounterKey, int]:
    if rule is Rule.INVALID_TRANSACTION:
        return {CounterKey("rows_inverted_total"): rows}
    labels = (("table", str(table)), ("rule", str(rule)))
    return {CounterKey("rows_deleted_total", labels): rows, CounterKey("bytes_deleted_total", labels): size_bytes}


def _snapshot(current: Pass) -> dict[str, Any]:
    tx = current.ready.tx
    snapshot = tx.snapshot
    return {
        "timestamp_ms": snapshot.timestamp_ms if snapshot else None,
        "source": tx.name,
        "problem": str(tx.problem) if tx.problem else "",
        "message": tx.message,
        "invalid": len(snapshot.invalid) if snapshot else 0,
        "in_progress": len(snapshot.in_progress) if snapshot else 0,
    }


def _still_held(
    known: list[dict[str, Any]], current: Pass, counted: Collection[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return overdue rows that an earlier run counted, if this one did not."""
    unseen = {
        (work.topic.topic.namespace, work.topic.topic.topic)
        for key, work in current.context.topics.items()
        if not (work.counts_held and _was_seen(current, key))
    }
    return [item for item in known if (item["tms_namespace"], item["topic"]) in unseen.difference(counted)]


def _was_seen(current: Pass, key: bytes) -> bool:
    """Return whether the run completed the topic, if it had any work there; paused ones only thorough passes
    read.
    """
    context = current.context
    left = key in current.outcome.failed or key in current.outcome.withheld or context.is_quarantined(key)
    return context.in_scope(key) and not left and (context.thorough or not context.is_paused(key))


def _is_overdue(key: EntryKey, entry: Entry) -> bool:
    return bool(entry.rows) and key.held not in (None, Hold.PROTECTED)


def _most(entries: list[tuple[EntryKey, Entry]]) -> list[tuple[EntryKey, Entry]]:
    return sorted(entries, key=lambda item: item[1].rows, reverse=True)[:NAMED_OVERDUE]


def _overdue_item(key: EntryKey, entry: Entry) -> dict[str, Any]:
    return {
        "tms_namespace": key.topic.namespace,
        "topic": key.topic.topic,
        "table": key.table,
        "rule": str(key.rule),
        "held": str(key.held) if key.held else "",
        "rows": entry.rows,
        "bytes": entry.size_bytes,
        "oldest_ms": entry.oldest_ms,
    }


def _taken_entries(deps: Deps, current: Pass) -> list[LedgerEntry]:
    """Yield the deletions of a run; announcements without an outcome have no number of rows."""
    if current.mode == "plan":
        return []
    usable, outcome = current.ready.tx.usable, current.outcome
    taken = ledger_entries(outcome, current.id, usable.timestamp_ms if usable else None)
    own = [entry for entry in deps.state.intents() if entry.run_id == current.id]
    return taken + untold(own, taken)
