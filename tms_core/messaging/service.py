"""The messaging service: topics, publishing and consuming over one store (``CoreMessagingService``).

Methods block and may be called by any number of threads; ``submit_publish`` and ``submit_store`` do not block, for
callers that run an event loop. One process at a time may publish to a store: ids and the cache rest on that. A process
that becomes the one calls :meth:`MessagingService.forget` first.
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
from tms_core.messaging.publish.rollback import earlier_generations, roll_back
from tms_core.messaging.publish.workers import Answer, PublishWorkers
from tms_core.messaging.publish.writers import Writers
from tms_core.messaging.topics.catalog import TopicRegistry, count_ages
from tms_core.rowkey import LONG_MAX, generation_prefix
from tms_core.tables.base import KEYS, Store
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import INT_MAX, TopicId, TopicMetadata
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: The highest sequence id.
_MAX_SEQUENCE = 2**16 - 1


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The figures of a messaging service.

    Attributes:
        default_ttl_seconds: the ttl of a topic that does not say.
        max_lifetime_seconds: how long after its start a transaction may write.
        grace_seconds: how long after that it stays listed as invalid at least.
        cache_bytes: how much of the newest rows is kept in memory; 0: nothing.
        consumer_hold_seconds: how long after its ttl a message lives that a consumer has not read; None: no longer.
        retry_seconds: how long a consumer group waits before a message that failed once comes again; 0: not at all.
        longest_retry_seconds: how long it waits at most, after several failures.
    """

    default_ttl_seconds: int = 604_800
    max_lifetime_seconds: int = 90_000
    grace_seconds: int = 86_400
    cache_bytes: int = 30 << 20
    consumer_hold_seconds: int | None = None
    retry_seconds: int = 0
    longest_retry_seconds: int = 60


class MessagingService:
    """Topics and their messages.

    Args:
        store: the tables; stays the caller's, who closes it afterwards.
        side: where messages with a ttl of their own are written down, producers, positions and claims.
        workers: have batches written; closed with the service. None: by threads of its own.
        transactions: the manager in this process, which says which pointers were issued and whether a transaction that
            claims is in progress; None: they are managed elsewhere, and the server trusts the client.
        fenced_side: ``side`` as the server that leads may use it; None: there is no other server.

    Attributes:
        consumers: by name, and how far they have read.
        producers: by name, of which the newest instance counts.
        groups: consumer groups, which claim their messages.
        expiries: messages with a ttl of their own, for the janitor to delete.
        first_reads: how long after they were published messages were first read.
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
        # With a longer ttl, rows would be shown from the cache that the janitor took while it was shorter.
        self._topics = TopicRegistry(
            store.metadata,
            options.default_ttl_seconds,
            lambda topic: self._open_topics.forget(lambda key: key.startswith(topic.prefix)),
        )
        self.side = side
        self.expiries = Expiries(side)
        self._clock = honest = HonestClock(clock)
        kept = fenced_side or side
        floor = None
        if options.consumer_hold_seconds is not None:
            floor = Floor(Positions(kept), store, options.consumer_hold_seconds)
        self.cache = MessageCache(options.cache_bytes)
        self._open_topics = OpenTopics(store, honest, self.cache, self.expiries, kept, CLOCK_ALLOWANCE_MS)
        self.workers = workers or PublishWorkers()
        lifetime_ms = options.max_lifetime_seconds * 1000
        requests = Requests(self._topics, kept, honest, lifetime_ms, transactions, partial(store.message.read, KEYS))
        self.producers = Producers(self._topics, kept, honest, transactions, requests, self._open_topics.hide_late)
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
        self._writers = Writers(context)
        cached_ms = min(options.max_lifetime_seconds, options.grace_seconds) * 1000 // 2
        self.first_reads = FirstReads()
        self._read_path = ReadPath(
            store, self._open_topics, self.cache, self.expiries, honest, cached_ms, self.first_reads, floor, lifetime_ms
        )
        self.consumers = ConsumerRegistry(self._topics, self._read_path, kept, CLOCK_ALLOWANCE_MS, transactions)
        # By the table itself: groups are registered and looked for also in partitions that other servers lead.
        self._families = Families(self._topics, store, self._open_topics, honest, side, self._writers.settle)
        backoff = Backoff(options.retry_seconds * 1000, options.longest_retry_seconds * 1000)
        self.groups = Groups(self._topics, self._families, self.consumers, kept, self._read_path, transactions, backoff)

    # -- topics -------------------------------------------------------------------------------------------------------

    def create_topic(
        self, topic: TopicId, properties: Mapping[str, str] | None = None, *, permit: Permit = permit_all
    ) -> None:
        """Make a topic; of one that was deleted before, the new properties count.

        Args:
            properties: what shall differ from the defaults; ``ttl`` in seconds.
            permit: is called with each topic that this makes, a partition or a route too, before the first is made.

        Raises:
            Forbidden: as ``permit`` does.
            BadRequest: the name, the ttl or a generation is none.
            MetadataError, StoreError, Unavailable: its row is damaged; the store failed; others keep changing it.
            TopicExists: there is one.
        """
        self._families.create(topic, properties or {}, permit)

    def update_topic(self, topic: TopicId, properties: Mapping[str, str], *, permit: Permit = permit_all) -> None:
        """Replace a topic's properties: the rest out is the default again.

        Args:
            permit: as :meth:`create_topic`.

        Raises:
            Forbidden: as ``permit`` does.
            TopicNotFound: there is none, or it was deleted.
            BadRequest, MetadataError, StoreError, Unavailable: as :meth:`create_topic`.
        """
        self._families.update(topic, properties, permit)

    def topic(self, topic: TopicId) -> dict[str, str]:
        """Return all properties of a topic, its generation among them.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`update_topic`.
        """
        return self._families.shown(topic)

    def has_topic(self, topic: TopicId) -> bool:
        """Return whether a topic exists and is not deleted; one with a damaged row exists.

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
        """Return how many messages live, and how many are older than so many seconds; at most 100,000 are counted.

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
        """Delete a topic; its messages are gone at once, their rows when the janitor comes.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError, Unavailable: as :meth:`update_topic`.
        """
        self._families.delete(topic)

    def note_past(self, past_ms: int) -> None:
        """As :meth:`tms_core.clock.HonestClock.note_past`."""
        self._clock.note_past(past_ms)

    def refusal(self) -> str:
        """Why nothing can be published now, because of the clock; empty when publishing works."""
        try:
            self._clock.publish_ms()
        except ClockJumped as error:
            return error.message
        return ""

    @property
    def topic_changes(self) -> int:
        """Return how many changes of topics this service has made or seen."""
        return self._topics.changes

    def is_newborn(self, topic: TopicMetadata) -> bool:
        """As :meth:`Families.is_newborn`."""
        return self._families.is_newborn(topic)

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
        """Publish, and return when it is durable: see :meth:`submit_publish`."""
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
    ) -> Answer[RollbackRange | None]:
        """Publish without waiting.

        Args:
            messages: the payloads; they get consecutive ids. None at all, in a transaction, publishes what the
                transaction has stored.
            pointer: the transaction's write pointer; None: outside of one.
            ttl_seconds: how long these live, where that is shorter than the topic's ttl.
            sent: the producer headers of the request; then it is done once, however often it is repeated.
            principal: the requesting principal; a transaction in progress belongs to its first user, and is over for
                others. None: everybody is the same.

        Returns:
            Done when the messages are durable: what to roll back, or None outside a transaction. Fails with
            ``TopicNotFound``, ``TransactionExpired``, ``ClockJumped``, ``MetadataError``, ``ProducerFenced`` (nothing
            was written), ``TransactionEnded`` (nothing that a reader in a transaction sees) or ``StoreError`` (what
            was written of a transaction is rolled back, if that can be done).

        Raises:
            BadRequest: neither message nor transaction, or a number that is none.
            Unavailable: the service is closed.
        """
        if not messages and pointer is None:
            raise BadRequest("A message outside a transaction has a payload.", "Send at least one.")
        _check_pointer(pointer)
        if ttl_seconds is not None and not 0 < ttl_seconds <= INT_MAX:
            raise BadRequest(f"A ttl of {ttl_seconds} s is not possible.", f"Give whole seconds from 1 to {INT_MAX}.")
        ttl_ms = None if ttl_seconds is None else ttl_seconds * 1000
        self._store.message.check_sizes(messages)
        return self._writers.message(topic).submit(PublishEntry(messages, pointer, ttl_ms, sent, principal))

    def store(self, topic: TopicId, messages: Sequence[bytes], *, pointer: int, sent: Sent | None = None) -> None:
        """Store payloads, and return when they are durable: see :meth:`submit_store`."""
        self.submit_store(topic, messages, pointer=pointer, sent=sent).result()

    def submit_store(
        self,
        topic: TopicId,
        messages: Sequence[bytes],
        *,
        pointer: int,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> Answer[RollbackRange | None]:
        """Put payloads into the payload table, without waiting; an empty publish in the transaction publishes them.

        Args:
            pointer: the transaction's write pointer.
            principal: as of :meth:`submit_publish`.

        Returns:
            Done when they are durable; fails as :meth:`submit_publish` does.

        Raises:
            BadRequest: no message, or a pointer that is none.
            Unavailable: the service is closed.
        """
        if not messages:
            raise BadRequest("There is nothing to store.", "Send at least one payload.")
        _check_pointer(pointer)
        self._store.payload.check_sizes(messages)
        return self._writers.payload(topic).submit(PublishEntry(messages, pointer, None, sent, principal))

    def note_begun(self, sent: Sent, pointer: int, principal: str | None = None) -> None:
        """Write down a producer's transaction in which it sends nothing: see :meth:`Producers.note_begun`.

        Raises:
            BadRequest: a pointer that is none.
        """
        _check_pointer(pointer)
        self.producers.note_begun(sent, pointer, principal)

    def rollback(
        self,
        topic: TopicId,
        published: RollbackRange | int,
        *,
        sent: Sent | None = None,
        principal: str | None = None,
    ) -> None:
        """Roll back a publish: readers in transactions do not see it any more.

        Only rows that carry the publish's own pointer are changed, whatever else lies in the range; those of earlier
        generations too, in which the topic may have been when they were published. CDAP leaves them: they are not read
        until they are restored from an archive.

        Args:
            published: what publishing answered; or a write pointer, to roll back all of its rows. Checkpoints have
                pointers of their own.
            sent: the producer headers of the request; at its home the transaction is marked as rolled back first, so
                that whatever comes late is refused.
            principal: as of :meth:`submit_publish`.

        Raises:
            TransactionEnded: it was committed, or is over otherwise and is not invalid. Nothing is rolled back.
            TopicNotFound, MetadataError: there is no such topic, or its row is damaged.
            StoreError: the store failed; some rows may be rolled back. The transaction must be invalidated.
            BadRequest: that is no range of rows.
        """
        if isinstance(published, int):
            _check_pointer(published)
            # No row of a transaction is older than it is, but for what clocks of several machines differ.
            first_ms = max(0, transaction_ms(published) - CLOCK_ALLOWANCE_MS)
            published = RollbackRange(published, first_ms, 0, LONG_MAX, _MAX_SEQUENCE)
        pointer, start_ms, start_sequence, end_ms, end_sequence = published
        _check_pointer(pointer)
        if not (0 <= start_ms <= LONG_MAX and 0 <= end_ms <= LONG_MAX):
            raise BadRequest("A rollback's times lie between 0 and 2^63-1.", "Send back what publishing answered.")
        if not (0 <= start_sequence <= _MAX_SEQUENCE and 0 <= end_sequence <= _MAX_SEQUENCE):
            raise BadRequest(
                "A rollback's sequence ids lie between 0 and 65535.", "Send back what publishing answered."
            )
        signed = sent if sent is not None and sent.home == topic else None
        if signed is not None:
            # That is final, whatever became of the transaction.
            self.producers.require_newest(signed)
        # First, so that a commit comes before it and is seen here, or is refused.
        with nullcontext() if self._transactions is None else self._transactions.rolling_back(pointer):
            self._require_open(pointer, principal)
            if signed is not None:
                self.producers.roll_back(signed, pointer)
            metadata = self._topics.get(topic)
            prefix = generation_prefix(topic.prefix, metadata.generation)
            first, last = position(start_ms, start_sequence), position(end_ms, end_sequence)
            try:
                done = roll_back(self._store.message, prefix, first, last, pointer)
                for earlier in earlier_generations(self._store.message, metadata):
                    done += roll_back(self._store.message, earlier, first, last, pointer)
            finally:
                self.cache.roll_back(prefix, first, last, pointer)
            if self._transactions is not None:
                self._transactions.note_taken_back(pointer, str(topic), done)

    # -- consuming ----------------------------------------------------------------------------------------------------

    def fetch(self, topic: TopicId, request: FetchRequest) -> Iterator[MessageList]:
        """Read messages in order.

        Returns:
            Pages, none of them empty. Each is read on demand, with nothing open in between, up to the rows that were
            durable at the call. Reading one raises ``StoreError`` when the store fails.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: before the first page.
        """
        return filter(None, self.begin_fetch(topic, request).pages())

    def begin_fetch(self, topic: TopicId, request: FetchRequest) -> Fetch:
        """Like :meth:`fetch`, for callers that want to know how far it has read, or to wait for more.

        Raises:
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`fetch`.
        """
        return Fetch(self._read_path, self._topics.read(topic), request)

    # -- the service itself -------------------------------------------------------------------------------------------

    def forget(self, topic: TopicId | None = None) -> None:
        """Forget the data read of the store, because another process may have written to it.

        Args:
            topic: which topic; None: all.
        """
        self.start_over(lambda key: topic is None or key.startswith(topic.prefix))

    def start_over(self, concerns: Callable[[bytes], bool]) -> bool:
        """Forget the data read of some topics, because another process may have written to them until now.

        Args:
            concerns: tells of a key that starts with a topic's name whether it is one of them.

        Returns:
            False when something that was accepted before is still to be written: it has ids of that time.
        """
        self._open_topics.forget(concerns)
        self.groups.forget(concerns)
        self.consumers.forget()
        self.producers.forget()
        return not self._writers.are_busy(concerns)

    def close(self) -> None:
        """Accept no more, and return when all that was accepted is answered; closing twice is no error."""
        self.workers.close()
        self._writers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self, pointer: int, principal: str | None) -> None:
        """Refuse to take back what counts: committed rows and rows of other principals stay."""
        manager = self._transactions
        if manager is None:
            return
        if manager.status(pointer) == "ended" or not manager.belongs_to(pointer, principal):
            raise TransactionEnded(
                f"Transaction {pointer} is neither in progress nor invalid, so nothing of it is rolled back.",
                "What it wrote is committed, or was rolled back before.",
            )


def _check_pointer(pointer: int | None) -> None:
    if pointer is not None and not 0 < pointer <= LONG_MAX:
        raise BadRequest(f"{pointer} is no write pointer.", "Send the one the transaction has.")
