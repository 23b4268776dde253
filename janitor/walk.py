"""One pass over a store by the law: the same steps for a plan and for a sweep.

A walk follows the garbage. It jumps from topic to topic in key order, reads the range that is due, and sees no live
message row unless an invalid transaction may have written it or an expired payload may belong to it. What it finds it
hands to an *act*: a plan's act does nothing, a sweep's deletes. So a plan's figures and a run's mean the same.

This module has what the three steps of a pass share (``messages``, ``inversions``, ``payloads``): the jump through a
table's topics, reading in pages, sorting foreign keys out, counting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from janitor.ahead import Ahead, CellsAhead
from janitor.observe import Observer
from janitor.permission import Withheld
from janitor.policy import Hold, Keep, Reason, Row, Rule, decide
from janitor.ranges import (
    Span,
    intersect,
    topic_stop,
)
from janitor.report import DataTable, EntryKey, Tally
from janitor.world import TopicWork, World
from tms_core.errors import StoreError
from tms_core.rowkey import (
    GENERATION_BYTES,
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    MessageKey,
    PayloadKey,
    generation_prefix,
    topic_prefix,
)
from tms_core.tables.base import KeyTable, MessageTable, Store, TxCell
from tms_core.topic import TopicId

#: How often a topic is planned anew within one pass before it is left for the next.
REPLANS = 3


#: Holds that may last for years. What they hold is counted by thorough passes only, or every pass would read it all.
STANDING_HOLDS = frozenset({Hold.PROTECTED, Hold.PAUSED, Hold.QUARANTINED})


class Moved(Exception):
    """A topic's metadata changed between planning and deleting (rule S2); the batch was dropped."""


class Batch(NamedTuple):
    """Rows of one topic, generation and table with one fate, in key order."""

    table: DataTable
    generation: int
    rule: Rule
    keys: list[bytes]


class Act(Protocol):
    """What is done with the rows a walk finds."""

    def alive(self) -> None:
        """Called before every jump and after every page.

        Raises:
            Interrupted: the pass is over.
        """
        ...

    def delete(self, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        """Delete one batch; returns the keys that were.

        Raises:
            Moved: the topic is no longer what ``work`` says; nothing was deleted.
            Withheld: nothing may be deleted in this topic now; nothing was.
            Interrupted: the pass is over; nothing was deleted.
        """
        ...

    def invert(self, topic: TopicId, table: MessageTable, cells: Sequence[TxCell]) -> list[bool]:
        """Negate pointers of one topic's rows; returns for each whether its row was changed.

        Raises:
            Withheld: nothing may be changed in this topic now; nothing was.
            Interrupted: the pass is over; nothing was changed.
        """
        ...

    def inverted(self, work: TopicWork | None, key: MessageKey, cell: TxCell) -> None:
        """Told of each row that was changed."""
        ...

    def pay(self, rows: int) -> None:
        """Wait until so many rows more are within the rate.

        Raises:
            Interrupted: the pass is over.
        """
        ...


class Preview:
    """The act of a plan: nothing.

    Args:
        alive: called after every page; may raise ``Interrupted``.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        self.alive = alive

    def delete(self, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        """Leave the rows where they are."""
        return batch.keys

    def invert(self, topic: TopicId, table: MessageTable, cells: Sequence[TxCell]) -> list[bool]:
        return [True] * len(cells)

    def inverted(self, work: TopicWork | None, key: MessageKey, cell: TxCell) -> None:
        """Nothing was."""

    def pay(self, rows: int) -> None:
        """Looking costs nothing."""


#: Deletes in one topic from its first key on; returns where the rows start that no range speaks of.
Visit = Callable[[TopicWork, bytes], bytes]


class Walk:
    """A pass over one store.

    Args:
        store: what to walk.
        whole: where rows are looked for that need not be in this part; ``store`` by default.
        world: what was known when the pass began.
        act: what to do with what is found.
        tally: where it is counted.
        page_rows: rows per page, and so per batch.
        observer: told about progress.

    Attributes:
        messages, payloads: the tables' keys, some of them read ahead.
        failed: metadata keys of topics that were left undone, and why; ``tally.errors`` has it too.
        withheld: metadata keys of topics in which deleting was stopped on the way.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        act: Act,
        tally: Tally,
        *,
        page_rows: int,
        observer: Observer,
        whole: Store | None = None,
    ) -> None:
        self.store = store
        self.whole = whole or store
        self.world = world
        self.act = act
        self.tally = tally
        self.page_rows = page_rows
        self._observer = observer
        self.messages = CellsAhead(store.message, page_rows, tally)
        self.payloads = Ahead(store.payload, page_rows, tally)
        self.failed: dict[bytes, str] = {}
        self.withheld: set[bytes] = set()

    # -- from topic to topic ---------------------------------------------------------------------------------------

    def each_topic(self, name: DataTable, table: KeyTable, visit: Visit) -> None:
        """Jump through the table's topics in key order.

        Raises:
            StoreError: the table cannot be read between topics either.
        """
        self._ahead(table).forget()
        if self.world.patient:
            self._each_due_topic(name, table, visit)
        else:
            self._each_topic(name, table, visit)
        # Whatever the last call took: who hung in it may not conclude that it has covered the table.
        self.act.alive()

    def _each_topic(self, name: DataTable, table: KeyTable, visit: Visit) -> None:
        """Go to every topic that has rows."""
        key = self.first(table, b"")
        while key is not None:
            prefix = topic_prefix(key)
            if prefix is None:
                key = self.skip(table, key, topic_prefix, lambda keys: self.tally.keep_foreign(name, keys))
            elif self.passes_by(prefix):
                key = self.first(table, topic_stop(prefix))
            else:
                key = self._do(name, table, prefix, key, visit)

    def _each_due_topic(self, name: DataTable, table: KeyTable, visit: Visit) -> None:
        """Go to the topics that cannot wait, and to no others."""
        due = [prefix for prefix, work in sorted(self.world.topics.items()) if not work.waits]
        for prefix in due:
            if self.passes_by(prefix):
                continue
            self.act.alive()
            try:
                key = self._ahead(table).first(prefix)
                if key is not None and key < topic_stop(prefix):
                    self._visit(name, table, prefix, key, visit)
            except StoreError as error:
                self.fail(name, prefix, error)

    def passes_by(self, prefix: bytes) -> bool:
        """Whether nothing is done in this topic."""
        return prefix in self.failed or not self.world.in_scope(prefix) or self.world.is_quarantined(prefix)

    def fail(self, table: DataTable, prefix: bytes, error: StoreError) -> None:
        """Leave a topic undone, for this step and the next ones."""
        self._fail(table, prefix, "store", f"topic {prefix[:-1].decode()}: {error}")

    def observe(self, phase: str, topic: TopicId | None, rows: int) -> None:
        """Count a page that was read, show progress, and ask whether to go on.

        Raises:
            Interrupted: the pass is over.
        """
        self.tally.scanned[phase] += rows
        self._observer(phase, topic, rows)
        self.act.alive()

    def _do(self, name: DataTable, table: KeyTable, prefix: bytes, key: bytes, visit: Visit) -> bytes | None:
        """Do one topic; returns the first key behind it."""
        stop = topic_stop(prefix)
        try:
            rest = self.first(table, self._visit(name, table, prefix, key, visit))
            if rest is None or rest >= stop:
                return rest
            self.classify(name, table, prefix, rest, stop)
        except StoreError as error:
            self.fail(name, prefix, error)
        return self.first(table, stop)

    def _visit(self, name: DataTable, table: KeyTable, prefix: bytes, key: bytes, visit: Visit) -> bytes:
        """Delete in one topic, again if its metadata moves meanwhile; returns where its unvisited rows start."""
        kept = self.tally.kept.copy()
        for _ in range(REPLANS):
            work = self.world.topics.get(prefix)
            if work is None:
                return key
            first = generation_prefix(prefix, 1)
            if key < first:
                self.classify(name, table, prefix, key, first)
            try:
                return visit(work, max(key, first))
            except Moved:
                self._ahead(table).forget()
                self.tally.forget_kept(kept, work.topic.topic, name)
                self.world.reread(prefix)
            except Withheld:
                self.withheld.add(prefix)
                return topic_stop(prefix)
        self._fail(name, prefix, "moved", f"topic {prefix[:-1].decode()} keeps changing; left for the next run")
        return topic_stop(prefix)

    def _fail(self, table: DataTable, prefix: bytes, reason: str, message: str) -> None:
        self.tally.failures[table, reason] += 1
        self.failed[prefix] = message
        self.tally.errors.append(message)

    def _ahead(self, table: KeyTable) -> Ahead:
        return self.messages if table.name == "message" else self.payloads

    # -- what all steps share --------------------------------------------------------------------------------------

    def first(self, table: KeyTable, start: bytes) -> bytes | None:
        """The first key at or after ``start``; what cannot be read is passed over, up to the next topic that is known.

        Raises:
            StoreError: no topic is known behind ``start``.
            Interrupted: the pass is over.
        """
        self.act.alive()
        try:
            return self._ahead(table).first(start)
        except StoreError as error:
            prefix = topic_prefix(start)
            return self._first_behind(table, start if prefix is None else topic_stop(prefix), error)

    def _first_behind(self, table: KeyTable, start: bytes, error: StoreError) -> bytes | None:
        """The first key of the next known topic; those that cannot be read either are left undone."""
        culprit = False
        for prefix in sorted(prefix for prefix in self.world.topics if prefix >= start):
            if self.passes_by(prefix):
                culprit = True
                continue
            try:
                key = table.first(prefix)
            except StoreError as again:
                self.fail("message" if table.name == "message" else "payload", prefix, again)
                culprit = True
                continue
            if not culprit:
                self.tally.errors.append(f"{table.name} rows before topic {prefix[:-1].decode()}: {error}")
            return key
        if culprit:
            return None
        raise error

    def skip(
        self,
        table: KeyTable,
        key: bytes,
        parse: Callable[[bytes], object],
        found: Callable[[list[bytes]], None],
    ) -> bytes | None:
        """The next key that ``parse`` understands, a page at a time; ``found`` is told of those it does not."""
        start: bytes | None = key
        # There is seldom more than one, and what follows may be live rows, which are nobody's business here.
        limit = 1
        while start is not None:
            self.act.alive()
            page = self._ahead(table).keys(start, None, limit)
            limit = min(2 * limit, self.page_rows)
            strangers = list(takewhile(lambda item: parse(item) is None, page.items))
            found(strangers)
            if len(strangers) < len(page.items):
                return page.items[len(strangers)]
            start = page.resume
        return None

    def allowed(self, name: DataTable, work: TopicWork, spans: list[Span]) -> list[Span]:
        """The spans this pass looks at: within a plan's ranges, and what is held for good only now and then."""
        if not self.world.thorough and work.frontier.hold in STANDING_HOLDS:
            return []
        if not work.counts_held:
            spans = [span for span in spans if not span.held]
        limits = self.world.limits
        return spans if limits is None else intersect(spans, limits.ranges(name, work.topic.topic))

    def pages(
        self, name: DataTable, table: KeyTable, work: TopicWork, span: Span, first_key: bytes
    ) -> Iterator[list[bytes]]:
        start: bytes | None = max(span.start, first_key)
        while start is not None and start < span.stop:
            page = self._ahead(table).keys(start, span.stop, self.page_rows)
            self.observe(name, work.topic.topic, len(page.items))
            yield page.items
            start = page.resume

    def batches(self, name: DataTable, work: TopicWork, span: Span, keys: list[bytes]) -> Iterator[Batch]:
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
            self.tally.keep_foreign(name, [key for key in keys if _is_foreign(name, key)])

    def take(self, table: KeyTable, work: TopicWork, batch: Batch, hold: Hold | None) -> list[bytes]:
        """Delete and count a batch, or only count it where it is held; returns the keys that were deleted."""
        if not batch.keys:
            return []
        size = sum(map(len, batch.keys)) + table.estimate_bytes(batch.keys[0], batch.keys[-1])
        if hold is None:
            done = self.act.delete(work, table, batch)
            if len(done) < len(batch.keys):
                if not done:
                    return []
                size = size * len(done) // len(batch.keys)
                batch = batch._replace(keys=done)
        label = EntryKey(work.topic.topic, batch.generation, batch.table, batch.rule, hold or self.world.label)
        self.tally.entry(label).add(batch.keys, size, *times_of(batch))
        if hold is not None:
            return []
        self.act.pay(len(batch.keys))
        return batch.keys

    def classify(self, name: DataTable, table: KeyTable, prefix: bytes, start: bytes, stop: bytes) -> None:
        """Count rows that stay and that no range speaks of, one by one."""
        if not self.world.thorough:
            return
        work = self.world.topics.get(prefix)
        topic, frontier = (work.topic, work.frontier) if work else (None, None)
        resume: bytes | None = start
        while resume is not None and resume < stop:
            page = self._ahead(table).keys(resume, stop, self.page_rows)
            for key in page.items:
                verdict = decide(Row(name, _parse(name, key)), topic, frontier, self.world.transactions, False, None)
                if verdict == Keep(Reason.FOREIGN):
                    self.tally.keep_foreign(name, [key])
                elif verdict == Keep(Reason.UNKNOWN_TOPIC):
                    self.tally.keep_unknown(prefix)
                elif isinstance(verdict, Keep):
                    self.tally.keep(verdict.reason)
            self.observe(name, work.topic.topic if work else None, len(page.items))
            resume = page.resume


def _parse(name: DataTable, key: bytes) -> MessageKey | PayloadKey | None:
    return MessageKey.parse(key) if name == "message" else PayloadKey.parse(key)


def _is_foreign(name: DataTable, key: bytes) -> bool:
    parsed = _parse(name, key)
    return parsed is None or parsed.generation <= 0 or parsed.time_ms < 0


def times_of(batch: Batch) -> tuple[int, int]:
    """Time of the oldest and of the newest row; message rows are in order of time."""
    if batch.table == "message":
        times = (batch.keys[0][-10:-2], batch.keys[-1][-10:-2])
    else:
        written = [key[-10:-2] for key in batch.keys]
        times = (min(written), max(written))
    return int.from_bytes(times[0], "big"), int.from_bytes(times[1], "big")
