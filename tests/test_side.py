"""The side table on every kind of store, and the due times of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hbase.conftest import hbase, hbase_tables
from tests.hbase.server import PATIENCE_SECONDS
from tests.hbase.tables import Tables
from tests.support import raising
from tms_core.errors import StoreBusy, StoreError
from tms_core.rowkey import MessageKey, generation_prefix
from tms_core.tables.base import Page
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.leveldb.database import WritableDatabase
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.side import Expiries, Expiry, MemorySide, SideChange, SideTable
from tms_core.topic import TopicId

__all__ = ["hbase", "hbase_tables"]

TOPIC = TopicId("default", "orders")
NOW_MS = 1_700_000_000_000


def hbase_side(tables: Tables) -> SideTable:
    pool = HBasePool([tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
    return HBaseSide(pool, tables.make())


MAKERS: dict[str, Callable[[Path, pytest.FixtureRequest], SideTable]] = {
    "memory": lambda *_: MemorySide(),
    "leveldb": lambda folder, _: LevelDBSide(folder / "new" / "side"),
    "hbase": lambda _, request: hbase_side(request.getfixturevalue("hbase_tables")),
}


@pytest.fixture(params=sorted(MAKERS))
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SideTable]:
    with MAKERS[request.param](tmp_path, request) as made:
        yield made


def test_rows_are_read_in_order_and_in_pages(side: SideTable) -> None:
    side.put([(b"k%d" % number, b"%d" % number) for number in (3, 1, 2, 0)])
    side.put([(b"k1", b"one"), (b"other", b"value")])
    assert side.get(b"k1") == b"one"
    assert side.get(b"k") is None
    page = side.rows(b"k1", b"k3", 1)
    assert page.items == [(b"k1", b"one")]
    assert page.resume is not None
    assert side.rows(page.resume, b"k3", 5) == Page([(b"k2", b"2")], None)
    assert [key for key, _ in side.rows(b"", None, 10).items] == [b"k0", b"k1", b"k2", b"k3", b"other"]
    side.delete([b"k1", b"k3", b"none"])
    assert [key for key, _ in side.rows(b"", b"l", 10).items] == [b"k0", b"k2"]


def test_exchange_changes_rows_only_if_the_value_is_expected(side: SideTable) -> None:
    side.put([(b"claim", b"old")])
    assert side.exchange(b"base", None, b"1")
    assert not side.exchange(b"base", None, b"2", [(b"other", b"x")], [b"claim"])
    assert not side.exchange(b"base", b"0", b"2", [(b"other", b"x")], [b"claim"])
    assert [key for key, _ in side.rows(b"", None, 5).items] == [b"base", b"claim"]
    assert side.exchange(b"base", b"1", b"2", [(b"other", b"x"), (b"more", b"y")], [b"claim", b"none"])
    assert side.rows(b"", None, 5).items == [(b"base", b"2"), (b"more", b"y"), (b"other", b"x")]


def test_get_after_each_kind_of_change_returns_the_new_row(side: SideTable) -> None:
    assert [side.get(key) for key in (b"a", b"b", b"c")] == [None] * 3
    side.put([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    side.delete([b"b"])
    assert [side.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]
    change = SideChange(b"a", b"1", b"2", puts=[(b"b", b"2")], deletes=[b"c"])
    assert side.exchange_each([change, SideChange(b"d", b"x", b"2", puts=[(b"b", b"3")])]) == [True, False]
    assert [side.get(key) for key in (b"a", b"b", b"c", b"d")] == [b"2", b"2", None, None]


@pytest.mark.parametrize("read_at", ["before the write", "behind the write"])
def test_read_during_a_write_gives_the_new_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_at: str) -> None:
    with LevelDBSide(tmp_path) as side:
        side.put([(b"k", b"old")])
        get, change = WritableDatabase.get, WritableDatabase.change

        def read_between(database: WritableDatabase, key: bytes) -> bytes | None:
            found = get(database, key)
            monkeypatch.setattr(WritableDatabase, "get", get)
            side.put([(b"k", b"new")])
            return found

        def write_between(database: WritableDatabase, *rows: Any) -> None:
            monkeypatch.setattr(WritableDatabase, "change", change)
            assert side.get(b"k") == b"old"
            change(database, *rows)

        if read_at == "before the write":
            monkeypatch.setattr(WritableDatabase, "change", write_between)
            side.put([(b"k", b"new")])
        else:
            side.delete([b"k"])
            monkeypatch.setattr(WritableDatabase, "get", read_between)
            assert side.get(b"k") is None
        assert side.get(b"k") == b"new"


def test_read_after_a_failed_write_asks_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LevelDBSide(tmp_path) as side:
        side.put([(b"k", b"old")])
        with monkeypatch.context() as patched:
            patched.setattr(WritableDatabase, "change", raising(StoreError("the disk is full")))
            with pytest.raises(StoreError):
                side.exchange(b"k", b"old", b"new")
        assert side.get(b"k") == b"old"


def test_leveldb_side_opened_again_has_its_rows(tmp_path: Path) -> None:
    with LevelDBSide(tmp_path) as side:
        side.put([(b"k", b"v")])
        with pytest.raises(StoreBusy):
            LevelDBSide(tmp_path)
    with LevelDBSide(tmp_path) as side:
        assert side.get(b"k") == b"v"


def test_leveldb_side_in_an_impossible_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        LevelDBSide(tmp_path / "file")


def test_hbase_side_opened_again_has_its_rows(hbase_tables: Tables) -> None:
    namespace = hbase_tables.make()
    for number in range(2):
        pool = HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
        with HBaseSide(pool, namespace) as side:
            assert side.get(b"k") == (b"v" if number else None)
            side.put([(b"k", b"v")])


def test_missing_side_table_in_hbase_is_not_created_by_a_read(hbase_tables: Tables) -> None:
    namespace = hbase_tables.make()
    pools = [HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS) for _ in range(2)]
    with HBaseSide(pools[0], namespace, create=False) as looking:
        expiries = Expiries(looking)
        assert list(expiries.due_pages(NOW_MS, 10)) == [[]]
        expiries.delete([])
        assert f"{namespace}:tms.side".encode() not in pools[0].call("getTableNames")
        with HBaseSide(pools[1], namespace) as made:
            made.put([(b"k", b"v")])
        assert looking.get(b"k") == b"v"


def test_hbase_side_without_namespace_raises_with_the_create_command(hbase_tables: Tables) -> None:
    pool = HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
    with pytest.raises(StoreError, match=r"create 'nowhere:tms\.side'"):
        HBaseSide(pool, "nowhere")


# --- due messages ----------------------------------------------------------------------------------------------------


def message(sequence: int, generation: int = 1, publish_ms: int = NOW_MS) -> MessageKey:
    return MessageKey(TOPIC, generation, publish_ms, sequence)


def test_due_expiries_are_in_order_of_time(side: SideTable) -> None:
    expiries = Expiries(side)
    expiries.put([(message(1).pack(), NOW_MS + 20), (message(2).pack(), NOW_MS + 10)])
    expiries.put([(message(3, generation=2).pack(), NOW_MS + 30)])
    first, second = Expiry(*message(2), NOW_MS + 10), Expiry(*message(1), NOW_MS + 20)
    assert expiries.due(NOW_MS + 9, 10) == []
    assert expiries.due(NOW_MS + 10, 10) == [first]
    assert expiries.due(NOW_MS + 29, 10) == [first, second]
    assert expiries.due(NOW_MS + 29, 1) == [first]
    assert first.key == message(2).pack()


def test_expiry_of_a_message_is_known_until_it_is_forgotten(side: SideTable) -> None:
    expiries = Expiries(side)
    expiries.put([(message(number).pack(), NOW_MS + number) for number in range(3)])
    assert expiries.expires_ms(message(1).pack()) == NOW_MS + 1
    assert expiries.expires_ms(message(7).pack()) is None
    expiries.delete(expiries.due(NOW_MS + 1, 10))
    expiries.delete([Expiry(*message(7), NOW_MS)])
    assert expiries.expires_ms(message(1).pack()) is None
    assert expiries.due(NOW_MS + 100, 10) == [Expiry(*message(2), NOW_MS + 2)]


def test_expiries_of_a_range_come_in_order_of_keys(side: SideTable) -> None:
    expiries = Expiries(side)
    side.put([(b"n", b"not ours")])
    moments = [(message(number).pack(), NOW_MS + 10 - number) for number in range(5)]
    expiries.put(moments)
    assert expiries.between(message(1).pack(), message(4).pack(), 10) == Page(moments[1:4], None)
    page = expiries.between(message(1).pack(), message(4).pack(), 2)
    assert page.items == moments[1:3]
    assert page.resume is not None
    assert expiries.keys(page.resume, message(9).pack(), 10).items == [key for key, _ in moments[3:]]
    assert expiries.keys(generation_prefix(TOPIC.prefix, 1), None, 10).items == [key for key, _ in moments]


@pytest.mark.parametrize("at_once", [1, 2, 8192])
def test_expiries_of_many_keys_are_read_in_pages(
    side: SideTable, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("tms_core.tables.side._PAGE_ROWS", at_once)
    expiries = Expiries(side)
    moments = {message(number).pack(): NOW_MS + 10 - number for number in range(5)}
    expiries.put(moments.items())
    keys = list(moments)
    assert expiries.expiry_times(keys[1:4]) == {key: moments[key] for key in keys[1:4]}
    assert expiries.expiry_times([]) == {}


def test_interrupted_delete_of_expiries_is_finished(side: SideTable) -> None:
    expiries = Expiries(side)
    expiries.put([(message(1).pack(), NOW_MS)])
    [expiry] = expiries.due(NOW_MS, 10)
    deleted: list[bytes] = []
    delete = side.delete
    side.delete = deleted.extend  # type: ignore[method-assign, assignment]
    expiries.delete([expiry])
    delete(deleted[:1])
    side.delete = delete  # type: ignore[method-assign]
    assert expiries.due(NOW_MS, 10) == [expiry]
    expiries.delete([expiry])
    assert expiries.due(NOW_MS, 10) == []
