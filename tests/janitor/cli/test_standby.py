"""A daemon that starts while another janitor has the lease of a shared store."""

from __future__ import annotations

import re
from functools import partial
from threading import Event
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
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, LeaseHeld, StateUnavailable, StoreUnavailable
from tms_core.tables.base import Store
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore

SECONDS = 60
PROBES = ("healthz", "readyz", "metrics")


class Patience(Event):
    """Waits without any time going by but the clock's; it is over after some seconds, if ever."""

    def __init__(self, clock: ManualClock, ends_after: float | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._left = ends_after
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._clock.sleep(timeout)
        if self._left is not None and sum(self.waits) >= self._left:
            self.set()
        return self.is_set()


class SharedPlace:
    """As a store in HBase: open to all."""

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
    patience = Patience(clock)
    dead = Lease(state, "dead", SECONDS, clock)
    dead.acquire()
    with current.lease(state, MemoryStore(), patience) as lease:
        assert lease is not None
        assert (lease.held, lease.fence) == (True, dead.fence + 1)
    assert SECONDS < sum(patience.waits) <= SECONDS + 2 * leases.STANDBY_SECONDS
    assert [record.message[:28] for record in caplog.records] == ["on standby: dead has the lea"]


def test_standby_whose_state_fails_keeps_waiting_for_the_lease(
    current: Session,
    clock: ManualClock,
    state: SqliteState,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience, read = Patience(clock), state.lease
    Lease(state, "dead", SECONDS, clock).acquire()

    def fail_twice() -> bytes | None:
        if len(patience.waits) in (2, 3):
            raise StateUnavailable("HBase is away.")
        return read()

    monkeypatch.setattr(state, "lease", fail_twice)
    with current.lease(state, MemoryStore(), patience) as lease:
        assert lease.held
    assert set(patience.waits) == {leases.STANDBY_SECONDS}
    assert SECONDS < sum(patience.waits) <= SECONDS + 2 * leases.STANDBY_SECONDS
    dead = "on standby: dead has the lea"
    assert [record.message[:28] for record in caplog.records] == [dead, "on standby: HBase is away. T", dead]


def test_standby_of_a_live_lease_holder_can_be_stopped(
    current: Session, clock: ManualClock, state: SqliteState
) -> None:
    holder = Lease(state, "at work", SECONDS, clock)
    holder.acquire()

    class Watched(Patience):
        def wait(self, timeout: float | None = None) -> bool:
            holder.renew_if_due()
            return super().wait(timeout)

    patience = Watched(clock, ends_after=10 * SECONDS)
    with pytest.raises(LeaseHeld), current.lease(state, MemoryStore(), patience):
        raise AssertionError("two have the lease")
    holder.confirm()


def test_lease_of_another_holder_without_standby_raises(
    current: Session, clock: ManualClock, state: SqliteState
) -> None:
    Lease(state, "at work", SECONDS, clock).acquire()
    with pytest.raises(LeaseHeld), current.lease(state, MemoryStore()):
        raise AssertionError("two have the lease")


class PlaceThatIsDown(SharedPlace):
    """A store whose servers do not answer for some attempts; then opening it goes on to the next error."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts

    def writable(self) -> Store:
        self._attempts -= 1
        if self._attempts >= 0:
            raise StoreUnavailable("No Thrift server answers.", "")
        raise ConfigurationError("It answers.", "")


def test_daemon_without_a_store_waits(clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    current.place = cast(Place, PlaceThatIsDown(3))
    waiting = Patience(clock)
    monkeypatch.setattr(serving, "Event", lambda: waiting)
    with pytest.raises(ConfigurationError, match="It answers"):
        serving.serve(current, standby=True)
    assert waiting.waits == [serving.RETRY_SECONDS] * 3


def test_daemon_waiting_for_its_store_is_alive_and_not_ready(
    clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    current.place = cast(Place, PlaceThatIsDown(1))
    url = f"http://127.0.0.1:{current.settings.janitor.http.port}"
    seen: list[tuple[int, str]] = []

    class Probed(Patience):
        def wait(self, timeout: float | None = None) -> bool:
            seen.extend((found.status_code, found.text) for found in (httpx2.get(f"{url}/{each}") for each in PROBES))
            return super().wait(timeout)

    monkeypatch.setattr(serving, "Event", partial(Probed, clock))
    with pytest.raises(ConfigurationError, match="It answers"):
        serving.serve(current, standby=True)
    assert seen == [(200, "ok"), (503, serving.WAITING), (503, serving.WAITING)]
    # And afterwards the port is free again
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_daemon_stopped_while_waiting_for_its_store_exits_0(
    clock: ManualClock, current: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current.place = cast(Place, PlaceThatIsDown(1_000))
    waiting = Patience(clock, ends_after=3 * serving.RETRY_SECONDS)
    monkeypatch.setattr(serving, "Event", lambda: waiting)
    assert serving.serve(current, standby=True) == 0
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(r"No Thrift server answers\. .* 10 s", warning)
