"""Message ids: strictly increasing per topic, independent of the clock.

An id is a publish time in milliseconds and a sequence number below 65,536. A *position* is ``milliseconds * 65,536 +
sequence``; its ten big-endian bytes are the last part of a row key. The next id is the next position, or the first
position of the current millisecond if that is higher. Therefore ids keep increasing after a backward step of the clock
and after the last sequence number of a millisecond. CDAP restarts at sequence 0 whenever the clock has changed, and
overwrites messages.

Readers and publishers share one clock that never goes back; otherwise a message could be expired when it is published.

Ids do not follow a *forward* jump of the clock (:class:`tms_core.clock.HonestClock`), because they could not return
afterwards, and messages from the future would outlive their TTL (invariant S7).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tms_core.errors import BadRequest
from tms_core.rowkey import LONG_MAX, MESSAGE_TAIL_BYTES, NEGATIVE
from tms_core.tables.base import Page

#: The number of bits of a sequence number.
SEQUENCE_BITS = 16
#: The number of positions; the highest position is one less.
POSITIONS = (LONG_MAX + 1) << SEQUENCE_BITS
#: The number of keys in a page of the search for the last key.
_PAGE_KEYS = 256
#: The first backward step of that search in milliseconds, and the growth factor of the steps.
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
    """Return the last ten bytes of the row key at a position."""
    return at.to_bytes(MESSAGE_TAIL_BYTES, "big")


class Ids:
    """The positions of one generation of a topic: the first free position, and the limit of readers.

    One batch at a time reserves positions; any number of threads may read the limit.

    Args:
        next_free: the first position without a row.
    """

    def __init__(self, next_free: int) -> None:
        self._next_free = next_free
        self._in_flight: int | None = None
        self._lock = Lock()

    def first(self, now_ms: int) -> int:
        """Return the next position for a message published at ``now_ms``."""
        return max(self._next_free, now_ms << SEQUENCE_BITS)

    def skip(self, next_free: int) -> None:
        """Mark all positions before ``next_free`` as used.

        Raises:
            BadRequest: no higher id exists.
        """
        _check(next_free)
        with self._lock:
            self._next_free = max(self._next_free, next_free)

    def reserve(self, first: int, stop: int) -> None:
        """Reserve the positions from ``first`` to before ``stop``; readers stop before them until :meth:`release`.

        Raises:
            BadRequest: no higher id exists.
        """
        _check(stop)
        with self._lock:
            # Another thread may have skipped positions since `first` was computed.
            self._in_flight, self._next_free = first, max(stop, self._next_free)

    def release(self) -> None:
        """Let readers pass the reserved positions: their rows are written, or will never be written."""
        with self._lock:
            self._in_flight = None

    @property
    def next_free(self) -> int:
        """Return the lowest unused position."""
        return self._next_free

    @property
    def end(self) -> int:
        """Return the limit of readers, who see only rows before this position."""
        with self._lock:
            return self._next_free if self._in_flight is None else self._in_flight


def _check(next_free: int) -> None:
    if next_free > POSITIONS:
        raise BadRequest(
            "The topic has a message with the highest possible publish time, so no higher id exists.",
            "Delete the topic and create it again.",
        )


def find_next_free(read: ReadKeys, prefix: bytes, now_ms: int) -> int:
    """Return the first position after the last key that starts with ``prefix`` and continues with a position.

    Tables support only forward scans. Therefore this searches backwards from ``now_ms`` in growing steps, and then by
    bisection. That takes about ten reads for an active topic, and at most a few hundred.

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
    """Return the first position after the last key, which lies in ``low`` (inclusive) to ``high`` (exclusive)."""
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
    """Return the last position of a range's first page, and whether more keys may follow; None: the range is empty."""
    first: bytes | None = prefix + tail(start)
    last = prefix + (NEGATIVE if stop >= POSITIONS else tail(stop))
    while first is not None and first < last:
        page = read(first, last, _PAGE_KEYS)
        if page.items:
            end = page.items[-1][len(prefix) :][:MESSAGE_TAIL_BYTES]
            return int.from_bytes(end.ljust(MESSAGE_TAIL_BYTES, b"\0"), "big"), page.resume is not None
        first = page.resume
    return None
