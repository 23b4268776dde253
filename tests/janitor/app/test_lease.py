"""How a single run acquires a lease whose holder may be dead."""

from __future__ import annotations

import logging

import pytest

from janitor.app.place import hold_lease
from janitor.settings import LeaseSettings
from janitor.state.sqlite.state import SqliteState
from tests.builders import NOW_MS
from tests.virtual import VirtualEvent
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, StateUnavailable
from tms_core.tables.lease import Lease, LeaseRecord

WANTED = LeaseSettings(seconds=60)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def state(clock: ManualClock) -> SqliteState:
    """Return a state in which another process has the lease."""
    found = SqliteState.in_memory()
    Lease(found, "the run before", 60, clock).acquire()
    return found


def test_run_once_waits_out_the_lease_of_a_dead_holder(
    clock: ManualClock, state: SqliteState, caplog: pytest.LogCaptureFixture
) -> None:
    until = VirtualEvent(clock)
    with caplog.at_level(logging.WARNING), hold_lease(WANTED, state, clock, sole=False, until=until) as lease:
        assert lease.held
        assert 60 <= sum(until.waits) <= 70
    assert "the run before has the lease" in caplog.text
    assert "If that process is dead, this run starts in 60 s." in caplog.text


def test_run_once_waits_for_the_lease_while_its_state_fails(
    clock: ManualClock, state: SqliteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    until, read = VirtualEvent(clock), state.lease

    def fail_twice() -> bytes | None:
        if len(until.waits) in (2, 3):
            raise StateUnavailable("HBase is away.")
        return read()

    monkeypatch.setattr(state, "lease", fail_twice)
    with hold_lease(WANTED, state, clock, sole=False, until=until) as lease:
        assert lease.held
    assert 60 <= sum(until.waits) <= 70


def test_run_once_does_not_wait_for_a_live_holder(clock: ManualClock, state: SqliteState) -> None:
    assert LeaseRecord.parse(state.lease()) is not None
    alive = Lease(state, "the run before", 60, clock)
    alive.acquire(sole=True)
    until = VirtualEvent(clock, alive.renew_if_due)
    with pytest.raises(LeaseHeld, match="the run before"), hold_lease(WANTED, state, clock, sole=False, until=until):
        pass
    assert sum(until.waits) <= 30
    alive.check()


def test_lease_wait_stopped_by_a_signal_raises(clock: ManualClock, state: SqliteState) -> None:
    until = VirtualEvent(clock)
    until.during_wait = until.set
    with pytest.raises(LeaseHeld), hold_lease(WANTED, state, clock, sole=False, until=until):
        pass
    assert sum(until.waits) == 5
