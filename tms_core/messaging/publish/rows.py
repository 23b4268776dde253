"""The rows of a batch in the message table or in the payload table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import cast

from tms_core.errors import BadRequest, StoreError, TooLarge
from tms_core.messaging.ids import id_parts, tail
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.rowkey import pointer_prefix
from tms_core.tables.base import CELLS, KEYS, PAYLOADS, MessageTable, Page, TxCell, read_all
from tms_core.topic import TopicMetadata


class TopicRows(ABC):
    """The rows of one topic in one table."""

    @abstractmethod
    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None: ...

    @abstractmethod
    def write(self, entries: Sequence[PublishEntry]) -> None:
        """Store the rows of entries. Durable on return.

        After a failure, rows of transactions are rolled back if the store allows. Rows of producers stay, because
        producers repeat the request: a late rollback could remove rows that another server has acknowledged since.

        Raises:
            TooLarge: nothing was written.
            StoreError: the store failed.
        """

    @abstractmethod
    def roll_back(self, entries: Iterable[PublishEntry]) -> None:
        """Hide rows from readers in transactions; ignore errors, after which the client invalidates the transaction."""

    @abstractmethod
    def has_all(self, entry: PublishEntry, last: LastRequest, *, keeps_part: bool) -> bool:
        """Return whether all rows of a repeated request exist.

        Args:
            last: the announced request.
            keeps_part: if only some rows exist, leave them unchanged; otherwise hide them from all readers.

        Raises:
            BadRequest: the repeated request has other contents.
            StoreError: the store failed.
        """

    @abstractmethod
    def conclude(self, entry: PublishEntry) -> None:
        """Record whether the transaction's stored payloads are visible after an entry, and set the entry's outcome."""


class MessageRows(TopicRows):
    """Rows of the message table."""

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        self._open_topics = context.open_topics
        self._table = context.store.message
        self._topic = topic
        self.prefix = topic.rows_prefix

    def write(self, entries: Sequence[PublishEntry]) -> None:
        table, prefix = self._table, self.prefix
        rows = table.rows_of([(entry.keys(prefix), entry.pointer, entry.messages or None) for entry in entries])
        try:
            table.put(rows)
        except TooLarge:
            raise
        except StoreError:
            self.roll_back([entry for entry in entries if entry.pointer is not None and entry.sent is None])
            raise

    def roll_back(self, entries: Iterable[PublishEntry]) -> None:
        cells = [
            TxCell(key, cast(int, entry.pointer), not entry.messages)
            for entry in entries
            for key in entry.keys(self.prefix)
        ]
        if cells:
            with suppress(StoreError):
                self._table.invert(cells)

    def has_all(self, entry: PublishEntry, last: LastRequest, *, keeps_part: bool) -> bool:
        table, keys = self._table, _announced_keys(self.prefix, last)
        # Count only rows that readers see: KEYS omits hidden rows, CELLS includes them.
        found, _, origin, *_ = _visible_keys(table, keys)
        if entry.pointer is None:
            if 0 < len(found) < last.number and not keeps_part:
                table.hide(keys)
                table.delete(found, origin)
            return len(found) == last.number
        keys_present = frozenset(found)
        cells = read_all(table, CELLS, keys[0], keys[-1] + b"\0")
        own = [cell for cell in cells.items if cell.pointer == entry.pointer and cell.key in keys_present]
        if 0 < len(own) < last.number and not keeps_part:
            table.hide(keys)
            table.invert(own, cells.origin)
        return len(own) == last.number

    def conclude(self, entry: PublishEntry) -> None:
        if entry.pointer is not None:
            if not entry.messages:
                self._open_topics.note_payloads(self._topic, entry.pointer, hidden=False)
            entry.outcome = RollbackRange(entry.pointer, *id_parts(entry.first), *id_parts(entry.stop - 1))


class PayloadRows(TopicRows):
    """Rows of the payload table, which only transactions write."""

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        self._open_topics = context.open_topics
        self._table = context.store.payload
        self._topic = topic

    def write(self, entries: Sequence[PublishEntry]) -> None:
        rows = [row for entry in entries for row in zip(self._keys(entry), entry.messages, strict=True)]
        if not rows:
            return
        try:
            self._table.put(rows)
        except TooLarge:
            raise
        except StoreError:
            # Not for producers: a late deletion would remove payloads that the producer has stored again since.
            self.roll_back([entry for entry in entries if entry.sent is None])
            raise

    def roll_back(self, entries: Iterable[PublishEntry]) -> None:
        with suppress(StoreError):
            self._table.delete([key for entry in entries for key in self._keys(entry)])

    def has_all(self, entry: PublishEntry, last: LastRequest, *, keeps_part: bool) -> bool:
        keys = _announced_keys(self._prefix(entry), last)
        payloads = dict(zip(keys, entry.messages, strict=True))
        page = read_all(self._table, PAYLOADS, keys[0], keys[-1] + b"\0")
        rows = [row for row in page.items if row[0] in payloads]
        if any(payloads[key] != payload for key, payload in rows):
            sent = cast(Sent, entry.sent)
            raise BadRequest(
                f"Request {sent.sequence} of producer {sent.name} was sent before with other contents.",
                "Repeat a request unchanged, or send a new request with the next number.",
            )
        return len(rows) == last.number

    def conclude(self, entry: PublishEntry) -> None:
        self._open_topics.note_payloads(self._topic, cast(int, entry.pointer), hidden=True)

    def _keys(self, entry: PublishEntry) -> list[bytes]:
        return entry.keys(self._prefix(entry))

    def _prefix(self, entry: PublishEntry) -> bytes:
        return pointer_prefix(self._topic.topic.prefix, self._topic.generation, cast(int, entry.pointer))


def _announced_keys(prefix: bytes, last: LastRequest) -> list[bytes]:
    """Return the row keys of an announced request."""
    return [prefix + tail(at) for at in range(last.first, last.first + last.number)]


def _visible_keys(table: MessageTable, keys: Sequence[bytes]) -> Page[list[bytes]]:
    """Return the keys of visible rows in a range of consecutive keys."""
    return read_all(table, KEYS, keys[0], keys[-1] + b"\0")
