"""S13 on a real HBase: a restored snapshot is a first contact; maintenance by HBase is not.

The assertions about ``hbase:meta`` match the statements of ``docs/how-to/hbase.md`` about restored tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest

from tests.builders import DAY, HOUR, NOW_MS, Kit, Topic, janitor, pointer, topic
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.schema import create_tables, table_specs
from tms_core.tables.hbase.store import HBaseStore

OLD = pointer(NOW_MS - 10 * HOUR)


class SweptTable(NamedTuple):
    """A message table that a janitor has swept since a snapshot."""

    server: HBaseServer
    store: HBaseStore
    namespace: str
    table: str
    orders: Topic
    kit: Kit


@pytest.fixture
def swept(hbase: HBaseServer, hbase_tables: Tables) -> Iterator[SweptTable]:
    namespace = hbase_tables.make(buckets=2)
    table = f"{namespace}:tms.message"
    with hbase_tables.open(namespace, buckets=2) as store:
        orders = topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS - 2 * DAY).tx(OLD, NOW_MS)
        kit = janitor(store, invalid=[OLD])
        hbase.command("snapshot", table, f"{namespace}_before")
        assert not kit.engine.run_once(adopt=True).tripped
        assert orders.pointers() == [-OLD]
        yield SweptTable(hbase, store, namespace, table, orders, kit)


def meta(swept: SweptTable) -> dict[bytes, Any]:
    name = swept.table.encode()
    # hbase:meta is ordered by table, first key and time, not by bytes, so the reads of the store do not work here.
    with swept.store.pool.connection() as connection:
        found = connection.table(b"hbase:meta").scan(row_start=name, row_stop=name + b".", include_timestamp=True)
        return dict(found)


def regions(swept: SweptTable) -> set[bytes]:
    """Return the region names of the message table: first key, start code, and the digest of both."""
    return set(meta(swept)) - {swept.table.encode()}


def snapshot(swept: SweptTable) -> str:
    return f"{swept.namespace}_before"


def restore(swept: SweptTable) -> None:
    swept.server.command("restore", swept.table, snapshot(swept))


def drop_and_clone(swept: SweptTable) -> None:
    swept.server.command("drop", swept.table)
    swept.server.command("clone", swept.table, snapshot(swept))


@pytest.mark.parametrize("bring_back", [restore, drop_and_clone])
def test_restored_snapshot_trips_guards(swept: SweptTable, bring_back: Any) -> None:
    kit, orders, before = swept.kit, swept.orders, regions(swept)
    assert kit.state.boundary() is not None
    bring_back(swept)
    assert regions(swept) == before
    assert orders.pointers() == [None, OLD]

    report = kit.engine.run_once(adopt=True)

    assert [note.guard for note in report.guards if note.tripped] == ["identity", "adoption"]
    assert orders.pointers() == [None, OLD]
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    kit.engine.adopt()
    assert not kit.engine.run_once().tripped
    assert orders.pointers() == [-OLD]


def test_recreated_table_trips_guards(swept: SweptTable) -> None:
    before = regions(swept)
    swept.server.command("drop", swept.table)
    admin = HBasePool([str(swept.server.thrift2)], connections=1, timeout_seconds=240, service="HbaseAdmin")
    with closing(admin):
        create_tables(
            admin, [spec for spec in table_specs(swept.namespace, 2, "NONE") if spec.full_name == swept.table]
        )
    assert regions(swept).isdisjoint(before)
    assert swept.kit.engine.run_once().tripped


def test_changed_regions_trip_no_guard(swept: SweptTable) -> None:
    server, table = swept.server, swept.table
    for command in (
        ("set", table, "NOTE", "1"),
        ("snapshot", table, snapshot(swept) + "_2"),
        ("flush", table),
        ("compact", table),
        ("cycle", table),
        ("merge", table, b"\x00"),
    ):
        server.command(*command)
        swept.orders.plain(NOW_MS - 2 * DAY)
        assert not swept.kit.engine.run_once().tripped, command
        assert swept.orders.pointers() == [-OLD]


def test_disabled_and_enabled_table_trips_guards(swept: SweptTable) -> None:
    swept.server.command("disable", swept.table)
    swept.server.command("enable", swept.table)
    report = swept.kit.engine.run_once()
    assert report.tripped
    assert "disabled" in " ".join(note.message for note in report.guards)
