"""The lag of consumers: the number of their unread messages, and the age of the oldest one.

The lag counts messages that a poll outside transactions would return: rows of the message table after the position,
without expired rows, but with rolled back and uncommitted messages. A row that refers to stored payloads counts as many
messages as it has unread payloads.

Counting reads keys only, except in topics with stored payloads: there it reads whole rows, because keys do not show
references. Each row is read once for all consumers: first the rows after the latest position, then the rows between
each position and the next later one. Counting is read-only and proceeds page by page, so that a background count can
pause between pages.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import NamedTuple

from tms_core.consumers.positions import Floor, Position, unread_from
from tms_core.rowkey import (
    GENERATION_BYTES,
    MESSAGE_TAIL_BYTES,
    NEGATIVE,
    Cutoff,
    MessageKey,
    java_abs,
    pointer_prefix,
    stop_key,
)
from tms_core.tables.base import KEYS, MESSAGES, Page, Reads
from tms_core.tables.side import Expiries
from tms_core.topic import TopicMetadata

#: The maximum number of keys in a page, and the maximum size of a page of whole rows in bytes.
PAGE_ROWS, _PAGE_BYTES = 4000, 1 << 20

#: A running count: yields the number of rows read by each step, and returns the lags.
Counting = Generator[int, None, "list[Lag]"]


class Lag(NamedTuple):
    """The lag of one consumer.

    Attributes:
        messages: the number of unread messages.
        at_least: whether the count stopped at its limit, so that ``messages`` is a lower bound.
        oldest_ms: the publish time of the oldest unread message; None without unread messages.
        expired: whether messages may have expired unread, because messages as old as the position are expired now.
            Until a consumer has read a message, the time of its registration counts instead. The value is also true if
            the topic had no messages in that time, because deleted messages leave no trace.
    """

    position: Position
    messages: int
    at_least: bool
    oldest_ms: int | None
    expired: bool

    def seconds(self, now_ms: int) -> float:
        """Return the age of the oldest unread message; 0 without unread messages."""
        return 0.0 if self.oldest_ms is None else max(0, now_ms - self.oldest_ms) / 1000


class LagTables(NamedTuple):
    """The tables that determine which messages readers see.

    Attributes:
        floor: the hold of unread messages; None: messages are not held.
    """

    store: Reads
    expiries: Expiries
    floor: Floor | None


def count(
    tables: LagTables,
    topic: TopicMetadata,
    positions: Collection[Position],
    now_ms: int,
    max_rows: int | None = None,
) -> Counting:
    """Count the unread messages of a topic's consumers.

    Args:
        now_ms: the current time in milliseconds, for expiry.
        max_rows: the maximum number of rows to read for all consumers together; None: unlimited.

    Returns:
        The lags in the order of the consumers' names.

    Raises:
        StoreError: the tables could not be read.
    """
    store, expiries, floor = tables
    due = expiry = cutoff = Cutoff.at(now_ms, topic.ttl_seconds)
    if floor is not None:
        expiry, cutoff = floor.lowest(due), floor.cutoff_for(topic, due, positions)
    starts = {position: unread_from(store, topic, position, cutoff) for position in positions}
    # Negative times, which no server writes, sort after all others.
    generation = topic.rows_prefix
    stop = generation + NEGATIVE
    has_stored = bool(positions) and store.payload.first(generation, stop_key(generation)) is not None
    found: list[Lag] = []
    count = _RangeCount(store, expiries, topic, now_ms, max_rows, has_stored=has_stored)
    for position, start in sorted(starts.items(), key=lambda item: item[1], reverse=True):
        yield from count.add(start, stop)
        stop = start
        # A position may lie inside a row with several payloads: subtract the payloads that are read already.
        read = yield from count.read_before(position, start)
        expired = expiry.expires(_caught_up_ms(position))
        found.append(Lag(position, max(0, count.messages - read), count.cut_short, count.oldest_ms, expired))
    return sorted(found, key=lambda lag: lag.position.name)


def _caught_up_ms(position: Position) -> int:
    """Return the time up to which a consumer has certainly missed no message, in milliseconds.

    For a consumer that has read nothing, this is its registration: the age of existing messages is not known.
    """
    has_read = position.id.publish_ms > 0
    return max(position.id.publish_ms, position.since_ms) if has_read else position.updated_ms


def finish(counting: Counting) -> list[Lag]:
    """Run all steps of a count, and return the lags."""
    while True:
        try:
            next(counting)
        except StopIteration as end:
            found: list[Lag] = end.value
            return found


class _RangeCount:
    """A count of the messages from a key to the last row of a topic; ``add`` extends it towards the first row."""

    def __init__(
        self,
        store: Reads,
        expiries: Expiries,
        topic: TopicMetadata,
        now_ms: int,
        max_rows: int | None,
        *,
        has_stored: bool,
    ) -> None:
        self._store = store
        self._topic = topic
        self._has_stored = has_stored
        self._expiries = expiries
        self._now_ms = now_ms
        self._rows_remaining = max_rows
        self._key_bytes = len(topic.topic.prefix) + GENERATION_BYTES + MESSAGE_TAIL_BYTES
        self.messages = 0
        self.oldest_ms: int | None = None
        self.cut_short = False

    def add(self, start: bytes, stop: bytes) -> Generator[int, None, None]:
        """Count, page by page, the rows of the range directly before the counted range."""
        oldest: bytes | None = None
        resume: bytes | None = start
        while resume is not None and resume < stop:
            page, stored = self._page(resume, stop, self._limit)
            unexpired = self._unexpired(page.items)
            oldest = oldest or (unexpired[0] if unexpired else None)
            self.messages += len(unexpired)
            resume = self._resume(page)
            yield len(page.items)
            for row in filter(stored.__contains__, unexpired):
                prefix = self._payloads_of(stored[row])
                # The row was counted as one message.
                self.messages += (yield from self._payloads(prefix, stop_key(prefix))) - 1
        if oldest is not None and (key := MessageKey.parse(oldest)) is not None:
            self.oldest_ms = key.publish_ms

    def _page(self, start: bytes, stop: bytes, limit: int) -> tuple[Page[list[bytes]], dict[bytes, int]]:
        """Return the keys of a page, and for each row that refers to stored payloads its pointer."""
        if not self._has_stored:
            return self._store.message.read(KEYS, start, stop, limit), {}
        page = self._store.message.read(MESSAGES.limit_bytes(_PAGE_BYTES), start, stop, limit)
        stored = {key: pointer for key, (pointer, payload) in page.items if payload is None and pointer is not None}
        return Page([key for key, _ in page.items], page.resume), stored

    def _payloads(self, start: bytes, stop: bytes | None) -> Generator[int, None, int]:
        """Count payloads, up to the limit."""
        found, resume = 0, start if self._rows_remaining is None or self._rows_remaining > 0 else None
        self.cut_short |= resume is None
        while resume is not None:
            page = self._store.payload.read(KEYS, resume, stop, self._limit)
            found, resume = found + len(page.items), self._resume(page)
            yield len(page.items)
        return found

    @property
    def _limit(self) -> int:
        # At least one row, even at the limit: it shows whether unread messages exist, and their age.
        return PAGE_ROWS if self._rows_remaining is None else max(1, min(PAGE_ROWS, self._rows_remaining))

    def _resume(self, page: Page[list[bytes]]) -> bytes | None:
        """Count the rows of a page, and return where the next page starts; None: no row may follow."""
        if self._rows_remaining is None:
            return page.resume
        self._rows_remaining -= len(page.items)
        self.cut_short |= self._rows_remaining <= 0 and page.resume is not None
        return page.resume if self._rows_remaining > 0 else None

    def read_before(self, position: Position, start: bytes) -> Generator[int, None, int]:
        """Count the read messages of the row at a consumer's position, if that row has unread messages too."""
        message = position.id
        packed = message.pack()
        if not message.in_payload_table or start[-MESSAGE_TAIL_BYTES:] != packed[:MESSAGE_TAIL_BYTES]:
            return 0
        _, stored = self._page(start, start + b"\0", 1)
        if start not in stored:
            return 0
        prefix = self._payloads_of(stored[start])
        return (yield from self._payloads(prefix, prefix + packed[MESSAGE_TAIL_BYTES:] + b"\0"))

    def _payloads_of(self, pointer: int) -> bytes:
        return pointer_prefix(self._topic.topic.prefix, self._topic.generation, java_abs(pointer))

    def _unexpired(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys of unexpired messages among some keys, in order."""
        keys = [key for key in keys if len(key) == self._key_bytes]
        moments = self._expiries.expiry_times(keys)
        return [key for key in keys if moments.get(key, self._now_ms + 1) > self._now_ms] if moments else keys
