"""Deleted rows of a table in HBase, and the regions that are worth a compaction.

HBase frees the space of deleted rows only when it rewrites a whole region including live rows, which it does once a
week. Therefore a compaction is requested if at least as many rows were deleted as remain; remaining rows are counted up
to that number.

HBase's Thrift servers have limits:

* Since HBase 2, ``majorCompact`` requests a normal compaction. The region server makes it a major one if the region's
  oldest file is older than ``hbase.hregion.majorcompaction``, a week by default (plus or minus half). It can be set per
  table: with a day, the requested compaction happens a day later at the latest.
* No call flushes memory to files, and markers in memory free nothing. Deletes count after HBase has flushed them by
  itself, within an hour.
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

#: Fewer deleted rows are not worth rewriting a region.
WORTHWHILE_ROWS = 1_000
#: The time after which deletes are in files: HBase flushes data that is an hour old within five minutes.
FLUSHED_MS = 70 * 60_000
#: Deletes within this long are counted together.
_TOGETHER_MS = 10 * 60_000
#: The pause between two requested compactions, so that HBase's own urgent ones do not wait in a long queue.
PAUSE_SECONDS = 2.0
#: The longest duration of a call, which leaves the rest to the next one: the caller sends heartbeats in between (S10).
LONGEST_MS = 15_000

#: Counts rows of a range, up to a limit.
CountRows = Callable[[KeyRange, int], int]


class Regions:
    """The regions of one table, for any number of threads.

    Args:
        pool: connections to Thrift 1 servers.
    """

    def __init__(self, pool: HBasePool, name: bytes, clock: Clock) -> None:
        self._pool = pool
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._starts: list[bytes] = []
        # By the region's first row: in files, and in memory perhaps, with the time.
        self._in_files: Counter[bytes] = Counter()
        self._recent: Counter[tuple[bytes, int]] = Counter()
        self._count_again_at: dict[bytes, int] = {}
        self._request_ms: int | None = None

    def deleted(self, rows: Sequence[bytes]) -> None:
        """Remember that rows were deleted.

        Args:
            rows: their keys, salt and all.
        """
        try:
            if not self._starts:
                self._read()
        except StoreError:
            # They are deleted all the same; that their space comes back a week later is no failure.
            return
        when = self._clock.monotonic_ms() // _TOGETHER_MS
        with self._lock:
            if not self._starts:
                return
            for start, number in _by_region(self._starts, rows).items():
                self._recent[start, when] += number

    def compact(self, ranges: Sequence[KeyRange], count_rows: CountRows) -> None:
        """Ask for the compaction of regions that have rows of some ranges, and of which at least half is deleted.

        Those for which there was no time count on.

        Raises:
            StoreError: as any call.
        """
        self._settle()
        if max(self._in_files.values(), default=0) < WORTHWHILE_ROWS:
            return
        began_ms = self._clock.monotonic_ms()
        regions = self._read()
        self._settle()
        for region in regions:
            if self._clock.monotonic_ms() - began_ms > LONGEST_MS:
                return
            start, region_range = region["start_key"], KeyRange(region["start_key"], region["end_key"] or None)
            if not any(_meet(region_range, other) for other in ranges):
                continue
            deleted = self._in_files[start]
            if deleted < max(WORTHWHILE_ROWS, self._count_again_at.get(start, 0)):
                continue
            if count_rows(region_range, deleted + 1) > deleted:
                # Counting costs about as much as deleting did, so it is not done again for a few rows more.
                self._count_again_at[start] = 2 * deleted
                continue
            self._wait()
            self._compact(region["name"])
            del self._in_files[start]
            self._count_again_at.pop(start, None)

    def holding(self, row: bytes) -> str:
        """Return the name of the region that has a row now, whether the row is there or not; written as HBase writes
        it.
        """
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

    def _settle(self) -> None:
        """Count the rows that must be flushed to files, by present region."""
        flushed = (self._clock.monotonic_ms() - FLUSHED_MS) // _TOGETHER_MS
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
    """Return the number of rows in each region; rows of a batch mostly share a region."""
    first, last = (bisect_right(starts, row) - 1 for row in (min(rows), max(rows)))
    if first == last:
        return Counter({starts[first]: len(rows)})
    return Counter(starts[bisect_right(starts, row) - 1] for row in rows)


def _meet(one: KeyRange, other: KeyRange) -> bool:
    return (one[1] is None or other[0] < one[1]) and (other[1] is None or one[0] < other[1])
