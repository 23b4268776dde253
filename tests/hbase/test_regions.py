"""Sweeps during splits, merges and moves of regions, and restarts of servers.

Each test causes one kind of event before chosen calls of a sweep: between opening and reading a scanner, before a batch
is deleted, and before a pointer is inverted. No live row may be lost, no run with errors may prove a boundary, and the
next run must delete all expired rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import happybase
import pytest

from tests.hbase.server import HBaseServer
from tests.hbase.sweep_kit import EXPIRED, LIVE, FilledStore, run_once
from tests.hbase.tables import PatientStore, Tables, empty
from tests.hbase.thrift_calls import CallSchedule, OpenScanner, SleeplessClock, watch_calls
from tms_core.rowkey import MessageKey
from tms_core.tables.hbase.store import HBaseStore
from tms_core.topic import TopicId

BUCKETS = 16
ORDERS = TopicId.parse("default:orders")


def row(publish_ms: int, byte: int) -> bytes:
    """Return the row key of a time under a salt."""
    return bytes([byte]) + MessageKey(ORDERS, 1, publish_ms, 0).pack()


def cuts(regions: int) -> list[bytes]:
    """Return the start keys of 1, 16 or 64 regions, without the first."""
    salts = [bytes([byte]) for byte in range(1, BUCKETS)]
    if regions == 1:
        return []
    if regions == BUCKETS:
        return salts
    inner = [row(ms, byte) for byte in range(BUCKETS) for ms in (EXPIRED[100], EXPIRED[200], LIVE[60])]
    return sorted([*salts, *inner])


@pytest.fixture(scope="module", params=[1, 16, 64], ids=lambda regions: f"{regions} regions")
def namespace(request: pytest.FixtureRequest, hbase_tables: Tables) -> str:
    return hbase_tables.make(buckets=BUCKETS, cuts=cuts(request.param))


@pytest.fixture
def store(hbase_tables: Tables, namespace: str) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace, buckets=BUCKETS) as opened:
        empty(opened, namespace)
        yield opened


@pytest.fixture
def shared(hbase_tables: Tables) -> Iterator[tuple[FilledStore, str]]:
    namespace = hbase_tables.shared()
    with hbase_tables.open(namespace) as opened:
        yield FilledStore.fill(opened), namespace


@pytest.fixture(scope="module")
def second_server(hbase: HBaseServer) -> int:
    return int(hbase.command("start-server"))


def test_sweep_during_region_changes_misses_no_row(
    hbase: HBaseServer, store: HBaseStore, namespace: str, second_server: int
) -> None:
    message, payload = f"{namespace}:tms.message", f"{namespace}:tms.payload"
    filled = FilledStore.fill(store)
    kit, calls = filled.kit(), CallSchedule(store.pool)
    calls.before("scannerGetList", 30, lambda: hbase.command("split", message, row(EXPIRED[150], 3)))
    # HBase merges or splits the daughters of a split only after a compaction.
    calls.before("mutateRowsTs", 3, lambda: hbase.command("compact", message))
    calls.before("mutateRowsTs", 4, lambda: hbase.command("merge", message, row(EXPIRED[0], 3)))
    calls.before("mutateRowsTs", 8, lambda: hbase.command("compact", message))
    calls.before("mutateRowsTs", 9, lambda: hbase.command("split", message, row(EXPIRED[250], 9)))
    calls.before("checkAndPut", 10, lambda: hbase.command("move", message, row(LIVE[-1], 5), second_server))
    calls.before("checkAndPut", 50, lambda: hbase.command("cycle", message))
    calls.before("mutateRowsTs", 35, lambda: hbase.command("move", payload, row(EXPIRED[0], 7), 0))
    calls.before("mutateRowsTs", 38, lambda: hbase.command("cycle", payload))

    errors, report = run_once(kit)

    assert (errors, report is None) == ([], False)
    assert calls.all_made
    assert filled.is_swept
    filled.complete_sweep(kit)


def test_sweep_across_thrift_restarts_misses_no_row(hbase: HBaseServer, shared: tuple[FilledStore, str]) -> None:
    filled, namespace = shared
    port = hbase.command("start-thrift", "thrift", 0)

    def restart() -> None:
        hbase.command("stop-thrift", port)
        hbase.command("start-thrift", "thrift", port)

    # One connection, so that no other call uses up its retries during a restart.
    with PatientStore([f"{hbase.address.host}:{port}"], namespace=namespace, connections=1) as store:
        kit, calls = filled.kit(store, workers=1), CallSchedule(store.pool)
        calls.before("scannerGetList", 10, restart)
        calls.before("mutateRowsTs", 2, restart)
        calls.before("checkAndPut", 10, restart)
        errors, report = run_once(kit)
        assert (errors, report is None) == ([], False)
        assert calls.all_made
        filled.complete_sweep(kit)
    hbase.command("stop-thrift", port)


def test_expired_scanners_are_reopened(
    hbase: HBaseServer, shared: tuple[FilledStore, str], witness: happybase.Connection
) -> None:
    filled, namespace = shared
    with PatientStore([hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        kit, scanner, calls = filled.kit(store, workers=1), OpenScanner(store.pool), CallSchedule(store.pool)
        for number in (1, 2, 30, 31, 32, 200):
            calls.before("scannerGetList", number, lambda: witness.client.scannerClose(scanner.id))
        errors, report = run_once(kit)
        assert calls.all_made
        assert (errors, report is None) == ([], False)
        assert filled.is_swept
        filled.complete_sweep(kit)


def test_always_expiring_scanner_is_reported_as_error(
    hbase: HBaseServer, shared: tuple[FilledStore, str], witness: happybase.Connection
) -> None:
    filled, namespace = shared
    with PatientStore([hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        kit, scanner = filled.kit(store, workers=1), OpenScanner(store.pool)
        expiring = [b"\x01" + ORDERS.prefix]

        def expire(name: str, _arguments: tuple[Any, ...]) -> None:
            if name == "scannerGetList" and scanner.start.startswith(tuple(expiring)):
                witness.client.scannerClose(scanner.id)

        watch_calls(store.pool, before=expire)
        errors, report = run_once(kit)
        expiring.clear()
        assert report is not None
        assert [error for error in errors if hbase.thrift in error and "has closed a scanner" in error]
        filled.complete_sweep(kit)
