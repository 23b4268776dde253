"""How a single run acquires a lease whose holder may be dead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

import pytest

from janitor.app.place import hold_lease
from janitor.settings import LeaseSettings
from janitor.state.sqlite.state import SqliteState
from tests.builders import NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, StateUnavailable
from tms_core.tables.lease import Lease, LeaseRecord

WANTED = LeaseSettings(seconds=60)


class Waits(Event):
    """Passes the time it waits, and does something meanwhile."""

    def __init__(self, clock: ManualClock, during_wait: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.clock, self.during_wait = clock, during_wait
        self.seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds += timeout
        self.clock.advance(int(timeout * 1000))
        self.during_wait()
        return self.is_set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def state(clock: ManualClock) -> SqliteState:
    """A memory in which another process has the lease."""
    found = SqliteState.in_memory()
    Lease(found, "the run before", 60, clock).acquire()
    return found


def test_run_once_waits_out_the_lease_of_a_dead_holder(
    clock: ManualClock, state: SqliteState, caplog: pytest.LogCaptureFixture
) -> None:
    until = Waits(clock)
    with caplog.at_level(logging.WARNING), hold_lease(WANTED, state, clock, sole=False, until=until) as lease:
        assert lease.held
        assert 60 <= until.seconds <= 70
    assert "the run before has the lease" in caplog.text
    assert "If that process is dead, this run starts in 60 s." in caplog.text


def test_run_once_waits_for_the_lease_while_its_state_fails(
    clock: ManualClock, state: SqliteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    until, read = Waits(clock), state.lease

    def fail_twice() -> bytes | None:
        if until.seconds in (10, 15):
            raise StateUnavailable("HBase is away.")
        return read()

    monkeypatch.setattr(state, "lease", fail_twice)
    with hold_lease(WANTED, state, clock, sole=False, until=until) as lease:
        assert lease.held
    assert 60 <= until.seconds <= 70


def test_run_once_does_not_wait_for_a_live_holder(clock: ManualClock, state: SqliteState) -> None:
    assert LeaseRecord.parse(state.lease()) is not None
    alive = Lease(state, "the run before", 60, clock)
    alive.acquire(sole=True)
    until = Waits(clock, alive.renew_if_due)
    with pytest.raises(LeaseHeld, match="the run before"), hold_lease(WANTED, state, clock, sole=False, until=until):
        pass
    assert until.seconds <= 30
    alive.check()


def test_lease_wait_stopped_by_a_signal_raises(clock: ManualClock, state: SqliteState) -> None:
    until = Waits(clock)
    until.during_wait = until.set
    with pytest.raises(LeaseHeld), hold_lease(WANTED, state, clock, sole=False, until=until):
        pass
    assert until.seconds == 5
