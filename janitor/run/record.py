"""The record of a run in the state: started, closed, or recovered after its process died, with its counters and notes.

Counters and notes derive from the run's report alone (invariant S15). The state stores the counters, so that they mean
the same in a daemon, in the runs of a CronJob and after a restart. Notes are small facts that the status page and the
metrics show between runs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock

from janitor.report import HELD, DataTable, Entry, Report, largest
from janitor.rules.policy import Hold, Rule
from janitor.run.prepare import Deps, new_id
from janitor.state.base import CounterKey, LedgerEntry, RunRecord, State
from janitor.state.figures import SNAPSHOT, SnapshotRead
from janitor.state.records import Mode, Note
from janitor.state.topic_history import save_topics
from janitor.sweep.findings import DeletionCount
from janitor.sweep.outcome import Outcome, open_announcements
from janitor.sweep.run import Run
from tms_core.clock import Clock
from tms_core.errors import Interrupted, Refused, StateError
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)

#: The table that a phase of a pass reads.
_TABLE_OF_PHASE = {"message": "message", "invert": "message", "references": "message", "payload": "payload"}

#: The note with the time of the last full plan of a daemon that only makes plans.
REHEARSED = Note.REHEARSED

#: The interval at which the counters of a running run are saved, in milliseconds of monotonic time.
SAVE_COUNTERS_MS = 1_000

#: The maximum number of saved entries with overdue rows, largest first; totals are sums of these entries.
NAMED_OVERDUE = 20_000


def start(deps: Deps, run: Run) -> None:
    """Record the start of a run; first close unfinished runs of this process, which deletes all announcements."""
    if (deps.lease is None or deps.lease.held) and deps.state.unfinished_runs():
        recover(deps)
    deps.state.begin_run(run.record)


def fail(state: State, clock: Clock, token_hex: Callable[[int], str], mode: Mode, error: Exception) -> None:
    """Record a run that failed before it started, so that status and history show it.

    Raises:
        StateError: the state could not be written.
    """
    now_ms = clock.now_ms()
    run = RunRecord(new_id(now_ms, token_hex), mode, now_ms)
    with state.transaction():
        state.begin_run(run)
        state.finish_run(replace(run, finished_ms=now_ms, result="failed", error=str(error)))
        state.add_counters(_results("failed", 1))


@contextmanager
def record_failed_preparation(deps: Deps, mode: Mode) -> Iterator[None]:
    """Record a failed run if its preparation in the block fails."""
    try:
        yield
    except (Interrupted, Refused):
        raise
    except Exception as error:
        # If the state fails too, raise the first error.
        with suppress(StateError):
            fail(deps.state, deps.clock, deps.token_hex, mode, error)
        raise


def close(deps: Deps, run: Run, outcome: Outcome, result: str, report: Report | None = None, error: str = "") -> None:
    """Record the result of a run, unless the next holder of its lease has already closed it."""
    state = deps.state
    ended = replace(run.record, finished_ms=deps.clock.now_ms(), result=result, error=error)
    with state.transaction():
        known = state.run(run.id)
        # S10: the next holder has closed this run as lost, and counted its deletions.
        if known is None or known.finished_ms is not None:
            return
        if report is None:
            _save_unreported(state, outcome, result)
            state.finish_run(ended)
        else:
            earlier_entries = _save_reported(state, run, outcome, report, result)
            state.finish_run(*report.to_history(ended, earlier_entries))
        state.add_ledger(_ledger_entries(state, run, outcome))
        if not run.ready.is_blocked:
            # If a guard blocks the run, the clock may be wrong, and the history may not be as old as it looks.
            state.prune_runs(run.record.started_ms - deps.terms.history_ms)
    # Delete announcements after the commit, when the ledger has their ranges.
    if run.mode == "apply":
        state.clear_intents()


def recover(deps: Deps) -> list[str]:
    """Close the runs of a janitor that died; result as :meth:`janitor.run.engine.Engine.recover`."""
    state, clock = deps.state, deps.clock
    with state.transaction():
        state.save_created_ms(clock.now_ms())
        lost = {item.id: item for item in state.unfinished_runs()}
        # Skip other runs: announcements of a closed run may remain if its process died before it deleted them.
        state.add_ledger(entry for entry in (state.intents() if lost else ()) if entry.run_id in lost)
        for run_id, run in lost.items():
            state.add_counters(state.running_counters(run_id))
            error = "the process died during the run"
            state.finish_run(replace(run, finished_ms=clock.now_ms(), result="lost", error=error))
        state.add_counters(_results("lost", len(lost)))
    # Delete announcements last: until the commit they are the only record of the deletions of lost runs.
    state.clear_intents()
    return sorted(lost)


def _results(result: str, runs: int) -> dict[CounterKey, float]:
    """Return the increment of the counter of runs with this result."""
    return {CounterKey("sweeps_total", (("result", result),)): float(runs)}


def _save_reported(state: State, run: Run, outcome: Outcome, report: Report, result: str) -> Sequence[Entry]:
    """Add a finished run to counters and notes; call this inside the state's transaction.

    Returns:
        Held rows that an earlier run counted and this run did not count again.
    """
    state.add_counters({**_results(result, 1), **_counters(run, outcome, report)})
    SNAPSHOT.save(state, _snapshot(run))
    if run.mode == "plan":
        _save_plan(state, run, report)
    if run.mode == "plan" or run.ready.is_blocked or outcome.interruption is not None:
        return ()
    found = (work.topic for _, work in run.known())
    save_topics(state, found, run.ready.now.wall_ms)
    if result == "done":
        finished_ms = report.effective_now_ms
        state.save_note(Note.SUCCESS, {"message": finished_ms, "payload": finished_ms})
    if run.limits is not None:
        return ()  # a plan file does not cover all due rows
    if report.full and not run.patterns:
        state.save_note(Note.KEPT, report.totals.kept)
    counted = [entry for entry in report.topics if entry.held not in (None, Hold.PROTECTED)]
    known = _still_held(HELD.read(state), run, outcome, {entry.topic for entry in counted})
    HELD.save(state, [*known, *_overdue(counted)])
    return known


def _save_plan(state: State, run: Run, report: Report) -> None:
    """Save the plan of a daemon that only makes plans; all due rows are overdue."""
    if report.full:
        state.save_note(Note.KEPT, report.totals.kept)
        state.save_note(REHEARSED, run.ready.now.wall_ms)
    HELD.save(state, _overdue([entry for entry in report.topics if entry.held is not Hold.PROTECTED]))


def _overdue(entries: Sequence[Entry]) -> list[Entry]:
    return [replace(entry, sample_keys=[]) for entry in largest(entries, NAMED_OVERDUE)]


def _counters(run: Run, outcome: Outcome, report: Report) -> dict[CounterKey, float]:
    amounts: Counter[CounterKey] = count_changes(report.topics) if report.mode == "apply" else Counter()
    for phase, rows in outcome.scanned.items():
        amounts[CounterKey("rows_scanned_total", (("table", _TABLE_OF_PHASE[phase]),))] += rows
    for (table, reason), times in outcome.failures.items():
        amounts[CounterKey("delete_errors_total", (("table", table), ("reason", reason)))] += times
    for call, times in outcome.calls.items():
        amounts[CounterKey("store_calls_total", (("call", call),))] += times
    for note in report.guards:
        amounts[CounterKey("guard_trips_total", (("guard", note.guard),))] += note.tripped
    if run.ready.tx.problem is not None:
        amounts[CounterKey("snapshot_errors_total", (("reason", str(run.ready.tx.problem)),))] += 1
    found = {key: float(amount) for key, amount in amounts.items() if amount}
    for phase, seconds in report.phase_seconds.items():
        found[CounterKey("sweep_phase_duration_seconds_sum", (("phase", phase),))] = seconds
        found[CounterKey("sweep_phase_duration_seconds_count", (("phase", phase),))] = 1.0
    return found


def count_changes(entries: Iterable[Entry]) -> Counter[CounterKey]:
    """Return counts of deleted and inverted rows; held rows are not counted."""
    amounts: Counter[CounterKey] = Counter()
    for entry in entries:
        if entry.held is None:
            amounts.update(_change_amounts(entry.table, entry.rule, entry.rows, entry.bytes))
    return amounts


class RunningCounters:
    """The counters of a running run, saved about once a second. Threads may share them.

    Therefore metrics change during a run, and a recovery counts the deletions of a killed run. A failure to save the
    counters does not stop the run (invariant S15).
    """

    def __init__(self, state: State, clock: Clock, run_id: str) -> None:
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._amounts: Counter[CounterKey] = Counter()
        self._saved_ms = clock.monotonic_ms()
        self._failed = False
        self._lock = Lock()

    def add(self, deletions: DeletionCount) -> None:
        """Add deletions, and save the counters if a save is due."""
        with self._lock:
            self._amounts.update(_change_amounts(*deletions))
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._saved_ms < SAVE_COUNTERS_MS:
                return
            self._saved_ms = now_ms
            try:
                self._state.save_running_counters(
                    self._run_id, {key: float(amount) for key, amount in self._amounts.items()}
                )
            except StateError as error:
                if not self._failed:
                    logger.warning(
                        "the metrics show the counters of this run only after the run, because they could not be "
                        "saved: %s",
                        error,
                    )
                self._failed = True


def _save_unreported(state: State, outcome: Outcome, result: str) -> None:
    """Add a failed run and its deletions to the counters; call this inside the state's transaction."""
    known = {key: float(amount) for key, amount in count_changes(outcome.entries.values()).items()}
    state.add_counters({**_results(result, 1), **known})


def _change_amounts(table: DataTable, rule: Rule, rows: int, size_bytes: int) -> dict[CounterKey, int]:
    if rule is Rule.INVALID_TRANSACTION:
        return {CounterKey("rows_inverted_total"): rows}
    labels = (("table", str(table)), ("rule", str(rule)))
    return {CounterKey("rows_deleted_total", labels): rows, CounterKey("bytes_deleted_total", labels): size_bytes}


def _snapshot(run: Run) -> SnapshotRead:
    tx = run.ready.tx
    snapshot = tx.snapshot
    return SnapshotRead(
        timestamp_ms=snapshot.timestamp_ms if snapshot else None,
        source=tx.name,
        problem=str(tx.problem) if tx.problem else "",
        message=tx.message,
        invalid=len(snapshot.invalid) if snapshot else 0,
        in_progress=len(snapshot.in_progress) if snapshot else 0,
    )


def _still_held(known: Sequence[Entry], run: Run, outcome: Outcome, counted: Collection[TopicId]) -> list[Entry]:
    """Return entries with overdue rows that an earlier run counted and this run did not."""
    uncounted = {
        work.topic.topic
        for key, work in run.topics.items()
        if not (work.counts_held and _is_processed(run, outcome, key))
    }
    return [item for item in known if item.topic in uncounted.difference(counted)]


def _is_processed(run: Run, outcome: Outcome, key: bytes) -> bool:
    """Return whether the run processed the whole topic; paused topics count only in full passes, which read them."""
    is_unprocessed = key in outcome.failed or key in outcome.withheld or run.is_quarantined(key)
    return run.in_scope(key) and not is_unprocessed and (run.full or not run.is_paused(key))


def _ledger_entries(state: State, run: Run, outcome: Outcome) -> list[LedgerEntry]:
    """Return the ledger entries of a run; announcements without a result have no number of rows."""
    if run.mode == "plan":
        return []
    entries = [*outcome.deletions.values(), *outcome.unsure]
    own = [entry for entry in state.intents() if entry.run_id == run.id]
    return entries + open_announcements(own, entries)
