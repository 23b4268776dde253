"""S15: every count comes from the report, and no observer can stop a sweep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.state.base import CounterKey
from janitor.state.values import pack
from tests.builders import DAY, HOUR, NOW_MS, Call, Kit, Topic, janitor, pointer, topic, unknown_topic, watch
from tms_core.tables import compaction
from tms_core.tables.base import MessageValue, Store

INVALID = pointer(NOW_MS - 10 * HOUR)


@pytest.fixture
def case(store: Store) -> tuple[Kit, Topic]:
    orders = topic(store, "default:orders", ttl_seconds=86400, generation=3)
    orders.plain(NOW_MS - 2 * DAY, NOW_MS - 2 * DAY + 1, NOW_MS).tx(INVALID, NOW_MS)
    orders.stored(pointer(NOW_MS - 2 * DAY), NOW_MS - 2 * DAY).stored(INVALID, NOW_MS)
    orders.at(1).plain(NOW_MS).stored(pointer(NOW_MS), NOW_MS)
    orders.at(4).plain(NOW_MS)
    unknown_topic(store, "default:stray").plain(1)
    store.message.put([(b"no key of ours", MessageValue(None, b"x"))])
    kit = janitor(store, batch_rows=2, invalid=[INVALID])
    return kit, orders


def test_report_counts_match_the_store(case: tuple[Kit, Topic]) -> None:
    kit, _ = case
    done: Counter[str] = Counter()

    def count(call: Call) -> None:
        if call.name.endswith((".delete", ".invert")):
            done[call.name] += len(call.arguments[0])

    watch(kit.store, before=count)
    report = pack(kit.engine.run_once(adopt=True))
    rows = Counter[tuple[str, str]]()
    for item in report["topics"]:
        rows[item["table"], item["rule"]] += item["rows"]
    assert rows == {
        ("message", "expired"): 2,
        ("payload", "expired"): 1,
        ("message", "old_generation"): 1,
        ("payload", "old_generation"): 1,
        ("message", "invalid_transaction"): 1,
    }
    assert report["totals"]["expired"] == 3
    assert report["totals"]["old_generation"] == 2
    assert report["totals"]["invalid_transaction"] == 1
    assert report["totals"]["kept"] == {
        "unknown_topic": 1,
        "newer_generation": 1,
        "unrecognized": 1,
        "undecided": 0,
        "referenced": 0,
        "held": 0,
    }
    assert done == {"message.delete": 3, "payload.delete": 2, "message.invert": 1}


def test_sweep_report_equals_its_history_entry(case: tuple[Kit, Topic]) -> None:
    kit, _ = case
    report = kit.engine.run_once(adopt=True)
    [run] = kit.state.runs(10)
    assert (run.id, run.result) == (report.id, "done")
    assert kit.state.report(run.id, Report) == report
    assert {rule: getattr(run, rule) for rule in Rule} == {rule: report.total(rule) for rule in Rule}
    assert (run.held, run.deleted_bytes) == (report.held_rows(), report.deleted_bytes)


def test_plan_and_its_apply_report_the_same_rows(case: tuple[Kit, Topic], tmp_path: Path) -> None:
    kit, _ = case
    planned = pack(kit.engine.preview(out=tmp_path / "plan.json"))
    applied = pack(kit.engine.carry_out(tmp_path / "plan.json", adopt=True))
    assert applied["totals"] == planned["totals"]
    assert [{**item, "held": None} for item in planned["topics"]] == applied["topics"]


def test_report_has_the_number_of_store_calls(case: tuple[Kit, Topic]) -> None:
    kit, _ = case
    kit.engine.adopt()
    before = kit.store.calls.total()
    assert kit.engine.run_once().store_calls == kit.store.calls.total() - before


def test_counters_equal_the_sum_of_reports(case: tuple[Kit, Topic]) -> None:
    kit, orders = case
    reports = [kit.engine.run_once(adopt=True)]
    orders.plain(NOW_MS - 3 * DAY)
    reports.append(kit.engine.run_once())
    counters = kit.state.counters()
    for table, rule in (("message", "expired"), ("payload", "expired"), ("message", "old_generation")):
        rows = [
            entry.rows for report in reports for entry in report.topics if (entry.table, entry.rule) == (table, rule)
        ]
        assert counters[CounterKey("rows_deleted_total", (("table", table), ("rule", rule)))] == sum(rows) > 0
    assert counters[CounterKey("rows_inverted_total")] == 1
    assert counters[CounterKey("sweeps_total", (("result", "done"),))] == 2
    taken = sum(entry.rows or 0 for entry in kit.state.ledger(100))
    assert taken == sum(value for key, value in counters.items() if key.name == "rows_deleted_total") + 1


@pytest.mark.parametrize("phase", ["message", "invert", "payload", "references", "compact"])
def test_failing_observer_does_not_affect_the_sweep(
    case: tuple[Kit, Topic], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []

    def fail(phase_name: str, *_: object) -> None:
        phases.append(phase_name)
        if phase_name == phase:
            raise RuntimeError("the terminal is gone")

    monkeypatch.setattr(compaction, "WORTHWHILE_ROWS", 1)
    kit, orders = case
    # Its window crosses the cutoff, so that the sweep searches for a reference.
    orders.stored(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY - HOUR)
    report = kit.restart(observer=fail).engine.run_once(adopt=True)
    assert phases.index(phase) == len(phases) - 1, "a failed observer is not called again"
    assert report.errors == []
    assert orders.times() == [NOW_MS, NOW_MS]
    assert orders.pointers() == [None, -INVALID]
    assert orders.stored_times() == [NOW_MS]
    assert kit.state.runs(1)[0].result == "done"
