"""The steps of a pass that find rows to delete: messages, messages with a ttl of their own, payloads.

What L2, L3 and L7 take of the message table lies in one range of each topic.

Messages that live shorter than their topic says (L6) lie scattered among live ones, so no range finds them. They are
found by the writes down of them before they were published, in the order in which they come due; each is judged by the
whole law, like any other row. An entry may have no message: the server died before it wrote the message, or the tables
are a restored backup next to a newer side table. Therefore each message is looked up, and only existing ones count.
Finished entries are deleted after the deletes are durable, so they reappear after a crash without harm.

Rows of the payload table sort by transaction, so in a generation that only time makes old the due ones lie scattered.
They are gathered as candidates, and a bounded number of them at a time is held against the message table (L5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import groupby

from janitor.rules.policy import Delete, Keep, Reason, Row, Rule, decide
from janitor.rules.ranges import Span, beyond, message_spans, newest_expired_pointer, payload_spans
from janitor.rules.references import find_referenced, search_range, timeless_range
from janitor.sweep.context import TopicWork
from janitor.sweep.findings import Batch, Finding, Gone, Kept, Reached, Read
from janitor.sweep.scan import Event, Part, Visit, allowed, batches, due, topics
from tms_core.rowkey import LONG_MAX, MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import KEYS, Origin
from tms_core.tables.side import Expiries, Expiry

#: Payload keys gathered before their messages are looked for; bounds memory, about 10 MB.
CANDIDATES = 20_000


# -- messages ----------------------------------------------------------------------------------------------------------


def messages(part: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """Return the message table's step of a pass."""
    return topics(part, "message", undone, _message_findings, lambda work: beyond(work.topic))


def _message_findings(part: Part, work: TopicWork, first_key: bytes) -> Iterator[Finding]:
    for span in allowed(part, "message", work, message_spans(work.topic, work.frontier)):
        yield from _all_due(part, work, span, batches(part, "message", work, span, first_key))


def _all_due(part: Part, work: TopicWork, span: Span, found: Iterator[Finding | Batch]) -> Iterator[Finding]:
    """The findings of a span with due rows only."""
    for item in found:
        yield due(part, work, item, work.frontier.hold if span.held else None) if isinstance(item, Batch) else item


# -- messages with a ttl of their own ----------------------------------------------------------------------------------


def message_ttls(whole: Part, undone: Collection[bytes], expiries: Expiries) -> Iterator[Event]:
    """Yield the step of a pass behind the messages', over the whole store, because such a row may be in any part.

    Args:
        undone: metadata keys of topics that failed or were withheld in any part.
        expiries: the writes down.
    """
    for page in expiries.due_pages(whole.context.now_ms, whole.page_rows):
        yield Read("message", None, len(page))
        # As keys sort, and not as names do.
        page.sort(key=lambda expiry: expiry.key)
        for prefix, some in groupby(page, key=lambda expiry: expiry.topic.prefix):
            if not whole.passes_by(prefix, undone):
                yield Visit("message", prefix, partial(_ttl_findings, whole, prefix, list(some)), again=False)


def _ttl_findings(whole: Part, prefix: bytes, some: Sequence[Expiry]) -> Iterator[Finding]:
    work = whole.context.topics.get(prefix)
    if work is None:
        return
    free: list[Expiry] = []
    held: list[Expiry] = []
    for expiry in some:
        key = MessageKey(*expiry[:4])
        decision = decide(
            Row("message", key), work.topic, work.frontier, whole.context.transactions, False, expiry.expires_ms
        )
        if (
            work.topic.is_old(expiry.generation)
            or work.frontier.due.expires(expiry.publish_ms)
            or work.frontier.is_processed(key)
        ):
            # A range has taken it.
            if isinstance(decision, Delete) and not work.waits and whole.context.limits is None:
                yield Gone([expiry])
        elif isinstance(decision, Delete):
            free.append(expiry)
        elif decision == Keep(Reason.HELD):
            held.append(expiry)
    there, origin = _present(whole, sorted(expiry.key for expiry in (*free, *held)))
    if gone := [expiry for expiry in free if expiry.key not in there]:
        yield Gone(gone)
    yield from _ttl_due(whole, work, [expiry for expiry in free if expiry.key in there], origin, held=False)
    if work.frontier.hold is not None and work.counts_held:
        yield from _ttl_due(whole, work, [expiry for expiry in held if expiry.key in there], origin, held=True)


def _present(whole: Part, keys: Sequence[bytes]) -> tuple[set[bytes], Origin | None]:
    """Return which of some messages' keys, in order, the store has, and its knowledge of their rows.

    They may lie far apart or side by side, so a read asks for more the more of them the one before it has found.
    """
    table, found, at = whole.table("message"), set[bytes](), 0
    origins: list[Origin | None] = []
    least = limit = max(1, table.keys_per_call)
    while at < len(keys):
        page = table.read(KEYS, keys[at], keys[-1] + b"\0", limit)
        stop = len(keys) if page.resume is None else bisect_left(keys, page.resume, at)
        hits = set(page.items).intersection(keys[at:stop])
        found |= hits
        origins.append(page.origin)
        limit = min(2 * limit, whole.page_rows) if 2 * len(hits) >= limit else least
        at = stop
    return found, Origin.joined(origins)


def _ttl_due(
    whole: Part, work: TopicWork, some: list[Expiry], origin: Origin | None, *, held: bool
) -> Iterator[Finding]:
    for generation, group in groupby(_ttl_permitted(whole, work, some), key=lambda expiry: expiry.generation):
        found = list(group)
        batch = Batch("message", generation, Rule.EXPIRED, [expiry.key for expiry in found], origin)
        yield due(whole, work, batch, work.frontier.hold if held else None, found)


def _ttl_permitted(whole: Part, work: TopicWork, some: list[Expiry]) -> Iterator[Expiry]:
    """Yield those a plan file speaks of, where one is carried out."""
    limits = whole.context.limits
    if limits is None:
        yield from some
        return
    ranges = limits.ranges("message", work.topic.topic)
    for expiry in some:
        if any(found.holds(expiry.key) for found in ranges):
            yield expiry


# -- payloads ----------------------------------------------------------------------------------------------------------


def payloads(part: Part, undone: Collection[bytes], *, refers: bool = True, from_topic: bytes = b"") -> Iterator[Event]:
    """Return the payload table's step of a pass; comes after the messages', which frees payloads.

    Args:
        refers: whether messages are looked for that still refer to a payload; without that, the findings are
            candidates.
        from_topic: the first topic that a full pass reads completely, since an earlier run has read the others.
    """
    return topics(part, "payload", undone, partial(_payload_findings, refers, from_topic), _beyond)


def _beyond(work: TopicWork) -> bytes:
    return generation_prefix(work.topic.topic.prefix, max(work.topic.old_below, work.topic.generation + 1))


def _payload_findings(
    refers: bool, from_topic: bytes, part: Part, work: TopicWork, first_key: bytes
) -> Iterator[Finding]:
    newest, prefix = None, work.topic.topic.prefix
    if prefix >= from_topic:
        # All topics before this one are done.
        yield Reached(prefix)
    if not part.context.thorough or prefix < from_topic:
        newest = newest_expired_pointer(work.frontier, part.context.terms.lifetime.allowance_ms)
    for span in allowed(part, "payload", work, payload_spans(work.topic, work.frontier, newest)):
        found = batches(part, "payload", work, span, first_key)
        if span.by_row:
            yield from _by_row(refers, part, work, span, found)
        else:
            yield from _all_due(part, work, span, found)


def _by_row(
    refers: bool, part: Part, work: TopicWork, span: Span, found: Iterator[Finding | Batch]
) -> Iterator[Finding]:
    """Judge the payload rows of one generation each by its own time and transaction."""
    candidates: list[bytes] = []
    origins: list[Origin | None] = []
    for item in found:
        if not isinstance(item, Batch):
            yield item
            continue
        for rule, held, keys in _split_by_time(work, item):
            if not held:
                decided = _decided(part, keys)
                yield Kept(Reason.UNDECIDED, len(keys) - len(decided), "payload")
                candidates += decided
                origins.append(item.origin)
            elif work.counts_held and keys:
                yield due(part, work, item._replace(rule=rule, keys=keys), work.frontier.hold)
        if len(candidates) >= CANDIDATES or not refers:
            yield from _candidates(refers, part, work, span, candidates, origins)
            candidates, origins = [], []
    yield from _candidates(refers, part, work, span, candidates, origins)


def _split_by_time(work: TopicWork, batch: Batch) -> Iterator[tuple[Rule, bool, list[bytes]]]:
    """Yield the keys that are due, by rule, and whether they are held."""
    frontier = work.frontier
    cutoff, law = frontier.cutoff.ms, max(frontier.cutoff.ms, frontier.due.ms)
    yield batch.rule, False, _between(batch.keys, 0, cutoff)
    if batch.rule is Rule.OLD_GENERATION:
        yield batch.rule, True, _between(batch.keys, cutoff, LONG_MAX + 1)
        return
    yield batch.rule, True, _between(batch.keys, cutoff, law)
    yield Rule.PROCESSED, frontier.hold is not None, _between(batch.keys, law, frontier.processed >> 16)


def _between(keys: list[bytes], first_ms: int, stop_ms: int) -> list[bytes]:
    """Return the keys of rows that were written in that time."""
    if first_ms >= stop_ms:
        return []
    first, stop = first_ms.to_bytes(8, "big"), stop_ms.to_bytes(8, "big")
    return [key for key in keys if first <= key[-10:-2] < stop]


def _decided(part: Part, keys: list[bytes]) -> list[bytes]:
    """Without the rows whose transaction may still commit."""
    undecided = part.context.transactions.is_undecided
    return [key for key in keys if not undecided(_pointer(key))]


def _candidates(
    refers: bool, part: Part, work: TopicWork, span: Span, keys: list[bytes], origins: Sequence[Origin | None]
) -> Iterator[Finding]:
    """Payload rows that are due and that no message refers to."""
    if not keys:
        return
    generation = int.from_bytes(keys[0][-22:-18], "big")
    free = keys
    if refers:
        referenced = _referenced(part, work, generation, keys)
        free = [key for key in keys if _pointer(key) not in referenced]
        yield Kept(Reason.REFERENCED, len(keys) - len(free), "payload")
    rules, origin = {span.rule: free}, Origin.joined(origins)
    if span.rule is Rule.EXPIRED:
        law = work.frontier.due.ms
        rules = {Rule.EXPIRED: _between(free, 0, law), Rule.PROCESSED: _between(free, law, LONG_MAX + 1)}
    for rule, going in rules.items():
        for first in range(0, len(going), part.page_rows):
            some = going[first : first + part.page_rows]
            yield due(part, work, Batch("payload", generation, rule, some, origin), None)


def _referenced(part: Part, work: TopicWork, generation: int, keys: list[bytes]) -> set[int]:
    context, topic = part.context, work.topic.topic
    # Under a plan's ranges, or after the topic was planned anew, messages may be there that its frontier lets go.
    exact = context.limits is None and topic.prefix not in context.reread_topics
    parsed = (parts for key in keys if (parts := PayloadKey.parse(key)) is not None)
    since_ms, processed = (work.frontier.cutoff.ms, work.frontier.processed_now) if exact else (0, 0)
    window = search_range(topic, generation, since_ms, parsed, context.terms.lifetime, processed)
    return find_referenced(
        part.whole.message,
        (window, timeless_range(topic, generation)),
        {_pointer(key) for key in keys},
        part.page_rows,
        partial(part.act.progress, Read("references", topic, 0)),
        part.goes_early,
    )


def _pointer(key: bytes) -> int:
    """Return the write pointer in a payload key, without parsing the rest."""
    return int.from_bytes(key[-18:-10], "big", signed=True)
