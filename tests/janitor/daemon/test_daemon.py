"""The daemon in virtual time: schedule, failures and status."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from janitor.daemon.daemon import HUNG_RUN_MS, LATE_TICK_MS, Daemon, DaemonPlan, Job
from janitor.daemon.snapshot_refresh import CachedSource
from janitor.daemon.trigger import interval_trigger
from janitor.daemon.watched import RunWatcher
from janitor.metrics import Metrics
from janitor.report import Report
from janitor.state.base import EVERYTHING, RunRecord, State
from janitor.state.records import TopicCount
from janitor.status.collect import DAEMON_NOTE, Deployment
from janitor.status.health import judge
from janitor.sweep import sweep
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Call, Kit, Snapshots, janitor, pointer, topic, watch
from tests.support import raising
from tests.virtual import VirtualTime, virtual_time
from tms_core.clock import ManualClock
from tms_core.errors import NoSnapshot, StateUnavailable, StoreError
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

TTL_SECONDS = 60


@dataclass
class DaemonKit:
    """A daemon with its janitor, its lease and virtual time."""

    janitor: Kit
    daemon: Daemon
    time: VirtualTime
    watched: RunWatcher
    lease: Lease | None

    @property
    def results(self) -> list[str]:
        return [run.result for run in reversed(self.janitor.state.runs(1000))]


@contextmanager
def daemon_kit(
    store: MemoryStore | None = None,
    *,
    adopt: bool = True,
    mode: Literal["apply", "plan_only"] = "apply",
    leased: bool = False,
    jobs: tuple[Job, ...] = (),
    patterns: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[DaemonKit]:
    """Start a daemon that sweeps every minute of virtual time."""
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    watched = RunWatcher(clock)
    with virtual_time(clock) as time:
        kit = janitor(store or MemoryStore(), clock=clock, observer=watched, **options)
        lease = Lease(kit.state, "this one", 60, clock) if leased else None
        if lease is not None:
            lease.acquire()
        kit = kit.restart(lease=lease) if lease else kit
        daemon = Daemon(
            kit.engine,
            watched,
            CachedSource(kit.snapshots),
            time.schedule,
            Deployment("memory", mode, "every 60 s", kit.engine.deps.terms),
            Metrics("top", 200),
            DaemonPlan(interval_trigger(60), adopt=adopt, patterns=patterns, jobs=jobs),
        )
        time.schedule.start()
        time.advance(0)
        yield DaemonKit(kit, daemon, time, watched, lease)


def test_daemon_sweeps_every_minute_and_deletes_expired_rows() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    orders.plain(NOW_MS - HOUR, NOW_MS, NOW_MS + 30 * SECOND)
    with daemon_kit(store) as kit:
        assert orders.times() == [NOW_MS, NOW_MS + 30 * SECOND]
        kit.time.advance(59)
        assert kit.results == ["done"]
        kit.time.advance(120)
        assert (kit.results, orders.times()) == (["done"] * 3, [])


@pytest.mark.parametrize("mode", ["apply", "plan_only"])
def test_daemon_with_patterns_sweeps_only_their_topics(mode: Literal["apply", "plan_only"]) -> None:
    store = MemoryStore()
    for name in ("orders", "bills"):
        topic(store, f"default:{name}", ttl_seconds=TTL_SECONDS).plain(NOW_MS - HOUR)
    with daemon_kit(store, mode=mode, patterns=("*:ord*",)) as kit:
        state = kit.janitor.state
        report = state.report(state.runs(1)[0].id, Report)
        assert report is not None
        assert [entry.topic.topic for entry in report.topics] == ["orders"]


def test_watched_run_with_counts_knows_how_much_is_left() -> None:
    store, clock = MemoryStore(), ManualClock(NOW_MS, monotonic_ms=DAY)
    progress: list[tuple[int, int]] = []
    topic(store, "default:orders", ttl_seconds=3600).plain(*(NOW_MS - 2 * HOUR + n * MINUTE for n in range(90)))
    watched = RunWatcher(clock)
    kit = janitor(store, clock=clock, observer=watched, batch_rows=20)
    kit.state.save_counts(
        {TopicId("default", "orders"): TopicCount(90, 900, NOW_MS - 2 * HOUR, NOW_MS - 30 * MINUTE, 0)}
    )

    def look(call: Call) -> None:
        if call.name == "message.delete" and watched.running is not None:
            progress.append((watched.running.done, watched.running.expected))

    watch(store, before=look)
    with watched.run():
        kit.engine.run_once(adopt=True)
    assert progress == [(20, 60), (40, 60), (60, 60)]


def test_sweep_with_a_bug_fails_the_run_and_keeps_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_kit() as kit:
        with monkeypatch.context() as patch:
            patch.setitem(sweep._STEPS, "message", raising(ZeroDivisionError("a bug")))
            kit.time.advance(60)
        assert kit.results == ["done", "failed"]
        assert [name for name, _ in kit.time.errors] == ["sweep"]
        assert kit.watched.running is None
        kit.time.advance(60)
        assert kit.results == ["done", "failed", "done"]


@pytest.mark.parametrize(
    ("mode", "expected"), [("apply", [0, 1, 60, 120, 180, 180, 240]), ("plan_only", [0, 60, 120, 180, 240])]
)
def test_job_after_sweeps_runs_after_rows_are_deleted(mode: Literal["apply", "plan_only"], expected: list[int]) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - HOUR, NOW_MS + 100 * SECOND)
    done: list[int] = []
    with daemon_kit(store, mode=mode, jobs=(Job("count", 60, lambda: done.append(1), after_sweeps=True),)) as kit:
        at = [0] * len(done)
        for second in range(1, 241):
            kit.time.advance(1)
            at += [second] * (len(done) - len(at))
        assert at == expected


def test_failing_job_is_logged_once_and_sweeps_continue(caplog: pytest.LogCaptureFixture) -> None:
    with daemon_kit(jobs=(Job("count", 60, raising(StoreError("it cannot be counted."))),)) as kit:
        kit.time.advance(120)
        assert kit.results == ["done"] * 3
    assert caplog.messages == ["count failed: it cannot be counted."]


def test_job_with_a_bug_is_named_with_its_error() -> None:
    with daemon_kit() as kit:
        kit.daemon.failed("count", ZeroDivisionError("division by zero"))
        assert kit.daemon.status().failing == {"count": "ZeroDivisionError: division by zero"}


def test_daemon_whose_start_cannot_be_recorded_records_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(State, "save_note", raising(StateUnavailable("HBase is away.")))
        with daemon_kit() as kit:
            assert "tick" in kit.daemon.status().failing
            patch.undo()
            assert kit.janitor.state.note(DAEMON_NOTE) is None
            kit.time.advance(5)
            assert kit.janitor.state.note(DAEMON_NOTE) == {"started_ms": NOW_MS}
            assert "tick" not in kit.daemon.status().failing


def test_daemon_that_may_not_adopt_deletes_nothing_before_adoption() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - HOUR)
    with daemon_kit(store, adopt=False) as kit:
        kit.time.advance(5)
        assert (kit.results, orders.times()) == (["blocked"], [NOW_MS - HOUR])
        kit.daemon.adopt()
        kit.time.advance(60)
        assert orders.times() == []


def test_adopt_does_the_jobs_of_the_daemon_at_once() -> None:
    done: list[int] = []
    with daemon_kit(adopt=False, jobs=(Job("count", 60, lambda: done.append(1)),)) as kit:
        kit.time.advance(5)
        before = len(done)
        kit.daemon.adopt()
        kit.time.advance(1)
        assert len(done) == before + 1


def test_daemon_without_apply_only_plans_and_shows_what_is_due() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    orders.plain(NOW_MS - HOUR)
    with daemon_kit(store, mode="plan_only") as kit:
        kit.time.advance(65)
        assert orders.times() == [NOW_MS - HOUR]
        assert {(run.mode, run.result) for run in kit.janitor.state.runs(10)} == {("plan", "done")}
        assert [(item.table, item.rule, item.rows) for item in kit.daemon.status().overdue] == [
            ("message", "expired", 1)
        ]


def test_idle_daemon_keeps_renewing_its_lease() -> None:
    with daemon_kit(leased=True) as kit:
        assert kit.lease is not None
        kit.time.advance(3600)
        kit.lease.check()
        assert kit.daemon.status().leader


def test_daemon_without_its_lease_sweeps_again_when_it_is_free() -> None:
    """S12."""
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS)
    with daemon_kit(store, leased=True) as kit:
        other = Lease(kit.janitor.state, "another", 60, kit.time.clock)
        other.acquire(sole=True)
        for _ in range(10):
            kit.time.advance(30)
            other.renew()
        status = kit.daemon.status()
        assert (kit.results, status.leader, status.lease_holder) == (["done"], False, "another")
        other.release()
        kit.time.advance(60)
        assert (orders.times(), kit.daemon.status().leader) == ([], True)


def test_status_of_a_daemon_has_its_schedule_and_next_run() -> None:
    with daemon_kit() as kit:
        kit.time.advance(125)
        status = kit.daemon.status()
        assert (status.schedule, status.next_run_ms) == ("every 60 s", NOW_MS + 180 * SECOND)


def test_status_between_two_sweeps_has_the_newest_snapshot() -> None:
    with daemon_kit() as kit:
        kit.janitor.snapshots.invalid = [pointer(NOW_MS - HOUR)]
        kit.time.advance(59)
        assert kit.results == ["done"]
        seen = kit.daemon.status().snapshot
        assert (seen.timestamp_ms, seen.source) == (NOW_MS + 30 * SECOND, f"snapshot.{NOW_MS + 30 * SECOND}")
        assert (seen.invalid, seen.problem) == (1, "")


def test_daemon_without_a_recent_tick_is_not_alive() -> None:
    """S10: a hung loop is not alive."""
    with daemon_kit() as kit:
        assert kit.daemon.alive() == ""
        kit.time.clock.advance(LATE_TICK_MS + 1)
        assert "60 s" in kit.daemon.alive()


def test_daemon_with_a_hung_run_is_not_alive() -> None:
    with daemon_kit() as kit:
        with kit.watched.run():
            kit.time.clock.advance(HUNG_RUN_MS)
            kit.daemon.tick()
            assert kit.daemon.alive() == ""
            kit.time.clock.advance(1)
            assert "the current run" in kit.daemon.alive()
            kit.watched("message", None, 10)
            assert kit.daemon.alive() == ""
            running = kit.watched.running
            assert running is not None
            assert (running.phase, running.rows) == ("message", 10)
        assert kit.watched.running is None


def test_daemon_after_a_stop_request_is_not_ready() -> None:
    with daemon_kit() as kit:
        assert kit.daemon.ready() == ""
        kit.daemon.request_stop()
        assert kit.daemon.ready() == "the janitor is stopping"


def test_paused_daemon_is_ready() -> None:
    with daemon_kit() as kit:
        kit.janitor.state.pause(EVERYTHING, NOW_MS)
        kit.time.advance(60)
        assert kit.daemon.ready() == ""


def test_metrics_of_a_daemon_are_those_of_its_status() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - HOUR)
    with daemon_kit(store) as kit:
        kit.time.advance(5)
        body, content_type = kit.daemon.metrics()
        assert content_type.startswith("text/plain")
        assert b'tms_janitor_rows_deleted_total{rule="expired",table="message"} 1.0' in body
        assert [run.expired for run in kit.daemon.runs(5)] == [1]


def test_daemon_with_a_failing_job_reports_it_until_it_succeeds() -> None:
    """Report failures that record no run, for example a state that cannot be written."""
    broken: list[bool] = []
    with daemon_kit() as kit:
        begin_run = kit.janitor.state.begin_run

        def fail(run: RunRecord) -> None:
            if broken:
                raise StoreError("the state cannot be written.")
            begin_run(run)

        kit.janitor.state.begin_run = fail  # type: ignore[method-assign]
        broken.append(True)
        kit.time.advance(60)
        assert kit.daemon.status().failing == {"sweep": "the state cannot be written."}
        assert judge(kit.daemon.status()).level == "attention"
        assert kit.daemon.ready() == "sweep fails: the state cannot be written."
        assert kit.daemon.alive() == ""
        broken.clear()
        kit.time.advance(60)
        assert (kit.daemon.status().failing, kit.daemon.ready()) == ({}, "")


def test_sweep_now_visits_every_topic() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=100 * 600)
    orders.plain(NOW_MS - 100 * 600 * SECOND)
    with daemon_kit(store) as kit:
        kit.time.advance(61)
        assert len(orders.times()) == 1
        kit.daemon.sweep_now()
        kit.time.advance(2)
        assert orders.times() == []


def test_snapshots_that_cannot_be_read_give_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    manager = Snapshots(ManualClock(NOW_MS), error=NoSnapshot("the folder is empty"))
    source = CachedSource(manager)
    with pytest.raises(NoSnapshot, match="the folder is empty"):
        source.latest()
    source.refresh()
    manager.error = None
    caplog.set_level(logging.INFO)
    source.refresh()
    assert source.latest().snapshot.timestamp_ms == NOW_MS
    # One line for the failure, not one per attempt, and one for its end.
    assert [(record.levelname, "the folder is empty" in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True),
        ("INFO", False),
    ]


def test_last_snapshot_serves_while_no_newer_one_can_be_read() -> None:
    manager = Snapshots(ManualClock(NOW_MS))
    source = CachedSource(manager)
    first = source.latest()
    manager.error = NoSnapshot("the folder is not mounted")
    source.refresh()
    assert (source.latest(), manager.reads) == (first, 2)
