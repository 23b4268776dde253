"""A publish request in the write path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.messaging.producers.requests import Admission, Sent
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.rowkey import MESSAGE_TAIL_BYTES

#: The approximate cost of a row in addition to its payload, in bytes.
_ROW_BYTES = 100


class PublishEntry:
    """A request, its state in the write path, and its outcome.

    Attributes:
        messages: the payloads; an empty list publishes the stored payloads of the transaction.
        pointer: the write pointer of its transaction; None without a transaction.
        ttl_ms: the TTL of its messages in milliseconds; None: the topic's TTL.
        sent: the producer headers of the request; None without a producer.
        principal: the requesting principal; None: the server does not authenticate clients.
        is_plain: whether it has messages, and no transaction, producer or TTL.
        size: the size of the payloads in bytes.
        weight: the size in bytes that counts towards a batch, including a fixed cost per row.
        rows: the number of rows.
        future: receives the outcome when the rows are durable or the request has failed.
        admission: the state of the producer at the admission, while the request is being written.
        is_write_open: whether the write is reported to the transaction manager.
        lane: the lane in which its rows must lie; 0: any position.
        announced: the request as covered by an earlier announcement of the producer; None: it is not covered.
        first: the position of its first row.
        row_pointer: the write pointer in its rows; negative after an inversion.
        outcome: an error, or the range of rows for the response.
        is_dropped: whether the outcome is set, so that further stages skip the entry.
    """

    __slots__ = (
        "admission",
        "announced",
        "first",
        "future",
        "is_dropped",
        "is_plain",
        "is_write_open",
        "lane",
        "messages",
        "outcome",
        "pointer",
        "principal",
        "row_pointer",
        "rows",
        "sent",
        "size",
        "ttl_ms",
        "weight",
    )

    def __init__(
        self,
        messages: Sequence[bytes],
        pointer: int | None = None,
        ttl_ms: int | None = None,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> None:
        self.messages = tuple(messages)
        self.pointer = self.row_pointer = pointer
        self.ttl_ms = ttl_ms
        self.sent = sent
        self.principal = principal
        self.is_plain = pointer is None and sent is None and ttl_ms is None and bool(messages)
        self.size = sum(map(len, messages))
        self.weight = self.size + _ROW_BYTES * len(messages)
        self.rows = len(messages) or 1
        self.future: PublishFuture[RollbackRange | None] = PublishFuture()
        self.admission: Admission | None = None
        self.announced: LastRequest | None = None
        self.is_write_open = self.is_dropped = False
        self.lane = self.first = 0
        self.outcome: RollbackRange | BaseException | None = None

    @property
    def stop(self) -> int:
        """Return the first position after the rows."""
        return self.first + self.rows

    def drop(self, outcome: RollbackRange | BaseException | None) -> None:
        """Set the outcome, so that further stages skip the entry."""
        self.outcome, self.is_dropped = outcome, True

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys of the rows, which are ``prefix`` and a position."""
        return [prefix + at.to_bytes(MESSAGE_TAIL_BYTES, "big") for at in range(self.first, self.first + self.rows)]


def remaining(entries: Iterable[PublishEntry]) -> list[PublishEntry]:
    """Return the entries that are not dropped."""
    return [entry for entry in entries if not entry.is_dropped]
