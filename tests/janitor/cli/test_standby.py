"""A daemon that starts while another janitor has the lease of a shared store."""

from __future__ import annotations

import re
from functools import partial
from typing import cast

import httpx2
import pytest

from janitor.app import place as leases
from janitor.app import serve as serving
from janitor.app.options import Common
from janitor.app.place import Place
from janitor.app.session import Session
from janitor.state.sqlite.state import SqliteState
from tests.builders import NOW_MS
from tests.support import free_port
from tests.virtual import VirtualEvent
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, LeaseHeld, StateUnavailable, StoreUnavailable
from tms_core.tables.base import Store
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore

SECONDS = 60
PROBES = ("healthz", "readyz", "metrics")


class SharedPlace:
    """A place that several processes can open, like HBase."""

    exclusive = False


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def current(clock: ManualClock) -> Session:
    found = Session(Common(hbase="127.0.0.1:9"), clock, {"TMS_JANITOR__HTTP__PORT": str(free_port())})
    found.place = cast(Place, SharedPlace())
    return found


def test_standby_of_a_dead_lease_holder_acquires_the_lease(
    current: Session, clock: ManualClock, state: SqliteState, caplog: pytest.LogCaptureFixture
) -> None:
    stop = VirtualEvent(clock)
    dead = Lease(state, "dead", SECONDS, clock)
    dead.acquire()
    with current.lease(state, MemoryStore(), stop) as lease:
        assert lease is not None
        assert (lease.held, lease.fence) == (True, dead.fence + 1)
    assert SECONDS < sum(stop.waits) <= SECONDS + 2 * leases.STANDBY_SECONDS
    assert [record.message[:28] for record in caplog.records] == ["on standby: dead has the lea"]


def test_standby_whose_state_fails_keeps_waiting_for_the_lease(
    current: Session,
    clock: ManualClock,
    state: SqliteState,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, read = VirtualEvent(clock), state.lease
    Lease(state, "dead", SECONDS, clock).acquire()

    def fail_twice() -> bytes | None:
        if len(stop.waits) in (2, 3):
            raise StateUnavailable("HBase is away.")
        return read()

    monkeypatch.setattr(state, "lease", fail_twice)
    with current.lease(state, MemoryStore(), stop) as lease:
        assert lease.held
    assert set(stop.waits) == {leases.STANDBY_SECONDS}
    assert SECONDS < sum(stop.waits) <= SECONDS + 2 * leases.STANDBY_SECONDS
    dead = "on standby: dead has the lea"
    assert [record.message[:28] for record in caplog.records] == [dead, "on standby: HBase is away. T", dead]


def test_standby_of_a_live_lease_holder_can_be_stopped(
    current: Session, clock: ManualClock, state: SqliteState
) -> None:
    holder = Lease(state, "at work", SECONDS, clock)
    holder.acquire()

    stop = VirtualEvent(clock, holder.renew_if_due, ends_after=10 * SECONDS)
    with pytest.raises(LeaseHeld), current.lease(state, MemoryStore(), stop):
        raise AssertionError("two holders have the lease")
    holder.confirm()


def test_lease_of_another_holder_without_standby_raises(
    current: Session, clock: ManualClock, state: SqliteState
) -> None:
    Lease(state, "at work", SECONDS, clock).acquire()
    with pytest.raises(LeaseHeld), current.lease(state, MemoryStore()):
        raise AssertionError("two holders have the lease")


class UnavailablePlace(SharedPlace):
    """A place without a responding server for some attempts; then opening it fails with another error."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts

    def writable(self) -> Store:
        self._attempts -= 1
        if self._attempts >= 0:
            raise StoreUnavailable("No Thrift server responds.", "")
        raise ConfigurationError("It responds.", "")


def test_daemon_without_a_store_waits(clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    current.place = cast(Place, UnavailablePlace(3))
    stop = VirtualEvent(clock)
    monkeypatch.setattr(serving, "Event", lambda: stop)
    with pytest.raises(ConfigurationError, match="It responds"):
        serving.serve(current, standby=True)
    assert stop.waits == [serving.RETRY_SECONDS] * 3


def test_daemon_waiting_for_its_store_is_alive_and_not_ready(
    clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    current.place = cast(Place, UnavailablePlace(1))
    url = f"http://127.0.0.1:{current.settings.janitor.http.port}"
    seen: list[tuple[int, str]] = []

    def probe() -> None:
        seen.extend((found.status_code, found.text) for found in (httpx2.get(f"{url}/{each}") for each in PROBES))

    monkeypatch.setattr(serving, "Event", partial(VirtualEvent, clock, probe))
    with pytest.raises(ConfigurationError, match="It responds"):
        serving.serve(current, standby=True)
    assert seen == [(200, "ok"), (503, serving.WAITING), (503, serving.WAITING)]
    # The port is free again.
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_daemon_stopped_while_waiting_for_its_store_exits_0(
    clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current.place = cast(Place, UnavailablePlace(1_000))
    stop = VirtualEvent(clock, ends_after=3 * serving.RETRY_SECONDS)
    monkeypatch.setattr(serving, "Event", lambda: stop)
    assert serving.serve(current, standby=True) == 0
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(r"No Thrift server responds\. .* 10 s", warning)
