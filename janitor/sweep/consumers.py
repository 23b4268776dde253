"""Consumers in a pass: holds for unread messages, and the limit for messages that all consumers have processed.

Messages that a registered consumer has not read are held (``server.consumers.floor``). These rows are due, but the
run's frontier stops before them, like for other holds (invariant S8). Only the cutoff of the current generation is
lowered, since no consumer can read messages of an old generation. The saved frontier does not include these holds.
Therefore rows are deleted at once, without a jump, when the consumer has read them or is deleted. Positions are read
once, when a pass starts: a row that is not held then will never be held (``tms_core.consumers``).

Rule L7 (``retention: consumed``) deletes messages up to the position that all consumers have processed. The frontier
fixes that position before the first deletion in a topic. A run announces the position and then reads the consumers
again: a consumer that registers in between is either in that reading or starts after the position
(:mod:`tms_core.consumers.retention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from janitor.rules.policy import Frontier, Hold
from janitor.sweep.transactions import oldest_open_ms
from tms_core.consumers.positions import Floor, Position
from tms_core.consumers.retention import announce, announced, processed
from tms_core.errors import FormatError, StoreError
from tms_core.rowkey import Cutoff
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState


class ConsumerHolds:
    """The holds for consumers in one pass.

    Args:
        floor: the source of positions, and the longest hold.

    Attributes:
        waiting: the consumer with the largest lag in each topic with held rows.

    Raises:
        StoreError: positions could not be read, so the holds are not known.
    """

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._positions = floor.positions.all()
        self.waiting: dict[TopicId, Position] = {}

    def lower(self, topic: TopicMetadata, frontier: Frontier) -> Frontier:
        """Return a topic's frontier, lowered to the oldest message that a consumer has not read."""
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
            return self._floor.cutoff_for(topic, frontier.due, positions)
        except StoreError:
            # Assume that the consumers have read nothing. The pass reports the error when it reads the topic's rows.
            return self._floor.lowest(frontier.due)


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The messages that all consumers have processed, in one pass.

    Attributes:
        side: the side table with positions and claims.
        snapshot: the transaction snapshot; read before the claims.
        hold_seconds: the minimum age of deleted rows.
        announces: whether to announce the position, because a run deletes the rows; False for a plan.
        unknown: errors by topic whose consumers cannot be read; rule L7 deletes nothing there.
    """

    side: SideTable
    snapshot: VisibilityState
    hold_seconds: int
    announces: bool = False
    unknown: dict[TopicId, str] = field(default_factory=dict)

    def extend(self, topic: TopicMetadata, frontier: Frontier) -> tuple[Frontier, bool]:
        """Return a topic's frontier with the position of L7, and whether it is after the announced position."""
        self.unknown.pop(topic.topic, None)
        if not topic.consumed:
            return frontier, False
        # Stop at the oldest open transaction: it may still publish there, or release its claims.
        limit_ms = max(0, min(frontier.now_ms - self.hold_seconds * 1000, oldest_open_ms(self.snapshot)))
        try:
            upto = min(limit_ms << 16, self._processed_position(topic))
            if upto <= frontier.due.ms << 16:
                return frontier, False
            is_more = upto > announced(self.side, topic)
            if self.announces and is_more and frontier.hold is None:
                # L7: announce, then read the consumers again. A consumer that registers in between is either in the
                # second reading, or reads the announcement and starts after it.
                announce(self.side, topic, upto)
                upto = min(upto, self._processed_position(topic))
        except (StoreError, FormatError) as error:
            # L7: unknown positions count as unread.
            self.unknown[topic.topic] = str(error)
            return frontier, False
        return replace(frontier, processed=upto), is_more

    def _processed_position(self, topic: TopicMetadata) -> int:
        return processed(self.side, topic, self.snapshot.dummy_transaction())
