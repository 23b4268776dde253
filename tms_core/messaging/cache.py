"""The newest rows of all topics in memory, so that consumers who keep up do not read the store.

The writer adds its durable rows, so the cache of a topic has *all* its rows from some position on, and an empty answer
is valid. It holds runs, not rows: what one request published lies at consecutive positions and has one write pointer.
When the bytes run out, the oldest run of all topics goes.

It stays right although others work on the store. Rows the janitor deletes lie before the cut-off, in another
generation, or are due by a ttl of their own, and fetches show none of these anyway; or retention ``consumed`` has
released them, and a fetch reads released rows from the store. A pointer the janitor *negates* is
still positive here. That is no difference while the reader's own transaction lists it as invalid; it may be dropped
from there only ``lifetime + grace`` after its transaction began, so a reader in a transaction is served rows that are
younger than half of either (``CachingMessageTable`` has the same rule, in milliseconds where seconds were meant).
Rollbacks come through the same service and are made here too. Any other writer must say so: :meth:`forget`.
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

#: What a run takes in memory beside its payloads, and each payload beside its bytes; measured.
_RUN_BYTES, _PAYLOAD_BYTES = 300, 48
#: Runs of so many rows are shared; below that it would save nothing.
_SHARED_ROWS = 32
#: What part of the room the shared parts of runs may take: they help readers that are close to each other only.
_SHARED_ROOM = 4
#: About how many bytes of an answer readers share as one part: as many as a piece of an answer has.
_PART_BYTES = 60_000
#: What an answer has for each message beside its payload.
_ANSWER_BYTES = 28
#: What ends the id of a message that lies in the message table.
INLINE = bytes(MESSAGE_TAIL_BYTES)


class CachedRun(NamedTuple):
    """Rows at consecutive positions that one request published.

    Attributes:
        first: the position of the first.
        pointer: the write pointer of all; negative once rolled back, None without one.
        payloads: one for each; None: a single row that takes its payloads from the payload table.
        size: bytes of the payloads together.
        ttl_ms: a ttl of their own; None without one.
        shared: parts already read, by first position, as all readers of the whole part get them; None:
            it is too short. It goes with the run, so no part is ever taken for one of another topic or generation.
    """

    first: int
    pointer: int | None
    payloads: Sequence[bytes] | None
    size: int
    ttl_ms: int | None = None
    shared: dict[int, SharedList] | None = None

    @property
    def rows(self) -> int:
        return 1 if self.payloads is None else len(self.payloads)

    @property
    def stop(self) -> int:
        """Return the first position behind it."""
        return self.first + self.rows

    @property
    def weight(self) -> int:
        """About how many bytes it takes in memory."""
        return _RUN_BYTES + self.size + _PAYLOAD_BYTES * self.rows

    def messages(self, first: int, stop: int) -> MessageList:
        """Return the messages from one position to another."""
        payloads = (self.payloads or ())[first - self.first : stop - self.first]
        return MessageList([tail(at) + INLINE for at in range(first, stop)], list(payloads))


class Figures(NamedTuple):
    """Figures of the cache: hits, misses, and how much it holds."""

    hits: int
    misses: int
    weight: int


class _CachedTopic:
    """The runs of one generation of a topic, all there are from ``floor`` on."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.firsts: list[int] = []
        self.runs: list[CachedRun] = []
        self.gone = 0

    def clear(self, floor: int) -> int:
        """Drop all; returns their size."""
        weight = sum(run.weight for run in self.runs[self.gone :])
        self.floor, self.firsts, self.runs, self.gone = floor, [], [], 0
        return weight

    def drop_oldest(self) -> int:
        run = self.runs[self.gone]
        self.floor = run.stop
        self.gone += 1
        if self.gone * 2 > len(self.runs):
            del self.runs[: self.gone], self.firsts[: self.gone]
            self.gone = 0
        return run.weight

    def since(self, at: int) -> int:
        """Return the index of the run that has the position, or of the first behind it."""
        index = bisect_right(self.firsts, at, lo=self.gone)
        return index - 1 if index > self.gone and self.runs[index - 1].stop > at else index


class MessageCache:
    """Recent runs of all topics; threads may share it.

    Args:
        limit_bytes: how much it may hold; 0: nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._topics: dict[bytes, _CachedTopic] = {}
        self._order: deque[_CachedTopic] = deque()
        # By position, which is a time: the oldest comes first. A number keeps equal ones apart.
        self._shared: list[tuple[int, int, dict[int, SharedList], int]] = []
        self._numbers = count()
        self._shared_weight = self._weight = 0
        self._hits = 0
        self._misses = 0
        self._lock = Lock()

    @property
    def figures(self) -> Figures:
        with self._lock:
            return Figures(self._hits, self._misses, self._weight)

    def open(self, prefix: bytes, ids: Ids) -> None:
        """From now on, all rows of a generation will be added whose ids are taken.

        Args:
            prefix: the start of the generation's row keys.
        """
        with self._lock:
            self._drop(prefix)
            if self._limit_bytes:
                self._topics[prefix] = _CachedTopic(ids.free)

    def add(self, prefix: bytes, runs: Sequence[CachedRun]) -> None:
        """Add rows that were just made durable, in order of position."""
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
        """Runs from the one that has ``at``, up to the one that has the position before ``stop``.

        The first and the last may hold rows outside of that.

        Args:
            prefix: the start of the generation's row keys.
            limit_bytes: about how much to return; at least one run, if there is one.
            oldest: the lowest position at which the reader may be served.

        Returns:
            None if the store must be read.
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
        """Yield the messages of a run from one position to another, part by part; a part all of which is wanted is
        shared.
        """
        parts = run.shared
        if parts is None:
            yield run.messages(first, stop)
            return
        step = -(-_PART_BYTES // (run.size // run.rows + _ANSWER_BYTES))
        while first < stop:
            begin = first - (first - run.first) % step
            end = min(begin + step, stop)
            if first == begin and end == min(begin + step, run.stop):
                yield parts.get(first) or self._made(run, parts, first, end)
            else:
                yield run.messages(first, end)
            first = end

    def _made(self, run: CachedRun, parts: dict[int, SharedList], first: int, stop: int) -> MessageList:
        messages = run.messages(first, stop)
        shared = SharedList(messages)
        return shared if self.share(parts, first, shared) else messages

    def share(self, parts: dict[int, SharedList], first: int, messages: SharedList) -> bool:
        """Keep a part of a run for further readers, until there is no room beside newer ones; False: there is none."""
        # Their payloads count twice: they are in what is encoded, and stay when the run goes.
        weight = messages.size + sum(map(len, messages.payloads))
        room = self._limit_bytes // _SHARED_ROOM
        with self._lock:
            # A reader that is far behind takes no room from those at the tail.
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
        """Negate a pointer between two positions, both included; a divided part is dropped with all parts before it."""
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is None:
                return
            index = cached.since(first)
            while index < len(cached.runs) and (run := cached.runs[index]).first <= last:
                if run.pointer == pointer:
                    if run.first < first or run.stop - 1 > last:
                        self._forget(cached, last + 1)
                        return
                    cached.runs[index] = run._replace(pointer=-pointer)
                index += 1

    def forget(self, prefix: bytes, floor: int) -> None:
        """Drop the runs before ``floor``, where the store may hold other rows than were added."""
        with self._lock:
            cached = self._topics.get(prefix)
            if cached is not None:
                self._forget(cached, floor)

    def drop(self, prefix: bytes) -> None:
        """Drop all rows of a generation."""
        with self._lock:
            self._drop(prefix)

    def _drop(self, prefix: bytes) -> None:
        cached = self._topics.pop(prefix, None)
        if cached is not None:
            self._forget(cached, 0)

    def _unshare(self, limit_bytes: int) -> None:
        while self._shared_weight > limit_bytes:
            first, _, parts, weight = heappop(self._shared)
            parts.pop(first, None)
            self._weight -= weight
            self._shared_weight -= weight

    def _forget(self, cached: _CachedTopic, floor: int) -> None:
        # Those of other topics too: this is rare, and they are soon made again.
        self._unshare(0)
        self._weight -= cached.clear(max(floor, cached.floor, cached.runs[-1].stop if cached.runs else 0))
        self._order = deque(entry for entry in self._order if entry is not cached)

    def _shrink(self) -> None:
        while self._weight > self._limit_bytes:
            self._weight -= self._order.popleft().drop_oldest()
