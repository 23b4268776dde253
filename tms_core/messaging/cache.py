"""A cache of the newest rows of all topics, so that consumers that keep up do not read the store.

The writer adds rows once they are durable. Therefore the cache of a topic contains *all* rows from some position on,
and an empty result is valid. The unit of the cache is a run: the rows of one request, which have consecutive positions
and one write pointer. A full cache evicts the oldest run of all topics.

The cache stays valid although the janitor changes the store:

* Expired rows and rows of old generations: fetches never return them.
* Rows that retention ``consumed`` has released: a fetch reads the store instead.
* Inverted rows: the cache still has the positive pointer. Readers do not see such a row while their transaction lists
  the pointer as invalid. A pointer stays on that list for ``lifetime + grace`` after the start of its transaction, so a
  reader in a transaction gets only cached rows younger than half of either value. (``CachingMessageTable`` has the same
  rule, with milliseconds instead of seconds.)

The service that rolls back messages also changes the cache. After any other write, call
:meth:`MessageCache.invalidate`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from threading import Lock
from typing import NamedTuple

from tms_core.messaging.ids import Ids, tail
from tms_core.messaging.model import MessageList, SharedList
from tms_core.rowkey import MESSAGE_TAIL_BYTES

#: The memory of a run in addition to its payloads, and of a payload in addition to its bytes; measured.
_RUN_BYTES, _PAYLOAD_BYTES = 300, 48
#: The minimum number of rows of a shared run; sharing shorter runs saves nothing.
_SHARED_ROWS = 32
#: Shared parts may use 1/4 of the cache: they help only readers whose positions are close to each other.
_SHARED_DIVISOR = 4
#: The size of a shared part in bytes, as encoded in a response.
_PART_BYTES = 60_000
#: The size of an encoded message in addition to its payload, in bytes.
_ENCODED_BYTES = 28
#: The payload part of the id of a message whose payload is in the message table.
INLINE = bytes(MESSAGE_TAIL_BYTES)


class CachedRun(NamedTuple):
    """Rows at consecutive positions, published by one request.

    Attributes:
        first: the position of the first row.
        rows: the number of rows.
        pointer: the write pointer; negative after a rollback, None outside transactions.
        payloads: the payload of each row; None: a single row that refers to the payload table.
        size: the size of the payloads in bytes.
        ttl_ms: the TTL of these messages in milliseconds; None: the topic's TTL.
        shared: the parts that readers share, by first position; None: the run is too short. The run owns its parts, so
            a part never reaches a reader of another topic or generation.
    """

    first: int
    rows: int
    pointer: int | None
    payloads: Sequence[bytes] | None
    size: int
    ttl_ms: int | None = None
    shared: dict[int, SharedList] | None = None

    @property
    def stop(self) -> int:
        """Return the first position after the run."""
        return self.first + self.rows

    @property
    def weight(self) -> int:
        """Return the approximate memory of the run in bytes."""
        return _RUN_BYTES + self.size + _PAYLOAD_BYTES * self.rows

    def messages(self, first: int, stop: int) -> MessageList:
        """Return the messages from one position to another."""
        payloads = (self.payloads or ())[first - self.first : stop - self.first]
        return MessageList([tail(at) + INLINE for at in range(first, stop)], list(payloads))


class CacheStats(NamedTuple):
    """Statistics of the cache: hits, misses, and memory in bytes."""

    hits: int
    misses: int
    weight: int


class _CachedTopic:
    """All runs of one generation of a topic from ``floor`` on."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.firsts: list[int] = []
        self.runs: list[CachedRun] = []
        self.start = 0

    def clear(self, floor: int) -> int:
        """Drop all runs, and return their memory in bytes."""
        weight = sum(run.weight for run in self.runs[self.start :])
        self.floor, self.firsts, self.runs, self.start = floor, [], [], 0
        return weight

    def drop_oldest(self) -> int:
        run = self.runs[self.start]
        self.floor = run.stop
        self.start += 1
        if self.start * 2 > len(self.runs):
            del self.runs[: self.start], self.firsts[: self.start]
            self.start = 0
        return run.weight

    def since(self, at: int) -> int:
        """Return the index of the run with the position, or of the first run after it."""
        index = bisect_right(self.firsts, at, lo=self.start)
        return index - 1 if index > self.start and self.runs[index - 1].stop > at else index


class MessageCache:
    """A cache of the newest runs of all topics; threads may share it.

    Args:
        limit_bytes: the maximum memory in bytes; 0: nothing is cached.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._topics: dict[bytes, _CachedTopic] = {}
        self._order: deque[_CachedTopic] = deque()
        # A heap by position, which starts with the publish time, so the oldest part is first. The number breaks ties.
        self._shared: list[tuple[int, int, dict[int, SharedList], int]] = []
        self._numbers = count()
        self._shared_weight = self._weight = 0
        self._hits = 0
        self._misses = 0
        self._lock = Lock()

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(self._hits, self._misses, self._weight)

    def open(self, prefix: bytes, ids: Ids) -> None:
        """Start caching a generation, whose writer adds all rows from the next free id on.

        Args:
            prefix: the row key prefix of the generation.
        """
        with self._lock:
            self._drop(prefix)
            if self._limit_bytes:
                self._topics[prefix] = _CachedTopic(ids.next_free)

    def add(self, prefix: bytes, runs: Sequence[CachedRun]) -> None:
        """Add rows that have just become durable, in the order of their positions."""
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is None:
                return
            for run in runs:
                cached.runs.append(run._replace(shared={}) if run.rows >= _SHARED_ROWS else run)
                cached.firsts.append(run.first)
                self._order.append(cached)
                self._weight += run.weight
            if self._weight > self._limit_bytes:
                self._shrink()

    def read(self, prefix: bytes, at: int, stop: int, limit_bytes: int, oldest: int) -> list[CachedRun] | None:
        """Return the runs that overlap a range of positions.

        Args:
            prefix: the row key prefix of the generation.
            limit_bytes: the approximate maximum size of the result, which has at least one run if a run exists.
            oldest: the lowest position that the reader may read from the cache.

        Returns:
            The runs, or None if the caller must read the store.
        """
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is None or at < cached.floor or at < oldest:
                self._misses += 1
                return None
            self._hits += 1
            found: list[CachedRun] = []
            weight = 0
            index = cached.since(at)
            while index < len(cached.runs) and (run := cached.runs[index]).first < stop and weight < limit_bytes:
                found.append(run)
                weight += run.weight
                index += 1
            return found

    def messages(self, run: CachedRun, first: int, stop: int) -> Iterator[MessageList]:
        """Yield the messages of a run between two positions, part by part; readers share whole parts."""
        parts = run.shared
        if parts is None:
            yield run.messages(first, stop)
            return
        step = -(-_PART_BYTES // (run.size // run.rows + _ENCODED_BYTES))
        while first < stop:
            part_start = first - (first - run.first) % step
            end = min(part_start + step, stop)
            if first == part_start and end == min(part_start + step, run.stop):
                yield parts.get(first) or self._make_messages(run, parts, first, end)
            else:
                yield run.messages(first, end)
            first = end

    def _make_messages(self, run: CachedRun, parts: dict[int, SharedList], first: int, stop: int) -> MessageList:
        messages = run.messages(first, stop)
        shared = SharedList(messages)
        return shared if self.share(parts, first, shared) else messages

    def share(self, parts: dict[int, SharedList], first: int, messages: SharedList) -> bool:
        """Cache a part of a run for other readers until newer parts displace it; return False if it does not fit."""
        # The payloads count twice: the encoded form contains them, and they outlive an evicted run.
        weight = messages.size + sum(map(len, messages.payloads))
        room = self._limit_bytes // _SHARED_DIVISOR
        with self._lock:
            # A reader with a large lag must not displace parts of readers near the last message.
            if weight > room or (self._shared_weight + weight > room and first <= self._shared[0][0]):
                return False
            parts[first] = messages
            heappush(self._shared, (first, next(self._numbers), parts, weight))
            self._weight += weight
            self._shared_weight += weight
            self._unshare(room)
            self._shrink()
            return True

    def roll_back(self, prefix: bytes, first: int, last: int, pointer: int) -> None:
        """Negate a pointer between two positions, inclusive; drop all runs if a run is only partly in the range."""
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is None:
                return
            index = cached.since(first)
            while index < len(cached.runs) and (run := cached.runs[index]).first <= last:
                if run.pointer == pointer:
                    if run.first < first or run.stop - 1 > last:
                        self._invalidate(cached, last + 1)
                        return
                    cached.runs[index] = run._replace(pointer=-pointer)
                index += 1

    def invalidate(self, prefix: bytes, floor: int) -> None:
        """Drop all cached runs, because the store may differ from them; cache new rows from ``floor`` on."""
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is not None:
                self._invalidate(cached, floor)

    def drop(self, prefix: bytes) -> None:
        """Drop all rows of a generation."""
        with self._lock:
            self._drop(prefix)

    def _drop(self, prefix: bytes) -> None:
        cached = self._topics.pop(prefix, None)
        if cached is not None:
            self._invalidate(cached, 0)

    def _unshare(self, limit_bytes: int) -> None:
        while self._shared_weight > limit_bytes:
            first, _, parts, weight = heappop(self._shared)
            parts.pop(first, None)
            self._weight -= weight
            self._shared_weight -= weight

    def _invalidate(self, cached: _CachedTopic, floor: int) -> None:
        # This also drops shared parts of other topics: it is rare, and readers recreate them.
        self._unshare(0)
        self._weight -= cached.clear(max(floor, cached.floor, cached.runs[-1].stop if cached.runs else 0))
        self._order = deque(entry for entry in self._order if entry is not cached)

    def _shrink(self) -> None:
        while self._weight > self._limit_bytes:
            self._weight -= self._order.popleft().drop_oldest()
