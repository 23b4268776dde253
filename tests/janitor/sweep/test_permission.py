"""Permission before each batch: stop requests, lease and pauses; and the rate limit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.state.base import EVERYTHING, RunRecord
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.executor import HEARTBEAT_MS, MAX_SLEEP_SECONDS, Pacer, Permission
from tests.builders import DAY, NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import LeaseLost
from tms_core.tables.lease import Lease
from tms_core.topic import TopicId

ORDERS = TopicId("default", "orders")


class PermissionKit:
    def __init__(self, *, leased: bool = True) -> None:
        self.clock = ManualClock(NOW_MS)
        self.state = SqliteState.in_memory()
        self.state.begin_run(RunRecord("run", "apply", NOW_MS, heartbeat_ms=NOW_MS))
        self.lease = Lease(self.state, "a", 60, self.clock)
        self.lease.acquire()
        self.is_stopping = False
        self.permission = Permission(
            self.state, self.lease if leased else None, self.clock, "run", lambda: self.is_stopping
        )

    def take_over(self) -> None:
        Lease(self.state, "b", 60, self.clock).acquire(sole=True)

    @property
    def heartbeat_ms(self) -> int | None:
        return self.state.runs(1)[0].heartbeat_ms


@pytest.fixture
def kit() -> PermissionKit:
    return PermissionKit()


@pytest.mark.parametrize("paused", [EVERYTHING, "default:*", "default:orders", "*:orders", "default:order?"])
def test_matching_pause_denies_the_topic_but_not_the_run(kit: PermissionKit, paused: str) -> None:
    kit.state.pause(paused, NOW_MS)
    assert not kit.permission.allows(ORDERS)
    kit.permission.keep_alive()
    assert kit.permission.pauses()
    kit.state.resume(paused)
    assert kit.permission.allows(ORDERS)
    assert not kit.permission.pauses()


@pytest.mark.parametrize("paused", ["default:order", "other:*", "default:Orders", "", "orders"])
def test_pause_of_other_topics_allows_the_topic(kit: PermissionKit, paused: str) -> None:
    kit.state.pause(paused, NOW_MS)
    assert kit.permission.allows(ORDERS)


def test_lost_lease_ends_the_run_even_if_the_topic_is_paused(kit: PermissionKit) -> None:
    kit.state.pause(EVERYTHING, NOW_MS)
    kit.take_over()
    with pytest.raises(LeaseLost):
        kit.permission.allows(ORDERS)


def test_lost_lease_of_a_reader_is_noticed_with_its_heartbeat(kit: PermissionKit) -> None:
    kit.permission.keep_alive()
    kit.take_over()
    kit.clock.advance(HEARTBEAT_MS - 1)
    kit.permission.keep_alive()
    kit.clock.advance(1)
    with pytest.raises(LeaseLost):
        kit.permission.keep_alive()


def test_lost_lease_at_the_start_ends_the_run(kit: PermissionKit) -> None:
    kit.take_over()
    with pytest.raises(LeaseLost):
        kit.permission.keep_alive()
    assert kit.heartbeat_ms == NOW_MS


def test_heartbeat_of_a_long_run_is_written_at_intervals(kit: PermissionKit) -> None:
    beats = []
    for _ in range(13):
        kit.permission.keep_alive()
        beats.append(kit.heartbeat_ms)
        kit.clock.advance(HEARTBEAT_MS // 4)
    assert sorted({ms - NOW_MS for ms in beats if ms is not None}) == [0, 5_000, 10_000, 15_000]


def test_heartbeat_interval_uses_monotonic_time(kit: PermissionKit) -> None:
    kit.permission.keep_alive()
    kit.clock.step(-3_600_000)
    kit.clock.advance(HEARTBEAT_MS)
    kit.permission.keep_alive()
    assert kit.heartbeat_ms == NOW_MS - 3_600_000 + HEARTBEAT_MS


class SleepRecorder(ManualClock):
    def __init__(self, *, advances: bool = True) -> None:
        super().__init__(0, monotonic_ms=DAY)
        self.advances = advances
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        if self.advances:
            super().sleep(seconds)


@pytest.mark.parametrize(
    ("rows", "sleeps"), [(500, [0.5]), (1000, [1.0]), (1001, [1.0, 0.001]), (3500, [1.0, 1.0, 1.0, 0.5])]
)
def test_pace_sleeps_a_long_wait_in_pieces(rows: int, sleeps: list[float]) -> None:
    clock = SleepRecorder()
    Pacer(1000, clock).throttle(rows)
    assert clock.sleeps == pytest.approx(sleeps)
    assert max(clock.sleeps) <= MAX_SLEEP_SECONDS == 1.0


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        pytest.param(500, lambda clock: clock.advance(200), id="time of a batch"),
        pytest.param(1, lambda clock: clock.advance(3_600_000), id="an idle hour"),
        pytest.param(500, lambda clock: clock.step(-86_400_000), id="wall clock set back"),
    ],
)
def test_pace_ignores_elapsed_time_and_clock_steps_between_payments(
    rows: int, change: Callable[[ManualClock], None]
) -> None:
    clock = ManualClock(0)
    pacer = Pacer(1000, clock)
    pacer.throttle(rows)
    change(clock)
    before_ms = clock.monotonic_ms()
    pacer.throttle(500)
    assert clock.monotonic_ms() - before_ms == 500


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 2000)), min_size=1, max_size=20), st.integers(1, 10_000))
def test_pace_never_exceeds_the_rate(batches: list[tuple[int, int]], rate: int) -> None:
    clock = ManualClock(0)
    pacer = Pacer(rate, clock)
    paid = 0
    for rows, pause_ms in batches:
        pacer.throttle(rows)
        paid += rows
        assert paid <= (clock.monotonic_ms() + 1) * rate / 1000
        clock.advance(pause_ms)


@pytest.mark.parametrize(("rate", "passed_ms"), [(3, 333_333), (0.5, 2_000_000), (1_000_000, 1), (None, 0)])
def test_pace_of_many_small_batches_is_that_of_their_sum(rate: float | None, passed_ms: int) -> None:
    clock = ManualClock(0)
    pacer = Pacer(rate, clock)
    for _ in range(1000):
        pacer.throttle(1)
    assert clock.monotonic_ms() == pytest.approx(passed_ms, rel=0.01)


def test_pace_of_several_threads_is_that_of_all_together() -> None:
    clock = SleepRecorder(advances=False)
    pacer = Pacer(1000, clock)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pacer.throttle, [100] * 8))
    assert sorted(clock.sleeps) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
