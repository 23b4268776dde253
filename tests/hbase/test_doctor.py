"""``janitor doctor`` on a real HBase: settings and regions of the tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables, write_config
from tms_core.rowkey import salt
from tms_core.tables.base import MessageValue

Doctor = Callable[..., dict[str, tuple[str, str]]]


@pytest.fixture
def run_doctor(hbase: HBaseServer, tmp_path: Path, doctor: Doctor) -> Doctor:
    def run(namespace: str, *, thrift2: bool = True) -> dict[str, tuple[str, str]]:
        return doctor(write_config(tmp_path / "janitor.yaml", hbase.settings(namespace, admin=thrift2)))

    return run


def test_doctor_with_usable_tables_reports_ok(hbase_tables: Tables, run_doctor: Doctor) -> None:
    found = run_doctor(hbase_tables.make(buckets=3))
    assert (found["tables"][0], found["regions"][0]) == ("ok", "ok")


def test_doctor_reports_read_only_table_and_missing_regions(hbase_tables: Tables, run_doctor: Doctor) -> None:
    namespace = hbase_tables.make(buckets=3, cuts=[b"\x01"])
    rows = [(b"k%04d" % number, MessageValue(None, b"x")) for number in range(100)]
    assert {salt(key, 3) for key, _ in rows} == {b"\x00", b"\x01", b"\x02"}
    with hbase_tables.open(namespace, buckets=3) as store:
        store.message.put(rows)
    hbase_tables.server.command("set", f"{namespace}:tms.message", "READONLY", "true")
    found = run_doctor(namespace)
    assert found["tables"][0] == found["regions"][0] == "warn"
    assert f"{namespace}:tms.message has READONLY true" in found["tables"][1]
    assert f"{namespace}:tms.message has no region that starts at x02" in found["regions"][1]
    # Without Thrift 2, the attributes are not checked, and the rows show the number of buckets.
    found = run_doctor(namespace, thrift2=False)
    assert (found["tables"][0], found["regions"][0]) == ("ok", "warn")
