"""Reading messages: where to begin, what a reader may see, and payloads that lie in the other table.

A fetch reads page by page, from the cache where that has all rows from here on, else from the store, and holds nothing
open in between. It ends where the topic's acknowledged rows ended when it began: so every reader sees the same order,
and a fetch ends although messages keep coming.

What CDAP does otherwise (``docs/conformance/messages.md``): it loses messages where a limit ends inside a reference to
the payload table, and the first payload behind an exclusive start; it applies the payload part of an expired start to
whatever reference comes first; a reference without payloads uses up its limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from tms_core.consumers import Floor, cutoff_at
from tms_core.messaging.cache import MessageCache, Run
from tms_core.messaging.ids import SEQUENCE_BITS, HonestClock, expires_ms, position, tail
from tms_core.messaging.lines import Lines
from tms_core.messaging.model import FetchRequest, Message
from tms_core.messaging.visible import FirstReads
from tms_core.rowkey import MESSAGE_TAIL_BYTES, Cutoff, java_abs, pointer_prefix, stop_key
from tms_core.side import Expiries
from tms_core.tables.base import MessageValue, Store
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

#: Bytes of payloads in a page, at first and at most; a page has at least one message. Larger ones are slower: their
#: memory goes back to the system each time.
PAGE_BYTES, MAX_PAGE_BYTES = 60_000, 240_000
#: Rows in one read of the store, at most.
MAX_PAGE_ROWS = 4000
#: What ends the id of a message that lies in the message table.
_INLINE = bytes(MESSAGE_TAIL_BYTES)

#: A row of the message table.
MessageRow = tuple[bytes, MessageValue]
#: Makes a message of id and payload; the constructor of a named tuple without its detour through Python.
_message = partial(tuple.__new__, Message)
_payload = itemgetter(1)


class Shelf(NamedTuple):
    """Where messages are read from.

    Attributes:
        store: the tables.
        lines: how far a topic goes.
        cache: recent rows.
        expiries: messages with a ttl of their own; None where there can be none.
        clock: what time it is.
        cached_ms: how old rows may be that a reader in a transaction takes from the cache.
        first_reads: notes when messages are first read.
        floor: what makes messages live on after their topic's ttl; None: nothing does.
    """

    store: Store
    lines: Lines
    cache: MessageCache
    expiries: Expiries | None
    clock: HonestClock
    cached_ms: int
    first_reads: FirstReads
    floor: Floor | None = None


class Fetch:
    """One fetch (``CoreMessageFetcher``).

    Args:
        shelf: where messages are read from.
        topic: whose messages.
        request: which of them.
    """

    def __init__(self, shelf: Shelf, topic: TopicMetadata, request: FetchRequest) -> None:
        self._shelf = shelf
        self._topic = topic
        self._line = shelf.lines.messages(topic)
        self._transaction = request.transaction
        self._left = request.limit
        cutoff = cutoff_at(topic, shelf.clock.now_ms(), shelf.floor, _from_ms(request))
        self._at, self._inside = _start(request, cutoff)
        self._end = self._line.ids.end
        self._page_bytes = PAGE_BYTES
        self._page_rows = max(1, min(PAGE_BYTES // self._line.row_bytes, MAX_PAGE_ROWS))
        self._reads = 0

    def pages(self) -> Iterator[list[Message]]:
        """The messages, in pages of about ``PAGE_BYTES``, growing; none is empty.

        Raises:
            StoreError: the store could not be read; what came is right.
        """
        page: list[Message] = []
        size = 0
        for messages, length in self._pieces():
            page += messages
            size += length
            if size >= self._page_bytes:
                yield self._read(page)
                page, size = [], 0
                self._page_bytes = min(self._page_bytes * 2, MAX_PAGE_BYTES)
        if page:
            yield self._read(page)

    def _read(self, page: list[Message]) -> list[Message]:
        self._shelf.first_reads.note(self._line, page, self._shelf.clock.now_ms())
        return page

    def _pieces(self) -> Iterator[tuple[list[Message], int]]:
        """The messages in lists of at most about a page, each with its bytes."""
        for messages in self._lists():
            size = sum(map(len, map(_payload, messages)))
            rows = max(1, len(messages) * self._page_bytes // (size + 1))
            if rows >= len(messages):
                yield messages, size
                continue
            for first in range(0, len(messages), rows):
                piece = messages[first : first + rows]
                yield piece, sum(map(len, map(_payload, piece)))

    def _lists(self) -> Iterator[list[Message]]:
        """The messages, as they come together."""
        while self._at < self._end and self._left:
            runs = self._cached()
            yield from self._from_store() if runs is None else self._from_cache(runs)

    # -- the cache ----------------------------------------------------------------------------------------------------

    def _cached(self) -> list[Run] | None:
        oldest = 0
        if self._transaction is not None:
            oldest = position(max(0, self._shelf.clock.now_ms() - self._shelf.cached_ms))
        return self._shelf.cache.read(self._line.prefix, self._at, self._end, self._page_bytes, oldest)

    def _from_cache(self, runs: list[Run]) -> Iterator[list[Message]]:
        behind = self._end
        for run in runs:
            first, stop = max(self._at, self._living(run)), min(run.stop, self._end)
            verdict = first < stop and _see(self._transaction, run.pointer)
            if verdict is None:
                self._end = 0
                return
            if verdict and run.payloads is not None:
                stop = min(stop, first + self._left)
                ids = [tail(at) + _INLINE for at in range(first, stop)]
                payloads = run.payloads[first - run.first : stop - run.first]
                yield self._limited(list(map(_message, zip(ids, payloads, strict=True))))
            elif verdict and run.pointer is not None:
                yield from self._reference(run.first, run.pointer)
            behind = run.stop
        self._at = behind

    def _living(self, run: Run) -> int:
        """The first position of a run that no ttl of its own has taken; they come due in order."""
        first = run.first
        if run.ttl_ms is not None:
            now_ms = self._shelf.clock.now_ms()
            while first < run.stop and expires_ms(first, run.ttl_ms) <= now_ms:
                first += 1
        return first

    # -- the store ----------------------------------------------------------------------------------------------------

    def _from_store(self) -> Iterator[list[Message]]:
        prefix = self._line.prefix
        first, stop = prefix + tail(self._at), prefix + tail(self._end)
        page = self._shelf.store.message.rows(first, stop, self._rows(), self._page_bytes)
        rows = self._shown(page.items)
        payloads = [payload for _, (_, payload) in rows]
        if None in payloads:
            yield from self._with_references(rows)
        else:
            ids = [key[-MESSAGE_TAIL_BYTES:] + _INLINE for key, _ in rows]
            yield self._limited(list(map(_message, zip(ids, payloads, strict=True))))
        self._line.row_bytes = self._learn(sum(map(len, filter(None, payloads))), len(payloads))
        self._at = self._end if page.resume is None else _position(page.resume, len(prefix))

    def _shown(self, rows: list[MessageRow]) -> list[MessageRow]:
        """Those of some rows that are messages and that the reader sees, up to the first that nobody can tell of."""
        keys = [key for key, _ in rows]
        size = len(self._line.prefix) + MESSAGE_TAIL_BYTES
        if not set(map(len, keys)) <= {size}:
            rows = [row for row in rows if len(row[0]) == size]
        if self._line.mortal and (gone := self._gone(keys)):
            rows = [row for row in rows if row[0] not in gone]
        if self._transaction is None:
            return rows
        shown: list[MessageRow] = []
        for pointer, group in groupby(rows, key=_pointer):
            verdict = _see(self._transaction, pointer)
            if verdict is None:
                self._end = 0
                break
            if verdict:
                shown += group
        return shown

    def _with_references(self, rows: list[MessageRow]) -> Iterator[list[Message]]:
        for key, (pointer, payload) in rows:
            if payload is not None:
                yield self._limited([Message(key[-MESSAGE_TAIL_BYTES:] + _INLINE, payload)])
            elif pointer is not None:
                yield from self._reference(_position(key, len(self._line.prefix)), pointer)

    def _reference(self, at: int, pointer: int) -> Iterator[list[Message]]:
        """The payloads that a row stands for: all of its transaction, in the order they were stored."""
        prefix = pointer_prefix(self._topic.topic.prefix, self._topic.generation, java_abs(pointer))
        start: bytes | None = prefix
        if self._inside is not None and self._inside[0] == at:
            start = prefix + self._inside[1]
        size, head, stop = len(prefix) + MESSAGE_TAIL_BYTES, tail(at), stop_key(prefix)
        while start is not None and self._left:
            page = self._shelf.store.payload.rows(start, stop, self._rows(), self._page_bytes)
            self._learn(sum(map(len, map(_payload, page.items))), len(page.items))
            yield self._limited(
                [Message(head + key[-MESSAGE_TAIL_BYTES:], payload) for key, payload in page.items if len(key) == size]
            )
            start = page.resume

    def _rows(self) -> int:
        """How many rows to read: not many more than are wanted, unless the last reads showed that few of them are."""
        return min(self._page_rows, self._left << min(self._reads, SEQUENCE_BITS))

    def _learn(self, size: int, rows: int) -> int:
        """Read more at once from now on, but not more bytes than a page has; returns the bytes of a row."""
        self._reads += 1
        row_bytes = size // (rows or 1) + 1
        self._page_rows = max(1, min(self._page_rows * 4, self._page_bytes // row_bytes, MAX_PAGE_ROWS))
        return row_bytes

    def _gone(self, keys: list[bytes]) -> frozenset[bytes]:
        """Those of some rows, in key order, that a ttl of their own has taken."""
        expiries, start = self._shelf.expiries, keys[0] if keys else None
        now_ms = self._shelf.clock.now_ms()
        gone: set[bytes] = set()
        while expiries is not None and start is not None:
            page = expiries.between(start, keys[-1] + b"\0", MAX_PAGE_ROWS)
            gone.update(key for key, moment_ms in page.items if moment_ms <= now_ms)
            start = page.resume
        return frozenset(gone)

    def _limited(self, messages: list[Message]) -> list[Message]:
        """As many as are still wanted."""
        if len(messages) > self._left:
            messages = messages[: self._left]
        self._left -= len(messages)
        return messages


def _from_ms(request: FetchRequest) -> int:
    """The lowest publish time there can be among what is wanted."""
    start = request.start
    if start is None:
        return 0
    return start if isinstance(start, int) else start.publish_ms


def _start(request: FetchRequest, cutoff: Cutoff) -> tuple[int, tuple[int, bytes] | None]:
    """The position to begin at, and, where that is inside a reference, its position and where in its payloads.

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
    """Whether a reader sees a row; None: nobody can tell yet, so the fetch ends here (``TransactionMessageFilter``)."""
    if transaction is None or pointer is None:
        return True
    if pointer < 0:
        return False
    if transaction.is_visible(pointer):
        return True
    invalids = transaction.invalids
    index = bisect_left(invalids, pointer)
    return False if index < len(invalids) and invalids[index] == pointer else None


def _pointer(row: MessageRow) -> int | None:
    return row[1][0]


def _position(key: bytes, plain: int) -> int:
    """The first position at or after a key whose position begins after ``plain`` bytes."""
    rest = key[plain:]
    at = int.from_bytes(rest[:MESSAGE_TAIL_BYTES].ljust(MESSAGE_TAIL_BYTES, b"\0"), "big")
    return at + 1 if len(rest) > MESSAGE_TAIL_BYTES else at
