"""S8: a frontier advances only as fast as time. Rows that a jump makes due are held for an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from janitor.report import Report
from janitor.rules.policy import Hold, Rule
from janitor.state.base import EVERYTHING
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    SECOND,
    Call,
    Kit,
    ProcessKilled,
    Topic,
    adopted_janitor,
    fail_at,
    janitor,
    pointer,
    topic,
    watch,
)
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore

TTL_SECONDS = 86400
CUTOFF_MS = NOW_MS - DAY
#: Due 10 minutes after the first pass by time alone.
SOON_MS = CUTOFF_MS + 10 * MINUTE
#: Live for hours unless the cutoff jumps.
LIVE_MS = NOW_MS - 2 * HOUR
HOLD_SECONDS = 3600


def set_up(store: Store, **options: object) -> tuple[Kit, Topic]:
    """Return a store after its first pass."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    kit = janitor(store, hold_seconds=HOLD_SECONDS, **options)  # type: ignore[arg-type]
    kit.engine.run_once(adopt=True)
    orders.plain(SOON_MS, LIVE_MS).stored(pointer(SOON_MS), SOON_MS, LIVE_MS)
    return kit, orders


JUMPS: dict[str, Callable[[Topic], object]] = {
    "ttl shortened": lambda orders: orders.describe(ttl_seconds=60),
    "deleted": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=-1),
    "deleted and created again": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=2),
    "many generations at once": lambda orders: orders.describe(ttl_seconds=TTL_SECONDS, generation=99),
    "a restored store's shorter ttl": lambda orders: orders.describe(ttl_seconds=1),
}


@pytest.fixture(params=JUMPS)
def jump(request: pytest.FixtureRequest) -> Callable[[Topic], object]:
    return JUMPS[request.param]


def holds_by_topic(report: Report) -> dict[str, Hold]:
    return {str(name): hold for name, hold in report.held_topics().items()}


def test_jump_holds_newly_due_rows_and_reports_them(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    report = kit.engine.run_once()
    assert orders.times() == [SOON_MS, LIVE_MS]
    assert orders.stored_times() == [SOON_MS, LIVE_MS]
    assert holds_by_topic(report) == {"default:orders": Hold.FRONTIER}
    assert report.totals.kept["held"] == 4
    assert not report.tripped


def test_plan_shows_rows_held_by_a_jump(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    report = kit.engine.preview()
    assert holds_by_topic(report) == {"default:orders": Hold.FRONTIER}
    assert report.totals.kept["held"] == 4


def test_held_jump_deletes_rows_due_by_time_alone(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    kit.engine.run_once()
    kit.run_after(10 * MINUTE)
    assert orders.times() == [SOON_MS, LIVE_MS]
    kit.run_after(1)
    assert orders.times() == [LIVE_MS]
    assert orders.stored_times() == [LIVE_MS]


@pytest.mark.parametrize(("late_ms", "kept"), [(-1, [LIVE_MS]), (0, []), (1, [])])
def test_held_jump_is_released_after_the_hold(
    store: Store, jump: Callable[[Topic], object], late_ms: int, kept: list[int]
) -> None:
    kit, orders = set_up(store)
    jump(orders)
    kit.engine.run_once()
    kit.run_after(HOLD_SECONDS * SECOND + late_ms)
    assert orders.times() == kept
    assert orders.stored_times() == kept


def test_held_jump_approved_is_released_by_the_next_run(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    kit.engine.run_once()
    assert kit.engine.approve(("default:orders",)) == [orders.id]
    assert holds_by_topic(kit.engine.run_once()) == {}
    assert orders.times() == []
    assert orders.stored_times() == []


def test_unseen_jump_approved_is_released_by_the_next_run(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=60)
    kit.engine.approve((EVERYTHING,), clock=True)
    kit.engine.run_once()
    assert orders.times() == []


def test_approval_does_not_cover_a_later_jump(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=12 * 3600)
    kit.engine.approve((EVERYTHING,), clock=True)
    orders.describe(ttl_seconds=60)
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [SOON_MS, LIVE_MS]


def test_approval_is_used_once(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=3600)
    kit.engine.approve((EVERYTHING,), clock=True)
    kit.engine.run_once()
    orders.describe(ttl_seconds=TTL_SECONDS).plain(LIVE_MS)
    kit.engine.run_once()
    orders.describe(ttl_seconds=3600)
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [LIVE_MS]


def test_approval_of_one_topic_does_not_release_others(store: Store) -> None:
    other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
    kit, orders = set_up(store)
    other.plain(LIVE_MS)
    for described in (orders, other):
        described.describe(ttl_seconds=60)
    kit.engine.approve(("default:orders",))
    assert holds_by_topic(kit.engine.run_once()) == {"default:other": Hold.FRONTIER}
    assert (orders.times(), other.times()) == ([], [LIVE_MS])


def test_held_jump_extended_restarts_the_hold(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=12 * 3600)
    kit.engine.run_once()
    kit.clock.advance(HOLD_SECONDS * SECOND - 1)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    kit.run_after(HOLD_SECONDS * SECOND - 1)
    assert LIVE_MS in orders.times()
    kit.run_after(1)
    assert orders.times() == []


def test_held_jump_reverted_loses_no_row(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    kit.engine.run_once()
    kit.clock.advance(MINUTE)
    orders.describe(ttl_seconds=TTL_SECONDS)
    assert holds_by_topic(kit.engine.run_once()) == {}
    kit.run_after(HOLD_SECONDS * SECOND)
    assert orders.times() == [LIVE_MS]


def test_topic_first_seen_later_is_held_like_a_jump(store: Store) -> None:
    kit, _ = set_up(store)
    late = topic(store, "default:late", ttl_seconds=60).plain(1, LIVE_MS).stored(pointer(1), 1)
    kit.engine.run_once()
    assert (late.times(), late.stored_times()) == ([1, LIVE_MS], [1])
    kit.run_after(HOLD_SECONDS * SECOND)
    assert (late.times(), late.stored_times()) == ([], [])


def test_topic_no_longer_protected_holds_accumulated_rows(store: Store) -> None:
    kit, orders = set_up(store, protect=("default:ord*",))
    assert holds_by_topic(kit.run_after(DAY)) == {"default:orders": Hold.PROTECTED}
    free = kit.restart(protect=())
    assert holds_by_topic(free.run_after(MINUTE)) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [SOON_MS, LIVE_MS]
    free.run_after(HOLD_SECONDS * SECOND)
    assert orders.times() == []


def test_topic_protected_temporarily_holds_accumulated_rows(store: Store) -> None:
    kit, orders = set_up(store)
    kit.clock.advance(DAY)
    kit.restart(protect=("default:*",)).engine.run_once()
    assert holds_by_topic(kit.run_after(MINUTE)) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [SOON_MS, LIVE_MS]


def test_topic_protected_at_adoption_holds_accumulated_rows(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(1, LIVE_MS)
    kit = janitor(store, hold_seconds=HOLD_SECONDS, protect=("default:*",)).adopt()
    report = kit.restart(protect=()).engine.run_once()
    assert holds_by_topic(report) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [1, LIVE_MS]


@pytest.mark.parametrize("approved", [False, True])
def test_held_jump_is_held_again_after_protection(store: Store, approved: bool) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    if approved:
        kit.engine.approve((EVERYTHING,), clock=True)
    kit.clock.advance(MINUTE)
    protected = kit.restart(protect=("default:*",))
    protected.engine.run_once()
    kit.clock.advance(3 * DAY)
    protected.engine.run_once()
    assert holds_by_topic(kit.run_after(MINUTE)) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [SOON_MS, LIVE_MS]
    kit.run_after(HOLD_SECONDS * SECOND)
    assert orders.times() == []


def test_jump_is_held_by_run_adopt_of_a_known_store(
    store: Store, jump: Callable[[Topic], object], tmp_path: Path
) -> None:
    kit, orders = set_up(store)
    jump(orders)
    before = kit.state.frontiers()
    kit.engine.preview(out=tmp_path / "plan.json")
    kit.engine.carry_out(tmp_path / "plan.json", adopt=True)
    assert kit.state.frontiers() == before
    assert holds_by_topic(kit.engine.run_once(adopt=True)) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [SOON_MS, LIVE_MS]


def test_plan_made_during_a_hold_keeps_its_rows(store: Store, jump: Callable[[Topic], object], tmp_path: Path) -> None:
    kit, orders = set_up(store)
    jump(orders)
    kit.engine.run_once()
    kit.clock.advance(10 * MINUTE + 1)
    planned = kit.engine.preview(out=tmp_path / "plan.json")
    kit.engine.approve((EVERYTHING,))
    applied = kit.engine.carry_out(tmp_path / "plan.json")
    assert (planned.total(Rule.EXPIRED), planned.total(Rule.OLD_GENERATION)) in [(2, 0), (0, 2)]
    assert {rule: applied.total(rule) for rule in Rule} == {rule: planned.total(rule) for rule in Rule}
    assert (orders.times(), orders.stored_times()) == ([LIVE_MS], [LIVE_MS])
    kit.engine.run_once()
    assert (orders.times(), orders.stored_times()) == ([], [])


def test_jump_is_released_by_another_adoption(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    assert kit.engine.adopt() == [orders.id]
    assert holds_by_topic(kit.engine.run_once()) == {}
    assert orders.times() == []


def test_hold_is_not_extended_by_a_clock_set_back(store: Store) -> None:
    kit, orders = set_up(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    kit.clock.step(-HOUR)
    assert holds_by_topic(kit.run_after(HOLD_SECONDS * SECOND - 1)) == {"default:orders": Hold.FRONTIER}
    assert holds_by_topic(kit.run_after(1)) == {}
    assert orders.times() == []


def test_protected_topic_has_its_invalid_rows_inverted(store: Store) -> None:
    kit, orders = set_up(store, protect=("default:*",))
    invalid = pointer(LIVE_MS)
    orders.tx(invalid, LIVE_MS)
    kit.snapshots.invalid = [invalid]
    kit.engine.run_once()
    assert orders.pointers() == [None, None, -invalid]


@pytest.mark.parametrize(("extra_ms", "kept"), [(0, [LIVE_MS]), (1000, [SOON_MS, LIVE_MS])])
def test_cutoff_advance_beyond_the_allowance_is_a_jump(store: Store, extra_ms: int, kept: list[int]) -> None:
    kit, orders = set_up(store)
    kit.clock.advance(5 * MINUTE + 1)
    shorter_ms = DAY - LIFETIME.allowance_ms - extra_ms
    orders.describe(ttl_seconds=shorter_ms // SECOND)
    kit.engine.run_once()
    assert orders.times() == kept


def test_hold_of_zero_holds_nothing(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    jump(orders)
    assert holds_by_topic(kit.restart(hold_seconds=0).engine.run_once()) == {}
    assert orders.times() == []


def set_clock_back(kit: Kit) -> None:
    """Boot the machine with its clock two hours in the past."""
    kit.snapshots.write_pointer = pointer(NOW_MS)
    kit.clock.step(-2 * HOUR)
    kit.clock.reboot("with a clock that is wrong")


def test_held_jump_restarts_after_a_boot_in_the_past_and_ends(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=TTL_SECONDS, generation=-1)
    kit.engine.run_once()
    set_clock_back(kit)
    kit.engine.run_once()
    assert holds_by_topic(kit.run_after(HOLD_SECONDS * SECOND - 1)) == {"default:orders": Hold.FRONTIER}
    assert holds_by_topic(kit.run_after(1)) == {}
    assert orders.times() == []


def test_hold_of_a_clock_in_the_past_survives_setting_it(store: Store) -> None:
    kit, orders = set_up(store)
    set_clock_back(kit)
    orders.describe(ttl_seconds=1).plain(NOW_MS - 3 * HOUR)
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}
    kit.clock.step(2 * HOUR)
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}
    kit.clock.reboot("and set right")
    assert holds_by_topic(kit.run_after(MINUTE)) == {"default:orders": Hold.FRONTIER}
    assert len(orders.times()) == 3
    kit.run_after(HOLD_SECONDS * SECOND)
    assert orders.times() == []


def test_hold_is_not_shortened_by_a_clock_set_forward(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    kit.clock.advance(HOLD_SECONDS * SECOND - LIFETIME.allowance_ms)
    kit.clock.step(LIFETIME.allowance_ms)
    assert not kit.engine.run_once().tripped
    assert LIVE_MS in orders.times()


def test_store_never_adopted_deletes_nothing_and_plans_adoption(store: Store) -> None:
    invalid = pointer(NOW_MS - DAY)
    orders = topic(store, "default:orders", ttl_seconds=60).plain(1).tx(invalid, NOW_MS)
    kit = janitor(store, invalid=[invalid])
    assert holds_by_topic(kit.engine.preview()) == {"default:orders": Hold.FIRST_CONTACT}
    assert kit.engine.run_once().tripped
    assert orders.pointers() == [None, invalid]
    assert kit.run_after(30 * DAY).tripped
    assert orders.pointers() == [None, invalid]


def test_adopted_store_is_cleaned_by_one_pass(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60, generation=3).plain(1, NOW_MS)
    orders.at(1).plain(NOW_MS)
    assert holds_by_topic(janitor(store).engine.run_once(adopt=True)) == {}
    assert (orders.times(), orders.at(1).times()) == ([NOW_MS], [])


def test_run_of_one_topic_advances_no_other_frontier(store: Store) -> None:
    other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
    kit, _ = set_up(store)
    before = kit.state.frontiers()[other.id]
    kit.run_after(HOUR, patterns=("default:orders",))
    assert kit.state.frontiers()[other.id] == before


def test_hold_from_before_the_clock_was_set_right_ends(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=30 * 86400).plain(NOW_MS - DAY)
    kit = adopted_janitor(store)
    kit.clock.reboot("behind")
    kit.clock.step(-2 * HOUR)
    orders.describe(ttl_seconds=3600)
    kit.engine.run_once()
    kit.clock.advance(MINUTE)
    kit.clock.step(2 * HOUR)
    kit.engine.run_once()
    assert orders.times() == [NOW_MS - DAY], "held"
    kit.run_after(HOUR)
    assert orders.times() == []


# --- paused topics ----------------------------------------------------------------------------------------------------


def test_topic_paused_for_days_deletes_rows_due_by_time_alone(store: Store) -> None:
    kit, orders = set_up(store)
    before = kit.state.frontiers()[orders.id]
    kit.state.pause("default:orders", NOW_MS)
    for _ in range(3):
        assert set(holds_by_topic(kit.run_after(DAY)).values()) <= {Hold.PAUSED}
        assert kit.state.frontiers()[orders.id] == before
    assert orders.times() == [SOON_MS, LIVE_MS]
    kit.state.resume("default:orders")
    assert holds_by_topic(kit.engine.run_once()) == {}
    assert (orders.times(), orders.stored_times()) == ([], [])


def test_paused_topic_that_jumps_is_held_when_resumed(store: Store, jump: Callable[[Topic], object]) -> None:
    kit, orders = set_up(store)
    kit.state.pause("default:*", NOW_MS)
    kit.engine.run_once()
    kit.clock.advance(MINUTE)
    jump(orders)
    kit.engine.run_once()
    kit.run_after(2 * HOLD_SECONDS * SECOND)
    kit.state.resume("default:*")
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}, (
        "nobody could see it as held before"
    )
    assert LIVE_MS in orders.times()
    kit.run_after(HOLD_SECONDS * SECOND)
    assert orders.times() == []


def test_paused_topic_does_not_change_the_hold_of_another(store: Store) -> None:
    other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
    kit, orders = set_up(store)
    other.plain(SOON_MS, LIVE_MS)
    kit.state.pause("default:orders", NOW_MS)
    kit.run_after(10 * MINUTE + 1)
    assert (orders.times(), other.times()) == ([SOON_MS, LIVE_MS], [LIVE_MS])
    for described in (orders, other):
        described.describe(ttl_seconds=60)
    assert set(kit.engine.approve((EVERYTHING,), clock=True)) == {other.id}
    kit.engine.run_once()
    assert (orders.times(), other.times()) == ([SOON_MS, LIVE_MS], [])


def test_topic_first_seen_while_paused_is_held_when_resumed(store: Store) -> None:
    kit, _ = set_up(store)
    kit.state.pause("default:late", NOW_MS)
    late = topic(store, "default:late", ttl_seconds=60).plain(1)
    kit.engine.run_once()
    kit.run_after(2 * HOLD_SECONDS * SECOND)
    kit.state.resume("default:late")
    assert holds_by_topic(kit.engine.run_once()) == {"default:late": Hold.FRONTIER}
    assert late.times() == [1]


# --- approvals during a run -------------------------------------------------------------------------------------------


def test_approval_at_any_call_of_a_run_releases_the_jump() -> None:
    for at_call in range(1, 100):
        store = MemoryStore()
        kit, orders = set_up(store)
        orders.describe(ttl_seconds=60)
        kit.engine.run_once()
        kit.clock.advance(MINUTE)
        calls = Counter[str]()

        def approve(_: Call, kit: Kit = kit, at_call: int = at_call, calls: Counter[str] = calls) -> None:
            calls["all"] += 1
            if calls["all"] == at_call:
                kit.engine.approve(("default:orders",))

        watch(store, before=approve)
        kit.engine.run_once()
        if calls["all"] < at_call:
            break
        assert holds_by_topic(kit.run_after(1)) == {}, f"at call {at_call}"
        assert orders.times() == []
    assert at_call > 5


def test_approval_repeated_during_its_run_is_used_once(store: Store) -> None:
    kit, orders = set_up(store)
    orders.describe(ttl_seconds=3600)
    kit.engine.approve((EVERYTHING,), clock=True)

    def again(call: Call) -> None:
        if call.name == "payload.keys":
            kit.engine.approve((EVERYTHING,), clock=True)

    watch(store, before=again)
    kit.engine.run_once()
    assert orders.times() == []
    kit.engine.run_once()
    orders.describe(ttl_seconds=60).plain(NOW_MS - HOUR // 2)
    assert holds_by_topic(kit.engine.run_once()) == {"default:orders": Hold.FRONTIER}
    assert orders.times() == [NOW_MS - HOUR // 2]


def test_interrupted_run_advances_no_frontier(store: Store) -> None:
    kit, orders = set_up(store)
    other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
    before = kit.state.frontiers()
    kit.clock.advance(10 * MINUTE + 1)
    stop: list[bool] = []
    watch(store, after=lambda call: stop.append(True) if call.name == "message.delete" else None)
    kit.restart(is_stopping=lambda: bool(stop)).engine.run_once()
    assert orders.times() == [LIVE_MS]
    after = kit.state.frontiers()
    assert after[orders.id] == before[orders.id]
    assert (after[other.id].cutoff_ms, after[other.id].pending is not None) == (0, True), (
        "the topic is recorded, but its frontier does not advance"
    )
    stop.clear()
    assert holds_by_topic(kit.engine.run_once()) == {}
    assert orders.stored_times() == [LIVE_MS]


# --- runs killed before their end, for example by the deadline of a CronJob -------------------------------------------


def killed_runs(store: Store) -> tuple[Kit, Topic, Callable[[], None]]:
    """Return an adopted store whose runs are killed before their end."""
    orders = topic(store, "default:orders", ttl_seconds=10 * 86400).plain(NOW_MS - 2 * HOUR)
    paused = topic(store, "default:first", ttl_seconds=10 * 86400)
    kit = adopted_janitor(store, hold_seconds=3600)
    # A topic without a jump, swept before the other topic.
    kit.state.pause(str(paused.id), NOW_MS)
    watch(store, before=fail_at("payload.keys", ProcessKilled))

    def run() -> None:
        with pytest.raises(ProcessKilled):
            kit.engine.run_once()

    return kit, orders, run


def test_crashing_runs_release_rows_after_the_hold(store: Store) -> None:
    kit, orders, run = killed_runs(store)
    orders.describe(ttl_seconds=3600)
    for wait_ms in (MINUTE, HOUR - 1):
        kit.clock.advance(wait_ms)
        run()
        assert orders.times() == [NOW_MS - 2 * HOUR]
    kit.clock.advance(1)
    run()
    assert orders.times() == []


def test_repeated_jump_is_held_again_despite_crashes(store: Store) -> None:
    kit, orders, run = killed_runs(store)
    for ttl_seconds in (3600, 10 * 86400, 3600):
        orders.describe(ttl_seconds=ttl_seconds)
        kit.clock.advance(HOUR // 2)
        run()
    assert orders.times() == [NOW_MS - 2 * HOUR]
    kit.clock.advance(HOUR - 1)
    run()
    assert orders.times() == [NOW_MS - 2 * HOUR]
    kit.clock.advance(1)
    run()
    assert orders.times() == []


def test_expired_hold_survives_a_crash_of_its_run(store: Store) -> None:
    kit, orders, run = killed_runs(store)
    orders.describe(ttl_seconds=3600)
    run()
    kit.clock.advance(HOUR)
    watch(store, before=fail_at("message.delete", ProcessKilled))
    run()
    assert orders.times() == [NOW_MS - 2 * HOUR]
    kit.clock.advance(1)
    again = janitor(kit.store, state=kit.state, clock=kit.clock, snapshots=kit.snapshots)
    with pytest.raises(ProcessKilled):
        again.engine.run_once()
    assert kit.state.frontiers()[orders.id].pending is not None, "its hold does not restart"
