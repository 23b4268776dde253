"""Bucket counts: no row is written under a salt that CDAP would not read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import happybase
import pytest

from janitor.app.hbase_place import HBasePlace
from janitor.cli.main import execute
from tests.builders import DAY, MINUTE, NOW_MS, topic
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables, write_config
from tms_core.cli.main import execute as tms
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import StoreError
from tms_core.rowkey import salt
from tms_core.tables.base import KEYS, MessageValue
from tms_core.tables.hbase.store import HBaseStore

BUCKETS = 16
ATTRIBUTE = "cdap.messaging.key.distributor.buckets"
ROW = MessageValue(None, b"x")
P = b"d:\x00\x00\x00p"
ROW_KEYS = [b"k%04d" % number for number in range(300)]


@pytest.fixture(scope="module")
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.make(buckets=BUCKETS)


@pytest.fixture
def message(witness: happybase.Connection, namespace: str) -> Iterator[happybase.Table]:
    table = witness.table(f"{namespace}:tms.message".encode())
    yield table
    for row, _ in table.scan():
        table.delete(row)


def open_store(hbase: HBaseServer, namespace: str, buckets: int, *, admin: bool = False) -> HBaseStore:
    return HBaseStore(hbase.settings(namespace, admin=admin, buckets=buckets))


def fill(table: happybase.Table, buckets: int = BUCKETS) -> None:
    with table.batch() as batch:
        for key in ROW_KEYS:
            batch.put(salt(key, buckets) + key, {P: b"x"})


def test_bucket_count_differing_from_table_attribute_is_rejected(
    hbase: HBaseServer, namespace: str, message: happybase.Table
) -> None:
    with open_store(hbase, namespace, 8, admin=True) as store:
        with pytest.raises(StoreError, match=rf"{namespace}:tms\.message .*16.* 8") as caught:
            store.check_buckets()
        assert "storage.hbase.buckets to 16" in caught.value.hint
        with pytest.raises(StoreError, match="16 buckets"):
            store.message.put([(b"k", ROW)])
    assert list(message.scan()) == []
    with open_store(hbase, namespace, BUCKETS, admin=True) as store:
        store.message.put([(b"k", ROW)])
        store.check_buckets()
    assert [row for row, _ in message.scan()] == [salt(b"k", BUCKETS) + b"k"]


@pytest.mark.parametrize("wrong", [1, 8, 10, 32, 48, 256])
def test_bucket_count_differing_from_rows_is_rejected_with_the_count(
    hbase: HBaseServer, namespace: str, message: happybase.Table, wrong: int
) -> None:
    fill(message)
    with open_store(hbase, namespace, wrong) as store:
        with pytest.raises(StoreError, match=f" {wrong} ") as caught:
            store.payload.put([(b"k", b"x")])
        assert "storage.hbase.buckets to 16" in caught.value.hint
    with open_store(hbase, namespace, BUCKETS) as store:
        store.check_buckets()


def test_bucket_count_undecided_by_rows_hints_at_the_attribute(
    hbase: HBaseServer, namespace: str, message: happybase.Table
) -> None:
    message.put(salt(b"k0001", BUCKETS) + b"k0001", {P: b"x"})
    assert salt(b"k0001", 7) != salt(b"k0001", BUCKETS)
    with open_store(hbase, namespace, 7) as store:
        with pytest.raises(StoreError, match="1 of 1 rows") as caught:
            store.check_buckets()
        assert ATTRIBUTE in caught.value.hint


def test_bucket_check_tolerates_few_stray_rows(hbase: HBaseServer, namespace: str, message: happybase.Table) -> None:
    fill(message)
    for number in range(10):
        message.put(b"\xff" + b"stray%d" % number, {P: b"x"})
    with open_store(hbase, namespace, BUCKETS, admin=True) as store:
        store.check_buckets()


def test_bucket_check_detects_rows_of_another_bucket_count(
    hbase: HBaseServer, namespace: str, message: happybase.Table
) -> None:
    fill(message, 8)
    with open_store(hbase, namespace, BUCKETS, admin=True) as store:
        with pytest.raises(StoreError, match="salt") as caught:
            store.check_buckets()
        assert "storage.hbase.buckets to 8" in caught.value.hint


def test_bucket_count_of_empty_tables_is_logged_once(
    hbase: HBaseServer, namespace: str, message: happybase.Table, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tms_core.tables.hbase.salts")
    with open_store(hbase, namespace, BUCKETS) as store:
        store.check_buckets()
        store.message.put([(b"k", ROW)])
        store.check_buckets()
    [record_text] = [record.getMessage() for record in caplog.records]
    assert re.search(rf"storage\.hbase\.buckets .*\b16\b.* {namespace} ", record_text)
    assert [row for row, _ in message.scan()] == [salt(b"k", BUCKETS) + b"k"]


def test_bucket_check_with_one_attribute_missing_uses_the_other_table(
    hbase: HBaseServer, namespace: str, message: happybase.Table
) -> None:
    fill(message)
    hbase.command("set", f"{namespace}:tms.message", ATTRIBUTE)
    try:
        with (
            open_store(hbase, namespace, 8, admin=True) as store,
            pytest.raises(StoreError, match=rf"{namespace}:tms\.payload .*\b16\b.* storage\.hbase\.buckets is 8"),
        ):
            store.check_buckets()
    finally:
        hbase.command("set", f"{namespace}:tms.message", ATTRIBUTE, "16")


def test_wrong_bucket_count_does_not_affect_deletes(
    hbase: HBaseServer, namespace: str, message: happybase.Table
) -> None:
    fill(message)
    with HBasePlace(hbase.settings(namespace, buckets=10), SystemClock()).writable() as store:
        parts = store.parts()
        assert sum(len(part.message.read(KEYS, b"", None, 1000).items) for part in parts) == len(ROW_KEYS)
        for part in parts:
            part.message.delete(part.message.read(KEYS, b"", None, 10).items)
        with pytest.raises(StoreError, match=" 10 "):
            store.message.put([(b"k", ROW)])


def test_restore_with_wrong_bucket_count_is_rejected(
    hbase: HBaseServer,
    hbase_tables: Tables,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespace = hbase_tables.make(buckets=4)
    archive = {"enabled": True, "path": str(tmp_path / "archive")}
    sections = {"transactions": {"source": "none"}, "janitor": {"archive": archive}}
    config = write_config(tmp_path / "janitor.yaml", hbase.settings(namespace), **sections)
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)

    def run(line: str) -> int:
        return execute([*line.split(), "--config", str(config)], clock)

    with hbase_tables.open(namespace, buckets=4) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(NOW_MS - DAY, NOW_MS - DAY + 50), *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 50))
        assert run("run --once --adopt") == 0
        assert run("pause default:orders") == 0
        before = orders.times()
        assert len(before) == 50

        monkeypatch.setenv("TMS_STORAGE__HBASE__BUCKETS", "7")
        assert run("archive restore default:orders") == 1
        assert "storage.hbase.buckets to 4." in capsys.readouterr().err
        assert orders.times() == before

        monkeypatch.setenv("TMS_STORAGE__HBASE__BUCKETS", "4")
        assert run("archive restore default:orders") == 0
        assert len(orders.times()) == 100
        assert store.wrong_salts == 0


def test_server_start_with_wrong_bucket_count_fails(
    hbase: HBaseServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"transactions": {"source": "none", "max_lifetime_seconds": 3600}, "server": {"port": 0}}
    config = write_config(tmp_path / "tms.yaml", hbase.settings(namespace, admin=True, buckets=8), **sections)
    assert tms(["serve", "--config", str(config)]) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "[TMS-STORE]" in error
    assert "storage.hbase.buckets to 16" in hint
