"""Guards that block runs: clocks, other stores or transaction systems, and topics that always fail.

`tests/disasters/test_s09.py` tests the runs of such topics.
"""

from __future__ import annotations

import re

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
    elapsed_clock,
    find_quarantined,
    judge_failures,
    next_anchor,
    strike,
    successor_mark,
)
from janitor.state.base import ClockAnchor, StoreRecord, Strikes
from tests.builders import HOUR, NOW_MS, visibility
from tms_core.topic import TopicId

ALLOWANCE_MS = 300_000
WEEK_MS = 604_800_000
ANCHOR = ClockAnchor(1_700_000_000_000, 50_000, "boot")
RECORD = StoreRecord("ab" * 16, "leveldb:1", adopted_ms=1, snapshot_timestamp_ms=5, snapshot_write_pointer=1000)


def reading_after(wall_ms: int, monotonic_ms: int, boot_id: str = "boot") -> ClockAnchor:
    """Return a reading with these differences from ANCHOR."""
    return ClockAnchor(ANCHOR.wall_ms + wall_ms, ANCHOR.monotonic_ms + monotonic_ms, boot_id)


@pytest.mark.parametrize(
    ("now", "stops", "words"),
    [
        (reading_after(60_000 + ALLOWANCE_MS + 1, 60_000), True, "5 min ahead.*janitor approve --clock"),
        (reading_after(60_000 - ALLOWANCE_MS - 1, 60_000), False, "5 min behind"),
        (reading_after(WEEK_MS + 1, 0, "another"), True, "7 d ago"),
        (reading_after(WEEK_MS + 1, -1), True, "7 d ago"),
        (reading_after(-WEEK_MS - 1, 0, "another"), False, "7 d later"),
        (reading_after(-WEEK_MS - 1, -1), False, "7 d later"),
    ],
)
def test_s7_clock_too_far_off_stops_a_run_only_if_ahead(now: ClockAnchor, stops: bool, words: str) -> None:
    note = check_clock(ANCHOR, now, ALLOWANCE_MS)
    assert note is not None
    assert (note.guard, note.tripped) == ("clock", stops)
    assert re.search(words, note.message, re.DOTALL)


def test_s7_first_clock_or_clock_within_the_allowance_is_accepted() -> None:
    assert check_clock(None, ANCHOR, ALLOWANCE_MS) is None
    assert check_clock(ANCHOR, reading_after(60_000 - ALLOWANCE_MS, 60_000), ALLOWANCE_MS) is None


@pytest.mark.parametrize("step_ms", [-10_000, 0, 10_000])
def test_anchor_within_a_boot_moves_with_monotonic_time(step_ms: int) -> None:
    assert next_anchor(ANCHOR, reading_after(60_000 + step_ms, 60_000)) == reading_after(60_000, 60_000)


def test_elapsed_clock_is_monotonic_in_a_boot_and_else_the_wall_clock() -> None:
    assert elapsed_clock(ANCHOR, reading_after(60_000 - HOUR, 60_000)) == reading_after(60_000, 60_000)
    assert elapsed_clock(None, ANCHOR) == ANCHOR
    rebooted = reading_after(0, 0, "another")
    assert elapsed_clock(ANCHOR, rebooted) == next_anchor(ANCHOR, rebooted) == rebooted


def test_measured_clock_in_the_past_compares_within_its_boot() -> None:
    first, second = (
        elapsed_clock(ANCHOR, reading_after(passed_ms - WEEK_MS, passed_ms, "another")) for passed_ms in (0, 60_000)
    )
    assert second.wall_ms - first.wall_ms == 60_000
    assert first.comparable(second)
    assert not first.comparable(ANCHOR)
    assert not ANCHOR.comparable(first)
    assert ANCHOR.comparable(reading_after(0, 0, "another"))


def test_next_anchor_without_a_saved_anchor_is_the_current() -> None:
    assert next_anchor(None, ANCHOR) == ANCHOR


def test_s13_another_store_or_transaction_system_is_named_with_the_next_step() -> None:
    for note, named in (
        (check_store(RECORD, "leveldb:2"), ("leveldb:1", "leveldb:2")),
        (check_transaction_system(RECORD, visibility(NOW_MS, newest=999)), ("999", "1000")),
    ):
        assert note is not None
        assert (note.guard, note.tripped) == ("identity", True)
        assert all(word in note.message for word in (*named, "janitor adopt"))


def test_s13_successor_mark_is_stable_and_depends_on_the_identity() -> None:
    marks = [successor_mark(RECORD.mark, identity) for identity in ("leveldb:2", "leveldb:2", "leveldb:3")]
    assert marks[0] == marks[1]
    assert len({RECORD.mark, *marks, successor_mark("cd" * 16, "leveldb:2")}) == 4
    assert {len(mark) for mark in marks} == {len(RECORD.mark)}


A, B, C = (TopicId("default", name) for name in "abc")


def strikes_after(times: int, now_ms: int = NOW_MS) -> Strikes:
    """Return the record after this number of failures at one time."""
    record = strike(None, "it fails.", now_ms)
    for _ in range(times - 1):
        record = strike(record, "it fails.", now_ms)
    return record


def test_third_failure_quarantines_and_the_wait_doubles() -> None:
    waits = [strikes_after(times).probe_ms for times in range(1, 11)]
    hours = [None if probe_ms is None else (probe_ms - NOW_MS) / HOUR for probe_ms in waits]
    assert hours == [None, None, 1, 2, 4, 8, 16, 24, 24, 24]
    assert strikes_after(10**4).probe_ms == NOW_MS + LAST_PROBE_MS


def test_failed_probe_keeps_the_start_of_the_quarantine() -> None:
    record = strike(strike(strikes_after(2), "first", NOW_MS + 1), "second", NOW_MS + 2)
    assert record == Strikes(4, NOW_MS + 2, "second", NOW_MS + 1, NOW_MS + 2 + 2 * FIRST_PROBE_MS)


@given(at=st.integers(0, 2**45), now_ms=st.integers(0, 2**45), times=st.integers(STRIKES, 20))
def test_quarantine_lasts_a_day_at_most_whatever_the_clock_says(at: int, now_ms: int, times: int) -> None:
    strikes = {A: strikes_after(times, at)}
    assert A in find_quarantined(strikes, at)
    if A in find_quarantined(strikes, now_ms):
        assert A not in find_quarantined(strikes, now_ms + LAST_PROBE_MS)


def test_judge_failures_counts_them_and_forgets_success() -> None:
    known = {A: strikes_after(2), B: strikes_after(3)}
    changed = judge_failures(known, {A: "again.", C: "new."}, [B], [B], NOW_MS)
    assert changed[B] is None
    assert (changed[A], changed[C]) == (
        Strikes(3, NOW_MS, "again.", NOW_MS, NOW_MS + FIRST_PROBE_MS),
        Strikes(1, NOW_MS, "new."),
    )
    assert judge_failures(known, {}, [C], [C], NOW_MS) == {}


def test_failure_to_write_to_one_topic_counts_if_nothing_else_is_due() -> None:
    assert judge_failures({}, {A: "broken."}, [B, C], [], NOW_MS) == {A: strike(None, "broken.", NOW_MS)}


@pytest.mark.parametrize("written", [[], [A]], ids=["no topic", "only a topic that failed later"])
def test_failures_to_write_everywhere_do_not_count(written: list[TopicId]) -> None:
    full = {A: "the disk is full.", B: "the disk is full."}
    assert judge_failures({}, full, [C], written, NOW_MS) == {}
    assert judge_failures({C: strikes_after(3)}, full, [C], written, NOW_MS) == {C: None}
