"""Going through a table from topic to topic.

A scan follows the garbage. It jumps from topic to topic in key order, reads the range that is due, and sees no live
message row unless an invalid transaction may have written it or an expired payload may belong to it. The step
(:mod:`janitor.sweep.sweep`) pulls its findings (:mod:`janitor.sweep.findings`), one topic after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from janitor.report import DataTable
from janitor.rules.policy import Delete, Hold, Keep, Reason, Row, decide
from janitor.rules.ranges import Span, intersect, topic_stop
from janitor.sweep.act import Act
from janitor.sweep.context import RunContext, TopicWork
from janitor.sweep.findings import Batch, Due, Finding, Kept, Read, Unreadable, failed, foreign
from janitor.sweep.read_ahead import Ahead, CellsAhead
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
from tms_core.tables.base import KeyReads, Page, Reads
from tms_core.tables.side import Expiries, Expiry

#: Holds that may last for years. What they hold is counted by thorough passes only, or every pass would read it all.
STANDING_HOLDS = frozenset({Hold.PROTECTED, Hold.PAUSED, Hold.QUARANTINED})


class Visit(NamedTuple):
    """One topic of a table.

    Attributes:
        findings: pulls what there is.
        again: whether that is done again after the topic was planned anew; else it is left for the next pass.
    """

    table: DataTable
    prefix: bytes
    findings: Callable[[], Iterator[Finding]]
    again: bool = True


Event = Visit | Finding
#: Findings on the way to a key, which is the value in the end; None where there is none.
Jump = Generator[Finding, None, bytes | None]


@dataclass(slots=True)
class Part:
    """A part of a store as one pass reads it.

    Attributes:
        store: the data read.
        whole: where rows are looked for that need not be in this part.
        context: the context of the pass.
        page_rows: rows per page, and so per batch.
        act: the executor of findings; also asked now and then, while nothing is found, whether to go on.
        replans: whether a topic that moved is planned anew here; else that is the driver's.
        planned: messages with a ttl of their own, in a plan, which leaves them there though they go; None in a run.
        messages, payloads: the tables' keys, some of them read ahead.
    """

    store: Reads
    whole: Reads
    context: RunContext
    page_rows: int
    act: Act
    replans: bool = True
    planned: Expiries | None = None
    messages: CellsAhead = field(init=False)
    payloads: Ahead = field(init=False)

    def __post_init__(self) -> None:
        self.messages = CellsAhead(self.store.message, self.page_rows)
        self.payloads = Ahead(self.store.payload, self.page_rows)

    def keys(self, name: DataTable) -> Ahead:
        return self.messages if name == "message" else self.payloads

    def table(self, name: DataTable) -> KeyReads:
        return self.store.message if name == "message" else self.store.payload

    def forget(self) -> None:
        """Ask the tables anew from here on."""
        self.messages.forget()
        self.payloads.forget()

    def goes_early(self, key: bytes) -> bool:
        """Return whether a message is there only because this is a plan: a run's next steps find it gone by its own ttl
        (L6).

        Raises:
            StoreError: it cannot be looked up.
        """
        if self.planned is None or (parsed := MessageKey.parse(key)) is None:
            return False
        work, expires_ms = self.context.topics.get(parsed.topic.prefix), self.planned.expires_ms(key)
        if work is None or expires_ms is None:
            return False
        row, transactions = Row("message", parsed), self.context.transactions
        return isinstance(decide(row, work.topic, work.frontier, transactions, False, expires_ms), Delete)

    def passes_by(self, prefix: bytes, failed: Collection[bytes]) -> bool:
        """Return whether nothing is done in this topic."""
        return prefix in failed or not self.context.in_scope(prefix) or self.context.is_quarantined(prefix)


#: The findings of one topic from its first key on.
TopicFindings = Callable[[Part, TopicWork, bytes], Iterator[Finding]]
#: Where the rows of a topic start of which no range speaks.
Beyond = Callable[[TopicWork], bytes]


# -- from topic to topic -----------------------------------------------------------------------------------------------


def topics(
    part: Part, name: DataTable, undone: Collection[bytes], findings: TopicFindings, beyond: Beyond
) -> Iterator[Event]:
    """Yield the topics of a table that have something to do, in key order.

    Args:
        undone: metadata keys of topics that were left undone before, and of those that have been meanwhile.

    Raises:
        StoreError: the table cannot be read between topics either.
    """
    part.keys(name).forget()

    def of(prefix: bytes, key: bytes) -> Visit:
        return Visit(name, prefix, partial(topic_findings, part, name, prefix, key, findings))

    if part.context.lazy:
        yield from _due_topics(part, name, undone, of)
        return
    key = yield from first(part, name, undone, b"")
    while key is not None:
        prefix = topic_prefix(key)
        if prefix is None:
            key = yield from skip(part, name, key, topic_prefix)
            continue
        rest, stop = topic_stop(prefix), topic_stop(prefix)
        if not part.passes_by(prefix, undone):
            yield of(prefix, key)
            if part.context.thorough and prefix not in undone:
                work = part.context.topics.get(prefix)
                rest = key if work is None else beyond(work)
        key = yield from first(part, name, undone, rest)
        if key is not None and key < stop:
            # What no range speaks of.
            yield Visit(name, prefix, partial(classify, part, name, prefix, key, stop))
            key = yield from first(part, name, undone, stop)


def _due_topics(
    part: Part, name: DataTable, undone: Collection[bytes], of: Callable[[bytes, bytes], Visit]
) -> Iterator[Event]:
    """Go to the topics that cannot wait, and to no others."""
    for prefix in [prefix for prefix, work in sorted(part.context.topics.items()) if not work.waits]:
        if part.passes_by(prefix, undone):
            continue
        part.act.alive()
        try:
            key = part.keys(name).first(prefix)
        except StoreError as error:
            yield failed(name, prefix, error)
            continue
        if key is not None and key < topic_stop(prefix):
            yield of(prefix, key)


def topic_findings(
    part: Part, name: DataTable, prefix: bytes, key: bytes, findings: TopicFindings
) -> Iterator[Finding]:
    """What there is in the ranges of one topic, from its first key on."""
    work = part.context.topics.get(prefix)
    if work is None:
        return
    begin = generation_prefix(prefix, 1)
    if key < begin:
        yield from classify(part, name, prefix, key, begin)
    yield from findings(part, work, max(key, begin))


def first(part: Part, name: DataTable, undone: Collection[bytes], start: bytes) -> Jump:
    """Return the first key at or after ``start``; what cannot be read is passed over, up to the next topic that is
    known.

    Raises:
        StoreError: no topic is known behind ``start``.
        Interrupted: the pass is over.
    """
    part.act.alive()
    try:
        return part.keys(name).first(start)
    except StoreError as error:
        prefix = topic_prefix(start)
        return (yield from _first_behind(part, name, undone, start if prefix is None else topic_stop(prefix), error))


def _first_behind(part: Part, name: DataTable, undone: Collection[bytes], start: bytes, error: StoreError) -> Jump:
    """Return the first key of the next known topic; those that cannot be read either are left undone."""
    culprit, table = False, part.table(name)
    for prefix in sorted(prefix for prefix in part.context.topics if prefix >= start):
        if part.passes_by(prefix, undone):
            culprit = True
            continue
        try:
            key = table.first(prefix)
        except StoreError as again:
            yield failed(name, prefix, again)
            culprit = True
            continue
        if not culprit:
            yield Unreadable(f"{table.name} rows before topic {prefix[:-1].decode()}: {error}")
        return key
    if culprit:
        return None
    raise error


def skip(part: Part, name: DataTable, key: bytes, parse: Callable[[bytes], object], *, count: bool = True) -> Jump:
    """Return the next key that ``parse`` understands, a page at a time; those that it does not are foreign.

    Args:
        count: whether they are counted.
    """
    start: bytes | None = key
    # There is seldom more than one, and what follows may be live rows, which need not be read here.
    limit = 1
    while start is not None:
        part.act.alive()
        page = part.keys(name).keys(start, None, limit)
        limit = min(2 * limit, part.page_rows)
        found = list(takewhile(lambda item: parse(item) is None, page.items))
        if count and found:
            yield foreign(name, found)
        if len(found) < len(page.items):
            return page.items[len(found)]
        start = page.resume
    return None


# -- one topic ---------------------------------------------------------------------------------------------------------


def allowed(part: Part, name: DataTable, work: TopicWork, spans: list[Span]) -> list[Span]:
    """Return the spans this pass looks at: within a plan's ranges, and held rows for good only now and then."""
    if not part.context.thorough and work.frontier.hold in STANDING_HOLDS:
        return []
    if not work.counts_held:
        spans = [span for span in spans if not span.held]
    limits = part.context.limits
    return spans if limits is None else intersect(spans, limits.ranges(name, work.topic.topic))


def batches(
    part: Part, name: DataTable, work: TopicWork, span: Span, first_key: bytes
) -> Iterator[Batch | Read | Kept]:
    """Yield a span page by page: without foreign keys (L0), and split by generation."""
    start: bytes | None = max(span.start, first_key)
    while start is not None and start < span.stop:
        page = part.keys(name).keys(start, span.stop, part.page_rows)
        yield Read(name, work.topic.topic, len(page.items))
        yield from _split(name, work, span, page)
        start = page.resume


def _split(name: DataTable, work: TopicWork, span: Span, page: Page[list[bytes]]) -> Iterator[Batch | Kept]:
    """Sort out foreign keys and split the rest by generation.

    A page is in key order and its keys share the topic, so once all have our length, the first and last key of a
    generation represent the keys between. That keeps the cost per row to a length and, for payloads, one byte.
    """
    keys, plain = page.items, len(work.topic.topic.prefix) + GENERATION_BYTES
    size = plain + (MESSAGE_TAIL_BYTES if name == "message" else PAYLOAD_TAIL_BYTES)
    ours = keys if set(map(len, keys)) <= {size} else [key for key in keys if len(key) == size]
    if name == "payload":
        ours = [key for key in ours if key[-10] < 0x80]
    first_at = 0
    counted = 0
    while first_at < len(ours):
        start = ours[first_at][:plain]
        generation = int.from_bytes(start[-GENERATION_BYTES:], "big")
        stop = bisect_left(ours, generation_prefix(start[:-GENERATION_BYTES], generation + 1), first_at)
        last = bisect_left(ours, start + b"\x80", first_at, stop) if name == "message" else stop
        if first_at < last:
            yield Batch(name, generation, span.rule, ours[first_at:last], page.origin)
        counted += last - first_at
        first_at = stop
    if counted < len(keys):
        yield foreign(name, [key for key in keys if _is_foreign(name, key)])


def due(part: Part, work: TopicWork, batch: Batch, hold: Hold | None, expiries: Sequence[Expiry] = ()) -> Due:
    """Return a batch, with its size."""
    table = part.table(batch.table)
    size = sum(map(len, batch.keys)) + table.estimate_bytes(batch.keys[0], batch.keys[-1])
    return Due(work, table, batch, size, hold, hold or part.context.label, expiries)


def classify(part: Part, name: DataTable, prefix: bytes, start: bytes, stop: bytes) -> Iterator[Finding]:
    """Count rows that stay and that no range speaks of, one by one; in a thorough pass only."""
    if not part.context.thorough:
        return
    work = part.context.topics.get(prefix)
    if work is None and part.context.is_newly_known(prefix):
        return
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    resume: bytes | None = start
    while resume is not None and resume < stop:
        page = part.keys(name).keys(resume, stop, part.page_rows)
        for key in page.items:
            decision = decide(Row(name, _parse(name, key)), topic, frontier, part.context.transactions, False, None)
            if decision == Keep(Reason.FOREIGN):
                yield foreign(name, [key])
            elif decision == Keep(Reason.UNKNOWN_TOPIC):
                yield Kept(Reason.UNKNOWN_TOPIC, 1, name, prefix=prefix)
            elif isinstance(decision, Keep):
                yield Kept(decision.reason, 1, name)
        yield Read(name, work.topic.topic if work else None, len(page.items))
        resume = page.resume


def _parse(name: DataTable, key: bytes) -> MessageKey | PayloadKey | None:
    return MessageKey.parse(key) if name == "message" else PayloadKey.parse(key)


def _is_foreign(name: DataTable, key: bytes) -> bool:
    parsed = _parse(name, key)
    return parsed is None or parsed.generation <= 0 or parsed.time_ms < 0
