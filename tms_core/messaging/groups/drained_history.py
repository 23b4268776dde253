"""A cache of the partitions that consumer groups have drained.

A family may follow a thousand earlier partitions, so their rows in the side table are read once and cached. An entry is
valid until a client sets a position back or deletes a consumer, or for 5 seconds if another server may process that
request.
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

#: The maximum number of cached groups.
KNOWN_GROUPS = 10_000
#: The lifetime of an entry in milliseconds, if other servers may set positions.
_KNOWN_MS = 5000


class _DrainedNote(NamedTuple):
    """The fact that a group has drained all partitions before a family.

    Attributes:
        pointer, topic: the last transaction that drained a partition, and the partition.
        resets: :attr:`ConsumerRegistry.resets` before the read.
        read_ms: the time of the read.
    """

    pointer: int
    topic: TopicId
    resets: int
    read_ms: int


class DrainedHistory:
    """The partitions that groups have drained; threads may share it.

    Args:
        alone: whether only this server sets positions.
    """

    def __init__(self, families: Families, consumers: ConsumerRegistry, clock: HonestClock, *, alone: bool) -> None:
        self._families = families
        self._consumers = consumers
        self._clock = clock
        self._alone = alone
        #: The key has the last partition before the family.
        self._known: RecentlySet[ConsumerGroup, _DrainedNote] = RecentlySet(KNOWN_GROUPS)

    def find_unread(self, part: TopicMetadata, name: str, reader: Transaction) -> TopicId | None:
        """Return the first earlier partition that a group has not drained, as seen by a reader; None: all are drained.

        Raises:
            FormatError, MetadataError, StoreError: as :meth:`Families.drained`.
        """
        predecessors = self._families.predecessors(part)
        if not predecessors:
            return None
        now_ms, resets = self._clock.now_ms(), self._consumers.resets
        group = ConsumerGroup(predecessors[-1], part.generation, name)
        known = self._known.get(group)
        if known is None or known.resets != resets or self._is_old(known, now_ms):
            found = []
            for topic in predecessors:
                pointer = self._families.drained(topic, name)
                if pointer is None:
                    return topic
                found.append((pointer, topic))
            known = self._known[group] = _DrainedNote(*max(found), resets, now_ms)
        # The reader must not process messages after those of a transaction whose results its snapshot does not have.
        return known.topic if claim_outcome(known.pointer, reader) is ClaimOutcome.OPEN else None

    def invalidate(self) -> None:
        """Drop cached data, because another process may have written."""
        self._known.clear()

    def _is_old(self, known: _DrainedNote, now_ms: int) -> bool:
        return not self._alone and not 0 <= now_ms - known.read_ms < _KNOWN_MS
