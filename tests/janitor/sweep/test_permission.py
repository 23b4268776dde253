"""What a run asks before every batch: to go on at all, its lease, and whether the topic is paused."""

from __future__ import annotations

import pytest

from janitor.state.base import EVERYTHING, RunRecord
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.permission import HEARTBEAT_MS, Permission, Withheld
from tests.builders import MINUTE, NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import Halted, LeaseLost
from tms_core.tables.lease import Lease
from tms_core.topic import TopicId

ORDERS = TopicId("default", "orders")


class Case:
    """A run under way, with all it may be asked."""

    def __init__(self, *, leased: bool = True) -> None:
        self.clock = ManualClock(NOW_MS)
        self.state = SqliteState.in_memory()
        self.state.begin_run(RunRecord("run", "apply", NOW_MS, heartbeat_ms=NOW_MS))
        self.lease = Lease(self.state, "a", 60, self.clock)
        self.lease.acquire()
        self.halted = False
        self.permission = Permission(self.state, self.lease if leased else None, self.clock, "run", lambda: self.halted)

    def take_over(self) -> None:
        Lease(self.state, "b", 60, self.clock).acquire(sole=True)

    @property
    def heartbeat_ms(self) -> int | None:
        return self.state.runs(1)[0].heartbeat_ms


@pytest.fixture
def case() -> Case:
    return Case()


def test_given_nothing_in_the_way_when_asked_then_it_may_go_on(case: Case) -> None:
    case.permission.check(ORDERS)
    case.permission.alive()


@pytest.mark.parametrize("paused", [EVERYTHING, "default:*", "default:orders", "*:orders", "default:order?"])
def test_given_a_pause_that_fits_when_asked_then_nothing_is_taken_of_that_topic_and_the_run_lives_on(
    case: Case, paused: str
) -> None:
    case.state.pause(paused, NOW_MS)
    with pytest.raises(Withheld):
        case.permission.check(ORDERS)
    case.permission.alive()
    with pytest.raises(Withheld):
        case.permission.check_all()
    case.state.resume(paused)
    case.permission.check(ORDERS)
    case.permission.check_all()


@pytest.mark.parametrize("paused", ["default:order", "other:*", "default:Orders", "", "orders"])
def test_given_a_pause_of_others_when_asked_then_it_may_go_on(case: Case, paused: str) -> None:
    case.state.pause(paused, NOW_MS)
    case.permission.check(ORDERS)


def test_given_a_word_to_stop_when_asked_then_the_run_is_over_whatever_is_paused(case: Case) -> None:
    case.state.pause(EVERYTHING, NOW_MS)
    case.halted = True
    with pytest.raises(Halted):
        case.permission.check(ORDERS)
    with pytest.raises(Halted):
        case.permission.alive()


def test_given_a_lost_lease_when_asked_then_the_run_is_over_whatever_is_paused(case: Case) -> None:
    case.state.pause(EVERYTHING, NOW_MS)
    case.take_over()
    with pytest.raises(LeaseLost):
        case.permission.check(ORDERS)


def test_given_a_lost_lease_when_the_run_only_reads_then_it_learns_of_it_with_its_next_heartbeat(case: Case) -> None:
    case.permission.alive()
    case.take_over()
    case.clock.advance(HEARTBEAT_MS - 1)
    case.permission.alive()
    case.clock.advance(1)
    with pytest.raises(LeaseLost):
        case.permission.alive()


def test_given_a_lost_lease_when_the_run_begins_then_it_is_over(case: Case) -> None:
    case.take_over()
    with pytest.raises(LeaseLost):
        case.permission.alive()
    assert case.heartbeat_ms == NOW_MS


def test_given_no_lease_when_another_takes_one_then_the_run_goes_on() -> None:
    case = Case(leased=False)
    case.take_over()
    case.clock.advance(MINUTE)
    case.permission.check(ORDERS)
    case.permission.alive()


def test_given_a_long_run_when_it_shows_that_it_is_alive_then_that_is_written_down_now_and_then(case: Case) -> None:
    beats = []
    for _ in range(13):
        case.permission.alive()
        beats.append(case.heartbeat_ms)
        case.clock.advance(HEARTBEAT_MS // 4)
    assert sorted({ms - NOW_MS for ms in beats if ms is not None}) == [0, 5_000, 10_000, 15_000]


def test_given_a_wall_clock_that_is_set_back_when_alive_then_running_time_says_how_often(case: Case) -> None:
    case.permission.alive()
    case.clock.step(-3_600_000)
    case.clock.advance(HEARTBEAT_MS)
    case.permission.alive()
    assert case.heartbeat_ms == NOW_MS - 3_600_000 + HEARTBEAT_MS


def test_given_a_run_that_was_closed_by_another_when_it_is_alive_then_it_does_not_come_back(case: Case) -> None:
    case.state.finish_run("run", NOW_MS + 1, "lost", "{}")
    case.clock.advance(HEARTBEAT_MS)
    case.permission.alive()
    assert (case.heartbeat_ms, case.state.unfinished_runs()) == (NOW_MS, [])
