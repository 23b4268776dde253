"""The positions of named consumers, and the hold of messages that they have not read.

A position is a row of the side table (:mod:`tms_core.tables.side`): ``c`` + topic + generation + name. A topic that was
deleted and created again has another generation, so its consumers restart, and rows of old generations are never read.

With the *floor*, a message stays visible to all readers while a registered consumer has not read it, for at most a
configured time after its TTL. Readers and janitor must agree, so both compute the cutoff here. The cutoff never moves
back: a position does not hold messages that had expired when it was written (:attr:`Position.since_ms`). Therefore a
deletable message never becomes held again, and a sweep reads the positions only once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tms_core.errors import FormatError, Unavailable
from tms_core.rowkey import (
    GENERATION_BYTES,
    MESSAGE_TAIL_BYTES,
    Cutoff,
    MessageId,
    MessageKey,
    generation_prefix,
    java_abs,
    pointer_prefix,
    stop_key,
    time_prefix,
    topic_prefix,
)
from tms_core.tables.base import MESSAGES, Reads, iterate_items
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId, TopicMetadata

#: The first key byte of positions.
_CONSUMER = b"c"
#: The fields of :class:`Position` without the name.
_VALUE = struct.Struct(">20sqq")


class Position(NamedTuple):
    """The position of a consumer.

    Attributes:
        id: the id of the last message that the consumer has read.
        updated_ms: the time of the update; at least the id's publish time, unless the position was set to the future.
        since_ms: the topic's cutoff at the update; older messages are not held for the consumer.
    """

    name: str
    id: MessageId
    updated_ms: int
    since_ms: int


class Positions:
    """The positions of all consumers of a store; threads may share it."""

    def __init__(self, table: SideTable) -> None:
        self._table = table

    def put(self, topic: TopicMetadata, position: Position) -> None:
        """Write a consumer's position. Durable on return."""
        key = consumer_prefix(topic.topic, topic.generation) + position.name.encode("ascii")
        self._table.put([(key, _pack(position))])

    def move(
        self,
        topic: TopicMetadata,
        previous: Position | None,
        position: Position,
        puts: Sequence[tuple[bytes, bytes]] = (),
        deletes: Sequence[bytes] = (),
    ) -> None:
        """Replace a consumer's position by compare-and-set, together with other rows. Durable on return.

        A late write of a former leader cannot set a position back, because the value that it expects is gone.

        Args:
            previous: the position that was read; None: it did not exist.
            puts, deletes: other rows of the side table, as of :meth:`SideTable.exchange`.

        Raises:
            Unavailable: another server has changed the position.
            StoreError: the table could not be written.
        """
        key = consumer_prefix(topic.topic, topic.generation) + position.name.encode("ascii")
        expected = None if previous is None else _pack(previous)
        if not self._table.exchange(key, expected, _pack(position), puts, deletes):
            raise Unavailable(f"The position of consumer {position.name} changed during the request.", "Try again.")

    def touch(self, topic: TopicId, generation: int, name: str) -> None:
        """Increase the update time of a position after a change of its consumer's claims; ignore missing positions.

        The changed position makes servers reload the claims that they have cached.

        Raises:
            StoreError, FormatError: the table could not be read or written.
        """
        key = consumer_prefix(topic, generation) + name.encode("ascii", "replace")
        while (value := self._table.get(key)) is not None:
            position = _position(name, value)
            if self._table.exchange(key, value, _pack(position._replace(updated_ms=position.updated_ms + 1))):
                return

    def get(self, topic: TopicMetadata, name: str) -> Position | None:
        """Return a consumer's position; None if this generation of the topic has no consumer of that name."""
        value = self._table.get(consumer_prefix(topic.topic, topic.generation) + name.encode("ascii"))
        return None if value is None else _position(name, value)

    def delete(self, topic: TopicMetadata, name: str) -> None:
        """Delete a consumer; do nothing if it does not exist."""
        self._table.delete([consumer_prefix(topic.topic, topic.generation) + name.encode("ascii")])

    def delete_previous(self, topic: TopicMetadata) -> None:
        """Delete the positions of a topic's old generations."""
        start, stop = consumer_prefix(topic.topic, 0), consumer_prefix(topic.topic, topic.generation)
        self._table.delete([key for key, _ in self._rows(start, stop)])

    def of(self, topic: TopicMetadata) -> list[Position]:
        """Return the positions of a topic's consumers, in the order of their names."""
        prefix = consumer_prefix(topic.topic, topic.generation)
        rows = self._rows(prefix, stop_key(prefix))
        return [_position(key[len(prefix) :].decode("ascii"), value) for key, value in rows]

    def all(self) -> dict[tuple[TopicId, int], list[Position]]:
        """Return the positions of all consumers by topic and generation, including old generations."""
        found: dict[tuple[TopicId, int], list[Position]] = {}
        for key, value in self._rows(_CONSUMER, stop_key(_CONSUMER)):
            prefix = topic_prefix(key[len(_CONSUMER) :])
            topic = None if prefix is None else TopicId.from_prefix(prefix)
            if topic is not None and prefix is not None:
                start = len(_CONSUMER) + len(prefix)
                plain = start + GENERATION_BYTES
                generation = int.from_bytes(key[start:plain], "big")
                found.setdefault((topic, generation), []).append(_position(key[plain:].decode("ascii"), value))
        return found

    def _rows(self, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return iterate_items(self._table.rows, start, stop)


class Floor:
    """The hold of messages that a consumer has not read (``server.consumers.floor``); threads may share it.

    Args:
        max_hold_seconds: the maximum hold of a message after its TTL.
    """

    def __init__(self, positions: Positions, store: Reads, max_hold_seconds: int) -> None:
        self.positions = positions
        self._store = store
        self._max_hold_ms = max_hold_seconds * 1000

    def cutoff(self, topic: TopicMetadata, due: Cutoff) -> Cutoff:
        """Return a topic's cutoff: :meth:`cutoff_for` its current consumers."""
        return self.cutoff_for(topic, due, self.positions.of(topic))

    def cutoff_for(self, topic: TopicMetadata, due: Cutoff, positions: Iterable[Position]) -> Cutoff:
        """Return the cutoff that keeps the oldest message that one of these consumers has not read.

        Args:
            due: the cutoff by TTL; an upper bound of the result.

        Raises:
            StoreError: the tables could not be read.
        """
        lowest = self.lowest(due)
        # A consumer that has read all expired messages does not lower the cutoff, and needs no read of the store.
        late = [position for position in positions if position.id.publish_ms < due.ms]
        start = min((unread_from(self._store, topic, position, lowest) for position in late), default=None)
        stop = time_prefix(topic.topic.prefix, topic.generation, due.ms)
        while start is not None and start < stop:
            key = self._store.message.first(start, stop)
            if key is None:
                return due
            message = MessageKey.parse(key)
            if message is not None:
                return Cutoff(message.publish_ms)
            start = key + b"\0"
        return due

    def lowest(self, due: Cutoff) -> Cutoff:
        """Return the lowest cutoff that consumers can cause: older messages exceed the maximum hold."""
        return Cutoff(max(0, due.ms - self._max_hold_ms))


def cutoff_at(topic: TopicMetadata, now_ms: int, floor: Floor | None, from_ms: int = 0, lifetime_ms: int = 0) -> Cutoff:
    """Return the cutoff of readers (rule L3).

    Args:
        floor: the hold of unread messages; None: messages are not held.
        from_ms: the publish time at which the reader starts. If it is after the cutoff by TTL, the hold makes no
            difference, and the positions are not read.
        lifetime_ms: how long after its start a transaction may write. With ``hold: transaction``, messages live longer
            by this time.
    """
    due = Cutoff.at(now_ms - (lifetime_ms if topic.holds_transactions else 0), topic.ttl_seconds)
    return floor.cutoff(topic, due) if floor is not None and due.expires(from_ms) else due


def unread_from(store: Reads, topic: TopicMetadata, position: Position, cutoff: Cutoff) -> bytes:
    """Return the first key at which an unread message of a consumer can be.

    If the position lies inside the stored payloads of a transaction, and payloads follow, this is the key of the row
    that refers to them.

    Raises:
        StoreError: the tables could not be read.
    """
    message = position.id
    key = MessageKey(topic.topic, topic.generation, message.publish_ms, message.sequence).pack()
    first_ms = max(cutoff.ms, position.since_ms)
    if message.publish_ms < first_ms or not _has_more(store, topic, key, message):
        key += b"\0"
    return max(key, time_prefix(topic.topic.prefix, topic.generation, first_ms))


def _has_more(store: Reads, topic: TopicMetadata, key: bytes, message: MessageId) -> bool:
    """Return whether the row of a stored payload refers to payloads after it."""
    if not message.in_payload_table:
        return False
    for _, (pointer, payload) in store.message.read(MESSAGES, key, key + b"\0", 1).items:
        if pointer is not None and payload is None:
            prefix = pointer_prefix(topic.topic.prefix, topic.generation, java_abs(pointer))
            start = prefix + message.pack()[MESSAGE_TAIL_BYTES:] + b"\0"
            return store.payload.first(start, stop_key(prefix)) is not None
    return False


def highest_id(side: SideTable, prefix: bytes) -> MessageId:
    """Return the highest id that a consumer has read; all zeros: no consumer has read a message.

    Positions in the future do not count: their consumers skip messages, they have not read them.

    Args:
        prefix: the row key prefix of a topic's generation.
    """
    start = _CONSUMER + prefix
    rows = iterate_items(side.rows, start, stop_key(start))
    found = (_position(key[len(start) :].decode("ascii"), value) for key, value in rows)
    return max((one.id for one in found if one.id.publish_ms <= one.updated_ms), default=MessageId(0, 0))


def consumer_prefix(topic: TopicId, generation: int) -> bytes:
    """Return the key prefix of the positions of a topic's consumers; the name follows."""
    return _CONSUMER + generation_prefix(topic.prefix, generation)


def _pack(position: Position) -> bytes:
    return _VALUE.pack(position.id.pack(), position.updated_ms, position.since_ms)


def _position(name: str, value: bytes) -> Position:
    try:
        packed, updated_ms, since_ms = _VALUE.unpack(value)
    except struct.error as error:
        raise FormatError(f"the position of consumer {name} has {len(value)} bytes, not {_VALUE.size}") from error
    return Position(name, MessageId.parse(packed), updated_ms, since_ms)
