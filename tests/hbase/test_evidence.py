"""Evidence for a boundary on a real HBase: recorded by salt, independent of regions (S4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from janitor.cli.main import execute
from janitor.state.hbase.state import HBaseState
from tests.builders import DAY, HOUR, NOW_MS, Kit, janitor, pointer, save_snapshot, topic, visibility
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables, write_config
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.tables.base import KEYS, MessageTable, MessageValue, Page, Projection
from tms_core.tables.hbase.store import HBasePart, HBaseStore

INVALID = pointer(NOW_MS - 10 * HOUR)
TIMES = [NOW_MS - 9 * HOUR + number * number for number in range(80)]
SALTS = [(bytes([number]), bytes([number + 1])) for number in range(4)]
EVERYTHING = [(b"", b"\x00"), *SALTS, (b"\x04", None)]


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.make()


@pytest.fixture
def store(hbase_tables: Tables, namespace: str) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace) as opened:
        topic(opened, "default:orders", ttl_seconds=30 * 86400).tx(INVALID, *TIMES)
        yield opened


@pytest.fixture
def state(hbase: HBaseServer, namespace: str) -> Iterator[HBaseState]:
    with HBaseState(hbase.settings(namespace, admin=True)) as opened:
        yield opened


def adopted_kit(store: HBaseStore, state: HBaseState) -> Kit:
    return janitor(store, state=state, workers=4, batch_rows=10, invalid=[INVALID]).adopt()


def spans(state: HBaseState) -> list[tuple[bytes, bytes | None]]:
    return [(item.start, item.stop) for item in state.evidence()]


def test_next_run_reads_only_the_failed_salt(
    store: HBaseStore, state: HBaseState, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = adopted_kit(store, state)
    failing, read = {2}, dict.fromkeys(range(4), 0)
    initialize = HBasePart.__init__

    def watched(part: HBasePart, whole: HBaseStore, number: int, message: MessageTable, *rest: MessageTable) -> None:
        read_page = message.read

        def read_or_fail(want: Projection[Any], *arguments: Any) -> Page[Any]:
            if want.part == "cells" and number in failing:
                raise StoreUnavailable("the region is not served")
            page: Page[Any] = read_page(want, *arguments)
            if want.part == "cells":
                read[number] += page.rows_read
            return page

        monkeypatch.setattr(message, "read", read_or_fail)
        initialize(part, whole, number, message, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(HBasePart, "__init__", watched)
    report = kit.engine.run_once()
    assert (len(report.errors), report.boundary, state.boundary()) == (1, None, None)
    assert spans(state) == [each for each in EVERYTHING if each != SALTS[2]]
    assert "from 02 to 03 (salt 2)" in kit.engine.boundary()[1].obstacles[0]

    failing.clear()
    read.update(dict.fromkeys(read, 0))
    report = kit.run_after(HOUR)
    assert (report.errors, report.boundary, report.full) == ([], INVALID, True)
    assert [number for number, cells in read.items() if cells] == [2]
    assert {item.start: item.started_ms - NOW_MS for item in state.evidence() if item.start in {b"\x01", b"\x02"}} == {
        b"\x01": 0,
        b"\x02": HOUR,
    }
    assert kit.engine.verify().refuted == 0


def test_boundary_survives_region_split_and_merge(
    hbase: HBaseServer, hbase_tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = hbase_tables.make(cuts=[b"\x01", b"\x02", b"\x03"])
    table, settings = f"{namespace}:tms.message", hbase.settings(namespace, admin=True)
    transactions = {"directory": str(tmp_path), "source": "directory", "max_lifetime_seconds": 3600, "grace_seconds": 0}
    config = write_config(tmp_path / "janitor.yaml", settings, transactions=transactions)
    save_snapshot(tmp_path, visibility(NOW_MS, [INVALID]))
    with hbase_tables.open(namespace) as store, HBaseState(settings) as state:
        topic(store, "default:orders", ttl_seconds=30 * 86400).tx(INVALID, *TIMES)
        kit = adopted_kit(store, state)
        assert kit.engine.run_once().boundary == INVALID
        evidence = state.evidence()
        hbase.command("merge", table, "00")
        hbase.command("split", table, (b"\x03" + kit.engine.deps.store.metadata.rows()[0][0]).hex())
        assert (state.evidence(), kit.engine.boundary()[0]) == (evidence, state.boundary())

        state.replace_evidence(
            [replace(item, bound=INVALID - 7) if item.start == b"\x03" else item for item in state.evidence()]
        )
        [lowest, *_] = kit.engine.boundary()[1].limits
        assert (lowest.bound, lowest.start) == (INVALID - 7, b"\x03")
        reason = (
            f"invalid transaction {INVALID - 6} has a row that could not be inverted, in keys from 03 to 04 (salt 3)"
        )
        assert lowest.reason == reason
        assert lowest.region.startswith(f"{table},\\x03,")
        clock = ManualClock(NOW_MS + 1, monotonic_ms=DAY)
        assert execute(["boundary", "--explain", "--config", str(config)], clock) == 0
        assert re.search(rf"03 to 04 \(salt 3\) .*{re.escape(lowest.region)}", capsys.readouterr().out)


def test_verify_withdraws_boundary_after_positive_pointer(store: HBaseStore, state: HBaseState) -> None:
    kit = adopted_kit(store, state)
    assert kit.engine.run_once().boundary == INVALID
    assert (kit.engine.verify().cells, kit.engine.verify().refuted) == (len(TIMES), 0)
    proven, evidence = kit.state.boundary(), kit.state.evidence()
    for number, part in enumerate(store.parts(), start=1):
        key = part.message.read(KEYS, b"", None, 1).items[0]
        store.message.put([(key, MessageValue(INVALID, b"again"))])
        # A verify that refutes the boundary withdraws it, so it is published again before each verify.
        kit.state.replace_evidence(evidence)
        kit.state.save_boundary(proven)
        found = kit.engine.verify()
        assert (found.cells, found.refuted, len(found.sample_keys)) == (len(TIMES), number, number)
        assert kit.state.boundary() is None
