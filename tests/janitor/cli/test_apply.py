"""``janitor apply``: the plan and nothing but the plan, or a sentence that says what moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import DAY, NOW_MS, Topic
from tests.janitor.cli.command import Janitor
from tms_core.tables.base import Store
from tms_core.topic import TopicId

AGAIN = "Make a new one: janitor plan --out FILE"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def orders(store: Store) -> Topic:
    return Topic(store, TopicId("default", "orders"))


def test_given_the_samples_plan_when_applied_and_adopted_then_all_of_it_is_done_and_nothing_is_left(
    sample: Janitor, file: Path
) -> None:
    planned = sample.report("plan", "--out", str(file))
    applied = sample.report("apply", str(file), "--adopt")
    assert applied["mode"] == "apply"
    assert set(applied) == set(planned)
    assert applied["totals"] == planned["totals"]
    assert {entry["held"] for entry in applied["topics"]} == {None}
    left = sample.report("plan")
    assert left["topics"] == []
    assert left["totals"]["expired"] == left["totals"]["old_generation"] == left["totals"]["invalid_transaction"] == 0


def test_given_a_store_nobody_adopted_when_applied_then_nothing_is_done_and_the_next_step_is_said(
    small: Janitor, file: Path
) -> None:
    small("plan", "--out", str(file))
    result = small("apply", str(file))
    assert result.code == 3
    assert "adoption: nobody has adopted this store yet, nothing is deleted" in result.out
    assert small.report("plan")["totals"]["expired"] == 3


def test_given_rows_that_came_due_since_when_applied_then_they_stay(small: Janitor, file: Path) -> None:
    small("plan", "--out", str(file))
    small.clock.advance(1)
    assert small.report("apply", str(file), "--adopt")["totals"]["expired"] == 3
    assert small.report("plan")["totals"]["expired"] == 1


def test_given_a_plan_of_some_topics_when_applied_then_the_others_stay(small: Janitor, file: Path) -> None:
    small("plan", "--out", str(file), "--topic", "default:returns")
    small.report("apply", str(file), "--adopt")
    assert {entry["topic"] for entry in small.report("plan")["topics"]} == {"orders"}


# --- refused: something moved ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("move", "said"),
    [
        (
            lambda janitor: janitor.place.fill(lambda store: orders(store).describe(ttl_seconds=172800)),
            "the plan was not applied: topic default:orders has a ttl of 172800 s, the plan says 86400 s.",
        ),
        (
            lambda janitor: janitor.place.fill(lambda store: orders(store).describe(ttl_seconds=86400, generation=2)),
            "the plan was not applied: topic default:orders is at generation 2, the plan at 1.",
        ),
        (
            lambda janitor: janitor.place.fill(lambda store: orders(store).write_metadata(b"{}")),
            "the plan was not applied: topic default:orders has no readable metadata any more.",
        ),
        (
            lambda janitor: janitor.place.configure(janitor={"protect": ["default:audit*"]}),
            "the plan was not applied: the settings it rests on have moved: protect.",
        ),
    ],
    ids=["ttl", "generation", "metadata", "protect"],
)
def test_given_something_moved_since_when_applied_then_it_is_refused_and_named(
    small: Janitor, file: Path, move: Callable[[Janitor], None], said: str
) -> None:
    small("adopt")
    small("plan", "--out", str(file))
    move(small)
    before = small.report("inspect", "message")["rows"]
    result = small("apply", str(file))
    assert result.code == 3
    assert result.err.splitlines()[-2:] == [said, AGAIN]
    assert result.out == ""
    assert small.report("inspect", "message")["rows"] == before


def test_given_another_store_in_the_same_place_when_applied_then_it_is_refused(small: Janitor, file: Path) -> None:
    small("plan", "--out", str(file))
    copy = small.place.folder / "copy"
    shutil.copytree(small.place.store, copy)
    shutil.rmtree(small.place.store)
    copy.rename(small.place.store)
    result = small("apply", str(file), "--adopt")
    assert result.code == 3
    assert "it was made for another store, or for this one before it was copied or restored" in result.err


# --- wrong files -----------------------------------------------------------------------------------------------------


def test_given_a_what_if_plan_when_applied_then_it_is_refused_as_wrong_usage(small: Janitor, file: Path) -> None:
    small("plan", "--out", str(file), "--at", "now+7d")
    result = small("apply", str(file), "--adopt")
    assert result.code == 2
    assert f"{file} is a what-if plan, made for another moment than the present." in result.err
    assert "Make one without --at: janitor plan --out FILE" in result.err


def test_given_a_plan_edited_by_hand_when_applied_then_it_is_refused(small: Janitor, file: Path) -> None:
    small("plan", "--out", str(file))
    document = json.loads(file.read_text(encoding="utf-8"))
    document["effective_now_ms"] += 30 * DAY
    file.write_text(json.dumps(document), encoding="utf-8")
    result = small("apply", str(file), "--adopt")
    assert result.code == 2
    assert f"{file} was changed after it was made." in result.err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"sha256": 1}', "rows: 3 expired"])
def test_given_a_file_that_is_no_plan_when_applied_then_it_says_what_makes_one(
    small: Janitor, file: Path, content: str
) -> None:
    file.write_text(content, encoding="utf-8")
    result = small("apply", str(file))
    assert result.code == 2
    assert "janitor plan --out" in result.err
    assert "Traceback" not in result.err


def test_given_no_file_when_applied_then_it_is_named(small: Janitor, file: Path) -> None:
    result = small("apply", str(file))
    assert result.code == 2
    assert f"cannot read {file}: No such file or directory." in result.err


def test_given_a_clock_that_jumped_when_applied_then_the_guard_stops_it(small: Janitor, file: Path) -> None:
    small("run", "--once", "--adopt")
    small("plan", "--out", str(file))
    small.clock.step(DAY)
    small.place.snapshot(NOW_MS + DAY)
    result = small("apply", str(file))
    assert result.code == 3
    assert "clock: the clock is 86400 s ahead of what running time makes of the last run" in result.out
