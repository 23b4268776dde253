"""A read-only HBase: topics fail without a crash, strikes or a boundary (invariant S9)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from janitor.run.guards import STRIKES
from tests.builders import DAY, NOW_MS, janitor, pointer, topic
from tests.hbase.server import HBaseServer
from tests.hbase.sweep_kit import FilledStore, run_once
from tests.hbase.tables import Tables


@pytest.fixture
def read_only(hbase: HBaseServer, namespace: str) -> Iterator[Callable[[str, bool], None]]:
    def change(table: str, to: bool) -> None:
        hbase.command("set", f"{namespace}:{table}", "READONLY", str(to).lower())

    yield change
    for table in ("tms.message", "tms.payload"):
        change(table, False)


def test_read_only_table_adds_no_strike_to_a_topic(
    hbase_tables: Tables, namespace: str, read_only: Callable[[str, bool], None]
) -> None:
    with hbase_tables.open(namespace) as store:
        kit = janitor(store, workers=2)
        failing = topic(store, "default:failing", ttl_seconds=86_400).plain(NOW_MS - 2 * DAY, NOW_MS)
        working = topic(store, "default:working", ttl_seconds=3600)
        read_only("tms.message", True)
        for turn in range(STRIKES + 1):
            working.stored(pointer(NOW_MS - DAY), NOW_MS - DAY + turn)
            errors, _ = run_once(kit)
            assert len(errors) == 1
            assert re.search(r"topic default:failing: .*read only.*READONLY => 'false'", errors[0])
            assert (working.stored_times(), kit.state.boundary()) == ([], None)
            assert kit.state.strikes() == {}
            kit.clock.advance(60_000)
        read_only("tms.message", False)
        assert run_once(kit)[0] == []
        assert failing.times() == [NOW_MS]
        assert kit.state.strikes() == {}


def test_read_only_store_quarantines_no_topic(filled: FilledStore, read_only: Callable[[str, bool], None]) -> None:
    kit = filled.kit()
    for table in ("tms.message", "tms.payload"):
        read_only(table, True)
    for _ in range(STRIKES + 1):
        errors, report = run_once(kit)
        assert report is not None
        assert {error.partition(": ")[0] for error in errors} == {"topic default:orders", "topic default:retired"}
    assert (kit.state.strikes(), kit.state.boundary()) == ({}, None)
    for table in ("tms.message", "tms.payload"):
        read_only(table, False)
    filled.complete_sweep(kit)
