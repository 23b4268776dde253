"""Consumers by name: how far each has read, kept for them, and how far they are behind.

A consumer sets its position freely, so it may go back to read again. No messages are read here, and reading
a lag changes no position.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from tms_core.consumers import lag, retention
from tms_core.consumers.claim_rows import NOT_DRAINED, claims_of, drained_key, former_claims, pack_drained
from tms_core.consumers.claims import ConsumerGroup, GroupClaim, look, rank
from tms_core.consumers.lag import Lag
from tms_core.consumers.positions import Position, Positions, cutoff_at, names
from tms_core.errors import BadRequest, ConsumerConflict, ConsumerNotFound, quoted
from tms_core.messaging.fetcher import ReadPath
from tms_core.messaging.ids import position
from tms_core.messaging.remembered import CountedNames
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.messaging.topics.partitions import drained_by
from tms_core.rowkey import MessageId
from tms_core.tables.side import SideTable
from tms_core.topic import CONSUMER_NAME, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager

#: How many rows are counted for one answer, of all consumers of a topic together: about a second's work.
COUNTED_ROWS = 100_000
#: How many locks consumers share.
_LOCKS = 64


class _SideRows(NamedTuple):
    """Rows of the side table to write, and keys of others to delete."""

    puts: list[tuple[bytes, bytes]]
    deletes: list[bytes]


class _Force(NamedTuple):
    """Whether open claims are released, and for which principal.

    Attributes:
        principal: who wants it; None: the server does not ask who somebody is.
    """

    wanted: bool
    principal: str | None


class ConsumerRegistry:
    """The consumers of one store's topics; threads may share it.

    Args:
        allowance_ms: how far the clocks of clients may be ahead, in milliseconds.
        transactions: the manager in this process; None: transactions are managed elsewhere.

    Attributes:
        taken_back: counts how often it came about that a group may not have read what it had read before.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        read_path: ReadPath,
        side: SideTable,
        allowance_ms: int,
        transactions: TransactionManager | None,
    ) -> None:
        self._topics = topics
        self._read_path = read_path
        self._side = side
        self._positions = Positions(side)
        self._names = CountedNames(side)
        self._allowance_ms = allowance_ms
        self._transactions = transactions
        self._locks = [Lock() for _ in range(_LOCKS)]
        self._lock = Lock()
        self.taken_back = 0

    def put(
        self,
        topic: TopicId,
        name: str,
        message: MessageId,
        *,
        force: bool = False,
        only_new: bool = False,
        principal: str | None = None,
    ) -> None:
        """Store how far a consumer has read; the first time, it is registered. Durable on return.

        Claims that the consumer has are forgotten, and that it has read a sealed partition completely. Messages that
        were released because all others had processed them (rule L7) do not return: it starts behind that.

        Args:
            message: the last one it has read; all zeros for one that has read nothing yet.
            force: also where claims are open; their transactions are invalidated first, if they are managed here.
            only_new: only to register it.
            principal: the requesting principal; a transaction of another one is not invalidated. None: everybody is the
                same.

        Raises:
            BadRequest: that is no name, or no id of a message; or the topic has too many consumers.
            ConsumerConflict: claims are open, with ``force`` of another principal; or it is registered, and shall only
                be if it is not.
            TopicNotFound, MetadataError: there is no such topic, or its row is damaged.
            Unavailable: another server has changed it meanwhile; nothing was done.
            StoreError: the store failed.
        """
        check_name(name)
        if message.publish_ms < 0 or message.payload_ms < 0:
            raise BadRequest(f"{message} is no message id: its times lie before 1970.", "Send one that a poll gave.")
        metadata = self._topics.read(topic)
        with self.lock(ConsumerGroup.of(metadata, name)):
            former = self._positions.get(metadata, name)
            if only_new and former is not None:
                raise ConsumerConflict(f"Topic {topic} has a consumer {name} already.", "Use it as it is.")
            if former is None:
                hint = f"Delete those that are not needed any more: tms consumer delete {topic} NAME"
                self._names.make_room(names(topic, metadata.generation), topic, "consumers", hint)
            self._put(metadata, name, message, former, _Force(force, principal))

    def get(self, topic: TopicId, name: str) -> Position:
        """Return how far a consumer has read, what its group has done behind that included.

        Raises:
            ConsumerNotFound: there is none of that name.
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        metadata = self._topics.get(topic)
        return self._moved_on(metadata, self.found(metadata, name))

    def delete(self, topic: TopicId, name: str, *, force: bool = False, principal: str | None = None) -> None:
        """Forget a consumer and its claims; nothing is held for it any more.

        Raises:
            ConsumerConflict: claims are open, with ``force`` of another principal.
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`get`.
        """
        metadata = self._topics.get(topic)
        with self.lock(ConsumerGroup.of(metadata, name)), self._lock:
            self.found(metadata, name)
            claims = self._let_go(metadata, name, _Force(force, principal))
            puts, deletes = _undrained(metadata, name, claims)
            try:
                self._positions.delete(metadata, name)
                if puts:
                    self._side.put(puts)
                self._side.delete(deletes)
            finally:
                self.taken_back += 1

    def forget(self) -> None:
        """Forget how many there are, because another process may have written."""
        self._names.forget()

    def claims(self, topic: TopicId, name: str) -> list[GroupClaim]:
        """Return the claims of a consumer whose transactions are in progress, in the order of their messages.

        Where transactions are managed elsewhere: all that are not yet known to be done.

        Raises:
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`get`.
        """
        metadata = self._topics.get(topic)
        self.found(metadata, name)
        return self._open_claims(metadata, name)

    def move(
        self,
        topic: TopicMetadata,
        former: Position,
        position: Position,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
    ) -> None:
        """Write a position in the place of the one that was read, with the claims behind it: as ``Positions.move``.

        Its caller has the consumer's :meth:`lock`. A position that only advances holds no released messages.
        """
        self._positions.move(topic, former, position, puts, deletes)

    def lock(self, group: ConsumerGroup) -> Lock:
        """Return the lock for reading and changing a consumer's position and claims."""
        return self._locks[hash(group) % _LOCKS]

    def lags(self, topic: TopicId) -> tuple[list[Lag], int]:
        """Return how far each of a topic's consumers is behind, by their names, and the moment it is said of.

        No more than :data:`COUNTED_ROWS` are counted; those who are furthest come first.

        Raises:
            TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        metadata, now_ms = self._topics.get(topic), self._read_path.clock.now_ms()
        positions = [self._moved_on(metadata, position) for position in self._positions.of(metadata)]
        tables = lag.LagTables(self._read_path.store, self._read_path.expiries, self._read_path.floor)
        counting = lag.count(tables, metadata, positions, now_ms, COUNTED_ROWS)
        return lag.finish(counting), now_ms

    def found(self, topic: TopicMetadata, name: str) -> Position:
        """Return the position of a consumer of a topic as it is now.

        Raises:
            ConsumerNotFound, BadRequest, StoreError: as :meth:`get`.
        """
        check_name(name)
        found = self._positions.get(topic, name)
        if found is None:
            hint = f"Say where it begins (--since 0: with all): tms consumer set {topic.topic} {name} --since now"
            raise ConsumerNotFound(f"Topic {topic.topic} has no consumer {name}.", hint)
        return found

    def _put(
        self, metadata: TopicMetadata, name: str, message: MessageId, former: Position | None, force: _Force
    ) -> None:
        # One at a time, or a position could be written with a cut-off that another one has let go meanwhile.
        with self._lock:
            now_ms = self._read_path.clock.now_ms()
            claims = self._let_go(metadata, name, force)
            if former is None:
                self._positions.forget_former(metadata)
                self._side.delete(former_claims(self._side, metadata))
            begin, undrained = None, _SideRows([], claims)
            goes_back = former is None or bool(claims) or rank(message) < rank(former.id)
            if goes_back:
                undrained = _undrained(metadata, name, claims)
            try:
                # Looked at again behind the write: what is announced later, the janitor asks this consumer for first.
                while begin != (begin := retention.begin(self._side, metadata, message)):
                    since = cutoff_at(
                        metadata, now_ms, self._read_path.floor, begin.publish_ms, self._read_path.lifetime_ms
                    )
                    after = Position(name, begin, self._heard_ms(metadata, begin, now_ms), since.ms)
                    self._positions.move(metadata, former, after, *undrained)
                    former = after
            finally:
                self.taken_back += goes_back

    def _heard_ms(self, topic: TopicMetadata, message: MessageId, now_ms: int) -> int:
        """Return when a position is written; no id up to it is issued while its message may exist.

        A position may also be set into the future, so that a consumer skips messages until then.
        """
        ids, at = self._read_path.open_topics.messages(topic).ids, position(message.publish_ms, message.sequence)
        if at >= max(ids.free, position(now_ms + self._allowance_ms)):
            return now_ms
        ids.skip(at + 1 if at else 0)
        return max(now_ms, message.publish_ms)

    def _moved_on(self, topic: TopicMetadata, position: Position) -> Position:
        """Return a position with the claims behind it that are done by now; the next poll of the group writes them
        down.
        """
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(topic, position.name))]
        if not claims or self._transactions is None:
            return position
        reader = self._transactions.visibility().dummy_transaction()
        return position._replace(id=look(position.id, claims, reader).base)

    def _let_go(self, topic: TopicMetadata, name: str, force: _Force) -> list[bytes]:
        """Return the keys of a consumer's claims, none of which is open any more."""
        pointers, manager = sorted({claim.pointer for claim in self._open_claims(topic, name)}), self._transactions
        if pointers and not force.wanted:
            raise ConsumerConflict(
                f"Consumer {name} has claims open in {len(pointers)} transactions, {pointers[0]} the first of them.",
                f"Try again when they have ended, or release them: tms consumer release {topic.topic} {name}",
            )
        other = [one for one in pointers if manager is not None and not manager.belongs_to(one, force.principal)]
        if other:
            raise ConsumerConflict(
                f"Consumer {name} has claims open in {len(other)} transactions that belong to other principals, "
                f"{other[0]} the first of them.",
                f"Try again when they have ended, or end them: tms consumer release {topic.topic} {name}",
            )
        for pointer in pointers:
            if manager is not None:
                manager.invalidate(pointer)
        return [key for key, _ in claims_of(self._side, ConsumerGroup.of(topic, name))]

    def _open_claims(self, topic: TopicMetadata, name: str) -> list[GroupClaim]:
        manager = self._transactions
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(topic, name)) if claim.pointer]
        return [claim for claim in claims if manager is None or manager.status(claim.pointer) == "in progress"]


def _undrained(topic: TopicMetadata, name: str, claims: list[bytes]) -> _SideRows:
    """What is written and deleted where a group may not have read a sealed partition completely any more."""
    group = ConsumerGroup.of(topic, name)
    if drained_by(topic.properties, name) is None:
        return _SideRows([], [*claims, drained_key(group)])
    # What an older version has noted stays where it is, and a row goes before it.
    return _SideRows([pack_drained(group, NOT_DRAINED)], claims)


def check_name(name: str) -> None:
    """Check that a consumer can have this name.

    Raises:
        BadRequest: it is none.
    """
    if not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{quoted(name)} cannot be a consumer.", "Use at most 255 letters, digits, '_' and '-'.")
