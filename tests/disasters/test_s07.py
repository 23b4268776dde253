"""S7: the janitor checks its wall clock against clocks that nobody sets."""

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


def set_up(store: Store) -> tuple[Kit, Topic]:
    """Return a store after its first pass, with rows due in an hour."""
    orders = topic(store, "default:orders", ttl_seconds=86400).plain(NOW_MS - DAY + HOUR)
    kit = janitor(store)
    kit.engine.run_once(adopt=True)
    return kit, orders


def clock_notes(report: Report) -> list[bool]:
    return [note.tripped for note in report.guards if note.guard == "clock"]


@pytest.mark.parametrize(("ahead_ms", "blocked"), [(-1, False), (0, False), (1, True), (400 * DAY, True)])
def test_clock_ahead_of_the_allowance_blocks_a_run(store: Store, ahead_ms: int, blocked: bool) -> None:
    kit, _ = set_up(store)
    kit.clock.advance(10 * MINUTE)
    kit.clock.step(ALLOWANCE_MS + ahead_ms)
    assert kit.engine.run_once().tripped == blocked


@pytest.mark.parametrize(("ahead_ms", "blocked"), [(-400 * DAY, False), (0, False), (1, True), (6 * DAY, True)])
def test_clock_ahead_of_the_cluster_blocks_a_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, blocked: bool
) -> None:
    kit, orders = set_up(store)
    # Below the time that a machine may have been off.
    kit.clock.reboot("another machine")
    monkeypatch.setattr(kit.state, "clock_ms", lambda: kit.clock.now_ms() - ALLOWANCE_MS - ahead_ms)
    kit.clock.step(2 * HOUR)
    report = kit.engine.run_once()
    assert (report.tripped, orders.times() == []) == (blocked, not blocked)
    if blocked:
        with pytest.raises(GuardTripped):
            kit.engine.approve(("default:orders",))
        # An approval changes no clock of another machine.
        kit.engine.approve((EVERYTHING,), clock=True)
        assert kit.engine.run_once().tripped
        monkeypatch.setattr(kit.state, "clock_ms", kit.clock.now_ms)
        assert not kit.engine.run_once().tripped


def test_clock_jump_writes_nothing_and_is_reported(store: Store) -> None:
    kit, orders = set_up(store)
    orders.tx(INVALID, NOW_MS - MINUTE)
    kit.snapshots.invalid = [INVALID]
    before = (kit.state.frontiers(), kit.state.anchor(), kit.state.boundary(), kit.state.open_ids())
    kit.clock.step(10 * DAY)
    report = kit.engine.run_once()
    assert orders.times() == [NOW_MS - DAY + HOUR, NOW_MS - MINUTE]
    assert orders.pointers() == [None, INVALID]
    assert (kit.state.frontiers(), kit.state.anchor(), kit.state.boundary(), kit.state.open_ids()) == before
    assert clock_notes(report) == [True]
    [run] = kit.state.runs(1)
    assert (run.result, run.blocked_by) == ("blocked", ("clock",))
    assert kit.state.report(run.id, Report) == report
    assert "janitor approve" in report.guards[0].message


def test_clock_jump_blocks_all_later_runs(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.step(10 * DAY)
    for _ in range(3):
        assert kit.engine.run_once().tripped
        kit.clock.advance(HOUR)
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_clock_jump_corrected_unblocks_runs(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.step(10 * DAY)
    kit.engine.run_once()
    kit.clock.step(-10 * DAY)
    assert not kit.run_after(HOUR + 1).tripped
    assert orders.times() == []


def test_clock_steps_below_the_allowance_add_up_to_a_jump(store: Store) -> None:
    kit, _ = set_up(store)
    outcomes = []
    for _ in range(4):
        kit.clock.advance(MINUTE)
        kit.clock.step(ALLOWANCE_MS // 2)
        outcomes.append(kit.engine.run_once().tripped)
    assert outcomes == [False, False, True, True]


def test_slow_clock_warns_and_deletes_fewer_rows(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.advance(HOUR + 1)
    kit.clock.step(-ALLOWANCE_MS - 1)
    report = kit.engine.run_once()
    assert clock_notes(report) == [False]
    assert not report.tripped
    assert orders.times() == [NOW_MS - DAY + HOUR]
    [note] = [note for note in report.guards if note.guard == "clock"]
    assert "janitor approve --clock" in note.message
    kit.engine.approve(clock=True)
    assert clock_notes(kit.engine.run_once()) == []


def test_clock_corrected_after_an_adopt_with_a_slow_clock_is_not_a_jump(store: Store) -> None:
    kit, _ = set_up(store)
    kit.clock.step(-10 * DAY)
    kit.engine.adopt()
    assert clock_notes(kit.engine.run_once()) == [False], "it is still behind"
    kit.clock.step(10 * DAY)
    assert clock_notes(kit.engine.run_once()) == []


def test_adopt_accepts_a_clock_ahead(store: Store) -> None:
    kit, _ = set_up(store)
    kit.clock.step(10 * DAY)
    assert kit.engine.run_once().tripped
    kit.engine.adopt()
    assert clock_notes(kit.engine.run_once()) == []


@pytest.mark.parametrize(("off_ms", "blocked"), [(HOUR, False), (7 * DAY, False), (7 * DAY + 1, True), (-DAY, False)])
def test_clock_after_a_boot_may_be_at_most_a_week_ahead(store: Store, off_ms: int, blocked: bool) -> None:
    kit, _ = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.clock.step(off_ms)
    kit.clock.reboot("another")
    report = kit.engine.run_once()
    assert report.tripped == blocked
    assert clock_notes(report) == [True] * blocked


@pytest.mark.parametrize("behind_ms", [MINUTE, 30 * DAY, NOW_MS - 1])
def test_clock_corrected_after_a_boot_in_the_past_is_not_a_jump(store: Store, behind_ms: int) -> None:
    kit, orders = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.clock.step(-behind_ms)
    kit.clock.reboot("another")
    assert not kit.engine.run_once().tripped
    kit.clock.step(behind_ms)
    # The true part of this hour is unknown; newly due rows may be held, but not longer.
    for _ in range(2):
        report = kit.run_after(HOUR + 1)
        assert (report.tripped, clock_notes(report)) == (False, [])
    assert orders.times() == []


@pytest.mark.parametrize(("off_ms", "blocked"), [(HOUR, False), (8 * DAY, True)])
def test_monotonic_clock_going_back_is_another_boot(store: Store, off_ms: int, blocked: bool) -> None:
    kit, _ = set_up(store)
    kit.clock.step(off_ms)
    kit.clock.reboot(kit.clock.boot_id(), monotonic_ms=1)
    assert kit.engine.run_once().tripped == blocked


@pytest.mark.parametrize(("off_ms", "blocked"), [(DAY, False), (7 * DAY + SECOND, True)])
def test_clock_without_boot_ids_may_be_at_most_a_week_ahead(store: Store, off_ms: int, blocked: bool) -> None:
    kit, _ = set_up(store)
    kit.clock.reboot("")
    kit.engine.run_once()
    kit.clock.step(off_ms)
    assert kit.engine.run_once().tripped == blocked


def test_clock_jump_is_not_excused_by_rows_with_its_time(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.step(DAY)
    orders.plain(kit.clock.now_ms())
    assert kit.snapshots.latest().snapshot.timestamp_ms == kit.clock.now_ms()
    assert kit.engine.run_once().tripped
    assert orders.times() == [NOW_MS - DAY + HOUR, NOW_MS + DAY]


def test_snapshot_from_the_future_is_not_a_clock_jump(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.advance(HOUR + 1)
    kit.snapshots.age_ms = -10 * DAY
    report = kit.engine.run_once()
    assert (report.tripped, clock_notes(report), report.snapshot) == (False, [], None)
    assert orders.times() == []


def test_clock_jump_approved_unblocks_runs(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.step(3 * HOUR)
    assert kit.engine.run_once().tripped
    kit.engine.approve((EVERYTHING,), clock=True)
    assert not kit.engine.run_once().tripped
    assert orders.times() == []
    kit.clock.step(3 * HOUR)
    assert kit.engine.run_once().tripped


def test_clock_jump_is_not_accepted_by_run_adopt(store: Store, tmp_path: Path) -> None:
    kit, orders = set_up(store)
    before = (kit.state.anchor(), kit.state.frontiers(), kit.state.store())
    kit.clock.step(3 * HOUR)
    kit.engine.preview(out=tmp_path / "plan.json")
    assert kit.engine.run_once(adopt=True).tripped
    assert kit.engine.carry_out(tmp_path / "plan.json", adopt=True).tripped
    assert (kit.state.anchor(), kit.state.frontiers(), kit.state.store()) == before
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_clock_jump_is_accepted_by_adopt(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.step(3 * HOUR)
    kit.engine.adopt()
    assert not kit.engine.run_once().tripped
    assert orders.times() == []


def test_clock_jump_is_not_accepted_by_approving_a_topic(store: Store) -> None:
    kit, _ = set_up(store)
    kit.clock.step(3 * HOUR)
    with pytest.raises(GuardTripped):
        kit.engine.approve(("default:*",))
    assert kit.engine.run_once().tripped


def test_clock_jump_is_reported_by_a_plan(store: Store) -> None:
    kit, _ = set_up(store)
    kit.clock.step(3 * HOUR)
    assert clock_notes(kit.engine.preview()) == [True]


def test_clock_jump_blocks_apply(store: Store, tmp_path: Path) -> None:
    kit, orders = set_up(store)
    kit.clock.step(3 * HOUR)
    file = tmp_path / "plan.json"
    kit.engine.preview(out=file)
    assert kit.engine.carry_out(file).tripped
    assert orders.times() == [NOW_MS - DAY + HOUR]


def test_clock_jump_refuses_approval_of_a_topic(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400).plain(NOW_MS - DAY)
    kit = janitor(store)
    kit.engine.run_once(adopt=True)
    orders.describe(ttl_seconds=3600)
    before = kit.state.frontiers()
    kit.clock.step(30 * DAY)
    with pytest.raises(GuardTripped, match=r"clock .* ahead"):
        kit.engine.approve(("default:orders",))
    assert kit.state.frontiers() == before
    # An approval without a topic covers the clock.
    assert [str(name) for name in kit.engine.approve((EVERYTHING,), clock=True)] == ["default:orders"]
    assert not kit.engine.run_once().tripped
