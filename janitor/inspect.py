"""The table debugger: what is in the tables, decoded, and whether the boundary is true. Nothing is consumed.

Everything is read page by page, so a table of any size can be looked at; only the first rows are kept to be shown,
the rest is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from janitor.ranges import topic_stop
from janitor.world import matches
from tms_core.errors import MetadataError
from tms_core.rowkey import MessageKey, PayloadKey, topic_prefix
from tms_core.tables.base import MessageTable, MessageValue, Page, Store
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState, transaction_ms

PAGE_ROWS = 2000

#: How many refuted rows are named.
NAMED_ROWS = 10

#: Told after every page how many rows it had.
Heartbeat = Callable[[int], None]

V = TypeVar("V")


class Inspected(NamedTuple):
    """Rows of one table, the first of them decoded, and figures over all.

    Attributes:
        rows: decoded rows, as JSON values.
        counts: how many rows there are of each kind.
        min_transaction_ms: when the oldest transaction with a row began; None without any.
    """

    rows: list[dict[str, Any]]
    counts: Mapping[str, int]
    min_transaction_ms: int | None = None


@dataclass(slots=True)
class Audit:
    """What reading every transactional row has shown.

    Attributes:
        bound: the boundary that was claimed; None without one.
        cells: transactional rows read.
        open_cells: rows that carry the positive pointer of an invalid transaction, below the boundary or not.
        refuted: such rows at or below the boundary.
        sample_keys: the first of those.
    """

    bound: int | None
    cells: int = 0
    open_cells: int = 0
    refuted: int = 0
    sample_keys: list[bytes] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "boundary": None if self.bound is None else str(self.bound),
            "cells": self.cells,
            "open_cells": self.open_cells,
            "refuted": self.refuted,
            "sample_keys": [key.hex() for key in self.sample_keys],
        }


def audit(table: MessageTable, bound: int | None, is_invalid: Callable[[int], bool], heartbeat: Heartbeat) -> Audit:
    """Read every transactional row and hold it against the boundary (rule S4).

    Args:
        bound: the boundary claimed.
        is_invalid: whether a pointer is, or was when it was last seen, in the invalid list.

    Raises:
        StoreError: the table could not be read.
    """
    found = Audit(bound)
    start: bytes | None = b""
    while start is not None:
        page = table.cells(start, None, PAGE_ROWS)
        found.cells += len(page.items)
        for cell in page.items:
            if cell.pointer > 0 and is_invalid(cell.pointer):
                found.open_cells += 1
                if bound is not None and cell.pointer <= bound:
                    found.refuted += 1
                    found.sample_keys += [cell.key][: NAMED_ROWS - len(found.sample_keys)]
        heartbeat(len(page.items))
        start = page.resume
    return found


def messages(
    store: Store, snapshot: VisibilityState | None, patterns: tuple[str, ...], limit: int, heartbeat: Heartbeat
) -> Inspected:
    """Decode the message table.

    Args:
        snapshot: tells committed from undecided and invalid; without it they are all ``positive``.
        limit: how many rows to decode; all are counted.
    """
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    oldest: int | None = None
    for page in _pages(store.message.rows, _ranges(store, patterns), heartbeat):
        for key, value in page:
            counts[_kind(value)] += 1
            state = _pointer_state(value.pointer, snapshot)
            if value.pointer is not None:
                counts[state] += 1
                oldest = _smaller(oldest, abs(value.pointer))
            if len(rows) < limit:
                rows.append(_message(key, value, state))
    return Inspected(rows, dict(counts), None if oldest is None else transaction_ms(oldest))


def payloads(
    store: Store, snapshot: VisibilityState | None, patterns: tuple[str, ...], limit: int, heartbeat: Heartbeat
) -> Inspected:
    """Decode the payload table; arguments as for :func:`messages`."""
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    oldest: int | None = None
    for page in _pages(store.payload.rows, _ranges(store, patterns), heartbeat):
        for raw, body in page:
            key = PayloadKey.parse(raw)
            state = _pointer_state(key.write_pointer, snapshot) if key else "foreign"
            counts[state] += 1
            if key:
                oldest = _smaller(oldest, key.write_pointer)
            if len(rows) < limit:
                rows.append(_payload(raw, key, body, state))
    return Inspected(rows, dict(counts), None if oldest is None else transaction_ms(oldest))


def metadata(store: Store, patterns: tuple[str, ...]) -> Inspected:
    """Decode the metadata table, deleted topics and rows that do not parse among them."""
    rows = []
    counts: Counter[str] = Counter()
    for key, value in store.metadata.rows():
        topic = TopicId.from_prefix(key)
        if patterns and (topic is None or not matches(topic, patterns)):
            continue
        row: dict[str, Any] = {"key": key.hex(), "topic": str(topic) if topic else None}
        try:
            parsed = TopicMetadata.parse(key, value)
        except MetadataError as error:
            counts["unreadable"] += 1
            rows.append({**row, "problem": str(error), "value": value.decode("utf-8", "replace")})
            continue
        counts["deleted" if parsed.deleted else "topics"] += 1
        rows.append({**row, "generation": parsed.generation, "ttl_seconds": parsed.ttl_seconds, "problem": None})
    return Inspected(rows, dict(counts))


def snapshot_figures(state: VisibilityState, name: str, limit: int) -> dict[str, Any]:
    """A transaction snapshot, as JSON values; the longest lists are cut to ``limit``."""
    return {
        "source": name,
        "timestamp_ms": state.timestamp_ms,
        "read_pointer": str(state.read_pointer),
        "write_pointer": str(state.write_pointer),
        "prune_upper_bound": str(state.prune_upper_bound()),
        "invalid_count": len(state.invalid),
        "invalid": [str(pointer) for pointer in state.invalid[:limit]],
        "in_progress": [
            {
                "write_pointer": str(entry.write_pointer),
                "type": entry.type.name.lower() if entry.type is not None else None,
                "began_ms": transaction_ms(entry.write_pointer),
                "expires_ms": entry.expiration_ms,
                "checkpoints": [str(pointer) for pointer in entry.checkpoints],
            }
            for entry in state.in_progress[:limit]
        ],
    }


def _ranges(store: Store, patterns: tuple[str, ...]) -> list[tuple[bytes, bytes | None]]:
    """The key ranges of the topics asked for; one for the whole table without any."""
    if not patterns:
        return [(b"", None)]
    prefixes = [key for key, _ in store.metadata.rows() if topic_prefix(key) == key]
    topics = [(prefix, TopicId.from_prefix(prefix)) for prefix in prefixes]
    return [(prefix, topic_stop(prefix)) for prefix, topic in topics if topic and matches(topic, patterns)]


def _pages(
    read: Callable[[bytes, bytes | None, int], Page[tuple[bytes, V]]],
    ranges: Iterable[tuple[bytes, bytes | None]],
    heartbeat: Heartbeat,
) -> Iterator[list[tuple[bytes, V]]]:
    for first, stop in ranges:
        start: bytes | None = first
        while start is not None:
            page = read(start, stop, PAGE_ROWS)
            heartbeat(len(page.items))
            yield page.items
            start = page.resume


def _smaller(known: int | None, pointer: int) -> int:
    return pointer if known is None else min(known, pointer)


def _kind(value: MessageValue) -> str:
    if value.pointer is None:
        return "plain"
    return "reference" if value.payload is None else "transactional"


def _pointer_state(pointer: int | None, snapshot: VisibilityState | None) -> str:
    if pointer is None:
        return ""
    if pointer < 0:
        return "rolled_back"
    if snapshot is None:
        return "positive"
    if snapshot.is_invalid(pointer):
        return "invalid"
    return "undecided" if snapshot.is_undecided(pointer) else "committed"


def _message(raw: bytes, value: MessageValue, state: str) -> dict[str, Any]:
    key = MessageKey.parse(raw)
    return {
        "key": raw.hex(),
        "topic": str(key.topic) if key else None,
        "generation": key.generation if key else None,
        "publish_ms": key.publish_ms if key else None,
        "sequence": key.sequence if key else None,
        "kind": _kind(value) if key else "foreign",
        "pointer": None if value.pointer is None else str(value.pointer),
        "transaction": state or None,
        "payload_bytes": None if value.payload is None else len(value.payload),
    }


def _payload(raw: bytes, key: PayloadKey | None, body: bytes, state: str) -> dict[str, Any]:
    return {
        "key": raw.hex(),
        "topic": str(key.topic) if key else None,
        "generation": key.generation if key else None,
        "pointer": str(key.write_pointer) if key else None,
        "write_ms": key.write_ms if key else None,
        "sequence": key.sequence if key else None,
        "transaction": state,
        "payload_bytes": len(body),
    }
