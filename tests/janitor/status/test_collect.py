"""The status, collected from the state, also without a running janitor."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from janitor.cli.status import lines
from janitor.state.base import EVERYTHING, Pause, RunRecord
from janitor.stats.consumer_lag import LATE_MS, MAX_TOPICS, note_late
from janitor.stats.topic_sizes import TopicSizeCounter
from janitor.status.collect import DAEMON_NOTE, SILENT_MS, Deployment, Live, collect
from janitor.status.health import judge
from janitor.status.past import topic_detail
from janitor.status.status import Status
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Kit, adopted_janitor, janitor, pointer, topic
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

ARGUMENTS = "--config janitor.yaml --snapshots tx"


def collect_status(kit: Kit, **options: Any) -> Status:
    deployment = Deployment("memory", "apply", "every 60 s", kit.engine.deps.terms, arguments=ARGUMENTS)
    return collect(kit.state, deployment, kit.clock, **options)


def test_collect_from_an_empty_state_is_down_and_empty() -> None:
    status = collect_status(janitor(MemoryStore()))
    assert (status.process, status.adopted_ms, status.last_run, status.heartbeat_ms) == ("down", None, None, None)
    assert (status.held, status.topics, status.counters, status.boundary.bound) == ([], [], {}, None)
    assert status.boundary.obstacles != []


def test_collect_after_the_package_was_replaced_shows_the_running_version(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = janitor(MemoryStore())
    version = collect_status(kit).version
    monkeypatch.setattr(metadata, "version", raising(metadata.PackageNotFoundError("tms-janitor")))
    assert collect_status(kit).version == version


def test_collect_after_a_shorter_ttl_shows_hold_command_and_end() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR, NOW_MS)
    kit = adopted_janitor(store, hold_seconds=600)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    [held] = collect_status(kit).held
    assert (held.topic, held.reason, held.rows, held.oldest_ms) == ("default:orders", "frontier", 1, NOW_MS - HOUR)
    assert held.until_ms == NOW_MS + 600 * SECOND
    assert held.command == f"janitor approve default:orders {ARGUMENTS}"
    back = "tms topic update default:orders --ttl 86400 --config janitor.yaml"
    assert held.keep == (back, f"janitor pause default:orders {ARGUMENTS}"), "the other options are not those of tms"
    [late] = collect_status(kit).overdue
    assert (late.table, late.rule, late.rows, late.oldest_ms) == ("message", "expired", 1, NOW_MS - HOUR)
    [figures] = collect_status(kit).topics
    assert (figures.overdue_rows, figures.oldest_overdue_ms) == (1, NOW_MS - HOUR)

    # After an approval the topic is not held, and the next run deletes its rows.
    kit.engine.approve((EVERYTHING,), clock=True)
    assert (collect_status(kit).held, len(collect_status(kit).overdue)) == ([], 1)
    kit.engine.run_once()
    assert (collect_status(kit).held, collect_status(kit).overdue) == ([], [])


def test_collect_with_a_pause_shows_the_resume_command_of_a_held_topic() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR)
    kit = adopted_janitor(store)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    kit.state.pause(EVERYTHING, NOW_MS)
    status = collect_status(kit)
    assert status.paused == [Pause(EVERYTHING, NOW_MS)]
    assert [(held.reason, held.command) for held in status.held] == [("paused", f"janitor resume '*:*' {ARGUMENTS}")]


def test_collect_with_open_transactions_names_the_oldest() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60)
    kit = adopted_janitor(store, invalid=[pointer(NOW_MS - number * SECOND) for number in range(30)])
    snapshot = collect_status(kit).snapshot
    assert (snapshot.invalid, snapshot.open, len(snapshot.oldest_open)) == (30, 30, 10)
    assert snapshot.oldest_open[0].began_ms == NOW_MS - 29 * SECOND
    assert (snapshot.timestamp_ms, snapshot.problem) == (NOW_MS, "")


def test_collect_with_a_clock_before_the_claim_has_no_boundary() -> None:
    kit = adopted_janitor(MemoryStore(), clock=ManualClock(NOW_MS, monotonic_ms=DAY))
    bound = collect_status(kit).boundary.bound
    assert bound is not None
    assert collect_status(kit).boundary.run_id is not None
    kit.clock.step(-1)
    assert (collect_status(kit).boundary.bound, collect_status(kit).boundary.last) == (None, bound)


def test_collect_during_a_run_shows_the_previous_run_as_last() -> None:
    kit = adopted_janitor(MemoryStore())
    done = collect_status(kit).last_run
    kit.state.begin_run(RunRecord("under way", "apply", NOW_MS + 1, heartbeat_ms=NOW_MS + MINUTE))
    assert collect_status(kit).last_run == done
    assert collect_status(kit).heartbeat_ms == NOW_MS + MINUTE


def test_collect_in_a_daemon_shows_its_start_and_next_run() -> None:
    status = collect_status(janitor(MemoryStore()), live=Live(NOW_MS - HOUR, NOW_MS, NOW_MS + MINUTE))
    assert (status.process, status.started_ms, status.next_run_ms) == ("running", NOW_MS - HOUR, NOW_MS + MINUTE)
    assert status.leader


def test_collect_after_a_run_has_adoption_and_skew() -> None:
    kit = adopted_janitor(MemoryStore())
    kit.clock.advance(MINUTE)
    kit.clock.step(2 * SECOND)
    assert (collect_status(kit).adopted_ms, collect_status(kit).skew_seconds) == (NOW_MS, {"monotonic": 2.0})


def test_collect_between_runs_hours_apart_uses_their_usual_gap() -> None:
    kit = janitor(MemoryStore())
    for _ in range(3):
        kit.engine.run_once(adopt=True)
        kit.clock.advance(6 * HOUR)
    assert collect_status(kit).process == "between_runs"
    kit.clock.advance(7 * HOUR)
    assert collect_status(kit).process == "down"


def test_collect_between_runs_is_down_only_after_a_long_silence() -> None:
    kit = adopted_janitor(MemoryStore())
    kit.clock.advance(SILENT_MS)
    assert collect_status(kit).process == "between_runs"
    kit.clock.advance(1)
    assert collect_status(kit).process == "down"


def test_collect_after_a_daemon_is_down_at_once() -> None:
    kit = adopted_janitor(MemoryStore())
    kit.state.save_note(DAEMON_NOTE, {"started_ms": NOW_MS})
    assert collect_status(kit).process == "down"


def test_collect_in_a_daemon_shows_late_transactions() -> None:
    class Manager:
        def published(self) -> dict[int, dict[str, int]]:
            topics = {f"default:t{number}": NOW_MS - 20 * MINUTE for number in range(MAX_TOPICS + 3)}
            return {18: {"default:new": NOW_MS - LATE_MS + 1}, 17: topics}

        def clients(self) -> dict[int, str]:
            return {17: "import@host-7"}

    kit = janitor(MemoryStore())
    note_late(kit.state, Manager(), kit.clock)
    assert collect_status(kit).late == [], "unknown without a daemon"
    status = collect_status(kit, live=Live(NOW_MS, NOW_MS))
    [late] = status.late
    assert (late.transaction, late.client, late.since_ms) == ("17", "import@host-7", NOW_MS - 20 * MINUTE)
    assert (len(late.topics), late.more_topics, late.command) == (
        MAX_TOPICS,
        3,
        "tms tx invalidate 17 --config janitor.yaml",
    )
    assert late.readers.endswith(f" and {MAX_TOPICS} more")
    assert "late" not in [reason.about for reason in judge(status).reasons], "not reported just after a start"
    status = replace(status, started_ms=NOW_MS - 11 * MINUTE)
    [message] = [reason.text for reason in judge(status).reasons if reason.about == "late"]
    assert message.startswith("Readers of default:t0, ")
    assert message.endswith("are blocked by transaction 17.")
    adopted = replace(status, adopted_ms=NOW_MS)
    shown = "\n".join(map(str, lines(adopted, judge(adopted))))
    assert "by transaction 17 of import@host-7" in shown
    assert "next: tms tx invalidate 17" in shown


def test_collect_with_counts_estimates_held_rows_by_their_size() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR, NOW_MS, body=b"x" * 1000)
    kit = adopted_janitor(store, hold_seconds=600)
    orders.describe(ttl_seconds=60)
    kit.engine.run_once()
    [before] = collect_status(kit).held
    TopicSizeCounter(store, kit.state, kit.clock, rows_per_second=1_000_000).step()
    [held], [figures] = collect_status(kit).held, collect_status(kit).topics
    assert (held.rows, figures.messages) == (1, 2)
    assert figures.size_bytes is not None
    assert held.size_bytes == figures.size_bytes // 2 > 1000, "one of two messages of one size"
    assert before.size_bytes != held.size_bytes, "what the run estimated"
    assert list(figures.sizes) == [(NOW_MS, figures.size_bytes)]


def test_collect_with_counts_leaves_held_old_generations_their_size() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=86_400).plain(NOW_MS - HOUR, NOW_MS)
    kit = adopted_janitor(store, hold_seconds=600)
    topic(store, "default:orders", ttl_seconds=86_400, generation=2).plain(NOW_MS)
    kit.engine.run_once()
    [before] = collect_status(kit).held
    TopicSizeCounter(store, kit.state, kit.clock, rows_per_second=1_000_000).step()
    assert collect_status(kit).held == [before]


def after_a_clock_ahead(*, approved: bool, ahead_ms: int = 40 * DAY) -> Kit:
    """Return a janitor that ran every hour, once with a clock ahead, and has a correct clock again."""
    kit = janitor(MemoryStore())
    for _ in range(3):
        kit.engine.run_once(adopt=True)
        kit.clock.advance(HOUR)
    kit.clock.step(ahead_ms)
    kit.engine.approve(clock=True)
    assert kit.engine.run_once().guards == []
    kit.clock.step(-ahead_ms)
    if approved:
        kit.engine.approve(clock=True)
    return kit


@pytest.mark.parametrize("approved", [False, True])
def test_collect_after_a_run_of_a_clock_ahead_is_down_without_success(approved: bool) -> None:
    status = collect_status(after_a_clock_ahead(approved=approved))
    assert (status.process, status.heartbeat_ms, status.last_success_ms) == ("down", None, {})
    assert judge(status).level == "down"


def test_collect_after_an_accepted_clock_distrusts_the_run_when_its_time_has_come() -> None:
    kit = after_a_clock_ahead(approved=True)
    kit.clock.advance(40 * DAY + MINUTE)
    status = collect_status(kit)
    assert (status.process, status.heartbeat_ms, status.last_success_ms) == ("down", None, {})


def test_collect_after_a_clock_ahead_shows_the_run_recorded_last() -> None:
    kit = after_a_clock_ahead(approved=True)
    last = kit.run_after(HOUR)
    status = collect_status(kit)
    assert status.last_run is not None
    assert (status.last_run.id, status.process, status.heartbeat_ms) == (last.id, "between_runs", kit.clock.now_ms())
    assert set(status.last_success_ms.values()) == {kit.clock.now_ms()}


@pytest.mark.parametrize("later_ms", [DAY, 11 * DAY])
def test_collect_after_a_clock_ahead_ignores_the_gap_it_caused(later_ms: int) -> None:
    kit = after_a_clock_ahead(approved=True, ahead_ms=10 * DAY)
    kit.engine.run_once()
    kit.clock.advance(later_ms)
    assert collect_status(kit).process == "down"


def test_collect_with_a_clock_slightly_ahead_trusts_its_run() -> None:
    kit = janitor(MemoryStore())
    kit.clock.step(MINUTE)
    kit.engine.run_once(adopt=True)
    kit.clock.step(-MINUTE)
    assert (collect_status(kit).process, len(collect_status(kit).last_success_ms)) == ("between_runs", 2)


def test_collect_after_a_run_of_a_slow_clock_keeps_the_usual_gap() -> None:
    kit = janitor(MemoryStore())
    for _ in range(3):
        kit.engine.run_once(adopt=True)
        kit.clock.advance(HOUR)
    kit.clock.step(-kit.clock.now_ms() + DAY)
    kit.engine.run_once()
    kit.clock.step(NOW_MS + 3 * HOUR - DAY)
    kit.engine.run_once()
    assert collect_status(kit).process == "between_runs"
    kit.clock.advance(2 * DAY)
    assert collect_status(kit).process == "down"


@pytest.mark.parametrize(("ahead_ms", "named"), [(5 * MINUTE, False), (5 * MINUTE + 1, True)])
def test_collect_with_messages_dated_ahead_names_their_topic(ahead_ms: int, named: bool) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS + ahead_ms)
    topic(store, "default:right", ttl_seconds=60).plain(NOW_MS)
    kit = adopted_janitor(store)
    TopicSizeCounter(store, kit.state, kit.clock, rows_per_second=1_000_000).step()
    status = collect_status(kit)
    assert [one.topic for one in status.ahead] == (["default:orders"] if named else [])
    message = "default:orders has messages with future timestamps."
    assert [reason.text for reason in judge(status).reasons] == [message if named else "No action is required."]
    shown = [str(line) for line in lines(status, judge(status), ARGUMENTS)]
    assert any(line.startswith("ahead") and "default:orders" in line for line in shown) == named
    detail = topic_detail(kit.state, status, TopicId.parse("default:orders"))
    assert detail is not None
    assert detail["ahead"] == named


def test_daemon_that_plans_counts_nothing_as_deleted() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - HOUR)
    kit = janitor(store).adopt()
    report = kit.engine.rehearse()
    assert [report.full, kit.engine.rehearse().full] == [True, False]
    names = {key.name for key in kit.state.counters()}
    assert "rows_deleted_total" not in names
    assert {"sweeps_total", "rows_scanned_total", "sweep_phase_duration_seconds_sum"} <= names
    status = collect(kit.state, Deployment("memory", "plan_only", "every 60 s", kit.engine.deps.terms), kit.clock)
    assert status.snapshot.timestamp_ms == NOW_MS
    assert [(item.rule, item.rows) for item in status.overdue] == [("expired", 1)]
    assert status.kept == report.totals.kept != {}
