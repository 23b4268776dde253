"""A reference implementation of the messaging service, with lists, and without pages, batches, caches or threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tms_core.messaging.model import FetchedMessage
from tms_core.rowkey import MessageId
from tms_core.transaction.model import Transaction


class Spot(NamedTuple):
    ms: int
    sequence: int

    def plus(self, rows: int) -> Spot:
        extra, sequence = divmod(self.sequence + rows, 65_536)
        return Spot(self.ms + extra, sequence)


@dataclass
class Row:
    spot: Spot
    pointer: int | None
    payload: bytes | None
    expires_ms: int | None = None


@dataclass
class Book:
    """One generation of a topic.

    Attributes:
        rows: the messages in the order of their publish.
        stored: the payloads of each transaction in the order of their storage.
    """

    ttl_seconds: int
    rows: list[Row] = field(default_factory=list)
    stored: dict[int, list[tuple[Spot, bytes]]] = field(default_factory=dict)

    def fetch(
        self, now_ms: int, start: MessageId | int | None, inclusive: bool, limit: int, reader: Transaction | None
    ) -> list[FetchedMessage]:
        cutoff_ms = max(0, now_ms - self.ttl_seconds * 1000)
        if isinstance(start, MessageId) and start.publish_ms < cutoff_ms:
            start = None
        found: list[FetchedMessage] = []
        for row in self.rows:
            if row.spot.ms < cutoff_ms or (row.expires_ms is not None and row.expires_ms <= now_ms):
                continue
            if is_before(row, start, inclusive):
                continue
            verdict = judge(row.pointer, reader)
            if verdict == "stop":
                break
            if verdict == "show":
                found += self._messages(row, start, inclusive)
        return found[:limit]

    def _messages(self, row: Row, start: MessageId | int | None, inclusive: bool) -> list[FetchedMessage]:
        if row.payload is not None:
            return [FetchedMessage(MessageId(*row.spot).pack(), row.payload)]
        payloads = sorted(self.stored.get(abs(row.pointer or 0), []))
        if isinstance(start, MessageId) and start.in_payload_table and start[:2] == row.spot:
            inside = Spot(*start[2:])
            payloads = [item for item in payloads if item[0] > inside or (item[0] == inside and inclusive)]
        return [FetchedMessage(MessageId(*row.spot, *spot).pack(), payload) for spot, payload in payloads]


def is_before(row: Row, start: MessageId | int | None, inclusive: bool) -> bool:
    """Return whether a row is before the start of a consumer."""
    if start is None:
        return False
    if isinstance(start, int):
        return row.spot.ms < start
    if row.spot == start[:2]:
        return not inclusive and not start.in_payload_table
    return row.spot < start[:2]


def judge(pointer: int | None, reader: Transaction | None) -> str:
    """Return what a reader does with a row: ``show`` it, ``skip`` it, or ``stop``."""
    if reader is None or pointer is None:
        return "show"
    if pointer < 0 or pointer in reader.invalids:
        return "show" if pointer == reader.write_pointer else "skip"
    own = pointer == reader.write_pointer
    return "show" if own or (pointer <= reader.read_pointer and pointer not in reader.in_progress) else "stop"
