"""What a pass knows about consumers: the messages that they have not read, and those that all have processed.

Messages that a registered consumer has not read are held (``server.consumers.floor``). The rules do not change: these
rows are due, but the run's frontier stops before them, as it does for other reasons (invariant S8). Only the cutoff of
the current generation is lowered, since messages of an old generation cannot be read any longer. The saved frontier is
the one without consumers. Therefore rows are deleted at once, without a jump, when the consumer has read them or is
deleted. Positions are read once, when a pass starts. That is enough, because a row that is not held then will never be
held (``tms_core.consumers``).

The number of messages that are deleted because all consumers have processed them (rule L7, ``retention: consumed``) is
decided once for each topic, before its first deletion. From then on it is a number in the frontier. A run announces it
and then reads the consumers again: a consumer that registers meanwhile is either in that reading or starts after the
number (:mod:`tms_core.consumers.retention`).
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
        waiting: the consumer that is furthest behind in each topic with held rows.

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
            # As far as can be told they have read nothing; reading the topic's rows will show what is wrong.
            return self._floor.lowest(frontier.due)


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The messages that consumers have processed, in one pass.

    Attributes:
        side: has their positions and claims.
        snapshot: the facts about transactions; read before the claims are read.
        hold_seconds: the least age of rows that are deleted.
        announces: whether rows will be deleted; False: only shown.
        unknown: the errors of topics whose consumers cannot be read; nothing of them is deleted.
    """

    side: SideTable
    snapshot: VisibilityState
    hold_seconds: int
    announces: bool = False
    unknown: dict[TopicId, str] = field(default_factory=dict)

    def extend(self, topic: TopicMetadata, frontier: Frontier) -> tuple[Frontier, bool]:
        """Return a topic's frontier with the rows that L7 deletes, and whether they are more than announced before."""
        self.unknown.pop(topic.topic, None)
        if not topic.consumed:
            return frontier, False
        # Never past the oldest open transaction: it may still publish there, or give back what it has claimed.
        limit_ms = max(0, min(frontier.now_ms - self.hold_seconds * 1000, oldest_open_ms(self.snapshot)))
        try:
            upto = min(limit_ms << 16, self._processed_position(topic))
            if upto <= frontier.due.ms << 16:
                return frontier, False
            is_more = upto > announced(self.side, topic)
            if self.announces and is_more and frontier.hold is None:
                # L7: announce, then read the consumers again. A consumer that registers in between either is in the
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
