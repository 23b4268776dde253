"""Deleting payload rows: by generation where that is enough, else each by its own time, transaction and readers.

Rows of the payload table sort by transaction, so in a generation that only time makes old the due ones lie scattered.
They are gathered as candidates, and a bounded number of them at a time is held against the message table (L5).
"""

from __future__ import annotations

from collections.abc import Iterator

from janitor.policy import Reason, Rule
from janitor.ranges import Span, newest_expired_pointer, payload_spans
from janitor.references import find_referenced, search_range, timeless_range
from janitor.walk import Batch, Walk
from janitor.world import TopicWork
from tms_core.rowkey import PayloadKey, generation_prefix

#: Payload keys gathered before their messages are looked for; bounds memory, about 10 MB.
CANDIDATES = 20_000


class Payloads:
    """The payload table's step of a pass; comes after the messages', which frees payloads."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def delete(self) -> None:
        """Delete what is due and nobody needs."""
        self._walk.each_topic("payload", self._walk.store.payload, self._visit)

    def _visit(self, work: TopicWork, first_key: bytes) -> bytes:
        walk, table = self._walk, self._walk.store.payload
        newest = None
        if not walk.world.thorough:
            newest = newest_expired_pointer(work.frontier, walk.world.terms.lifetime.allowance_ms)
        for span in walk.allowed("payload", work, payload_spans(work.topic, work.frontier, newest)):
            pages = walk.pages("payload", table, work, span, first_key)
            if span.by_row:
                self._take_by_row(work, span, pages)
                continue
            for page in pages:
                for batch in walk.batches("payload", work, span, page):
                    walk.take(table, work, batch, work.frontier.hold if span.held else None)
        return generation_prefix(work.topic.topic.prefix, max(work.topic.old_below, work.topic.generation + 1))

    def _take_by_row(self, work: TopicWork, span: Span, pages: Iterator[list[bytes]]) -> None:
        """Judge the payload rows of one generation each by its own time and transaction."""
        candidates: list[bytes] = []
        for page in pages:
            for batch in self._walk.batches("payload", work, span, page):
                due, held = self._split_by_time(work, batch)
                if work.counts_held:
                    self._walk.take(self._walk.store.payload, work, batch._replace(keys=held), work.frontier.hold)
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
        undecided = self._walk.world.transactions.is_undecided
        decided = [key for key in keys if not undecided(_pointer(key))]
        self._walk.tally.keep(Reason.UNDECIDED, len(keys) - len(decided))
        return decided

    def _take_candidates(self, work: TopicWork, span: Span, keys: list[bytes]) -> None:
        """Delete expired payload rows that no message refers to."""
        if not keys:
            return
        generation = int.from_bytes(keys[0][-22:-18], "big")
        referenced = self._referenced(work, generation, keys)
        free = [key for key in keys if _pointer(key) not in referenced]
        self._walk.tally.keep(Reason.REFERENCED, len(keys) - len(free))
        for first in range(0, len(free), self._walk.page_rows):
            batch = Batch("payload", generation, span.rule, free[first : first + self._walk.page_rows])
            self._walk.take(self._walk.store.payload, work, batch, None)

    def _referenced(self, work: TopicWork, generation: int, keys: list[bytes]) -> set[int]:
        walk, topic = self._walk, work.topic.topic
        # Under a plan's ranges, or after the topic was planned anew, messages may be there that its frontier lets go.
        exact = walk.world.limits is None and topic.prefix not in walk.world.reread_topics
        payloads = (parts for key in keys if (parts := PayloadKey.parse(key)) is not None)
        since_ms = work.frontier.cutoff.ms if exact else 0
        window = search_range(topic, generation, since_ms, payloads, walk.world.terms.lifetime)
        return find_referenced(
            walk.whole.message,
            (window, timeless_range(topic, generation)),
            {_pointer(key) for key in keys},
            walk.page_rows,
            lambda: walk.observe("references", topic, 0),
        )


def _pointer(key: bytes) -> int:
    """The write pointer in a payload key, without parsing the rest."""
    return int.from_bytes(key[-18:-10], "big", signed=True)
