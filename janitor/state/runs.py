"""Runs, announcements and counters in the state.

A finished run is a row under its id. Two empty rows refer to it: one in the order of recording, and one by time, for
pruning. The order of recording determines the last run: after a wrong clock, an order by time would hide all later
runs. The few running runs are one value. Heartbeats, announcements and intermediate counters of a run are loose rows,
which are cheap and survive the death of the process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress, count, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from janitor.state.documents import Documents, Driver, after, newest_first, oldest_first, pack_value, parse_value
from janitor.state.records import CounterKey, LedgerEntry, Mode, RunRecord
from janitor.state.values import pack
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StateError

T = TypeVar("T")

#: Key prefixes: a finished run by its id; by number; by time; its report; a heartbeat by run; an announcement; the
#: counters of a running run.
RUN, RUN_BY_NUMBER, RUN_BY_TIME, REPORT, BEAT, INTENT, BOOKED = b"r", b"o", b"q", b"p", b"h", b"n", b"k"
#: The offset of the run's id in a key by number or by time.
_ID_AT = 17
_TOKEN_BYTES = 6


class _UnfinishedRun(NamedTuple):
    """An unfinished run; ``number`` counts runs in the order in which they started."""

    id: str
    mode: Mode
    started_ms: int
    heartbeat_ms: int | None
    number: int


#: The number of the next run, and the unfinished runs; a finished run and its number; counters.
_Unfinished: Any = tuple[int, list[_UnfinishedRun]]
_Finished = tuple[RunRecord, int]
_Sums = dict[CounterKey, float]


class RecordedRuns(Documents):
    """The runs in the state.

    Args:
        clock: the clock that orders announcements.
    """

    def __init__(self, driver: Driver, clock: Clock | None = None) -> None:
        super().__init__(driver)
        self._clock = clock or SystemClock()
        self._announced = count()

    def begin_run(self, run: RunRecord) -> None:
        """Save the start of a run.

        Raises:
            StateError: a run with this id exists.
        """

        def begin() -> None:
            number, going = self._unfinished()
            if run.id in going or self._row(_run_key(run.id)) is not None:
                raise StateError(f"{self.driver.name}: run {run.id} already exists.")
            if run.finished_ms is not None:
                self._put_finished(run, number)
            else:
                going[run.id] = _UnfinishedRun(run.id, run.mode, run.started_ms, run.heartbeat_ms, number)
            self._save_unfinished(number + 1, going)

        self._write(begin)

    def finish_run(self, run: RunRecord, report: object = None) -> None:
        """Save the result of a run with its numbers, and its report, if it has one.

        The recorded mode, start and last heartbeat stay.

        Raises:
            StateError: the run was not started.
        """

        def finish() -> None:
            number, going = self._unfinished()
            known, order = self._find_run(run.id, going)
            if known is None:
                raise StateError(f"{self.driver.name}: no run {run.id} was started.")
            ended = replace(run, mode=known.mode, started_ms=known.started_ms, heartbeat_ms=known.heartbeat_ms)
            self._put_finished(ended, order)
            if report is not None:
                self._put_row(REPORT + run.id.encode(), pack_value(pack(report)))
            if going.pop(run.id, None) is not None:
                self._require_changes().loose |= {_beat_key(run.id), _booked_key(run.id)}
                self._save_unfinished(number, going)

        self._write(finish)

    def runs(self, limit: int, before_ms: int | None = None, *, before_run: str | None = None) -> list[RunRecord]:
        """Return the last ``limit`` runs, the last recorded first, independent of the clock at their start.

        Args:
            before_ms: only runs that started before this time; None: all.
            before_run: only runs recorded before this run; None: all.
        """
        _, going = self._unfinished()
        stop = None if before_run is None else self._find_run(before_run, going)[1]
        begin = b"" if stop is None else RUN_BY_NUMBER + newest_first(stop - 1)
        keys = (key for key in self._keys(RUN_BY_NUMBER, begin) if before_ms is None or _start_ms(key) < before_ms)
        ids = [key[_ID_AT:].decode() for key in islice(keys, limit + len(going))]
        rows = self._rows_of([_run_key(run_id) for run_id in ids if run_id not in going])
        found = [parse_value(_Finished, key, row) for key, row in rows.items()] + [
            (run, number)
            for run, number in self._with_heartbeats(going)
            if (before_ms is None or run.started_ms < before_ms) and (stop is None or number < stop)
        ]
        found.sort(key=itemgetter(1), reverse=True)
        return [run for run, _ in found[:limit]]

    def run(self, run_id: str) -> RunRecord | None:
        """Return a run; None if it is unknown or deleted."""
        _, going = self._unfinished()
        return self._find_run(run_id, going)[0]

    def report(self, run_id: str, kind: type[T]) -> T | None:
        """Return the report of a run; None if it has no report.

        Args:
            kind: the type of reports.
        """
        key = REPORT + run_id.encode()
        row = self._row(key)
        return None if row is None else parse_value(kind, key, row)

    def unfinished_runs(self) -> list[RunRecord]:
        """Return unfinished runs, the first recorded first."""
        _, going = self._unfinished()
        return [run for run, _ in sorted(self._with_heartbeats(going), key=itemgetter(1))]

    def save_heartbeat(self, run_id: str, heartbeat_ms: int) -> None:
        """Save a heartbeat of a run; ignore an unknown or finished run."""
        _, going = self._unfinished()
        if run_id in going:
            self.driver.loose.put([(_beat_key(run_id), pack_value(heartbeat_ms))])

    def prune_runs(self, before_ms: int) -> int:
        """Delete runs that started before a time; return their number."""

        def prune() -> int:
            number, going = self._unfinished()
            lost = [run_id for run_id, run in going.items() if run.started_ms < before_ms]
            for run_id in lost:
                del going[run_id]
                self._require_changes().loose |= {_beat_key(run_id), _booked_key(run_id)}
            old = list(self._keys(RUN_BY_TIME, _first_older_key(before_ms)))
            for key in old:
                started, recorded, name = key[1:9], key[9:_ID_AT], key[_ID_AT:]
                for row in (key, RUN_BY_NUMBER + recorded + started + name, RUN + name, REPORT + name):
                    self._delete_row(row)
            self._save_unfinished(number, going)
            return len(lost) + len(old)

        return self._write(prune)

    def intend(self, entry: LedgerEntry) -> None:
        """Save the announcement of a run.

        This is cheap, because each topic has an announcement: see :class:`~janitor.state.documents.LooseRows`.
        """
        # Keys are unique in all processes.
        unique = next(self._announced).to_bytes(8, "big") + secrets.token_bytes(_TOKEN_BYTES)
        key = INTENT + oldest_first(self._clock.now_ms()) + unique
        self.driver.loose.put([(key, pack_value(entry))])

    def intents(self) -> list[LedgerEntry]:
        """Return the announcements, oldest first, without a truncated last announcement."""
        return [self._announcement(*row) for row in self.driver.loose.scan(INTENT, after(INTENT))]

    def clear_intents(self) -> None:
        """Delete announcements of finished runs, which are in the ledger."""
        announced = list(self.driver.loose.scan(INTENT, after(INTENT)))
        # Read the runs after the announcements: if the lease was lost, another process may announce for a new run.
        _, going = self._unfinished()
        # Without an unfinished run, skip the parsing: a damaged announcement must not block the next start.
        is_over = [not going or self._announcement(*row).run_id not in going for row in announced]
        self.driver.loose.delete(key for key, _ in compress(announced, is_over))

    def _announcement(self, key: bytes, value: bytes) -> LedgerEntry:
        try:
            entry: LedgerEntry = parse_value(LedgerEntry, key, value)
        except StateError as error:
            raise StateError(
                f"{error.message} It announces rows that a run may have deleted.",
                f"Stop the janitor and delete the row, which the ledger then lacks: {self.driver.loose.removal(key)}",
            ) from error
        return entry

    def counters(self) -> dict[CounterKey, float]:
        """Return all counters since the creation of this state, including running runs."""
        booked = self._booked_of(self._unfinished()[1])
        # Read counters and runs in one view, after the progress, so that a run that finishes in between counts once.
        saved, runs = self._read(lambda view: (view.value("counters"), view.value("runs")))
        sums = parse_value(_Sums, "counters", saved) if saved else {}
        going = {run.id for run in parse_value(_Unfinished, "runs", runs)[1]} if runs else set()
        for run_id in booked.keys() & going:
            for key, amount in booked[run_id].items():
                sums[key] = sums.get(key, 0.0) + amount
        return dict(sorted(sums.items()))

    def add_counters(self, amounts: Mapping[CounterKey, float]) -> None:
        """Add amounts to counters; a new counter starts at 0."""

        def add() -> None:
            sums = self._value(_Sums, "counters") or {}
            for key, amount in amounts.items():
                sums[key] = sums.get(key, 0.0) + amount
            self._save("counters", pack(sums) or None)

        self._write(add)

    def save_running_counters(self, run_id: str, amounts: Mapping[CounterKey, float]) -> None:
        """Replace the intermediate counters of a run; ignore an unknown or finished run.

        This is cheap, because it is not part of a transaction, and it survives the death of the process. The
        transaction that saves the result of the run adds the final amounts and deletes the intermediate counters.
        """
        _, going = self._unfinished()
        if run_id in going:
            self.driver.loose.put([(_booked_key(run_id), pack_value(pack(amounts)))])

    def running_counters(self, run_id: str) -> dict[CounterKey, float]:
        """Return the intermediate counters of a running run; empty for other runs."""
        _, going = self._unfinished()
        return self._booked_of([run_id]).get(run_id, {}) if run_id in going else {}

    def _booked_of(self, run_ids: Iterable[str]) -> dict[str, dict[CounterKey, float]]:
        keys = {_booked_key(run_id): run_id for run_id in run_ids}
        found = self.driver.loose.get_many(list(keys)) if keys else {}
        return {keys[key]: parse_value(_Sums, key, row) for key, row in found.items()}

    def _unfinished(self) -> tuple[int, dict[str, _UnfinishedRun]]:
        """Return the number of the next run, and the unfinished runs."""
        number, going = self._value(_Unfinished, "runs") or (1, [])
        return number, {run.id: run for run in going}

    def _save_unfinished(self, number: int, going: dict[str, _UnfinishedRun]) -> None:
        self._save("runs", (number, list(going.values())))

    def _with_heartbeats(self, going: dict[str, _UnfinishedRun]) -> list[tuple[RunRecord, int]]:
        beats = self.driver.loose.get_many([_beat_key(run_id) for run_id in going])
        found = []
        for run in going.values():
            beat = beats.get(key := _beat_key(run.id))
            heartbeat_ms = run.heartbeat_ms if beat is None else parse_value(int, key, beat)
            record = RunRecord(run.id, run.mode, run.started_ms, heartbeat_ms=heartbeat_ms)
            found.append((record, run.number))
        return found

    def _find_run(self, run_id: str, going: dict[str, _UnfinishedRun]) -> tuple[RunRecord | None, int]:
        """Return a run and its number."""
        if run_id in going:
            return self._with_heartbeats({run_id: going[run_id]})[0]
        key = _run_key(run_id)
        row = self._row(key)
        return (None, 0) if row is None else parse_value(_Finished, key, row)

    def _put_finished(self, run: RunRecord, number: int) -> None:
        self._put_row(_run_key(run.id), pack_value([pack(run), number]))
        started, recorded, name = newest_first(run.started_ms), newest_first(number), run.id.encode()
        self._put_row(RUN_BY_TIME + started + recorded + name, b"")
        self._put_row(RUN_BY_NUMBER + recorded + started + name, b"")


def _first_older_key(before_ms: int) -> bytes:
    """Return the first key of runs that started before a time."""
    return RUN_BY_TIME + newest_first(before_ms) + b"\xff" * 8


def _start_ms(key: bytes) -> int:
    """Return the start of a run from its key by number."""
    return 2**63 - 1 - int.from_bytes(key[9:_ID_AT], "big")


def _run_key(run_id: str) -> bytes:
    return RUN + run_id.encode()


def _booked_key(run_id: str) -> bytes:
    return BOOKED + run_id.encode()


def _beat_key(run_id: str) -> bytes:
    return BEAT + run_id.encode()
