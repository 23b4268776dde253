"""Leadership: the lease, the fencing delay, terms, and acknowledgments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.builders import MINUTE, NOW_MS, SECOND
from tests.kit.servers import DELAY_SECONDS, SECONDS, Contender, LeaseCell
from tests.support import PATIENCE_SECONDS, raising
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, StoreError, StoreUnavailable, Unavailable
from tms_core.server.ha import leadership
from tms_core.server.ha.leadership import REACH_MS, LeaseWatcher, unknown_outcome_error
from tms_core.server.ha.slot_assignment import Slots
from tms_core.server.metrics import LeadershipMetrics


@pytest.fixture
def cell() -> LeaseCell:
    return LeaseCell()


# --- start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watched_ms", "waited_ms", "leads"),
    [
        (SECONDS * SECOND, 60 * SECOND, False),
        (SECONDS * SECOND + 1, DELAY_SECONDS * SECOND - 1, False),
        (SECONDS * SECOND + 1, DELAY_SECONDS * SECOND, True),
    ],
)
def test_follower_leads_only_after_lease_and_delay(
    cell: LeaseCell, watched_ms: int, waited_ms: int, leads: bool
) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    first.step()
    second.step()
    cell.clock.advance(watched_ms)
    assert not second.step()
    if not second.lease.held:
        assert second.leader == "http://a:1"
        return
    cell.clock.advance(waited_ms // 2)
    assert not second.step()
    cell.clock.advance(waited_ms - waited_ms // 2)
    assert second.step() is leads
    if leads:
        previous = second.leadership.term().previous
        assert previous is not None
        assert (previous.holder, second.leadership.fence, second.leader) == ("a", 2, "")


def test_follower_counts_monotonic_time_only(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b", ManualClock(NOW_MS + 60 * MINUTE))
    assert first.step()
    assert not second.step()
    second.clock.step(1000 * MINUTE)
    assert not second.step()
    assert not second.lease.held


def test_leader_waits_for_work_of_its_previous_term(cell: LeaseCell) -> None:
    first = Contender(cell, "a")
    first.ready = False
    assert not first.step()
    assert first.lease.held
    first.ready = True
    assert first.step()


def test_leader_that_cannot_prepare_a_term_lets_another_server_lead(
    cell: LeaseCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    with monkeypatch.context() as patch:
        patch.setattr(first, "prepare", raising(ZeroDivisionError("a bug")))
        with pytest.raises(ZeroDivisionError):
            first.step()
        assert not first.lease.held
        assert not first.step()
        assert second.step()
        second.leadership.resign()
        cell.clock.advance(SECONDS * SECOND)
        assert not first.step()
    cell.clock.advance(SECONDS * SECOND + 1)
    assert first.step()
    first.leadership.resign()
    assert first.step()


# --- end -------------------------------------------------------------------------------------------------------------


def test_leader_that_slept_leads_again_after_a_renewal(cell: LeaseCell) -> None:
    first = Contender(cell, "a")
    first.step()
    term = first.leadership.term()
    cell.clock.advance(SECONDS * SECOND - 1)
    assert first.leadership.is_valid(term)
    cell.clock.advance(1)
    assert not first.leadership.is_valid(term)
    with pytest.raises(Unavailable):
        first.leadership.term()
    assert first.step()
    assert first.leadership.term() is term


def test_leader_without_the_store_leads_until_its_lease_ends(
    cell: LeaseCell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Contender(cell, "a")
    first.step()
    monkeypatch.setattr(cell, "swap_lease", raising(StoreError("HBase is away.")))
    led = []
    for _ in range(SECONDS + 2):
        led.append(first.step())
        cell.clock.advance(SECOND)
    assert led == [True] * SECONDS + [False] * 2
    assert caplog.text.count("HBase is away.") == 1
    monkeypatch.undo()
    assert first.step()


def test_leader_whose_renewal_got_no_response_keeps_its_term(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    first.step()
    term = first.leadership.term()
    cell.clock.advance(SECONDS * SECOND // 3)
    cell.fails_after_writing = True
    assert first.step()
    cell.fails_after_writing = False
    for _ in range(3 * SECONDS):
        cell.clock.advance(SECOND)
        assert first.step()
        assert not second.step()
        first.leadership.confirm(term)
    assert first.leadership.term() is term


# --- release ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("since_ms", "given_back"), [(DELAY_SECONDS * SECOND - 1, False), (5 * SECOND, True)])
def test_leader_resigns_after_its_failed_write_cannot_arrive(cell: LeaseCell, since_ms: int, given_back: bool) -> None:
    first = Contender(cell, "a")
    first.step()
    first.leadership.note_failed_write()
    cell.clock.advance(since_ms)
    first.leadership.resign()
    assert (cell.record.holder == "") is given_back


@pytest.mark.parametrize(("led_ms", "may_wake"), [(REACH_MS - 1, True), (REACH_MS, False)])
def test_leader_after_two_resignations_knows_a_previous_leader_that_may_wake(
    cell: LeaseCell, led_ms: int, may_wake: bool
) -> None:
    first, second, third = Contender(cell, "a"), Contender(cell, "b"), Contender(cell, "c")
    first.step()
    previous = cell.record
    second.take_over()
    cell.clock.advance(led_ms)
    second.step()
    second.leadership.resign()
    assert cell.record.holder == ""
    for last in (third, Contender(cell, "d")):
        assert last.step()
        assert last.leadership.term().previous == (previous if may_wake else None)
        last.leadership.resign()


def test_hand_back_waits_for_a_write_in_flight(cell: LeaseCell) -> None:
    first = Contender(cell, "a")
    first.step()
    with first.leadership.writing() as term:
        first.leadership.hand_back()
        assert not first.step()
        assert first.leadership.is_valid(term)
        first.leadership.confirm(term)
        with pytest.raises(Unavailable), first.leadership.writing():
            pass
        assert cell.record.holder == "a"
    assert not first.step()
    assert cell.record.holder == ""
    assert first.step(), "no other server wants it"


def test_resignation_without_a_response_ends_the_term(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    first.step()
    term, still = first.leadership.term(), first.leadership.lease_check()

    def concurrent_action() -> None:
        assert not first.leadership.is_valid(term)
        assert not still()

    cell.before_swap = concurrent_action
    cell.fails_after_writing = True
    with pytest.raises(StoreError):
        first.leadership.resign()
    cell.fails_after_writing = False
    assert second.step()
    assert not first.leadership.is_valid(term)
    assert not still()
    assert not first.step()


def test_hand_back_that_failed_is_repeated_at_the_next_look(cell: LeaseCell) -> None:
    first = Contender(cell, "a")
    first.step()
    first.leadership.hand_back()
    cell.before_swap = raising(StoreError("it does not answer."))
    assert not first.step()
    assert cell.record.holder == "a"
    assert not first.step()
    assert cell.record.holder == ""


# --- acknowledgments -------------------------------------------------------------------------------------------------


def test_write_of_a_leader_with_a_stopped_clock_is_not_confirmed(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a", ManualClock(NOW_MS)), Contender(cell, "b")
    first.step()
    term = first.leadership.term()
    second.take_over()
    assert first.leadership.leads, "by its own clock"
    with pytest.raises(StoreUnavailable, match=unknown_outcome_error().message):
        first.leadership.confirm(term)
    assert (first.leadership.leads, first.leader) == (False, "http://b:1")
    assert not first.step()


def test_term_is_over_at_once_when_another_leads(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    first.step()
    term = first.leadership.term()
    second.take_over()
    assert not first.step()
    assert not first.leadership.is_valid(term)
    assert first.leader == "http://b:1"
    first.take_over()
    assert not first.leadership.is_valid(term)


def test_write_without_a_response_of_the_store_is_in_doubt(cell: LeaseCell, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Contender(cell, "a")
    first.step()
    monkeypatch.setattr(cell, "lease", raising(StoreError("HBase is away.")))
    with pytest.raises(StoreError, match="HBase is away"):
        first.leadership.confirm(first.leadership.term())
    monkeypatch.undo()
    first.leadership.resign()
    assert cell.record.holder == "a"


# --- a single server -------------------------------------------------------------------------------------------------


class CallbackClock(ManualClock):
    """A clock that calls a function after each sleep."""

    on_sleep: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.on_sleep()


def test_single_server_after_a_dead_leader_waits_and_leads(cell: LeaseCell) -> None:
    clock = CallbackClock(NOW_MS)
    Contender(cell, "a", clock).step()
    second = Contender(cell, "b", clock)
    second.leadership.wait_for_term(second.step)
    assert second.leadership.leads
    assert clock.now_ms() - NOW_MS > (SECONDS + DELAY_SECONDS) * SECOND


def test_single_server_with_a_live_leader_is_rejected(cell: LeaseCell) -> None:
    clock = CallbackClock(NOW_MS)
    first, second = Contender(cell, "a", clock), Contender(cell, "b", clock)
    first.step()
    clock.on_sleep = first.step
    with pytest.raises(LeaseHeld, match=r"^a .*server\.leader\.advertise"):
        second.leadership.wait_for_term(second.step)
    assert first.leadership.leads


# --- the thread and the metrics --------------------------------------------------------------------------------------


def test_watch_that_cannot_give_the_lease_back_warns(
    cell: LeaseCell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Contender(cell, "a")
    first.step()
    watch = LeaseWatcher(first.step, first.leadership.resign)
    monkeypatch.setattr(cell, "swap_lease", raising(StoreError("HBase is away.")))
    with caplog.at_level(logging.WARNING):
        watch.stop()
    assert "HBase is away." in caplog.text


def test_watch_after_an_unexpected_error_logs_it_once_and_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leadership, "CHECK_SECONDS", 0.01)
    bugs, has_looked = iter([ZeroDivisionError("a bug"), ZeroDivisionError("a bug")]), Event()

    def look() -> None:
        if (bug := next(bugs, None)) is not None:
            raise bug
        has_looked.set()

    watch = LeaseWatcher(look, lambda: None)
    has_looked.wait(PATIENCE_SECONDS)
    watch.stop()
    assert has_looked.is_set()
    [record] = caplog.records
    assert "a bug" in record.message
    assert record.exc_info is not None


def test_metrics_of_two_servers_show_one_leader_and_the_term(cell: LeaseCell) -> None:
    first, second = Contender(cell, "a"), Contender(cell, "b")
    first.step()
    second.step()
    for one, leads in ((first, 1.0), (second, 0.0)):
        registry = CollectorRegistry()
        registry.register(LeadershipMetrics(Slots([one.leadership])))
        lines = generate_latest(registry).decode().splitlines()
        assert f"tms_server_is_leader {leads}" in lines
        assert "tms_server_term 1.0" in lines
