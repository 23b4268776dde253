"""``--once-for``: a recorded decision is carried out once, even if it is read again."""

from __future__ import annotations

import json

import pytest

from janitor.state import decided
from janitor.state.decided import NOTE, REMEMBERED
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, ProcessKilled
from tests.janitor.cli.conftest import CommandKit
from tests.support import raising


def test_once_for_repeated_does_not_repeat_the_decision(kit: CommandKit) -> None:
    first, again = kit.janitor("adopt --once-for 2026-11-21"), kit.janitor("adopt --once-for 2026-11-21")
    assert (first.code, again.code) == (0, 0)
    assert "adopted, with" in first.out
    assert again.out == ""
    assert "2026-11-21" in again.err
    assert "adopted, with" in kit.janitor("adopt --once-for another").out
    assert "adopted, with" in kit.janitor("adopt").out


def test_once_for_an_old_decision_does_not_accept_a_new_jump(kit: CommandKit) -> None:
    assert kit.janitor("run --once --adopt").code == 0
    assert kit.janitor("approve --clock --once-for monday").code == 0
    kit.clock.step(DAY)
    assert kit.janitor("run --once").code == 3
    assert kit.janitor("approve --clock --once-for monday").code == 0
    assert kit.janitor("run --once").code == 3
    assert kit.janitor("approve --clock --once-for tuesday").code == 0
    assert kit.janitor("run --once").code == 0


def test_once_for_with_other_topics_is_another_decision(kit: CommandKit) -> None:
    assert kit.janitor("adopt --once-for x").code == 0
    for topics in ("default:a*", "default:b*", "--all", "--clock", "--all --clock"):
        assert "already done" not in kit.janitor(f"approve {topics} --once-for x").err
        assert "already done" in kit.janitor(f"approve {topics} --once-for x").err


def test_once_for_after_a_failed_decision_runs_it_again(kit: CommandKit) -> None:
    assert kit.janitor("approve --all --once-for x").code == 3
    assert kit.janitor("adopt --once-for x").code == 0
    assert "already done" not in kit.janitor("approve --all --once-for x").err


def test_once_for_remembers_a_limited_number_of_decisions(kit: CommandKit) -> None:
    assert kit.janitor("adopt").code == 0
    with SqliteState(kit.folder / "data/janitor") as state:
        state.save_note(NOTE, {"adopt": [str(number) for number in range(REMEMBERED)]})
    assert kit.janitor("adopt --once-for new").code == 0
    with SqliteState(kit.folder / "data/janitor") as state:
        assert len(state.note(NOTE)["adopt"]) == REMEMBERED
        assert state.note(NOTE)["adopt"][-1] == "new"


def test_once_for_with_a_process_that_dies_adopts_nothing(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decided, "note_done", raising(ProcessKilled))
        with pytest.raises(ProcessKilled):
            kit.janitor("adopt --once-for monday")
    with SqliteState(kit.folder / "data/janitor") as state:
        record = state.store()
        assert record is None or record.adopted_ms is None
    assert kit.janitor("run --once").code == 3
    assert "adopted, with" in kit.janitor("adopt --once-for monday").out


def test_adopt_with_expect_store_of_another_store_exits_3(kit: CommandKit) -> None:
    refused = kit.janitor("adopt --once-for monday --expect-store other")
    assert refused.code == 3
    assert "other" in refused.err
    assert "[TMS-NOT-ADOPTED]" in refused.err
    assert kit.janitor("run --once").code == 3
    assert kit.janitor("plan --out plan.json").code == 0
    store_id = json.loads((kit.folder / "plan.json").read_text(encoding="utf-8"))["store_id"]
    assert store_id in refused.err
    for meant in (store_id, str(kit.store)):
        assert "adopted, with" in kit.janitor(f"adopt --once-for {meant} --expect-store {meant}").out
    assert kit.janitor("run --once").code == 0
