"""``janitor advise`` on a real HBase: what is set, as the servers tell it, beside what should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from janitor.cli.main import execute
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tms_core.rowkey import salt
from tms_core.tables.base import MessageValue

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def namespace(hbase_tables: Tables) -> str:
    """A message table with a region too few, and settings of several kinds that cost."""
    namespace = hbase_tables.make(buckets=3, cuts=[b"\x01"])
    for name, value in (("hbase.hregion.majorcompaction", "3600000"), ("NORMALIZATION_ENABLED", "true")):
        hbase_tables.server.command("set", f"{namespace}:tms.message", name, value)
    return namespace


@pytest.fixture
def ask(hbase: HBaseServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Types the command and returns what it prints."""

    def asked(*options: str, thrift2: bool = True) -> str:
        servers = [str(hbase.thrift2)] if thrift2 else None
        reached = {"thrift": [hbase.thrift], "thrift2": servers, "namespace": namespace, "timeout_seconds": 240}
        config = tmp_path / "janitor.yaml"
        config.write_text(json.dumps({"storage": {"kind": "hbase", "hbase": reached}}), encoding="utf-8")
        assert execute(["advise", "--config", str(config), *options]) == 0
        return capsys.readouterr().out

    return asked


def settings(table: dict[str, Any]) -> dict[str, tuple[str | None, bool | None]]:
    return {advice["setting"]: (advice["now"], advice["fits"]) for advice in table["settings"]}


def test_given_tables_when_asked_then_all_settings_are_those_of_the_table(ask: Ask, namespace: str) -> None:
    message, payload = json.loads(ask("--format", "json"))["tables"]
    assert (message["table"], message["regions"], message["buckets"]) == (f"{namespace}:tms.message", 2, 3)
    assert message["complete"] is True
    assert settings(message) == {
        "hbase.hregion.majorcompaction": ("3600000", True),
        "hbase.regionserver.optionalcacheflushinterval": ("3600000", True),
        "SPLIT_POLICY": ("", False),
        "NORMALIZATION_ENABLED": ("true", False),
        "READONLY": ("false", True),
        "VERSIONS": ("1", True),
        "MIN_VERSIONS": ("0", True),
        "TTL": ("FOREVER", True),
        "KEEP_DELETED_CELLS": ("FALSE", True),
        "BLOOMFILTER": ("ROW", True),
        "BLOCKCACHE": ("true", True),
        "DATA_BLOCK_ENCODING": ("NONE", False),
        "COMPRESSION": ("NONE", False),
        "regions": ("2", False),
    }
    assert settings(payload)["hbase.hregion.majorcompaction"] == ("604800000", False)
    assert message["shell"][0] == f"split '{namespace}:tms.message', \"\\x02\""


def test_given_tables_when_asked_by_a_person_then_the_shells_lines_are_there_to_be_copied(
    ask: Ask,
) -> None:
    shown = ask()
    lines = [line.strip() for line in shown.partition("in the HBase shell:")[2].splitlines() if line]
    assert [line for table in json.loads(ask("--format", "json"))["tables"] for line in table["shell"]] == lines
    assert "SPLIT_POLICY                                   not set  DisabledRegionSplitPolicy" in shown
    assert shown.count("NORMALIZATION_ENABLED: ") == 1


def test_given_thrift_1_alone_when_asked_then_what_it_tells_is_judged_and_the_rest_is_not_known(
    ask: Ask, hbase_tables: Tables, namespace: str
) -> None:
    rows = [(b"k%04d" % number, MessageValue(None, b"x")) for number in range(100)]
    assert {salt(key, 3) for key, _ in rows} == {b"\x00", b"\x01", b"\x02"}
    with hbase_tables.open(namespace, buckets=3) as store:
        store.message.put(rows)
    message, payload = json.loads(ask("--format", "json", thrift2=False))["tables"]
    assert message["complete"] is False
    assert settings(message)["VERSIONS"] == ("1", True)
    assert settings(message)["COMPRESSION"] == ("NONE", False)
    assert settings(message)["KEEP_DELETED_CELLS"] == (None, None)
    # Rows tell how many buckets there are; the payload table has none.
    assert (message["buckets"], settings(message)["regions"]) == (3, ("2", False))
    assert (payload["buckets"], "regions" in settings(payload)) == (None, False)
    shown = ask(thrift2=False)
    assert "not known" in shown
    assert "set storage.hbase.thrift2" in shown.splitlines()[-1]
