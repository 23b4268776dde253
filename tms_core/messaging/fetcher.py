"""Reading messages: the start, the visibility of rows, and payloads in the other table.

A fetch reads page by page, from the cache where that has all rows from here on, else from the store, and holds nothing
open in between. It ends where the topic's acknowledged rows ended when it began: so every reader sees the same order,
and a fetch ends although messages keep coming.

What CDAP does otherwise (``docs/reference/conformance/messages.md``): it loses messages where a limit ends inside a
reference to
the payload table, and the first payload behind an exclusive start; it applies the payload part of an expired start to
whatever reference comes first; a reference without payloads uses up its limit.
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

#: Bytes of messages in a page; it has at least one message. Larger ones are slower: their memory goes back to the
#: system each time.
PAGE_BYTES = 240_000
#: Rows in one read of the store, at most.
MAX_PAGE_ROWS = 4000
#: After so many reads a page is given out however small it is, so that a reader does not wait for the rest of it.
_PAGE_READS = 8

#: What a page of a fetch has.
_COLUMNS, _PAYLOADS = COLUMNS.within(PAGE_BYTES), PAYLOADS.within(PAGE_BYTES)
_NONE = MessageList([], [])
_payload = itemgetter(1)
_tail_in = itemgetter(slice(-MESSAGE_TAIL_BYTES, None))


class ReadPath(NamedTuple):
    """Where messages are read from.

    Attributes:
        cached_ms: how old rows may be that a reader in a transaction takes from the cache.
        first_reads: notes when messages are first read.
        floor: the holds of messages after their topic's TTL; None: nothing does.
        lifetime_ms: how long after its begin a transaction may write.
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
    """One fetch (``CoreMessageFetcher``).

    Args:
        steps_over: whether it goes on behind messages that are not decided yet, and notes their places.

    Attributes:
        holes: where those are: the first position and the one behind the last of each.
    """

    def __init__(
        self, read_path: ReadPath, topic: TopicMetadata, request: FetchRequest, *, steps_over: bool = False
    ) -> None:
        self.holes: list[tuple[int, int]] = []
        self._steps_over = steps_over
        self._read_path = read_path
        self._topic = topic
        self._open_topic = read_path.open_topics.messages(topic)
        self._transaction = request.transaction
        self._left = request.limit
        self._left_bytes = request.limit_bytes
        cutoff = cutoff_at(topic, read_path.clock.now_ms(), read_path.floor, _from_ms(request), read_path.lifetime_ms)
        self._at, self._inside = _start(request, cutoff)
        self._end = self._behind = self._open_topic.ids.end
        self._undecided = False
        self._read_up_to: int | None = None
        self._notes_read = True
        self._page_rows = _page_rows(self._open_topic.row_bytes)
        self._reads = 0

    @property
    def position(self) -> MessageId | None:
        """Return where a later fetch of the same reader may begin, that message included, and miss nothing.

        It is behind the last row that was read, or at the first that cannot be decided yet. None: nothing was read, or
        the limit has ended the fetch, so that the last message says where to go on.
        """
        if self._read_up_to is None or self._is_full or self._read_up_to >= POSITIONS:
            return None
        return MessageId.parse(tail(self._read_up_to) + INLINE)

    @property
    def is_at_end(self) -> bool:
        """Return whether all that there was has been read; not so where something cannot be decided yet."""
        return self._at >= self._end and not self._undecided

    @property
    def is_sealed(self) -> bool:
        """Return whether the topic takes no more messages, because other partitions do."""
        return SEALED in self._topic.properties or FAMILIES in self._topic.properties

    @property
    def has_more(self) -> bool:
        """Return whether messages came to the topic since this began."""
        return self._open_topic.ids.end > self._behind

    @property
    def largest_bytes(self) -> int:
        """Return the largest payload that was ever read of this topic here."""
        return self._open_topic.largest_bytes

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have something called, by any thread, whenever messages have come to the topic while the block runs."""
        self._open_topic.wakes[wake] = None
        try:
            yield
        finally:
            del self._open_topic.wakes[wake]

    def pages(self) -> Iterator[MessageList]:
        """Yield the messages, in pages of about ``PAGE_BYTES``; one read of the store at most between two of them.

        A page is empty where a read has found too little, so that the caller can see to other things meanwhile.

        Raises:
            StoreError: the store could not be read; the messages so far are right.
        """
        page = _NONE
        size = reads = 0
        for messages, length in self._pieces():
            if isinstance(messages, SharedList):
                # By itself, so that what is made of it is the same for all.
                if page:
                    yield self._read(page)
                yield self._read(messages)
                page, size, reads = _NONE, 0, 0
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
                page, size, reads = _NONE, 0, 0
            elif not messages:
                yield _NONE
        if page:
            yield self._read(page)

    def _read(self, page: MessageList) -> MessageList:
        harmless(self._read_path.first_reads.note, self._open_topic, page, self._read_path.clock.now_ms())
        return page

    def _pieces(self) -> Iterator[tuple[MessageList, int]]:
        """Yield the messages in lists of at most about a page, each with its bytes; an empty one ends each read."""
        for messages in self._lists():
            if not messages:
                yield messages, 0
                continue
            size = messages.size
            rows = -(-len(messages) * PAGE_BYTES // size)
            for first in range(0, len(messages), rows):
                piece = messages if rows >= len(messages) else messages[first : first + rows]
                yield self._up_to_bytes(piece, size if piece is messages else piece.size)
                if self._left_bytes <= 0:
                    return

    def _up_to_bytes(self, piece: MessageList, size: int) -> tuple[MessageList, int]:
        """As much of a piece as the limit of bytes lets through, at least one message, with its bytes."""
        if size > self._left_bytes:
            sizes = list(accumulate(len(payload) + MESSAGE_BYTES for payload in piece.payloads))
            piece = piece[: max(1, bisect_right(sizes, self._left_bytes))]
            size = self._left_bytes
        self._left_bytes -= size
        return piece, size

    @property
    def _is_full(self) -> bool:
        """Return whether a limit is reached."""
        return not self._left or self._left_bytes <= 0

    def _lists(self) -> Iterator[MessageList]:
        """Yield the messages, as they come together; an empty list ends each read."""
        while self._at < self._end and not self._is_full:
            runs = self._cached()
            yield from filter(None, self._from_store() if runs is None else self._from_cache(runs))
            yield _NONE

    def _note_read(self, at: int) -> None:
        """All rows before a position are read, for good."""
        if self._notes_read:
            self._read_up_to = at

    # -- the cache ----------------------------------------------------------------------------------------------------

    def _cached(self) -> list[CachedRun] | None:
        oldest = 0
        if self._transaction is not None:
            oldest = position(max(0, self._read_path.clock.now_ms() - self._read_path.cached_ms))
        runs = self._read_path.cache.read(self._open_topic.prefix, self._at, self._end, PAGE_BYTES, oldest)
        # Nothing tells the cache which of the released rows are deleted by now, maybe by a janitor in another process.
        # A poll that finds nothing, as most do that keep up, is not charged with reading how far they were released.
        if runs and max(self._at, runs[0].first) < self._read_path.open_topics.first_kept(self._topic):
            return None
        return runs

    def _from_cache(self, runs: list[CachedRun]) -> Iterator[MessageList]:
        behind = self._end
        for run in runs:
            first, stop = max(self._at, self._living(run)), min(run.stop, self._end)
            visible = first < stop and _see(self._transaction, run.pointer)
            if visible is None and not self._steps_over:
                self._end, self._undecided = 0, True
                self._note_read(first)
                return
            if visible is None:
                self.holes.append((first, min(run.stop, self._end)))
            elif visible and run.payloads is not None:
                for messages in self._read_path.cache.messages(run, first, min(stop, first + self._left)):
                    # What was encoded was looked at before.
                    if not (isinstance(messages, SharedList) and messages.encoded):
                        self._learn_largest(messages.payloads)
                    yield self._limited(messages)
            elif visible and run.pointer is not None:
                yield from self._reference(run.first, run.pointer)
            behind = run.stop
            self._note_read(min(behind, self._end))
        self._at = behind

    def _living(self, run: CachedRun) -> int:
        """Return the first position of a run that no ttl of its own has taken; they come due in order."""
        first = run.first
        if run.ttl_ms is not None:
            now_ms = self._expiring_ms()
            while first < run.stop and expires_ms(first, run.ttl_ms) <= now_ms:
                first += 1
        return first

    # -- the store ----------------------------------------------------------------------------------------------------

    def _from_store(self) -> Iterator[MessageList]:
        prefix = self._open_topic.prefix
        first, stop = prefix + tail(self._at), prefix + tail(self._end)
        page = self._read_path.store.message.read(_COLUMNS, first, stop, self._rows())
        rows = self._shown(page.items)
        # Only what has a pointer can have its payload elsewhere.
        payloads = cast(list[bytes], rows.payloads) if rows.pointers is None else list(filter(_is_there, rows.payloads))
        self._learn_largest(payloads)
        if len(payloads) < len(rows.keys):
            yield from self._with_references(rows)
        else:
            ids = list(map(add, map(_tail_in, rows.keys), repeat(INLINE)))
            yield self._limited(MessageList(ids, payloads))
        self._open_topic.row_bytes = self._learn(sum(map(len, payloads)), len(rows.keys))
        self._at = self._end if page.resume is None else _position(page.resume, len(prefix))
        if page.items.keys and self._end:
            self._note_read(_position(page.items.keys[-1] + b"\0", len(prefix)))

    def _shown(self, rows: MessageColumns) -> MessageColumns:
        """Return those of some rows that are messages and that the reader sees, up to the first that is undecided."""
        keys, size = rows.keys, len(self._open_topic.prefix) + MESSAGE_TAIL_BYTES
        if not set(map(len, keys)) <= {size}:
            rows = rows.only([len(key) == size for key in keys])
        if self._open_topic.mortal and (gone := self._gone(keys)):
            rows = rows.only([key not in gone for key in rows.keys])
        if self._transaction is None or rows.pointers is None:
            return rows
        visible = {pointer: _see(self._transaction, pointer) for pointer in set(rows.pointers)}
        return rows if all(visible.values()) else rows.only(self._chosen(rows.keys, rows.pointers, visible))

    def _chosen(
        self, keys: list[bytes], pointers: list[int | None], visible: Mapping[int | None, bool | None]
    ) -> list[bool]:
        """Return which rows the reader sees, up to the first that is undecided."""
        chosen: list[bool] = []
        for key, pointer in zip(keys, pointers, strict=True):
            sees = visible[pointer]
            if sees is None:
                at = _position(key, len(self._open_topic.prefix))
                if not self._steps_over:
                    self._end, self._undecided = 0, True
                    self._note_read(at)
                    break
                self.holes.append((at, at + 1))
            chosen.append(bool(sees))
        return chosen

    def _with_references(self, rows: MessageColumns) -> Iterator[MessageList]:
        for key, pointer, payload in zip(rows.keys, rows.pointers or (), rows.payloads, strict=True):
            if payload is not None:
                yield self._limited(MessageList([key[-MESSAGE_TAIL_BYTES:] + INLINE], [payload]))
            elif pointer is not None:
                yield from self._reference(_position(key, len(self._open_topic.prefix)), pointer)

    def _reference(self, at: int, pointer: int) -> Iterator[MessageList]:
        """Yield the payloads that a row stands for: all of its transaction, in the order they were stored."""
        if self._transaction is None or pointer >= self._transaction.transaction_id:
            # More may be stored in it yet.
            self._notes_read = False
        prefix = pointer_prefix(self._topic.topic.prefix, self._topic.generation, java_abs(pointer))
        start: bytes | None = prefix
        if self._inside is not None and self._inside[0] == at:
            start = prefix + self._inside[1]
        size, head, stop = len(prefix) + MESSAGE_TAIL_BYTES, tail(at), stop_key(prefix)
        while start is not None and self._left:
            page = self._read_path.store.payload.read(_PAYLOADS, start, stop, self._rows())
            self._learn(sum(map(len, map(_payload, page.items))), len(page.items))
            self._learn_largest(map(_payload, page.items))
            ours = [row for row in page.items if len(row[0]) == size]
            yield self._limited(
                MessageList([head + key[-MESSAGE_TAIL_BYTES:] for key, _ in ours], [payload for _, payload in ours])
            )
            start = page.resume

    def _rows(self) -> int:
        """Return how many rows to read: not many more than are wanted, unless the last reads showed that few of them
        are.
        """
        return min(self._page_rows, self._left << min(self._reads, SEQUENCE_BITS))

    def _learn(self, size: int, rows: int) -> int:
        """Read more at once from now on, but not more bytes than a page has; returns the bytes of a row."""
        self._reads += 1
        row_bytes = size // (rows or 1) + MESSAGE_BYTES
        self._page_rows = min(self._page_rows * 4, _page_rows(row_bytes))
        return row_bytes

    def _learn_largest(self, payloads: Iterable[bytes]) -> None:
        self._open_topic.largest_bytes = max(self._open_topic.largest_bytes, max(map(len, payloads), default=0))

    def _gone(self, keys: list[bytes]) -> frozenset[bytes]:
        """Return those of some rows, in key order, that a ttl of their own has taken."""
        now_ms = self._expiring_ms()
        return frozenset(
            key for key, moment_ms in self._read_path.expiries.moments(keys).items() if moment_ms <= now_ms
        )

    def _expiring_ms(self) -> int:
        """Return the moment by which ttls of messages' own are judged."""
        return self._read_path.clock.now_ms() - (self._read_path.lifetime_ms if self._topic.holds_transactions else 0)

    def _limited(self, messages: MessageList) -> MessageList:
        """Return as many as are still wanted."""
        if len(messages) > self._left:
            messages = messages[: self._left]
        self._left -= len(messages)
        return messages


def _from_ms(request: FetchRequest) -> int:
    """Return the lowest possible publish time of the result."""
    start = request.start
    if start is None:
        return 0
    return start if isinstance(start, int) else start.publish_ms


def _start(request: FetchRequest, cutoff: Cutoff) -> tuple[int, tuple[int, bytes] | None]:
    """Return the position to begin at, and, where that is inside a reference, its position and where in its payloads.

    An id that has expired is as good as none: not only its position, but also its payload part and whether it is
    included mean nothing any more.
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


def _see(transaction: Transaction | None, pointer: int | None) -> bool | None:
    """Return whether a reader sees a row; None: undecided yet, so the fetch ends here
    (``TransactionMessageFilter``).
    """
    if transaction is None or pointer is None:
        return True
    if pointer < 0:
        return False
    if transaction.is_visible(pointer):
        return True
    invalids = transaction.invalids
    index = bisect_left(invalids, pointer)
    return False if index < len(invalids) and invalids[index] == pointer else None


def _is_there(payload: bytes | None) -> TypeGuard[bytes]:
    return payload is not None


def _page_rows(row_bytes: int) -> int:
    """Return how many rows fill a page."""
    return min(-(-PAGE_BYTES // row_bytes), MAX_PAGE_ROWS)


def _position(key: bytes, plain: int) -> int:
    """Return the first position at or after a key whose position begins after ``plain`` bytes."""
    rest = key[plain:]
    at = int.from_bytes(rest[:MESSAGE_TAIL_BYTES].ljust(MESSAGE_TAIL_BYTES, b"\0"), "big")
    return at + 1 if len(rest) > MESSAGE_TAIL_BYTES else at
