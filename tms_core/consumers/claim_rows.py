"""The rows of claims and of drained partitions in the side table (:mod:`tms_core.tables.side`).

The key of a claim is ``t`` + topic + generation + ``c`` + name + 0 + the id before the first message (20 bytes) +
pointer (8 bytes). The value is the id of the last message (20 bytes), the number of deliveries (1 byte), the size of
the batch (4 bytes) and the time of the next delivery (8 bytes). A name contains no zero byte, so no group's key prefix
is a prefix of another group's keys.

The key ``t`` + topic + generation + ``d`` + name + 0 marks a sealed partition that a group has drained. The value is
the id of the transaction that drained it (8 bytes). The leader of the partition writes and deletes this row together
with the group's position; leaders of other partitions only read it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from tms_core.consumers.claims import CLAIM, TRANSACTIONAL, ConsumerGroup, GroupClaim, rank
from tms_core.consumers.positions import Positions, highest_id
from tms_core.errors import FormatError, quoted
from tms_core.rowkey import GENERATION_BYTES, MessageId, generation_prefix, stop_key, topic_prefix
from tms_core.tables.base import iterate_items
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata

_TAIL = struct.Struct(">20sq")
_VALUE = struct.Struct(">20sBIq")
_MAX_TRIES = 255
#: The kind byte of a drained partition's row, and the format of its value.
_DRAINED, _POINTER = b"d", struct.Struct(">q")
#: The number of key bytes after the zero byte, by kind of row.
_TAIL_BYTES = {CLAIM: _TAIL.size, _DRAINED: 0}


def pack(group: ConsumerGroup, claim: GroupClaim) -> tuple[bytes, bytes]:
    """Return the key and the value of a claim's row."""
    key = group.prefix + _TAIL.pack(claim.first.pack(), claim.pointer)
    return key, _VALUE.pack(claim.last.pack(), min(claim.tries, _MAX_TRIES), claim.size, claim.retry_ms)


def claims_of(side: SideTable, group: ConsumerGroup) -> list[tuple[bytes, GroupClaim]]:
    """Return the claims and marks of a group, each with its key, in the order of their keys.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    return [(key, _claim(key, value)) for key, value in _rows(side, group.prefix)]


def all_claims(side: SideTable, start: bytes = TRANSACTIONAL) -> Iterator[tuple[bytes, ConsumerGroup, GroupClaim]]:
    """Yield the claims and marks of all groups with their keys, including groups of old generations.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read.
    """
    for key, value in _rows(side, TRANSACTIONAL, start):
        kind, group = _group(key)
        if group is not None and kind == CLAIM:
            yield key, group, _claim(key, value)


def pack_drained(group: ConsumerGroup, pointer: int) -> tuple[bytes, bytes]:
    """Return the key and the value of the row that marks a partition as drained.

    Args:
        pointer: the last transaction that read the partition; 0: unknown.
    """
    return drained_key(group), _POINTER.pack(pointer)


def drained_key(group: ConsumerGroup) -> bytes:
    """Return the key of the row that marks a partition as drained."""
    return group.key(_DRAINED)


def draining_transaction(side: SideTable, group: ConsumerGroup) -> int | None:
    """Return the transaction in which a group drained a sealed partition; None: the group has not drained it.

    Raises:
        FormatError: the row is damaged.
        StoreError: the table could not be read.
    """
    key = drained_key(group)
    value = side.get(key)
    if value is None:
        return None
    try:
        (pointer,) = _POINTER.unpack(value)
    except struct.error as error:
        raise FormatError(f"the row {quoted(key)} has {len(value)} bytes, not {_POINTER.size}") from error
    return int(pointer)


def release_void_claims(
    side: SideTable, is_invalid: Callable[[int], bool], is_deleted: Callable[[ConsumerGroup], bool]
) -> int:
    """Replace claims of invalid transactions by marks, and delete rows of deleted topics. Durable on return.

    Call this before a transaction is removed from the invalid list; afterwards its claims would count as done. A server
    that polls for the groups concurrently makes the same change, so the two do not conflict.

    Args:
        is_invalid: whether a transaction is on the invalid list.
        is_deleted: whether a group's topic was deleted or recreated.

    Returns:
        The number of released claims.

    Raises:
        FormatError: a row is damaged.
        StoreError: the table could not be read or written.
    """
    freed, obsolete, changed = 0, list[bytes](), dict[ConsumerGroup, None]()
    for key, value in _rows(side, TRANSACTIONAL):
        kind, group = _group(key)
        if group is None:
            continue
        if is_deleted(group):
            obsolete.append(key)
        elif kind == CLAIM and (claim := _claim(key, value)).pointer > 0 and is_invalid(claim.pointer):
            _free(side, group, key, claim)
            freed += 1
            changed[group] = None
    # Touch the positions after the claims: a server that read the old claims then finds a changed position.
    for group in changed:
        Positions(side).touch(group.topic, group.generation, group.name)
    side.delete(obsolete)
    return freed


def _free(side: SideTable, group: ConsumerGroup, key: bytes, claim: GroupClaim) -> None:
    while True:
        # The worker may never have received the messages, so this delivery does not count.
        mark = claim._replace(pointer=0, tries=claim.tries - 1)
        mark_key, _ = pack(group, mark)
        present = side.get(mark_key)
        if present is not None:
            known = _claim(mark_key, present)
            mark = known._replace(last=max(mark.last, known.last, key=rank), tries=max(mark.tries, known.tries))
        if side.exchange(mark_key, present, pack(group, mark)[1], deletes=[key]):
            return


def list_previous_claims(side: SideTable, topic: TopicMetadata) -> list[bytes]:
    """Return the keys of claims and drained partitions of a topic's old generations."""
    start = TRANSACTIONAL + generation_prefix(topic.topic.prefix, 0)
    stop = TRANSACTIONAL + topic.rows_prefix
    return [key for key, _ in iterate_items(side.rows, start, stop)]


def first_unread(side: SideTable, prefix: bytes) -> int:
    """Return the first position (``milliseconds * 65,536 + sequence``) after all read or claimed messages.

    Args:
        prefix: the row key prefix of a topic's generation.

    Raises:
        StoreError, FormatError: the table could not be read, or a row is damaged.
    """
    ids = [_claim(key, value).last for key, value in _rows(side, TRANSACTIONAL + prefix + CLAIM)]
    ids.append(highest_id(side, prefix))
    return max((found.publish_ms << 16 | found.sequence) + 1 if found != MessageId(0, 0) else 0 for found in ids)


def _rows(side: SideTable, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    return iterate_items(side.rows, start or prefix, stop_key(prefix))


def _group(key: bytes) -> tuple[bytes, ConsumerGroup | None]:
    """Return the kind and the group of a row; the group is None if the row does not belong to a group."""
    prefix = topic_prefix(key[1:])
    topic = None if prefix is None else TopicId.from_prefix(prefix)
    if topic is None or prefix is None:
        return b"", None
    rest = key[1 + len(prefix) :]
    kind = rest[GENERATION_BYTES : GENERATION_BYTES + 1]
    name, zero, tail = rest[GENERATION_BYTES + 1 :].partition(b"\0")
    if not zero or len(tail) != _TAIL_BYTES.get(kind):
        return kind, None
    generation = int.from_bytes(rest[:GENERATION_BYTES], "big")
    return kind, ConsumerGroup(topic, generation, name.decode("ascii", "replace"))


def _claim(key: bytes, value: bytes) -> GroupClaim:
    try:
        first, pointer = _TAIL.unpack(key[-_TAIL.size :])
        last, tries, size, retry_ms = _VALUE.unpack(value)
    except struct.error as error:
        raise FormatError(f"the claim {quoted(key)} has {len(value)} bytes, not {_VALUE.size}") from error
    return GroupClaim(MessageId.parse(first), MessageId.parse(last), pointer, tries, size, retry_ms)
