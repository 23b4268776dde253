"""The status is taken from the state, so most of it is there when no janitor runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from janitor.cli.status import lines
from janitor.state.base import EVERYTHING, RunRecord
from janitor.stats.consumer_lag import LATE_MS, MOST_TOPICS, note_late
from janitor.stats.topic_sizes import TopicSizeCounter
from janitor.status.collect import DAEMON_NOTE, SILENT_MS, Deployment, Live, collect
from janitor.status.health import judge
from janitor.status.past import topic_detail
from janitor.status.status import Status
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Kit, janitor, pointer, topic
from tms_core.clock import ManualClock
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

ARGUMENTS = "--config janitor.yaml --snapshots tx"


def seen(rig: Kit, **options: Any) -> Status:
    site = Deployment("memory", "apply", "every 60 s", rig.engine.deps.terms, arguments=ARGUMENTS)
    return collect(rig.state, site, rig.clock, **options)


def test_given_an_empty_memory_when_looked_at_then_there_is_a_status_that_claims_nothing() -> None:
    status = seen(janitor(MemoryStore()))
    assert (status.process, status.adopted_ms, status.last_run, status.heartbeat_ms) == ("down", None, None, None)
    assert (status.held, status.topics, status.counters, status.boundary.bound) == ([], [], {}, None)
    assert status.boundary.obstacles != []


def test_given_a_run_when_looked_at_then_it_is_the_last_one_and_its_figures_are_the_reports() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS - HOUR, NOW_MS)
    rig = janitor(store)
    report = rig.engine.run_once(adopt=True)
    rig.clock.advance(MINUTE)
    status = seen(rig)
    assert status.last_run is not None
    assert (status.last_run.id, status.last_run.expired, status.last_run.result) == (report.id, 1, "done")
    assert (status.heartbeat_ms, status.adopted_ms) == (NOW_MS, NOW_MS)
    assert status.last_success_ms == {"message": NOW_MS, "payload": NOW_MS}
    assert status.skew_seconds == {"monotonic": 0.0}


def test_given_a_shortened_ttl_when_looked_at_then_what_is_held_is_there_with_the_command_and_the_end() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR, NOW_MS)
    rig = janitor(store, hold_seconds=600)
    rig.engine.run_once(adopt=True)
    orders.describe(ttl_seconds=60)
    rig.engine.run_once()
    [held] = seen(rig).held
    assert (held.topic, held.reason, held.rows, held.oldest_ms) == ("default:orders", "frontier", 1, NOW_MS - HOUR)
    assert held.until_ms == NOW_MS + 600 * SECOND
    assert held.command == f"janitor approve default:orders {ARGUMENTS}"
    back = "tms topic update default:orders --ttl 86400 --config janitor.yaml"
    assert held.keep == (back, f"janitor pause default:orders {ARGUMENTS}"), "tms takes none of its other options"
    [late] = seen(rig).overdue
    assert (late.table, late.rule, late.rows, late.oldest_ms) == ("message", "expired", 1, NOW_MS - HOUR)
    [figures] = seen(rig).topics
    assert (figures.overdue_rows, figures.oldest_overdue_ms) == (1, NOW_MS - HOUR)

    # Approved, it is not held any more, and after the next run it is gone.
    rig.engine.approve((EVERYTHING,), clock=True)
    assert (seen(rig).held, len(seen(rig).overdue)) == ([], 1)
    rig.engine.run_once()
    assert (seen(rig).held, seen(rig).overdue) == ([], [])


def test_given_a_pause_when_looked_at_then_the_held_topic_says_how_to_resume() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR)
    rig = janitor(store)
    rig.engine.run_once(adopt=True)
    orders.describe(ttl_seconds=60)
    rig.engine.run_once()
    rig.state.pause(EVERYTHING, NOW_MS)
    status = seen(rig)
    assert status.paused == [(EVERYTHING, NOW_MS)]
    assert [(held.reason, held.command) for held in status.held] == [("paused", f"janitor resume '*:*' {ARGUMENTS}")]


def test_given_open_transactions_when_looked_at_then_the_oldest_are_named() -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60)
    rig = janitor(store)
    rig.snapshots.invalid = [pointer(NOW_MS - number * SECOND) for number in range(30)]
    rig.engine.run_once(adopt=True)
    snapshot = seen(rig).snapshot
    assert (snapshot.invalid, snapshot.open, len(snapshot.oldest_open)) == (30, 30, 10)
    assert snapshot.oldest_open[0].began_ms == NOW_MS - 29 * SECOND
    assert (snapshot.timestamp_ms, snapshot.problem) == (NOW_MS, "")


def test_given_a_claim_when_looked_at_then_it_is_there_until_the_clock_is_set_back_before_it() -> None:
    rig = janitor(MemoryStore(), clock=ManualClock(NOW_MS, monotonic_ms=DAY))
    rig.engine.run_once(adopt=True)
    bound = seen(rig).boundary.bound
    assert bound is not None
    assert seen(rig).boundary.run_id is not None
    rig.clock.step(-1)
    assert (seen(rig).boundary.bound, seen(rig).boundary.last) == (None, bound)


def test_given_a_run_under_way_when_looked_at_then_the_last_one_is_the_one_before() -> None:
    rig = janitor(MemoryStore())
    rig.engine.run_once(adopt=True)
    done = seen(rig).last_run
    rig.state.begin_run(RunRecord("under way", "apply", NOW_MS + 1, heartbeat_ms=NOW_MS + MINUTE))
    assert seen(rig).last_run == done
    assert seen(rig).heartbeat_ms == NOW_MS + MINUTE


def test_given_a_daemon_when_looked_at_then_what_only_it_knows_is_there() -> None:
    status = seen(janitor(MemoryStore()), live=Live(NOW_MS - HOUR, NOW_MS, NOW_MS + MINUTE))
    assert (status.process, status.started_ms, status.next_run_ms) == ("running", NOW_MS - HOUR, NOW_MS + MINUTE)
    assert status.leader


def test_given_runs_from_outside_when_looked_at_between_them_then_nobody_is_missed_until_they_stay_away() -> None:
    rig = janitor(MemoryStore())
    rig.engine.run_once(adopt=True)
    rig.clock.advance(SILENT_MS)
    assert seen(rig).process == "between_runs"
    rig.clock.advance(1)
    assert seen(rig).process == "down"


def test_given_a_daemon_that_is_gone_when_looked_at_then_it_is_missed_at_once() -> None:
    rig = janitor(MemoryStore())
    rig.engine.run_once(adopt=True)
    rig.state.save_note(DAEMON_NOTE, {"started_ms": NOW_MS})
    assert seen(rig).process == "down"


def test_given_late_transactions_then_a_daemon_shows_them_with_their_topics_and_what_ends_them() -> None:
    class Manager:
        def published(self) -> dict[int, dict[str, int]]:
            topics = {f"default:t{number}": NOW_MS - 20 * MINUTE for number in range(MOST_TOPICS + 3)}
            return {18: {"default:new": NOW_MS - LATE_MS + 1}, 17: topics}

        def clients(self) -> dict[int, str]:
            return {17: "import@host-7"}

    rig = janitor(MemoryStore())
    note_late(rig.state, Manager(), rig.clock)
    assert seen(rig).late == [], "without a daemon it is not known any more"
    status = seen(rig, live=Live(NOW_MS, NOW_MS))
    [late] = status.late
    assert (late.transaction, late.client, late.since_ms) == ("17", "import@host-7", NOW_MS - 20 * MINUTE)
    assert (len(late.topics), late.more_topics, late.command) == (
        MOST_TOPICS,
        3,
        "tms tx invalidate 17 --config janitor.yaml",
    )
    assert late.readers.endswith(f" and {MOST_TOPICS} more")
    assert "late" not in [reason.about for reason in judge(status).reasons], "the server has just been started"
    status = replace(status, started_ms=NOW_MS - 11 * MINUTE)
    health = judge(status)
    [said] = [reason.text for reason in health.reasons if reason.about == "late"]
    assert said.startswith("Readers of default:t0, ")
    assert said.endswith("are blocked by transaction 17.")
    adopted = replace(status, adopted_ms=NOW_MS)
    shown = "\n".join(map(str, lines(adopted, judge(adopted))))
    assert "for transaction 17 of import@host-7" in shown
    assert "next: tms tx invalidate 17" in shown


def test_given_counts_when_looked_at_then_a_topic_has_its_sizes_and_what_is_held_of_it_is_measured_alike() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=86_400)
    orders.plain(NOW_MS - HOUR, NOW_MS, body=b"x" * 1000)
    rig = janitor(store, hold_seconds=600)
    rig.engine.run_once(adopt=True)
    orders.describe(ttl_seconds=60)
    rig.engine.run_once()
    [before] = seen(rig).held
    TopicSizeCounter(store, rig.state, rig.clock, rows_per_second=1_000_000).step()
    [held], [figures] = seen(rig).held, seen(rig).topics
    assert (held.rows, figures.messages) == (1, 2)
    assert figures.size_bytes is not None
    assert held.size_bytes == figures.size_bytes // 2 > 1000, "one of two messages of one size"
    assert before.size_bytes != held.size_bytes, "what the run estimated"
    assert list(figures.sizes) == [(NOW_MS, figures.size_bytes)]


def after_a_clock_ahead(*, approved: bool, ahead_ms: int = 40 * DAY) -> Kit:
    """A janitor that ran every hour, once with a clock that was ahead, and whose clock is right again."""
    rig = janitor(MemoryStore())
    for _ in range(3):
        rig.engine.run_once(adopt=True)
        rig.clock.advance(HOUR)
    rig.clock.step(ahead_ms)
    rig.engine.approve(clock=True)
    assert rig.engine.run_once().guards == []
    rig.clock.step(-ahead_ms)
    if approved:
        rig.engine.approve(clock=True)
    return rig


@pytest.mark.parametrize("approved", [False, True])
def test_collect_after_a_run_of_a_clock_ahead_claims_no_life_and_no_success(approved: bool) -> None:
    rig = after_a_clock_ahead(approved=approved)
    status = seen(rig)
    assert (status.process, status.heartbeat_ms, status.last_success_ms) == ("down", None, {})
    assert judge(status).level == "down"


def test_collect_after_an_accepted_clock_distrusts_the_run_when_its_time_has_come() -> None:
    rig = after_a_clock_ahead(approved=True)
    rig.clock.advance(40 * DAY + MINUTE)
    status = seen(rig)
    assert (status.process, status.heartbeat_ms, status.last_success_ms) == ("down", None, {})


def test_collect_after_a_clock_ahead_takes_the_run_recorded_last_for_the_last() -> None:
    rig = after_a_clock_ahead(approved=True)
    rig.clock.advance(HOUR)
    last = rig.engine.run_once()
    status = seen(rig)
    assert status.last_run is not None
    assert (status.last_run.id, status.process, status.heartbeat_ms) == (last.id, "between_runs", rig.clock.now_ms())
    assert set(status.last_success_ms.values()) == {rig.clock.now_ms()}


@pytest.mark.parametrize("later_ms", [DAY, 11 * DAY])
def test_collect_after_a_clock_ahead_takes_no_gap_that_it_made_for_usual(later_ms: int) -> None:
    rig = after_a_clock_ahead(approved=True, ahead_ms=10 * DAY)
    rig.engine.run_once()
    rig.clock.advance(later_ms)
    assert seen(rig).process == "down"


def test_collect_with_a_machine_a_little_ahead_believes_its_run() -> None:
    rig = janitor(MemoryStore())
    rig.clock.step(MINUTE)
    rig.engine.run_once(adopt=True)
    rig.clock.step(-MINUTE)
    assert (seen(rig).process, len(seen(rig).last_success_ms)) == ("between_runs", 2)


def test_collect_after_a_run_of_a_clock_behind_keeps_the_usual_gap() -> None:
    rig = janitor(MemoryStore())
    for _ in range(3):
        rig.engine.run_once(adopt=True)
        rig.clock.advance(HOUR)
    rig.clock.step(-rig.clock.now_ms() + DAY)
    rig.engine.run_once()
    rig.clock.step(NOW_MS + 3 * HOUR - DAY)
    rig.engine.run_once()
    assert seen(rig).process == "between_runs"
    rig.clock.advance(2 * DAY)
    assert seen(rig).process == "down"


@pytest.mark.parametrize(("ahead_ms", "named"), [(5 * MINUTE, False), (5 * MINUTE + 1, True)])
def test_collect_with_messages_dated_ahead_names_their_topic(ahead_ms: int, named: bool) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(NOW_MS + ahead_ms)
    topic(store, "default:right", ttl_seconds=60).plain(NOW_MS)
    rig = janitor(store)
    rig.engine.run_once(adopt=True)
    TopicSizeCounter(store, rig.state, rig.clock, rows_per_second=1_000_000).step()
    status = seen(rig)
    assert [one.topic for one in status.ahead] == (["default:orders"] if named else [])
    said = "default:orders has messages with future timestamps."
    assert [reason.text for reason in judge(status).reasons] == [said if named else "No action is required."]
    shown = [str(line) for line in lines(status, judge(status), ARGUMENTS)]
    assert any(line.startswith("ahead") and "default:orders" in line for line in shown) == named
    detail = topic_detail(rig.state, status, TopicId.parse("default:orders"))
    assert detail is not None
    assert detail["ahead"] == named
