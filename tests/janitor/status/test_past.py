"""Deletions over time, and details of one topic or run, from the state."""

from __future__ import annotations

from collections import Counter

import pytest

from janitor.state.records import Mode, RunRecord, TopicCount
from janitor.state.sqlite.state import SqliteState
from janitor.state.topic_history import save_sizes
from janitor.status import collect, past
from janitor.status.past import RANGES, RunHistory, run_detail, runs_between
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, janitor, topic, watch_state
from tms_core.tables.memory import MemoryStore


def record_run(state: SqliteState, at_ms: int, expired: int = 1, result: str = "done", mode: Mode = "apply") -> str:
    """Record a completed run; return its id."""
    run_id = f"{at_ms}-{mode}"
    state.begin_run(RunRecord(run_id, mode, at_ms))
    state.finish_run(RunRecord(run_id, mode, at_ms, at_ms + 1, result, expired))
    return run_id


def test_topic_detail_with_an_older_status_has_the_newest_count() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=3600)
    kit = janitor(store)
    kit.engine.remember_topics()
    deployment = collect.Deployment("memory", "apply", "every 60 s", kit.engine.deps.terms)
    old = collect.collect(kit.state, deployment, kit.clock)
    counts = {orders.id: TopicCount(3, 300, NOW_MS - 2, NOW_MS, NOW_MS)}
    kit.state.save_counts(counts)
    save_sizes(kit.state, counts)
    found = past.topic_detail(kit.state, old, orders.id)
    assert found is not None
    assert (found["figures"]["messages"], found["figures"]["counted_ms"]) == (3, NOW_MS)
    assert [size["messages"] for size in found["sizes"]] == [3]


@pytest.mark.parametrize("name", RANGES)
def test_range_counts_each_run_within_it_once(name: str) -> None:
    length_ms, step_ms = RANGES[name]
    with SqliteState.in_memory() as state:
        record_run(state, NOW_MS - length_ms - step_ms, 1000)
        for number in range(5):
            record_run(state, NOW_MS - number * length_ms // 6, 10**number)
        found = RunHistory().range(state, name, NOW_MS)
    assert sum(step["expired"] for step in found["steps"]) == 11111
    assert sum(step["runs"] for step in found["steps"]) == 5
    times = [step["at_ms"] for step in found["steps"]]
    assert times == list(range(times[0], times[0] + len(times) * step_ms, step_ms))
    assert NOW_MS - step_ms < times[-1] <= NOW_MS


def test_range_with_new_runs_reads_only_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "PAGE_RUNS", 2)
    history, calls = RunHistory(), Counter[str]()
    with SqliteState.in_memory() as state:
        watch_state(state, before=lambda call: calls.update([call.name]))
        for number in range(5):
            record_run(state, NOW_MS - number * HOUR)
        assert sum(step["runs"] for step in history.range(state, "24h", NOW_MS)["steps"]) == 5
        assert calls["state.runs"] == 3
        record_run(state, NOW_MS + MINUTE)
        found = history.range(state, "24h", NOW_MS + 2 * MINUTE)
    assert sum(step["runs"] for step in found["steps"]) == 6
    assert calls["state.runs"] == 4


def test_range_after_the_last_counted_run_was_pruned_counts_the_others_once() -> None:
    history = RunHistory()
    with SqliteState.in_memory() as state:
        record_run(state, NOW_MS - MINUTE)
        # The clock was set back, so the run that was recorded last is the oldest.
        record_run(state, NOW_MS - HOUR)
        assert sum(step["runs"] for step in history.range(state, "24h", NOW_MS)["steps"]) == 2
        state.prune_runs(NOW_MS - 2 * MINUTE)
        assert sum(step["runs"] for step in history.range(state, "24h", NOW_MS)["steps"]) == 1


def test_range_counts_a_run_after_its_end() -> None:
    history = RunHistory()
    with SqliteState.in_memory() as state:
        state.begin_run(RunRecord("one", "apply", NOW_MS))
        assert not any(step["runs"] for step in history.range(state, "1h", NOW_MS)["steps"])
        state.finish_run(RunRecord("one", "apply", NOW_MS, NOW_MS, "failed", error="no space"))
        found = history.range(state, "1h", NOW_MS)
    assert sum(step["bad"] for step in found["steps"]) == 1
    assert found["bad_runs"] == [
        {"id": "one", "started_ms": NOW_MS, "result": "failed", "error": "no space", "blocked_by": ()}
    ]


def test_range_counts_a_run_that_ends_after_a_later_one_exactly_once() -> None:
    history = RunHistory()
    with SqliteState.in_memory() as state:
        state.begin_run(RunRecord("one", "apply", NOW_MS))
        record_run(state, NOW_MS + 1)
        assert sum(step["runs"] for step in history.range(state, "1h", NOW_MS + 2)["steps"]) == 1
        state.finish_run(RunRecord("one", "apply", NOW_MS, NOW_MS + 2, "done"))
        for _ in range(2):
            assert sum(step["runs"] for step in history.range(state, "1h", NOW_MS + 2)["steps"]) == 2


def test_range_shows_plans_only_where_there_is_no_run() -> None:
    with SqliteState.in_memory() as state:
        record_run(state, NOW_MS, 5, mode="plan")
        assert RunHistory().range(state, "1h", NOW_MS)["mode"] == "plan"
        record_run(state, NOW_MS - 1, 7)
        found = RunHistory().range(state, "1h", NOW_MS)
    assert found["mode"] == "apply"
    assert sum(step["expired"] for step in found["steps"]) == 7


def test_range_forgets_runs_older_than_every_range() -> None:
    history = RunHistory()
    with SqliteState.in_memory() as state:
        record_run(state, NOW_MS)
        history.range(state, "30d", NOW_MS)
        found = history.range(state, "30d", NOW_MS + 31 * DAY)
    assert not any(step["runs"] for step in found["steps"])
    assert not any(history._steps.values())


def test_runs_between_two_times_are_newest_first() -> None:
    with SqliteState.in_memory() as state:
        ids = [record_run(state, NOW_MS + number) for number in range(4)]
        assert [run.id for run in runs_between(state, 10, NOW_MS + 1, NOW_MS + 3)] == [ids[2], ids[1]]
        assert [run.id for run in runs_between(state, 1)] == [ids[3]]
        found = run_detail(state, ids[0])
    assert found is not None
    assert (found["expired"], found["report"]) == (1, None)


def test_unknown_range_or_run_is_named_or_none() -> None:
    with SqliteState.in_memory() as state:
        with pytest.raises(KeyError, match="2h"):
            RunHistory().range(state, "2h", NOW_MS)
        assert run_detail(state, "none") is None


def test_range_with_blocked_runs_leaves_out_the_one_to_adopt() -> None:
    with SqliteState.in_memory() as state:
        for number, guard in enumerate(["adoption", "clock"]):
            state.begin_run(RunRecord(guard, "apply", NOW_MS + number))
            ended_ms = NOW_MS + number
            state.finish_run(RunRecord(guard, "apply", ended_ms, ended_ms, "blocked", blocked_by=(guard,)))
        found = RunHistory().range(state, "1h", NOW_MS + 2)
    assert [run["id"] for run in found["bad_runs"]] == ["clock"]
    assert found["bad_runs"][0]["blocked_by"] == ("clock",)


def test_range_after_a_run_of_a_clock_ahead_still_shows_new_runs() -> None:
    history = RunHistory()
    with SqliteState.in_memory() as state:
        record_run(state, NOW_MS - MINUTE)
        record_run(state, NOW_MS + 40 * DAY, result="failed")
        assert sum(step["runs"] for step in history.range(state, "1h", NOW_MS)["steps"]) == 1
        record_run(state, NOW_MS)
        found = history.range(state, "1h", NOW_MS)
    assert sum(step["runs"] for step in found["steps"]) == 2
    assert found["bad_runs"] == []
