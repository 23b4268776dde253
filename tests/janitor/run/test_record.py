"""Counters are sums of the runs' reports, and notes have the values of the last run (invariant S15)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.report import Report
from janitor.rules.policy import Rule
from janitor.run.plan_file import parse
from janitor.state.base import EVERYTHING, CounterKey
from janitor.state.figures import SNAPSHOT
from janitor.state.values import pack
from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    Call,
    Kit,
    ProcessKilled,
    Topic,
    adopted_janitor,
    fail_at,
    janitor,
    pointer,
    topic,
    unknown_topic,
    watch,
    watch_state,
)
from tests.support import raising
from tms_core.errors import GuardTripped, LeaseLost, StateError, StopRequested, StoreError
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore

TTL_SECONDS = 3600
NAMES = ("default:a", "default:b")


def counter(kit: Kit, name: str, **labels: str) -> float:
    """Return the sum of a counter's series with these labels."""
    found = kit.state.counters()
    return sum(value for key, value in found.items() if key.name == name and set(labels.items()) <= set(key.labels))


def overdue(kit: Kit) -> dict[tuple[str, str], int]:
    """Return the number of overdue rows by topic and reason."""
    items: list[dict[str, Any]] = kit.state.note("overdue") or []
    rows: Counter[tuple[str, str]] = Counter()
    for item in items:
        rows[f"{item['tms_namespace']}:{item['topic']}", item["held"] or ""] += item["rows"]
    return dict(rows)


def slow_deletes(kit: Kit, saved: list[float], killed_at: int | None = None) -> None:
    """Let each delete take a second; record the counter before each one, and kill the process at one of them."""

    def after(call: Call) -> None:
        if call.name == "message.delete":
            kit.clock.advance(1_000)

    def before(call: Call) -> None:
        if call.name == "message.delete":
            saved.append(counter(kit, "rows_deleted_total", table="message", rule="expired"))
            if len(saved) == killed_at:
                raise ProcessKilled

    watch(kit.store, before, after)


def test_record_of_a_long_run_updates_counters_during_it(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=TTL_SECONDS).plain(*range(10))
    kit = janitor(store, batch_rows=2)
    saved: list[float] = []
    slow_deletes(kit, saved)
    report = kit.engine.run_once(adopt=True)
    assert saved == [0, 2, 4, 6, 8]
    assert counter(kit, "rows_deleted_total") == report.totals.expired == 10
    assert counter(kit, "bytes_deleted_total") == sum(entry.bytes for entry in report.topics)


def test_counters_of_inversions_move_during_a_long_run(store: MemoryStore) -> None:
    invalid = pointer(NOW_MS - MINUTE)
    topic(store, "default:a", ttl_seconds=TTL_SECONDS).tx(invalid, *range(NOW_MS - MINUTE, NOW_MS - MINUTE + 6))
    kit = janitor(store, batch_rows=2, invalid=[invalid])
    saved: list[float] = []

    def before(call: Call) -> None:
        if call.name == "message.invert":
            saved.append(counter(kit, "rows_inverted_total"))
            kit.clock.advance(1_000)

    watch(store, before)
    kit.engine.run_once(adopt=True)
    assert (saved, counter(kit, "rows_inverted_total")) == ([0, 2, 4], 6)


def test_counters_after_a_kill_count_each_deleted_row_once(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=TTL_SECONDS).plain(*range(10))
    kit = janitor(store, batch_rows=2).adopt()
    saved: list[float] = []
    slow_deletes(kit, saved, killed_at=4)
    with pytest.raises(ProcessKilled):
        kit.engine.run_once()
    assert (saved[-1], counter(kit, "rows_deleted_total")) == (6, 6)
    kit.engine.recover()
    assert (counter(kit, "sweeps_total", result="lost"), counter(kit, "rows_deleted_total")) == (1, 6)
    kit.engine.run_once()
    assert counter(kit, "rows_deleted_total") == 10


def test_regained_lease_closes_the_run_of_a_dead_janitor(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=TTL_SECONDS).plain(*range(10))
    kit = janitor(store, batch_rows=2).adopt()
    lease, other = (Lease(kit.state, name, 60, kit.clock) for name in ("this one", "other"))
    lease.acquire()
    waiting, dying = kit.restart(lease=lease), kit.restart(lease=other)
    other.acquire(sole=True)
    with pytest.raises(LeaseLost):
        lease.check()
    slow_deletes(dying, [], killed_at=2)
    with pytest.raises(ProcessKilled):
        dying.engine.run_once()
    assert (waiting.engine.regain_lease(), len(kit.state.unfinished_runs())) == (False, 1)
    kit.clock.advance(HOUR)
    assert (waiting.engine.regain_lease(), kit.state.unfinished_runs()) == (True, [])
    assert (kit.state.runs(1)[0].result, counter(kit, "sweeps_total", result="lost")) == ("lost", 1)


def test_counters_that_cannot_be_saved_wait(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic(store, "default:a", ttl_seconds=TTL_SECONDS).plain(*range(10))
    kit = janitor(store, batch_rows=2)
    monkeypatch.setattr(kit.state, "save_running_counters", raising(StateError("the disk is full.")))
    saved: list[float] = []
    slow_deletes(kit, saved)
    assert kit.engine.run_once(adopt=True).errors == []
    assert (saved, counter(kit, "rows_deleted_total")) == ([0] * 5, 10)
    assert caplog.text.count("the disk is full.") == 1


def topic_of(kit: Kit, name: str) -> Topic:
    return unknown_topic(kit.store, name)


def approve(kit: Kit, name: str) -> None:
    with suppress(GuardTripped):
        kit.engine.approve((name,))


def publish_invalid(kit: Kit, name: str) -> None:
    invalid = pointer(kit.clock.now_ms())
    kit.snapshots.invalid = [*kit.snapshots.invalid, invalid]
    topic_of(kit, name).tx(invalid, kit.clock.now_ms())


#: Events of a topic between two runs.
EVENTS: dict[str, Callable[[Kit, str], object]] = {
    "publish": lambda kit, name: topic_of(kit, name).plain(*range(kit.clock.now_ms() - 3, kit.clock.now_ms())),
    "store": lambda kit, name: topic_of(kit, name).stored(pointer(kit.clock.now_ms()), kit.clock.now_ms()),
    "invalid": publish_invalid,
    "shorten": lambda kit, name: topic_of(kit, name).describe(ttl_seconds=60),
    "lengthen": lambda kit, name: topic_of(kit, name).describe(ttl_seconds=TTL_SECONDS),
    "pause": lambda kit, name: kit.state.pause(name, 0),
    "resume": lambda kit, name: kit.state.resume(name),
    "approve": approve,
    "wait": lambda kit, _: kit.clock.advance(30 * MINUTE),
    "wait long": lambda kit, _: kit.clock.advance(DAY),
    "step": lambda kit, _: kit.clock.step(HOUR),
    "approve all": lambda kit, _: kit.engine.approve((EVERYTHING,), clock=True),
    "no snapshot": lambda kit, _: setattr(kit.snapshots, "age_ms", DAY - kit.snapshots.age_ms),
}


@given(
    happenings=st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.sampled_from(NAMES)), max_size=12),
    patient=st.booleans(),
    fails_at=st.integers(0, 80),
)
@pytest.mark.no_cover
def test_counters_are_the_sums_of_the_reports(happenings: list[tuple[str, str]], patient: bool, fails_at: int) -> None:
    store = MemoryStore()
    for name in NAMES:
        topic(store, name, ttl_seconds=TTL_SECONDS).plain(1)
    kit = janitor(store, batch_rows=2)
    kit.snapshots.write_pointer = pointer(NOW_MS + 400 * DAY)
    calls = Counter[str]()

    def fail(call: Call) -> None:
        calls[call.name] += 1
        if calls.total() == fails_at and call.name.endswith(".delete"):
            raise StoreError("No space left on device.")

    watch(store, before=fail)
    reports = [kit.engine.run_once(adopt=True)]
    for happening, name in happenings:
        EVENTS[happening](kit, name)
        kit.clock.advance(1)
        reports.append(kit.engine.run_once(incremental=patient))
    expected = sums(reports)
    assert {key: value for key, value in kit.state.counters().items() if key.name in NAMED} == expected
    results = Counter(run.result for run in kit.state.runs(1000))
    assert {result: counter(kit, "sweeps_total", result=result) for result in results} == results
    assert counter(kit, "sweeps_total") == len(reports)
    assert counter(kit, "store_calls_total") == sum(report.store_calls for report in reports)


NAMED = frozenset({"rows_deleted_total", "bytes_deleted_total", "rows_inverted_total", "guard_trips_total"})


def sums(reports: list[Report]) -> dict[CounterKey, float]:
    """Return the counters computed from the JSON of reports, which the tested code does not use."""
    found: Counter[CounterKey] = Counter()
    for report in reports:
        document = pack(report)
        for item in document["topics"]:
            if item["held"] is not None:
                continue
            if item["rule"] == str(Rule.INVALID_TRANSACTION):
                found[CounterKey("rows_inverted_total")] += item["rows"]
                continue
            labels = (("table", item["table"]), ("rule", item["rule"]))
            found[CounterKey("rows_deleted_total", labels)] += item["rows"]
            found[CounterKey("bytes_deleted_total", labels)] += item["bytes"]
        for note in document["guards"]:
            found[CounterKey("guard_trips_total", (("guard", note["guard"]),))] += note["tripped"]
    return {key: float(amount) for key, amount in found.items() if amount}


def test_record_counts_a_failed_topic_by_table_and_reason(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(1)
    topic(store, "default:b", ttl_seconds=60).stored(pointer(1), 1)
    kit = janitor(store)
    watch(store, before=fail_at("payload.delete", StoreError("No space left on device.")))
    kit.engine.run_once(adopt=True)
    assert counter(kit, "delete_errors_total") == 1
    assert counter(kit, "delete_errors_total", table="payload", reason="store") == 1
    assert counter(kit, "sweeps_total", result="partial") == 1
    assert kit.state.note("success_ms") is None


def test_record_of_a_run_counts_phases_rows_and_store_calls(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(1, 2, NOW_MS).stored(pointer(1), 1)
    kit = janitor(store)
    for times in (1, 2):
        kit.engine.run_once(adopt=True)
        phases = {"message", "invert", "payload", "sync", "compact"}
        count = "sweep_phase_duration_seconds_count"
        assert {phase: counter(kit, count, phase=phase) for phase in phases} == dict.fromkeys(phases, times)
        assert counter(kit, count) == times * len(phases)
        assert counter(kit, "store_calls_total") == store.calls.total() - calls_outside(store)
    assert counter(kit, "rows_scanned_total", table="message") >= 2
    assert counter(kit, "rows_scanned_total", table="payload") == 1


def calls_outside(store: MemoryStore) -> int:
    """Return the number of store calls outside of runs: an adoption reads the metadata, and the test writes rows."""
    return store.calls["put"] + store.calls["set"] + 1 + 1


def success_ms(kit: Kit) -> int | None:
    note: dict[str, int] = kit.state.note("success_ms") or {}
    return note.get("message")


def test_record_of_unsuccessful_runs_keeps_the_last_success(store: MemoryStore) -> None:
    orders = topic(store, "default:a", ttl_seconds=60)
    kit = adopted_janitor(store)
    assert success_ms(kit) == NOW_MS
    kit.clock.advance(MINUTE)
    kit.restart(is_stopping=lambda: True).engine.run_once()
    kit.clock.step(HOUR)
    assert kit.engine.run_once().tripped
    kit.clock.step(-HOUR)
    kit.state.pause("default:a", 0)
    assert success_ms(kit) == NOW_MS
    kit.clock.advance(MINUTE)
    orders.plain(1)
    kit.engine.run_once()
    assert success_ms(kit) == NOW_MS + 2 * MINUTE, "a pause is intended"
    results = ("done", "interrupted", "blocked")
    assert [counter(kit, "sweeps_total", result=result) for result in results] == [2, 1, 1]


def hold_rows(kit: Kit) -> None:
    """Shorten a TTL, which holds two rows of a topic."""
    orders = topic(kit.store, "default:a", ttl_seconds=DAY)
    kit.engine.run_once(adopt=True)
    orders.plain(NOW_MS - HOUR, NOW_MS - HOUR).describe(ttl_seconds=60)
    kit.run_after(MINUTE)
    assert overdue(kit) == {("default:a", "frontier"): 2}
    assert counter(kit, "rows_deleted_total") == 0


@pytest.mark.parametrize(
    "run",
    [
        lambda kit: kit.engine.run_once(incremental=True),
        lambda kit: kit.engine.run_once(patterns=("default:other",)),
        lambda kit: kit.restart(is_stopping=lambda: True).engine.run_once(),
        lambda kit: kit.engine.run_once(),
    ],
    ids=["incremental", "other topics", "interrupted", "plain"],
)
def test_held_rows_stay_noted_by_runs_that_do_not_count(store: MemoryStore, run: Callable[[Kit], Report]) -> None:
    kit = janitor(store)
    topic(store, "default:other", ttl_seconds=60)
    hold_rows(kit)
    kit.clock.advance(MINUTE)
    report = run(kit)
    assert overdue(kit) == {("default:a", "frontier"): 2}
    [last] = kit.state.runs(1)
    # An interrupted run has read nothing.
    assert last.held == (0 if report.guards else 2), "the history shows a hold in each of its runs"


def test_held_rows_of_a_topic_that_fails_stay_noted(store: MemoryStore) -> None:
    kit = janitor(store)
    hold_rows(kit)
    of_topic = b"default:a:"
    error = StoreError("a block is damaged.")
    watch(store, before=fail_at("message.keys", error, lambda call: call.arguments[0].startswith(of_topic)))
    assert len(kit.run_after(MINUTE).errors) == 1
    assert overdue(kit) == {("default:a", "frontier"): 2}


def test_held_rows_stay_noted_after_a_plan_file_is_applied(store: MemoryStore) -> None:
    kit = janitor(store)
    hold_rows(kit)
    kept = kit.state.note("kept")
    kit.engine.apply(parse(kit.engine.plan().document, "the plan"))
    assert (overdue(kit), kit.state.note("kept")) == ({("default:a", "frontier"): 2}, kept)


def test_held_rows_of_a_topic_without_metadata_are_not_overdue(store: MemoryStore) -> None:
    kit = janitor(store)
    hold_rows(kit)
    topic(store, "default:a", ttl_seconds=60).write_metadata(b"{")
    kit.engine.run_once()
    assert overdue(kit) == {}


def test_full_pass_counts_kept_rows_and_protected_ones_are_not_overdue(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=60).at(2).plain(1)
    topic(store, "default:b", ttl_seconds=60).plain(1)
    kit = adopted_janitor(store, protect=("default:b",))
    assert overdue(kit) == {}
    kit.run_after(MINUTE)
    kept = kit.state.note("kept")
    assert (kept["held"], kept["newer_generation"]) == (1, 1)


def test_unusable_snapshot_is_counted_and_noted_until_one_is_used(store: MemoryStore) -> None:
    kit = janitor(store)
    kit.snapshots.age_ms, kit.snapshots.invalid, kit.snapshots.in_progress = DAY, [5, 6], [pointer(NOW_MS - DAY)]
    kit.engine.run_once(adopt=True)
    note = SNAPSHOT.read(kit.state)
    assert (note.timestamp_ms, note.problem, note.invalid, note.in_progress) == (NOW_MS - DAY, "stale", 2, 1)
    assert "more than twice" in note.message
    kit.snapshots.age_ms = 0
    kit.run_after(MINUTE)
    assert counter(kit, "snapshot_errors_total", reason="stale") == counter(kit, "snapshot_errors_total") == 1
    assert SNAPSHOT.read(kit.state).problem == ""


def test_paused_topic_is_counted_by_full_passes_and_remembered(store: MemoryStore) -> None:
    orders = topic(store, "default:a", ttl_seconds=60)
    kit = adopted_janitor(store)
    kit.state.pause("default:*", 0)
    orders.plain(NOW_MS)
    assert kit.run_after(DAY).full
    assert overdue(kit) == {("default:a", "paused"): 1}
    orders.plain(NOW_MS + 1)
    kit.run_after(MINUTE)
    assert overdue(kit) == {("default:a", "paused"): 1}
    kit.run_after(DAY)
    assert overdue(kit) == {("default:a", "paused"): 2}
    kit.state.resume("default:*")
    kit.engine.run_once()
    assert overdue(kit) == {}


def test_plan_in_a_stopping_process_raises(store: MemoryStore) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(1)
    kit = janitor(store, is_stopping=lambda: True)
    with pytest.raises(StopRequested):
        kit.engine.preview()


@pytest.mark.parametrize("mode", ["apply", "plan"])
def test_run_that_fails_during_its_preparation_is_recorded(mode: str) -> None:
    kit = adopted_janitor(MemoryStore())
    kit.clock.advance(MINUTE)
    watch_state(kit.state, before=fail_at("state.pauses", StateError("the disk is full")))
    with pytest.raises(StateError):
        kit.engine.run_once() if mode == "apply" else kit.engine.rehearse()
    failed = kit.state.runs(1)[0]
    assert (failed.mode, failed.result, failed.started_ms) == (mode, "failed", NOW_MS + MINUTE)
    assert failed.error == "the disk is full"


def test_plan_of_a_daemon_that_fails_is_a_failed_run(store: MemoryStore) -> None:
    kit = janitor(store)
    watch(store, before=fail_at("metadata.rows", StoreError("it cannot be read.")))
    with pytest.raises(StoreError):
        kit.engine.rehearse()
    [run] = kit.state.runs(5)
    assert (run.mode, run.result, run.error) == ("plan", "failed", "it cannot be read.")
    assert counter(kit, "sweeps_total", result="failed") == 1


def test_history_stays_while_the_clock_is_doubtful(store: MemoryStore) -> None:
    kit = adopted_janitor(store)
    kit.clock.step(365 * DAY)
    assert kit.engine.run_once().tripped
    assert [run.result for run in kit.state.runs(9)] == ["blocked", "done"]


def test_run_stopped_during_its_preparation_is_not_a_failure() -> None:
    kit = adopted_janitor(MemoryStore())
    watch_state(kit.state, before=fail_at("state.pauses", StopRequested("asked to stop")))
    with pytest.raises(StopRequested):
        kit.engine.run_once()
    assert [run.result for run in kit.state.runs(9)] == ["done"]
