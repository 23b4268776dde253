"""Message rows that are due: what L2 and L3 take lies in one range of each topic."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from janitor.law.ranges import beyond, message_spans
from janitor.sweep.context import TopicWork
from janitor.sweep.findings import Batch, Finding
from janitor.sweep.scan import Event, Part, allowed, batches, due, topics


def messages(part: Part, undone: Collection[bytes]) -> Iterator[Event]:
    """The message table's step of a pass."""
    return topics(part, "message", undone, _findings, lambda work: beyond(work.topic))


def _findings(part: Part, work: TopicWork, first_key: bytes) -> Iterator[Finding]:
    for span in allowed(part, "message", work, message_spans(work.topic, work.frontier)):
        for item in batches(part, "message", work, span, first_key):
            if isinstance(item, Batch):
                yield due(part, work, item, work.frontier.hold if span.held else None)
            else:
                yield item
