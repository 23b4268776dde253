"""pause, resume and status while no other process holds the store."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from janitor.cli.status import lines
from janitor.state.base import RunRecord, Strikes
from janitor.state.sqlite.state import SqliteState
from janitor.status.health import judge
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tests.janitor.http.statuses import full
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

STATE = "data/janitor"


def saved_pauses(kit: CommandKit) -> list[str]:
    with SqliteState(kit.folder / STATE) as state:
        return [pause.pattern for pause in state.pauses()]


def test_run_with_one_paused_topic_sweeps_only_the_others(kit: CommandKit) -> None:
    kit.janitor("adopt")
    shown = kit.janitor("pause default:orders")
    assert shown.out == (
        "paused: default:orders; a run in progress stops there before its next batch\n"
        "next: janitor resume default:orders --config janitor.yaml\n"
    )
    totals = kit.janitor("run --once --format json").json["totals"]
    assert (totals["expired"], totals["old_generation"], totals["kept"]["held"]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("pauses", "named"), [(["'default:*'"], " 'default:*'"), ([""], ""), (["default:orders", "default:retired"], "")]
)
def test_plan_with_all_topics_paused_names_the_only_pattern(kit: CommandKit, pauses: list[str], named: str) -> None:
    kit.janitor("adopt")
    for pause in pauses:
        kit.janitor(f"pause {pause}")
    assert f"next: janitor resume{named} --config janitor.yaml\n" in kit.janitor("plan").out


def test_pause_of_a_locked_store_succeeds(kit: CommandKit) -> None:
    with LevelDBStore(kit.store):
        assert kit.janitor("pause").code == 0
    assert kit.janitor("resume default:orders").code == 1


def test_pause_of_an_unknown_topic_warns_and_pauses(kit: CommandKit) -> None:
    kit.janitor("adopt")
    paused = kit.janitor("pause default:ordrs")
    assert (paused.code, saved_pauses(kit)) == (0, ["default:ordrs"])
    assert "default:ordrs" in paused.err
    assert kit.janitor("pause 'default:*'").err == ""


def test_pause_of_a_missing_store_exits_1_and_creates_no_state(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("data/messaging", "data/nowhere"))
    refused = kit.janitor("pause")
    assert (refused.code, refused.out) == (1, "")
    assert not (kit.folder / STATE).exists()


def test_pause_of_a_name_without_namespace_exits_2(kit: CommandKit) -> None:
    assert kit.janitor("pause orders").code == 2


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("", []),
        ("'*:*'", []),
        ("'default:*'", ["*:*", "system:x"]),
        ("default:orders", ["*:*", "default:*", "system:x"]),
        ("'default:o*'", ["*:*", "default:*", "system:x"]),
    ],
)
def test_resume_of_a_pattern_removes_the_pauses_within_it(kit: CommandKit, word: str, left: list[str]) -> None:
    for pattern in ("default:orders", "default:*", "system:x", "*:*"):
        kit.janitor(f"pause '{pattern}'")
    done = kit.janitor(f"resume {word}")
    assert sorted(saved_pauses(kit)) == left
    assert done.code == (1 if left else 0)


def test_resume_of_one_topic_leaves_others_paused(kit: CommandKit) -> None:
    kit.janitor("pause default:retired")
    done = kit.janitor("resume default:orders --format json")
    assert (done.code, [pause["pattern"] for pause in done.json["paused"]]) == (0, ["default:retired"])


def test_resume_of_one_topic_while_all_are_paused_exits_1_with_the_reason(kit: CommandKit) -> None:
    kit.janitor("pause")
    kept = kit.janitor("resume default:orders")
    assert kept.code == 1
    assert kept.out.splitlines() == [
        "default:orders was not paused under this name",
        "still paused: everything",
        "next: janitor resume --config janitor.yaml",
    ]
    assert kit.janitor("resume default:orders --format json").json == {
        "resumed": [],
        "retried": [],
        "paused": [{"pattern": "*:*", "since_ms": NOW_MS}],
    }


def test_resume_without_pauses_exits_0_and_creates_no_state(kit: CommandKit) -> None:
    done = kit.janitor("resume")
    assert (done.code, done.out) == (0, "nothing is paused\n")
    assert not (kit.folder / STATE).exists()


def test_resume_of_a_pattern_retries_the_quarantined_topics_within_it(kit: CommandKit) -> None:
    names = [TopicId("default", "orders"), TopicId("default", "retired"), TopicId("system", "x")]
    with SqliteState(kit.folder / STATE) as state:
        aside = Strikes(3, NOW_MS, "broken", quarantined_ms=NOW_MS, probe_ms=NOW_MS + DAY)
        state.save_strikes({**dict.fromkeys(names, aside), TopicId("default", "once"): Strikes(1, NOW_MS, "broken")})
    assert kit.janitor("resume 'default:*'").out.endswith(": default:orders, default:retired\n")
    with SqliteState(kit.folder / STATE) as state:
        assert sorted(map(str, state.strikes())) == ["default:once", "system:x"]


def test_status_before_the_first_run_says_so_and_creates_no_state(kit: CommandKit) -> None:
    shown = kit.janitor("status")
    assert shown.code == 0
    assert "This store is not adopted. Nothing is deleted until you adopt it.\n" in shown.out
    assert "last run     never\n" in shown.out
    assert not (kit.folder / STATE).exists()


def test_status_names_pending_decisions_with_their_commands(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    kit.set_ttl("default:orders", 30)
    kit.clock.advance(MINUTE)
    kit.snapshot()
    kit.janitor("run --once")
    kit.janitor("pause default:retired")
    kit.clock.advance(MINUTE)
    shown = kit.janitor("status")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert f"store        {kit.store}" in lines
    assert "mode         deletes and inverts; every 60 s" in lines
    [last] = [line for line in lines if line.startswith("last run")]
    assert last.endswith("(1 min ago); done: 0 expired, 0 of old generations, 0 inverted")
    [paused] = [line for line in lines if line.startswith("paused")]
    assert paused.endswith("default:retired; since 2023-11-14 22:14:20 UTC (1 min ago)")
    [held] = [line for line in lines if line.startswith("held")]
    assert "default:orders; " in held
    assert "(frontier); ttl 1 d → 30 s, seen 2023-11-14 22:14:20 UTC; until 2023-11-14 23:14:20 UTC (in 59 min)" in held
    [step] = [line for line in lines if line.startswith("next:")]
    assert step.startswith("next: janitor approve default:orders --config"), "the most severe reason is first"
    assert any(line.startswith("snapshot     of 2023-11-14 22:14:19 UTC (1 min 1 s ago); 1 invalid") for line in lines)
    assert any(line.startswith("boundary     clean up to ") for line in lines)
    assert any(line.startswith("overdue      ") for line in lines)
    assert "\x1b" not in shown.out


def test_status_with_apply_false_shows_plan_only(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    assert "mode         plan only; every 60 s" in kit.janitor("status").out


def test_status_with_many_pauses_shows_ten_and_counts_the_rest(kit: CommandKit) -> None:
    with SqliteState(kit.folder / STATE) as state:
        for number in range(12):
            state.pause(f"default:t{number}", NOW_MS)
    shown = kit.janitor("status").out
    assert shown.count("\npaused       ") == 10
    assert "2 more paused" in shown


def test_status_names_a_run_of_another_process(kit: CommandKit) -> None:
    kit.janitor("adopt")
    with SqliteState(kit.folder / "data" / "janitor") as state:
        state.begin_run(RunRecord("at-work", "apply", NOW_MS - 5 * MINUTE, heartbeat_ms=NOW_MS - SECOND))
    shown = kit.janitor("status").out
    assert "in progress  run at-work of another process, started 2023-11-14 22:08:20 UTC (5 min ago)" in shown
    assert "last run     none has finished yet" in shown
    assert kit.janitor("status --format json").json["running"]["id"] == "at-work"
    kit.clock.advance(HOUR)
    assert "at-work" not in kit.janitor("status").out


def test_status_check_prints_one_line_and_exits_as_a_monitoring_plugin(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    well = kit.janitor("status --check")
    assert (well.code, well.out) == (0, "JANITOR OK: No action is required.\n")
    kit.janitor("pause")
    paused = kit.janitor("status --check")
    assert (paused.code, paused.out) == (1, "JANITOR WARNING: Everything is paused.\n")
    kit.janitor("resume")
    kit.clock.advance(30 * DAY)
    down = kit.janitor("status --check --format json")
    assert (down.code, down.json["status"]) == (2, "CRITICAL")
    shutil.rmtree(kit.folder / "data")
    unknown = kit.janitor("status --check")
    assert (unknown.code, unknown.out[:17]) == (3, "JANITOR UNKNOWN: ")


def test_status_watch_repeats_until_ctrl_c(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.janitor("run --once --adopt")

    def later(seconds: float) -> None:
        kit.clock.advance(int(seconds * SECOND))
        if kit.clock.now_ms() >= NOW_MS + 6 * SECOND:
            raise KeyboardInterrupt

    monkeypatch.setattr(kit.clock, "sleep", later)
    watched = kit.janitor("status --watch")
    assert (watched.code, watched.err) == (0, "")
    assert re.findall(r"last run .*?\((.*?)\)", watched.out) == ["0 s ago", "2 s ago", "4 s ago"]
    assert kit.janitor("status --watch --check").code == 2


def test_status_of_a_next_run_that_is_due_says_now() -> None:
    found = replace(full(NOW_MS), next_run_ms=NOW_MS - SECOND)
    assert "next run     now" in [line.plain for line in lines(found, judge(found))]
