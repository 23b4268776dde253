"""The open topics of a server: the next id of each topic, and the delay until messages are first read.

An open topic belongs to one generation. The first batch or fetch opens it from the rows of the store. Its next id is
after the last stored row, after all announced rows (of producers, and of messages with a TTL), and after all positions
that consumers have read. From then on this process assigns all ids, so it knows the last id without a read of the
store. Therefore only one process may publish.

The delay between the publish and the first read of a message is the latency of a consumer that keeps up. Only messages
published since the topic was opened count, because older messages may have been read before. Of each page with unread
messages, only the oldest unread message is measured. That costs a few microseconds a page, and nothing for pages that
were read before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

from tms_core.clock import HonestClock
from tms_core.consumers.claim_rows import first_unread
from tms_core.consumers.retention import announced, announced_in
from tms_core.logs.loggers import get_logger, harmless
from tms_core.logs.printable import duration
from tms_core.messaging.cache import MessageCache
from tms_core.messaging.ids import SEQUENCE_BITS, Ids, first_free, milliseconds, position, tail
from tms_core.messaging.model import MessageList
from tms_core.messaging.producers.announcements import AnnouncedAhead
from tms_core.messaging.producers.rows import ProducerName, first_unannounced, topics_requested
from tms_core.rowkey import MESSAGE_TAIL_BYTES, generation_prefix, pointer_prefix, stop_key
from tms_core.tables.base import KEYS, MESSAGES, Store, every
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS, transaction_ms

logger = get_logger(__name__)

#: The most transactions of a topic whose last stored payload is remembered; the store has the others.
_KNOWN_POINTERS = 10_000
#: The size of a page in the search for a reference: rows, and bytes of values.
_PAGE_ROWS, _PAGE_BYTES = 1000, 1 << 20
#: The kind of a row of the side table, where any kind gives the same leader.
_ANY_KIND = b"q"
#: The upper bounds of the buckets of delays, in milliseconds.
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


@dataclass(slots=True)
class OpenTopic:
    """The messages of one generation of a topic.

    Attributes:
        prefix: the start of their keys.
        ids: the assigned and the free ids.
        mortal: whether some messages may have a TTL of their own.
        row_bytes: the average size of a row, by the last page that was read.
        unread: the first position after all messages that existed at the opening, or were read since.
        largest_bytes: the largest payload that was read.
        wakes: called by any thread when messages have arrived, so they must not wait.
        ahead: announcements that cover the next requests of producers.
        warned: whether the log says that its messages are dated ahead of the clock.
    """

    prefix: bytes
    ids: Ids
    mortal: bool = False
    row_bytes: int = 512
    unread: int = 0
    largest_bytes: int = 0
    wakes: dict[Callable[[], None], None] = field(default_factory=dict)
    ahead: AnnouncedAhead = field(default_factory=AnnouncedAhead)
    warned: bool = False

    def tell(self) -> None:
        """Wake the polls that wait for messages of this topic."""
        for wake in list(self.wakes):
            harmless(wake)


@dataclass(slots=True)
class _Place:
    """A slot of an open topic, which is opened again after each invalidation."""

    lock: Lock = field(default_factory=Lock)
    open_topic: OpenTopic | None = None
    version: int = 1
    open_version: int = 0


@dataclass(slots=True)
class _Stored:
    """The stored payloads of one generation of a topic.

    Attributes:
        pointers: the transactions whose rows ``ids`` has skipped already.
        hidden: by transaction, whether it has payloads without a message that refers to them.
    """

    ids: Ids = field(default_factory=lambda: Ids(0))
    pointers: dict[int, None] = field(default_factory=dict)
    hidden: dict[int, bool] = field(default_factory=dict)


class OpenTopics:
    """The open topics of a store; threads may share it.

    Args:
        side: the side table with the positions of consumers and the requests of producers.
        allowance_ms: the largest difference of clocks of several machines, in milliseconds.

    Attributes:
        allowance_ms: as given.
    """

    def __init__(
        self,
        store: Store,
        clock: HonestClock,
        cache: MessageCache,
        expiries: Expiries,
        side: SideTable,
        allowance_ms: int,
    ) -> None:
        self._side = side
        self._store = store
        self._clock = clock
        self._cache = cache
        self._expiries = expiries
        self._places: dict[bytes, _Place] = {}
        self._stored: dict[bytes, _Stored] = {}
        self.allowance_ms = allowance_ms
        # Up to this transaction, other processes may have stored payloads, or its entry was forgotten. None: set it to
        # the newest possible transaction at the next use.
        self._unknown: int | None = None
        # Homes of producers without late rows, since the last invalidation.
        self._without_late: set[bytes] = set()
        self._forgotten = 0
        self._lock = Lock()

    def messages(self, topic: TopicMetadata) -> OpenTopic:
        """Return the open topic of a topic's messages.

        Raises:
            StoreError: it could not be opened.
        """
        prefix = topic.rows_prefix
        place = self._places.get(prefix)
        if place is None:
            with self._lock:
                place = self._places.setdefault(prefix, _Place())
        if place.open_version < place.version:
            with place.lock:
                if place.open_version < place.version:
                    # Read before opening: an invalidation during the opening makes the next caller open it again.
                    version = place.version
                    place.open_topic = self._open(prefix, place.open_topic or OpenTopic(prefix, Ids(0)))
                    place.open_version = version
        return place.open_topic  # type: ignore[return-value]  # opened above

    def next_position(self, open_topic: OpenTopic, topic: TopicMetadata, now_ms: int) -> int:
        """Return the position to write at; log once if it is ahead of the clock by more than the allowance."""
        first = open_topic.ids.first(now_ms)
        ahead_ms = (first >> SEQUENCE_BITS) - now_ms
        if ahead_ms > self.allowance_ms and not open_topic.warned:
            open_topic.warned = True
            logger.warning(
                "messages of %s are dated %s ahead of the clock, as one before them is, and outlive their ttl by that "
                "time. If the clock is behind, set it right; else read what is there, then: tms topic delete %s; then: "
                "tms topic create %s",
                topic.topic,
                duration(ahead_ms, rough=True),
                topic.topic,
                topic.topic,
            )
        return first

    def first_kept(self, topic: TopicMetadata) -> int:
        """Return the first position that retention ``consumed`` has not released for deletion; 0 with other retention.

        Raises:
            StoreError: the side table could not be read.
        """
        return announced(self._side, topic) if topic.consumed else 0

    def payloads(self, topic: TopicMetadata, pointer: int) -> Ids:
        """Return the ids of a topic's stored payloads, after the payloads of a transaction.

        Only the writer of the topic's payloads calls it.

        Raises:
            StoreError: the store could not be read.
        """
        with self._lock:
            stored = self._stored_of(topic)
        if not stored.pointers:
            prefix = topic.rows_prefix
            stored.ids.skip(first_unannounced(self._side, prefix))
        if pointer not in stored.pointers:
            table, prefix = self._store.payload, pointer_prefix(topic.topic.prefix, topic.generation, pointer)
            # Most transactions are new; one read proves that.
            if table.first(prefix, stop_key(prefix)) is not None:
                stored.ids.skip(first_free(partial(table.read, KEYS), prefix, self._clock.now_ms()))
            stored.pointers[pointer] = None
            if len(stored.pointers) > _KNOWN_POINTERS:
                del stored.pointers[next(iter(stored.pointers))]
        return stored.ids

    def note_payloads(self, topic: TopicMetadata, pointer: int, *, hidden: bool) -> None:
        """Note whether a transaction has stored payloads without a message that refers to them."""
        with self._lock:
            known = self._stored_of(topic).hidden
            known.pop(pointer, None)
            known[pointer] = hidden
            if len(known) > _KNOWN_POINTERS:
                forgotten = next(iter(known))
                del known[forgotten]
                self._unknown = max(self._known_from(), forgotten)

    def hides(self, topic: TopicMetadata, pointer: int) -> bool:
        """Return whether a transaction has stored payloads without a message that refers to them.

        The store is read once for each transaction that is older than this process. Most transactions have stored
        nothing, which takes one read. For the others, all messages since their start are searched for a reference.

        Raises:
            StoreError: the store could not be read.
        """
        with self._lock:
            hidden = self._stored_of(topic).hidden.get(pointer)
            if hidden is not None or pointer > self._known_from():
                return bool(hidden)
        hidden = self._has_payloads(topic, pointer) and not self._is_referred_to(topic, pointer)
        self.note_payloads(topic, pointer, hidden=hidden)
        return hidden

    def _known_from(self) -> int:
        """Return the pointer after which this process knows all stored payloads."""
        if self._unknown is None:
            self._unknown = (self._clock.now_ms() + self.allowance_ms) * TX_PER_MS
        return self._unknown

    def _has_payloads(self, topic: TopicMetadata, pointer: int) -> bool:
        prefix = pointer_prefix(topic.topic.prefix, topic.generation, pointer)
        return self._store.payload.first(prefix, stop_key(prefix)) is not None

    def _is_referred_to(self, topic: TopicMetadata, pointer: int) -> bool:
        """Return whether a message refers to the stored payloads of a transaction."""
        prefix = topic.rows_prefix
        start = prefix + tail(position(max(0, transaction_ms(pointer) - self.allowance_ms)))
        read = partial(self._store.message.read, MESSAGES.within(_PAGE_BYTES))
        return any(value == (pointer, None) for _, value in every(read, start, stop_key(prefix), _PAGE_ROWS))

    def _stored_of(self, topic: TopicMetadata) -> _Stored:
        prefix = topic.rows_prefix
        found = self._stored.get(prefix)
        if found is None:
            found = self._stored[prefix] = _Stored()
        return found

    def hide_late(self, producer: ProducerName) -> None:
        """Hide late rows of a producer's requests from readers, whichever leader wrote them.

        It covers all producers of the home at once, because the search for their topics reads all requests. Topics with
        another leader than the home have no requests under way: they were written under another number of slots.

        Raises:
            StoreError: the store failed.
        """
        prefix, forgotten = generation_prefix(producer.home.prefix, producer.home_generation), self._forgotten
        if self._side.private or prefix in self._without_late:
            return
        for one in {prefix, *topics_requested(self._side, producer.home)}:
            if self._side.have_one_leader(_ANY_KIND + prefix, _ANY_KIND + one):
                self._store.message.reserved(one)
        with self._lock:
            if forgotten == self._forgotten:
                self._without_late.add(prefix)

    def note_failed(self) -> None:
        """Note a failed write, whose rows may still appear in the store."""
        with self._lock:
            self._without_late.clear()
            self._forgotten += 1

    def forget(self, concerns: Callable[[bytes], bool]) -> None:
        """Open topics again before their next use, because another process may have written.

        Args:
            concerns: selects topics, by the start of their keys.
        """
        with self._lock:
            for prefix in filter(concerns, self._places):
                self._places[prefix].version += 1
                self._cache.drop(prefix)
            for prefix in filter(concerns, self._stored):
                self._stored[prefix].pointers.clear()
                self._stored[prefix].hidden.clear()
            self._unknown = None
            self._without_late.clear()
            self._forgotten += 1

    def forget_cached(self, topic: TopicId) -> None:
        """Drop the cached rows of a topic, because the store may have fewer of them.

        The topic stays open: opened again, it would count rows of this process as rows of an earlier one.
        """
        with self._lock:
            for prefix, place in self._places.items():
                if prefix.startswith(topic.prefix) and place.open_topic is not None:
                    self._cache.forget(prefix, place.open_topic.ids.free)

    def drop(self, topic: TopicId) -> None:
        """Forget a deleted topic; a new topic of this name has another generation."""
        with self._lock:
            for prefix in [one for one in self._places if one.startswith(topic.prefix)]:
                del self._places[prefix]
                self._cache.drop(prefix)
            for prefix in [one for one in self._stored if one.startswith(topic.prefix)]:
                del self._stored[prefix]

    def _open(self, prefix: bytes, open_topic: OpenTopic) -> OpenTopic:
        """Skip all positions that may be in use, and let the cache keep all rows from then on."""
        now_ms = self._clock.now_ms()
        announced = first_free(self._expiries.keys, prefix, now_ms)
        # Before the search for the last row: on HBase it fences off late writes of a former leader.
        reserved = self._store.message.reserved(prefix)
        # Rows that consumers have read may be deleted already. A new message at or before such a position would never
        # be read.
        unread = max(first_unread(self._side, prefix), announced_in(self._side, prefix))
        requested = first_unannounced(self._side, prefix)
        open_topic.ids.skip(
            max(
                announced,
                reserved,
                unread,
                requested,
                first_free(partial(self._store.message.read, KEYS), prefix, now_ms),
            )
        )
        if open_topic.ids.free and not open_topic.unread:
            self._clock.note_past(milliseconds(open_topic.ids.free - 1))
        open_topic.mortal = open_topic.mortal or announced > 0
        open_topic.unread = open_topic.unread or open_topic.ids.free
        self._cache.open(prefix, open_topic.ids)
        return open_topic


class Delays(NamedTuple):
    """The delays until messages were first read.

    Attributes:
        counts: for each bound the number of delays up to it, and then the number of all delays.
    """

    counts: tuple[int, ...]
    sum_ms: int


class FirstReads:
    """A histogram of the delays until messages are first read; threads may share it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._sum_ms = 0
        self._lock = Lock()

    @property
    def delays(self) -> Delays:
        with self._lock:
            return Delays(tuple(accumulate(self._counts)), self._sum_ms)

    def note(self, open_topic: OpenTopic, page: MessageList, now_ms: int) -> None:
        """Note that a page of a topic, in the order of the ids, is read now."""
        last, unread = _position(page.ids[-1]), open_topic.unread
        if last < unread:
            return
        first = page.ids[bisect_left(page.ids, tail(unread))]
        delay_ms = max(0, now_ms - milliseconds(_position(first)))
        # Without a lock: if two threads note the same messages at once, they count twice.
        open_topic.unread = last + 1
        with self._lock:
            self._counts[bisect_left(BOUNDS_MS, delay_ms)] += 1
            self._sum_ms += delay_ms


def _position(id_: bytes) -> int:
    return int.from_bytes(id_[:MESSAGE_TAIL_BYTES], "big")
