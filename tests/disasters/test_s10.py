"""S10: no sweep hangs forever: every run sends heartbeats, and the next holder closes a run without them."""

from __future__ import annotations

from collections.abc import Callable
from threading import current_thread

import pytest

from janitor.state.base import EVERYTHING
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.executor import HEARTBEAT_MS
from tests.builders import (
    DAY,
    HOUR,
    MINUTE,
    NOW_MS,
    SECOND,
    Call,
    Kit,
    ProcessKilled,
    Topic,
    fail_at,
    janitor,
    pointer,
    topic,
    unknown_topic,
    watch,
)
from tms_core.errors import LeaseHeld
from tms_core.tables import compaction
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.memory import MemoryStore

LEASE_SECONDS = 60
TTL_SECONDS = 86400
INVALID = pointer(NOW_MS - 10 * HOUR)
#: Maximum store calls between two heartbeats; each call has a timeout.
CALLS_BETWEEN = 5


def leased_janitor(
    store: Store, state: SqliteState | None = None, holder: str = "a", **options: object
) -> tuple[Kit, Lease]:
    """Return a janitor with a lease in its state."""
    kit = janitor(store, state=state or SqliteState.in_memory(), **options)  # type: ignore[arg-type]
    lease = Lease(kit.state, holder, LEASE_SECONDS, kit.clock)
    return kit.restart(lease=lease), lease


def heartbeat_ms(kit: Kit) -> int:
    found = kit.state.runs(1)[0].heartbeat_ms
    assert found is not None
    return found


def beat(kit: Kit) -> int:
    record = LeaseRecord.parse(kit.state.lease())
    assert record is not None
    return record.beat


class SlowStore:
    """A store with slow calls; counts the calls between two heartbeats of a run.

    Attributes:
        most: the maximum calls between two heartbeats, by the name of the last call.
    """

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.silent = 0
        self.last_ms = 0
        self.most: dict[str, int] = {}
        watch(kit.store, before=self)

    def __call__(self, call: Call) -> None:
        if current_thread().name.startswith("compact"):
            # A concurrent compaction does not block a run.
            self.most.setdefault(call.name, 0)
            return
        self.kit.clock.advance(HEARTBEAT_MS)
        runs = self.kit.state.unfinished_runs()
        if not runs:
            return
        found = runs[0].heartbeat_ms or 0
        self.silent = 0 if found != self.last_ms else self.silent + 1
        self.last_ms = found
        self.most[call.name] = max(self.silent, self.most.get(call.name, 0))


def fill(store: Store) -> Topic:
    """Store many rows of every kind."""
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS, generation=2)
    due = [NOW_MS - 2 * DAY + number for number in range(12)]
    orders.plain(*due, NOW_MS).tx(INVALID, *range(NOW_MS - 12, NOW_MS)).at(1).plain(*due)
    orders.stored(pointer(due[0]), *due).stored(INVALID, *due)
    # The search for their messages reads many rows.
    orders.stored(pointer(NOW_MS - DAY - HOUR), NOW_MS - DAY - HOUR).at(3).plain(*due)
    orders.ref(pointer(NOW_MS), *range(NOW_MS - DAY + MINUTE, NOW_MS - DAY + MINUTE + 12))
    for number in range(20):
        topic(store, f"default:quiet{number}", ttl_seconds=TTL_SECONDS).plain(NOW_MS)
        unknown_topic(store, f"default:stray{number}").plain(*range(5)).tx(INVALID, 9)
    for start in (b"#", b"default:p", b"~"):
        keys = [start + number.to_bytes(2, "big") for number in range(12)]
        store.message.put([(key, MessageValue(INVALID, b"?")) for key in keys])
        store.payload.put([(key, b"?") for key in keys])
    return orders


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("patient", [True, False])
def test_run_on_slow_store_keeps_its_heartbeat(
    store: Store, full: bool, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "WORTHWHILE_ROWS", 1)
    monkeypatch.setattr(compaction, "SLICE_ROWS", 4)
    kit, lease = leased_janitor(store, batch_rows=4)
    lease.acquire()
    kit.engine.run_once(adopt=True)
    orders = fill(store)
    kit.snapshots.invalid = [INVALID]
    kit.engine.approve((EVERYTHING,), clock=True)
    if full:
        kit.state.save_last_full_pass_ms(0)
    else:
        # An open transaction, whose rows a run searches for.
        kit.snapshots.invalid = [INVALID, pointer(NOW_MS - HOUR)]
    kit.clock.advance(20 * MINUTE)
    slow = SlowStore(kit)
    before = beat(kit)
    report = kit.engine.run_once(incremental=patient)
    assert report.full is full
    assert (report.errors, kit.state.runs(1)[0].result) == ([], "done")
    assert {"message.delete", "payload.delete", "message.invert", "message.compact", "message.cells"} <= set(slow.most)
    assert {name: calls for name, calls in slow.most.items() if calls > CALLS_BETWEEN} == {}
    assert beat(kit) - before > 10, "the lease is renewed, too"
    assert orders.pointers()[-1] is None


def test_rate_limit_wait_renews_heartbeat_and_lease(store: Store) -> None:
    topic(store, "default:orders", ttl_seconds=60).plain(*range(300))
    kit, lease = leased_janitor(store, batch_rows=300, rows_per_second=0.5)
    lease.acquire()
    seen: list[tuple[int, int]] = []
    sleep = kit.clock.sleep

    def watched(seconds: float) -> None:
        seen.append((kit.clock.now_ms() - heartbeat_ms(kit), beat(kit)))
        sleep(seconds)

    kit.clock.sleep = watched  # type: ignore[method-assign]
    kit.engine.run_once(adopt=True)
    assert len(seen) == 600
    assert max(age for age, _ in seen) <= HEARTBEAT_MS
    assert seen[-1][1] >= 600 // (LEASE_SECONDS // 3) - 1


def test_stop_during_rate_limit_wait_ends_within_a_second(store: Store) -> None:
    topic(store, "default:orders", ttl_seconds=60).plain(*range(300))
    kit = janitor(store, batch_rows=100, rows_per_second=0.1)
    stop_ms = NOW_MS + 7_500
    report = kit.restart(is_stopping=lambda: kit.clock.now_ms() >= stop_ms).engine.run_once(adopt=True)
    assert kit.clock.now_ms() - stop_ms < SECOND
    assert report.totals.expired == 100
    assert kit.state.runs(1)[0].result == "interrupted"


def die_at(name: str, nth: int = 1) -> Callable[[Call], None]:
    left = [nth]

    def watcher(call: Call) -> None:
        left[0] -= call.name == name
        if call.name == name and left[0] <= 0:
            raise ProcessKilled

    return watcher


def test_run_of_a_dead_process_is_closed_as_lost(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60).plain(*range(10))
    kit, lease = leased_janitor(store, batch_rows=2)
    lease.acquire()
    kit.engine.adopt()
    watch(store, before=die_at("message.delete", 3))
    with pytest.raises(ProcessKilled):
        kit.engine.run_once()
    [run] = kit.state.unfinished_runs()
    assert run.result == ""
    kit.clock.advance(MINUTE)
    next_one, challenger = leased_janitor(store, state=kit.state, holder="b", clock=kit.clock)  # type: ignore[arg-type]
    challenger.acquire(sole=True)
    assert next_one.engine.recover() == [run.id]
    closed = kit.state.run(run.id)
    assert closed is not None
    assert (closed.result, closed.finished_ms) == ("lost", NOW_MS + MINUTE)
    assert "process died" in closed.error
    [entry] = kit.state.ledger(10)
    assert (entry.run_id, entry.rows, entry.topic) == (run.id, None, orders.id)
    lost = {dict(key.labels)["result"]: n for key, n in kit.state.counters().items() if key.name == "sweeps_total"}
    assert lost == {"lost": 1}


def test_recover_without_a_lost_run_changes_nothing(store: Store) -> None:
    kit = janitor(store)
    assert kit.engine.recover() == []
    kit.engine.run_once(adopt=True)
    kit.clock.advance(DAY)
    assert kit.engine.recover() == []
    assert kit.state.created_ms() == NOW_MS
    assert [run.result for run in kit.state.runs(10)] == ["done"]


def test_run_with_a_bug_is_closed_as_failed(store: Store) -> None:
    topic(store, "default:orders", ttl_seconds=60).plain(*range(10))
    kit = janitor(store, batch_rows=2).adopt()
    watch(store, before=fail_at("payload.keys", ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        kit.engine.run_once()
    [run] = kit.state.runs(10)
    assert (run.result, kit.state.unfinished_runs()) == ("failed", [])
    assert [entry.rows for entry in kit.state.ledger(10)] == [10]


class HangingCall:
    """A store call that takes longer than the lease, while another janitor waits for the lease.

    Args:
        during_hang: called when the other janitor has the lease.
    """

    def __init__(self, kit: Kit, challenger: Lease, at_call: int, during_hang: Callable[[], object]) -> None:
        self.kit, self.challenger, self.at_call, self.during_hang = kit, challenger, at_call, during_hang
        self.calls = 0
        self.hung: str | None = None
        self.written_after: list[str] = []
        with pytest.raises(LeaseHeld):
            challenger.acquire()
        watch(kit.store, before=self)

    def __call__(self, call: Call) -> None:
        self.calls += 1
        if self.hung is not None and call.name.endswith((".delete", ".invert")):
            self.written_after.append(call.name)
        if self.calls == self.at_call:
            self.hung = call.name
            with pytest.raises(LeaseHeld):
                self.challenger.acquire()
            self.kit.clock.advance(LEASE_SECONDS * SECOND + 1)
            self.challenger.acquire()
            self.during_hang()


def two_janitors(at_call: int) -> tuple[Kit, Kit, HangingCall, Topic]:
    """Return two janitors with separate states and one lease; the first hangs in its k-th call."""
    store, cell = MemoryStore(), SqliteState.in_memory()
    orders = topic(store, "default:orders", ttl_seconds=3600)
    due = [NOW_MS - 2 * HOUR + number for number in range(4)]
    kit = janitor(store, batch_rows=2)
    other = janitor(store, batch_rows=2, clock=kit.clock, snapshots=kit.snapshots)
    for each in (kit, other):
        each.engine.run_once(adopt=True)
    orders.plain(*due, NOW_MS).stored(pointer(due[0]), *due).tx(INVALID, NOW_MS)
    kit.snapshots.invalid = [INVALID]
    leases = [Lease(cell, name, LEASE_SECONDS, kit.clock) for name in "ab"]
    leases[0].acquire()
    first, second = kit.restart(lease=leases[0]), other.restart(lease=leases[1])
    for each in (first, second):
        each.state.save_last_full_pass_ms(0)
    hang = HangingCall(first, leases[1], at_call, second.engine.run_once)
    return first, second, hang, orders


def test_run_resumed_after_a_hang_in_any_call_writes_nothing() -> None:
    for at_call in range(1, 200):
        kit, other, hang, orders = two_janitors(at_call)
        frontiers, proven = kit.state.frontiers(), kit.state.boundary()
        report = kit.engine.run_once()
        if hang.hung is None:
            break
        started_writes = [hang.hung] if hang.hung.endswith((".delete", ".invert")) else []
        # The check of the topic returned late, so its batch follows.
        between = [["message.delete"], ["payload.delete"]] if hang.hung == "metadata.get" else []
        assert hang.written_after in ([], started_writes, *between), f"at call {at_call}, {hang.hung}"
        assert (orders.times(), orders.stored_times()) == ([NOW_MS, NOW_MS], [])
        assert orders.pointers() == [None, -INVALID]
        assert other.state.runs(1)[0].result == "done"
        if kit.state.runs(1)[0].result == "interrupted":
            assert (kit.state.frontiers(), kit.state.boundary()) == (frontiers, proven)
            assert report.guards[-1].guard == "lease"
    assert at_call > 15
