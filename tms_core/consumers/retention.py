"""Messages that all consumers of a topic have processed, so that they may be deleted (rule L7).

With the property ``retention: consumed``, the janitor deletes messages before their TTL. Before it deletes, it
announces the limit in a row of the side table: ``r`` + topic + generation has the first position that stays (10 bytes).
A new or moved consumer starts at or after that position (:func:`begin`).

The janitor writes its row and then reads the consumers. A consumer writes its row and then reads the announced limit.
Whichever is second sees the first. Therefore a message that no consumer needed after the announcement is never needed
again.
"""

from __future__ import annotations

from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup, rank, view_group
from tms_core.consumers.positions import Positions
from tms_core.rowkey import MESSAGE_TAIL_BYTES, MessageId
from tms_core.tables.side import SideTable
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

#: The first byte of keys.
_ANNOUNCED = b"r"


def processed(side: SideTable, topic: TopicMetadata, reader: Transaction) -> int:
    """Return the first position (``milliseconds * 65,536 + sequence``) that a consumer has not processed; 0 without
    consumers.

    A claim counts once its transaction is committed and nothing before it is missing, as in the group's next poll.

    Args:
        reader: the facts about transactions; from before the claims are read, since one that is rolled back goes before
            its transaction finishes.

    Raises:
        StoreError, FormatError: they could not be read.
    """
    return min(processed_by(side, topic, reader).values(), default=0)


def processed_by(side: SideTable, topic: TopicMetadata, reader: Transaction) -> dict[str, int]:
    """Return the first position that each consumer has not processed; arguments and errors as for :func:`processed`."""
    found = {}
    for position in Positions(side).of(topic):
        claims = [claim for _, claim in claims_of(side, ConsumerGroup.of(topic, position.name))]
        found[position.name] = _position_after(view_group(position.id, claims, reader).base)
    return found


def announced(side: SideTable, topic: TopicMetadata) -> int:
    """Return the first position that is not released for deletion; 0: nothing is released."""
    return announced_in(side, topic.rows_prefix)


def announced_in(side: SideTable, prefix: bytes) -> int:
    """Return the same, of the topic and generation whose row keys start so."""
    return int.from_bytes(side.get(_ANNOUNCED + prefix) or b"", "big")


def announce(side: SideTable, topic: TopicMetadata, upto: int) -> None:
    """Announce that rows before a position may be deleted; the previous announcement stands. Durable on return.

    Raises:
        StoreError: it could not be written.
    """
    key = _key(topic)
    while True:
        present = side.get(key)
        if int.from_bytes(present or b"", "big") >= upto:
            return
        if side.exchange(key, present, upto.to_bytes(MESSAGE_TAIL_BYTES, "big")):
            return


def begin(side: SideTable, topic: TopicMetadata, message: MessageId) -> MessageId:
    """Return the id after which a consumer starts that requests this one: released messages are skipped."""
    first = announced(side, topic)
    return max(message, MessageId(first - 1 >> 16, first - 1 & 0xFFFF), key=rank) if first else message


def _position_after(base: MessageId) -> int:
    """Return the first position after the processed messages; of a row with several payloads all must be."""
    at = base.publish_ms << 16 | base.sequence
    return at if base.in_payload_table or not at else at + 1


def _key(topic: TopicMetadata) -> bytes:
    return _ANNOUNCED + topic.rows_prefix
