"""``janitor plan``: what it shows, and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import DAY, NOW_MS
from tests.janitor.cli.command import Janitor, Place
from tests.janitor.cli.conftest import INVALID

#: The report's fields, those of an entry, and the reasons for keeping, as users rely on them.
REPORT = {
    *("id", "mode", "started_ms", "effective_now_ms", "snapshot", "topics", "totals", "boundary", "guards", "errors"),
    *("store_calls", "duration_seconds", "phase_seconds", "thorough"),
}
ENTRY = {
    *("tms_namespace", "topic", "generation", "table", "rule", "rows", "bytes", "bytes_exact", "oldest_ms"),
    *("newest_ms", "sample_keys", "held"),
}
KEPT = {"unknown_topic", "newer_generation", "foreign", "undecided", "referenced", "held"}


def clones(place: Place) -> list[Path]:
    return list(place.state.glob("leveldb-clone-*"))


# --- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sample", "edge"])
def test_given_a_store_as_cdap_left_it_when_planned_then_no_byte_of_it_changes_and_no_clone_is_left(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    janitor: Janitor = request.getfixturevalue(name)
    before = janitor.place.digests()
    assert before
    assert janitor("plan").code == 0
    assert janitor("plan", "--out", str(tmp_path / "plan.json"), "--at", "now+7d").code == 0
    assert janitor.place.digests() == before
    assert clones(janitor.place) == []


@pytest.mark.parametrize(
    "command",
    [
        ["adopt"],
        ["boundary", "--explain"],
        ["audit"],
        ["inspect", "message"],
        ["inspect", "payload"],
        ["inspect", "meta"],
        ["inspect", "snapshot"],
        ["doctor"],
        ["config", "show"],
    ],
    ids=" ".join,
)
def test_given_a_store_as_cdap_left_it_when_asked_anything_then_no_byte_of_it_changes(
    sample: Janitor, command: list[str]
) -> None:
    before = sample.place.digests()
    assert sample(*command).code == 0
    assert sample.place.digests() == before
    assert clones(sample.place) == []


def test_given_a_clone_of_a_process_that_was_killed_when_planned_then_it_is_removed(small: Janitor) -> None:
    (small.place.state / "leveldb-clone-dead").mkdir(parents=True)
    small("plan")
    assert clones(small.place) == []


# --- the report ------------------------------------------------------------------------------------------------------


def test_given_the_sample_when_planned_then_the_json_has_the_promised_fields_and_figures(sample: Janitor) -> None:
    report = sample.report("plan")
    assert set(report) == REPORT
    assert {frozenset(entry) for entry in report["topics"]} == {frozenset(ENTRY)}
    assert set(report["totals"].pop("kept")) == KEPT
    assert report["totals"] == {"expired": 2780, "old_generation": 800, "invalid_transaction": 71}
    assert report["mode"] == "plan"
    assert report["effective_now_ms"] == NOW_MS
    assert report["snapshot"] == {"timestamp_ms": NOW_MS - 1000, "source": f"snapshot.{NOW_MS - 1000}"}
    assert {entry["held"] for entry in report["topics"]} == {"first_contact"}


def test_given_a_claim_when_planned_then_it_is_a_string_since_json_rounds_64_bits(small: Janitor) -> None:
    small.place.configure(transactions={"max_lifetime_seconds": 3600, "grace_seconds": 3600})
    small("run", "--once", "--adopt")
    assert small.report("plan")["boundary"] == str(INVALID)


def test_given_rows_that_are_due_when_planned_then_a_person_sees_them_and_the_next_command(small: Janitor) -> None:
    result = small("plan")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["default:orders", "1", "message", "expired", "2"] in [line[:5] for line in lines]
    assert ["default:orders", "1", "message", "invert", "1"] in [line[:5] for line in lines]
    assert "rows: 3 expired, 0 of old generations would be deleted, 1 of invalid transactions would be inverted" in (
        result.out
    )
    assert result.out.splitlines()[-1].startswith("next: janitor run --once --adopt --config ")


def test_given_nothing_due_when_planned_then_there_is_no_next_command(small: Janitor) -> None:
    small("run", "--once", "--adopt")
    result = small("plan")
    assert "rows: 0 expired" in result.out
    assert "next:" not in result.out


def test_the_command_shown_next_is_one_that_can_be_typed(small: Janitor) -> None:
    small("adopt")
    [shown] = [line for line in small("plan").out.splitlines() if line.startswith("next: ")]
    name, *arguments = shown.removeprefix("next: ").split()
    assert name == "janitor"
    assert small.bare(*arguments).code == 0
    assert small.report("plan")["totals"]["expired"] == 0


# --- --topic, --at, --out --------------------------------------------------------------------------------------------


def test_given_patterns_when_planned_then_only_their_topics_are_looked_at(small: Janitor) -> None:
    def topics(*arguments: str) -> set[str]:
        return {entry["topic"] for entry in small.report("plan", *arguments)["topics"]}

    assert topics("--topic", "default:ret*") == {"returns"}
    assert topics("--topic", "default:orders", "--topic", "*:returns") == {"orders", "returns"}
    assert topics("--topic", "system:*") == set()


@pytest.mark.parametrize(
    "moment", [str(NOW_MS - DAY), "2023-11-13T22:13:20Z", "2023-11-13T23:13:20+01:00", "2023-11-13 22:13:20", "now-1d"]
)
def test_given_another_moment_in_any_form_when_planned_then_rows_are_judged_by_it(small: Janitor, moment: str) -> None:
    report = small.report("plan", "--at", moment)
    assert report["effective_now_ms"] == NOW_MS - DAY
    assert report["totals"]["expired"] == 0
    assert small.report("plan", "--at", "now+1ms")["totals"]["expired"] == 4


def test_given_another_moment_when_planned_then_no_command_is_shown_that_would_not_do_what_is_shown(
    small: Janitor,
) -> None:
    assert "next:" not in small("plan", "--at", "now+1ms").out


@pytest.mark.parametrize("moment", ["yesterday", "now+1w", "now+", "-5", "12:00", ""])
def test_given_no_time_when_planned_at_it_then_the_forms_are_named(small: Janitor, moment: str) -> None:
    result = small("plan", "--at", moment)
    assert result.code == 2
    assert f"{moment!r} is no time: write 1700000000000 (ms), 2023-11-14T22:13:20Z or now-1d12h" in result.err


def test_given_out_when_planned_then_the_file_is_the_report_and_what_apply_needs(
    small: Janitor, tmp_path: Path
) -> None:
    report = small.report("plan", "--out", str(tmp_path / "plan.json"))
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert set(written) - set(report) == {"format", "store_id", "config_digest", "terms", "what_if", "sha256"}
    assert (written["what_if"], written["id"]) == (False, report["id"])
    [inverted] = [entry["pointers"] for entry in written["topics"] if entry["rule"] == "invalid_transaction"]
    assert inverted == [str(INVALID)]


def test_given_a_plan_file_when_shown_then_the_next_command_applies_it(small: Janitor, tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    assert f"next: janitor apply {out} --adopt --config " in small("plan", "--out", out).out
    small("adopt")
    assert f"next: janitor apply {out} --config " in small("plan", "--out", out).out


def test_given_a_place_that_cannot_be_written_when_planned_then_it_is_named(small: Janitor, tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "plan.json"
    result = small("plan", "--out", str(out))
    assert result.code == 1
    assert result.err.startswith(f"the plan could not be written to {out}: No such file or directory.")
    assert result.out == ""
