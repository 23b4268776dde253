"""What the state's file keeps of the past: runs, the ledger of what they took, counters, counts of the queues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from janitor.state.base import CounterKey, LedgerEntry, RunRecord, State, TopicCount
from janitor.state.sqlite.file import SqliteFile
from tms_core.errors import StateError
from tms_core.topic import TopicId

_OF_ALL = "SELECT * FROM ledger ORDER BY number DESC"
_OF_RUN = "SELECT * FROM ledger WHERE run_id = ? ORDER BY number DESC"
_OF_TOPIC = "SELECT * FROM ledger WHERE namespace = ? AND topic = ? ORDER BY number DESC"
_OF_KEY = "SELECT * FROM ledger WHERE namespace = ? AND topic = ? AND start <= ? AND ? < stop ORDER BY number DESC"
#: By their place and not by their number: where the clock was set back, entries have gone from the middle.
_FORGET_SURPLUS = """
    DELETE FROM ledger WHERE number <= (SELECT number FROM ledger ORDER BY number DESC LIMIT 1 OFFSET ?)"""
_ADD_COUNTER = """
    INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (name, labels) DO UPDATE SET value = value + excluded.value"""

#: After every moment.
_FOREVER_MS = 2**63 - 1
#: A topic takes two columns.
_ENTRY_COLUMNS = len(fields(LedgerEntry)) + 1


class SqliteHistory(SqliteFile, State):
    """The part of the state that is about the past."""

    def begin_run(self, run: RunRecord) -> None:
        self._write(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(run.id, run.mode, run.started_ms, run.finished_ms, run.result, run.report, run.heartbeat_ms)],
        )

    def finish_run(self, run_id: str, finished_ms: int, result: str, report: str) -> None:
        changed = self._write(
            "UPDATE runs SET finished_ms = ?, result = ?, report = ? WHERE id = ?",
            [(finished_ms, result, report, run_id)],
        )
        if not changed:
            raise StateError(f"{self._where}: no run {run_id} began here.")

    def runs(self, limit: int, before_ms: int | None = None) -> list[RunRecord]:
        rows = self._rows(
            "SELECT * FROM runs WHERE started_ms < ? ORDER BY started_ms DESC, rowid DESC LIMIT ?",
            (_FOREVER_MS if before_ms is None else before_ms, limit),
        )
        return [RunRecord(*row) for row in rows]

    def run(self, run_id: str) -> RunRecord | None:
        rows = self._rows("SELECT * FROM runs WHERE id = ?", (run_id,))
        return RunRecord(*rows[0]) if rows else None

    def unfinished_runs(self) -> list[RunRecord]:
        rows = self._rows("SELECT * FROM runs WHERE finished_ms IS NULL ORDER BY started_ms, rowid")
        return [RunRecord(*row) for row in rows]

    def beat(self, run_id: str, heartbeat_ms: int) -> None:
        self._write("UPDATE runs SET heartbeat_ms = ? WHERE id = ? AND finished_ms IS NULL", [(heartbeat_ms, run_id)])

    def prune_runs(self, before_ms: int) -> int:
        return self._write("DELETE FROM runs WHERE started_ms < ?", [(before_ms,)])

    def created_ms(self) -> int | None:
        row = self._one("SELECT created_ms FROM created")
        return row[0] if row else None

    def save_created_ms(self, created_ms: int) -> None:
        self._write("INSERT OR IGNORE INTO created VALUES (1, ?)", [(created_ms,)])

    def add_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        self._write(
            "INSERT INTO ledger VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_entry_row, entries)
        )

    def ledger(
        self,
        limit: int,
        *,
        topic: TopicId | None = None,
        run_id: str | None = None,
        key: bytes | None = None,
        patterns: Sequence[str] = (),
    ) -> list[LedgerEntry]:
        query: tuple[str, tuple[object, ...]] = (_OF_ALL, ())
        if run_id is not None:
            query = _OF_RUN, (run_id,)
        elif topic is not None:
            name = topic.namespace, topic.topic
            query = (_OF_TOPIC, name) if key is None else (_OF_KEY, (*name, key, key))
        with self._lock, self._border(), closing(self._connection.execute(*query)) as rows:
            # Row by row: the ledger may hold far more entries than fit one of the patterns.
            fitting = (row for row in rows if not patterns or _fits(f"{row[3]}:{row[4]}", patterns))
            return [_entry(*row) for _, *row in islice(fitting, limit)]

    def ledger_generations(self, topic: TopicId) -> list[int]:
        query = "SELECT DISTINCT generation FROM ledger WHERE namespace = ? AND topic = ? ORDER BY generation"
        return [generation for (generation,) in self._rows(query, (topic.namespace, topic.topic))]

    def ledger_since_ms(self) -> int | None:
        row = self._one("SELECT number, at_ms FROM ledger ORDER BY number LIMIT 1")
        return row[1] if row and row[0] > 1 else None

    def prune_ledger(self, before_ms: int, keep: int) -> int:
        with self.transaction():
            old = self._write("DELETE FROM ledger WHERE at_ms < ?", [(before_ms,)])
            return old + self._write(_FORGET_SURPLUS, [(keep,)])

    def intend(self, entry: LedgerEntry) -> None:
        with self._lock:
            self._intents.append(_entry_row(entry))

    def intents(self) -> list[LedgerEntry]:
        with self._lock:
            rows = self._intents.read()
        # A row of other columns was left by another version.
        return [_entry(*row) for row in rows if len(row) == _ENTRY_COLUMNS]

    def clear_intents(self) -> None:
        with self._lock:
            self._intents.clear()

    def counters(self) -> dict[CounterKey, float]:
        # Read before the rest: a run that ends meanwhile is then counted once.
        booked = self._read_booked()
        with self._view():
            rows = self._rows("SELECT name, labels, value FROM counters")
            going = {run.id for run in self.unfinished_runs()}
        sums = {CounterKey(name, _labels(labels)): value for name, labels, value in rows}
        for run_id, amounts in booked.items():
            for key, amount in amounts.items() if run_id in going else ():
                sums[key] = sums.get(key, 0.0) + amount
        return dict(sorted(sums.items()))

    def book(self, run_id: str, amounts: Mapping[CounterKey, float]) -> None:
        with self._lock:
            if any(run.id == run_id for run in self.unfinished_runs()):
                self._booked.write([run_id, [[key.name, key.labels, amount] for key, amount in amounts.items()]])

    def booked(self, run_id: str) -> dict[CounterKey, float]:
        going = any(run.id == run_id for run in self.unfinished_runs())
        return self._read_booked().get(run_id, {}) if going else {}

    def _read_booked(self) -> dict[str, dict[CounterKey, float]]:
        """What was booked last, by run: only one writes at a time."""
        with self._lock:
            found = self._booked.read()
        try:
            run_id, rows = found
            return {run_id: {CounterKey(name, tuple(map(tuple, labels))): float(n) for name, labels, n in rows}}
        except (TypeError, ValueError):
            return {}

    def add_counters(self, amounts: Mapping[CounterKey, float]) -> None:
        self._write(
            _ADD_COUNTER,
            ((key.name, json.dumps(key.labels), amount) for key, amount in amounts.items()),
        )

    def counts(self) -> dict[TopicId, TopicCount]:
        rows = self._rows(
            "SELECT namespace, topic, messages, size_bytes, oldest_ms, newest_ms, counted_ms FROM counts"
            " ORDER BY namespace, topic"
        )
        return {TopicId(namespace, topic): TopicCount(*figures) for namespace, topic, *figures in rows}

    def save_counts(self, changed: Mapping[TopicId, TopicCount | None]) -> None:
        with self.transaction():
            self._write(
                "DELETE FROM counts WHERE namespace = ? AND topic = ?",
                ((topic.namespace, topic.topic) for topic in changed),
            )
            self._write(
                "INSERT INTO counts VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (topic.namespace, topic.topic, c.messages, c.size_bytes, c.oldest_ms, c.newest_ms, c.counted_ms)
                    for topic, c in changed.items()
                    if c is not None
                ),
            )

    def note(self, name: str) -> Any:
        rows = self._rows("SELECT value FROM notes WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def save_note(self, name: str, value: Any) -> None:
        if value is None:
            self._write("DELETE FROM notes WHERE name = ?", [(name,)])
        else:
            self._write("INSERT OR REPLACE INTO notes VALUES (?, ?)", [(name, json.dumps(value))])


def _entry_row(entry: LedgerEntry) -> tuple[Any, ...]:
    return (
        entry.run_id,
        entry.at_ms,
        entry.topic.namespace,
        entry.topic.topic,
        entry.generation,
        entry.table,
        entry.rule,
        entry.start,
        entry.stop,
        entry.rows,
        entry.oldest_ms,
        entry.newest_ms,
        entry.metadata_generation,
        entry.ttl_seconds,
        entry.cutoff_ms,
        entry.snapshot_timestamp_ms,
    )


def _entry(*columns: Any) -> LedgerEntry:
    run_id, at_ms, namespace, topic, *rest = columns
    return LedgerEntry(run_id, at_ms, TopicId(namespace, topic), *rest)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in json.loads(text))
