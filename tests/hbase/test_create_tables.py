"""``tms admin create-tables``: tables that CDAP accepts as its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from janitor.state.hbase.state import HBaseState
from janitor.state.records import Pause
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tests.support import act_before
from tms_core.cli.main import execute
from tms_core.errors import StoreError, StoreNotFound
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.schema import (
    TableSpec,
    buckets_of,
    create_tables,
    janitor_table_spec,
    shell_script,
    table_specs,
)
from tms_core.tables.hbase.store import HBaseStore

READS = {"listNamespaces", "tableExists"}
NEVER_SPLIT = "org.apache.hadoop.hbase.regionserver.DisabledRegionSplitPolicy"


@pytest.fixture
def thrift2(hbase: HBaseServer) -> str:
    return hbase.require_thrift2()


@pytest.fixture
def admin(thrift2: str) -> Iterator[HBasePool]:
    with closing(HBasePool([thrift2], service="HbaseAdmin")) as pool:
        yield pool


def test_created_tables_have_cdap_attributes(
    hbase: HBaseServer, thrift2: str, admin: HBasePool, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["admin", "create-tables", "--thrift2", thrift2, "--namespace", "made_system", "--compression", "none"]
    assert execute(call) == 0
    names = [f"made_system:tms.{name}" for name in ("meta", "message", "payload", "janitor")]
    assert capsys.readouterr().out.splitlines() == [f"{name}: created" for name in names]
    for name in names[1:3]:
        described = hbase.command("describe", name)
        for attribute, value in {
            "cdap.messaging.table.prefix.num.bytes": "1",
            "cdap.messaging.key.distributor.buckets": "16",
            "cdap.messaging.metadata.hbase.namespace": "made_system",
            "dataset.table.prefix": "made",
            "SPLIT_POLICY": NEVER_SPLIT,
            "VERSIONS": "1",
            "BLOOMFILTER": "ROW",
            "COMPRESSION": "NONE",
            "NAME": "d",
        }.items():
            assert f"{attribute}' => '{value}'" in described or f"{attribute} => '{value}'" in described
        assert hbase.command("regions", name) == " ".join(["-", *(f"{salt:02x}" for salt in range(1, 16))])
    assert "dataset.table.prefix' => 'made'" in hbase.command("describe", names[0])
    for name in (names[0], names[3]):
        assert "buckets" not in hbase.command("describe", name)
        assert hbase.command("regions", name) == "-"
    assert buckets_of(admin, "made_system", "message") == 16

    with HBaseStore(hbase.settings("made_system", buckets=16)) as store:
        store.metadata.compare_and_set(b"a:b:", None, b"{}")
        assert execute(call) == 0
        assert capsys.readouterr().out.splitlines() == [f"{name}: exists" for name in names]
        assert store.metadata.rows() == [(b"a:b:", b"{}")]

    assert execute([*call, "--buckets", "8"]) == 1
    assert "made_system:tms.message exists with 16 buckets, not 8" in capsys.readouterr().err
    for name in names:
        hbase.command("drop", name)


def test_create_tables_creates_only_missing_tables(hbase_tables: Tables, admin: HBasePool) -> None:
    namespace = hbase_tables.make(buckets=2)
    hbase_tables.server.command("drop", f"{namespace}:tms.payload")
    assert create_tables(admin, table_specs(namespace, 2, "NONE")) == [f"{namespace}:tms.payload"]


def test_buckets_of_distinguishes_missing_attribute_from_missing_table(hbase_tables: Tables, admin: HBasePool) -> None:
    namespace = hbase_tables.shared()
    assert buckets_of(admin, namespace, "payload") == 4
    assert buckets_of(admin, namespace, "metadata") is None
    with pytest.raises(StoreNotFound):
        buckets_of(admin, "nowhere", "message")
    hbase_tables.server.command("set", f"{namespace}:tms.payload", "cdap.messaging.key.distributor.buckets", "many")
    with pytest.raises(StoreError, match="1 to 256"):
        buckets_of(admin, namespace, "payload")
    hbase_tables.server.command("set", f"{namespace}:tms.payload", "cdap.messaging.key.distributor.buckets", "4")


def test_create_tables_without_thrift_2_names_both_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["admin", "create-tables"]) == 2
    assert re.search("--thrift2 HOST:PORT.*--script", capsys.readouterr().err)


def test_create_tables_script_contains_the_same_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["admin", "create-tables", "--script", "--buckets", "3", "--compression", "gz"]) == 0
    script = capsys.readouterr().out
    # The script can be run again; with -n, the shell would stop at the first table that exists.
    assert "Run without -n" in script.splitlines()[0]
    assert execute(["admin", "create-tables", "--help"]) == 0
    assert "shell -n" not in capsys.readouterr().out
    assert script == shell_script([*table_specs("cdap_system", 3, "GZ"), janitor_table_spec("cdap_system")])
    family = "{NAME => 'd', VERSIONS => 1, BLOOMFILTER => 'ROW', COMPRESSION => 'GZ'}"
    assert script.splitlines()[1:] == [
        "create_namespace 'cdap_system'",
        f"create 'cdap_system:tms.meta', {family}, METADATA => {{'dataset.table.prefix' => 'cdap'}}",
        *(
            f"create 'cdap_system:tms.{name}', {family}, "
            "METADATA => {'dataset.table.prefix' => 'cdap', 'cdap.messaging.table.prefix.num.bytes' => '1', "
            "'cdap.messaging.key.distributor.buckets' => '3', "
            f"'cdap.messaging.metadata.hbase.namespace' => 'cdap_system', 'SPLIT_POLICY' => '{NEVER_SPLIT}'}}, "
            'SPLITS => ["\\x01", "\\x02"]'
            for name in ("message", "payload")
        ),
        "create 'cdap_system:tms.janitor', {NAME => 'd', VERSIONS => 1, BLOOMFILTER => 'ROW', COMPRESSION => 'NONE'}",
    ]


@pytest.mark.usefixtures("thrift2")
@pytest.mark.parametrize("by", ["Thrift 1", "Thrift 2"])
def test_state_table_has_same_attributes_by_any_creator(hbase: HBaseServer, hbase_tables: Tables, by: str) -> None:
    namespace = hbase_tables.make(buckets=1)
    with HBaseState(hbase.settings(namespace, admin=by == "Thrift 2")) as state:
        state.pause("default:*", 7)
    described = hbase.command("describe", f"{namespace}:tms.janitor")
    for setting in ("VERSIONS => '1'", "BLOOMFILTER => 'ROW'", "BLOCKCACHE => 'true'", "COMPRESSION => 'NONE'"):
        assert setting in described
    with HBaseState(hbase.settings(namespace)) as state:
        assert state.pauses() == [Pause("default:*", 7)]


def test_state_table_created_concurrently_is_usable(
    hbase: HBaseServer, hbase_tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = hbase_tables.make(buckets=1)
    act_before(monkeypatch, TableSpec, "families", lambda: HBaseState(hbase.settings(namespace)).close())
    with HBaseState(hbase.settings(namespace)) as state:
        assert state.pauses() == []


def test_create_tables_tolerates_concurrent_creation(admin: HBasePool, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = table_specs("twice_system", buckets=2, compression="NONE")
    create_tables(admin, specs)
    call, reads = admin.call, set()

    def find_nothing_first(name: str, *arguments: Any) -> Any:
        read = (name, *map(str, arguments))
        if name not in READS or read in reads:
            return call(name, *arguments)
        reads.add(read)
        return {"listNamespaces": [], "tableExists": False}[name]

    monkeypatch.setattr(admin, "call", find_nothing_first)
    assert create_tables(admin, specs) == []
    assert {name for name, *_ in reads} == READS


def test_create_tables_with_invalid_namespace_reports_hbase_error(admin: HBasePool) -> None:
    with pytest.raises(StoreError, match="createNamespace"):
        create_tables(admin, table_specs("no such/name", buckets=2, compression="NONE"))
