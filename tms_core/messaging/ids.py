"""Message ids: strictly increasing per topic, whatever the clock does.

An id is a millisecond and one of 65,536 sequence numbers within it, so the ids of a topic lie on one line: a
*position* is ``milliseconds * 65,536 + sequence``, and as ten big-endian bytes it is the end of a row key. The next id
is the next position, or the first one of the present millisecond where that is higher. So a clock that steps back, and
a millisecond that is used up, both just go on counting; CDAP restarts at sequence 0 whenever the clock has changed,
and overwrites messages.

Readers and publishers go by one clock, which never goes back: a message is never older than what readers go by at
that moment, or it would be too old for them before it was there.

A clock that jumps *forward* is not followed (:class:`tms_core.clock.HonestClock`): ids cannot be rolled back, and
messages from the future would outlive their ttl (rule S7).
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
#: Keys read at once when the last one is looked for.
_PAGE_KEYS = 256
#: How far back the last key is first looked for, in milliseconds, and how much farther each time.
_FIRST_STEP_MS, _STEP_FACTOR = 1_000, 32

#: Reads keys of a range: start, stop, limit.
ReadKeys = Callable[[bytes, bytes | None, int], Page[list[bytes]]]


def position(ms: int, sequence: int = 0) -> int:
    """Return where an id lies on its topic's line."""
    return ms << SEQUENCE_BITS | sequence


def milliseconds(at: int) -> int:
    """Return the publish time of a position."""
    return at >> SEQUENCE_BITS


def id_parts(at: int) -> tuple[int, int]:
    """Publish time and sequence number of a position."""
    return divmod(at, 1 << SEQUENCE_BITS)


def expires_ms(at: int, ttl_ms: int) -> int:
    """Return the first moment at which a ttl takes the row at a position; at the age of exactly its ttl it lives."""
    return milliseconds(at) + ttl_ms + 1


def tail(at: int) -> bytes:
    """Return the last ten bytes of the key of a position."""
    return at.to_bytes(MESSAGE_TAIL_BYTES, "big")


class Ids:
    """The line of one topic and generation: the reserved positions, and the limit of readers.

    One batch at a time takes ids; any number of threads may read the last position.

    Args:
        free: the first position that no row has.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._in_flight: int | None = None
        self._lock = Lock()

    def first(self, now_ms: int) -> int:
        """Return the next position there is at that time."""
        return max(self._free, position(now_ms))

    def skip(self, free: int) -> None:
        """Positions before ``free`` are taken.

        Raises:
            Unavailable: there are no such ids.
        """
        _check(free)
        with self._lock:
            self._free = max(self._free, free)

    def take(self, first: int, stop: int) -> None:
        """Take the positions from ``first`` to before ``stop``; no reader passes them until :meth:`release`.

        Raises:
            Unavailable: there are no such ids.
        """
        _check(stop)
        with self._lock:
            # What was skipped meanwhile stays so.
            self._in_flight, self._free = first, max(stop, self._free)

    def release(self) -> None:
        """Note that the positions taken are written, or never will be."""
        with self._lock:
            self._in_flight = None

    @property
    def free(self) -> int:
        """Return the lowest position that is not taken."""
        return self._free

    @property
    def end(self) -> int:
        """Return the lowest position that is not acknowledged: readers see the rows before it."""
        with self._lock:
            return self._free if self._in_flight is None else self._in_flight


def _check(free: int) -> None:
    if free > POSITIONS:
        raise Unavailable(
            "The topic has a message with the latest time there is, so no later id is left.",
            "Delete the topic and create it again.",
        )


def first_free(read: ReadKeys, prefix: bytes, now_ms: int) -> int:
    """Return the first position after the last key that starts with ``prefix`` and goes on with a position.

    A table can only be read forwards, so the last key is searched for: backwards from now in growing steps, then by
    halving. That is about ten reads for a topic in use, and never more than some hundred.

    Args:
        prefix: the prefix before the position.
        now_ms: where the last key is likely to be.

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
    return _behind_last(read, prefix, last[0], stop if start < stop else POSITIONS) if last[1] else last[0] + 1


def _behind_last(read: ReadKeys, prefix: bytes, low: int, high: int) -> int:
    """Return the first position behind the last key, which is at ``low`` or between it and ``high``."""
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
