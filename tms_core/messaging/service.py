"""The messaging service: topics, publishing and consuming on one store (``CoreMessagingService``).

All methods are thread-safe. They block, except ``submit_publish`` and ``submit_store``, which are for event loops. Only
one process at a time may publish to a store, because it assigns ids and caches rows. A process that becomes the
publisher calls :meth:`MessagingService.invalidate` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self

from tms_core.clock import CLOCK_ALLOWANCE_MS, Clock, HonestClock
from tms_core.consumers.claims import Backoff
from tms_core.consumers.positions import Floor, Positions
from tms_core.errors import BadRequest, ClockJumped, MetadataError, TopicNotFound, TransactionEnded
from tms_core.messaging.cache import MessageCache
from tms_core.messaging.families import Families, Permit, permit_all
from tms_core.messaging.fetcher import Fetch, ReadPath
from tms_core.messaging.groups.claims import Groups
from tms_core.messaging.groups.positions import ConsumerRegistry
from tms_core.messaging.ids import position
from tms_core.messaging.model import Ages, FetchRequest, MessageList, RollbackRange
from tms_core.messaging.producers.announcements import Announcements
from tms_core.messaging.producers.registrations import Producers
from tms_core.messaging.producers.requests import Requests, Sent
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.messaging.publish.open_topics import FirstReads, OpenTopics
from tms_core.messaging.publish.queue import Queues
from tms_core.messaging.publish.rollback import earlier_generations, roll_back
from tms_core.messaging.publish.workers import PublishFuture, PublishWorkers
from tms_core.messaging.topics.catalog import TopicRegistry, count_ages
from tms_core.rowkey import LONG_MAX
from tms_core.tables.base import KEYS, Store
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import INT_MAX, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: The highest sequence id.
_MAX_SEQUENCE = 2**16 - 1


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of a messaging service.

    Attributes:
        default_ttl_seconds: the TTL of a topic without the property ``ttl``.
        max_lifetime_seconds: how long after its start a transaction may write.
        grace_seconds: how long after its lifetime an invalid transaction stays at least on the invalid list.
        cache_bytes: the size of the cache of the newest rows; 0: no cache.
        consumer_hold_seconds: the maximum hold of an unread message after its TTL; None: messages are not held.
        retry_seconds: the delay before the next delivery of a message that failed once; 0: no delay.
        longest_retry_seconds: the maximum delay after several failures.
    """

    default_ttl_seconds: int = 604_800
    max_lifetime_seconds: int = 90_000
    grace_seconds: int = 86_400
    cache_bytes: int = 30 << 20
    consumer_hold_seconds: int | None = None
    retry_seconds: int = 0
    longest_retry_seconds: int = 60


class MessagingService:
    """The topics of a store and their messages.

    Args:
        store: the tables; the caller closes them afterwards.
        side: the side table: TTLs of single messages, producers, positions and claims.
        workers: the threads that write batches; the service closes them. None: start threads.
        transactions: the transaction manager in this process; None: another process manages transactions, and this
            server trusts its clients about them.
        fenced_side: ``side`` with the leader's fence; None: no other server writes.

    Attributes:
        consumers: the named consumers and their positions.
        producers: the named producers and their newest instances.
        groups: the consumer groups and their claims.
        expiries: the TTLs of single messages, which the janitor reads.
        first_reads: the delays until messages were first read.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        options: ServiceOptions | None = None,
        *,
        side: SideTable,
        workers: PublishWorkers | None = None,
        transactions: TransactionManager | None = None,
        fenced_side: SideTable | None = None,
    ) -> None:
        options = options or ServiceOptions()
        self._transactions = transactions
        self._store = store
        # If another process increased the TTL, the cache would show rows that the janitor has deleted before.
        self._topics = TopicRegistry(
            store.metadata,
            options.default_ttl_seconds,
            lambda topic: self._open_topics.invalidate(lambda key: key.startswith(topic.prefix)),
        )
        self.side = side
        self.expiries = Expiries(side)
        self._clock = honest = HonestClock(clock)
        table = fenced_side or side
        floor = None
        if options.consumer_hold_seconds is not None:
            floor = Floor(Positions(table), store, options.consumer_hold_seconds)
        self.cache = MessageCache(options.cache_bytes)
        self._open_topics = OpenTopics(store, honest, self.cache, self.expiries, table, CLOCK_ALLOWANCE_MS)
        self.workers = workers or PublishWorkers()
        lifetime_ms = options.max_lifetime_seconds * 1000
        requests = Requests(self._topics, table, honest, lifetime_ms, transactions, partial(store.message.read, KEYS))
        self.producers = Producers(self._topics, table, honest, transactions, requests, self._open_topics.hide_late)
        context = WriterContext(
            self._topics,
            store,
            self._open_topics,
            self.cache,
            self.expiries,
            honest,
            lifetime_ms,
            self.workers,
            requests,
            Announcements(requests),
            transactions,
        )
        self._queues = Queues(context)
        cached_ms = min(options.max_lifetime_seconds, options.grace_seconds) * 1000 // 2
        self.first_reads = FirstReads()
        self._read_path = ReadPath(
            store, self._open_topics, self.cache, self.expiries, honest, cached_ms, self.first_reads, floor, lifetime_ms
        )
        self.consumers = ConsumerRegistry(self._topics, self._read_path, table, CLOCK_ALLOWANCE_MS, transactions)
        # Without the fence, because groups are also registered in partitions that other servers lead.
        self._families = Families(self._topics, store, self._open_topics, honest, side, self._queues.wait_for_writes)
        backoff = Backoff(options.retry_seconds * 1000, options.longest_retry_seconds * 1000)
        self.groups = Groups(
            self._topics, self._families, self.consumers, table, self._read_path, transactions, backoff
        )

    # -- topics -------------------------------------------------------------------------------------------------------

    def create_topic(
        self, topic: TopicId, properties: Mapping[str, str] | None = None, *, permit: Permit = permit_all
    ) -> None:
        """Create a topic; properties of a deleted topic of the same name are discarded.

        Args:
            properties: properties that differ from the defaults; ``ttl`` in seconds.
            permit: called with each new topic, including partitions and routes, before the first topic is created.

        Raises:
            Forbidden: raised by ``permit``.
            BadRequest: the name, the TTL or a generation is invalid.
            MetadataError, StoreError, Unavailable: the topic's row is damaged, the store failed, or other processes
                keep changing the topic.
            TopicExists: the topic exists.
        """
        self._families.create(topic, properties or {}, permit)

    def update_topic(self, topic: TopicId, properties: Mapping[str, str], *, permit: Permit = permit_all) -> None:
        """Replace a topic's properties; an omitted property returns to its default.

        Args:
            permit: as :meth:`create_topic`.

        Raises:
            Forbidden: raised by ``permit``.
            TopicNotFound: the topic does not exist, or was deleted.
            BadRequest, MetadataError, StoreError, Unavailable: as :meth:`create_topic`.
        """
        self._families.update(topic, properties, permit)

    def topic(self, topic: TopicId) -> dict[str, str]:
        """Return all properties of a topic, including its generation.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`update_topic`.
        """
        return self._families.properties_of(topic)

    def has_topic(self, topic: TopicId) -> bool:
        """Return whether a topic exists and is not deleted; a topic with a damaged row exists.

        Raises:
            StoreError: the store failed.
        """
        try:
            self._topics.get(topic)
        except TopicNotFound:
            return False
        except MetadataError:
            return True
        return True

    def count_ages(self, topic: TopicId, older_than_seconds: int) -> Ages:
        """Count the unexpired messages of a topic, and the messages above an age; count at most 100,000.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`update_topic`.
        """
        return count_ages(self._store.message, self._topics.get(topic), older_than_seconds, self._clock.now_ms())

    def topics(self, namespace: str) -> list[str]:
        """Return the names of a namespace's topics, in key order.

        Raises:
            StoreError: the store failed.
        """
        return [topic.topic for topic in self._topics.all(namespace)]

    def all_topics(self) -> list[TopicId]:
        """Return the topics of all namespaces, in key order.

        Raises:
            StoreError: the store failed.
        """
        return self._topics.all()

    def delete_topic(self, topic: TopicId) -> None:
        """Delete a topic; its messages become invisible at once, and the janitor deletes their rows.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`update_topic`.
        """
        self._families.delete(topic)

    def note_past(self, past_ms: int) -> None:
        """Report a time that is certainly in the past, see :meth:`tms_core.clock.HonestClock.note_past`."""
        self._clock.note_past(past_ms)

    def refusal(self) -> str:
        """Return the reason why the clock prevents publishing; empty: publishing is possible."""
        try:
            self._clock.publish_ms()
        except ClockJumped as error:
            return error.message
        return ""

    @property
    def topic_changes(self) -> int:
        """Return the number of changes of topics that this service has made or observed."""
        return self._topics.changes

    def was_created_empty(self, topic: TopicMetadata) -> bool:
        """Return whether this process created the topic without rows, as :meth:`Families.was_created_empty`."""
        return self._families.was_created_empty(topic)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: TopicId,
        messages: Sequence[bytes],
        *,
        pointer: int | None = None,
        ttl_seconds: int | None = None,
        sent: Sent | None = None,
    ) -> RollbackRange | None:
        """Publish messages, and wait until they are durable: see :meth:`submit_publish`."""
        return self.submit_publish(topic, messages, pointer=pointer, ttl_seconds=ttl_seconds, sent=sent).result()

    def submit_publish(
        self,
        topic: TopicId,
        messages: Sequence[bytes],
        *,
        pointer: int | None = None,
        ttl_seconds: int | None = None,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> PublishFuture[RollbackRange | None]:
        """Publish messages without waiting.

        Args:
            messages: the payloads; they get consecutive ids. An empty list, in a transaction, publishes its stored
                payloads.
            pointer: the transaction's write pointer; None: outside transactions.
            ttl_seconds: the TTL of these messages, if it is shorter than the topic's TTL.
            sent: the producer headers of the request, which make repetitions of it idempotent.
            principal: the requesting principal. A transaction in progress belongs to its first user, and counts as
                ended for other principals. None: clients are not authenticated.

        Returns:
            A future that is done when the messages are durable. Its result is the range to roll back, or None outside
            transactions. It fails with ``TopicNotFound``, ``TransactionExpired``, ``ClockJumped``, ``MetadataError``,
            ``ProducerFenced``, or ``BadRequest`` if no higher id exists (nothing written), with ``TransactionEnded``
            (readers in transactions see no message of the request), or with ``StoreError`` (messages of a transaction
            are rolled back if possible).

        Raises:
            BadRequest: the request has neither messages nor a transaction, or a number is invalid.
            Unavailable: the service is closed.
        """
        if not messages and pointer is None:
            raise BadRequest("A message outside a transaction needs a payload.", "Send at least one payload.")
        if pointer is not None:
            _check_pointer(pointer)
        if ttl_seconds is not None and not 0 < ttl_seconds <= INT_MAX:
            raise BadRequest(f"A ttl of {ttl_seconds} s is not possible.", f"Use whole seconds from 1 to {INT_MAX}.")
        ttl_ms = None if ttl_seconds is None else ttl_seconds * 1000
        self._store.message.check_sizes(messages)
        return self._queues.message(topic).submit(PublishEntry(messages, pointer, ttl_ms, sent, principal))

    def store(self, topic: TopicId, messages: Sequence[bytes], *, pointer: int, sent: Sent | None = None) -> None:
        """Store payloads, and wait until they are durable: see :meth:`submit_store`."""
        self.submit_store(topic, messages, pointer=pointer, sent=sent).result()

    def submit_store(
        self,
        topic: TopicId,
        messages: Sequence[bytes],
        *,
        pointer: int,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> PublishFuture[RollbackRange | None]:
        """Write payloads to the payload table without waiting; an empty publish in the transaction publishes them.

        Args:
            pointer: the transaction's write pointer.
            principal: as of :meth:`submit_publish`.

        Returns:
            A future that is done when the payloads are durable, and fails as the future of :meth:`submit_publish`.

        Raises:
            BadRequest: the request has no payload, or the pointer is invalid.
            Unavailable: the service is closed.
        """
        if not messages:
            raise BadRequest("The request has no payload to store.", "Send at least one payload.")
        _check_pointer(pointer)
        self._store.payload.check_sizes(messages)
        return self._queues.payload(topic).submit(PublishEntry(messages, pointer, None, sent, principal))

    def store_transaction(self, sent: Sent, pointer: int, principal: str | None = None) -> None:
        """Store a producer's transaction without messages: see :meth:`Producers.store_transaction`.

        Raises:
            BadRequest: the pointer is invalid.
        """
        _check_pointer(pointer)
        self.producers.store_transaction(sent, pointer, principal)

    def rollback(
        self,
        topic: TopicId,
        published: RollbackRange | int,
        *,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> None:
        """Roll back a publish, so that readers in transactions do not see its messages.

        This changes only rows with the pointer of the publish, also in old generations, because the topic may have been
        created again since the publish. CDAP does not change rows of old generations, which readers see only after a
        restore from an archive.

        Args:
            published: the result of the publish; or a write pointer, to roll back all of its rows. Each checkpoint has
                a separate pointer.
            sent: the producer headers of the request. At the producer's home, the transaction is first marked as rolled
                back, so that late requests are rejected.
            principal: as of :meth:`submit_publish`.

        Raises:
            TransactionEnded: the transaction is committed, or was rolled back before.
            TopicNotFound, MetadataError: the topic does not exist, or its row is damaged.
            StoreError: the store failed; some rows may be rolled back. Invalidate the transaction.
            BadRequest: the range or the pointer is invalid.
        """
        pointer, start_ms, start_sequence, end_ms, end_sequence = _rollback_range(published)
        signed = sent if sent is not None and sent.home == topic else None
        if signed is not None:
            # Check the producer first, because ProducerFenced is final, and the transaction's state is not.
            self.producers.require_newest(signed)
        # Announce the rollback before the check: a commit either precedes the announcement, and the check sees it, or
        # the manager rejects it. Otherwise a commit between check and rollback would lose committed messages.
        with nullcontext() if self._transactions is None else self._transactions.rolling_back(pointer):
            self._require_open(pointer, principal)
            if signed is not None:
                self.producers.roll_back(signed, pointer)
            metadata = self._topics.get(topic)
            prefix = metadata.rows_prefix
            first, last = position(start_ms, start_sequence), position(end_ms, end_sequence)
            try:
                done = roll_back(self._store.message, prefix, first, last, pointer)
                for earlier in earlier_generations(self._store.message, metadata):
                    done += roll_back(self._store.message, earlier, first, last, pointer)
            finally:
                self.cache.roll_back(prefix, first, last, pointer)
            if self._transactions is not None:
                self._transactions.note_rolled_back(pointer, str(topic), done)

    # -- consuming ----------------------------------------------------------------------------------------------------

    def fetch(self, topic: TopicId, request: FetchRequest) -> Iterator[MessageList]:
        """Read messages in order.

        Returns:
            Non-empty pages of the messages that were durable at the call. Each page is read on demand, and raises
            ``StoreError`` if the store fails; no resources are held between pages.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: before the first page.
        """
        return filter(None, self.begin_fetch(topic, request).pages())

    def begin_fetch(self, topic: TopicId, request: FetchRequest) -> Fetch:
        """Return a fetch, for callers that need its position or wait for messages.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`fetch`.
        """
        return Fetch(self._read_path, self._topics.read(topic), request)

    # -- the service itself -------------------------------------------------------------------------------------------

    def invalidate(self, topic: TopicId | None = None) -> None:
        """Drop cached data, because another process may have written to the store.

        Args:
            topic: the topic; None: all topics.
        """
        self.invalidate_topics(lambda key: topic is None or key.startswith(topic.prefix))

    def invalidate_topics(self, concerns: Callable[[bytes], bool]) -> bool:
        """Drop cached data of some topics, because another process may have written to them until now.

        Args:
            concerns: selects topics by their key prefix.

        Returns:
            False if accepted requests are still queued, which would use outdated ids.
        """
        self._open_topics.invalidate(concerns)
        self.groups.invalidate()
        self.consumers.invalidate()
        self.producers.invalidate()
        return not self._queues.are_busy(concerns)

    def close(self) -> None:
        """Reject further requests, and wait for all outcomes; a second call does nothing."""
        self.workers.close()
        self._queues.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self, pointer: int, principal: str | None) -> None:
        """Check that a transaction may be rolled back: it is in progress or invalid, and belongs to the principal.

        Raises:
            TransactionEnded: the transaction was committed or aborted, or belongs to another principal.
        """
        manager = self._transactions
        if manager is None:
            return
        if manager.status(pointer) == "ended" or not manager.belongs_to(pointer, principal):
            raise TransactionEnded(
                f"Transaction {pointer} is neither in progress nor invalid, so nothing was rolled back.",
                "Its writes are committed, or were rolled back before.",
            )


def _rollback_range(published: RollbackRange | int) -> RollbackRange:
    """Return the range of a rollback; of a write pointer, the range of all its rows.

    Raises:
        BadRequest: a number is outside of its range.
    """
    pointer = published if isinstance(published, int) else published.pointer
    _check_pointer(pointer)
    if isinstance(published, int):
        # A transaction has no row before its start, apart from clock differences between machines.
        first_ms = max(0, transaction_ms(pointer) - CLOCK_ALLOWANCE_MS)
        return RollbackRange(pointer, first_ms, 0, LONG_MAX, _MAX_SEQUENCE)
    _, start_ms, start_sequence, end_ms, end_sequence = published
    if not (0 <= start_ms <= LONG_MAX and 0 <= end_ms <= LONG_MAX):
        raise BadRequest(
            f"The times {start_ms} and {end_ms} of the rollback are not both from 0 to 2^63-1.",
            "Send the rollback range from the response to publish.",
        )
    if not (0 <= start_sequence <= _MAX_SEQUENCE and 0 <= end_sequence <= _MAX_SEQUENCE):
        raise BadRequest(
            f"The sequence ids {start_sequence} and {end_sequence} of the rollback are not both from 0 to 65535.",
            "Send the rollback range from the response to publish.",
        )
    return published


def _check_pointer(pointer: int) -> None:
    if not 0 < pointer <= LONG_MAX:
        raise BadRequest(f"{pointer} is not a write pointer.", "Send the write pointer of the transaction.")
