"""How long after they were published messages are first read: the latency of a consumer that keeps up.

Only messages count that were published since their topic's line was opened here, since older ones may have been read
before. Of each page of a fetch that goes farther than any before it, one message is measured: the oldest that was not
read yet. That costs a few microseconds a page, and nothing at all for consumers that read again what is old.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

from tms_core.messaging.ids import milliseconds, tail
from tms_core.messaging.lines import Line
from tms_core.messaging.model import MessageList
from tms_core.rowkey import MESSAGE_TAIL_BYTES

#: Upper ends of what is counted together, in milliseconds: from a poll right behind the publish to one an hour later.
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000, 3_600_000)


class Delays(NamedTuple):
    """Delays that were noted.

    Attributes:
        counts: how many were at most as long as each of the bounds, and how many there were.
        sum_ms: all together.
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

    def note(self, line: Line, page: MessageList, now_ms: int) -> None:
        """These messages of a line, in the order of their ids, are read now."""
        last, unread = _position(page.ids[-1]), line.unread
        if last < unread:
            return
        first = page.ids[bisect_left(page.ids, tail(unread))]
        delay_ms = max(0, now_ms - milliseconds(_position(first)))
        # Another thread may do the same for the same messages; then they count twice.
        line.unread = last + 1
        with self._lock:
            self._counts[bisect_left(BOUNDS_MS, delay_ms)] += 1
            self._sum_ms += delay_ms


def _position(id_: bytes) -> int:
    return int.from_bytes(id_[:MESSAGE_TAIL_BYTES], "big")
