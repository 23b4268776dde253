"""A server in a group: settings, address, and a janitor that waits for the janitor of another server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

import pytest

from tests.builders import NOW_MS
from tests.support import PATIENCE_SECONDS
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import ConfigurationError, LeaseHeld, StoreError, StoreUnavailable
from tms_core.messaging.service import MessagingService
from tms_core.server import companions
from tms_core.server.companions import Companion, Standby, start_companion
from tms_core.server.ha.member import HaMember
from tms_core.settings.models import LeaderSettings, load
from tms_core.tables.lease import LeaseRecord
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide

# --- settings --------------------------------------------------------------------------------------------------------

SEVERAL = {
    "TMS_STORAGE__KIND": "hbase",
    "TMS_TRANSACTIONS__SOURCE": "thrift",
    "TMS_SERVER__LEADER__ADVERTISE": "http://10.0.0.1:11015",
}


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ({"TMS_STORAGE__KIND": "leveldb"}, r"server\.leader\.advertise"),
        ({"TMS_TRANSACTIONS__SOURCE": "manager"}, r"transactions\.thrift.*127\.0\.0\.1.*10\.0\.0\.1:15165"),
        ({"TMS_SERVER__LEADER__ADVERTISE": "10.0.0.1:11015"}, r"server\.leader\.advertise.*http://HOST:PORT"),
        ({"TMS_SERVER__LEADER__ADVERTISE": "http://10.0.0.1"}, r"server\.leader\.advertise.*HOST:PORT"),
        ({"TMS_SERVER__LEADER__SECONDS": "1"}, r"server\.leader\.seconds"),
        ({"TMS_SERVER__LEADER__SLOTS": "65"}, r"server\.leader\.slots"),
        ({"TMS_SERVER__LEADER__SLOTS": "2", "TMS_SERVER__LEADER__ADVERTISE": "null"}, r"slots.*advertise"),
        ({"TMS_SERVER__LEADER__SLOTS": "2", "TMS_SERVER__LEADER__SERVERS": "3"}, r"servers.* 2\b"),
    ],
)
def test_impossible_settings_of_several_servers_are_named(changed: dict[str, str], setting: str) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        load(None, SEVERAL | changed, {})


@pytest.mark.parametrize("thrift", ["10.0.0.1:15165", "[::]:0"])
def test_settings_of_servers_that_reach_a_manager_are_loaded(thrift: str) -> None:
    manager = {"TMS_TRANSACTIONS__SOURCE": "manager", "TMS_TRANSACTIONS__THRIFT": thrift}
    assert load(None, SEVERAL | manager, {}).settings.transactions.thrift == thrift


def test_member_that_never_started_stops_and_leaves_no_lease() -> None:
    leases = MemorySide()
    HaMember(MemoryStore(), MemorySide(), leases, LeaderSettings(), SystemClock()).stop()
    assert leases.get(b"l") is None


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("http://127.0.0.1:0", "http://127.0.0.1:4711"),
        ("https://[::1]:0", "https://[::1]:4711"),
        ("http://tms-1.example:11015", "http://tms-1.example:11015"),
    ],
)
def test_started_member_publishes_its_address_in_the_lease(advertise: str, address: str) -> None:
    leases, led = MemorySide(), Event()

    class Service(MessagingService):
        def invalidate_topics(self, concerns: Callable[[bytes], bool]) -> bool:
            led.set()
            return super().invalidate_topics(concerns)

    store = MemoryStore()
    standing = HaMember(store, MemorySide(), leases, LeaderSettings(advertise=advertise), SystemClock())
    with Service(standing.store, ManualClock(NOW_MS), side=MemorySide()) as service:
        standing.start(service, 4711)
        assert led.wait(PATIENCE_SECONDS)
        standing.stop()
    record = LeaseRecord.parse(leases.get(b"l"))
    assert record is not None
    assert (record.address, record.holder) == (address, "")


# --- waiting janitors ------------------------------------------------------------------------------------------------


class FakeJanitor:
    """A janitor whose first starts fail.

    Attributes:
        requests: the number of starts.
        sweeps: the number of requested sweeps.
        runs: set while the janitor runs.
    """

    hold_seconds = 7200

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.requests, self.sweeps, self.runs = 0, 0, Event()

    def __call__(self) -> Companion:
        self.requests += 1
        if self.refusals:
            raise self.refusals.pop(0)
        self.runs.set()
        return self

    def run_now(self) -> None:
        self.sweeps += 1

    def stop(self) -> None:
        self.runs.clear()


HELD = LeaseHeld("another one has the lease.", "Wait.")


def test_standby_janitor_waits_and_can_be_stopped(caplog: pytest.LogCaptureFixture) -> None:
    janitor = FakeJanitor(HELD)
    with caplog.at_level(logging.INFO):
        waiting = start_companion("janitor", janitor)
    waiting.stop()
    assert janitor.requests == 1
    assert "the janitor of this server waits: another one has the lease." in caplog.text
    with pytest.raises(StoreError):
        start_companion("janitor", FakeJanitor(StoreError("HBase is away.")))


def test_standby_calls_reach_only_a_running_janitor() -> None:
    waiting = Standby("janitor", FakeJanitor(HELD), retry_seconds=3600)
    waiting.run_now()
    assert waiting.hold_seconds is None
    waiting.stop()
    janitor = FakeJanitor(HELD, HELD)
    running = Standby("janitor", janitor, retry_seconds=0.01)
    assert janitor.runs.wait(PATIENCE_SECONDS)
    running._thread.join()
    running.run_now()
    assert (janitor.sweeps, running.hold_seconds) == (1, 7200)
    running.stop()
    assert not janitor.runs.is_set()


@pytest.mark.parametrize(("kind", "growth"), [(StoreUnavailable, 1), (StoreError, 2), (ZeroDivisionError, 2)])
def test_standby_janitor_that_fails_logs_it_once_and_tries_again_later(
    kind: type[Exception], growth: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class RecordingEvent(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(companions, "Event", RecordingEvent)
    janitor = FakeJanitor(HELD, kind("HBase is away."), kind("HBase is away."))
    waiting = Standby("janitor", janitor, retry_seconds=0.01)
    is_started = janitor.runs.wait(PATIENCE_SECONDS)
    waiting.stop()
    assert (is_started, janitor.requests) == (True, 4)
    assert waits == [0.01, 0.01, 0.01 * growth, 0.01 * growth**2]
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "HBase is away." in record.message
    assert (record.exc_info is None) == issubclass(kind, StoreError)
