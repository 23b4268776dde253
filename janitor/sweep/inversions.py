"""Message rows that stay and whose transactions are invalid: their pointers are negated (L4).

Which rows an invalid transaction wrote is written nowhere, so the message table is searched: all of it in a thorough
pass, else only publish times at which an open transaction can have written. The search goes generation by generation,
also over topics without metadata, because a row stays a row of its transaction whatever topic it belongs to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from janitor.rules.policy import Delete, Invert, Row, Verdict, decide
from janitor.rules.ranges import topic_stop
from janitor.sweep.findings import Finding, Invalid, Reached, Read, Untouchable
from janitor.sweep.scan import Event, Part, Visit, first, skip
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, MessageKey, generation_prefix, time_prefix
from tms_core.tables.base import PointerSet, TxCell

#: Pages whose cells are inverted as one batch at most, since each batch waits for the disk.
PAGES_TOGETHER = 16


class Covered(NamedTuple):
    """The coverage of an earlier run.

    Attributes:
        upto: the first key that it has not.
        since_ms: the publish time from which earlier rows are searched all the same; None: not at all.
    """

    upto: bytes = b""
    since_ms: int | None = None


NOT_COVERED = Covered()


def inversions(
    part: Part,
    undone: Collection[bytes],
    since_ms: int | None,
    *,
    everything: bool = True,
    covered: Covered = NOT_COVERED,
) -> Iterator[Event]:
    """Yield the step of a pass that comes after the messages', because a row that went need not be inverted.

    Args:
        since_ms: from which publish time on rows are searched; None: not at all.
        everything: search rows under keys that are none of ours as well, if the pass is a thorough one.
        covered: the coverage of an earlier run.
    """
    if since_ms is None:
        return
    part.messages.forget()
    candidates = part.context.transactions.candidates()
    foreign = everything and part.context.thorough and not part.context.patterns
    key = yield from first(part, "message", undone, covered.upto if covered.since_ms is None else b"")
    while key is not None:
        parsed = MessageKey.parse(key)
        if parsed is None:
            # Keys of no topic were counted when messages were deleted.
            behind = yield from skip(part, "message", key, MessageKey.parse, count=False)
            if foreign and (behind is None or behind > covered.upto):
                yield from _cells(part, candidates, max(key, covered.upto), behind)
            key = behind
            continue
        prefix, (begin, stop) = parsed.topic.prefix, _range(parsed, since_ms, covered)
        if part.passes_by(prefix, undone) or part.context.is_paused(prefix):
            stop = topic_stop(prefix)
        else:
            yield Visit("message", prefix, partial(_cells, part, candidates, max(key, begin), stop))
        key = yield from first(part, "message", undone, topic_stop(prefix) if prefix in undone else stop)


def _range(key: MessageKey, since_ms: int, covered: Covered) -> tuple[bytes, bytes]:
    """Return the ranges of a key's generation to search."""
    prefix, start = key.topic.prefix, _since(key, since_ms)
    # A generation of -1 is followed by the next topic, not by generation 0.
    last = key.generation == -1
    stop = topic_stop(prefix) if last else generation_prefix(prefix, key.generation + 1)
    if start < covered.upto:
        start = min(covered.upto, stop if covered.since_ms is None else _since(key, covered.since_ms))
    return start, stop


def _since(key: MessageKey, since_ms: int) -> bytes:
    return time_prefix(key.topic.prefix, key.generation, min(max(0, since_ms), LONG_MAX))


def _cells(part: Part, candidates: PointerSet, begin: bytes, stop: bytes | None) -> Iterator[Finding]:
    is_invalid = part.context.transactions.is_invalid
    start: bytes | None = begin
    found: list[TxCell] = []
    pages = 0
    while start is not None and (stop is None or start < stop):
        page = part.messages.search(start, stop, part.page_rows, candidates)
        invalid = set(filter(is_invalid, {cell[1] for cell in page.items}))
        new = [cell for cell in page.items if cell[1] in invalid]
        if found and (len(found) + len(new) > part.page_rows or pages >= PAGES_TOGETHER):
            yield from _judged(part, found)
            yield Reached(start)
            found = []
        pages = pages + 1 if found else 1
        found += new
        yield Read("invert", None, page.rows_read)
        start = page.resume
        if start is not None and not found:
            yield Reached(start)
    if found:
        yield from _judged(part, found)


def _judged(part: Part, cells: list[TxCell]) -> Iterator[Finding]:
    """Yield the cells, all of one topic and generation or all under foreign keys, that the law inverts."""
    if (key := _all_invert(part, cells)) is not None:
        yield _invalid(part, key, cells)
        return
    ours: list[tuple[MessageKey, TxCell]] = []
    for cell in cells:
        parsed = MessageKey.parse(cell.key)
        if parsed is None:
            yield Untouchable(cell.pointer)
        elif _within_plan(part, parsed, cell) and not part.goes_early(cell.key):
            ours.append((parsed, cell))
    doomed = []
    for parsed, cell in ours:
        decision = _decision(part, parsed, cell)
        if isinstance(decision, Invert):
            doomed.append(cell)
        elif isinstance(decision, Delete):
            # Due, and still there: its topic has changed since this part's messages were deleted. The next pass's.
            yield Untouchable(cell.pointer)
    if doomed:
        yield _invalid(part, ours[0][0], doomed)


def _all_invert(part: Part, cells: list[TxCell]) -> MessageKey | None:
    """Return the first key, where the law inverts all of a batch.

    The rules delete the oldest rows of a generation. So where it does not take the first row of a batch, in key
    order, it takes none, and its decision on that one is its decision on all.
    """
    head, tail = cells[0].key, cells[-1].key
    same_length = {len(cell.key) for cell in cells} == {len(head)}
    alike = same_length and head[:-MESSAGE_TAIL_BYTES] == tail[:-MESSAGE_TAIL_BYTES]
    plain = alike and part.context.limits is None and part.planned is None
    key = MessageKey.parse(head) if plain else None
    return key if key is not None and isinstance(_decision(part, key, cells[0]), Invert) else None


def _within_plan(part: Part, key: MessageKey, cell: TxCell) -> bool:
    limits = part.context.limits
    return limits is None or cell.pointer in limits.pointers.get(key.topic, ())


def _invalid(part: Part, key: MessageKey, cells: list[TxCell]) -> Invalid:
    work = part.context.topics.get(key.topic.prefix)
    return Invalid(key.topic, key.generation, work, part.store.message, cells, part.context.label)


def _decision(part: Part, key: MessageKey, cell: TxCell) -> Verdict:
    work = part.context.topics.get(key.topic.prefix)
    topic, frontier = (work.topic, work.frontier) if work else (None, None)
    return decide(Row("message", key, cell.pointer), topic, frontier, part.context.transactions, False, None)
