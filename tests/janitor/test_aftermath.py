"""What must not be lost when the end of a run cannot be written down, the clock is in doubt, or a plan fails."""

from __future__ import annotations

from threading import Thread

import pytest

from janitor.status.collect import SILENT_MS, Deployment, collect
from tests.builders import DAY, HOUR, NOW_MS, SECOND, Call, fail_at, janitor, topic, watch, watch_state
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId


def test_run_whose_end_was_not_written_is_in_the_ledger() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60)
    orders.plain(NOW_MS - HOUR, NOW_MS)
    kit = janitor(store)
    full = [True]
    watch_state(kit.state, before=fail_at("state.finish_run", StoreError("the disk is full."), lambda _: full))
    with pytest.raises(StoreError, match="the disk is full"):
        kit.engine.run_once(adopt=True)
    assert orders.times() == [NOW_MS]
    full.clear()
    kit.engine.run_once()
    assert [run.result for run in kit.state.runs(5)] == ["done", "lost"]
    [entry] = kit.state.ledger(10, topic=TopicId("default", "orders"))
    assert (entry.rows, entry.rule) == (None, "expired")


def test_daemon_that_plans_counts_nothing_as_deleted() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - HOUR)
    kit = janitor(store)
    kit.engine.adopt()
    report = kit.engine.rehearse()
    assert [report.full, kit.engine.rehearse().full] == [True, False]
    names = {key.name for key in kit.state.counters()}
    assert "rows_deleted_total" not in names
    assert {"sweeps_total", "rows_scanned_total", "sweep_phase_duration_seconds_sum"} <= names
    status = collect(kit.state, Deployment("memory", "plan_only", "every 60 s", kit.engine.deps.terms), kit.clock)
    assert status.snapshot.timestamp_ms == NOW_MS
    assert [(item.rule, item.rows) for item in status.overdue] == [("expired", 1)]
    assert status.kept == report.to_json()["totals"]["kept"] != {}


def test_lease_renewed_during_a_run_blocks_nobody() -> None:
    """The run takes the memory's lock before the lease's; whoever did it the other way round could wait for ever."""
    store, clock = MemoryStore(), ManualClock(NOW_MS, monotonic_ms=DAY)
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - HOUR)
    kit = janitor(store, clock=clock)
    lease = Lease(kit.state, "this one", 60, clock)
    lease.acquire()
    kit = kit.restart(lease=lease)
    beside: list[bool] = []

    def look_after(call: Call) -> None:
        if call.name == "message.delete" and not beside:
            clock.advance(50 * SECOND)
            before = kit.state.lease()
            thread = Thread(target=kit.engine.renew_lease)
            thread.start()
            thread.join(10)
            beside.append(not thread.is_alive() and kit.state.lease() == before)

    watch(store, before=look_after)
    assert kit.engine.run_once(adopt=True).errors == []
    assert beside == [True]
    clock.advance(50 * SECOND)
    before = kit.state.lease()
    kit.engine.renew_lease()
    assert kit.state.lease() != before


def test_runs_hours_apart_are_missed_by_their_own_measure() -> None:
    kit = janitor(MemoryStore())
    for _ in range(3):
        kit.engine.run_once(adopt=True)
        kit.clock.advance(6 * HOUR)
    deployment = Deployment("memory", "apply", "", kit.engine.deps.terms)
    assert 6 * HOUR > SILENT_MS
    assert collect(kit.state, deployment, kit.clock).process == "between_runs"
    kit.clock.advance(7 * HOUR)
    assert collect(kit.state, deployment, kit.clock).process == "down"
