"""Fetches of messages: the start, the visibility of rows, and payloads in the payload table.

A fetch reads page by page and holds no resources between pages. It reads the cache if the cache has all rows from the
current position on, and the store otherwise. A fetch stops at the last row that was acknowledged at its start.
Therefore all readers see the same order, and a fetch terminates while messages keep arriving.

CDAP differs (``docs/reference/conformance/messages.md``): it loses messages if a limit falls inside a reference to the
payload table, and the first payload after an exclusive start. It applies the payload part of an expired start to the
first reference that follows, and counts a reference without payloads towards the limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, repeat
from operator import add, itemgetter
from typing import NamedTuple, TypeGuard, cast

from tms_core.clock import HonestClock
from tms_core.consumers.positions import Floor, cutoff_at
from tms_core.logs.loggers import harmless
from tms_core.messaging.cache import INLINE, CachedRun, MessageCache
from tms_core.messaging.ids import POSITIONS, SEQUENCE_BITS, expires_ms, position, tail
from tms_core.messaging.model import MESSAGE_BYTES, FetchRequest, MessageList, SharedList
from tms_core.messaging.publish.open_topics import FirstReads, OpenTopics
from tms_core.messaging.topics.partitions import FAMILIES, SEALED
from tms_core.rowkey import MESSAGE_TAIL_BYTES, Cutoff, MessageId, java_abs, pointer_prefix, stop_key
from tms_core.tables.base import COLUMNS, PAYLOADS, MessageColumns, Store
from tms_core.tables.side import Expiries
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

#: The target size of a page in bytes; a page has at least one message. Larger pages are slower, because the allocator
#: returns their memory to the system each time.
PAGE_BYTES = 240_000
#: The maximum number of rows in one read of the store.
MAX_PAGE_ROWS = 4000
#: The maximum number of reads for a page; then a small page is returned, so that the reader does not wait for more.
_PAGE_READS = 8

#: The columns that a fetch reads from the message table and from the payload table.
_COLUMNS, _PAYLOADS = COLUMNS.limit_bytes(PAGE_BYTES), PAYLOADS.limit_bytes(PAGE_BYTES)
_EMPTY = MessageList([], [])
_payload = itemgetter(1)
_tail_in = itemgetter(slice(-MESSAGE_TAIL_BYTES, None))


class ReadPath(NamedTuple):
    """The sources of messages, and the rules for reading them.

    Attributes:
        cached_ms: the maximum age of cached rows for a reader in a transaction, in milliseconds.
        first_reads: the delays until messages are first read.
        floor: the hold of unread messages after their TTL; None: messages are not held.
        lifetime_ms: how long after its start a transaction may write, in milliseconds.
    """

    store: Store
    open_topics: OpenTopics
    cache: MessageCache
    expiries: Expiries
    clock: HonestClock
    cached_ms: int
    first_reads: FirstReads
    floor: Floor | None = None
    lifetime_ms: int = 0


class Fetch:
    """A fetch of messages (``CoreMessageFetcher``).

    Args:
        skips_undecided: whether to continue after undecided messages; otherwise the fetch stops at the first one.

    Attributes:
        holes: the skipped ranges of undecided messages: the first position, and the position after the last.
    """

    def __init__(
        self, read_path: ReadPath, topic: TopicMetadata, request: FetchRequest, *, skips_undecided: bool = False
    ) -> None:
        self.holes: list[tuple[int, int]] = []
        self._skips_undecided = skips_undecided
        self._read_path = read_path
        self._topic = topic
        self._open_topic = read_path.open_topics.messages(topic)
        self._transaction = request.transaction
        self._rows_remaining = request.limit
        self._bytes_remaining = request.limit_bytes
        cutoff = cutoff_at(topic, read_path.clock.now_ms(), read_path.floor, _from_ms(request), read_path.lifetime_ms)
        self._at, self._inside = _start(request, cutoff)
        self._end = self._first_end = self._open_topic.ids.end
        self._undecided = False
        self._read_up_to: int | None = None
        self._notes_read = True
        self._page_rows = _page_rows(self._open_topic.row_bytes)
        self._reads = 0

    @property
    def position(self) -> MessageId | None:
        """Return the id at which a later fetch of the same reader can start without missing a message.

        This is the id after the last row that was read, or of the first undecided row. None: no row was read, or a
        limit has stopped the fetch; then continue after the last message.
        """
        if self._read_up_to is None or self._is_full or self._read_up_to >= POSITIONS:
            return None
        return MessageId.parse(tail(self._read_up_to) + INLINE)

    @property
    def is_at_end(self) -> bool:
        """Return whether all rows were read, and none of them is undecided."""
        return self._at >= self._end and not self._undecided

    @property
    def is_sealed(self) -> bool:
        """Return whether the topic accepts no more messages, because other partitions have replaced it."""
        return SEALED in self._topic.properties or FAMILIES in self._topic.properties

    @property
    def has_more(self) -> bool:
        """Return whether messages have arrived in the topic since the fetch started."""
        return self._open_topic.ids.end > self._first_end

    @property
    def largest_bytes(self) -> int:
        """Return the size in bytes of the largest payload that this process has read from the topic."""
        return self._open_topic.largest_bytes

    @contextmanager
    def on_messages(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake``, from any thread, whenever messages arrive in the topic while the block runs."""
        self._open_topic.wakes[wake] = None
        try:
            yield
        finally:
            del self._open_topic.wakes[wake]

    def pages(self) -> Iterator[MessageList]:
        """Yield the messages in pages of about ``PAGE_BYTES``, with at most one read of the store between two pages.

        A read without visible messages yields an empty page, so that the caller can do other work in between.

        Raises:
            StoreError: the store could not be read; the messages so far are valid.
        """
        page = _EMPTY
        size = reads = 0
        for messages, length in self._pieces():
            if isinstance(messages, SharedList):
                # Yield a shared list as a separate page, so that all readers can use the same encoding.
                if page:
                    yield self._read(page)
                yield self._read(messages)
                page, size, reads = _EMPTY, 0, 0
                continue
            if page:
                page.ids += messages.ids
                page.payloads += messages.payloads
            else:
                page = messages
            size += length
            reads += not messages
            if size >= PAGE_BYTES or (page and reads >= _PAGE_READS):
                yield self._read(page)
                page, size, reads = _EMPTY, 0, 0
            elif not messages:
                yield _EMPTY
        if page:
            yield self._read(page)

    def _read(self, page: MessageList) -> MessageList:
        harmless(self._read_path.first_reads.note, self._open_topic, page, self._read_path.clock.now_ms())
        return page

    def _pieces(self) -> Iterator[tuple[MessageList, int]]:
        """Yield lists of messages of at most about a page, each with its size; an empty list follows each read."""
        for messages in self._lists():
            if not messages:
                yield messages, 0
                continue
            size = messages.size
            rows = -(-len(messages) * PAGE_BYTES // size)
            for first in range(0, len(messages), rows):
                piece = messages if rows >= len(messages) else messages[first : first + rows]
                yield self._limit_bytes(piece, size if piece is messages else piece.size)
                if self._bytes_remaining <= 0:
                    return

    def _limit_bytes(self, piece: MessageList, size: int) -> tuple[MessageList, int]:
        """Return the messages of a piece that fit into the size limit, at least one, and their size."""
        if size > self._bytes_remaining:
            sizes = list(accumulate(len(payload) + MESSAGE_BYTES for payload in piece.payloads))
            piece = piece[: max(1, bisect_right(sizes, self._bytes_remaining))]
            size = self._bytes_remaining
        self._bytes_remaining -= size
        return piece, size

    @property
    def _is_full(self) -> bool:
        """Return whether a limit is reached."""
        return not self._rows_remaining or self._bytes_remaining <= 0

    def _lists(self) -> Iterator[MessageList]:
        """Yield the messages as read from cache or store; an empty list follows each read."""
        while self._at < self._end and not self._is_full:
            runs = self._cached_runs()
            yield from filter(None, self._read_store() if runs is None else self._read_cache(runs))
            yield _EMPTY

    def _note_read(self, at: int) -> None:
        """Record that this reader never needs a row before a position again."""
        if self._notes_read:
            self._read_up_to = at

    # -- the cache ----------------------------------------------------------------------------------------------------

    def _cached_runs(self) -> list[CachedRun] | None:
        oldest = 0
        if self._transaction is not None:
            oldest = position(max(0, self._read_path.clock.now_ms() - self._read_path.cached_ms))
        runs = self._read_path.cache.read(self._open_topic.prefix, self._at, self._end, PAGE_BYTES, oldest)
        # Rule L7: the janitor, possibly in another process, may have deleted released rows that the cache still has.
        # Polls without cached rows, the most frequent case, do not read the announced limit.
        if runs and max(self._at, runs[0].first) < self._read_path.open_topics.first_kept(self._topic):
            return None
        return runs

    def _read_cache(self, runs: list[CachedRun]) -> Iterator[MessageList]:
        end = self._end
        for run in runs:
            first, stop = max(self._at, self._first_unexpired(run)), min(run.stop, self._end)
            visible = first < stop and _is_visible(self._transaction, run.pointer)
            if visible is None and not self._skips_undecided:
                self._end, self._undecided = 0, True
                self._note_read(first)
                return
            if visible is None:
                self.holes.append((first, min(run.stop, self._end)))
            elif visible and run.payloads is not None:
                for messages in self._read_path.cache.messages(run, first, min(stop, first + self._rows_remaining)):
                    # The payloads of an encoded list were measured when it was first read.
                    if not (isinstance(messages, SharedList) and messages.encoded):
                        self._learn_largest(messages.payloads)
                    yield self._limit_messages(messages)
            elif visible and run.pointer is not None:
                yield from self._reference(run.first, run.pointer)
            end = run.stop
            self._note_read(min(end, self._end))
        self._at = end

    def _first_unexpired(self, run: CachedRun) -> int:
        """Return the first position of a run whose message has not expired by its own TTL; messages expire in order."""
        first = run.first
        if run.ttl_ms is not None:
            now_ms = self._expiry_time_ms()
            while first < run.stop and expires_ms(first, run.ttl_ms) <= now_ms:
                first += 1
        return first

    # -- the store ----------------------------------------------------------------------------------------------------

    def _read_store(self) -> Iterator[MessageList]:
        prefix = self._open_topic.prefix
        first, stop = prefix + tail(self._at), prefix + tail(self._end)
        page = self._read_path.store.message.read(_COLUMNS, first, stop, self._rows())
        rows = self._visible_messages(page.items)
        # Only rows with a pointer can be references to the payload table.
        payloads = (
            cast(list[bytes], rows.payloads) if rows.pointers is None else list(filter(_is_payload, rows.payloads))
        )
        self._learn_largest(payloads)
        if len(payloads) < len(rows.keys):
            yield from self._with_references(rows)
        else:
            ids = list(map(add, map(_tail_in, rows.keys), repeat(INLINE)))
            yield self._limit_messages(MessageList(ids, payloads))
        self._open_topic.row_bytes = self._learn(sum(map(len, payloads)), len(rows.keys))
        self._at = self._end if page.resume is None else _position(page.resume, len(prefix))
        if page.items.keys and self._end:
            self._note_read(_position(page.items.keys[-1] + b"\0", len(prefix)))

    def _visible_messages(self, rows: MessageColumns) -> MessageColumns:
        """Return the rows that are messages and visible to the reader, up to the first undecided row."""
        keys, size = rows.keys, len(self._open_topic.prefix) + MESSAGE_TAIL_BYTES
        if not set(map(len, keys)) <= {size}:
            rows = rows.select([len(key) == size for key in keys])
        if self._open_topic.has_ttls and (expired := self._expired_keys(keys)):
            rows = rows.select([key not in expired for key in rows.keys])
        if self._transaction is None or rows.pointers is None:
            return rows
        visible = {pointer: _is_visible(self._transaction, pointer) for pointer in set(rows.pointers)}
        return rows if all(visible.values()) else rows.select(self._select_visible(rows.keys, rows.pointers, visible))

    def _select_visible(
        self, keys: list[bytes], pointers: list[int | None], visible: Mapping[int | None, bool | None]
    ) -> list[bool]:
        """Return for each row whether the reader sees it, up to the first undecided row."""
        chosen: list[bool] = []
        for key, pointer in zip(keys, pointers, strict=True):
            sees = visible[pointer]
            if sees is None:
                at = _position(key, len(self._open_topic.prefix))
                if not self._skips_undecided:
                    self._end, self._undecided = 0, True
                    self._note_read(at)
                    break
                self.holes.append((at, at + 1))
            chosen.append(bool(sees))
        return chosen

    def _with_references(self, rows: MessageColumns) -> Iterator[MessageList]:
        for key, pointer, payload in zip(rows.keys, rows.pointers or (), rows.payloads, strict=True):
            if payload is not None:
                yield self._limit_messages(MessageList([key[-MESSAGE_TAIL_BYTES:] + INLINE], [payload]))
            elif pointer is not None:
                yield from self._reference(_position(key, len(self._open_topic.prefix)), pointer)

    def _reference(self, at: int, pointer: int) -> Iterator[MessageList]:
        """Yield the payloads that a row refers to: all payloads of its transaction, in the order of their keys."""
        if self._transaction is None or pointer >= self._transaction.transaction_id:
            # The transaction may store more payloads, so a later fetch must read this row again.
            self._notes_read = False
        prefix = pointer_prefix(self._topic.topic.prefix, self._topic.generation, java_abs(pointer))
        start: bytes | None = prefix
        if self._inside is not None and self._inside[0] == at:
            start = prefix + self._inside[1]
        size, head, stop = len(prefix) + MESSAGE_TAIL_BYTES, tail(at), stop_key(prefix)
        while start is not None and self._rows_remaining:
            page = self._read_path.store.payload.read(_PAYLOADS, start, stop, self._rows())
            self._learn(sum(map(len, map(_payload, page.items))), len(page.items))
            self._learn_largest(map(_payload, page.items))
            rows = [row for row in page.items if len(row[0]) == size]
            yield self._limit_messages(
                MessageList([head + key[-MESSAGE_TAIL_BYTES:] for key, _ in rows], [payload for _, payload in rows])
            )
            start = page.resume

    def _rows(self) -> int:
        """Return the number of rows to read: the missing number, doubled after each read, up to a page."""
        return min(self._page_rows, self._rows_remaining << min(self._reads, SEQUENCE_BITS))

    def _learn(self, size: int, rows: int) -> int:
        """Adapt the size of the next read to the observed row size; return the average size of a row in bytes."""
        self._reads += 1
        row_bytes = size // (rows or 1) + MESSAGE_BYTES
        self._page_rows = min(self._page_rows * 4, _page_rows(row_bytes))
        return row_bytes

    def _learn_largest(self, payloads: Iterable[bytes]) -> None:
        self._open_topic.largest_bytes = max(self._open_topic.largest_bytes, max(map(len, payloads), default=0))

    def _expired_keys(self, keys: list[bytes]) -> frozenset[bytes]:
        """Return the keys of messages that have expired by their own TTL (rule L6)."""
        now_ms = self._expiry_time_ms()
        return frozenset(
            key for key, moment_ms in self._read_path.expiries.expiry_times(keys).items() if moment_ms <= now_ms
        )

    def _expiry_time_ms(self) -> int:
        """Return the time up to which own TTLs are expired: now, or with ``hold: transaction`` a lifetime earlier."""
        return self._read_path.clock.now_ms() - (self._read_path.lifetime_ms if self._topic.holds_transactions else 0)

    def _limit_messages(self, messages: MessageList) -> MessageList:
        """Return the messages that fit into the limit of messages."""
        if len(messages) > self._rows_remaining:
            messages = messages[: self._rows_remaining]
        self._rows_remaining -= len(messages)
        return messages


def _from_ms(request: FetchRequest) -> int:
    """Return the lowest publish time that the request may return, in milliseconds."""
    start = request.start
    if start is None:
        return 0
    return start if isinstance(start, int) else start.publish_ms


def _start(request: FetchRequest, cutoff: Cutoff) -> tuple[int, tuple[int, bytes] | None]:
    """Return the start position; for a start inside a reference, also the row's position and the payload key's tail.

    An expired id is ignored completely, including its payload part and ``inclusive``.
    """
    start = request.start
    if start is None:
        return position(cutoff.ms), None
    if isinstance(start, int):
        return position(max(cutoff.ms, start)), None
    if start.publish_ms < cutoff.ms:
        return position(cutoff.ms), None
    at = position(start.publish_ms, start.sequence)
    if start.in_payload_table:
        return at, (at, start.pack()[MESSAGE_TAIL_BYTES:] + (b"" if request.inclusive else b"\0"))
    return at if request.inclusive else at + 1, None


def _is_visible(transaction: Transaction | None, pointer: int | None) -> bool | None:
    """Return whether a reader sees a row; None: its transaction is undecided (``TransactionMessageFilter``)."""
    if transaction is None or pointer is None:
        return True
    if pointer < 0:
        return False
    if transaction.is_visible(pointer):
        return True
    invalids = transaction.invalids
    index = bisect_left(invalids, pointer)
    return False if index < len(invalids) and invalids[index] == pointer else None


def _is_payload(payload: bytes | None) -> TypeGuard[bytes]:
    return payload is not None


def _page_rows(row_bytes: int) -> int:
    """Return the number of rows that fill a page."""
    return min(-(-PAGE_BYTES // row_bytes), MAX_PAGE_ROWS)


def _position(key: bytes, plain: int) -> int:
    """Return the first position at or after a key whose position follows ``plain`` bytes."""
    rest = key[plain:]
    at = int.from_bytes(rest[:MESSAGE_TAIL_BYTES].ljust(MESSAGE_TAIL_BYTES, b"\0"), "big")
    return at + 1 if len(rest) > MESSAGE_TAIL_BYTES else at
