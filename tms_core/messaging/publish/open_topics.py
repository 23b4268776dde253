"""The open topics: opened once, from the rows of the store.

An open topic belongs to one generation. The first batch or fetch opens it, behind the last stored row,
behind the last one that was announced, with a ttl of its own or by a producer, and behind all that a consumer has read.
From then on this process gives out the ids, so it knows where the topic ends without asking the store; that is why only
one process may publish.

How long after they were published its messages are first read is the latency of a consumer that keeps up. Only messages
count that were published since the topic was opened here, since older ones may have been read before. Of each page of a
fetch that goes farther than any before it, one message is measured: the oldest that was not read yet. That costs a few
microseconds a page, and nothing at all for consumers that read again what is old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import NamedTuple, cast

from tms_core.clock import HonestClock
from tms_core.consumers.claim_rows import first_unread
from tms_core.consumers.retention import announced_in
from tms_core.logs.loggers import get_logger, harmless
from tms_core.logs.printable import duration
from tms_core.messaging.cache import MessageCache
from tms_core.messaging.ids import SEQUENCE_BITS, Ids, first_free, milliseconds, position, tail
from tms_core.messaging.model import MessageList
from tms_core.messaging.producers.announcements import AnnouncedAhead
from tms_core.messaging.producers.rows import ProducerName, first_unannounced, topics_requested
from tms_core.rowkey import MESSAGE_TAIL_BYTES, generation_prefix, pointer_prefix, stop_key
from tms_core.tables.base import KEYS, MESSAGES, Store
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import TX_PER_MS, transaction_ms

logger = get_logger(__name__)

#: Transactions of a topic whose last stored payload is remembered; one that was forgotten is looked up again.
_KNOWN_POINTERS = 10_000
#: How much of the message table is read at once when a reference is looked for: rows, and bytes of values.
_PAGE_ROWS, _PAGE_BYTES = 1000, 1 << 20
#: Stands for what a row of the side table is about.
_ANY_KIND = b"q"
#: Upper ends of what is counted together, in milliseconds: from a poll right behind the publish to one an hour later.
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


@dataclass(slots=True)
class OpenTopic:
    """The messages of one generation of a topic.

    Attributes:
        prefix: the start of their keys.
        ids: what is taken of them.
        mortal: whether some may have a ttl of their own.
        row_bytes: about how large their payloads are, by the last page that was read.
        unread: the first position behind all that was there when it was opened, or was read since.
        largest_bytes: the largest payload that was read of it.
        wakes: called when messages have come; by any thread, so they must not wait.
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
    """The place of an open topic, which is opened again for each time that it was invalidated."""

    lock: Lock = field(default_factory=Lock)
    open_topic: OpenTopic | None = None
    wanted: int = 1
    opened: int = 0


@dataclass(slots=True)
class _Stored:
    """The payloads of one generation of a topic.

    Attributes:
        pointers: the transactions behind whose rows ``ids`` are already.
        hidden: by transaction, whether it has payloads that no message refers to.
    """

    ids: Ids = field(default_factory=lambda: Ids(0))
    pointers: dict[int, None] = field(default_factory=dict)
    hidden: dict[int, bool] = field(default_factory=dict)


class OpenTopics:
    """The open topics of a store; threads may share it.

    Args:
        side: where it is looked up how far consumers have read, and what producers have requested.
        allowance_ms: how far the clocks of several machines differ.

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
        # Of a transaction up to this one, others may have stored payloads, or it was forgotten; None: up to any that is
        # there when this is next asked for.
        self._unknown: int | None = None
        # Homes of producers of whose requests nothing comes late any more, since the last time something was forgotten.
        self._without_late: set[bytes] = set()
        self._forgotten = 0
        self._lock = Lock()

    def messages(self, topic: TopicMetadata) -> OpenTopic:
        """Return the open topic of a topic's messages.

        Raises:
            StoreError: it could not be opened.
        """
        prefix = generation_prefix(topic.topic.prefix, topic.generation)
        place = self._places.get(prefix)
        if place is None:
            with self._lock:
                place = self._places.setdefault(prefix, _Place())
        if place.opened < place.wanted:
            with place.lock:
                if place.opened < place.wanted:
                    wanted = place.wanted
                    place.open_topic = self._open(prefix, place.open_topic or OpenTopic(prefix, Ids(0)))
                    place.opened = wanted
        return cast(OpenTopic, place.open_topic)

    def next_position(self, open_topic: OpenTopic, topic: TopicMetadata, now_ms: int) -> int:
        """Return the position to write at; log once if ids go on from a time that is still to come."""
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
        if not topic.consumed:
            return 0
        return announced_in(self._side, generation_prefix(topic.topic.prefix, topic.generation))

    def payloads(self, topic: TopicMetadata, pointer: int) -> Ids:
        """Return the ids of a topic's stored payloads, behind those that the transaction has.

        Only the writer of the topic's payloads asks.

        Raises:
            StoreError: they could not be looked up.
        """
        with self._lock:
            stored = self._stored_of(topic)
        if not stored.pointers:
            prefix = generation_prefix(topic.topic.prefix, topic.generation)
            stored.ids.skip(first_unannounced(self._side, prefix))
        if pointer not in stored.pointers:
            table, prefix = self._store.payload, pointer_prefix(topic.topic.prefix, topic.generation, pointer)
            # Most transactions are new, and one read tells so.
            if table.first(prefix, stop_key(prefix)) is not None:
                stored.ids.skip(first_free(partial(table.read, KEYS), prefix, self._clock.now_ms()))
            stored.pointers[pointer] = None
            if len(stored.pointers) > _KNOWN_POINTERS:
                del stored.pointers[next(iter(stored.pointers))]
        return stored.ids

    def hide(self, topic: TopicMetadata, pointer: int) -> None:
        """A transaction has stored payloads, which are seen when a message refers to them."""
        with self._lock:
            self._know(topic, pointer, hidden=True)

    def show(self, topic: TopicMetadata, pointer: int) -> None:
        """A message refers to what a transaction has stored."""
        with self._lock:
            self._know(topic, pointer, hidden=False)

    def hides(self, topic: TopicMetadata, pointer: int) -> bool:
        """Return whether a transaction has stored payloads to which no message refers.

        The store is asked once, by a transaction that started before this process did. Most have stored nothing, which
        takes one read; else all messages since its start are searched for one that refers to it.

        Raises:
            StoreError: it could not be looked up.
        """
        with self._lock:
            hidden = self._stored_of(topic).hidden.get(pointer)
            if hidden is not None or pointer > self._known_from():
                return bool(hidden)
        hidden = self._has_payloads(topic, pointer) and not self._is_referred_to(topic, pointer)
        with self._lock:
            self._know(topic, pointer, hidden=hidden)
        return hidden

    def _know(self, topic: TopicMetadata, pointer: int, *, hidden: bool) -> None:
        known = self._stored_of(topic).hidden
        known.pop(pointer, None)
        known[pointer] = hidden
        if len(known) > _KNOWN_POINTERS:
            forgotten = next(iter(known))
            del known[forgotten]
            self._unknown = max(self._known_from(), forgotten)

    def _known_from(self) -> int:
        """Return the pointer behind which whatever is stored is known."""
        if self._unknown is None:
            self._unknown = (self._clock.now_ms() + self.allowance_ms) * TX_PER_MS
        return self._unknown

    def _has_payloads(self, topic: TopicMetadata, pointer: int) -> bool:
        prefix = pointer_prefix(topic.topic.prefix, topic.generation, pointer)
        return self._store.payload.first(prefix, stop_key(prefix)) is not None

    def _is_referred_to(self, topic: TopicMetadata, pointer: int) -> bool:
        """Return whether a message takes its payloads from those of a transaction."""
        prefix = generation_prefix(topic.topic.prefix, topic.generation)
        start: bytes | None = prefix + tail(position(max(0, transaction_ms(pointer) - self.allowance_ms)))
        while start is not None:
            page = self._store.message.read(MESSAGES.within(_PAGE_BYTES), start, stop_key(prefix), _PAGE_ROWS)
            if any(value == (pointer, None) for _, value in page.items):
                return True
            start = page.resume
        return False

    def _stored_of(self, topic: TopicMetadata) -> _Stored:
        prefix = generation_prefix(topic.topic.prefix, topic.generation)
        found = self._stored.get(prefix)
        if found is None:
            found = self._stored[prefix] = _Stored()
        return found

    def hide_late(self, producer: ProducerName) -> None:
        """See that readers are shown nothing that may still come of a producer's requests, from whichever leader.

        It is done for all producers of its home at once, since their topics are searched for. Topics that another
        server may lead than its home have nothing under way: the number of slots was another when it wrote to them.

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
        """A write has failed, so that of what it was to write something may come late."""
        with self._lock:
            self._without_late.clear()
            self._forgotten += 1

    def forget(self, concerns: Callable[[bytes], bool]) -> None:
        """Read again before the next use, because another process may have written.

        Args:
            concerns: tells which topics, by the start of their keys.
        """
        with self._lock:
            for prefix in filter(concerns, self._places):
                self._places[prefix].wanted += 1
                self._cache.drop(prefix)
            for prefix in filter(concerns, self._stored):
                self._stored[prefix].pointers.clear()
                self._stored[prefix].hidden.clear()
            self._unknown = None
            self._without_late.clear()
            self._forgotten += 1

    def drop(self, topic: TopicId) -> None:
        """The topic was deleted; its next life has another generation."""
        with self._lock:
            for prefix in [one for one in self._places if one.startswith(topic.prefix)]:
                del self._places[prefix]
                self._cache.drop(prefix)
            for prefix in [one for one in self._stored if one.startswith(topic.prefix)]:
                del self._stored[prefix]

    def _open(self, prefix: bytes, open_topic: OpenTopic) -> OpenTopic:
        """Move an open topic behind the last row there is, and have the cache keep what comes from now on."""
        now_ms = self._clock.now_ms()
        announced = first_free(self._expiries.keys, prefix, now_ms)
        reserved = self._store.message.reserved(prefix)
        # What has been read may be deleted by now, and no id at or before it would ever be read.
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
    """Delays that were noted.

    Attributes:
        counts: how many were at most as long as each of the bounds, and how many there were.
    """

    counts: tuple[int, ...]
    sum_ms: int


class FirstReads:
    """Notes when messages are first read; threads may share it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._sum_ms = 0
        self._lock = Lock()

    @property
    def delays(self) -> Delays:
        with self._lock:
            return Delays(tuple(accumulate(self._counts)), self._sum_ms)

    def note(self, open_topic: OpenTopic, page: MessageList, now_ms: int) -> None:
        """These messages of a topic, in the order of their ids, are read now."""
        last, unread = _position(page.ids[-1]), open_topic.unread
        if last < unread:
            return
        first = page.ids[bisect_left(page.ids, tail(unread))]
        delay_ms = max(0, now_ms - milliseconds(_position(first)))
        # Another thread may do the same for the same messages; then they count twice.
        open_topic.unread = last + 1
        with self._lock:
            self._counts[bisect_left(BOUNDS_MS, delay_ms)] += 1
            self._sum_ms += delay_ms


def _position(id_: bytes) -> int:
    return int.from_bytes(id_[:MESSAGE_TAIL_BYTES], "big")
