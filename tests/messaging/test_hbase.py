"""The service on HBase, where batches are not atomic and rows have salts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import SECOND, Call, watch
from tests.hbase.conftest import hbase, hbase_tables
from tests.hbase.server import PATIENCE_SECONDS
from tests.hbase.tables import Tables
from tests.kit.messaging import Kit, named, reader
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import StoreError
from tms_core.rowkey import MessageId
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide

__all__ = ["hbase", "hbase_tables"]


@pytest.fixture
def kit(hbase_tables: Tables) -> Iterator[Kit]:
    # Servers compare cells by their own clocks, so the clock of the test is close to them.
    clock = ManualClock(SystemClock().now_ms(), monotonic_ms=SECOND)
    namespace = hbase_tables.make()
    pool = HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
    made = Kit(hbase_tables.open(namespace), HBaseSide(pool, namespace), clock)
    made.create("orders")
    yield made
    made.close()


def test_fetch_on_hbase_gives_all_kinds_in_order_after_a_restart(kit: Kit) -> None:
    start_pointer = kit.clock.now_ms() * 1_000_000
    kit.publish("orders", *[b"%d" % number for number in range(300)])
    kit.put("orders", start_pointer, b"stored", b"payloads")
    kit.publish("orders", pointer=start_pointer)
    kit.publish("orders", b"short", ttl=1)
    rolled = kit.publish("orders", b"rolled", b"back", pointer=start_pointer + 1)
    kit.service.rollback(named("orders"), rolled)
    plain = [b"%d" % number for number in range(300)] + [b"stored", b"payloads", b"short", b"rolled", b"back"]
    assert kit.payloads() == plain
    kit.clock.step(-SECOND)
    kit.restart()
    kit.put("orders", start_pointer, b"more")
    kit.publish("orders", b"last")
    assert kit.payloads() == [*plain[:302], b"more", *plain[302:], b"last"]
    visible = reader(read_pointer=start_pointer + 2)
    assert kit.payloads(transaction=visible) == [*plain[:302], b"more", b"short", b"last"]
    kit.clock.advance(3 * SECOND)
    assert b"short" not in kit.payloads()
    ids = kit.ids()
    assert kit.payloads(start=MessageId(*ids[-4][:2]), inclusive=False, limit=1) == kit.payloads(start=ids[-3], limit=1)


def test_batch_written_in_part_by_hbase_is_rolled_back(kit: Kit) -> None:
    start_pointer = kit.clock.now_ms() * 1_000_000
    watch(kit.store, before=lambda call: _write_half(kit, call))
    with pytest.raises(StoreError):
        kit.publish("orders", b"a", b"b", b"c", pointer=start_pointer)
    kit.publish("orders", b"d", pointer=start_pointer)
    assert kit.payloads() == [b"a", b"b", b"d"]
    assert kit.payloads(transaction=reader(read_pointer=start_pointer)) == [b"d"]


def _write_half(kit: Kit, call: Call) -> None:
    if call.name == "message.put" and len(call.arguments[0]) == 3:
        kit.store.message.put(call.arguments[0][:2])
        raise StoreError("The connection broke.")
