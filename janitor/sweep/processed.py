"""How far a topic's messages may go because all its consumers have processed them (rule L7, ``retention: consumed``).

Where that is is decided once for each topic, before its first row goes, and is a number in its frontier from then on:
engines need no more of it than of a cut-off. A run announces it and then asks the consumers again, so a consumer that
registers meanwhile has either been asked, or begins behind it (:mod:`tms_core.consumers.retention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from janitor.law.policy import Frontier
from tms_core.consumers.retention import announce, announced, processed
from tms_core.errors import FormatError, StoreError
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState, transaction_ms


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """What consumers have processed, as one pass knows it.

    Attributes:
        side: where their positions and claims are.
        snapshot: what is known of transactions; read before the claims are.
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
        """A topic's frontier with what L7 takes, and whether that is more than was announced before."""
        self.unknown.pop(topic.topic, None)
        if not topic.consumed:
            return frontier, False
        limit_ms = max(0, min(frontier.now_ms - self.hold_seconds * 1000, self._decided_ms()))
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

    def _decided_ms(self) -> int:
        """Begin of the oldest transaction that may be in progress."""
        pointers = self.snapshot.open_pointers
        return min([self.snapshot.timestamp_ms, *map(transaction_ms, pointers)])
