"""Strikes, quarantine and probes, without a store. What a run makes of them: `tests/disasters/test_s09.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.run.quarantine import FIRST_PROBE_MS, LAST_PROBE_MS, STRIKES, judge, quarantined, strike
from janitor.state.base import Strikes
from tests.builders import HOUR, NOW_MS
from tms_core.topic import TopicId

A, B, C = (TopicId("default", name) for name in "abc")


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
    changed = judge(known, {A: "again.", C: "new."}, [B], [B], NOW_MS)
    assert changed[B] is None
    assert (changed[A], changed[C]) == (
        Strikes(3, NOW_MS, "again.", NOW_MS, NOW_MS + FIRST_PROBE_MS),
        Strikes(1, NOW_MS, "new."),
    )
    assert judge(known, {}, [C], [C], NOW_MS) == {}


@pytest.mark.parametrize("written", [[], [A]], ids=["nothing", "only in a topic that failed later"])
def test_given_several_topics_that_refuse_writes_and_none_that_takes_any_when_judged_then_no_failure_counts(
    written: list[TopicId],
) -> None:
    full = {A: "the disk is full.", B: "the disk is full."}
    assert judge({}, full, [C], written, NOW_MS) == {}
    assert judge({C: struck(3)}, full, [C], written, NOW_MS) == {C: None}


def test_given_one_topic_that_fails_in_a_store_where_nothing_else_is_due_when_judged_then_it_counts() -> None:
    assert judge({}, {A: "broken."}, [B, C], [], NOW_MS) == {A: strike(None, "broken.", NOW_MS)}


def test_given_several_topics_that_cannot_be_read_when_judged_then_each_counts() -> None:
    bad = {A: "damaged.", B: "damaged."}
    assert set(judge({}, bad, [C], [], NOW_MS, write_failed=False)) == {A, B}


def test_given_a_store_in_which_no_topic_was_done_when_judged_then_no_failure_counts() -> None:
    assert judge({}, {A: "broken."}, [], [], NOW_MS, write_failed=False) == {}
