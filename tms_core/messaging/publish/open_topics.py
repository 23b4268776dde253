"""The open topics of a server: the next id of each topic, and the delay until messages are first read.

An open topic belongs to one generation. The first batch or fetch opens it. The next id then follows all stored rows,
all announced rows (of producers, and of messages with a TTL), and all positions that consumers have read. From then on
this process assigns all ids, and does not read the store for the last id. Therefore only one process may publish.

The delay from the publish to the first read of a message is the latency of a consumer that keeps up. Messages from
before the topic was opened do not count, because they may have been read before. The delay is measured for the oldest
unread message of each page. That costs a few microseconds per page, and nothing for pages that were read before.
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
from tms_core.messaging.ids import SEQUENCE_BITS, Ids, find_next_free, milliseconds, position, tail
from tms_core.messaging.model import MessageList
from tms_core.messaging.producers.announcements import AnnouncedAhead
from tms_core.messaging.producers.rows import ProducerName, first_unannounced, topics_requested
from tms_core.rowkey import MESSAGE_TAIL_BYTES, generation_prefix, pointer_prefix, stop_key
from tms_core.tables.base import KEYS, MESSAGES, Store, iterate_items
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS, transaction_ms

logger = get_logger(__name__)

#: The maximum number of transactions of a topic whose stored payloads are cached.
_KNOWN_POINTERS = 10_000
#: The size of a page in the search for a reference: rows, and bytes of values.
_PAGE_ROWS, _PAGE_BYTES = 1000, 1 << 20
#: A kind of row of the side table; the leader of a topic's rows does not depend on it.
_ANY_KIND = b"q"
#: The upper bounds of the histogram buckets, in milliseconds.
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


@dataclass(slots=True)
class OpenTopic:
    """The messages of one generation of a topic.

    Attributes:
        prefix: the row key prefix.
        ids: the assigned and the free ids.
        has_ttls: whether some messages may have a TTL of their own.
        row_bytes: the average size of the rows in the last page that was read, in bytes.
        unread: the first position after all messages that existed at the opening, or were read since.
        largest_bytes: the size of the largest payload that was read, in bytes.
        wakes: callbacks for new messages; any thread may call them, so they must not block.
        ahead: announcements that cover future requests of producers.
        has_warned: whether a warning about messages dated ahead of the clock was logged.
    """

    prefix: bytes
    ids: Ids
    has_ttls: bool = False
    row_bytes: int = 512
    unread: int = 0
    largest_bytes: int = 0
    wakes: dict[Callable[[], None], None] = field(default_factory=dict)
    ahead: AnnouncedAhead = field(default_factory=AnnouncedAhead)
    has_warned: bool = False

    def wake_polls(self) -> None:
        """Wake the polls that wait for messages of this topic."""
        for wake in list(self.wakes):
            harmless(wake)


@dataclass(slots=True)
class _TopicEntry:
    """The entry of an open topic; an invalidation increases the version, and the next use opens the topic again."""

    lock: Lock = field(default_factory=Lock)
    open_topic: OpenTopic | None = None
    version: int = 1
    open_version: int = 0


@dataclass(slots=True)
class _Stored:
    """The stored payloads of one generation of a topic.

    Attributes:
        pointers: the transactions whose stored rows ``ids`` has already skipped.
        hidden: for each transaction, whether it has payloads that no message refers to.
    """

    ids: Ids = field(default_factory=lambda: Ids(0))
    pointers: dict[int, None] = field(default_factory=dict)
    hidden: dict[int, bool] = field(default_factory=dict)


class OpenTopics:
    """The open topics of a store; threads may share it.

    Args:
        side: the side table with the positions of consumers and the requests of producers.
        allowance_ms: the maximum clock difference between machines, in milliseconds.
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
        self._entries: dict[bytes, _TopicEntry] = {}
        self._stored: dict[bytes, _Stored] = {}
        self.allowance_ms = allowance_ms
        # The stored payloads of transactions up to this one are unknown: other processes may have stored them, or the
        # cache has dropped them. None: the newest possible transaction at the next use.
        self._unknown: int | None = None
        # The homes of producers that are known to have no late rows, and the number of resets of this set.
        self._without_late: set[bytes] = set()
        self._resets = 0
        self._lock = Lock()

    def messages(self, topic: TopicMetadata) -> OpenTopic:
        """Return the open topic of a topic's messages.

        Raises:
            StoreError: the topic could not be opened.
        """
        prefix = topic.rows_prefix
        entry = self._entries.get(prefix)
        if entry is None:
            with self._lock:
                entry = self._entries.setdefault(prefix, _TopicEntry())
        if entry.open_version < entry.version:
            with entry.lock:
                if entry.open_version < entry.version:
                    # Read the version first: after an invalidation during the opening, the next caller opens it again.
                    version = entry.version
                    entry.open_topic = self._open(prefix, entry.open_topic or OpenTopic(prefix, Ids(0)))
                    entry.open_version = version
        return entry.open_topic  # type: ignore[return-value]  # opened above

    def next_position(self, open_topic: OpenTopic, topic: TopicMetadata, now_ms: int) -> int:
        """Return the position to write at; warn once if it is ahead of the clock by more than the allowance."""
        first = open_topic.ids.first(now_ms)
        ahead_ms = (first >> SEQUENCE_BITS) - now_ms
        if ahead_ms > self.allowance_ms and not open_topic.has_warned:
            open_topic.has_warned = True
            logger.warning(
                "messages of %s are dated %s ahead of the clock and outlive their ttl by that time, because an earlier "
                "message is dated ahead. If the clock is slow, correct it. Otherwise read the messages, and recreate "
                "the topic: tms topic delete %s; then: tms topic create %s",
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
        """Return the ids for stored payloads of a topic, after all stored payloads of a transaction.

        Only the writer of the topic's payloads may call this.

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
            # Most transactions have no stored payload yet, which one read shows.
            if table.first(prefix, stop_key(prefix)) is not None:
                stored.ids.skip(find_next_free(partial(table.read, KEYS), prefix, self._clock.now_ms()))
            stored.pointers[pointer] = None
            if len(stored.pointers) > _KNOWN_POINTERS:
                del stored.pointers[next(iter(stored.pointers))]
        return stored.ids

    def note_payloads(self, topic: TopicMetadata, pointer: int, *, hidden: bool) -> None:
        """Record whether a transaction has stored payloads that no message refers to."""
        with self._lock:
            known = self._stored_of(topic).hidden
            known.pop(pointer, None)
            known[pointer] = hidden
            if len(known) > _KNOWN_POINTERS:
                forgotten = next(iter(known))
                del known[forgotten]
                self._unknown = max(self._known_from(), forgotten)

    def hides(self, topic: TopicMetadata, pointer: int) -> bool:
        """Return whether a transaction has stored payloads that no message refers to.

        The store is read once for each transaction that is older than this process. If it has stored payloads, all
        messages since its start are searched for a reference.

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
        """Return the pointer after which this process knows the stored payloads of all transactions."""
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
        read = partial(self._store.message.read, MESSAGES.limit_bytes(_PAGE_BYTES))
        return any(value == (pointer, None) for _, value in iterate_items(read, start, stop_key(prefix), _PAGE_ROWS))

    def _stored_of(self, topic: TopicMetadata) -> _Stored:
        prefix = topic.rows_prefix
        found = self._stored.get(prefix)
        if found is None:
            found = self._stored[prefix] = _Stored()
        return found

    def hide_late(self, producer: ProducerName) -> None:
        """Hide late rows of a producer's requests from readers, also rows of former leaders.

        This covers all producers of the home, because the search for their topics reads all last requests. Topics with
        another leader than the home have no running requests: theirs were written with another number of slots.

        Raises:
            StoreError: the store failed.
        """
        prefix, resets = generation_prefix(producer.home.prefix, producer.home_generation), self._resets
        if self._side.private or prefix in self._without_late:
            return
        for one in {prefix, *topics_requested(self._side, producer.home)}:
            if self._side.have_one_leader(_ANY_KIND + prefix, _ANY_KIND + one):
                self._store.message.reserved(one)
        with self._lock:
            if resets == self._resets:
                self._without_late.add(prefix)

    def note_failed(self) -> None:
        """Record a failed write, whose rows may appear in the store later."""
        with self._lock:
            self._without_late.clear()
            self._resets += 1

    def invalidate(self, concerns: Callable[[bytes], bool]) -> None:
        """Invalidate open topics, because another process may have written; their next use opens them again.

        Args:
            concerns: selects topics by their key prefix.
        """
        with self._lock:
            for prefix in filter(concerns, self._entries):
                self._entries[prefix].version += 1
                self._cache.drop(prefix)
            for prefix in filter(concerns, self._stored):
                self._stored[prefix].pointers.clear()
                self._stored[prefix].hidden.clear()
            self._unknown = None
            self._without_late.clear()
            self._resets += 1

    def invalidate_rows(self, topic: TopicId) -> None:
        """Drop the cached rows of a topic, because the janitor may have deleted some of them.

        The topic stays open. If it were opened again, rows of this process would count as rows of an earlier process.
        """
        with self._lock:
            for prefix, entry in self._entries.items():
                if prefix.startswith(topic.prefix) and entry.open_topic is not None:
                    self._cache.invalidate(prefix, entry.open_topic.ids.next_free)

    def drop(self, topic: TopicId) -> None:
        """Close a deleted topic; a new topic of the same name has another generation."""
        with self._lock:
            for prefix in [one for one in self._entries if one.startswith(topic.prefix)]:
                del self._entries[prefix]
                self._cache.drop(prefix)
            for prefix in [one for one in self._stored if one.startswith(topic.prefix)]:
                del self._stored[prefix]

    def _open(self, prefix: bytes, open_topic: OpenTopic) -> OpenTopic:
        """Skip all positions that may be in use, and start caching rows."""
        now_ms = self._clock.now_ms()
        announced = find_next_free(self._expiries.keys, prefix, now_ms)
        # Before the search for the last row: on HBase, `reserved` fences off late writes of a former leader.
        reserved = self._store.message.reserved(prefix)
        # Rows that consumers have read may be deleted. They would never read a new message at or before their position.
        unread = max(first_unread(self._side, prefix), announced_in(self._side, prefix))
        requested = first_unannounced(self._side, prefix)
        open_topic.ids.skip(
            max(
                announced,
                reserved,
                unread,
                requested,
                find_next_free(partial(self._store.message.read, KEYS), prefix, now_ms),
            )
        )
        if open_topic.ids.next_free and not open_topic.unread:
            self._clock.note_past(milliseconds(open_topic.ids.next_free - 1))
        open_topic.has_ttls = open_topic.has_ttls or announced > 0
        open_topic.unread = open_topic.unread or open_topic.ids.next_free
        self._cache.open(prefix, open_topic.ids)
        return open_topic


class Delays(NamedTuple):
    """The delays until messages were first read.

    Attributes:
        counts: for each bound the number of delays up to it, and last the number of all delays.
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
        """Record the read of a page of messages in the order of their ids."""
        last, unread = _position(page.ids[-1]), open_topic.unread
        if last < unread:
            return
        first = page.ids[bisect_left(page.ids, tail(unread))]
        delay_ms = max(0, now_ms - milliseconds(_position(first)))
        # Without a lock: messages that two threads read at the same time may count twice.
        open_topic.unread = last + 1
        with self._lock:
            self._counts[bisect_left(BOUNDS_MS, delay_ms)] += 1
            self._sum_ms += delay_ms


def _position(id_: bytes) -> int:
    return int.from_bytes(id_[:MESSAGE_TAIL_BYTES], "big")
