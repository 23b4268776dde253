"""Commands on stores that CDAP's classes wrote, at the time of the stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.builders import DAY, NOW_MS
from tests.interop.conftest import Vector, unpack
from tests.janitor.cli.conftest import CommandKit
from tests.support import file_digests
from tms_core.clock import ManualClock

SETTINGS = """\
storage: {leveldb: {path: data/messaging}}
transactions: {source: directory, directory: data/tx.snapshot, snapshot_interval_seconds: 1000}
janitor: {state: data/janitor}
"""

#: The documented fields of a report and of its entries, and the reasons for keeping rows.
REPORT = {
    *("id", "mode", "started_ms", "effective_now_ms", "snapshot", "topics", "totals", "boundary", "guards", "errors"),
    *("store_calls", "duration_seconds", "phase_seconds", "full", "seeks_spared", "truncated", "deleted_bytes"),
    "messages",
    "store_bytes",
    *("topics_omitted", "held_before"),
}
ENTRY = {
    *("tms_namespace", "topic", "generation", "table", "rule", "rows", "bytes", "oldest_ms"),
    *("newest_ms", "sample_keys", "held"),
}
KEPT = {"unknown_topic", "newer_generation", "unrecognized", "undecided", "referenced", "held"}


@pytest.fixture(params=["sample", "edge"])
def vector(request: pytest.FixtureRequest, tmp_path: Path) -> Vector:
    (tmp_path / "data").mkdir()
    return unpack(request.param, tmp_path / "data")


@pytest.fixture
def cdap(
    vector: Vector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandKit:
    """Return a folder with the sample store, as CDAP wrote it."""
    monkeypatch.chdir(tmp_path)
    kit = CommandKit(tmp_path, ManualClock(vector.now_ms, monotonic_ms=DAY), capsys)
    kit.set(SETTINGS)
    return kit


@pytest.mark.parametrize(
    "line",
    [
        "plan",
        "plan --at now+7d --out plan.json",
        "adopt",
        "boundary --explain",
        "verify",
        "doctor",
        "inspect message",
        "inspect payload",
        "inspect meta",
        "inspect snapshot",
    ],
)
def test_read_only_command_changes_no_byte_of_a_cdap_store(cdap: CommandKit, line: str) -> None:
    before = file_digests(cdap.store)
    assert before
    assert cdap.janitor(line).code == 0
    assert file_digests(cdap.store) == before
    assert list((cdap.folder / "data/janitor").glob("leveldb-clone-*")) == []


def test_plan_as_json_has_the_documented_fields(cdap: CommandKit) -> None:
    report = cdap.janitor("plan --format json").json
    assert set(report) == REPORT
    assert {frozenset(entry) for entry in report["topics"]} == {frozenset(ENTRY)}
    assert set(report["totals"]) == {"expired", "old_generation", "processed", "invalid_transaction", "kept"}
    assert set(report["totals"]["kept"]) == KEPT
    assert (report["mode"], report["effective_now_ms"]) == ("plan", NOW_MS)
    assert report["snapshot"] == {"timestamp_ms": NOW_MS - 1000, "source": f"snapshot.{NOW_MS - 1000}"}
    assert {entry["held"] for entry in report["topics"]} == {"first_contact"}


def test_plan_of_a_sample_store_has_the_counts_of_its_manifest(cdap: CommandKit, vector: Vector) -> None:
    expected = Counter(row["reason"] for row in vector.rows if row["table"] != "meta")
    totals = cdap.janitor("plan --format json").json["totals"]
    assert totals["expired"] == expected["expired"]
    assert totals["old_generation"] == expected["old_generation"] + expected["deleted_topic"]
    assert totals["invalid_transaction"] == expected["invalid_tx"]
    assert totals["kept"] == {reason: expected[reason] for reason in KEPT}


def test_apply_of_a_plan_of_a_cdap_store_leaves_nothing_to_do(cdap: CommandKit) -> None:
    planned = cdap.janitor("plan --out plan.json --format json").json
    applied = cdap.janitor("apply plan.json --adopt --format json").json
    assert set(applied) == REPORT
    assert applied["mode"] == "apply"
    assert applied["topics"] == [{**entry, "held": None} for entry in planned["topics"]]
    assert applied["totals"] == planned["totals"]
    assert cdap.janitor("plan --format json").json["topics"] == []


def test_run_leaves_table_files_with_the_names_that_cdap_opens(cdap: CommandKit) -> None:
    assert cdap.janitor("run --once --adopt").code == 0
    assert {path.suffix for path in cdap.store.glob("*/*.[ls][ds][bt]")} == {".sst"}
    assert sorted(path.name for path in cdap.store.iterdir()) == [
        "system.tms.message",
        "system.tms.meta",
        "system.tms.payload",
    ]


def test_inspect_of_a_cdap_store_shows_its_unrecognized_rows(cdap: CommandKit, vector: Vector) -> None:
    unrecognized = sorted(row["key"] for row in vector.table("message") if row["reason"] == "unrecognized")
    found = cdap.janitor("inspect message --limit 100000 --format json").json
    assert sorted(row["key"] for row in found["rows"] if row["kind"] == "unrecognized") == unrecognized
    assert found["counts"]["unrecognized"] == len(unrecognized) > 0
    [unnamed, *_] = [number for number, row in enumerate(found["rows"]) if row["topic"] is None]
    assert found["rows"][unnamed]["key"] in cdap.janitor(f"inspect message --limit {unnamed + 1}").out
