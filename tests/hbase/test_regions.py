"""Sweeps during splits, merges and moves of regions, and restarts of servers.

Each test causes one thing at chosen moments inside a sweep: between opening a scanner and reading it, before a batch is
deleted, before a pointer is inverted. Nothing live may be lost, nothing may be claimed by a run with errors, and what
is due must be gone after one more run at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import happybase
import pytest

from tests.hbase.moments import Moments, ScannerMoments, SleeplessClock, watch_calls
from tests.hbase.scene import DUE, LIVE, Scene, complaints, finish
from tests.hbase.server import HBaseServer
from tests.hbase.tables import PatientStore, Tables, empty
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
    inner = [row(ms, byte) for byte in range(BUCKETS) for ms in (DUE[100], DUE[200], LIVE[60])]
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
def shared(hbase_tables: Tables) -> Iterator[tuple[Scene, str]]:
    namespace = hbase_tables.shared()
    with hbase_tables.open(namespace) as opened:
        yield Scene.on(opened), namespace


@pytest.fixture(scope="module")
def second_server(hbase: HBaseServer) -> int:
    return int(hbase.command("start-server"))


def test_sweep_during_region_changes_misses_no_row(
    hbase: HBaseServer, store: HBaseStore, namespace: str, second_server: int
) -> None:
    message, payload = f"{namespace}:tms.message", f"{namespace}:tms.payload"
    scene = Scene.on(store)
    kit, moments = scene.kit(), Moments(store.pool)
    moments.at("scannerGetList", 30, lambda: hbase.command("split", message, row(DUE[150], 3)))
    # What has just been split can be merged or split again when it is compacted.
    moments.at("mutateRowsTs", 3, lambda: hbase.command("compact", message))
    moments.at("mutateRowsTs", 4, lambda: hbase.command("merge", message, row(DUE[0], 3)))
    moments.at("mutateRowsTs", 8, lambda: hbase.command("compact", message))
    moments.at("mutateRowsTs", 9, lambda: hbase.command("split", message, row(DUE[250], 9)))
    moments.at("checkAndPut", 10, lambda: hbase.command("move", message, row(LIVE[-1], 5), second_server))
    moments.at("checkAndPut", 50, lambda: hbase.command("cycle", message))
    moments.at("mutateRowsTs", 35, lambda: hbase.command("move", payload, row(DUE[0], 7), 0))
    moments.at("mutateRowsTs", 38, lambda: hbase.command("cycle", payload))

    errors, report = complaints(kit)

    assert (errors, report is None) == ([], False)
    assert moments.all_came
    assert scene.due_is_gone
    finish(scene, kit)


def test_sweep_across_thrift_restarts_misses_no_row(hbase: HBaseServer, shared: tuple[Scene, str]) -> None:
    there, namespace = shared
    port = hbase.command("start-thrift", "thrift", 0)

    def restart() -> None:
        hbase.command("stop-thrift", port)
        hbase.command("start-thrift", "thrift", port)

    # One connection, so that nobody's pauses run out while somebody else restarts the server.
    with PatientStore([f"{hbase.address.host}:{port}"], namespace=namespace, connections=1) as store:
        kit, moments = there.kit(store, workers=1), Moments(store.pool)
        moments.at("scannerGetList", 10, restart)
        moments.at("mutateRowsTs", 2, restart)
        moments.at("checkAndPut", 10, restart)
        errors, report = complaints(kit)
        assert (errors, report is None) == ([], False)
        assert moments.all_came
        finish(there, kit)
    hbase.command("stop-thrift", port)


def test_expired_scanners_are_reopened(
    hbase: HBaseServer, shared: tuple[Scene, str], witness: happybase.Connection
) -> None:
    there, namespace = shared
    with PatientStore([hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        kit, opened = there.kit(store, workers=1), ScannerMoments(store.pool)
        for number in (1, 2, 30, 31, 32, 200):
            opened.moments.at("scannerGetList", number, lambda: witness.client.scannerClose(opened.last))
        errors, report = complaints(kit)
        assert opened.moments.all_came
        assert (errors, report is None) == ([], False)
        assert there.due_is_gone
        finish(there, kit)


def test_always_expiring_scanner_is_reported_as_error(
    hbase: HBaseServer, shared: tuple[Scene, str], witness: happybase.Connection
) -> None:
    there, namespace = shared
    with PatientStore([hbase.thrift], namespace=namespace, clock=SleeplessClock()) as store:
        kit, opened = there.kit(store, workers=1), ScannerMoments(store.pool)
        doomed = [b"\x01" + ORDERS.prefix]

        def expire(name: str, _arguments: tuple[Any, ...]) -> None:
            if name == "scannerGetList" and opened.start.startswith(tuple(doomed)):
                witness.client.scannerClose(opened.last)

        watch_calls(store.pool, before=expire)
        errors, report = complaints(kit)
        doomed.clear()
        assert report is not None
        assert [error for error in errors if hbase.thrift in error and "has closed a scanner" in error]
        finish(there, kit)
