"""Deleting messages that live shorter than their topic says (L6).

Such rows lie scattered among live ones, so no range finds them. They are found by what was written down of them before
they were published, in the order in which they come due; each is judged by the whole law, like any other row. What is
done with is forgotten once the deletes are durable, so after a crash it comes up again, and does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from janitor.permission import Withheld
from janitor.policy import Delete, Keep, Reason, Row, Rule, decide
from janitor.walk import Batch, Moved, Walk
from janitor.world import TopicWork
from tms_core.errors import StoreError
from tms_core.rowkey import MessageKey
from tms_core.side import Expiries, Expiry


class OwnTtls:
    """The step of a pass behind the messages'.

    Args:
        walk: over the whole store, because such a row may be in any part.
        expiries: what was written down.

    Attributes:
        done: whose rows are gone, to be forgotten.
    """

    def __init__(self, walk: Walk, expiries: Expiries) -> None:
        self._walk = walk
        self._expiries = expiries
        self.done: list[Expiry] = []

    def delete(self) -> None:
        """Delete what is due."""
        walk = self._walk
        for page in self._expiries.due_pages(walk.world.now_ms, walk.page_rows):
            walk.observe("message", None, len(page))
            # As keys sort, and not as names do.
            page.sort(key=lambda expiry: expiry.key)
            for prefix, some in groupby(page, key=lambda expiry: expiry.topic.prefix):
                if not walk.passes_by(prefix) and prefix not in walk.withheld:
                    self._visit(prefix, list(some))

    def _visit(self, prefix: bytes, some: list[Expiry]) -> None:
        walk, work = self._walk, self._walk.world.topics.get(prefix)
        if work is None:
            return
        try:
            due, held = self._judge(work, some)
            self._take(work, due, held=False)
            if work.frontier.hold is not None and work.counts_held:
                self._take(work, held, held=True)
        except Moved:
            # The next pass knows it as it is now.
            walk.world.reread(prefix)
        except Withheld:
            walk.withheld.add(prefix)
        except StoreError as error:
            walk.fail("message", prefix, error)

    def _judge(self, work: TopicWork, some: Iterable[Expiry]) -> tuple[list[Expiry], list[Expiry]]:
        """What may go now, and what is due by the law but held; without what ranges take."""
        world, due, held = self._walk.world, [], []
        for expiry in some:
            row = Row("message", MessageKey(*expiry[:4]))
            verdict = decide(row, work.topic, work.frontier, world.transactions, False, expiry.expires_ms)
            in_range = work.topic.is_old(expiry.generation) or work.frontier.due.expires(expiry.publish_ms)
            if in_range:
                if isinstance(verdict, Delete) and not work.waits and world.limits is None:
                    self.done.append(expiry)
            elif isinstance(verdict, Delete):
                due.append(expiry)
            elif verdict == Keep(Reason.HELD):
                held.append(expiry)
        return due, held

    def _take(self, work: TopicWork, some: list[Expiry], *, held: bool) -> None:
        walk = self._walk
        for generation, group in groupby(self._permitted(work, some), key=lambda expiry: expiry.generation):
            batch = list(group)
            keys = [expiry.key for expiry in batch]
            hold = work.frontier.hold if held else None
            gone = walk.take(walk.store.message, work, Batch("message", generation, Rule.EXPIRED, keys), hold)
            walk.tally.note_early(work.topic.topic, generation, keys)
            self.done += [expiry for expiry in batch if expiry.key in gone]

    def _permitted(self, work: TopicWork, some: list[Expiry]) -> Iterator[Expiry]:
        """Those a plan file speaks of, where one is carried out."""
        limits = self._walk.world.limits
        if limits is None:
            yield from some
            return
        ranges = limits.ranges("message", work.topic.topic)
        for expiry in some:
            if any(found.start <= expiry.key < found.stop for found in ranges):
                yield expiry
