"""S13 on a real HBase: a restored snapshot is a first contact; HBase's own maintenance is not.

What is asserted of ``hbase:meta`` here is what ``docs/how-to/hbase.md`` says a restored table keeps.
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


class Scene(NamedTuple):
    server: HBaseServer
    store: HBaseStore
    namespace: str
    table: str
    orders: Topic
    kit: Kit


@pytest.fixture
def scene(hbase: HBaseServer, hbase_tables: Tables) -> Iterator[Scene]:
    namespace = hbase_tables.make(buckets=2)
    table = f"{namespace}:tms.message"
    with hbase_tables.open(namespace, buckets=2) as store:
        orders = topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS - 2 * DAY).tx(OLD, NOW_MS)
        kit = janitor(store)
        kit.snapshots.invalid = [OLD]
        hbase.command("snapshot", table, f"{namespace}_before")
        assert not kit.engine.run_once(adopt=True).tripped
        assert orders.pointers() == [-OLD]
        yield Scene(hbase, store, namespace, table, orders, kit)


def meta(scene: Scene) -> dict[bytes, Any]:
    name = scene.table.encode()
    # hbase:meta has an order of its own, by table, first key and time, in which fetch would miss the order of bytes.
    with scene.store.pool.connection() as connection:
        found = connection.table(b"hbase:meta").scan(row_start=name, row_stop=name + b".", include_timestamp=True)
        return dict(found)


def regions(scene: Scene) -> set[bytes]:
    """The names of the message table's regions: first key, start code, and the digest of both."""
    return set(meta(scene)) - {scene.table.encode()}


def snapshot(scene: Scene) -> str:
    return f"{scene.namespace}_before"


def restored(scene: Scene) -> None:
    scene.server.command("restore", scene.table, snapshot(scene))


def dropped_and_cloned(scene: Scene) -> None:
    scene.server.command("drop", scene.table)
    scene.server.command("clone", scene.table, snapshot(scene))


@pytest.mark.parametrize("put_back", [restored, dropped_and_cloned])
def test_restored_snapshot_trips_guards(scene: Scene, put_back: Any) -> None:
    kit, orders, before = scene.kit, scene.orders, regions(scene)
    assert kit.state.boundary() is not None
    put_back(scene)
    assert regions(scene) == before
    assert orders.pointers() == [None, OLD]

    report = kit.engine.run_once(adopt=True)

    assert [note.guard for note in report.guards if note.tripped] == ["identity", "adoption"]
    assert orders.pointers() == [None, OLD]
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])
    kit.engine.adopt()
    assert not kit.engine.run_once().tripped
    assert orders.pointers() == [-OLD]


def test_recreated_table_trips_guards(scene: Scene) -> None:
    before = regions(scene)
    scene.server.command("drop", scene.table)
    admin = HBasePool([str(scene.server.thrift2)], connections=1, timeout_seconds=240, service="HbaseAdmin")
    with closing(admin):
        create_tables(
            admin, [spec for spec in table_specs(scene.namespace, 2, "NONE") if spec.full_name == scene.table]
        )
    assert regions(scene).isdisjoint(before)
    assert scene.kit.engine.run_once().tripped


def test_changed_regions_trip_no_guard(scene: Scene) -> None:
    server, table = scene.server, scene.table
    for command in (
        ("set", table, "NOTE", "1"),
        ("snapshot", table, snapshot(scene) + "_2"),
        ("flush", table),
        ("compact", table),
        ("cycle", table),
        ("merge", table, b"\x00"),
    ):
        server.command(*command)
        scene.orders.plain(NOW_MS - 2 * DAY)
        assert not scene.kit.engine.run_once().tripped, command
        assert scene.orders.pointers() == [-OLD]


def test_disabled_and_enabled_table_trips_guards(scene: Scene) -> None:
    scene.server.command("disable", scene.table)
    scene.server.command("enable", scene.table)
    report = scene.kit.engine.run_once()
    assert report.tripped
    assert "disabled" in " ".join(note.message for note in report.guards)
