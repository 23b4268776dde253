"""Named consumers: their stored positions and their lags.

A client may set any position, also an earlier one to read messages again. Counting a lag is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from tms_core.consumers import lag, retention
from tms_core.consumers.claim_rows import claims_of, drained_key, list_previous_claims
from tms_core.consumers.claims import ConsumerGroup, GroupClaim, rank, view_group
from tms_core.consumers.lag import Lag
from tms_core.consumers.positions import Position, Positions, consumer_prefix, cutoff_at
from tms_core.errors import BadRequest, ConsumerConflict, ConsumerNotFound, quoted
from tms_core.messaging.cached_rows import CountedNames
from tms_core.messaging.fetcher import ReadPath
from tms_core.messaging.ids import position
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import MessageId
from tms_core.tables.side import SideTable
from tms_core.topic import CONSUMER_NAME, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager

#: The maximum number of rows counted for one response, for all consumers of a topic; that takes about a second.
COUNTED_ROWS = 100_000
#: The number of locks; consumers are assigned to locks by hash.
_LOCKS = 64


class _Force(NamedTuple):
    """Whether to release open claims, and for which principal.

    Attributes:
        principal: the requesting principal; None: clients are not authenticated.
    """

    is_set: bool
    principal: str | None


class ConsumerRegistry:
    """The consumers of one store's topics; threads may share it.

    Args:
        allowance_ms: how far the clocks of clients may be ahead, in milliseconds.
        transactions: the manager in this process; None: another process manages transactions.

    Attributes:
        resets: the number of changes after which a consumer may have unread messages before its previous position.
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
        self.resets = 0

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
        """Set the position of a consumer, and register the consumer if it is new. Durable on return.

        This deletes the consumer's claims, and its row for a drained partition. Messages that were released because all
        other consumers had processed them (rule L7) are skipped.

        Args:
            message: the last message that the consumer has read; all zeros: no message.
            force: set the position although claims are open, after an invalidation of their transactions if this
                process manages transactions.
            only_new: fail if the consumer exists.
            principal: the requesting principal; transactions of other principals are not invalidated. None: clients
                are not authenticated.

        Raises:
            BadRequest: the name or the id is invalid, or the topic has too many consumers.
            ConsumerConflict: claims are open (with ``force``, of another principal), or with ``only_new`` the consumer
                exists.
            TopicNotFound, MetadataError: the topic does not exist, or its row is damaged.
            Unavailable: another server has changed the consumer; nothing was changed.
            StoreError: the store failed.
        """
        check_name(name)
        if message.publish_ms < 0 or message.payload_ms < 0:
            raise BadRequest(f"{message} is not a message id: a time is before 1970.", "Send an id from a poll.")
        metadata = self._topics.read(topic)
        with self.lock(ConsumerGroup.of(metadata, name)):
            previous = self._positions.get(metadata, name)
            if only_new and previous is not None:
                raise ConsumerConflict(
                    f"Consumer {name} of topic {topic} already exists.",
                    f"Use it, or change its position: tms consumer set {topic} {name} --since TIME",
                )
            if previous is None:
                hint = f"Delete unused consumers: tms consumer delete {topic} NAME"
                self._names.count_new(consumer_prefix(topic, metadata.generation), topic, "consumers", hint)
            self._put(metadata, name, message, previous, _Force(force, principal))

    def get(self, topic: TopicId, name: str) -> Position:
        """Return the position of a consumer, advanced by the adjoining done claims of its group.

        Raises:
            ConsumerNotFound: the topic has no consumer of that name.
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        metadata = self._topics.get(topic)
        return self._advance(metadata, self.find(metadata, name))

    def delete(self, topic: TopicId, name: str, *, force: bool = False, principal: str | None = None) -> None:
        """Delete a consumer and its claims, so that messages are no longer held for it.

        Raises:
            ConsumerConflict: claims are open (with ``force``, of another principal).
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`get`.
        """
        metadata = self._topics.get(topic)
        with self.lock(ConsumerGroup.of(metadata, name)), self._lock:
            self.find(metadata, name)
            claims = self._release_claims(metadata, name, _Force(force, principal))
            try:
                # Delete the position first: claims without a position are ignored, and the next registration of the
                # name deletes them.
                self._positions.delete(metadata, name)
                self._side.delete([*claims, drained_key(ConsumerGroup.of(metadata, name))])
            finally:
                self.resets += 1

    def invalidate(self) -> None:
        """Drop the cached counts of consumers, because another process may have written."""
        self._names.invalidate()

    def claims(self, topic: TopicId, name: str) -> list[GroupClaim]:
        """Return the claims of a consumer whose transactions are in progress, in the order of their messages.

        If another process manages transactions, return all stored claims.

        Raises:
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`get`.
        """
        metadata = self._topics.get(topic)
        self.find(metadata, name)
        return self._open_claims(metadata, name)

    def move(
        self,
        topic: TopicMetadata,
        previous: Position,
        position: Position,
        puts: Sequence[tuple[bytes, bytes]],
        deletes: Sequence[bytes],
    ) -> None:
        """Replace a position and its claims, see ``Positions.move``; the caller holds the consumer's :meth:`lock`.

        The lock of :meth:`put` is not necessary, because an advancing position never holds released messages.
        """
        self._positions.move(topic, previous, position, puts, deletes)

    def lock(self, group: ConsumerGroup) -> Lock:
        """Return the lock for reading and changing a consumer's position and claims."""
        return self._locks[hash(group) % _LOCKS]

    def lags(self, topic: TopicId) -> tuple[list[Lag], int]:
        """Return the lags of a topic's consumers in the order of their names, and the time of the count in ms.

        At most :data:`COUNTED_ROWS` rows are counted, first for the latest position.

        Raises:
            TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        metadata, now_ms = self._topics.get(topic), self._read_path.clock.now_ms()
        positions = [self._advance(metadata, position) for position in self._positions.of(metadata)]
        tables = lag.LagTables(self._read_path.store, self._read_path.expiries, self._read_path.floor)
        counting = lag.count(tables, metadata, positions, now_ms, COUNTED_ROWS)
        return lag.finish(counting), now_ms

    def find(self, topic: TopicMetadata, name: str) -> Position:
        """Return the stored position of a consumer.

        Raises:
            ConsumerNotFound, BadRequest, StoreError: as :meth:`get`.
        """
        check_name(name)
        found = self._positions.get(topic, name)
        if found is None:
            hint = (
                f"Create it at the newest message (--since 0: at the first message): "
                f"tms consumer set {topic.topic} {name} --since now"
            )
            raise ConsumerNotFound(f"Topic {topic.topic} has no consumer {name}.", hint)
        return found

    def _put(
        self, metadata: TopicMetadata, name: str, message: MessageId, previous: Position | None, force: _Force
    ) -> None:
        # One consumer at a time: otherwise a position could be written with a cutoff that another consumer's change of
        # position has passed in between.
        with self._lock:
            now_ms = self._read_path.clock.now_ms()
            claims = self._release_claims(metadata, name, force)
            if previous is None:
                self._positions.delete_previous(metadata)
                self._side.delete(list_previous_claims(self._side, metadata))
            start, deletes = None, claims
            is_set_back = previous is None or bool(claims) or rank(message) < rank(previous.id)
            if is_set_back:
                deletes = [*claims, drained_key(ConsumerGroup.of(metadata, name))]
            try:
                # Rule L7: read the announced limit again after the write. A limit announced before the write is seen
                # by that read; after a later announcement, the janitor reads this position before it deletes.
                while start != (start := retention.start_after(self._side, metadata, message)):
                    since = cutoff_at(
                        metadata, now_ms, self._read_path.floor, start.publish_ms, self._read_path.lifetime_ms
                    )
                    after = Position(name, start, self._update_ms(metadata, start, now_ms), since.ms)
                    self._positions.move(metadata, previous, after, deletes=deletes)
                    previous = after
            finally:
                self.resets += is_set_back

    def _update_ms(self, topic: TopicMetadata, message: MessageId, now_ms: int) -> int:
        """Return the update time of a position in milliseconds, and mark all ids up to the position as used.

        A position in the future, which makes a consumer skip messages until then, does not use up ids.
        """
        ids, at = self._read_path.open_topics.messages(topic).ids, position(message.publish_ms, message.sequence)
        if at >= max(ids.next_free, position(now_ms + self._allowance_ms)):
            return now_ms
        ids.skip(at + 1 if at else 0)
        return max(now_ms, message.publish_ms)

    def _advance(self, topic: TopicMetadata, position: Position) -> Position:
        """Return a position advanced by its adjoining done claims; the next poll of the group stores it."""
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(topic, position.name))]
        if not claims or self._transactions is None:
            return position
        reader = self._transactions.visibility().dummy_transaction()
        return position._replace(id=view_group(position.id, claims, reader).base)

    def _release_claims(self, topic: TopicMetadata, name: str, force: _Force) -> list[bytes]:
        """Invalidate the transactions of a consumer's open claims, and return the keys of all its claims.

        Raises:
            ConsumerConflict: claims are open, and may not be released.
        """
        pointers, manager = sorted({claim.pointer for claim in self._open_claims(topic, name)}), self._transactions
        if pointers and not force.is_set:
            raise ConsumerConflict(
                f"Consumer {name} has open claims in {len(pointers)} transactions, the first is {pointers[0]}.",
                f"Try again when they have ended, or release the claims: tms consumer release {topic.topic} {name}",
            )
        other = [one for one in pointers if manager is not None and not manager.belongs_to(one, force.principal)]
        if other:
            raise ConsumerConflict(
                f"Consumer {name} has open claims in {len(other)} transactions that belong to other principals, the "
                f"first is {other[0]}.",
                f"Try again when they have ended, or release the claims: tms consumer release {topic.topic} {name}",
            )
        for pointer in pointers:
            if manager is not None:
                manager.invalidate(pointer)
        return [key for key, _ in claims_of(self._side, ConsumerGroup.of(topic, name))]

    def _open_claims(self, topic: TopicMetadata, name: str) -> list[GroupClaim]:
        manager = self._transactions
        claims = [claim for _, claim in claims_of(self._side, ConsumerGroup.of(topic, name)) if claim.pointer]
        return [claim for claim in claims if manager is None or manager.status(claim.pointer) == "in progress"]


def check_name(name: str) -> None:
    """Check the name of a consumer.

    Raises:
        BadRequest: the name is invalid.
    """
    if not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{quoted(name)} cannot be a consumer.", "Use at most 255 letters, digits, '_' and '-'.")
