"""The earlier partitions that consumer groups have read completely.

The history is read from the side table once and cached, because a family may follow a thousand partitions. An entry is
valid until a position is set back or a consumer is deleted. If another server may do that, it is valid for 5 seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from tms_core.clock import HonestClock
from tms_core.consumers.claims import ClaimOutcome, ConsumerGroup, claim_outcome
from tms_core.messaging.families import Families
from tms_core.messaging.groups.positions import ConsumerRegistry
from tms_core.tables.recently_set import RecentlySet
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction

#: The most cached groups.
KNOWN_GROUPS = 10_000
#: How long an entry is valid if another server may set a group back, in milliseconds.
_KNOWN_MS = 5000


class _DrainedNote(NamedTuple):
    """A note that a group has read all partitions before a family.

    Attributes:
        pointer, topic: the last transaction that completed a partition, and the partition.
        taken_back: :attr:`ConsumerRegistry.taken_back` before the read.
        read_ms: the time of the read.
    """

    pointer: int
    topic: TopicId
    taken_back: int
    read_ms: int


class DrainedHistory:
    """The partitions that groups have read completely; threads may share it.

    Args:
        alone: whether no other server sets positions.
    """

    def __init__(self, families: Families, consumers: ConsumerRegistry, clock: HonestClock, *, alone: bool) -> None:
        self._families = families
        self._consumers = consumers
        self._clock = clock
        self._alone = alone
        #: The notes, by the last partition before the family.
        self._known: RecentlySet[ConsumerGroup, _DrainedNote] = RecentlySet(KNOWN_GROUPS)

    def unread(self, part: TopicMetadata, name: str, reader: Transaction) -> TopicId | None:
        """Return the first earlier partition that a group has not read completely for a reader; None: it has read all.

        Raises:
            FormatError, MetadataError, StoreError: as :meth:`Families.drained`.
        """
        before = self._families.before(part)
        if not before:
            return None
        now_ms, taken_back = self._clock.now_ms(), self._consumers.taken_back
        group = ConsumerGroup(before[-1], part.generation, name)
        known = self._known.get(group)
        if known is None or known.taken_back != taken_back or self._is_old(known, now_ms):
            found = []
            for topic in before:
                pointer = self._families.drained(topic, name)
                if pointer is None:
                    return topic
                found.append((pointer, topic))
            known = self._known[group] = _DrainedNote(*max(found), taken_back, now_ms)
        # The reader must not build on the results of a transaction that is not in its snapshot.
        return known.topic if claim_outcome(known.pointer, reader) is ClaimOutcome.OPEN else None

    def forget(self) -> None:
        """Drop cached data, because another process may have written."""
        self._known.clear()

    def _is_old(self, known: _DrainedNote, now_ms: int) -> bool:
        return not self._alone and not 0 <= now_ms - known.read_ms < _KNOWN_MS
