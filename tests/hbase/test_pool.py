"""The pool with a real Thrift server that is killed, suspended and restarted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hbase.server import PATIENCE_SECONDS, HBaseServer, ServerFailed, ThriftProcess
from tests.hbase.sweep_kit import SHORT_SECONDS
from tests.hbase.tables import PatientStore, Tables
from tests.support import require_or_skip
from tms_core.clock import ManualClock
from tms_core.errors import StoreError, StoreNotFound
from tms_core.rowkey import salt
from tms_core.tables.base import CELLS, KEYS, MessageValue
from tms_core.tables.hbase.pool import IDLE_MS, HBasePool
from tms_core.tables.hbase.thrift import NotServed, ScannerLost, ThriftTimeout, interface

POINTER = 1_500_000_000_000_000_007
ROW_KEYS = [b"k%04d" % number for number in range(300)]


@pytest.fixture
def thrift(hbase: HBaseServer) -> Iterator[ThriftProcess]:
    try:
        process = ThriftProcess(hbase)
    except ServerFailed as error:
        require_or_skip(str(error))
    with process:
        yield process


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    namespace = hbase_tables.shared()
    with hbase_tables.open(namespace) as store:
        store.message.put([(key, MessageValue(POINTER, b"x")) for key in ROW_KEYS])
    return namespace


def test_read_across_thrift_restarts_returns_every_page(thrift: ThriftProcess, namespace: str) -> None:
    with PatientStore([thrift.address], namespace=namespace, buckets=4) as store:
        found: list[bytes] = []
        resume: bytes | None = b""
        while resume is not None:
            page = store.message.read(KEYS, resume, None, 150)
            found += page.items
            resume = page.resume
            thrift.kill()
            thrift.start()
        assert found == ROW_KEYS


def test_pool_switches_to_another_server_after_a_kill(
    hbase: HBaseServer, thrift: ThriftProcess, namespace: str
) -> None:
    with PatientStore([thrift.address, hbase.thrift], namespace=namespace, buckets=4) as store:
        cells = store.message.read(CELLS, b"", None, 1000).items
        thrift.kill()
        assert store.message.invert(cells) == [True] * len(ROW_KEYS)
        store.message.delete(ROW_KEYS[:100])
        assert store.message.read(KEYS, b"", None, 1000).items == ROW_KEYS[100:]


def test_timed_out_connection_is_not_reused(thrift: ThriftProcess, namespace: str) -> None:
    clock = ManualClock(0)
    pool = HBasePool([thrift.address], timeout_seconds=PATIENCE_SECONDS, clock=clock)
    table = f"{namespace}:tms.message".encode()
    rows = [salt(key, 4) + key for key in ROW_KEYS[:6]]
    assert pool.call("getRow", table, rows[0], {})[0].row == rows[0]
    thrift.pause()
    # The next call opens a connection, which has the short time limit.
    clock.advance(IDLE_MS)
    pool.timeout_seconds = SHORT_SECONDS
    with pytest.raises(ThriftTimeout):
        pool.call("getRow", table, rows[1], {})
    pool.timeout_seconds = PATIENCE_SECONDS
    thrift.resume()
    # The server now responds with rows[1]; on a reused connection, the next call would receive this row.
    assert [pool.call("getRow", table, row, {})[0].row for row in rows[2:]] == rows[2:]
    pool.close()


def test_errors_of_hbase_become_store_errors(hbase: HBaseServer, namespace: str) -> None:
    pool = HBasePool([hbase.thrift], timeout_seconds=PATIENCE_SECONDS)
    table = f"{namespace}:tms.message".encode()
    with pytest.raises(StoreNotFound, match="TableNotFoundException: nowhere:t"):
        pool.call("getRow", b"nowhere:t", b"r", {})
    scan = interface().Scan(columns=[b"nix:q"])
    with pytest.raises(StoreNotFound, match="NoSuchColumnFamily"):
        pool.run(lambda one: one.call("scannerGetList", one.call("scannerOpenWithScan", table, scan, {}), 1))
    with pytest.raises(StoreError, match="Internal error processing getRow"):
        pool.call("getRow", table, b"", {})
    with pool.connection() as connection, pytest.raises(ScannerLost):
        connection.call("scannerGetList", 4711, 1)
    pool.close()


def test_wrong_thrift_service_names_the_setting(hbase: HBaseServer) -> None:
    pool = HBasePool([hbase.require_thrift2()], timeout_seconds=PATIENCE_SECONDS)
    with pytest.raises(NotServed, match=r"storage\.hbase\.thrift2"):
        pool.call("getTableNames")
    pool.close()
