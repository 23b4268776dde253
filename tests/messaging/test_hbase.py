"""The service over HBase, where a batch is no batch and rows lie under salts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import SECOND, Call, watch
from tests.hbase.conftest import hbase, hbase_tables
from tests.hbase.tables import PATIENCE_SECONDS, Tables
from tests.messaging.desk import Desk, named, reader
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import StoreError
from tms_core.rowkey import MessageId
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide

__all__ = ["hbase", "hbase_tables"]


@pytest.fixture
def desk(hbase_tables: Tables) -> Iterator[Desk]:
    # Servers compare cells by their own clocks, so ours shows about the same.
    clock = ManualClock(SystemClock().now_ms(), monotonic_ms=SECOND)
    namespace = hbase_tables.make()
    pool = HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
    made = Desk(hbase_tables.open(namespace), HBaseSide(pool, namespace), clock)
    made.create("orders")
    yield made
    made.close()


def test_given_messages_of_all_kinds_when_fetched_then_they_come_in_order_also_after_a_restart(desk: Desk) -> None:
    begun = desk.clock.now_ms() * 1_000_000
    desk.publish("orders", *[b"%d" % number for number in range(300)])
    desk.put("orders", begun, b"stored", b"payloads")
    desk.publish("orders", pointer=begun)
    desk.publish("orders", b"short", ttl=1)
    rolled = desk.publish("orders", b"rolled", b"back", pointer=begun + 1)
    desk.service.rollback(named("orders"), rolled)
    plain = [b"%d" % number for number in range(300)] + [b"stored", b"payloads", b"short", b"rolled", b"back"]
    assert desk.payloads() == plain
    desk.clock.step(-SECOND)
    desk.restart()
    desk.put("orders", begun, b"more")
    desk.publish("orders", b"last")
    assert desk.payloads() == [*plain[:302], b"more", *plain[302:], b"last"]
    visible = reader(read_pointer=begun + 2)
    assert desk.payloads(transaction=visible) == [*plain[:302], b"more", b"short", b"last"]
    desk.clock.advance(3 * SECOND)
    assert b"short" not in desk.payloads()
    ids = desk.ids()
    assert desk.payloads(start=MessageId(*ids[-4][:2]), inclusive=False, limit=1) == desk.payloads(
        start=ids[-3], limit=1
    )


def test_given_a_batch_that_hbase_wrote_in_part_when_answered_then_it_is_rolled_back(desk: Desk) -> None:
    begun = desk.clock.now_ms() * 1_000_000
    watch(desk.store, before=lambda call: _write_half(desk, call))
    with pytest.raises(StoreError):
        desk.publish("orders", b"a", b"b", b"c", pointer=begun)
    desk.publish("orders", b"d", pointer=begun)
    assert desk.payloads() == [b"a", b"b", b"d"]
    assert desk.payloads(transaction=reader(read_pointer=begun)) == [b"d"]


def _write_half(desk: Desk, call: Call) -> None:
    if call.name == "message.put" and len(call.arguments[0]) == 3:
        desk.store.message.put(call.arguments[0][:2])
        raise StoreError("The connection broke.")
