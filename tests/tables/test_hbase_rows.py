"""Row operations with a faulty server, simulated for each test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.transport.memory import TCyMemoryBuffer

from tests.support import record_calls
from tests.tables.fake_thrift import FakeThrift, Request
from tms_core.clock import ManualClock
from tms_core.errors import StoreError, TooLarge
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import Calls, Origin, Page, partial_write_error
from tms_core.tables.hbase.cells import CellLimit, HBasePayloadTable
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import CLOCKS_MS, KEYS, PAGE_BYTES, POINTERS, ROWS, HBaseRows, encode_deletions
from tms_core.tables.hbase.salts import AllSalts, Buckets, OneSalt, SaltedRows, Salts
from tms_core.tables.hbase.schema import BUCKETS_ATTRIBUTE, FAMILY, buckets_of
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import HBASE, ThriftConnection, interface

NOW_MS = 1_500_000_000_000
COLUMN, OLD, NEW = b"d:\x00\x00\x00t", b"\x00" * 7 + b"\x01", b"\xff" * 8


class OneRowTable:
    """The conduct of a server that has a table with one row."""

    def __init__(self, value: bytes | None, timestamp_ms: int = NOW_MS) -> None:
        self.value = value
        self.timestamp_ms = timestamp_ms
        self.seen: Counter[str] = Counter()
        self.marks: list[int | None] = []
        self.scans: list[Any] = []
        self.length = 1000
        self.given: Counter[int] = Counter()
        self.cut_before: set[str] = set()
        self.cut_after: set[str] = set()

    def __call__(self, request: Request) -> None:
        self.seen[request.name] += 1
        if request.name in self.cut_before:
            self.cut_before.remove(request.name)
            request.cut()
            return
        answer = getattr(self, request.name)(request.arguments)
        if request.name in self.cut_after:
            self.cut_after.remove(request.name)
            request.cut()
            return
        request.reply(answer)

    def row(self, key: bytes = b"\x00row") -> Any:
        cell = HBASE.TCell(value=self.value, timestamp=self.timestamp_ms)
        return HBASE.TRowResult(row=key, columns={COLUMN: cell})

    def getRowWithColumns(self, arguments: Any) -> list[Any]:  # noqa: N802
        return [] if self.value is None else [self.row(arguments.row)]

    def getRowsWithColumns(self, arguments: Any) -> list[Any]:  # noqa: N802
        assert arguments.columns in (None, [COLUMN])
        return [] if self.value is None else [self.row(row) for row in arguments.rows]

    def checkAndPut(self, arguments: Any) -> bool:  # noqa: N802
        matches: bool = self.value == arguments.value
        if matches:
            self.value = arguments.mput.value
        return matches

    def getTableRegions(self, _: Any) -> list[Any]:  # noqa: N802
        return [HBASE.TRegionInfo(startKey=b"", endKey=b"", id=1, name=b"only")]

    def mutateRows(self, _: Any) -> None:  # noqa: N802
        self.marks.append(None)
        self._delete(NOW_MS)

    def mutateRowsTs(self, arguments: Any) -> None:  # noqa: N802
        self.marks.append(arguments.timestamp)
        self._delete(arguments.timestamp)

    def scannerOpenWithScan(self, arguments: Any) -> int:  # noqa: N802
        self.scans.append(arguments.scan)
        return len(self.scans)

    def scannerGetList(self, arguments: Any) -> list[Any]:  # noqa: N802
        if self.scans[arguments.id - 1].startRow >= b"\x01":
            return []
        first = self.given[arguments.id]
        self.given[arguments.id] += (number := min(arguments.nbRows, self.length))
        return [self.row(b"\x00%d" % at if at < 10 else b"\x009%06d" % at) for at in range(first, first + number)]

    def scannerClose(self, _: Any) -> None:  # noqa: N802
        """Close the scanner."""

    def _delete(self, timestamp_ms: int) -> None:
        if self.timestamp_ms <= timestamp_ms:
            self.value = None


@contextmanager
def rows_of(conduct: Callable[[Request], None]) -> Iterator[HBaseRows]:
    clock = ManualClock(NOW_MS)
    with FakeThrift(conduct) as server, closing(HBasePool([server.address], clock=clock)) as pool:
        yield HBaseRows(pool, b"ns:t", clock)


@pytest.mark.parametrize(
    ("before", "after", "puts"),
    [
        (set(), set(), 1),
        ({"checkAndPut"}, set(), 2),
        (set(), {"checkAndPut"}, 2),
        ({"getRowsWithColumns"}, {"checkAndPut"}, 3),
    ],
    ids=["no cut", "cut before", "cut after", "cut twice"],
)
def test_replace_with_lost_response_reads_the_cell(before: set[str], after: set[str], puts: int) -> None:
    table = OneRowTable(OLD)
    table.cut_before, table.cut_after = set(before), set(after)
    with rows_of(table) as rows:
        assert rows.replace(COLUMN, [(b"\x00row", OLD, NEW)]) == [True]
    assert (table.value, table.seen["checkAndPut"]) == (NEW, puts)


@pytest.mark.parametrize("value", [None, b"\x00" * 8])
def test_replace_of_deleted_or_changed_row_fails(value: bytes | None) -> None:
    table = OneRowTable(value)
    table.cut_before = {"checkAndPut"}
    with rows_of(table) as rows:
        assert rows.replace(COLUMN, [(b"\x00row", OLD, NEW)]) == [False]
    assert table.value == value


@pytest.mark.parametrize(
    ("newest_ms", "marks", "looked"),
    [
        (NOW_MS - CLOCKS_MS - 1, [None], 0),
        (NOW_MS - CLOCKS_MS, [NOW_MS], 0),
        (NOW_MS, [NOW_MS], 0),
        (NOW_MS + 1, [NOW_MS + 1], 1),
        (None, [None], 1),
    ],
    ids=["old", "new", "now", "ahead", "unknown"],
)
def test_delete_reads_rows_only_if_cells_may_be_new(
    newest_ms: int | None, marks: list[int | None], looked: int
) -> None:
    table = OneRowTable(OLD, newest_ms or NOW_MS)
    with rows_of(table) as rows:
        rows.delete([b"\x00row"], newest_ms)
    assert (table.value, table.marks, table.seen["getRowsWithColumns"]) == (None, marks, looked)


def test_delete_of_cell_with_future_timestamp_is_repeated() -> None:
    table = OneRowTable(OLD, NOW_MS + 3_600_000)
    with rows_of(table) as rows:
        rows.delete([b"\x00row"], None)
        assert rows.ahead_ms == 3_600_000
    assert (table.value, table.marks) == (None, [None, NOW_MS + 3_600_000])


def test_delete_of_constantly_rewritten_row_fails() -> None:
    table = OneRowTable(OLD)

    def rewrite_row(request: Request) -> None:
        table.value = OLD
        table(request)

    with rows_of(rewrite_row) as rows, pytest.raises(StoreError, match=r"^1 .*ns:t .*00726f77"):
        rows.delete([b"\x00row"], None)


def test_empty_delete_and_empty_range_make_no_call() -> None:
    table = OneRowTable(OLD)
    with rows_of(table) as rows:
        rows.delete([], None)
        assert rows.fetch(b"b", b"a", 10, KEYS).ended
    assert table.seen == {}


def test_page_read_closes_its_scanner_and_bypasses_the_cache() -> None:
    table = OneRowTable(OLD)
    with rows_of(table) as rows:
        assert [len(rows.fetch(b"\x00", b"\x01", 30, query).rows) for query in (KEYS, POINTERS, ROWS)] == [30, 30, 30]
    assert [scan.cacheBlocks for scan in table.scans] == [False, False, False]
    assert table.seen["scannerClose"] == 3


def test_fetch_of_keys_takes_two_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    trips = record_calls(monkeypatch, ThriftConnection, "calls")
    with rows_of(OneRowTable(OLD)) as rows:
        rows.fetch(b"\x00", b"\x01", 30, KEYS)
    names = [[name for name, _ in calls] for _, calls in trips]
    assert names == [["scannerOpenWithScan"], ["scannerGetList", "scannerClose"]]


@given(st.binary(max_size=20), st.lists(st.binary(max_size=80), max_size=9), st.none() | st.integers(0, 2**63 - 1))
def test_encode_deletions_matches_thriftpy2(table: bytes, rows: list[bytes], timestamp_ms: int | None) -> None:
    changes = [HBASE.BatchMutation(row, [HBASE.Mutation(isDelete=True, column=FAMILY)]) for row in rows]
    given = {"tableName": table, "rowBatches": changes, "attributes": {}}
    if timestamp_ms is None:
        arguments = HBASE.Hbase.mutateRows_args(**given)
    else:
        arguments = HBASE.Hbase.mutateRowsTs_args(**given, timestamp=timestamp_ms)
    buffer = TCyMemoryBuffer()
    TCyBinaryProtocol(buffer).write_struct(arguments)
    buffer.flush()
    assert encode_deletions(table, rows, timestamp_ms) == buffer.getvalue()


def test_read_over_broken_connection_restarts_the_page() -> None:
    table = OneRowTable(OLD)
    table.cut_after = {"scannerGetList"}
    with rows_of(table) as rows:
        assert len(rows.fetch(b"\x00", b"\x01", 30, KEYS).rows) == 30
    assert [scan.startRow for scan in table.scans] == [b"\x00", b"\x00"]


def test_read_of_large_rows_stops_at_the_page_size() -> None:
    with rows_of(OneRowTable(bytes(PAGE_BYTES // 64))) as rows:
        fetched = rows.fetch(b"\x00", b"\x01", 1000, ROWS)
    assert (len(fetched.rows), fetched.ended) == (64, False)


def delete_by(salts: Salts, keys: list[bytes], *pages: Page[SaltedRows]) -> None:
    salts.delete(keys, Origin.merge([page.origin for page in pages]))


def test_delete_with_origin_of_old_rows_reads_no_row() -> None:
    table = OneRowTable(OLD, NOW_MS - CLOCKS_MS - 1)
    with rows_of(table) as rows:
        salts = OneSalt(rows, 0, None)
        delete_by(salts, [b"0", b"4"], salts.page(b"0", b"7", 3, KEYS), salts.page(b"0", b"7", 5, KEYS))
    assert table.seen["getRowsWithColumns"] == 0


def test_delete_without_origin_reads_the_rows() -> None:
    table = OneRowTable(OLD, NOW_MS - CLOCKS_MS - 1)
    with rows_of(table) as rows:
        salts = OneSalt(rows, 0, None)
        delete_by(salts, [b"0"])
        table.value = OLD
        salts.delete([b"1"], Origin.merge([salts.page(b"0", b"7", 3, KEYS).origin, None]))
    assert table.seen["getRowsWithColumns"] == 2


def test_delete_under_all_salts_of_key_outside_the_page_reads_it() -> None:
    table = OneRowTable(OLD, NOW_MS - CLOCKS_MS - 1)
    table.length = 3
    with rows_of(table) as rows, ThreadPoolExecutor(1) as threads:
        salts = AllSalts(rows, 1, threads)
        page = salts.page(b"0", b"7", 5, KEYS)
        delete_by(salts, page.items.keys, page)
        assert table.seen["getRowsWithColumns"] == 0
        table.value = OLD
        delete_by(salts, [*page.items.keys, b"4"], page)
    assert table.seen["getRowsWithColumns"] == 1


def test_identity_of_old_server_is_the_namespace_timestamp() -> None:
    def old(request: Request) -> None:
        if request.name == "getClusterId":
            request.send(request.unserved(1, "Invalid method name: 'getClusterId'"))
        elif request.row == b"cdap_system":
            assert request.arguments.tableName == b"hbase:namespace"
            request.reply([OneRowTable(b"", 1_234_567).row(b"cdap_system")])
        else:
            request.reply([])

    with FakeThrift(old) as server:
        with HBaseStore(HBaseSettings(thrift=(server.address,))) as store:
            assert store.identity() == "hbase:since-1234567:cdap_system"
        with HBaseStore(HBaseSettings(thrift=(server.address,), namespace="other")) as store:
            assert store.identity() == "hbase:unknown:other"


def scan(rows: list[Any], start: bytes = b"\x01", stop: bytes | None = b"\x03") -> None:
    def conduct(request: Request) -> None:
        request.reply({"scannerOpenWithScan": 1, "scannerGetList": rows, "scannerClose": None}[request.name])

    with rows_of(conduct) as found:
        found.fetch(start, stop, 100, ROWS)


def result(row: bytes | None, columns: Any = None, **cell: Any) -> Any:
    cells = {COLUMN: HBASE.TCell(**{"value": b"x", "timestamp": 1, **cell})} if columns is None else columns
    return HBASE.TRowResult(row=row, columns=cells)


@pytest.mark.parametrize(
    "keys", [[b"\x02", b"\x01"], [b"\x02", b"\x02"], [b"\x00"], [b""], [b"\x03"], [b"\x01", b"\x02", b"\x04"]]
)
def test_scan_with_rows_out_of_order_or_range_fails(keys: list[bytes]) -> None:
    with pytest.raises(StoreError, match="out of order or outside its range"):
        scan([result(key) for key in keys])


@pytest.mark.parametrize(
    "row", [result(None), HBASE.TRowResult(row=b"\x02"), result(b"\x02", value=None), result(b"\x02", timestamp=None)]
)
def test_scan_with_incomplete_response_fails(row: Any) -> None:
    with pytest.raises(StoreError, match="is incomplete"):
        scan([row])


@pytest.mark.parametrize("value", [b"\xff", b"0", b"257", b"9" * 5000, "²".encode(), b"-1"])
def test_invalid_bucket_attribute_is_rejected(value: bytes) -> None:
    descriptor = interface().TableDescriptor(attributes={BUCKETS_ATTRIBUTE.encode(): value}, families=[])

    def conduct(request: Request) -> None:
        request.reply({"tableExists": True, "getTableDescriptor": descriptor}[request.name])

    with FakeThrift(conduct, service="HbaseAdmin") as server:
        pool = HBasePool([server.address], clock=ManualClock(NOW_MS), service="HbaseAdmin")
        with closing(pool), pytest.raises(StoreError, match="1 to 256") as caught:
            buckets_of(pool, "n", "message")
    assert len(caught.value.message) < 400


def test_partial_write_with_large_cell_lowers_the_limit() -> None:
    salts = Mock(spec=Salts, rows=Mock(spec=HBaseRows))
    refused = TooLarge("A cell is too large.", "Send less.")
    salts.rows.put.side_effect = error = partial_write_error(refused)
    error.__cause__ = refused
    table = HBasePayloadTable(salts, Calls(), Mock(spec=Buckets), CellLimit(10 << 20))
    with pytest.raises(StoreError, match=r"^A part of the messages is written\. "):
        table.put([(b"a", b"x"), (b"b", b"x" * 5000)])
    with pytest.raises(TooLarge):
        table.check_sizes([b"x" * 5000])
    table.check_sizes([b"x" * 4999])
