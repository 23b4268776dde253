"""The selection of rows for a query, which skips parts of a table.

It combines options and pushed filters. Spark evaluates its filters again, so a filter that is not used here only costs
additional reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from janitor.report import DataTable
from janitor.rules.ranges import topic_stop
from janitor.spark.columns import Columns, Flags
from tms_core.rowkey import LONG_MAX, NEGATIVE, MessageKey, generation_prefix, stop_key, time_prefix, topic_prefix
from tms_core.tables.base import ALL_KEYS, KEYS, KeyRange, KeyReads
from tms_core.topic import WILDCARDS, TopicId

#: The maximum number of keys in one read of the search for ranges.
_MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class RowSelection:
    """A selection of rows of one table.

    Attributes:
        table: the table.
        patterns: shell patterns of topics; empty for all rows, including rows without a topic.
        namespaces, names: the exact namespaces and names of topics; None for all.
        from_ms, to_ms: the half-open interval of the rows' times (invariant S1); None for no limit.
        salts: the salts; None for all.
    """

    table: DataTable
    patterns: tuple[str, ...] = ()
    namespaces: frozenset[str] | None = None
    names: frozenset[str] | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    salts: frozenset[int] | None = None

    @property
    def is_recognized_only(self) -> bool:
        """Return whether to skip unrecognized keys, because they have neither topic nor time."""
        return self.names_topics or self.from_ms is not None or self.to_ms is not None

    @property
    def names_topics(self) -> bool:
        return bool(self.patterns) or self.namespaces is not None or self.names is not None

    def wants(self, topic: TopicId) -> bool:
        """Return whether rows of the topic are selected."""
        if self.namespaces is not None and topic.namespace not in self.namespaces:
            return False
        if self.names is not None and topic.topic not in self.names:
            return False
        return not self.patterns or topic.matches(self.patterns)

    def ranges(self) -> list[KeyRange]:
        """Return the ranges of possible keys, sorted and disjoint."""
        starts = {_literal(pattern) for pattern in self.patterns}
        if not starts and self.namespaces is not None:
            starts = {f"{namespace}:".encode() for namespace in self.namespaces}
            if self.names is not None:
                starts = {start + f"{name}:".encode() for start in starts for name in self.names}
        if not starts and not self.names_topics:
            return [ALL_KEYS]
        found: list[KeyRange] = []
        for start in sorted(starts or {b""}):
            if not found or not start.startswith(found[-1].start):
                found.append(KeyRange(start, stop_key(start)))
        return found

    def mask(self, rows: Columns) -> Flags:
        """Return flags of the selected rows of a page."""
        keep = np.ones(len(rows.topic), dtype=np.bool_)
        if self.is_recognized_only:
            keep &= rows.topic >= 0
        if self.names_topics:
            keep &= np.array([*map(self.wants, rows.topics), False], dtype=np.bool_)[rows.topic]
        if self.from_ms is not None:
            keep &= rows.time_ms >= self.from_ms
        if self.to_ms is not None:
            keep &= rows.time_ms < self.to_ms
        return keep

    def find_next_key(self, key: bytes) -> bytes | None:
        """Return the next key to read after a key, if the following rows are not selected; None for the next row."""
        if not self.is_recognized_only:
            return None
        prefix = topic_prefix(key)
        if prefix is None:
            return None
        topic = TopicId.from_prefix(prefix)
        if topic is not None and not self.wants(topic):
            return topic_stop(prefix)
        # Payload rows sort by transaction, which does not determine their times.
        parsed = MessageKey.parse(key) if self.table == "message" else None
        if parsed is None or parsed.publish_ms < 0:
            return None
        if self.to_ms is not None and parsed.publish_ms >= self.to_ms:
            if self.from_ms is None or self.from_ms < 0:
                return generation_prefix(prefix, parsed.generation) + NEGATIVE
            return _generation_stop(prefix, parsed.generation)
        if self.from_ms is not None and parsed.publish_ms < self.from_ms:
            return time_prefix(prefix, parsed.generation, min(self.from_ms, LONG_MAX))
        return None

    def through(self, key: bytes) -> bytes | None:
        """Return the upper bound of the selected range that starts with this key; None if the key is not selected.

        For payload rows, it is the bound of the topic.
        """
        prefix = topic_prefix(key)
        topic = None if prefix is None else TopicId.from_prefix(prefix)
        if prefix is None or topic is None or not self.wants(topic):
            return None
        if self.table == "payload" or (self.from_ms is None and self.to_ms is None):
            return topic_stop(prefix)
        parsed = MessageKey.parse(key)
        if parsed is None or self.find_next_key(key) is not None:
            return None
        if self.to_ms is not None and parsed.publish_ms >= 0:
            return time_prefix(prefix, parsed.generation, min(self.to_ms, LONG_MAX))
        return _generation_stop(prefix, parsed.generation)

    def stretches(self, table: KeyReads) -> list[KeyRange]:
        """Return the ranges of selected rows, narrower than :meth:`ranges`, found by seeks from range to range.

        They serve only as estimates of sizes; selected rows outside of them are read, too.

        Raises:
            StoreError: the table could not be read.
        """
        if not self.is_recognized_only:
            return self.ranges()
        found: list[KeyRange] = []
        for first, last in self.ranges():
            start: bytes | None = first
            limit = 1
            while start is not None and (last is None or start < last):
                page = table.read(KEYS, start, last, limit)
                start, limit = page.resume, min(2 * limit, _MAX_ROWS)
                if page.items and (stop := self._skip_to_range(page.items[-1], found)) is not None:
                    start, limit = stop, 1
        return found

    def _skip_to_range(self, key: bytes, found: list[KeyRange]) -> bytes | None:
        """Return the next key to read after a key, and add the range that starts with the key to the findings."""
        stop = self.through(key)
        if stop is None:
            return self.find_next_key(key)
        found.append(KeyRange(key, stop))
        return stop

    def narrowed(self, filters: Iterable[Filter]) -> RowSelection:
        """Return the selection, limited by the filters that keys can evaluate."""
        found = self
        for condition in filters:
            found = found._narrowed_by(condition)
        return found

    def _narrowed_by(self, one: Filter) -> RowSelection:
        values: frozenset[Any]
        match one:
            case EqualTo((column,), value):
                values = frozenset([value])
            case In((column,), several):
                values = frozenset(several)
            case _:
                return self._within(one)
        match column:
            case "namespace":
                return replace(self, namespaces=_both(self.namespaces, values))
            case "topic":
                return replace(self, names=_both(self.names, values))
            case "salt":
                return replace(self, salts=_both(self.salts, values))
            case "publish_ms" | "write_ms" if column == self._time and values and None not in values:
                return self._since(min(values))._until(max(values) + 1)
        return self

    def _within(self, one: Filter) -> RowSelection:
        match one:
            case GreaterThanOrEqual((self._time,), int(ms)):
                return self._since(ms)
            case GreaterThan((self._time,), int(ms)):
                return self._since(ms + 1)
            case LessThan((self._time,), int(ms)):
                return self._until(ms)
            case LessThanOrEqual((self._time,), int(ms)):
                return self._until(ms + 1)
        return self

    @property
    def _time(self) -> str:
        return "publish_ms" if self.table == "message" else "write_ms"

    def _since(self, ms: int) -> RowSelection:
        return replace(self, from_ms=ms if self.from_ms is None else max(ms, self.from_ms))

    def _until(self, ms: int) -> RowSelection:
        return replace(self, to_ms=ms if self.to_ms is None else min(ms, self.to_ms))


def _both(known: frozenset[Any] | None, more: frozenset[Any]) -> frozenset[Any]:
    return more if known is None else known & more


def _generation_stop(prefix: bytes, generation: int) -> bytes:
    """Return the first key after a generation; in key order, -1 is the last generation."""
    return topic_stop(prefix) if generation == -1 else generation_prefix(prefix, generation + 1)


def _literal(pattern: str) -> bytes:
    """Return the literal prefix of a shell pattern; a pattern without wildcards gets a colon."""
    at = next((at for at, char in enumerate(pattern) if char in WILDCARDS), None)
    return (f"{pattern}:" if at is None else pattern[:at]).encode()
