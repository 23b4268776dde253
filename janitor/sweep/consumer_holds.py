"""What a pass holds because a registered consumer has not read it (``server.consumers.floor``).

The law stays as it is: such rows are due, and a run's frontier stops short of them, as it does for other reasons
(rule S8). Only the cut-off of the current generation is lowered: what an earlier life of a topic had cannot be read
any more. What is remembered of a frontier is where it would be without consumers, so that rows go at once, and are no
jump, when the one they waited for has read them or is forgotten.

Positions are read once, when a pass begins. That is enough, because what is not held then never will be
(``tms_core.consumers``).
"""

from __future__ import annotations

from dataclasses import replace

from janitor.law.policy import Frontier, Hold
from tms_core.consumers.positions import Floor, Position
from tms_core.errors import StoreError
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicId, TopicMetadata


class ConsumerHolds:
    """The consumers as one pass knows them.

    Args:
        floor: where they are asked for, and by which rows are held.

    Attributes:
        waiting: for whom a topic's rows are held, the consumer that is furthest behind.

    Raises:
        StoreError: positions could not be read, so what to hold is not known.
    """

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._positions = floor.positions.all()
        self.waiting: dict[TopicId, Position] = {}

    def lower(self, topic: TopicMetadata, frontier: Frontier) -> Frontier:
        """A topic's frontier, lowered to the oldest message that one of its consumers has not read."""
        self.waiting.pop(topic.topic, None)
        positions = self._positions.get((topic.topic, topic.generation))
        if positions is None:
            return frontier
        cutoff = self._cutoff(topic, frontier, positions)
        if cutoff >= frontier.cutoff:
            return frontier
        self.waiting[topic.topic] = min(positions, key=lambda position: position.id)
        return replace(frontier, cutoff=cutoff, hold=frontier.hold or Hold.CONSUMER)

    def _cutoff(self, topic: TopicMetadata, frontier: Frontier, positions: list[Position]) -> Cutoff:
        try:
            return self._floor.lowered(topic, frontier.due, positions)
        except StoreError:
            # As far as can be told they have read nothing; reading the topic's rows will show what is wrong.
            return self._floor.lowest(frontier.due)
