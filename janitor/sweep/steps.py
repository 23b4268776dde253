"""The steps of a pass: each step finds rows of a topic to delete or to invert.

L2, L3 and L7 delete one contiguous range of the message table in each topic.

Messages with a shorter TTL than their topic (L6) are scattered among live messages, so no range covers them. The side
table has their expiries, written before the messages, in the order of their due times. All rules apply to these
messages. An expiry may have no message: the server died before it wrote the message, or the tables are a backup next to
a newer side table. Therefore each message is looked up, and only existing messages count. A run deletes expiries once
its deletions are durable. After a crash before that, the next run finds the expiries again, which is harmless.

Rows of the payload table are sorted by transaction. In a current generation, due rows are scattered. They are
collected as candidates, and compared with the message table in groups of limited size (L5).

Remaining message rows of invalid transactions get negated pointers (L4). No table lists the rows of a transaction, so
the message table is searched: all of it in a full pass, else only publish times at which an open transaction can have
written. The search goes generation by generation and includes topics without metadata, because the state of a
transaction does not depend on topics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Generator, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import cast

from janitor.rules.policy import Delete, Invert, Keep, Reason, Row, Rule, Verdict, decide
from janitor.rules.ranges import (
    Span,
    find_referenced,
    message_spans,
    newest_expired_pointer,
    payload_spans,
    search_range,
    stop_of_spans,
    timeless_range,
    topic_stop,
)
from janitor.sweep.findings import (
    Batch,
    ExpiredMessages,
    Finding,
    Invalid,
    ReachedKey,
    Read,
    RemainingPointer,
    RemainingRows,
)
from janitor.sweep.run import TopicWork
from janitor.sweep.scan import Event, Part, SearchScope, Visit, allowed, batches, due, first, skip, topics
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, MessageKey, PayloadKey, generation_prefix, time_prefix
from tms_core.tables.base import KEYS, Origin, Projection, TxCell, cells_of
from tms_core.tables.side import Expiries, Expiry

#: The number of payload keys that are collected before the search for their messages; about 10 MB of memory.
CANDIDATES = 20_000


# -- messages ----------------------------------------------------------------------------------------------------------


def messages(part: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """Yield the events of the step that deletes messages."""
    return topics(part, "message", undone, _message_findings, lambda work: stop_of_spans(work.topic))


def _message_findings(part: Part, work: TopicWork, first_key: bytes) -> Iterator[Finding]:
    for span in allowed(part, "message", work, message_spans(work.topic, work.frontier)):
        yield from _all_due(part, work, span, batches(part, "message", work, span, first_key))


def _all_due(part: Part, work: TopicWork, span: Span, found: Iterator[Finding | Batch]) -> Iterator[Finding]:
    """Yield the findings of a span in which all rows are due."""
    for item in found:
        yield due(part, work, item, work.frontier.hold if span.held else None) if isinstance(item, Batch) else item


# -- messages with their own ttl ---------------------------------------------------------------------------------------


def message_ttls(whole: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """Yield the messages whose own TTL has expired, in the whole store, because such a row may be in any part.

    Args:
        undone: metadata keys of topics that failed or were withheld in any part.
    """
    for page in cast(Expiries, whole.run.expiries).due_pages(whole.run.now_ms, whole.run.terms.batch_rows):
        yield Read("message", None, len(page))
        # Sort by key, because topics are visited in key order; names sort differently.
        page.sort(key=lambda expiry: expiry.key)
        for prefix, some in groupby(page, key=lambda expiry: expiry.topic.prefix):
            if not whole.skips(prefix, undone):
                yield Visit("message", prefix, partial(_ttl_findings, whole, prefix, list(some)), is_repeatable=False)


def _ttl_findings(whole: Part, prefix: bytes, some: Sequence[Expiry]) -> Iterator[Finding]:
    work = whole.run.topics.get(prefix)
    if work is None:
        return
    released: list[Expiry] = []
    held: list[Expiry] = []
    for expiry in some:
        key = MessageKey(*expiry[:4])
        decision = decide(
            Row("message", key), work.topic, work.frontier, whole.run.transactions, False, expiry.expires_ms
        )
        if (
            work.topic.is_old(expiry.generation)
            or work.frontier.due.expires(expiry.publish_ms)
            or work.frontier.is_processed(key)
        ):
            # A range deletes this message. Delete its expiry only if this pass covers that range.
            if isinstance(decision, Delete) and not work.waits and whole.run.limits is None:
                yield ExpiredMessages([expiry])
        elif isinstance(decision, Delete):
            released.append(expiry)
        elif decision == Keep(Reason.HELD):
            held.append(expiry)
    # An expiry is written before its message, so a server that died in between leaves an expiry without a message.
    present, origin = _find_present(whole, sorted(expiry.key for expiry in (*released, *held)))
    if absent := [expiry for expiry in released if expiry.key not in present]:
        yield ExpiredMessages(absent)
    yield from _ttl_due(whole, work, [expiry for expiry in released if expiry.key in present], origin, held=False)
    if work.frontier.hold is not None and work.counts_held:
        yield from _ttl_due(whole, work, [expiry for expiry in held if expiry.key in present], origin, held=True)


def _find_present(whole: Part, keys: Sequence[bytes]) -> tuple[set[bytes], Origin | None]:
    """Return the existing ones of these sorted message keys, and the origin of their rows.

    The keys may be adjacent or far apart, so the page grows while reads find many of them.
    """
    table, found, at = whole.table("message"), set[bytes](), 0
    origins: list[Origin | None] = []
    min_limit = limit = max(1, table.keys_per_call)
    while at < len(keys):
        page = table.read(KEYS, keys[at], keys[-1] + b"\0", limit)
        stop = len(keys) if page.resume is None else bisect_left(keys, page.resume, at)
        hits = set(page.items).intersection(keys[at:stop])
        found |= hits
        origins.append(page.origin)
        limit = min(2 * limit, whole.run.terms.batch_rows) if 2 * len(hits) >= limit else min_limit
        at = stop
    return found, Origin.merge(origins)


def _ttl_due(
    whole: Part, work: TopicWork, some: list[Expiry], origin: Origin | None, *, held: bool
) -> Iterator[Finding]:
    if whole.run.limits is not None:
        ranges = whole.run.limits.ranges("message", work.topic.topic)
        some = [expiry for expiry in some if any(each.holds(expiry.key) for each in ranges)]
    for generation, group in groupby(some, key=lambda expiry: expiry.generation):
        found = list(group)
        batch = Batch("message", generation, Rule.EXPIRED, [expiry.key for expiry in found], origin)
        yield due(whole, work, batch, work.frontier.hold if held else None, found)


# -- payloads ----------------------------------------------------------------------------------------------------------


def payloads(part: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """Yield the events of the step that deletes payloads, the last step: deleted messages release their payloads."""
    return topics(part, "payload", undone, _payload_findings, _stop_of_spans)


def _stop_of_spans(work: TopicWork) -> bytes:
    return generation_prefix(work.topic.topic.prefix, max(work.topic.old_below, work.topic.generation + 1))


def _payload_findings(part: Part, work: TopicWork, first_key: bytes) -> Iterator[Finding]:
    newest, prefix = None, work.topic.topic.prefix
    if prefix >= part.search.covered:
        # All topics before this one are done.
        yield ReachedKey(prefix)
    if not part.run.full or prefix < part.search.covered:
        newest = newest_expired_pointer(work.frontier, part.run.terms.lifetime.allowance_ms)
    for span in allowed(part, "payload", work, payload_spans(work.topic, work.frontier, newest)):
        found = batches(part, "payload", work, span, first_key)
        if span.by_row:
            yield from _by_row(part, work, span, found)
        else:
            yield from _all_due(part, work, span, found)


def _by_row(part: Part, work: TopicWork, span: Span, found: Iterator[Finding | Batch]) -> Iterator[Finding]:
    """Yield the findings of one generation's payload rows; time and transaction of each row decide."""
    is_undecided = part.run.transactions.is_undecided
    candidates: list[bytes] = []
    origins: list[Origin | None] = []
    for item in found:
        if not isinstance(item, Batch):
            yield item
            continue
        for rule, held, keys in _split_by_time(work, item):
            if not held:
                # L5: the transaction may still publish a message that refers to its payloads.
                decided = [key for key in keys if not is_undecided(_pointer(key))]
                yield RemainingRows(Reason.UNDECIDED, len(keys) - len(decided), "payload")
                candidates += decided
                origins.append(item.origin)
            elif work.counts_held and keys:
                yield due(part, work, item._replace(rule=rule, keys=keys), work.frontier.hold)
        if len(candidates) >= CANDIDATES or part.is_read_only:
            yield from _candidates(part, work, span, candidates, origins)
            candidates, origins = [], []
    yield from _candidates(part, work, span, candidates, origins)


def _split_by_time(work: TopicWork, batch: Batch) -> Iterator[tuple[Rule, bool, list[bytes]]]:
    """Yield due keys with their rule, and whether they are held."""
    frontier = work.frontier
    cutoff, due_ms = frontier.cutoff.ms, max(frontier.cutoff.ms, frontier.due.ms)
    yield batch.rule, False, _between(batch.keys, 0, cutoff)
    if batch.rule is Rule.OLD_GENERATION:
        yield batch.rule, True, _between(batch.keys, cutoff, LONG_MAX + 1)
        return
    yield batch.rule, True, _between(batch.keys, cutoff, due_ms)
    yield Rule.PROCESSED, frontier.hold is not None, _between(batch.keys, due_ms, frontier.processed >> 16)


def _between(keys: list[bytes], first_ms: int, stop_ms: int) -> list[bytes]:
    """Return the keys of rows that were written in ``[first_ms, stop_ms)``."""
    if first_ms >= stop_ms:
        return []
    first, stop = first_ms.to_bytes(8, "big"), stop_ms.to_bytes(8, "big")
    return [key for key in keys if first <= key[-10:-2] < stop]


def _candidates(
    part: Part, work: TopicWork, span: Span, keys: list[bytes], origins: Sequence[Origin | None]
) -> Iterator[Finding]:
    """Yield the due payload rows that no message refers to."""
    if not keys:
        return
    generation = int.from_bytes(keys[0][-22:-18], "big")
    unreferenced = keys
    if not part.is_read_only:
        # L5: search right before the deletion, after all parts have finished the messages' step.
        referenced = yield from _referenced(part, work, generation, keys)
        unreferenced = [key for key in keys if _pointer(key) not in referenced]
        yield RemainingRows(Reason.REFERENCED, len(keys) - len(unreferenced), "payload")
    by_rule, origin = {span.rule: unreferenced}, Origin.merge(origins)
    if span.rule is Rule.EXPIRED:
        due_ms = work.frontier.due.ms
        expired, processed = _between(unreferenced, 0, due_ms), _between(unreferenced, due_ms, LONG_MAX + 1)
        by_rule = {Rule.EXPIRED: expired, Rule.PROCESSED: processed}
    for rule, due_keys in by_rule.items():
        for at in range(0, len(due_keys), part.run.terms.batch_rows):
            batch_keys = due_keys[at : at + part.run.terms.batch_rows]
            yield due(part, work, Batch("payload", generation, rule, batch_keys, origin), None)


def _referenced(part: Part, work: TopicWork, generation: int, keys: list[bytes]) -> Generator[Finding, None, set[int]]:
    """Return the write pointers of the payloads that remaining messages refer to."""
    run, topic = part.run, work.topic.topic
    # With a plan file, or after the topic was planned again, messages before the frontier may remain: search them too.
    exact = run.limits is None and topic.prefix not in run.reread_topics
    parsed = (parts for key in keys if (parts := PayloadKey.parse(key)) is not None)
    since_ms, processed = (work.frontier.cutoff.ms, work.frontier.processed_now) if exact else (0, 0)
    window = search_range(topic, generation, since_ms, parsed, run.terms.lifetime, processed)
    windows, pointers = (window, timeless_range(topic, generation)), {_pointer(key) for key in keys}
    referenced: set[int] = set()
    for found in find_referenced(run.store.message, windows, pointers, run.terms.batch_rows, part.is_deleted_early):
        referenced = found
        yield Read("references", topic, 0)
    return referenced


def _pointer(key: bytes) -> int:
    """Return the write pointer in a payload key; parse nothing else."""
    return int.from_bytes(key[-18:-10], "big", signed=True)


# -- inversions --------------------------------------------------------------------------------------------------------


#: The maximum number of pages whose cells form one batch, since each batch waits for the disk.
PAGES_PER_BATCH = 16


def inversions(part: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """Yield the events of the step that inverts pointers. It follows the deletion of messages, to invert fewer rows."""
    search = part.search
    if search.since_ms is None:
        return
    # The messages' step may have deleted rows whose keys were read ahead.
    part.messages.discard()
    projection = cells_of(part.run.transactions.candidates())
    unrecognized = search.everything and part.run.full and not part.run.patterns
    key = yield from first(part, "message", undone, search.covered if search.covered_since_ms is None else b"")
    while key is not None:
        parsed = MessageKey.parse(key)
        if parsed is None:
            # The messages' step has counted keys without a topic.
            next_key = yield from skip(part, "message", key, MessageKey.parse, count=False)
            if unrecognized and (next_key is None or next_key > search.covered):
                yield from _cells(part, projection, max(key, search.covered), next_key)
            key = next_key
            continue
        prefix, (search_start, stop) = parsed.topic.prefix, _range(parsed, search)
        if part.skips(prefix, undone) or part.run.is_paused(prefix):
            stop = topic_stop(prefix)
        else:
            yield Visit("message", prefix, partial(_cells, part, projection, max(key, search_start), stop))
        key = yield from first(part, "message", undone, topic_stop(prefix) if prefix in undone else stop)


def _range(key: MessageKey, search: SearchScope) -> tuple[bytes, bytes]:
    """Return the range to search in a key's generation."""
    prefix, start = key.topic.prefix, _since(key, search.since_ms or 0)
    # A generation of -1 is followed by the next topic, not by generation 0.
    last = key.generation == -1
    stop = topic_stop(prefix) if last else generation_prefix(prefix, key.generation + 1)
    if start < search.covered:
        since_ms = search.covered_since_ms
        start = min(search.covered, stop if since_ms is None else _since(key, since_ms))
    return start, stop


def _since(key: MessageKey, since_ms: int) -> bytes:
    return time_prefix(key.topic.prefix, key.generation, min(max(0, since_ms), LONG_MAX))


def _cells(part: Part, projection: Projection[list[TxCell]], first_key: bytes, stop: bytes | None) -> Iterator[Finding]:
    is_invalid = part.run.transactions.is_invalid
    start: bytes | None = first_key
    found: list[TxCell] = []
    pages = 0
    while start is not None and (stop is None or start < stop):
        page = part.messages.read(projection, start, stop, part.run.terms.batch_rows)
        invalid = set(filter(is_invalid, {cell[1] for cell in page.items}))
        new = [cell for cell in page.items if cell[1] in invalid]
        if found and (len(found) + len(new) > part.run.terms.batch_rows or pages >= PAGES_PER_BATCH):
            yield from _judge_cells(part, found)
            # S4: report the key only after these cells are inverted: it bounds the evidence for a boundary.
            yield ReachedKey(start)
            found = []
        pages = pages + 1 if found else 1
        found += new
        yield Read("invert", None, page.rows_read)
        start = page.resume
        if start is not None and not found:
            yield ReachedKey(start)
    if found:
        yield from _judge_cells(part, found)


def _judge_cells(part: Part, cells: list[TxCell]) -> Iterator[Finding]:
    """Yield the cells that the rules invert. All cells are of one topic and generation, or have unrecognized keys."""
    if (key := _all_invert(part, cells)) is not None:
        yield _invalid(part, key, cells)
        return
    parsed_cells: list[tuple[MessageKey, TxCell]] = []
    for cell in cells:
        parsed = MessageKey.parse(cell.key)
        if parsed is None:
            # L0 forbids a change of the row, so the boundary must stay below its transaction (S4).
            yield RemainingPointer(cell.pointer)
        elif _within_plan(part, parsed, cell) and not part.is_deleted_early(cell.key):
            parsed_cells.append((parsed, cell))
    inverted = []
    for parsed, cell in parsed_cells:
        decision = _decision(part, parsed, cell)
        if isinstance(decision, Invert):
            inverted.append(cell)
        elif isinstance(decision, Delete):
            # The topic changed after the messages' step, so the due row still exists. The next pass deletes it.
            yield RemainingPointer(cell.pointer)
    if inverted:
        yield _invalid(part, parsed_cells[0][0], inverted)


def _all_invert(part: Part, cells: list[TxCell]) -> MessageKey | None:
    """Return the first key if the rules invert all rows of a batch, else None.

    The rules delete the oldest rows of a generation. If they do not delete the first row of a batch in key order, they
    delete none of it, and the decision on that row is the decision on all rows.
    """
    head, tail = cells[0].key, cells[-1].key
    same_length = {len(cell.key) for cell in cells} == {len(head)}
    is_same_generation = same_length and head[:-MESSAGE_TAIL_BYTES] == tail[:-MESSAGE_TAIL_BYTES]
    plain = is_same_generation and part.run.limits is None and part.expiries_of_plan is None
    key = MessageKey.parse(head) if plain else None
    return key if key is not None and isinstance(_decision(part, key, cells[0]), Invert) else None


def _within_plan(part: Part, key: MessageKey, cell: TxCell) -> bool:
    limits = part.run.limits
    return limits is None or cell.pointer in limits.pointers.get(key.topic, ())


def _invalid(part: Part, key: MessageKey, cells: list[TxCell]) -> Invalid:
    work = part.run.topics.get(key.topic.prefix)
    return Invalid(key.topic, key.generation, work, part.store.message, cells, part.run.label)


def _decision(part: Part, key: MessageKey, cell: TxCell) -> Verdict:
    work = part.run.topics.get(key.topic.prefix)
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    return decide(Row("message", key, cell.pointer), topic, frontier, part.run.transactions, False, None)
