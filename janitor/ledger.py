"""What one run takes, range by range, as ``janitor ledger`` shows it afterwards.

An entry speaks of one topic, generation, table, rule and policy, and says between which keys rows went and how many.
It is announced before the first of its rows goes (``State.intend``), so that the ranges of a run that dies are known as
well, and written with the rest of the run's memory when it ends. A batch of which nobody knows whether it went, because
the store failed on it, has an entry of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from janitor.policy import Rule
from janitor.report import DataTable
from janitor.state.base import LedgerEntry, State
from janitor.walk import Batch, times_of
from janitor.world import TopicWork
from tms_core.clock import Clock
from tms_core.rowkey import LONG_MAX, MessageKey, generation_prefix, time_prefix
from tms_core.tables.base import TxCell
from tms_core.topic import TopicId

#: How many entries are remembered at most, whatever ``history_days`` says: about 250 MB.
KEPT_ENTRIES = 1_000_000


class _Key(NamedTuple):
    topic: TopicId
    generation: int
    table: DataTable
    rule: Rule
    metadata_generation: int = 0
    ttl_seconds: int = 0
    cutoff_ms: int = 0


class Ledger:
    """The entries of one run.

    Args:
        state: where they are announced.
        clock: what they are dated by.
        run_id: whose they are.
        snapshot_timestamp_ms: of the transaction snapshot in use; None without one.
    """

    def __init__(self, state: State, clock: Clock, run_id: str, snapshot_timestamp_ms: int | None) -> None:
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._snapshot_timestamp_ms = snapshot_timestamp_ms
        self._entries: dict[_Key, LedgerEntry] = {}
        self._announced: dict[_Key, bytes] = {}
        self._begun: dict[tuple[_Key, bytes], Batch] = {}
        self._unknown: list[LedgerEntry] = []

    def announce(self, work: TopicWork, batch: Batch) -> None:
        """Called before a batch is deleted.

        Raises:
            StoreError: it could not be written down; nothing may be deleted then.
        """
        key = _key(work, batch)
        first = batch.keys[0]
        # Parts of a store are walked side by side, so that a batch may begin before the one that was announced.
        if first < self._announced.get(key, b"\xff"):
            entry = self._new(key, first, self._furthest(work, batch))
            self._state.intend(entry)
            self._announced[key] = first
            self._entries.setdefault(key, replace(entry, stop=first, rows=0))
        self._begun[key, first] = batch

    def deleted(self, work: TopicWork, batch: Batch) -> None:
        """Called when a batch was deleted."""
        key = _key(work, batch)
        del self._begun[key, batch.keys[0]]
        self._add(key, batch.keys, *times_of(batch))

    def inverted(self, work: TopicWork | None, key: MessageKey, cell: TxCell) -> None:
        """Called when a pointer was negated."""
        name = _Key(key.topic, key.generation, "message", Rule.INVALID_TRANSACTION, *_policy(work))
        if name not in self._entries:
            self._entries[name] = replace(self._new(name, cell.key, cell.key), rows=0)
        self._add(name, [cell.key], key.publish_ms, key.publish_ms)

    def take_in(self, entries: Iterable[LedgerEntry]) -> None:
        """Told of what others took for the same run; of those without a number of rows nobody knows what they took."""
        for entry in entries:
            if entry.rows is None or entry.oldest_ms is None or entry.newest_ms is None:
                self._unknown.append(entry)
                continue
            key = _key_of(entry)
            known = self._entries.setdefault(key, replace(entry, rows=0, oldest_ms=None, newest_ms=None))
            self._entries[key] = _joined(known, entry)

    def announced(self, entry: LedgerEntry) -> bool:
        """Whether it was here that an entry was announced."""
        return self._announced.get(_key_of(entry)) == entry.start

    def entries(self) -> list[LedgerEntry]:
        """What was taken so far."""
        taken = [entry for entry in self._entries.values() if entry.rows]
        begun = [self._new(key, b.keys[0], b.keys[-1] + b"\x00") for (key, _), b in self._begun.items()]
        return taken + begun + self._unknown

    def _new(self, key: _Key, start: bytes, stop: bytes) -> LedgerEntry:
        return LedgerEntry(
            run_id=self._run_id,
            at_ms=self._clock.now_ms(),
            topic=key.topic,
            generation=key.generation,
            table=key.table,
            rule=str(key.rule),
            start=start,
            stop=stop,
            rows=None,
            oldest_ms=None,
            newest_ms=None,
            metadata_generation=key.metadata_generation,
            ttl_seconds=key.ttl_seconds,
            cutoff_ms=key.cutoff_ms,
            snapshot_timestamp_ms=self._snapshot_timestamp_ms,
        )

    def _furthest(self, work: TopicWork, batch: Batch) -> bytes:
        """Where the deletes may come to."""
        prefix = work.topic.topic.prefix
        if batch.table == "message" and batch.rule is Rule.EXPIRED:
            return time_prefix(prefix, batch.generation, min(work.frontier.cutoff.ms, LONG_MAX))
        return generation_prefix(prefix, batch.generation + 1)

    def _add(self, key: _Key, keys: Sequence[bytes], oldest_ms: int, newest_ms: int) -> None:
        entry = self._entries[key]
        span = replace(entry, start=keys[0], stop=keys[-1] + b"\x00", oldest_ms=oldest_ms, newest_ms=newest_ms)
        self._entries[key] = _joined(entry, replace(span, rows=len(keys)))


def _joined(entry: LedgerEntry, more: LedgerEntry) -> LedgerEntry:
    """Both as one."""
    first = entry.oldest_ms is None or entry.newest_ms is None
    return replace(
        entry,
        start=min(entry.start, more.start),
        stop=max(entry.stop, more.stop),
        rows=(entry.rows or 0) + (more.rows or 0),
        oldest_ms=more.oldest_ms if first else min(entry.oldest_ms or 0, more.oldest_ms or 0),
        newest_ms=more.newest_ms if first else max(entry.newest_ms or 0, more.newest_ms or 0),
    )


def _key(work: TopicWork, batch: Batch) -> _Key:
    return _Key(work.topic.topic, batch.generation, batch.table, batch.rule, *_policy(work))


def _key_of(entry: LedgerEntry) -> _Key:
    policy = entry.metadata_generation, entry.ttl_seconds, entry.cutoff_ms
    return _Key(entry.topic, entry.generation, cast(DataTable, entry.table), Rule(entry.rule), *policy)


def _policy(work: TopicWork | None) -> tuple[int, int, int]:
    """Generation, ttl and cut-off; zeros for a topic without metadata, which has none."""
    return (work.topic.generation, work.topic.ttl_seconds, work.frontier.cutoff.ms) if work else (0, 0, 0)
