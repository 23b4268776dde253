"""Decoding of rows, and the audit of the boundary against every row. Nothing here writes.

Tables are read page by page, so their size does not matter. Only the first rows are kept; all rows are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from janitor.rules.policy import is_unrecognized
from janitor.rules.ranges import topic_stop
from janitor.state.values import pack
from tms_core.errors import MetadataError
from tms_core.rowkey import MessageKey, PayloadKey, topic_prefix
from tms_core.tables.base import (
    CELLS,
    MESSAGES,
    PAYLOADS,
    UNREADABLE,
    KeyReads,
    MessageReads,
    MessageValue,
    Page,
    Reads,
    pages,
)
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState, transaction_ms

PAGE_ROWS = 2000

#: The maximum number of rows that a refutation names.
NAMED_ROWS = 10

#: Called after each page with the number of its rows.
Heartbeat = Callable[[int], None]

V = TypeVar("V")


class InspectedRows(NamedTuple):
    """The first rows of a table, decoded, and the number of all rows.

    Attributes:
        rows: decoded rows, as JSON values.
        counts: the number of rows of each kind.
        min_transaction_ms: the start of the oldest transaction with a row; None without such rows.
    """

    rows: list[dict[str, Any]]
    counts: Mapping[str, int]
    min_transaction_ms: int | None = None


@dataclass(slots=True)
class Audit:
    """The result of an audit, which reads every transactional row.

    Attributes:
        bound: the boundary in force; None without a boundary.
        cells: the number of transactional rows.
        unrecognized: the number of transactional rows with unrecognized keys, which the janitor does not change.
        open_cells: the number of rows with a positive pointer of an invalid transaction.
        refuted: the number of such rows with a pointer up to the boundary.
        sample_keys: the first keys of these rows.
        withdrawn: the refutation of the previous boundary, until another boundary is proven.
    """

    bound: int | None
    cells: int = 0
    unrecognized: int = 0
    open_cells: int = 0
    refuted: int = 0
    sample_keys: list[bytes] = field(default_factory=list)
    withdrawn: str = ""

    @property
    def refutation(self) -> str:
        """Return the refutation of the boundary as a clause; call this only if the boundary is refuted."""
        return (
            f"the boundary {self.bound} is refuted and withdrawn: {self.refuted} rows have the pointer of an invalid "
            f"transaction, the first row is {self.sample_keys[0].hex()}; do not remove ids from the invalid list"
        )

    def to_json(self) -> dict[str, Any]:
        document = pack(self)
        bound = document.pop("bound")
        return {"boundary": None if bound is None else str(bound), **document}


def audit(
    tables: Iterable[MessageReads], bound: int | None, is_invalid: Callable[[int], bool], heartbeat: Heartbeat
) -> Audit:
    """Read every transactional row and check it against the boundary (invariant S4).

    Args:
        tables: the message table, or its parts.
        bound: the boundary in force.
        is_invalid: returns whether the invalid list has a pointer, or had it when it was last seen.

    Raises:
        StoreError: the table could not be read.
    """
    found = Audit(bound)
    for table in tables:
        _audit(table, found, is_invalid, heartbeat)
    return found


def _audit(table: MessageReads, found: Audit, is_invalid: Callable[[int], bool], heartbeat: Heartbeat) -> None:
    for page in pages(partial(table.read, CELLS), b"", None, PAGE_ROWS):
        found.cells += len(page.items)
        for cell in page.items:
            found.unrecognized += MessageKey.parse(cell.key) is None
            if cell.pointer > 0 and is_invalid(cell.pointer):
                found.open_cells += 1
                if found.bound is not None and cell.pointer <= found.bound:
                    found.refuted += 1
                    found.sample_keys += [cell.key][: NAMED_ROWS - len(found.sample_keys)]
        heartbeat(len(page.items))


def messages(
    store: Reads, snapshot: VisibilityState | None, patterns: tuple[str, ...], limit: int, heartbeat: Heartbeat
) -> InspectedRows:
    """Decode the message table.

    Args:
        snapshot: distinguishes committed, undecided and invalid rows; without a snapshot they are all ``positive``.
        limit: the maximum number of decoded rows; all rows are counted. Rows with an unreadable value count as
            ``unreadable``.
    """
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    oldest: int | None = None
    unreadable = store.calls[UNREADABLE]
    for page in _pages(partial(store.message.read, MESSAGES), _ranges(store.message, patterns), heartbeat):
        for raw, value in page:
            key = MessageKey.parse(raw)
            counts[_kind(key, value)] += 1
            state = pointer_state(value.pointer, snapshot)
            if key and value.pointer is not None:
                counts[state] += 1
                oldest = _smaller(oldest, abs(value.pointer))
            if len(rows) < limit:
                rows.append(_message(raw, key, value, state))
    if skipped := store.calls[UNREADABLE] - unreadable:
        counts["unreadable"] = skipped
    return InspectedRows(rows, dict(counts), None if oldest is None else transaction_ms(oldest))


def payloads(
    store: Reads, snapshot: VisibilityState | None, patterns: tuple[str, ...], limit: int, heartbeat: Heartbeat
) -> InspectedRows:
    """Decode the payload table; arguments as for :func:`messages`."""
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    oldest: int | None = None
    for page in _pages(partial(store.payload.read, PAYLOADS), _ranges(store.payload, patterns), heartbeat):
        for raw, body in page:
            key = PayloadKey.parse(raw)
            state = (
                "unrecognized" if key is None or is_unrecognized(key) else pointer_state(key.write_pointer, snapshot)
            )
            counts[state] += 1
            if key and state != "unrecognized":
                oldest = _smaller(oldest, key.write_pointer)
            if len(rows) < limit:
                rows.append(_payload(raw, key, body, state))
    return InspectedRows(rows, dict(counts), None if oldest is None else transaction_ms(oldest))


def metadata(store: Reads, patterns: tuple[str, ...]) -> InspectedRows:
    """Decode the metadata table, including deleted topics and rows that do not parse."""
    rows = []
    counts: Counter[str] = Counter()
    for key, value in store.metadata.rows():
        topic = TopicId.from_prefix(key)
        if patterns and (topic is None or not topic.matches(patterns)):
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
    return InspectedRows(rows, dict(counts))


def snapshot_figures(state: VisibilityState, name: str, limit: int) -> dict[str, Any]:
    """Return a transaction snapshot as JSON values, with lists cut to ``limit``."""
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


def pointer_state(pointer: int | None, snapshot: VisibilityState | None) -> str:
    """Return the state of the transaction of a row's pointer, as ``janitor inspect`` and ``why`` show it."""
    if pointer is None:
        return ""
    if pointer < 0:
        return "rolled_back"
    if snapshot is None:
        return "positive"
    if snapshot.is_invalid(pointer):
        return "invalid"
    return "undecided" if snapshot.is_undecided(pointer) else "committed"


def _ranges(table: KeyReads, patterns: tuple[str, ...]) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the key ranges of the selected topics, also without metadata; without patterns the whole table."""
    if not patterns:
        yield b"", None
        return
    start = b""
    while (key := table.first(start)) is not None:
        topic = TopicId.from_prefix(topic_prefix(key) or b"")
        if topic is None:
            start = key + b"\x00"
            continue
        start = topic_stop(topic.prefix)
        if topic.matches(patterns):
            yield topic.prefix, start


def _pages(
    read: Callable[[bytes, bytes | None, int], Page[list[tuple[bytes, V]]]],
    ranges: Iterable[tuple[bytes, bytes | None]],
    heartbeat: Heartbeat,
) -> Iterator[list[tuple[bytes, V]]]:
    for first, stop in ranges:
        for page in pages(read, first, stop, PAGE_ROWS):
            heartbeat(len(page.items))
            yield page.items


def _smaller(known: int | None, pointer: int) -> int:
    return pointer if known is None else min(known, pointer)


def _kind(key: MessageKey | None, value: MessageValue) -> str:
    if is_unrecognized(key):
        return "unrecognized"
    if value.pointer is None:
        return "plain"
    return "reference" if value.payload is None else "transactional"


def _message(raw: bytes, key: MessageKey | None, value: MessageValue, state: str) -> dict[str, Any]:
    return {
        "key": raw.hex(),
        "topic": str(key.topic) if key else None,
        "generation": key.generation if key else None,
        "publish_ms": key.publish_ms if key else None,
        "sequence": key.sequence if key else None,
        "kind": _kind(key, value),
        "pointer": None if value.pointer is None else str(value.pointer),
        "transaction": (state or None) if key else None,
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
