"""A scan of a table, from topic to topic.

A scan seeks to each topic in key order and reads its due range. It reads a live message row only if an invalid
transaction may have written the row or an expired payload may belong to it. The current step
(:mod:`janitor.sweep.sweep`) pulls the results as findings (:mod:`janitor.sweep.findings`), topic by topic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from janitor.report import DataTable
from janitor.rules.policy import Delete, Hold, Keep, Reason, Row, decide, is_unrecognized
from janitor.rules.ranges import Span, intersect, topic_stop
from janitor.sweep.executor import Executor
from janitor.sweep.findings import Batch, Due, Finding, Read, RemainingRows, Unreadable, failed, unrecognized
from janitor.sweep.run import Run, TopicWork
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
from tms_core.tables.base import ALL_KEYS, KEYS, KeyRange, KeyReads, Page, Reads
from tms_core.tables.read_ahead import ReadAhead
from tms_core.tables.side import Expiries, Expiry

#: Holds that may last for years. Only full passes count the held rows, so that not every pass reads all of them.
STANDING_HOLDS = frozenset({Hold.PROTECTED, Hold.PAUSED, Hold.QUARANTINED})


#: The steps of a pass; ``ttl`` covers messages with their own TTLs and runs once for the whole store.
StepName = Literal["message", "ttl", "invert", "payload"]
#: The steps of every part, in their order.
STEPS: tuple[StepName, ...] = ("message", "invert", "payload")


class Visit(NamedTuple):
    """One topic of a table.

    Attributes:
        findings: yields the findings of the topic.
        is_repeatable: whether this pass repeats the visit after the topic was planned again; False: the next pass does.
    """

    table: DataTable
    prefix: bytes
    findings: Callable[[], Iterator[Finding]]
    is_repeatable: bool = True


Event = Visit | Finding
#: Yields findings on the way to a key, and returns that key; None: the table has no more keys.
Jump = Generator[Finding, None, bytes | None]


class SearchScope(NamedTuple):
    """The scope of the search for invalid pointers in one step.

    Attributes:
        since_ms: the first publish time of searched rows; None: no search.
        everything: whether a full pass also searches rows with unrecognized keys.
        covered: the first key that no earlier run has covered; in the payloads' step, the first topic whose payloads no
            earlier run has read.
        covered_since_ms: the first publish time of rows before ``covered`` that are still searched; None: none are.
    """

    since_ms: int | None = None
    everything: bool = True
    covered: bytes = b""
    covered_since_ms: int | None = None


NO_SEARCH = SearchScope()


@dataclass(slots=True)
class Part:
    """The work of one thread or Spark task: one step of a pass in one part of a store.

    A serialized part has no open files and connections; :meth:`open` adds them again.

    Attributes:
        run: the run, prepared before the pass starts.
        number: the number of the part.
        salt: the salt of its rows; None if the store has no salts.
        within: its keys of the message and of the payload table, if the store is divided by keys.
        is_read_only: whether the executor only reads; then the search for messages of payloads is skipped.
        replans: whether this part plans a changed topic again; False: the driver does that.
        step: the current step.
        undone: metadata keys of topics that earlier steps left undone in this part.
        search: the scope of the search for invalid pointers.
        store: the store to read.
        executor: carries out findings, and stops the pass between pages.
        messages, payloads: the tables, with keys that are read ahead.
    """

    run: Run
    number: int = 0
    salt: int | None = None
    within: tuple[KeyRange, KeyRange] = (ALL_KEYS, ALL_KEYS)
    is_read_only: bool = False
    replans: bool = True
    step: StepName = "message"
    undone: frozenset[bytes] = frozenset()
    search: SearchScope = NO_SEARCH
    store: Reads = field(init=False)
    executor: Executor = field(init=False)
    messages: ReadAhead = field(init=False)
    payloads: ReadAhead = field(init=False)

    def open(self, store: Reads, executor: Executor) -> Part:
        """Set the store and the executor; return the part itself."""
        self.store, self.executor = store, executor
        self.messages = ReadAhead(store.message, self.run.terms.batch_rows)
        self.payloads = ReadAhead(store.payload, self.run.terms.batch_rows)
        return self

    def __reduce__(self) -> tuple[type[Part], tuple[Any, ...]]:
        return Part, tuple(getattr(self, item.name) for item in fields(self) if item.init)

    def __str__(self) -> str:
        return f"part {self.number}" + ("" if self.salt is None else f" (salt {self.salt})")

    def keys(self, name: DataTable) -> ReadAhead:
        return self.messages if name == "message" else self.payloads

    def table(self, name: DataTable) -> KeyReads:
        return self.store.message if name == "message" else self.store.payload

    def discard(self) -> None:
        """Drop all keys that were read ahead."""
        self.messages.discard()
        self.payloads.discard()

    @property
    def expiries_of_plan(self) -> Expiries | None:
        """Return the expiries if expired messages may still exist in this step, because this is a plan."""
        return self.run.expiries if self.run.mode == "plan" else None

    def is_deleted_early(self, key: bytes) -> bool:
        """Return whether the message's own TTL (L6) would have deleted it in an earlier step, if this were a run.

        Raises:
            StoreError: the expiry could not be read.
        """
        expiries = self.expiries_of_plan
        if expiries is None or (parsed := MessageKey.parse(key)) is None:
            return False
        work, expires_ms = self.run.topics.get(parsed.topic.prefix), expiries.expires_ms(key)
        if work is None or expires_ms is None:
            return False
        row, transactions = Row("message", parsed), self.run.transactions
        return isinstance(decide(row, work.topic, work.frontier, transactions, False, expires_ms), Delete)

    def skips(self, prefix: bytes, failed: Collection[bytes]) -> bool:
        """Return whether this topic is skipped."""
        return prefix in failed or not self.run.in_scope(prefix) or self.run.is_quarantined(prefix)


#: Yields the findings of one topic from its first key on.
TopicFindings = Callable[[Part, TopicWork, bytes], Iterator[Finding]]
#: Returns the first key after the ranges and live rows of a topic.
StopOfSpans = Callable[[TopicWork], bytes]


# -- from topic to topic -----------------------------------------------------------------------------------------------


def topics(
    part: Part, name: DataTable, undone: Collection[bytes], findings: TopicFindings, stop_of_spans: StopOfSpans
) -> Iterator[Event]:
    """Yield visits of the topics of a table, in key order.

    Args:
        undone: metadata keys of topics that were left undone, before and during this step.

    Raises:
        StoreError: the table cannot be read, and no later topic is known.
    """
    # The previous step may have deleted rows whose keys were read ahead.
    part.keys(name).discard()

    def visit(prefix: bytes, key: bytes) -> Visit:
        return Visit(name, prefix, partial(topic_findings, part, name, prefix, key, findings))

    if part.run.incremental:
        yield from _due_topics(part, name, undone, visit)
        return
    key = yield from first(part, name, undone, b"")
    while key is not None:
        prefix = topic_prefix(key)
        if prefix is None:
            key = yield from skip(part, name, key, topic_prefix)
            continue
        rest, stop = topic_stop(prefix), topic_stop(prefix)
        if not part.skips(prefix, undone):
            yield visit(prefix, key)
            if part.run.full and prefix not in undone:
                work = part.run.topics.get(prefix)
                # A topic without metadata has no ranges, so its rows are checked one by one (L1).
                rest = key if work is None else stop_of_spans(work)
        key = yield from first(part, name, undone, rest)
        if key is not None and key < stop:
            # Rows that no range covers.
            yield Visit(name, prefix, partial(classify, part, name, prefix, key, stop))
            key = yield from first(part, name, undone, stop)


def _due_topics(
    part: Part, name: DataTable, undone: Collection[bytes], visit: Callable[[bytes, bytes], Visit]
) -> Iterator[Event]:
    """Yield visits of the topics that an incremental pass does not skip."""
    for prefix in [prefix for prefix, work in part.run.known() if not work.waits]:
        if part.skips(prefix, undone):
            continue
        part.executor.keep_alive()
        try:
            key = part.keys(name).first(prefix)
        except StoreError as error:
            yield failed(name, prefix, error)
            continue
        if key is not None and key < topic_stop(prefix):
            yield visit(prefix, key)


def topic_findings(
    part: Part, name: DataTable, prefix: bytes, key: bytes, findings: TopicFindings
) -> Iterator[Finding]:
    """Yield the findings in the ranges of one topic, from its first key on."""
    work = part.run.topics.get(prefix)
    if work is None:
        return
    first_generation = generation_prefix(prefix, 1)
    if key < first_generation:
        yield from classify(part, name, prefix, key, first_generation)
    yield from findings(part, work, max(key, first_generation))


def first(part: Part, name: DataTable, undone: Collection[bytes], start: bytes) -> Jump:
    """Return the first key at or after ``start``; skip unreadable rows up to the next known topic.

    Raises:
        StoreError: no topic is known after ``start``.
        Interrupted: the pass is over.
    """
    part.executor.keep_alive()
    try:
        return part.keys(name).first(start)
    except StoreError as error:
        prefix = topic_prefix(start)
        return (yield from _first_after(part, name, undone, start if prefix is None else topic_stop(prefix), error))


def _first_after(part: Part, name: DataTable, undone: Collection[bytes], start: bytes, error: StoreError) -> Jump:
    """Return the first key of the next readable topic; report unreadable topics before it as failed."""
    topic_failed, table = False, part.table(name)
    # S9: an unreadable block must not hide the topics after it.
    for prefix in [prefix for prefix, _ in part.run.known() if prefix >= start]:
        if part.skips(prefix, undone):
            topic_failed = True
            continue
        try:
            key = table.first(prefix)
        except StoreError as failure:
            yield failed(name, prefix, failure)
            topic_failed = True
            continue
        if not topic_failed:
            yield Unreadable(f"{table.name} rows before topic {prefix[:-1].decode()}: {error}")
        return key
    if topic_failed:
        return None
    raise error


def skip(part: Part, name: DataTable, key: bytes, parse: Callable[[bytes], object], *, count: bool = True) -> Jump:
    """Return the next key that ``parse`` accepts; the keys before it are unrecognized.

    Args:
        count: whether to count these keys.
    """
    start: bytes | None = key
    # Start with a page of one key: unrecognized keys are rare, and the next rows may be live.
    limit = 1
    while start is not None:
        part.executor.keep_alive()
        page = part.keys(name).read(KEYS, start, None, limit)
        limit = min(2 * limit, part.run.terms.batch_rows)
        found = list(takewhile(lambda item: parse(item) is None, page.items))
        if count and found:
            yield unrecognized(name, found)
        if len(found) < len(page.items):
            return page.items[len(found)]
        start = page.resume
    return None


# -- one topic ---------------------------------------------------------------------------------------------------------


def allowed(part: Part, name: DataTable, work: TopicWork, spans: list[Span]) -> list[Span]:
    """Return the spans to read, limited to the ranges of a plan file; only full passes read topics with long holds."""
    if not part.run.full and work.frontier.hold in STANDING_HOLDS:
        return []
    if not work.counts_held:
        spans = [span for span in spans if not span.held]
    limits = part.run.limits
    return spans if limits is None else intersect(spans, limits.ranges(name, work.topic.topic))


def batches(
    part: Part, name: DataTable, work: TopicWork, span: Span, first_key: bytes
) -> Iterator[Batch | Read | RemainingRows]:
    """Yield the batches of a span page by page, without unrecognized keys (L0) and split by generation."""
    start: bytes | None = max(span.start, first_key)
    while start is not None and start < span.stop:
        page = part.keys(name).read(KEYS, start, span.stop, part.run.terms.batch_rows)
        yield Read(name, work.topic.topic, len(page.items))
        yield from _split(name, work, span, page)
        start = page.resume


def _split(name: DataTable, work: TopicWork, span: Span, page: Page[list[bytes]]) -> Iterator[Batch | RemainingRows]:
    """Separate unrecognized keys, and split the rest by generation.

    The keys of a page are sorted and have the same topic. If all have the expected length, checking the first and last
    key of a generation is enough. Each row then costs one comparison of its length and, for payloads, of one byte.
    """
    keys, plain = page.items, len(work.topic.topic.prefix) + GENERATION_BYTES
    size = plain + (MESSAGE_TAIL_BYTES if name == "message" else PAYLOAD_TAIL_BYTES)
    regular = keys if set(map(len, keys)) <= {size} else [key for key in keys if len(key) == size]
    if name == "payload":
        regular = [key for key in regular if key[-10] < 0x80]
    first_at = 0
    counted = 0
    while first_at < len(regular):
        start = regular[first_at][:plain]
        generation = int.from_bytes(start[-GENERATION_BYTES:], "big")
        stop = bisect_left(regular, generation_prefix(start[:-GENERATION_BYTES], generation + 1), first_at)
        last = bisect_left(regular, start + b"\x80", first_at, stop) if name == "message" else stop
        if first_at < last:
            yield Batch(name, generation, span.rule, regular[first_at:last], page.origin)
        counted += last - first_at
        first_at = stop
    if counted < len(keys):
        yield unrecognized(name, [key for key in keys if is_unrecognized(_parse(name, key))])


def due(part: Part, work: TopicWork, batch: Batch, hold: Hold | None, expiries: Sequence[Expiry] = ()) -> Due:
    """Return a finding of due rows, with the size of the batch."""
    table = part.table(batch.table)
    size = sum(map(len, batch.keys)) + table.estimate_bytes(batch.keys[0], batch.keys[-1])
    return Due(work, table, batch, size, hold, hold or part.run.label, expiries)


def classify(part: Part, name: DataTable, prefix: bytes, start: bytes, stop: bytes) -> Iterator[Finding]:
    """Yield the rows that no range covers, one by one; only in a full pass."""
    if not part.run.full:
        return
    work = part.run.topics.get(prefix)
    # A topic that was created after the run read the metadata is not unknown; the next pass handles its rows.
    if work is None and part.run.is_newly_known(prefix):
        return
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    resume: bytes | None = start
    while resume is not None and resume < stop:
        page = part.keys(name).read(KEYS, resume, stop, part.run.terms.batch_rows)
        for key in page.items:
            decision = decide(Row(name, _parse(name, key)), topic, frontier, part.run.transactions, False, None)
            if decision == Keep(Reason.UNRECOGNIZED):
                yield unrecognized(name, [key])
            elif decision == Keep(Reason.UNKNOWN_TOPIC):
                yield RemainingRows(Reason.UNKNOWN_TOPIC, 1, name, prefix=prefix)
            elif isinstance(decision, Keep):
                yield RemainingRows(decision.reason, 1, name)
        yield Read(name, work.topic.topic if work else None, len(page.items))
        resume = page.resume


def _parse(name: DataTable, key: bytes) -> MessageKey | PayloadKey | None:
    return MessageKey.parse(key) if name == "message" else PayloadKey.parse(key)
