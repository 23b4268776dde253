"""What keeps a run from writing: clocks that disagree, another store or transaction system, topics that always fail.

What a run makes of those: `tests/disasters/test_s09.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.run.guards import (
    FIRST_PROBE_MS,
    LAST_PROBE_MS,
    STRIKES,
    check_clock,
    check_store,
    check_transaction_system,
    judge_failures,
    measured,
    next_anchor,
    quarantined,
    read_clocks,
    strike,
    successor_mark,
)
from janitor.state.base import ClockAnchor, StoreRecord, Strikes
from tests.builders import HOUR, NOW_MS
from tms_core.clock import ManualClock
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState

ALLOWANCE_MS = 300_000
WEEK_MS = 604_800_000
ANCHOR = ClockAnchor(1_700_000_000_000, 50_000, "boot")
RECORD = StoreRecord("ab" * 16, "leveldb:1", adopted_ms=1, snapshot_timestamp_ms=5, snapshot_write_pointer=1000)


def after(wall_ms: int, monotonic_ms: int, boot_id: str = "boot") -> ClockAnchor:
    """A reading that far from ANCHOR."""
    return ClockAnchor(ANCHOR.wall_ms + wall_ms, ANCHOR.monotonic_ms + monotonic_ms, boot_id)


def test_given_a_clock_when_read_then_all_of_it_is_remembered() -> None:
    assert read_clocks(ManualClock(7, monotonic_ms=8, boot_id="nine")) == ClockAnchor(7, 8, "nine")


# --- the clock within a boot -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [-ALLOWANCE_MS, 0, 1, ALLOWANCE_MS])
def test_s7_given_wall_time_near_monotonic_time_when_checked_then_nothing_is_wrong(ahead_ms: int) -> None:
    assert check_clock(ANCHOR, after(60_000 + ahead_ms, 60_000), ALLOWANCE_MS) is None


@pytest.mark.parametrize(
    ("now", "stops", "words"),
    [
        (after(60_000 + ALLOWANCE_MS + 1, 60_000), True, "5 min ahead.*janitor approve --clock"),
        (after(60_000 - ALLOWANCE_MS - 1, 60_000), False, "5 min behind"),
        (after(WEEK_MS + 1, 0, "another"), True, "7 d ago"),
        (after(WEEK_MS + 1, -1), True, "7 d ago"),
        (after(-WEEK_MS - 1, 0, "another"), False, "7 d later"),
        (after(-WEEK_MS - 1, -1), False, "7 d later"),
    ],
)
def test_s7_given_wall_time_too_far_off_when_checked_then_the_run_is_stopped_only_where_it_is_ahead(
    now: ClockAnchor, stops: bool, words: str
) -> None:
    note = check_clock(ANCHOR, now, ALLOWANCE_MS)
    assert note is not None
    assert (note.guard, note.tripped) == ("clock", stops)
    assert re.search(words, note.message, re.DOTALL)


def test_s7_given_no_memory_when_checked_then_nothing_is_known_to_be_wrong() -> None:
    assert check_clock(None, ANCHOR, ALLOWANCE_MS) is None


def test_s7_given_steps_that_are_each_within_the_allowance_when_they_add_up_then_the_run_is_stopped() -> None:
    first = after(ALLOWANCE_MS, 0)
    assert check_clock(ANCHOR, first, ALLOWANCE_MS) is None
    anchor = next_anchor(ANCHOR, first)
    assert anchor == ANCHOR
    note = check_clock(anchor, after(ALLOWANCE_MS + 1, 0), ALLOWANCE_MS)
    assert note is not None
    assert note.tripped


# --- the clock across boots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "now"),
    [
        (ANCHOR, after(WEEK_MS, 0, "another")),
        (ANCHOR, after(WEEK_MS, -1)),
        (replace(ANCHOR, boot_id=""), after(WEEK_MS, 60_000, "")),
    ],
)
def test_s7_given_another_boot_when_it_is_not_more_than_a_week_later_then_wall_time_is_believed(
    anchor: ClockAnchor, now: ClockAnchor
) -> None:
    assert check_clock(anchor, now, ALLOWANCE_MS) is None
    assert next_anchor(anchor, now) == now


@pytest.mark.parametrize(("off_ms", "moves"), [(-WEEK_MS, False), (-1, False), (0, True), (1, True)])
def test_s7_given_another_boot_when_its_clock_is_behind_then_the_anchor_stays_until_it_is_not(
    off_ms: int, moves: bool
) -> None:
    now = after(off_ms, 0, "another")
    assert check_clock(ANCHOR, now, ALLOWANCE_MS) is None
    assert next_anchor(ANCHOR, now) == (now if moves else ANCHOR)


def test_s7_given_the_same_boot_when_more_than_a_week_has_passed_honestly_then_nothing_is_wrong() -> None:
    month_ms = 30 * 86_400_000
    assert check_clock(ANCHOR, after(month_ms, month_ms), ALLOWANCE_MS) is None


# --- what is remembered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [-10_000, 0, 10_000])
def test_given_a_boot_that_goes_on_when_remembered_then_wall_time_moves_with_monotonic_time_alone(step_ms: int) -> None:
    assert next_anchor(ANCHOR, after(60_000 + step_ms, 60_000)) == after(60_000, 60_000)


def test_given_a_boot_that_goes_on_when_time_is_measured_then_it_is_monotonic_time_that_counts() -> None:
    assert measured(ANCHOR, after(60_000 - 3_600_000, 60_000)) == after(60_000, 60_000)
    assert measured(None, ANCHOR) == ANCHOR
    assert measured(ANCHOR, after(0, 0, "another")) == after(0, 0, "another")


def test_given_a_boot_whose_clock_is_in_the_past_when_time_is_measured_then_only_readings_of_that_boot_compare() -> (
    None
):
    first, second = (measured(ANCHOR, after(passed_ms - WEEK_MS, passed_ms, "another")) for passed_ms in (0, 60_000))
    assert second.wall_ms - first.wall_ms == 60_000
    assert first.comparable(second)
    assert not first.comparable(ANCHOR)
    assert not ANCHOR.comparable(first)
    assert ANCHOR.comparable(after(0, 0, "another"))


def test_given_no_memory_when_remembered_then_it_is_this_moment() -> None:
    assert next_anchor(None, ANCHOR) == ANCHOR


# --- the store -------------------------------------------------------------------------------------------------------


def test_s13_given_the_store_that_is_known_when_checked_then_nothing_is_wrong() -> None:
    assert check_store(RECORD, "leveldb:1") is None


def test_s13_given_another_store_when_checked_then_the_run_is_stopped_and_both_are_named() -> None:
    note = check_store(RECORD, "leveldb:2")
    assert note is not None
    assert (note.guard, note.tripped) == ("identity", True)
    assert "leveldb:1" in note.message
    assert "leveldb:2" in note.message
    assert "janitor adopt" in note.message


def test_s13_given_a_store_in_anothers_place_when_marked_then_the_mark_is_its_own_and_stays_the_same() -> None:
    marks = [successor_mark(RECORD.mark, identity) for identity in ("leveldb:2", "leveldb:2", "leveldb:3")]
    assert marks[0] == marks[1]
    assert len({RECORD.mark, *marks, successor_mark("cd" * 16, "leveldb:2")}) == 4
    assert {len(mark) for mark in marks} == {len(RECORD.mark)}


# --- the transaction system ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_pointer", [1000, 1001])
def test_s13_given_a_write_pointer_that_grew_or_stayed_when_checked_then_it_is_the_same_system(
    write_pointer: int,
) -> None:
    assert check_transaction_system(RECORD, VisibilityState(6, 0, write_pointer)) is None


def test_s13_given_a_write_pointer_below_the_last_when_checked_then_the_run_is_stopped_and_both_are_named() -> None:
    note = check_transaction_system(RECORD, VisibilityState(6, 0, 999))
    assert note is not None
    assert (note.guard, note.tripped) == ("identity", True)
    assert "999" in note.message
    assert "1000" in note.message


def test_s13_given_no_snapshot_or_no_memory_of_one_when_checked_then_nothing_is_known_to_be_wrong() -> None:
    assert check_transaction_system(RECORD, None) is None
    assert check_transaction_system(replace(RECORD, snapshot_write_pointer=None), VisibilityState(6, 0, 1)) is None


A, B, C = (TopicId("default", name) for name in "abc")


# --- topics that are put aside ---------------------------------------------------------------------------------------


def struck(times: int, now_ms: int = NOW_MS) -> Strikes:
    """A record after so many failures at one moment."""
    record = strike(None, "it fails.", now_ms)
    for _ in range(times - 1):
        record = strike(record, "it fails.", now_ms)
    return record


def test_given_failures_in_a_row_when_counted_then_the_third_puts_the_topic_aside_and_the_wait_doubles() -> None:
    waits = [struck(times).probe_ms for times in range(1, 11)]
    hours = [None if probe_ms is None else (probe_ms - NOW_MS) / HOUR for probe_ms in waits]
    assert hours == [None, None, 1, 2, 4, 8, 16, 24, 24, 24]
    assert struck(10**4).probe_ms == NOW_MS + LAST_PROBE_MS


def test_given_probes_that_fail_when_counted_then_it_is_still_known_since_when_it_is_aside() -> None:
    aside = strike(strike(struck(2), "first", NOW_MS + 1), "second", NOW_MS + 2)
    assert aside == Strikes(4, NOW_MS + 2, "second", NOW_MS + 1, NOW_MS + 2 + 2 * FIRST_PROBE_MS)


@pytest.mark.parametrize(
    ("after_ms", "aside"),
    [(0, True), (FIRST_PROBE_MS - 1, True), (FIRST_PROBE_MS, False), (-LAST_PROBE_MS, False), (-HOUR, True)],
)
def test_given_a_quarantined_topic_when_asked_at_a_moment_then_it_is_passed_by_until_its_probe(
    after_ms: int, aside: bool
) -> None:
    strikes = {A: struck(STRIKES), B: struck(STRIKES - 1)}
    assert quarantined(strikes, NOW_MS + after_ms) == ({A} if aside else set())


@given(at=st.integers(0, 2**45), now_ms=st.integers(0, 2**45), times=st.integers(STRIKES, 20))
def test_given_a_clock_set_to_any_moment_when_a_topic_is_aside_then_it_is_for_another_day_at_most(
    at: int, now_ms: int, times: int
) -> None:
    strikes = {A: struck(times, at)}
    assert A in quarantined(strikes, at)
    if A in quarantined(strikes, now_ms):
        assert A not in quarantined(strikes, now_ms + LAST_PROBE_MS)


def test_given_a_run_when_judged_then_failures_count_and_those_that_went_well_are_forgotten() -> None:
    known = {A: struck(2), B: struck(3)}
    changed = judge_failures(known, {A: "again.", C: "new."}, [B], [B], NOW_MS)
    assert changed[B] is None
    assert (changed[A], changed[C]) == (
        Strikes(3, NOW_MS, "again.", NOW_MS, NOW_MS + FIRST_PROBE_MS),
        Strikes(1, NOW_MS, "new."),
    )
    assert judge_failures(known, {}, [C], [C], NOW_MS) == {}


@pytest.mark.parametrize("written", [[], [A]], ids=["nothing", "only in a topic that failed later"])
def test_given_several_topics_that_refuse_writes_and_none_that_takes_any_when_judged_then_no_failure_counts(
    written: list[TopicId],
) -> None:
    full = {A: "the disk is full.", B: "the disk is full."}
    assert judge_failures({}, full, [C], written, NOW_MS) == {}
    assert judge_failures({C: struck(3)}, full, [C], written, NOW_MS) == {C: None}


def test_given_one_topic_that_fails_in_a_store_where_nothing_else_is_due_when_judged_then_it_counts() -> None:
    assert judge_failures({}, {A: "broken."}, [B, C], [], NOW_MS) == {A: strike(None, "broken.", NOW_MS)}


def test_given_several_topics_that_cannot_be_read_when_judged_then_each_counts() -> None:
    bad = {A: "damaged.", B: "damaged."}
    assert set(judge_failures({}, bad, [C], [], NOW_MS, write_failed=False)) == {A, B}


def test_given_a_store_in_which_no_topic_was_done_when_judged_then_no_failure_counts() -> None:
    assert judge_failures({}, {A: "broken."}, [], [], NOW_MS, write_failed=False) == {}
