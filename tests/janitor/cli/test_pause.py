"""pause, resume and status where no other process holds the store."""

from __future__ import annotations

import re
import shutil

import pytest

from janitor.state.base import RunRecord, Strikes
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, topic
from tests.janitor.cli.conftest import SETTINGS, Site
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

STATE = "data/janitor"


def remembered(site: Site) -> list[str]:
    with SqliteState(site.folder / STATE) as state:
        return [pause.pattern for pause in state.pauses()]


# --- pause -----------------------------------------------------------------------------------------------------------


def test_given_a_pause_of_one_topic_then_a_run_leaves_it_alone_and_does_the_others(site: Site) -> None:
    site.janitor("adopt")
    shown = site.janitor("pause default:orders")
    assert shown.out == (
        "paused: default:orders; a run under way stops there before its next batch\n"
        "next: janitor resume default:orders --config janitor.yaml\n"
    )
    totals = site.janitor("run --once --format json").json["totals"]
    assert (totals["expired"], totals["old_generation"], totals["kept"]["held"]) == (0, 1, 2)


def test_given_a_topic_nobody_has_seen_when_paused_then_that_is_said_and_it_is_paused(site: Site) -> None:
    site.janitor("adopt")
    paused = site.janitor("pause default:ordrs")
    assert (paused.code, remembered(site)) == (0, ["default:ordrs"])
    assert "default:ordrs" in paused.err
    assert site.janitor("pause 'default:*'").err == ""


def test_given_no_store_when_paused_then_1_and_no_state_is_made(site: Site) -> None:
    site.set(SETTINGS.replace("data/messaging", "data/nowhere"))
    refused = site.janitor("pause")
    assert (refused.code, refused.out) == (1, "")
    assert not (site.folder / STATE).exists()


def test_given_no_topic_then_2(site: Site) -> None:
    assert site.janitor("pause orders").code == 2


# --- resume ----------------------------------------------------------------------------------------------------------


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
def test_given_pauses_then_those_within_the_pattern_are_taken_back(site: Site, word: str, left: list[str]) -> None:
    for pattern in ("default:orders", "default:*", "system:x", "*:*"):
        site.janitor(f"pause '{pattern}'")
    done = site.janitor(f"resume {word}")
    assert sorted(remembered(site)) == left
    assert done.code == (1 if left else 0)


def test_given_everything_paused_when_one_topic_is_resumed_then_1_and_what_keeps_it(site: Site) -> None:
    site.janitor("pause")
    kept = site.janitor("resume default:orders")
    assert kept.code == 1
    assert kept.out.splitlines() == [
        "default:orders was not paused under this name",
        "still paused: everything",
        "next: janitor resume --config janitor.yaml",
    ]
    assert site.janitor("resume default:orders --format json").json == {
        "resumed": [],
        "retried": [],
        "paused": [{"pattern": "*:*", "since_ms": NOW_MS}],
    }


def test_given_nothing_paused_then_that_is_said_and_no_state_is_made(site: Site) -> None:
    done = site.janitor("resume")
    assert (done.code, done.out) == (0, "nothing is paused\n")
    assert not (site.folder / STATE).exists()


def test_given_quarantined_topics_when_resumed_then_those_that_fit_are_tried_again(site: Site) -> None:
    names = [TopicId("default", "orders"), TopicId("default", "retired"), TopicId("system", "x")]
    with SqliteState(site.folder / STATE) as state:
        aside = Strikes(3, NOW_MS, "broken", quarantined_ms=NOW_MS, probe_ms=NOW_MS + DAY)
        state.save_strikes({**dict.fromkeys(names, aside), TopicId("default", "once"): Strikes(1, NOW_MS, "broken")})
    done = site.janitor("resume 'default:*'")
    assert done.out == "tried again with the next run: default:orders, default:retired\n"
    with SqliteState(site.folder / STATE) as state:
        assert sorted(map(str, state.strikes())) == ["default:once", "system:x"]


# --- status ----------------------------------------------------------------------------------------------------------


def test_given_a_store_nobody_has_swept_then_the_status_says_so_and_makes_no_state(site: Site) -> None:
    shown = site.janitor("status")
    assert shown.code == 0
    assert "This store is not adopted. Nothing is deleted until you adopt it.\n" in shown.out
    assert "last run     never\n" in shown.out
    assert not (site.folder / STATE).exists()


def test_given_a_past_run_and_things_that_wait_then_the_status_names_them_with_their_commands(site: Site) -> None:
    site.janitor("run --once --adopt")
    with LevelDBStore(site.store) as store:
        topic(store, "default:orders", ttl_seconds=30)
    site.clock.advance(MINUTE)
    site.snapshot()
    site.janitor("run --once")
    site.janitor("pause default:retired")
    site.clock.advance(MINUTE)
    shown = site.janitor("status")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert f"store        {site.store}" in lines
    assert "mode         deletes and inverts; every 60 s" in lines
    [last] = [line for line in lines if line.startswith("last run")]
    assert last.endswith("(1 min ago); done: 0 expired, 0 of old generations, 0 inverted")
    [paused] = [line for line in lines if line.startswith("paused")]
    assert paused.endswith("default:retired; since 2023-11-14 22:14:20 UTC (1 min ago)")
    [held] = [line for line in lines if line.startswith("held")]
    assert "default:orders; " in held
    assert "(frontier); ttl 1 d → 30 s, seen 2023-11-14 22:14:20 UTC; until 2023-11-14 23:14:20 UTC (in 59 min)" in held
    [step] = [line for line in lines if line.startswith("next:")]
    assert step.startswith("next: janitor approve default:orders --config"), "the gravest reason comes first"
    assert any(line.startswith("snapshot     of 2023-11-14 22:14:19 UTC (1 min 1 s ago); 1 invalid") for line in lines)
    assert any(line.startswith("boundary     clean up to ") for line in lines)
    assert any(line.startswith("overdue      ") for line in lines)
    assert "\x1b" not in shown.out


def test_given_settings_that_only_plan_then_the_status_says_so(site: Site) -> None:
    site.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    assert "mode         plan only; every 60 s" in site.janitor("status").out


def test_given_more_of_a_kind_than_are_read_at_a_glance_then_the_rest_is_counted(site: Site) -> None:
    with SqliteState(site.folder / STATE) as state:
        for number in range(12):
            state.pause(f"default:t{number}", NOW_MS)
    shown = site.janitor("status").out
    assert shown.count("\npaused       ") == 10
    assert "and 2 more paused; all of them with --format json" in shown


def test_given_a_run_of_another_process_under_way_then_the_status_says_so_and_does_not_say_never(site: Site) -> None:
    site.janitor("adopt")
    with SqliteState(site.folder / "data" / "janitor") as state:
        state.begin_run(RunRecord("at-work", "apply", NOW_MS - 5 * MINUTE, heartbeat_ms=NOW_MS - SECOND))
    shown = site.janitor("status").out
    assert "under way    run at-work of another process, started 2023-11-14 22:08:20 UTC (5 min ago)" in shown
    assert "last run     none has finished yet" in shown
    assert site.janitor("status --format json").json["running"]["id"] == "at-work"
    site.clock.advance(HOUR)
    assert "under way" not in site.janitor("status").out


def test_given_a_monitoring_plugin_then_status_check_is_one_line_and_its_exit_code(site: Site) -> None:
    site.janitor("run --once --adopt")
    well = site.janitor("status --check")
    assert (well.code, well.out) == (0, "JANITOR OK: No action is required.\n")
    site.janitor("pause")
    paused = site.janitor("status --check")
    assert (paused.code, paused.out) == (1, "JANITOR WARNING: Everything is paused.\n")
    site.janitor("resume")
    site.clock.advance(30 * DAY)
    down = site.janitor("status --check --format json")
    assert (down.code, down.json["status"]) == (2, "CRITICAL")
    shutil.rmtree(site.folder / "data")
    unknown = site.janitor("status --check")
    assert (unknown.code, unknown.out[:17]) == (3, "JANITOR UNKNOWN: ")


def test_given_watch_then_the_status_is_shown_again_and_again_until_ctrl_c(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.janitor("run --once --adopt")

    def later(seconds: float) -> None:
        site.clock.advance(int(seconds * SECOND))
        if site.clock.now_ms() >= NOW_MS + 6 * SECOND:
            raise KeyboardInterrupt

    monkeypatch.setattr(site.clock, "sleep", later)
    watched = site.janitor("status --watch")
    assert (watched.code, watched.err) == (0, "")
    assert re.findall(r"last run .*?\((.*?)\)", watched.out) == ["0 s ago", "2 s ago", "4 s ago"]
    assert site.janitor("status --watch --check").code == 2
