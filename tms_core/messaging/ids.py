"""Message ids: strictly increasing per topic, independent of the clock.

An id is a millisecond and one of 65,536 sequence numbers. A *position* is ``milliseconds * 65,536 + sequence``; as ten
big-endian bytes it is the last part of a row key. The next id is the next position, or the first position of the
current millisecond if that is higher. Therefore ids continue after a backward step of the clock, and after the last
sequence number of a millisecond. CDAP restarts at sequence 0 whenever the clock has changed, and overwrites messages.

Readers and publishers share one clock that never goes back. Otherwise a message could be published with an expired
time.

Ids do not follow a *forward* jump of the clock (:class:`tms_core.clock.HonestClock`): ids cannot go back, and messages
from the future would outlive their TTL (invariant S7).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tms_core.errors import Unavailable
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, NEGATIVE
from tms_core.tables.base import Page

#: Sequence numbers within a millisecond, as a power of two.
SEQUENCE_BITS = 16
#: The first position that no row can have.
POSITIONS = (LONG_MAX + 1) << SEQUENCE_BITS
#: The keys of a page in the search for the last key.
_PAGE_KEYS = 256
#: The first step back in that search, in milliseconds, and the ratio of two steps.
_FIRST_STEP_MS, _STEP_FACTOR = 1_000, 32

#: A function that reads keys of a range: start, stop, limit.
ReadKeys = Callable[[bytes, bytes | None, int], Page[list[bytes]]]


def position(ms: int, sequence: int = 0) -> int:
    """Return the position of an id."""
    return ms << SEQUENCE_BITS | sequence


def milliseconds(at: int) -> int:
    """Return the publish time of a position in milliseconds."""
    return at >> SEQUENCE_BITS


def id_parts(at: int) -> tuple[int, int]:
    """Return publish time (ms) and sequence number of a position."""
    return divmod(at, 1 << SEQUENCE_BITS)


def expires_ms(at: int, ttl_ms: int) -> int:
    """Return the first millisecond in which the row at a position is expired; a row whose age equals its TTL lives."""
    return milliseconds(at) + ttl_ms + 1


def tail(at: int) -> bytes:
    """Return the last ten bytes of the key of a position."""
    return at.to_bytes(MESSAGE_TAIL_BYTES, "big")


class Ids:
    """The positions of one generation of a topic: the first free position, and the limit of readers.

    One batch at a time reserves positions; any number of threads may read the limit.

    Args:
        free: the first position without a row.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._in_flight: int | None = None
        self._lock = Lock()

    def first(self, now_ms: int) -> int:
        """Return the next position at a time."""
        return max(self._free, now_ms << SEQUENCE_BITS)

    def skip(self, free: int) -> None:
        """Mark all positions before ``free`` as taken.

        Raises:
            Unavailable: no later id is left.
        """
        _check(free)
        with self._lock:
            self._free = max(self._free, free)

    def take(self, first: int, stop: int) -> None:
        """Reserve the positions from ``first`` to before ``stop``; no reader passes them until :meth:`release`.

        Raises:
            Unavailable: no later id is left.
        """
        _check(stop)
        with self._lock:
            # Another thread may have skipped positions since `first` was computed.
            self._in_flight, self._free = first, max(stop, self._free)

    def release(self) -> None:
        """Note that the rows at the reserved positions are written, or never will be."""
        with self._lock:
            self._in_flight = None

    @property
    def free(self) -> int:
        """Return the lowest position that is not taken."""
        return self._free

    @property
    def end(self) -> int:
        """Return the limit of readers: they see the rows before this position."""
        with self._lock:
            return self._free if self._in_flight is None else self._in_flight


def _check(free: int) -> None:
    if free > POSITIONS:
        raise Unavailable(
            "The topic has a message with the latest time there is, so no later id is left.",
            "Delete the topic and create it again.",
        )


def first_free(read: ReadKeys, prefix: bytes, now_ms: int) -> int:
    """Return the first position after the last key that starts with ``prefix`` and continues with a position.

    Tables can only be read forwards, so this searches for the last key: backwards from ``now_ms`` in growing steps,
        then
    by bisection. That takes about ten reads for an active topic, and at most some hundreds.

    Args:
        prefix: the start of the keys, before the position.
        now_ms: the probable time of the last key.

    Raises:
        StoreError: the table could not be read.
    """
    stop = min(position(max(0, now_ms)), POSITIONS)
    start = stop
    step_ms = _FIRST_STEP_MS
    last = _last_of_page(read, prefix, start, POSITIONS)
    while last is None and start > 0:
        stop, start = start, max(0, start - position(step_ms))
        step_ms *= _STEP_FACTOR
        last = _last_of_page(read, prefix, start, stop)
    if last is None:
        return 0
    return _find_end(read, prefix, last[0], stop if start < stop else POSITIONS) if last[1] else last[0] + 1


def _find_end(read: ReadKeys, prefix: bytes, low: int, high: int) -> int:
    """Return the first position after the last key, which is at ``low`` or between it and ``high``."""
    while True:
        middle = (low + high + 1) // 2
        found = _last_of_page(read, prefix, middle, high)
        if found is None:
            high = middle
            found = _last_of_page(read, prefix, low, high)
        if found is None:
            return low + 1
        low, more = found
        if not more:
            return low + 1


def _last_of_page(read: ReadKeys, prefix: bytes, start: int, stop: int) -> tuple[int, bool] | None:
    """Return the last position of the first page of a range, and whether there may be more; None: the range is
    empty.
    """
    first: bytes | None = prefix + tail(start)
    last = prefix + (NEGATIVE if stop >= POSITIONS else tail(stop))
    while first is not None and first < last:
        page = read(first, last, _PAGE_KEYS)
        if page.items:
            end = page.items[-1][len(prefix) :][:MESSAGE_TAIL_BYTES]
            return int.from_bytes(end.ljust(MESSAGE_TAIL_BYTES, b"\0"), "big"), page.resume is not None
        first = page.resume
    return None
