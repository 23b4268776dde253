"""How far consumers let a topic's rows go: unread messages stay, and messages that all have processed are deleted
before their TTL.

Messages that a registered consumer has not read are held (``server.consumers.floor``). The law stays as it is: such
rows are due, and a run's frontier stops short of them, as it does for other reasons (rule S8). Only the cut-off of the
current generation is lowered: nobody can read an old generation. The saved frontier is the one without consumers, so
that rows are deleted at once, and are not a jump, after the consumer has read them or was deleted.

Positions are read once, when a pass starts. That is enough, because rows that are not held then never will be
(``tms_core.consumers``).

How far a topic's messages may go because all its consumers have processed them (rule L7, ``retention: consumed``) is
decided once for each topic, before its first row goes, and is a number in its frontier from then on: engines need no
more of it than of a cut-off. A run announces it and then reads the consumers again, so a new consumer is either
included or starts after it (:mod:`tms_core.consumers.retention`).
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
    """The consumers as one pass knows them.

    Args:
        floor: the source of positions, and the longest hold.

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
        """Return a topic's frontier, lowered to the oldest message that one of its consumers has not read."""
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


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """What consumers have processed, as one pass knows it.

    Attributes:
        side: where their positions and claims are.
        snapshot: the facts about transactions; read before the claims are.
        hold_seconds: how old a row is at least that goes.
        announces: whether rows will go, and not only be shown.
        unknown: why nothing goes of a topic whose consumers cannot be read.
    """

    side: SideTable
    snapshot: VisibilityState
    hold_seconds: int
    announces: bool = False
    unknown: dict[TopicId, str] = field(default_factory=dict)

    def extend(self, topic: TopicMetadata, frontier: Frontier) -> tuple[Frontier, bool]:
        """Return a topic's frontier with what L7 takes, and whether that is more than was announced before."""
        self.unknown.pop(topic.topic, None)
        if not topic.consumed:
            return frontier, False
        limit_ms = max(0, min(frontier.now_ms - self.hold_seconds * 1000, oldest_open_ms(self.snapshot)))
        try:
            upto = min(limit_ms << 16, self._processed(topic))
            if upto <= frontier.due.ms << 16:
                return frontier, False
            is_more = upto > announced(self.side, topic)
            if self.announces and is_more and frontier.hold is None:
                announce(self.side, topic, upto)
                upto = min(upto, self._processed(topic))
        except (StoreError, FormatError) as error:
            self.unknown[topic.topic] = str(error)
            return frontier, False
        return replace(frontier, processed=upto), is_more

    def _processed(self, topic: TopicMetadata) -> int:
        return processed(self.side, topic, self.snapshot.dummy_transaction())
