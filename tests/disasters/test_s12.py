"""S12: only one janitor writes: it checks its lease before each batch, and a lost lease ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from janitor.cli.main import execute
from janitor.report import Report
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.executor import HEARTBEAT_MS
from tests.builders import (
    HOUR,
    MINUTE,
    NOW_MS,
    Call,
    ProcessKilled,
    Topic,
    fail_at,
    janitor,
    pointer,
    topic,
    watch,
    watch_state,
)
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, StateBusy, StateError
from tms_core.tables.base import Store
from tms_core.tables.lease import WALL_ALLOWANCE_MS, Lease, LeaseRecord
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore

SECONDS = 60
TTL_SECONDS = 3600
INVALID = pointer(NOW_MS - 10 * HOUR)
DUE_MS = [NOW_MS - 2 * HOUR + number for number in range(7)]
#: Upper limit of store calls of each sweep below.
CALLS = 300
WRITES = (".delete", ".invert")


class TwoJanitors:
    """Two janitors on one store, with separate states and a common lease."""

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        self.store = store
        self.orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
        self.other = topic(store, "default:other", ttl_seconds=TTL_SECONDS)
        self.cell = SqliteState.in_memory()
        first = janitor(store, batch_rows=2, state=self.cell if shared else None)
        second = janitor(
            store, batch_rows=2, state=first.state if shared else None, clock=first.clock, snapshots=first.snapshots
        )
        first.engine.run_once(adopt=True)
        if not shared:
            second.engine.run_once(adopt=True)
        for described in (self.orders, self.other):
            described.plain(*DUE_MS, NOW_MS).stored(pointer(DUE_MS[0]), *DUE_MS).tx(INVALID, NOW_MS)
        first.snapshots.invalid = [INVALID]
        first.state.save_last_full_pass_ms(0)
        second.state.save_last_full_pass_ms(0)
        self.leases = [Lease(self.cell, name, SECONDS, first.clock) for name in "ab"]
        self.first, self.second = (
            kit.restart(lease=lease) for kit, lease in zip((first, second), self.leases, strict=True)
        )

    def is_clean(self) -> bool:
        return all(
            (described.times(), described.pointers(), described.stored_times())
            == ([NOW_MS, NOW_MS], [None, -INVALID], [])
            for described in (self.orders, self.other)
        )


class LeaseTakeover:
    """A watcher that takes over the lease before the k-th store call, and records later writes."""

    def __init__(self, pair: TwoJanitors, at_call: int, then: Callable[[], object] = lambda: None) -> None:
        self.pair, self.at_call, self.then = pair, at_call, then
        self.calls = 0
        self.at: str | None = None
        self.written: list[str] = []
        watch(pair.store, before=self)

    def __call__(self, call: Call) -> None:
        self.calls += 1
        if self.calls == self.at_call:
            self.at = call.name
            self.pair.leases[1].acquire(sole=True)
            self.then()
        if self.at is not None and call.name.endswith(WRITES):
            self.written.append(call.name)


def test_lease_lost_at_any_call_ends_the_run_after_its_batch() -> None:
    seen = set()
    for at_call in range(1, CALLS):
        pair = TwoJanitors(MemoryStore())
        pair.leases[0].acquire()
        frontiers, proven = pair.first.state.frontiers(), pair.first.state.boundary()
        taken = LeaseTakeover(pair, at_call)
        report = pair.first.engine.run_once()
        if taken.at is None:
            break
        # A batch after its check, or in the store call, cannot be canceled.
        has_started = taken.at == "metadata.get" or taken.at.endswith(WRITES)
        assert len(taken.written) == has_started, f"at call {at_call}, {taken.at}"
        run = pair.first.state.runs(1)[0]
        if run.result == "interrupted":
            seen.add(taken.at)
            assert pair.first.state.report(run.id, Report) == report
            assert (pair.first.state.frontiers(), pair.first.state.boundary()) == (frontiers, proven)
            assert report.boundary == (proven.bound if proven else None)
        pair.second.engine.run_once()
        assert pair.is_clean()
    assert at_call > 40
    assert {"metadata.get", "message.delete", "message.invert", "payload.delete", "message.keys"} <= seen


def test_concurrent_sweeps_delete_each_row_once() -> None:
    for at_call in range(1, CALLS, 3):
        pair = TwoJanitors(MemoryStore())
        pair.leases[0].acquire()
        taken = LeaseTakeover(pair, at_call, pair.second.engine.run_once)
        pair.first.engine.run_once()
        if taken.at is None:
            break
        assert len(taken.written) <= 1
        assert pair.is_clean()
        assert pair.second.state.runs(1)[0].result == "done"
    assert at_call > 40


def test_ttl_extended_by_new_holder_protects_rows_from_previous_holder() -> None:
    for at_call in range(1, CALLS):
        pair = TwoJanitors(MemoryStore())
        pair.leases[0].acquire()
        left: list[tuple[list[int], list[int]]] = []

        def lengthen(pair: TwoJanitors = pair, left: list[tuple[list[int], list[int]]] = left) -> None:
            for described in (pair.orders, pair.other):
                described.describe(ttl_seconds=10 * TTL_SECONDS)
                left.append((described.times(), described.stored_times()))

        taken = LeaseTakeover(pair, at_call, lengthen)
        pair.first.engine.run_once()
        if taken.at is None:
            break
        if taken.at.endswith(".delete"):
            continue  # That batch used the metadata read just before (S2).
        assert [(d.times(), d.stored_times()) for d in (pair.orders, pair.other)] == left, f"at call {at_call}"
    assert at_call > 40


def test_lease_excludes_others_until_released() -> None:
    pair = TwoJanitors(MemoryStore())
    first, second = pair.leases
    first.acquire()
    pair.first.engine.run_once()
    with pytest.raises(LeaseHeld, match=r"^a "):
        second.acquire()
    fence = first.fence
    first.release()
    second.acquire()
    assert second.fence == fence + 1
    report = pair.first.engine.run_once()
    assert [note.guard for note in report.guards] == ["lease"], "it must not continue with a released lease"
    assert pair.second.engine.run_once().errors == []


def test_run_without_lease_writes_nothing(store: Store) -> None:
    pair = TwoJanitors(store)
    before = (pair.orders.messages(), pair.orders.stored_times())
    assert [note.guard for note in pair.first.engine.run_once().guards] == ["lease"]
    assert (pair.orders.messages(), pair.orders.stored_times()) == before


def test_challenger_with_clock_ahead_fences_the_holder() -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    ahead = Lease(pair.cell, "c", SECONDS, ManualClock(NOW_MS + SECONDS * 1000 + WALL_ALLOWANCE_MS + 1))
    taken: list[int] = []
    written: list[str] = []

    def take(call: Call) -> None:
        if call.name == "message.delete" and not taken:
            ahead.acquire()
            taken.append(ahead.fence)
        elif taken and call.name.endswith(WRITES):
            written.append(call.name)

    watch(pair.store, before=take)
    pair.first.engine.run_once()
    assert (taken, written) == ([2], [])
    ahead.check()


def test_lease_lost_during_rate_limit_wait_ends_the_run() -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    slow = pair.first.restart(rows_per_second=0.05)
    taken = LeaseTakeover(pair, 10**6)
    sleep = slow.clock.sleep

    def lose(seconds: float) -> None:
        if slow.clock.now_ms() >= NOW_MS + 3_000 and taken.at is None:
            taken.at = "wait"
            pair.leases[1].acquire(sole=True)
        sleep(seconds)

    slow.clock.sleep = lose  # type: ignore[method-assign]
    slow.engine.run_once()
    assert taken.written == []
    assert slow.clock.now_ms() - NOW_MS <= 3_000 + HEARTBEAT_MS + 1_000


def test_run_without_lease_setting_does_not_check_a_lease(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=60).plain(1)
    kit = janitor(store)
    kit.engine.run_once(adopt=True)
    assert (orders.times(), kit.state.lease()) == ([], None)


def test_unreadable_state_before_a_batch_prevents_the_batch() -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    before = pair.orders.messages()
    pair.cell.lease = raising(StateError("the state cannot be read."))  # type: ignore[method-assign]
    with pytest.raises(StateError, match="cannot be read"):
        pair.first.engine.run_once()
    assert pair.orders.messages() == before
    assert pair.first.state.runs(1)[0].result == "failed"


@pytest.mark.parametrize("call", ["save_frontiers", "save_strikes", "finish_run"])
def test_state_written_by_another_at_the_end_is_a_lost_lease(call: str) -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    proven = pair.first.state.boundary()

    def refuse(store_call: Call) -> None:
        if store_call.name == f"state.{call}":
            pair.leases[1].acquire(sole=True)
            raise StateBusy("b is writing it.")

    watch_state(pair.first.state, before=refuse)
    report = pair.first.engine.run_once()
    assert (report.guards[-1].guard, report.guards[-1].tripped) == ("lease", False)
    assert call == "finish_run" or pair.first.state.boundary() == proven


def test_previous_holder_keeps_the_adoption_of_a_restored_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    syncs: list[str] = []

    def take_over(call: Call) -> None:
        # The second sync is the last call of the pass.
        syncs.extend([call.name] * (call.name == "payload.sync"))
        if len(syncs) == 2 and call.name == "payload.sync":
            pair.leases[1].acquire(sole=True)

    watch(pair.store, before=take_over)
    monkeypatch.setattr(MemoryStore, "find_restore_evidence", lambda *_: "it is older" if len(syncs) == 2 else None)
    report = pair.first.engine.run_once()
    assert (len(syncs), report.guards[-1].guard) == (2, "lease")
    record = pair.first.state.store()
    assert record is not None
    assert record.adopted_ms is not None


@pytest.mark.parametrize("call", ["save_frontiers", "save_heartbeat"])
def test_busy_state_under_the_lease_fails_the_run(call: str) -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()
    watch_state(pair.first.state, before=fail_at(f"state.{call}", StateBusy("another process is writing it.")))
    watch(pair.store, before=lambda _: pair.first.clock.advance(HEARTBEAT_MS))
    with pytest.raises(StateBusy):
        pair.first.engine.run_once()
    assert pair.first.state.runs(1)[0].result == "failed"


def test_rejected_heartbeat_is_a_lost_lease() -> None:
    pair = TwoJanitors(MemoryStore())
    pair.leases[0].acquire()

    def refuse(store_call: Call) -> None:
        if store_call.name == "state.save_heartbeat":
            pair.leases[1].acquire(sole=True)
            raise StateBusy("b is writing it.")

    watch_state(pair.first.state, before=refuse)
    watch(pair.store, before=lambda _: pair.first.clock.advance(HEARTBEAT_MS))
    report = pair.first.engine.run_once()
    assert (report.guards[-1].guard, pair.first.state.runs(1)[0].result) == ("lease", "interrupted")


def test_run_closed_as_lost_is_not_updated_by_its_own_end() -> None:
    pair = TwoJanitors(MemoryStore(), shared=True)
    pair.leases[0].acquire()
    recovered: list[int] = []

    def recover() -> None:
        pair.second.engine.recover()
        recovered.append(len(pair.cell.ledger(100)))

    taken = LeaseTakeover(pair, 12, recover)
    pair.first.engine.run_once()
    assert taken.at is not None
    assert pair.cell.runs(1)[0].result == "lost"
    assert len(pair.cell.ledger(100)) == recovered[0] > 0, "no entry is duplicated"


def test_intent_of_new_holder_survives_the_previous_holder() -> None:
    pair = TwoJanitors(MemoryStore(), shared=True)
    pair.leases[0].acquire()
    announced: list[int] = []

    def sweep_and_die() -> None:
        pair.second.engine.recover()
        watch_state(pair.cell, before=fail_at("state.clear_intents", ProcessKilled))
        with pytest.raises(ProcessKilled):
            pair.second.engine.run_once()
        del pair.cell.clear_intents
        announced.append(len(pair.cell.intents()))

    taken = LeaseTakeover(pair, 12, sweep_and_die)
    pair.first.engine.run_once()
    assert taken.at is not None
    assert len(pair.cell.intents()) == announced[0] > 0


def test_command_without_the_lease_exits_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        orders = topic(store, "default:orders", ttl_seconds=60).plain(1)
    with SqliteState(tmp_path / "messaging.janitor") as state:
        Lease(state, "the other one", SECONDS, ManualClock(NOW_MS)).acquire()
    acquire = Lease.acquire
    monkeypatch.setattr(Lease, "acquire", lambda lease, **_: acquire(lease))
    clock = ManualClock(NOW_MS + MINUTE)
    command = ["run", "--once", "--adopt", "--leveldb", str(tmp_path / "messaging")]
    assert execute(command, clock) == 4
    assert "[TMS-LEASE-HELD]" in capsys.readouterr().err
    assert execute([*command, "--skip-if-locked"], clock) == 0
    assert "skipped" in capsys.readouterr().err
    monkeypatch.undo()
    assert execute(command, clock) == 0
    with LevelDBStore(tmp_path / "messaging") as store:
        assert Topic(store, orders.id).times() == []
    with SqliteState(tmp_path / "messaging.janitor") as state:
        record = LeaseRecord.parse(state.lease())
    assert record is not None
    assert (record.holder, record.fence) == ("", 2), "given back"
