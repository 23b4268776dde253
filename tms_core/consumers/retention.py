"""Retention ``consumed``: messages that all consumers of a topic have processed may be deleted (rule L7).

The janitor deletes such messages before their TTL. First it announces the limit in a row of the side table. The key is
``r`` + topic + generation, and the value is the first position that stays (10 bytes). A new or moved consumer starts at
or after that position (:func:`start_after`).

The janitor writes its row and then reads the positions. A consumer writes its position and then reads the announced
limit. Whichever comes second sees the write of the other. Therefore no consumer can start before the limit unnoticed.
"""

from __future__ import annotations

from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup, rank, view_group
from tms_core.consumers.positions import Positions
from tms_core.rowkey import MESSAGE_TAIL_BYTES, MessageId
from tms_core.tables.side import SideTable
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import Transaction

#: The first key byte of announced limits.
_ANNOUNCED = b"r"


def processed(side: SideTable, topic: TopicMetadata, reader: Transaction) -> int:
    """Return the first position (``milliseconds * 65,536 + sequence``) that a consumer has not processed.

    Return 0 if the topic has no consumers. A claim counts as processed if its transaction is committed and it adjoins
    the base, as in the group's next poll.

    Args:
        reader: a transaction snapshot from before the read of the claims. With a later snapshot, a claim that was
            released after the read would count as processed.

    Raises:
        StoreError, FormatError: the table could not be read, or a row is damaged.
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
    """Return the announced limit: the first position that is not released for deletion; 0: nothing is released."""
    return announced_in(side, topic.rows_prefix)


def announced_in(side: SideTable, prefix: bytes) -> int:
    """Return the announced limit of the topic and generation with this row key prefix."""
    return int.from_bytes(side.get(_ANNOUNCED + prefix) or b"", "big")


def announce(side: SideTable, topic: TopicMetadata, upto: int) -> None:
    """Announce that rows before a position may be deleted; never lower an announced limit. Durable on return.

    Raises:
        StoreError: the table could not be written.
    """
    key = _key(topic)
    while True:
        present = side.get(key)
        if int.from_bytes(present or b"", "big") >= upto:
            return
        if side.exchange(key, present, upto.to_bytes(MESSAGE_TAIL_BYTES, "big")):
            return


def start_after(side: SideTable, topic: TopicMetadata, message: MessageId) -> MessageId:
    """Return the id after which a consumer starts: the requested id, or the last released message if it is later."""
    first = announced(side, topic)
    return max(message, MessageId(first - 1 >> 16, first - 1 & 0xFFFF), key=rank) if first else message


def _position_after(base: MessageId) -> int:
    """Return the first position that is not completely processed; a row is if all its payloads are."""
    at = base.publish_ms << 16 | base.sequence
    return at if base.in_payload_table or not at else at + 1


def _key(topic: TopicMetadata) -> bytes:
    return _ANNOUNCED + topic.rows_prefix
