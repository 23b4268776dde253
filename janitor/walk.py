"""One pass over a store by the law: the same steps for a plan and for a sweep.

The walk follows the garbage. It jumps from topic to topic, reads the range that is due, and never reads a live
message row unless an invalid transaction may have written it or an expired payload may belong to it. What it finds it
hands to an *act*: a plan's act does nothing, a sweep's deletes. So a plan's figures and a run's mean the same.

Order matters in three places. Messages go before payloads, because a payload is free once the message that refers to
it is gone. Inversions come after deletions, because a row that goes need not be inverted. And the space of a topic is
walked in key order, because then a page's first and last key speak for all between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from janitor.policy import Hold, Invert, Keep, Reason, Row, Rule, decide
from janitor.ranges import (
    Range,
    Span,
    beyond,
    intersect,
    message_spans,
    newest_expired_pointer,
    payload_spans,
    topic_stop,
)
from janitor.references import find_referenced, search_range
from janitor.report import DataTable, EntryKey, Tally
from janitor.world import TopicWork, World
from tms_core.errors import StoreError
from tms_core.rowkey import (
    GENERATION_BYTES,
    LONG_MAX,
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    MessageKey,
    PayloadKey,
    generation_prefix,
    time_prefix,
    topic_prefix,
)
from tms_core.tables.base import KeyTable, Store, TxCell
from tms_core.topic import TopicId

#: Payload keys gathered before their messages are looked for; bounds memory, about 10 MB.
CANDIDATES = 50_000

#: How often a topic is planned anew within one pass before it is left for the next.
REPLANS = 3


class Moved(Exception):
    """A topic's metadata changed between planning and deleting (rule S2); the batch was dropped."""


class Act(Protocol):
    """What is done with the rows a walk finds."""

    def delete(self, work: TopicWork, table: KeyTable, keys: Sequence[bytes]) -> None:
        """Delete one batch.

        Raises:
            Moved: the topic is no longer what ``work`` says; nothing was deleted.
        """
        ...

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        """Negate pointers; returns for each whether its row was changed."""
        ...


class Preview:
    """The act of a plan: nothing."""

    def delete(self, work: TopicWork, table: KeyTable, keys: Sequence[bytes]) -> None:
        """Leave the rows where they are."""

    def invert(self, cells: Sequence[TxCell]) -> list[bool]:
        return [True] * len(cells)


#: Told after every page: the phase, the topic, and how many rows the page had.
Observer = Callable[[str, TopicId | None, int], None]


class Batch(NamedTuple):
    """Rows of one topic, generation and table with one fate."""

    table: DataTable
    generation: int
    rule: Rule
    keys: list[bytes]


class Walk:
    """A pass over one store.

    Args:
        store: what to walk.
        world: what was known when the pass began.
        act: what to do with what is found.
        tally: where it is counted.
        page_rows: rows per page, and so per batch.
        observer: told about progress.

    Attributes:
        failed: metadata keys of topics that were left undone; ``tally.errors`` says why.
    """

    def __init__(
        self, store: Store, world: World, act: Act, tally: Tally, *, page_rows: int, observer: Observer
    ) -> None:
        self._store = store
        self._world = world
        self._act = act
        self._tally = tally
        self._page_rows = page_rows
        self._observe = observer
        self.failed: set[bytes] = set()

    # -- messages ------------------------------------------------------------------------------------------------

    def messages(self) -> None:
        """Delete what L2 and L3 take of the message table."""
        self._each_topic("message", self._store.message, self._messages_of)

    def payloads(self) -> None:
        """Delete what L2, L3 and L5 take of the payload table."""
        self._each_topic("payload", self._store.payload, self._payloads_of)

    def _each_topic(
        self, name: DataTable, table: KeyTable, visit: Callable[[TopicWork, bytes], bytes]
    ) -> None:
        """Jump through the table's topics in key order."""
        key = self._first(table, b"")
        while key is not None:
            prefix = topic_prefix(key)
            if prefix is None:
                self._tally.keep_foreign(name, [key])
                key = self._first(table, key + b"\x00")
                continue
            if not self._world.in_scope(prefix):
                key = self._first(table, topic_stop(prefix))
                continue
            resume = self._visit(name, table, prefix, key, visit)
            key = self._first(table, resume)
            if key is not None and key < topic_stop(prefix):
                self._classify(name, table, prefix, key, topic_stop(prefix))
                key = self._first(table, topic_stop(prefix))

    def _visit(
        self, name: DataTable, table: KeyTable, prefix: bytes, key: bytes, visit: Callable[[TopicWork, bytes], bytes]
    ) -> bytes:
        """Do one topic, again if its metadata moves meanwhile; returns where its unvisited rows start."""
        kept = self._tally.kept.copy()
        for _ in range(REPLANS):
            work = self._world.topics.get(prefix)
            if work is None:
                return key
            first = generation_prefix(prefix, 1)
            if key < first:
                self._classify(name, table, prefix, key, first)
            if prefix in self.failed:
                return topic_stop(prefix)
            try:
                return visit(work, max(key, first))
            except Moved:
                self._tally.forget_kept(kept, work.topic.topic, name)
                self._world.reread(prefix)
            except StoreError as error:
                return self._fail(prefix, f"{work.topic.topic}: {error}")
        return self._fail(prefix, f"topic {prefix[:-1].decode()} keeps changing; left for the next run")

    def _fail(self, prefix: bytes, message: str) -> bytes:
        self.failed.add(prefix)
        self._tally.errors.append(message)
        return topic_stop(prefix)

    def _messages_of(self, work: TopicWork, first_key: bytes) -> bytes:
        table = self._store.message
        for span in self._allowed("message", work, message_spans(work.topic, work.frontier)):
            if span.stop <= first_key:
                continue
            for page in self._pages("message", table, work, span, first_key):
                for batch in self._batches("message", work, span, page):
                    self._take(table, work, batch, work.frontier.hold if span.held else None)
        return beyond(work.topic)

    # -- payloads ------------------------------------------------------------------------------------------------

    def _payloads_of(self, work: TopicWork, first_key: bytes) -> bytes:
        table = self._store.payload
        newest = None
        if not self._world.thorough:
            newest = newest_expired_pointer(work.frontier, self._world.terms.lifetime.allowance_ms)
        for span in self._allowed("payload", work, payload_spans(work.topic, work.frontier, newest)):
            if span.stop <= first_key:
                continue
            pages = self._pages("payload", table, work, span, first_key)
            if span.by_row:
                self._take_by_row(work, span, pages)
                continue
            for page in pages:
                for batch in self._batches("payload", work, span, page):
                    self._take(table, work, batch, work.frontier.hold if span.held else None)
        return generation_prefix(work.topic.topic.prefix, max(work.topic.old_below, work.topic.generation + 1))

    def _take_by_row(self, work: TopicWork, span: Span, pages: Iterator[list[bytes]]) -> None:
        """Judge the payload rows of one generation each by its own time and transaction."""
        candidates: list[bytes] = []
        for page in pages:
            for batch in self._batches("payload", work, span, page):
                due, held = self._split_by_time(work, batch)
                self._take(self._store.payload, work, batch._replace(keys=held), work.frontier.hold)
                candidates += self._decided(due)
            if len(candidates) >= CANDIDATES:
                self._take_candidates(work, span, candidates)
                candidates = []
        self._take_candidates(work, span, candidates)

    def _split_by_time(self, work: TopicWork, batch: Batch) -> tuple[list[bytes], list[bytes]]:
        """The keys that may go now, and those that are due by the law but held."""
        cutoff = work.frontier.cutoff.ms.to_bytes(8, "big")
        due = [key for key in batch.keys if key[-10:-2] < cutoff]
        if batch.rule is Rule.OLD_GENERATION:
            return due, [key for key in batch.keys if key[-10:-2] >= cutoff]
        law = work.frontier.due.ms.to_bytes(8, "big")
        return due, [key for key in batch.keys if cutoff <= key[-10:-2] < law] if cutoff < law else []

    def _decided(self, keys: list[bytes]) -> list[bytes]:
        """Without the rows whose transaction may still commit."""
        undecided = self._world.transactions.is_undecided
        decided = [key for key in keys if not undecided(int.from_bytes(key[-18:-10], "big", signed=True))]
        self._tally.keep(Reason.UNDECIDED, len(keys) - len(decided))
        return decided

    def _take_candidates(self, work: TopicWork, span: Span, keys: list[bytes]) -> None:
        """Delete expired payload rows that no message refers to."""
        parsed = [(key, parts) for key in keys if (parts := PayloadKey.parse(key)) is not None]
        if not parsed:
            return
        generation = parsed[0][1].generation
        window = search_range(
            work.topic.topic,
            generation,
            # Under a plan's ranges messages may stay that the frontier would let go.
            work.frontier.cutoff.ms if self._world.limits is None else 0,
            (parts for _, parts in parsed),
            self._world.terms.lifetime,
        )
        pointers = {parts.write_pointer for _, parts in parsed}
        referenced = find_referenced(
            self._store.message,
            window,
            pointers,
            self._page_rows,
            lambda: self._observe("references", work.topic.topic, 0),
        )
        free = [key for key, parts in parsed if parts.write_pointer not in referenced]
        self._tally.keep(Reason.REFERENCED, len(parsed) - len(free))
        for first in range(0, len(free), self._page_rows):
            batch = Batch("payload", generation, span.rule, free[first : first + self._page_rows])
            self._take(self._store.payload, work, batch, None)

    # -- inversions ----------------------------------------------------------------------------------------------

    def inversions(self) -> None:
        """Negate the pointers of invalid transactions in the message rows that stay (L4)."""
        since_ms = self._world.search_since_ms
        if since_ms is None:
            return
        table = self._store.message
        key = self._first(table, b"")
        while key is not None:
            parsed = MessageKey.parse(key)
            if parsed is None:
                key = self._first(table, key + b"\x00")
                continue
            start, stop = self._search(parsed, since_ms)
            if self._world.in_scope(parsed.topic.prefix):
                self._search_cells(Range(max(key, start), stop))
            key = self._first(table, stop)

    def _search(self, key: MessageKey, since_ms: int) -> Range:
        prefix = key.topic.prefix
        start = time_prefix(prefix, key.generation, min(max(0, since_ms), LONG_MAX))
        # A generation of -1 is followed by the next topic, not by generation 0.
        last = key.generation == -1
        return Range(start, topic_stop(prefix) if last else generation_prefix(prefix, key.generation + 1))

    def _search_cells(self, window: Range) -> None:
        is_invalid = self._world.transactions.is_invalid
        start: bytes | None = window.start
        while start is not None and start < window.stop:
            page = self._store.message.cells(start, window.stop, self._page_rows)
            found = [cell for cell in page.items if cell.pointer > 0 and is_invalid(cell.pointer)]
            if found:
                self._invert(found)
            self._observe("invert", None, len(page.items))
            start = page.resume

    def _invert(self, cells: list[TxCell]) -> None:
        """Negate the cells that the law inverts; it has the last word on each."""
        doomed = [(key, cell) for cell in cells if (key := self._inverts(cell)) is not None]
        changed = self._act.invert([cell for _, cell in doomed]) if doomed else []
        for (key, cell), done in zip(doomed, changed, strict=True):
            if done:
                self._tally_inverted(key, cell)

    def _inverts(self, cell: TxCell) -> MessageKey | None:
        key = MessageKey.parse(cell.key)
        if key is None:
            return None
        work = self._world.topics.get(key.topic.prefix)
        topic, frontier = (work.topic, work.frontier) if work else (None, None)
        verdict = decide(Row("message", key, cell.pointer), topic, frontier, self._world.transactions, False, None)
        return key if isinstance(verdict, Invert) else None

    def _tally_inverted(self, key: MessageKey, cell: TxCell) -> None:
        label = EntryKey(key.topic, key.generation, "message", Rule.INVALID_TRANSACTION, self._world.label)
        self._tally.entry(label).add([cell.key], len(cell.key), key.publish_ms, key.publish_ms)
        self._tally.pointers.setdefault(key.topic, set()).add(cell.pointer)

    # -- what all steps share ------------------------------------------------------------------------------------

    def _first(self, table: KeyTable, start: bytes) -> bytes | None:
        """The first key at or after ``start``."""
        items = table.keys(start, None, 1).items
        return items[0] if items else None

    def _allowed(self, name: DataTable, work: TopicWork, spans: list[Span]) -> list[Span]:
        limits = self._world.limits
        return spans if limits is None else intersect(spans, limits.ranges(name, work.topic.topic))

    def _pages(
        self, name: DataTable, table: KeyTable, work: TopicWork, span: Span, first_key: bytes
    ) -> Iterator[list[bytes]]:
        start: bytes | None = max(span.start, first_key)
        while start is not None and start < span.stop:
            page = table.keys(start, span.stop, self._page_rows)
            self._observe(name, work.topic.topic, len(page.items))
            yield page.items
            start = page.resume

    def _batches(self, name: DataTable, work: TopicWork, span: Span, keys: list[bytes]) -> Iterator[Batch]:
        """Sort out foreign keys (L0) and split the rest by generation.

        A page is in key order and its keys share the topic, so once all have our length, the ends of a generation's
        part speak for the middle. That keeps the cost per row to a length and, for payloads, one byte.
        """
        plain = len(work.topic.topic.prefix) + GENERATION_BYTES
        size = plain + (MESSAGE_TAIL_BYTES if name == "message" else PAYLOAD_TAIL_BYTES)
        ours = keys if set(map(len, keys)) <= {size} else [key for key in keys if len(key) == size]
        if name == "payload":
            ours = [key for key in ours if key[-10] < 0x80]
        first = 0
        counted = 0
        while first < len(ours):
            start = ours[first][:plain]
            generation = int.from_bytes(start[-GENERATION_BYTES:], "big")
            stop = bisect_left(ours, generation_prefix(start[:-GENERATION_BYTES], generation + 1), first)
            last = bisect_left(ours, start + b"\x80", first, stop) if name == "message" else stop
            if first < last:
                yield Batch(name, generation, span.rule, ours[first:last])
            counted += last - first
            first = stop
        if counted < len(keys):
            self._tally.keep_foreign(name, [key for key in keys if _is_foreign(name, key)])

    def _take(self, table: KeyTable, work: TopicWork, batch: Batch, hold: Hold | None) -> None:
        """Delete and count a batch, or only count it where it is held."""
        if not batch.keys:
            return
        size = sum(map(len, batch.keys)) + table.estimate_bytes(batch.keys[0], batch.keys[-1])
        if hold is None:
            self._act.delete(work, table, batch.keys)
        label = EntryKey(work.topic.topic, batch.generation, batch.table, batch.rule, hold or self._world.label)
        self._tally.entry(label).add(batch.keys, size, *_times(batch))

    def _classify(self, name: DataTable, table: KeyTable, prefix: bytes, start: bytes, stop: bytes) -> None:
        """Count rows that stay and that no range speaks of, one by one."""
        if not self._world.thorough:
            return
        work = self._world.topics.get(prefix)
        topic, frontier = (work.topic, work.frontier) if work else (None, None)
        resume: bytes | None = start
        while resume is not None and resume < stop:
            page = table.keys(resume, stop, self._page_rows)
            for key in page.items:
                verdict = decide(Row(name, _parse(name, key)), topic, frontier, self._world.transactions, False, None)
                if verdict == Keep(Reason.FOREIGN):
                    self._tally.keep_foreign(name, [key])
                elif isinstance(verdict, Keep):
                    self._tally.keep(verdict.reason)
            self._observe(name, work.topic.topic if work else None, len(page.items))
            resume = page.resume


def _parse(name: DataTable, key: bytes) -> MessageKey | PayloadKey | None:
    return MessageKey.parse(key) if name == "message" else PayloadKey.parse(key)


def _is_foreign(name: DataTable, key: bytes) -> bool:
    parsed = _parse(name, key)
    return parsed is None or parsed.generation <= 0 or parsed.time_ms < 0


def _times(batch: Batch) -> tuple[int, int]:
    """Time of the oldest and of the newest row; message rows are in order of time."""
    if batch.table == "message":
        times = (batch.keys[0][-10:-2], batch.keys[-1][-10:-2])
    else:
        written = [key[-10:-2] for key in batch.keys]
        times = (min(written), max(written))
    return int.from_bytes(times[0], "big"), int.from_bytes(times[1], "big")
