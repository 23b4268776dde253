"""Keys as columns, and the deletion rules over columns, without a loop over rows.

A page of keys is sorted, so the rows of a topic are adjacent. Keys of equal length form a matrix of bytes, and each
number of a key is a slice of the matrix. The rules are comparisons of whole columns. A property test compares this
second implementation with ``decide`` row by row. If they disagree, :mod:`janitor.rules.policy` is right.

The key of a payload row does not show whether a message refers to the row. If the decision depends on that (rule L5),
it is ``candidate``: the rule deletes the row unless a remaining message refers to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from janitor.report import DataTable
from janitor.rules.policy import Frontier, Reason, Rule
from janitor.rules.ranges import topic_stop
from janitor.sweep.transactions import TransactionView
from tms_core.rowkey import GENERATION_BYTES, LONG_MAX, MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS

Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
Codes = NDArray[np.int8]

KEEP, DELETE, INVERT, CANDIDATE = range(4)
#: The meaning of the codes in ``Decisions.action``.
ACTIONS = ("keep", "delete", "invert", "candidate")
#: The meaning of the codes in ``Decisions.rule``: the rule that deletes a row, or the reason to keep it.
RULES = (*map(str, Rule), *map(str, Reason))

_CODE = {name: code for code, name in enumerate(RULES)}
_TAIL = {"message": GENERATION_BYTES + MESSAGE_TAIL_BYTES, "payload": GENERATION_BYTES + PAYLOAD_TAIL_BYTES}
#: The expiry of a message without its own TTL.
NEVER_MS = LONG_MAX


class Columns(NamedTuple):
    """The keys of a page as columns; an unrecognized key has the numbers 0.

    Attributes:
        topics: the topics of the page.
        topic: the index in ``topics``; -1 for an unrecognized key.
        pointer: the write pointer in a payload key; 0 in message keys.
        time_ms: the publish time of a message, the write time of a payload.
        sequence: the sequence id, or payload sequence id.
        packed: the keys, as an Arrow array.
    """

    topics: list[TopicId]
    topic: Longs
    generation: Longs
    pointer: Longs
    time_ms: Longs
    sequence: Longs
    packed: Any


def split(table: DataTable, keys: Sequence[bytes]) -> Columns:
    """Parse keys into columns.

    Args:
        keys: the keys, sorted and without salt.
    """
    packed: Any = pa.array(keys, pa.binary())
    _, offsets_buffer, data_buffer = packed.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[: len(keys) + 1]
    data = np.frombuffer(data_buffer if data_buffer is not None else b"", dtype=np.uint8)
    lengths = np.diff(offsets)
    tail = _TAIL[table]
    parts = np.zeros((5, len(keys)), dtype=np.int64)
    parts[0] = -1
    topics: list[TopicId] = []
    at = 0
    while at < len(keys):
        prefix = keys[at][:-tail]
        topic = TopicId.from_prefix(prefix)
        if topic is None:
            at += 1
            continue
        end = len(keys) if keys[-1].startswith(prefix) else bisect_left(keys, topic_stop(prefix), at)
        size = len(prefix) + tail
        is_complete = lengths[at:end] == size
        if is_complete.all():
            parts[0, at:end] = len(topics)
            _numbers(table, data[offsets[at] : offsets[end]], size, parts[1:, at:end])
        else:
            # Some keys of the topic have another length.
            rows = data[offsets[at:end][is_complete][:, None] + np.arange(size)]
            some = np.zeros((4, len(rows)), dtype=np.int64)
            _numbers(table, rows.reshape(-1), size, some)
            parts[0, at:end][is_complete], parts[1:, at:end][:, is_complete] = len(topics), some
        topics.append(topic)
        at = end
    return Columns(topics, parts[0], parts[1], parts[2], parts[3], parts[4], packed)


def _numbers(table: DataTable, keys: NDArray[np.uint8], size: int, into: Longs) -> None:
    """Parse generation, pointer, time and sequence of adjacent keys of one topic, which all have ``size`` bytes."""

    def part(kind: str, from_end: int) -> NDArray[Any]:
        return np.ndarray((len(keys) // size,), kind, keys, size - from_end, (size,))

    into[0] = part(">i4", _TAIL[table])
    if table == "payload":
        into[1] = part(">i8", 18)
    into[2] = part(">i8", 10)
    into[3] = part(">u2", 2)


class Pointers(NamedTuple):
    """The stored write pointers of message rows; ``present`` marks rows with a pointer."""

    value: Longs
    present: Flags


class Decisions(NamedTuple):
    """The decisions about rows, as codes of ``ACTIONS`` and ``RULES``."""

    action: Codes
    rule: Codes


@dataclass(frozen=True, slots=True)
class Policy:
    """The deletion rules with their facts, for pages of rows.

    Attributes:
        topics: metadata and frontier of each topic with readable metadata (rule L1).
        transactions: the snapshot in use, or a substitute.
    """

    topics: Mapping[TopicId, tuple[TopicMetadata, Frontier]]
    transactions: TransactionView

    def judge(
        self, table: DataTable, rows: Columns, pointers: Pointers | None = None, expires_ms: Longs | None = None
    ) -> Decisions:
        """Return the decisions about rows (:func:`janitor.rules.policy.decide`).

        Args:
            pointers: the pointers of message rows; None if no row has a pointer.
            expires_ms: the expiries of messages (L6), ``NEVER_MS`` without their own TTL; None if no row has a TTL.
        """
        terms = self._terms(rows)
        unrecognized = (rows.topic < 0) | (rows.generation <= 0) | (rows.time_ms < 0)
        past = np.zeros(len(rows.topic), dtype=np.bool_)
        if expires_ms is not None:
            past = (expires_ms <= terms["now"]) & (expires_ms < NEVER_MS)
        old = rows.generation < terms["old_below"]
        current = rows.generation == terms["generation"]
        claimed = ~unrecognized & (terms["known"] == 1)
        expired = claimed & ~old & current & ((rows.time_ms < terms["due"]) | past)
        processed = rows.time_ms < terms["processed_ms"]
        if table == "message":
            same = rows.time_ms == terms["processed_ms"]
            processed |= same & (rows.sequence < terms["processed_sequence"])
        processed &= claimed & ~old & current & ~expired
        is_due = (claimed & old) | expired | processed

        old_either = rows.generation < np.minimum(terms["old_below"], terms["frontier_old_below"])
        is_live_or_held = current | (rows.generation == terms["frontier_generation"])
        is_released = (rows.time_ms < terms["cutoff"]) | (
            ((past & (rows.time_ms < terms["decided_ms"])) | processed) & (terms["open"] == 1)
        )
        reached = old_either | (is_live_or_held & is_released)

        rule = np.full(len(unrecognized), _CODE[Reason.LIVE], dtype=np.int8)
        rule[claimed & ~old & ~current] = _CODE[Reason.NEWER_GENERATION]
        rule[~unrecognized & (terms["known"] == 0)] = _CODE[Reason.UNKNOWN_TOPIC]
        rule[unrecognized] = _CODE[Reason.UNRECOGNIZED]
        rule[claimed & old] = _CODE[Rule.OLD_GENERATION]
        rule[expired] = _CODE[Rule.EXPIRED]
        rule[processed] = _CODE[Rule.PROCESSED]
        rule[is_due & ~reached] = _CODE[Reason.HELD]

        deleted = is_due & reached
        action = np.where(deleted, DELETE, KEEP).astype(np.int8)
        if table == "payload":
            candidates = deleted & ~old_either
            undecided = candidates & self._undecided(rows.pointer)
            action[candidates], action[undecided] = CANDIDATE, KEEP
            rule[undecided] = _CODE[Reason.UNDECIDED]
        if pointers is not None:
            inverted = ~deleted & (rows.topic >= 0) & pointers.present & self._invalid(pointers.value)
            action[inverted], rule[inverted] = INVERT, _CODE[Rule.INVALID_TRANSACTION]
        return Decisions(action, rule)

    def _terms(self, rows: Columns) -> dict[str, Longs]:
        """Return the rule parameters of each row's topic; zeros for unknown topics."""
        found = [_terms_of(*self.topics.get(topic, (None, None))) for topic in rows.topics]
        by_topic = np.array([*found, _terms_of(None, None)], dtype=np.int64)
        # Most pages have one topic, whose values need not be repeated for each row.
        alone = len(rows.topic) > 0 and rows.topic.min() == rows.topic.max()
        by_row = by_topic[rows.topic[:1]] if alone else by_topic[rows.topic]
        return dict(zip(_TERMS, by_row.T, strict=True))

    def _invalid(self, pointers: Longs) -> Flags:
        """Return which stored pointers are positive and listed as invalid."""
        snapshot = self.transactions.snapshot
        if snapshot is None:
            return np.zeros(len(pointers), dtype=np.bool_)
        return (pointers > 0) & _among(np.asarray(snapshot.invalid), pointers)

    def _undecided(self, pointers: Longs) -> Flags:
        """Return which transactions may still commit."""
        view = self.transactions
        if view.snapshot is None:
            return (pointers // TX_PER_MS) + view.undecided_ms > view.now_ms
        open_pointers = np.array(sorted(view.snapshot.open_pointers), dtype=np.int64)
        return (pointers > view.snapshot.write_pointer) | _among(open_pointers, pointers)


_TERMS = (
    "known",
    "now",
    "generation",
    "old_below",
    "due",
    "cutoff",
    "frontier_generation",
    "frontier_old_below",
    "open",
    "processed_ms",
    "processed_sequence",
    "decided_ms",
)


def _terms_of(topic: TopicMetadata | None, frontier: Frontier | None) -> tuple[int, ...]:
    """Return the values of ``_TERMS``."""
    if topic is None or frontier is None:
        return (0,) * len(_TERMS)
    return (
        1,
        frontier.now_ms,
        topic.generation,
        topic.old_below,
        frontier.due.ms,
        frontier.cutoff.ms,
        frontier.generation,
        frontier.old_below,
        frontier.hold is None,
        frontier.processed >> 16,
        frontier.processed & 0xFFFF,
        frontier.decided_ms,
    )


def _among(ascending: Longs, values: Longs) -> Flags:
    """Return which values occur in an ascending array."""
    if not len(ascending):
        return np.zeros(len(values), dtype=np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Flags = ascending[at] == values
    return found
