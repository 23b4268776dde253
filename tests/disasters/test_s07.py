"""S7: the clock rows are judged by is checked against clocks that nobody sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from janitor.report import Report
from janitor.state.base import EVERYTHING
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, SECOND, Kit, Topic, janitor, pointer, topic
from tms_core.errors import GuardTripped
from tms_core.tables.base import Store

ALLOWANCE_MS = LIFETIME.allowance_ms
INVALID = pointer(NOW_MS - 10 * HOUR)


def prepared(store: Store) -> tuple[Kit, Topic]:
    """A store whose first pass is done, with rows that come due in an hour."""
    orders = topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS - DAY + HOUR)
    rig = janitor(store)
    rig.engine.run_once(adopt=True)
    return rig, orders


def clock_notes(report: Report) -> list[bool]:
    return [note.tripped for note in report.guards if note.guard == "clock"]


@pytest.mark.parametrize(("ahead_ms", "blocked"), [(-1, False), (0, False), (1, True), (400 * DAY, True)])
def test_given_a_clock_ahead_of_monotonic_time_when_run_then_beyond_the_allowance_it_stops(
    store: Store, ahead_ms: int, blocked: bool
) -> None:
    rig, _ = prepared(store)
    rig.clock.advance(10 * MINUTE)
    rig.clock.step(ALLOWANCE_MS + ahead_ms)
    assert rig.engine.run_once().tripped == blocked


@pytest.mark.parametrize(("ahead_ms", "blocked"), [(-400 * DAY, False), (0, False), (1, True), (6 * DAY, True)])
def test_given_a_machine_whose_clock_is_ahead_of_the_cluster_s_when_run_there_then_beyond_the_allowance_it_stops(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, blocked: bool
) -> None:
    rig, orders = prepared(store)
    # Less than the days for which a machine may have been off.
    rig.clock.reboot("another machine")
    monkeypatch.setattr(rig.state, "clock_ms", lambda: rig.clock.now_ms() - ALLOWANCE_MS - ahead_ms)
    rig.clock.step(2 * HOUR)
    report = rig.engine.run_once()
    assert (report.tripped, orders.times() == []) == (blocked, not blocked)
    if blocked:
        with pytest.raises(GuardTripped):
            rig.engine.approve(("default:orders",))
        # An operator's word sets no other machine's clock.
        rig.engine.approve((EVERYTHING,), clock=True)
        assert rig.engine.run_once().tripped
        monkeypatch.setattr(rig.state, "clock_ms", rig.clock.now_ms)
        assert not rig.engine.run_once().tripped


def test_given_a_clock_that_jumped_when_run_then_nothing_is_written_and_everybody_is_told(store: Store) -> None:
    rig, orders = prepared(store)
    orders.tx(INVALID, NOW_MS - MINUTE)
    rig.snapshots.invalid = [INVALID]
    before = (rig.state.frontiers(), rig.state.anchor(), rig.state.claim(), rig.state.open_ids())
    rig.clock.step(10 * DAY)
    report = rig.engine.run_once()
    assert orders.times() == [NOW_MS - DAY + HOUR, NOW_MS - MINUTE]
    assert orders.pointers() == [None, INVALID]
    assert (rig.state.frontiers(), rig.state.anchor(), rig.state.claim(), rig.state.open_ids()) == before
    assert clock_notes(report) == [True]
    [run] = rig.state.runs(1)
    assert (run.result, run.blocked_by) == ("blocked", ("clock",))
    [guard] = rig.state.report(run.id)["guards"]
    assert (guard["guard"], guard["tripped"]) == ("clock", True)
    assert "janitor approve" in guard["message"]


def test_given_a_clock_that_jumped_when_run_again_and_again_then_it_stays_stopped(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.step(10 * DAY)
    for _ in range(3):
        assert rig.engine.run_once().tripped
        rig.clock.advance(HOUR)
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_given_a_clock_that_jumped_when_it_is_set_right_then_runs_go_on(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.step(10 * DAY)
    rig.engine.run_once()
    rig.clock.step(-10 * DAY)
    rig.clock.advance(HOUR + 1)
    assert not rig.engine.run_once().tripped
    assert orders.times() == []


def test_given_many_small_steps_when_run_between_them_then_they_do_not_add_up_unnoticed(store: Store) -> None:
    rig, _ = prepared(store)
    outcomes = []
    for _ in range(4):
        rig.clock.advance(MINUTE)
        rig.clock.step(ALLOWANCE_MS // 2)
        outcomes.append(rig.engine.run_once().tripped)
    assert outcomes == [False, False, True, True]


def test_given_a_clock_that_runs_behind_when_run_then_it_warns_and_deletes_less(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.advance(HOUR + 1)
    rig.clock.step(-ALLOWANCE_MS - 1)
    report = rig.engine.run_once()
    assert clock_notes(report) == [False]
    assert not report.tripped
    assert orders.times() == [NOW_MS - DAY + HOUR]
    [note] = [note for note in report.guards if note.guard == "clock"]
    assert "janitor approve --clock" in note.message
    rig.engine.approve(clock=True)
    assert clock_notes(rig.engine.run_once()) == []


def test_adopt_with_a_clock_behind_does_not_make_the_right_clock_a_jump(store: Store) -> None:
    rig, _ = prepared(store)
    rig.clock.step(-10 * DAY)
    rig.engine.adopt()
    assert clock_notes(rig.engine.run_once()) == [False], "it is behind as before"
    rig.clock.step(10 * DAY)
    assert clock_notes(rig.engine.run_once()) == []


def test_adopt_with_a_clock_ahead_accepts_it(store: Store) -> None:
    rig, _ = prepared(store)
    rig.clock.step(10 * DAY)
    assert rig.engine.run_once().tripped
    rig.engine.adopt()
    assert clock_notes(rig.engine.run_once()) == []


@pytest.mark.parametrize(("off_ms", "blocked"), [(HOUR, False), (7 * DAY, False), (7 * DAY + 1, True), (-DAY, False)])
def test_given_another_boot_when_run_then_wall_time_may_be_a_week_away_and_no_more(
    store: Store, off_ms: int, blocked: bool
) -> None:
    rig, _ = prepared(store)
    rig.snapshots.write_pointer = pointer(NOW_MS)
    rig.clock.step(off_ms)
    rig.clock.reboot("another")
    report = rig.engine.run_once()
    assert report.tripped == blocked
    assert clock_notes(report) == [True] * blocked


@pytest.mark.parametrize("behind_ms", [MINUTE, 30 * DAY, NOW_MS - 1])
def test_given_a_machine_that_boots_with_its_clock_in_the_past_when_it_is_set_then_that_is_no_jump(
    store: Store, behind_ms: int
) -> None:
    rig, orders = prepared(store)
    rig.snapshots.write_pointer = pointer(NOW_MS)
    rig.clock.step(-behind_ms)
    rig.clock.reboot("another")
    assert not rig.engine.run_once().tripped
    rig.clock.step(behind_ms)
    # Nobody knows how much of this hour and that jump was honest time, so what it makes due may be held, but no more.
    for _ in range(2):
        rig.clock.advance(HOUR + 1)
        report = rig.engine.run_once()
        assert (report.tripped, clock_notes(report)) == (False, [])
    assert orders.times() == []


@pytest.mark.parametrize(("off_ms", "blocked"), [(HOUR, False), (8 * DAY, True)])
def test_given_monotonic_time_that_went_back_when_run_then_it_is_taken_for_another_boot(
    store: Store, off_ms: int, blocked: bool
) -> None:
    rig, _ = prepared(store)
    rig.clock.step(off_ms)
    rig.clock.reboot(rig.clock.boot_id(), monotonic_ms=1)
    assert rig.engine.run_once().tripped == blocked


@pytest.mark.parametrize(("off_ms", "blocked"), [(DAY, False), (7 * DAY + SECOND, True)])
def test_given_a_system_without_boot_ids_when_the_clock_jumps_then_a_week_is_the_limit(
    store: Store, off_ms: int, blocked: bool
) -> None:
    rig, _ = prepared(store)
    rig.clock.reboot("")
    rig.engine.run_once()
    rig.clock.step(off_ms)
    assert rig.engine.run_once().tripped == blocked


def test_given_snapshots_and_rows_that_agree_with_a_jumped_clock_when_run_then_they_are_no_clock(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.step(DAY)
    orders.plain(rig.clock.now_ms())
    assert rig.snapshots.latest().snapshot.timestamp_ms == rig.clock.now_ms()
    assert rig.engine.run_once().tripped
    assert orders.times() == [NOW_MS - DAY + HOUR, NOW_MS + DAY]


def test_given_a_snapshot_from_the_future_when_run_then_the_clock_is_not_blamed_and_ttls_go_on(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.advance(HOUR + 1)
    rig.snapshots.age_ms = -10 * DAY
    report = rig.engine.run_once()
    assert (report.tripped, clock_notes(report), report.snapshot) == (False, [], None)
    assert orders.times() == []


def test_given_a_clock_that_jumped_when_it_is_approved_then_runs_go_on_from_there(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.step(3 * HOUR)
    assert rig.engine.run_once().tripped
    rig.engine.approve((EVERYTHING,), clock=True)
    assert not rig.engine.run_once().tripped
    assert orders.times() == []
    rig.clock.step(3 * HOUR)
    assert rig.engine.run_once().tripped


def test_given_a_clock_that_jumped_when_a_known_store_is_run_with_adopt_then_it_stays_stopped(
    store: Store, tmp_path: Path
) -> None:
    rig, orders = prepared(store)
    before = (rig.state.anchor(), rig.state.frontiers(), rig.state.store())
    rig.clock.step(3 * HOUR)
    rig.engine.preview(out=tmp_path / "plan.json")
    assert rig.engine.run_once(adopt=True).tripped
    assert rig.engine.carry_out(tmp_path / "plan.json", adopt=True).tripped
    assert (rig.state.anchor(), rig.state.frontiers(), rig.state.store()) == before
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_given_a_clock_that_jumped_when_the_store_is_adopted_again_then_runs_go_on_from_there(store: Store) -> None:
    rig, orders = prepared(store)
    rig.clock.step(3 * HOUR)
    rig.engine.adopt()
    assert not rig.engine.run_once().tripped
    assert orders.times() == []


def test_given_a_clock_that_jumped_when_only_a_topic_is_approved_then_it_stays_stopped(store: Store) -> None:
    rig, _ = prepared(store)
    rig.clock.step(3 * HOUR)
    with pytest.raises(GuardTripped):
        rig.engine.approve(("default:*",))
    assert rig.engine.run_once().tripped


def test_given_a_clock_that_jumped_when_planned_then_the_plan_says_so(store: Store) -> None:
    rig, _ = prepared(store)
    rig.clock.step(3 * HOUR)
    assert clock_notes(rig.engine.preview()) == [True]


def test_given_a_clock_that_jumped_when_a_plan_is_applied_then_it_stops_too(store: Store, tmp_path: Path) -> None:
    rig, orders = prepared(store)
    rig.clock.step(3 * HOUR)
    file = tmp_path / "plan.json"
    rig.engine.preview(out=file)
    assert rig.engine.carry_out(file).tripped
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_given_a_clock_in_doubt_when_one_topic_is_approved_then_it_is_refused_and_nothing_is_remembered(
    store: Store,
) -> None:
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400).plain(NOW_MS - DAY)
    rig = janitor(store)
    rig.engine.run_once(adopt=True)
    orders.describe(ttl_seconds=3600)
    before = rig.state.frontiers()
    rig.clock.step(30 * DAY)
    with pytest.raises(GuardTripped, match=r"clock .* ahead"):
        rig.engine.approve(("default:orders",))
    assert rig.state.frontiers() == before
    # Without a topic the clock itself is approved.
    assert [str(name) for name in rig.engine.approve((EVERYTHING,), clock=True)] == ["default:orders"]
    assert not rig.engine.run_once().tripped
