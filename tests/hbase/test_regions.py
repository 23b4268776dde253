"""A sweep works through whatever HBase does with its regions meanwhile, and through servers that come and go.

Each test causes one thing at chosen moments inside a sweep: between opening a scanner and reading it, before a batch is
deleted, before a pointer is inverted. Nothing live may be lost, nothing may be claimed by a run with errors, and what
is due must be gone after one more run at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import happybase
import pytest

from tests.builders import NOW_MS, Rig
from tests.hbase.moments import Moments
from tests.hbase.scene import DUE, LIVE, Scene, run
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.rowkey import MessageKey, salt
from tms_core.tables.hbase import HBaseStore
from tms_core.topic import TopicId

BUCKETS = 16
ORDERS = TopicId.parse("default:orders")


def row(publish_ms: int, byte: int) -> bytes:
    """Where rows of that time would lie under a salt."""
    return bytes([byte]) + MessageKey(ORDERS, 1, publish_ms, 0).pack()


def cuts(regions: int) -> list[bytes]:
    """Where regions begin, but for the first: 1, 16 or 64 of them."""
    salts = [bytes([byte]) for byte in range(1, BUCKETS)]
    if regions == 1:
        return []
    if regions == BUCKETS:
        return salts
    inner = [row(ms, byte) for byte in range(BUCKETS) for ms in (DUE[100], DUE[200], LIVE[60])]
    return sorted([*salts, *inner])


@pytest.fixture(scope="module", params=[1, 16, 64], ids=lambda regions: f"{regions} regions")
def namespace(request: pytest.FixtureRequest, hbase_tables: Tables) -> str:
    """Tables of so many regions."""
    return hbase_tables.make(buckets=BUCKETS, cuts=cuts(request.param))


@pytest.fixture
def store(hbase_tables: Tables, namespace: str) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace, buckets=BUCKETS) as opened:
        yield opened


def finish(scene: Scene, rig: Rig) -> None:
    """What holds after a disturbed run, and after one more."""
    scene.check_nothing_is_lost()
    report = run(rig)
    assert report is not None
    assert report.errors == []
    assert scene.due_is_gone
    scene.check_nothing_is_lost()


def test_it(hbase: HBaseServer, store: HBaseStore, namespace: str) -> None:
    table = f"{namespace}:tms.message"
    scene = Scene.on(store)
    rig = scene.rig()
    import time
    a=time.time()
    print(run(rig), store.pool.calls, time.time()-a)
    finish(scene, rig)
