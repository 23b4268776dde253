"""Deleting message rows: what L2 and L3 take lies in one range of each topic."""

from __future__ import annotations

from janitor.ranges import beyond, message_spans
from janitor.walk import Walk
from janitor.world import TopicWork


class Messages:
    """The message table's step of a pass."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def delete(self) -> None:
        """Delete what is due."""
        self._walk.each_topic("message", self._walk.store.message, self._visit)

    def _visit(self, work: TopicWork, first_key: bytes) -> bytes:
        walk, table = self._walk, self._walk.store.message
        for span in walk.allowed("message", work, message_spans(work.topic, work.frontier)):
            for page in walk.pages("message", table, work, span, first_key):
                for batch in walk.batches("message", work, span, page):
                    walk.take(table, work, batch, work.frontier.hold if span.held else None)
        return beyond(work.topic)
