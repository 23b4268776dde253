"""The health line: its severity, the order of problems, and harmless conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from janitor.metrics import Metrics
from janitor.state.figures import GuardNote
from janitor.state.records import Pause, RunRecord
from janitor.status.health import GRACE_MS, STUCK_SECONDS, Health, HealthReason, find_problems, judge
from janitor.status.status import BoundaryFigures, HeldTopic, Quarantined, Running, SnapshotFigures, Status
from tests.builders import NOW_MS
from tests.janitor.http import statuses
from tms_core.transaction.model import TX_PER_MS

LAST = RunRecord("r-1", "apply", NOW_MS, NOW_MS, "done")
HEALTHY = replace(
    statuses.empty(NOW_MS),
    adopted_ms=NOW_MS,
    last_run=LAST,
    leader=True,
    lease_holder="here",
    snapshot=SnapshotFigures(),
)


def texts(health: Health) -> list[str]:
    return [reason.text for reason in health.reasons]


def held(reason: str, topic: str = "default:orders") -> HeldTopic:
    return HeldTopic(topic, reason, 1, 1, None, None, "")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (HEALTHY, "No action is required."),
        (replace(HEALTHY, last_run=None), "No run has started yet."),
        (replace(HEALTHY, process="between_runs"), "No action is required."),
        (replace(HEALTHY, running=Running("r", NOW_MS, NOW_MS, "message", "", 0)), "A run is in progress."),
        (replace(HEALTHY, mode="plan_only"), "Plan only: nothing is deleted."),
        (replace(HEALTHY, leader=False, lease_holder="there"), "On standby: there holds the lease."),
        (replace(HEALTHY, snapshot=SnapshotFigures(problem="not_configured")), "No action is required."),
        (replace(HEALTHY, guards=(GuardNote("clock", False, "behind"),)), "No action is required."),
        (replace(HEALTHY, last_run=replace(LAST, result="interrupted")), "No action is required."),
        (replace(HEALTHY, held=(held("protected"), held("paused"), held("quarantined"))), "No action is required."),
    ],
)
def test_judge_without_problems_is_well_with_one_sentence(status: Status, sentence: str) -> None:
    assert judge(status) == Health("well", (HealthReason(sentence),))


@pytest.mark.parametrize(
    ("status", "sentence", "about"),
    [
        (
            replace(HEALTHY, adopted_ms=None),
            "This store is not adopted. Nothing is deleted until you adopt it.",
            "adopt",
        ),
        (replace(HEALTHY, guards=(GuardNote("clock", True, "x"),)), "The clock guard blocked the last run.", "guards"),
        (
            replace(HEALTHY, last_run=replace(LAST, result="failed", error="disk full.")),
            "The last run failed: disk full.",
            "run",
        ),
        (replace(HEALTHY, last_run=replace(LAST, result="failed")), "The last run failed.", "run"),
        (replace(HEALTHY, failing={"count": "it cannot be read."}), "The count job fails: it cannot be read.", "run"),
        (
            replace(HEALTHY, last_run=replace(LAST, result="partial", errors=("a:b: x", "y"))),
            "The last run was only partly done: a:b: x.",
            "run",
        ),
        (
            replace(HEALTHY, last_run=replace(LAST, result="lost")),
            "The last run was lost: its heartbeat stopped.",
            "run",
        ),
        (replace(HEALTHY, quarantined=(Quarantined("a:b", 0, 3, "x", 0),)), "a:b is quarantined.", "aside"),
        (
            replace(HEALTHY, snapshot=SnapshotFigures(problem="stale")),
            "The transaction snapshot is unusable (stale): no rows are inverted, no boundary is published.",
            "snapshot",
        ),
        (replace(HEALTHY, held=(held("frontier"),)), "default:orders is held.", "held"),
        (replace(HEALTHY, held=(held("first_contact"), held("frontier", "a:b"))), "2 topics are held.", "held"),
        (replace(HEALTHY, paused=(Pause("*:*", 0), Pause("a:*", 0))), "Everything is paused.", "aside"),
        (replace(HEALTHY, paused=(Pause("a:*", 0), Pause("b:c", 0))), "Paused: a:*, b:c.", "aside"),
        (
            replace(HEALTHY, paused=tuple(Pause(f"a:{n}", 0) for n in range(4))),
            "Paused: a:0, a:1, a:2 and more.",
            "aside",
        ),
    ],
)
def test_judge_of_one_problem_says_where_to_look(status: Status, sentence: str, about: str) -> None:
    health = judge(status)
    [reason] = health.reasons
    assert (health.level, reason.text, reason.about) == ("attention", sentence, about)


def test_judge_before_adoption_says_that_alone() -> None:
    guard = GuardNote("adoption", True, "x")
    status = replace(HEALTHY, adopted_ms=None, guards=(guard,), held=(held("first_contact"),))
    assert len(judge(status).reasons) == 1
    assert texts(judge(replace(HEALTHY, guards=(guard,)))) == ["The adoption guard blocked the last run."]


def test_judge_of_a_hung_loop_is_down() -> None:
    assert judge(HEALTHY, alive="the loop hangs") == Health("down", (HealthReason("the loop hangs"),))


def test_judge_without_a_running_janitor_is_down_before_other_reasons() -> None:
    health = judge(replace(HEALTHY, process="down", paused=(Pause("*:*", 0),)))
    assert health.level == "down"
    assert texts(health) == ["No janitor is running. This is the last recorded state.", "Everything is paused."]


def test_judge_when_not_ready_says_so_unless_a_reason_is_better() -> None:
    assert judge(HEALTHY, ready="the store is gone") == Health("attention", (HealthReason("the store is gone"),))
    assert texts(judge(replace(HEALTHY, paused=(Pause("*:*", 0),)), ready="x")) == ["Everything is paused."]


def test_judge_of_many_problems_puts_the_most_severe_first() -> None:
    assert [reason.about for reason in judge(statuses.wrong(NOW_MS)).reasons] == [
        "",
        "guards",
        "run",
        "aside",
        "snapshot",
        "late",
        "held",
        "aside",
    ]


def test_judge_of_a_daemon_without_recent_run_says_so() -> None:
    hour_ms = 3_600_000
    last = replace(HEALTHY.last_run, finished_ms=NOW_MS - 2 * hour_ms) if HEALTHY.last_run else None
    silent = replace(HEALTHY, every_seconds=60, last_run=last, started_ms=NOW_MS - 9 * hour_ms, now_ms=NOW_MS)
    assert texts(judge(silent)) == ["No run has finished for 120 min."]
    assert judge(replace(silent, every_seconds=None)).level == "well"
    assert judge(replace(silent, started_ms=NOW_MS - hour_ms)).level == "well"


def test_judge_with_a_last_run_ahead_of_the_clock_misses_the_runs_since_the_start() -> None:
    last = replace(LAST, finished_ms=NOW_MS + 1000 * GRACE_MS)
    status = replace(
        HEALTHY, process="running", every_seconds=60, started_ms=NOW_MS - 2 * GRACE_MS, last_run=last, now_ms=NOW_MS
    )
    assert texts(judge(status)) == ["No run has finished for 120 min."]


@pytest.mark.parametrize(
    ("behind_ms", "problem", "is_reported"),
    [(0, "", False), (1, "", True), (1, "stale", True), (1, "not_configured", False)],
)
def test_judge_boundary_that_lags_needs_a_transaction_system(behind_ms: int, problem: str, is_reported: bool) -> None:
    bound = str((NOW_MS - STUCK_SECONDS * 1000 - behind_ms) * TX_PER_MS)
    snapshot = SnapshotFigures(problem=problem)
    status = replace(HEALTHY, adopted_ms=0, boundary=BoundaryFigures(last=bound), snapshot=snapshot)
    assert ("The prune boundary lags by 4 d." in texts(judge(status))) == is_reported


@pytest.mark.parametrize(("adopted_seconds_ago", "is_reported"), [(STUCK_SECONDS, False), (STUCK_SECONDS + 1, True)])
def test_judge_old_boundary_of_a_store_just_adopted_is_healthy(adopted_seconds_ago: int, is_reported: bool) -> None:
    status = replace(HEALTHY, boundary=BoundaryFigures(last="1"), adopted_ms=NOW_MS - adopted_seconds_ago * 1000)
    assert any("prune boundary" in text for text in texts(judge(status))) == is_reported


@pytest.mark.parametrize(("problem", "shown"), [("", True), ("stale", True), ("not_configured", False)])
def test_metrics_without_a_transaction_system_omit_snapshot_and_boundary(problem: str, shown: bool) -> None:
    snapshot = SnapshotFigures(timestamp_ms=NOW_MS, problem=problem)
    metrics = Metrics("none", 1)
    metrics.update(replace(HEALTHY, boundary=BoundaryFigures(str(NOW_MS * TX_PER_MS)), snapshot=snapshot))
    text = metrics.render()[0].decode()
    for name in ("snapshot_timestamp_seconds", "prune_boundary_timestamp_seconds"):
        assert (f"\ntms_janitor_{name} " in text) == shown


def _reported_conditions(status: Status) -> set[str]:
    """Return the conditions that the metrics export as 1."""
    metrics = Metrics("none", 1)
    metrics.update(status)
    lines = metrics.render()[0].decode().splitlines()
    return {line.split('"')[1] for line in lines if line.startswith("tms_janitor_attention{") and line.endswith(" 1.0")}


@pytest.mark.parametrize(("adopted_seconds_ago", "reported"), [(0, set()), (STUCK_SECONDS + 1, {"boundary_stuck"})])
def test_metrics_of_an_old_boundary_ask_only_long_after_adoption(adopted_seconds_ago: int, reported: set[str]) -> None:
    boundary = BoundaryFigures("1", last="1")
    assert (
        _reported_conditions(replace(HEALTHY, boundary=boundary, adopted_ms=NOW_MS - adopted_seconds_ago * 1000))
        == reported
    )


def test_metrics_without_a_transaction_system_require_no_action() -> None:
    old = SnapshotFigures(timestamp_ms=1, problem="not_configured")
    assert (
        _reported_conditions(replace(HEALTHY, adopted_ms=0, boundary=BoundaryFigures("1", last="1"), snapshot=old))
        == set()
    )


def test_metrics_of_the_worst_status_name_the_condition_of_each_reason() -> None:
    status = statuses.wrong(NOW_MS)
    reasons = list(find_problems(status))
    assert len(_reported_conditions(status)) > 3
    assert all(reason.condition for reason in reasons)
    assert _reported_conditions(status) == {reason.condition for reason in reasons}
