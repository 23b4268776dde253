"""Selection of regions for compaction, with a server that only lists regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest

from tests.tables.fake_thrift import FakeThrift, Request
from tms_core.clock import ManualClock
from tms_core.tables.base import ALL_KEYS, KeyRange
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.regions import FLUSHED_MS, LONGEST_MS, PAUSE_SECONDS, WORTHWHILE_ROWS, Regions
from tms_core.tables.hbase.thrift import HBASE

HOUR = 3_600_000
ALL: Sequence[KeyRange] = [ALL_KEYS]


class RegionedTable:
    """The conduct of a server that has a table with several regions.

    Attributes:
        starts: the start keys of the regions.
        compacted: the start keys of the compacted regions.
        lists: the number of calls that listed the regions.
        ill: whether all calls fail.
    """

    def __init__(self, *starts: bytes) -> None:
        self.starts = starts
        self.compacted: list[bytes] = []
        self.lists = 0
        self.ill = False

    def __call__(self, request: Request) -> None:
        if self.ill:
            request.send(request.failure(io=HBASE.IOError(message=b"java.io.IOException: ill")))
        elif request.name == "getTableRegions":
            self.lists += 1
            spans = zip(self.starts, [*self.starts[1:], b""], strict=True)
            info = HBASE.TRegionInfo
            request.reply([info(startKey=at, endKey=end, id=1, name=b"region " + at) for at, end in spans])
        else:
            self.compacted.append(request.arguments.tableNameOrRegionName.removeprefix(b"region "))
            request.reply(None)


@contextmanager
def regions_of(table: RegionedTable, clock: ManualClock) -> Iterator[Regions]:
    with FakeThrift(table) as server, closing(HBasePool([server.address], clock=clock)) as pool:
        yield Regions(pool, b"ns:t", clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0, monotonic_ms=HOUR)


def rows(start: bytes, number: int) -> list[bytes]:
    return [b"%b%07d" % (start, one) for one in range(number)]


def nothing_left(_: KeyRange, __: int) -> int:
    return 0


def test_compact_after_few_deletes_lists_no_regions(clock: ManualClock) -> None:
    table = RegionedTable(b"", b"m")
    with regions_of(table, clock) as regions:
        for start in (b"a", b"n"):
            regions.add_deleted(rows(start, WORTHWHILE_ROWS - 1))
        assert table.lists == 1
        clock.advance(FLUSHED_MS + HOUR)
        regions.compact(ALL, nothing_left)
        assert (table.lists, table.compacted) == (1, [])
        regions.add_deleted(rows(b"n", 1))
        clock.advance(FLUSHED_MS + HOUR)
        regions.compact(ALL, nothing_left)
        assert table.compacted == [b"m"]


def test_compact_at_time_limit_continues_in_the_next_call(clock: ManualClock) -> None:
    starts = [b"", *(b"%02d" % number for number in range(1, 20))]
    table = RegionedTable(*starts)
    with regions_of(table, clock) as regions:
        for number in range(20):
            regions.add_deleted(rows(b"%02d" % number, WORTHWHILE_ROWS))
        clock.advance(FLUSHED_MS + HOUR)
        done = []
        while len(table.compacted) < len(starts):
            before_ms = clock.monotonic_ms()
            regions.compact(ALL, nothing_left)
            done.append(len(table.compacted))
            assert clock.monotonic_ms() - before_ms <= LONGEST_MS + PAUSE_SECONDS * 1000
        assert table.compacted == starts
        assert len(done) > 1
        regions.compact(ALL, nothing_left)
        assert table.compacted == starts, "once each"


def test_compact_skips_regions_outside_the_ranges(clock: ManualClock) -> None:
    table = RegionedTable(b"", b"m")
    with regions_of(table, clock) as regions:
        regions.add_deleted(rows(b"n", WORTHWHILE_ROWS))
        clock.advance(FLUSHED_MS + HOUR)
        regions.compact([KeyRange(b"a", b"m")], nothing_left)
        assert table.compacted == []
        regions.compact([KeyRange(b"a", b"m"), KeyRange(b"z", None)], nothing_left)
        assert table.compacted == [b"m"]


def test_compact_of_merged_regions_counts_deletes_of_both(clock: ManualClock) -> None:
    table = RegionedTable(b"", b"m")
    with regions_of(table, clock) as regions:
        regions.add_deleted(rows(b"a", WORTHWHILE_ROWS))
        regions.add_deleted(rows(b"n", WORTHWHILE_ROWS))
        table.starts = (b"",)
        clock.advance(FLUSHED_MS + HOUR)
        regions.compact(ALL, lambda _, __: 2 * WORTHWHILE_ROWS)
        assert table.compacted == [b""]


def test_delete_succeeds_if_regions_cannot_be_listed(clock: ManualClock) -> None:
    table = RegionedTable(b"")
    table.ill = True
    with regions_of(table, clock) as regions:
        regions.add_deleted(rows(b"a", WORTHWHILE_ROWS))
        table.ill = False
        clock.advance(FLUSHED_MS + HOUR)
        regions.compact(ALL, nothing_left)
    assert table.compacted == []
