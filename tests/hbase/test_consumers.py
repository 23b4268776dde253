"""Consumers on a real HBase: a remote janitor reads their positions from a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from janitor.cli.main import execute
from tests.builders import DAY, HOUR, NOW_MS, topic
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import Tables, write_config
from tests.kit.messaging import fetch
from tms_core.clock import ManualClock
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.hbase.store import HBaseStore


def test_remote_janitor_holds_rows_for_a_consumer(
    hbase: HBaseServer, hbase_tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = hbase_tables.make()
    consumers = {"floor": True, "max_hold_seconds": 7200}
    sections = {"transactions": {"source": "none"}, "server": {"consumers": consumers}}
    config = write_config(tmp_path / "janitor.yaml", hbase.settings(namespace), **sections)
    clock = ManualClock(NOW_MS - 30 * HOUR, monotonic_ms=DAY)

    def sweep(*arguments: str) -> dict[str, int]:
        assert execute(["run", "--once", "--config", str(config), "--format", "json", *arguments], clock) == 0
        report = json.loads(capsys.readouterr().out)
        return {str(entry["held"]): entry["rows"] for entry in report["topics"]}

    with HBaseStore(hbase.settings(namespace, buckets=4)) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        # The table of consumers does not exist yet.
        assert sweep("--adopt") == {}
        pool = HBasePool([hbase.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
        with (
            HBaseSide(pool, namespace, clock) as side,
            MessagingService(store, clock, ServiceOptions(consumer_hold_seconds=7200), side=side) as service,
        ):
            service.publish(orders.id, [b"%d" % number for number in range(20)])
            ids = [MessageId.parse(message.id) for message in fetch(service, orders.id)]
            clock.advance(1000)
            service.publish(orders.id, [b"x"] * 10)
            service.consumers.put(orders.id, "billing", ids[-1])
            clock.advance(HOUR)
            shown = fetch(service, orders.id)
            assert sweep() == {"None": 20}
            clock.advance(HOUR)
            assert sweep() == {"consumer": 10}
            assert len(shown) == len(orders.times()) == 10
            [lag], _ = service.consumers.lags(orders.id)
            assert (lag.position.id, lag.messages, lag.expired) == (ids[-1], 10, False)
            clock.advance(HOUR + 1)
            assert sweep() == {"None": 10}
            assert orders.times() == []
