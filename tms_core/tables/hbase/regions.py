"""Deleted rows of a table in HBase, and the compaction of its regions.

HBase frees the space of deleted rows only when it rewrites a whole region with its live rows, which it does once a
week. Therefore this module requests the compaction of a region if at least as many rows were deleted as remain. It
counts remaining rows only up to that number.

HBase's Thrift servers have limits:

* Since HBase 2, ``majorCompact`` requests a normal compaction. The region server makes it a major one if the region's
  oldest file is older than ``hbase.hregion.majorcompaction``, a week by default (plus or minus half). Operators can set
  it per table: with a day, the requested compaction happens at most a day later.
* No call flushes memory to files, and markers in memory do not free space. Therefore deletes count only after HBase has
  flushed them, within an hour.
* HBase does not report the completion of a compaction. Therefore requests are sent one by one with a pause, and HBase
  queues them and limits their rate.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tms_core.clock import Clock
from tms_core.errors import StoreError
from tms_core.tables.base import KeyRange
from tms_core.tables.hbase.pool import HBasePool

#: The smallest number of deleted rows for which a region is rewritten.
WORTHWHILE_ROWS = 1_000
#: The time after which deletes are in files: HBase flushes data that is an hour old within five minutes.
FLUSHED_MS = 70 * 60_000
#: The length of a time interval whose deletes are counted together.
_INTERVAL_MS = 10 * 60_000
#: The pause between two requested compactions, so that HBase's own urgent compactions do not wait in a long queue.
PAUSE_SECONDS = 2.0
#: The time after which a call leaves other regions to the next call: the caller sends heartbeats in between (S10).
LONGEST_MS = 15_000

#: Counts rows of a range, up to a limit.
CountRows = Callable[[KeyRange, int], int]


class Regions:
    """The regions of one table; threads may share it.

    Args:
        pool: connections to Thrift 1 servers.
    """

    def __init__(self, pool: HBasePool, name: bytes, clock: Clock) -> None:
        self._pool = pool
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._starts: list[bytes] = []
        # By the region's first row: deletes in files, deletes of an interval that may still be in memory, and the
        # number of deletes at which the remaining rows are counted again.
        self._in_files: Counter[bytes] = Counter()
        self._recent: Counter[tuple[bytes, int]] = Counter()
        self._next_count: dict[bytes, int] = {}
        self._request_ms: int | None = None

    def add_deleted(self, rows: Sequence[bytes]) -> None:
        """Count deleted rows in their regions.

        Args:
            rows: their keys, including salts.
        """
        try:
            if not self._starts:
                self._read()
        except StoreError:
            # Ignore the error: the rows are deleted, and HBase frees their space in its weekly compaction.
            return
        when = self._clock.monotonic_ms() // _INTERVAL_MS
        with self._lock:
            if not self._starts:
                return
            for start, number in _by_region(self._starts, rows).items():
                self._recent[start, when] += number

    def compact(self, ranges: Sequence[KeyRange], count_rows: CountRows) -> None:
        """Request the compaction of regions with rows in some ranges if at least half of their rows are deleted.

        The next call continues with the regions for which the time was too short.

        Raises:
            StoreError: as any call.
        """
        self._count_flushed()
        if max(self._in_files.values(), default=0) < WORTHWHILE_ROWS:
            return
        started_ms = self._clock.monotonic_ms()
        regions = self._read()
        self._count_flushed()
        for region in regions:
            if self._clock.monotonic_ms() - started_ms > LONGEST_MS:
                return
            start, region_range = region["start_key"], KeyRange(region["start_key"], region["end_key"] or None)
            if not any(_overlap(region_range, other) for other in ranges):
                continue
            deleted = self._in_files[start]
            if deleted < max(WORTHWHILE_ROWS, self._next_count.get(start, 0)):
                continue
            if count_rows(region_range, deleted + 1) > deleted:
                # Count again only after twice as many deletes, because a count costs about as much as the deletes.
                self._next_count[start] = 2 * deleted
                continue
            self._wait()
            self._compact(region["name"])
            del self._in_files[start]
            self._next_count.pop(start, None)

    def name_of(self, row: bytes) -> str:
        """Return the name of the current region of a row, which need not exist, as HBase writes the name."""
        regions = sorted(self._read(), key=lambda region: bytes(region["start_key"]))
        name: bytes = [region["name"] for region in regions if region["start_key"] <= row][-1]
        return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02X}" for byte in name)

    def _compact(self, region: bytes) -> None:
        self._pool.run(lambda connection: connection.happybase.compact_table(region, major=True))

    def _read(self) -> list[dict[str, Any]]:
        regions = self._pool.run(lambda connection: connection.table(self._name).regions())
        with self._lock:
            self._starts = sorted(region["start_key"] for region in regions)
        return regions

    def _count_flushed(self) -> None:
        """Count the deletes that HBase has flushed to files, by current region."""
        flushed = (self._clock.monotonic_ms() - FLUSHED_MS) // _INTERVAL_MS
        with self._lock:
            for start, when in [key for key in self._recent if key[1] < flushed]:
                self._in_files[start] += self._recent.pop((start, when))
            for start in set(self._in_files) - set(self._starts):
                self._in_files[self._starts[bisect_right(self._starts, start) - 1]] += self._in_files.pop(start)

    def _wait(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._request_ms is not None and now_ms - self._request_ms < PAUSE_SECONDS * 1000:
            self._clock.sleep(PAUSE_SECONDS - (now_ms - self._request_ms) / 1000)
        self._request_ms = self._clock.monotonic_ms()


def _by_region(starts: list[bytes], rows: Sequence[bytes]) -> Counter[bytes]:
    """Return the number of rows in each region; the rows of a batch are usually in one region."""
    first, last = (bisect_right(starts, row) - 1 for row in (min(rows), max(rows)))
    if first == last:
        return Counter({starts[first]: len(rows)})
    return Counter(starts[bisect_right(starts, row) - 1] for row in rows)


def _overlap(one: KeyRange, other: KeyRange) -> bool:
    return (one[1] is None or other[0] < one[1]) and (other[1] is None or one[0] < other[1])
