"""``--once-for``: a decision that is written down is carried out once, however often it is read."""

from __future__ import annotations

from janitor.cli.once import NOTE, REMEMBERED
from janitor.state.sqlite import SqliteState
from tests.builders import DAY
from tests.janitor.cli.conftest import Site


def test_given_a_decision_when_it_is_read_again_then_it_is_not_carried_out_again(site: Site) -> None:
    first, again = site.janitor("adopt --once-for 2026-11-21"), site.janitor("adopt --once-for 2026-11-21")
    assert (first.code, again.code) == (0, 0)
    assert "adopted, with" in first.out
    assert again.out == ""
    assert "adopt was done for 2026-11-21 before" in again.err
    assert "adopted, with" in site.janitor("adopt --once-for another").out
    assert "adopted, with" in site.janitor("adopt").out


def test_given_a_clock_that_jumped_then_an_old_decision_does_not_accept_it_and_a_new_one_does(site: Site) -> None:
    assert site.janitor("run --once --adopt").code == 0
    assert site.janitor("approve --once-for monday").code == 0
    site.clock.step(DAY)
    assert site.janitor("run --once").code == 3
    assert site.janitor("approve --once-for monday").code == 0
    assert site.janitor("run --once").code == 3
    assert site.janitor("approve --once-for tuesday").code == 0
    assert site.janitor("run --once").code == 0


def test_given_the_same_text_for_other_topics_then_it_is_another_decision(site: Site) -> None:
    assert site.janitor("adopt --once-for x").code == 0
    for topics in ("default:a*", "default:b*", ""):
        assert "before" not in site.janitor(f"approve {topics} --once-for x").err
        assert "before" in site.janitor(f"approve {topics} --once-for x").err


def test_given_a_decision_that_failed_then_it_is_carried_out_when_it_can_be(site: Site) -> None:
    assert site.janitor("approve --once-for x").code == 3
    assert site.janitor("adopt --once-for x").code == 0
    assert "before" not in site.janitor("approve --once-for x").err


def test_not_more_is_remembered_than_files_hold(site: Site) -> None:
    assert site.janitor("adopt").code == 0
    with SqliteState(site.folder / "data/janitor") as state:
        state.save_note(NOTE, {"adopt": [str(number) for number in range(REMEMBERED)]})
    assert site.janitor("adopt --once-for new").code == 0
    with SqliteState(site.folder / "data/janitor") as state:
        assert len(state.note(NOTE)["adopt"]) == REMEMBERED
        assert state.note(NOTE)["adopt"][-1] == "new"
