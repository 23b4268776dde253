"""Messages that live shorter than their topic says (L6).

Such rows lie scattered among live ones, so no range finds them. They are found by what was written down of them before
they were published, in the order in which they come due; each is judged by the whole law, like any other row. What is
done with is forgotten once the deletes are durable, so after a crash it comes up again, and does no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import groupby

from janitor.law.policy import Delete, Keep, Reason, Row, Rule, decide
from janitor.sweep.context import TopicWork
from janitor.sweep.findings import Batch, Finding, Gone, Read
from janitor.sweep.scan import Event, Part, Visit, due
from tms_core.rowkey import MessageKey
from tms_core.tables.side import Expiries, Expiry


def message_ttls(whole: Part, undone: Collection[bytes], expiries: Expiries) -> Iterator[Event]:
    """The step of a pass behind the messages', over the whole store, because such a row may be in any part.

    Args:
        undone: metadata keys of topics that failed or were withheld in any part.
        expiries: what was written down.
    """
    for page in expiries.due_pages(whole.context.now_ms, whole.page_rows):
        yield Read("message", None, len(page))
        # As keys sort, and not as names do.
        page.sort(key=lambda expiry: expiry.key)
        for prefix, some in groupby(page, key=lambda expiry: expiry.topic.prefix):
            if not whole.passes_by(prefix, undone):
                yield Visit("message", prefix, partial(_findings, whole, prefix, list(some)), again=False)


def _findings(whole: Part, prefix: bytes, some: Sequence[Expiry]) -> Iterator[Finding]:
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
    yield from _due(whole, work, free, held=False)
    if work.frontier.hold is not None and work.counts_held:
        yield from _due(whole, work, held, held=True)


def _due(whole: Part, work: TopicWork, some: list[Expiry], *, held: bool) -> Iterator[Finding]:
    for generation, group in groupby(_permitted(whole, work, some), key=lambda expiry: expiry.generation):
        found = list(group)
        batch = Batch("message", generation, Rule.EXPIRED, [expiry.key for expiry in found])
        yield due(whole, work, batch, work.frontier.hold if held else None, found)


def _permitted(whole: Part, work: TopicWork, some: list[Expiry]) -> Iterator[Expiry]:
    """Those a plan file speaks of, where one is carried out."""
    limits = whole.context.limits
    if limits is None:
        yield from some
        return
    ranges = limits.ranges("message", work.topic.topic)
    for expiry in some:
        if any(found.holds(expiry.key) for found in ranges):
            yield expiry
