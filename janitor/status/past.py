"""The history of a store and of one topic, for the status page, its API and ``janitor topic``.

It is read from the state on request, since it is long and rarely used. Nothing here reads the store.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.state.base import RunRecord, State
from janitor.state.topic_history import CHANGES, SIZES
from janitor.state.values import pack
from janitor.status.status import Status
from tms_core.topic import TopicId

#: The maximum number of ledger entries of a topic.
LEDGER_ENTRIES = 20
#: The number of runs in one read.
PAGE_RUNS = 500
#: The maximum number of failed runs that a range shows, and that are kept.
NAMED_BAD, MAX_BAD = 20, 200

_NAMED = ("id", "started_ms", "result", "error", "blocked_by")

_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000


class Period(NamedTuple):
    """A period up to now, in steps of equal length."""

    length_ms: int
    step_ms: int


#: The ranges of the page, by name.
RANGES = {
    "1h": Period(_HOUR_MS, _MINUTE_MS),
    "24h": Period(_DAY_MS, 30 * _MINUTE_MS),
    "7d": Period(7 * _DAY_MS, 4 * _HOUR_MS),
    "30d": Period(30 * _DAY_MS, _DAY_MS),
}


#: The numbers of a step: started runs, failed runs, and rows by rule.
_COLUMNS = ("runs", "bad", *map(str, Rule))


class RunHistory:
    """The deletions of runs in the last 30 days, by minute.

    The first request reads all runs of 30 days; later requests read new runs only.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._reset()

    def _reset(self) -> None:
        self._steps: dict[str, dict[int, Counter[str]]] = {"apply": {}, "plan": {}}
        self._bad: deque[RunRecord] = deque(maxlen=MAX_BAD)
        #: The last counted run, and the unfinished runs that were recorded before it.
        self._counted: str | None = None
        self._unfinished: list[str] = []

    def range(self, state: State, name: str, now_ms: int) -> dict[str, Any]:
        """Return a period in steps; if all its runs were plans, return the numbers of the plans.

        Args:
            name: a key of ``RANGES``.

        Returns:
            ``range``, ``mode``, ``step_ms``, ``steps`` (oldest first, without gaps) and ``bad_runs`` (newest first).

        Raises:
            KeyError: the range does not exist.
            StateError: the state cannot be read.
        """
        length_ms, step_ms = RANGES[name]
        first_ms = (now_ms - length_ms) // step_ms * step_ms + step_ms
        with self._lock:
            self._read(state, now_ms)
            every = {mode: self._sums(mode, first_ms, now_ms, step_ms) for mode in self._steps}
            bad = [run for run in reversed(self._bad) if first_ms <= run.started_ms <= now_ms][:NAMED_BAD]
        mode = "apply" if any(step["runs"] for step in every["apply"]) else "plan"
        named = [{name: getattr(run, name) for name in _NAMED} for run in bad]
        return {"range": name, "mode": mode, "step_ms": step_ms, "steps": every[mode], "bad_runs": named}

    def _sums(self, mode: str, first_ms: int, now_ms: int, step_ms: int) -> list[dict[str, int]]:
        found = {at_ms: Counter[str]() for at_ms in range(first_ms, now_ms + 1, step_ms)}
        for at_ms, step in self._steps[mode].items():
            if (start_ms := at_ms // step_ms * step_ms) in found:
                found[start_ms].update(step)
        return [{"at_ms": at_ms, **{name: sums[name] for name in _COLUMNS}} for at_ms, sums in found.items()]

    def _read(self, state: State, now_ms: int) -> None:
        """Add the runs that have finished since the last read, and remove old runs."""
        oldest_ms = now_ms - RANGES["30d"].length_ms
        found = list(_runs_since(state, oldest_ms, self._counted))
        if self._counted is not None and state.run(self._counted) is None:
            # The last counted run was pruned, so the read did not stop at it and returned counted runs again.
            self._reset()
            found = list(_runs_since(state, oldest_ms, None))
        newest = next((number for number, run in enumerate(found) if run.finished_ms is not None), len(found))
        known = [run for run in map(state.run, self._unfinished) if run is not None]
        runs = [*known, *reversed(found[newest:])]
        self._unfinished = [run.id for run in runs if run.finished_ms is None]
        self._counted = found[newest].id if found[newest:] else self._counted
        for run in runs:
            if run.finished_ms is None:
                continue
            at_ms = run.started_ms // _MINUTE_MS * _MINUTE_MS
            rows = {str(rule): getattr(run, str(rule)) for rule in Rule}
            self._steps[run.mode].setdefault(at_ms, Counter()).update(rows, runs=1, bad=int(run.is_bad))
            if run.is_bad:
                self._bad.append(run)
        for steps in self._steps.values():
            for at_ms in [at_ms for at_ms in steps if at_ms < oldest_ms]:
                del steps[at_ms]


def _runs_since(state: State, from_ms: int, counted: str | None) -> Iterator[RunRecord]:
    """Yield runs, the last recorded first.

    Args:
        from_ms: stop after a page of runs that all started before this time.
        counted: stop at this run; None before the first read.
    """
    before_run = None
    while page := state.runs(PAGE_RUNS, before_run=before_run):
        for run in page:
            if run.id == counted:
                return
            if run.started_ms >= from_ms:
                yield run
        if len(page) < PAGE_RUNS or all(run.started_ms < from_ms for run in page):
            return
        before_run = page[-1].id


def runs_between(state: State, limit: int, from_ms: int | None = None, to_ms: int | None = None) -> list[RunRecord]:
    """Return the last ``limit`` runs that started in a half-open period, the last recorded first.

    Args:
        from_ms, to_ms: None: no bound.

    Raises:
        StateError: the state cannot be read.
    """
    return [run for run in state.runs(limit, to_ms) if from_ms is None or run.started_ms >= from_ms]


def run_detail(state: State, run_id: str) -> dict[str, Any] | None:
    """Return one run with its report; None: it is unknown, or was forgotten.

    Raises:
        StateError: the state cannot be read.
    """
    run = state.run(run_id)
    if run is None:
        return None
    return {**pack(run), "report": pack(state.report(run_id, Report))}


def topic_detail(state: State, status: Status, topic: TopicId) -> dict[str, Any] | None:
    """Return all facts about one topic; None if the janitor does not know the topic.

    Args:
        status: the last status.

    Raises:
        StateError: the state cannot be read.
    """
    name = str(topic)
    figures = next((one for one in status.topics if one.name == name), None)
    if figures is None:
        return None
    # The status may be a minute old, so use a newer count, which the sizes already contain.
    count = state.counts().get(topic)
    if count is not None and (figures.counted_ms or 0) < count.counted_ms:
        figures = replace(figures, **pack(count))
    hold = next((one for one in status.held if one.topic == name), None)
    quarantined = next((one for one in status.quarantined if one.topic == name), None)
    return {
        "now_ms": status.now_ms,
        "figures": pack(figures),
        "next_due_ms": None
        if figures.oldest_ms is None or figures.generation < 0
        else figures.oldest_ms + figures.ttl_seconds * 1000 + 1,
        "ahead": any(one.topic == name for one in status.ahead),
        "held": pack(hold),
        "quarantined": pack(quarantined),
        "consumers": [pack(one) for one in status.consumers if f"{one.tms_namespace}:{one.topic}" == name],
        "adopted_ms": status.adopted_ms,
        "changes": [change._asdict() for change in reversed(CHANGES.read(state).get(name, []))],
        "sizes": [size._asdict() for size in SIZES.read(state).get(name, [])],
        "ledger": pack(state.ledger(LEDGER_ENTRIES, topic=topic)),
    }
