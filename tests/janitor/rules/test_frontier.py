"""Frontiers advance as fast as time: immediate deletions, holds, their duration and their end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.rules.policy import Frontier, Hold, admit, advance, approve, elapsed_ms, freeze
from janitor.state.base import ClockAnchor, FrontierRecord, PendingJump
from janitor.state.records import UNKNOWN_MS
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicId, TopicMetadata

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
ALLOWANCE_MS = 300_000
HOLD_SECONDS = 3600
#: The initial TTL of topics: a week.
TTL_SECONDS = 604_800

START = ClockAnchor(START_MS, 50_000, "boot")


def topic(generation: int = 1, ttl_seconds: int = TTL_SECONDS) -> TopicMetadata:
    return TopicMetadata(TopicId("default", "t1"), generation, ttl_seconds)


def due_cutoff(now: ClockAnchor, ttl_seconds: int = TTL_SECONDS) -> int:
    return now.wall_ms - ttl_seconds * 1000


def advance_clock(now: ClockAnchor, milliseconds: int) -> ClockAnchor:
    return ClockAnchor(now.wall_ms + milliseconds, now.monotonic_ms + milliseconds, now.boot_id)


def step_clock(now: ClockAnchor, milliseconds: int) -> ClockAnchor:
    return replace(now, wall_ms=now.wall_ms + milliseconds)


def reboot(now: ClockAnchor, off_ms: int) -> ClockAnchor:
    return ClockAnchor(now.wall_ms + off_ms, 10, "another boot")


def step(
    record: FrontierRecord | None, metadata: TopicMetadata, now: ClockAnchor, hold_seconds: int = HOLD_SECONDS
) -> tuple[Frontier, FrontierRecord]:
    return advance(record, metadata, now, hold_seconds=hold_seconds, allowance_ms=ALLOWANCE_MS)


def settled_record(generation: int = 1) -> FrontierRecord:
    """Return the record of a topic whose due rows at START are deleted."""
    return admit(topic(generation), START)


@pytest.mark.parametrize(
    ("wall_ms", "monotonic_ms", "boot_id", "elapsed"),
    [
        (100, 100, "boot", 100),
        (100, 30, "boot", 30),
        (30, 100, "boot", 30),
        (-50, 100, "boot", 0),
        (100, -50, "boot", 0),
        (100, 30, "other", 100),
        (-50, 30, "other", 0),
        (100, 30, "", 100),
    ],
)
def test_elapsed_is_the_smaller_within_a_boot(wall_ms: int, monotonic_ms: int, boot_id: str, elapsed: int) -> None:
    now = ClockAnchor(START_MS + wall_ms, START.monotonic_ms + monotonic_ms, boot_id)
    assert elapsed_ms(START, now) == elapsed


def test_elapsed_without_names_of_boots_is_wall_time() -> None:
    nameless = replace(START, boot_id="")
    assert elapsed_ms(nameless, step_clock(nameless, 100)) == 100


def test_elapsed_between_a_known_and_an_unknown_wall_time_is_zero() -> None:
    assert elapsed_ms(START, replace(advance_clock(START, 100), wall_ms=UNKNOWN_MS)) == 0


@pytest.mark.parametrize("passed_ms", [0, 1, 60_000, 30 * DAY_MS])
def test_advance_of_a_settled_topic_follows_time(passed_ms: int) -> None:
    now = advance_clock(START, passed_ms)
    frontier, record = step(settled_record(), topic(), now)
    assert frontier == Frontier.open(now.wall_ms, topic())
    assert record == FrontierRecord(1, due_cutoff(now), now, START_MS)


@pytest.mark.parametrize(
    ("ahead_ms", "hold"), [(ALLOWANCE_MS - 1, None), (ALLOWANCE_MS, None), (ALLOWANCE_MS + 1, Hold.FRONTIER)]
)
def test_advance_ahead_of_time_by_more_than_allowed_is_held(ahead_ms: int, hold: Hold | None) -> None:
    now = step_clock(advance_clock(START, 60_000), ahead_ms)
    frontier, record = step(settled_record(), topic(), now)
    assert frontier.hold is hold
    reached = due_cutoff(START) + 60_000 if hold else due_cutoff(now)
    assert (frontier.cutoff.ms, frontier.due.ms) == (record.cutoff_ms, due_cutoff(now)) == (reached, due_cutoff(now))


def test_advance_by_clock_steps_within_the_allowance_is_not_held() -> None:
    record, now = settled_record(), START
    for _ in range(5):
        now = step_clock(now, ALLOWANCE_MS)
        frontier, record = step(record, topic(), now)
        assert frontier.hold is None


@given(st.lists(st.integers(0, 2 * DAY_MS), max_size=8), st.sampled_from([1, 2, -2]), st.integers(1, 10**6))
def test_advance_of_a_held_topic_stays_within_time(steps: list[int], generation: int, ttl_seconds: int) -> None:
    metadata = topic(generation, ttl_seconds)
    record, now = settled_record(), START
    for passed_ms in steps:
        now = advance_clock(now, passed_ms)
        frontier, after = step(record, metadata, now, hold_seconds=10**9)
        assert frontier.cutoff <= frontier.due == Cutoff.at(now.wall_ms, ttl_seconds)
        if frontier.hold is not None:
            assert frontier.cutoff.ms <= record.cutoff_ms + passed_ms
            assert (frontier.generation, after.generation) == (record.generation, record.generation)
        record = after


def test_advance_to_a_shorter_ttl_is_held_and_follows_time() -> None:
    shorter = topic(ttl_seconds=3600)
    now = advance_clock(START, 60_000)
    frontier, record = step(settled_record(), shorter, now)
    assert frontier == Frontier(
        now.wall_ms, Cutoff(due_cutoff(now, 3600)), Cutoff(due_cutoff(START) + 60_000), 1, Hold.FRONTIER
    )
    assert record == FrontierRecord(1, due_cutoff(START) + 60_000, now, START_MS, PendingJump(1, 3600, now))

    now = advance_clock(now, 60_000)
    frontier, record = step(record, shorter, now)
    assert frontier.cutoff.ms == record.cutoff_ms == due_cutoff(START) + 120_000
    assert record.pending == PendingJump(1, 3600, advance_clock(START, 60_000))


def test_advance_to_a_longer_ttl_moves_the_cutoff_back_at_once() -> None:
    longer = topic(ttl_seconds=2 * TTL_SECONDS)
    frontier, record = step(settled_record(), longer, START)
    assert frontier == Frontier.open(START_MS, longer)
    assert record.cutoff_ms == due_cutoff(START, 2 * TTL_SECONDS)


def test_advance_to_a_longer_ttl_and_back_is_a_jump() -> None:
    _, record = step(settled_record(), topic(ttl_seconds=2 * TTL_SECONDS), START)
    frontier, _ = step(record, topic(), START)
    assert frontier.hold is Hold.FRONTIER
    assert frontier.cutoff.ms == due_cutoff(START, 2 * TTL_SECONDS)


def test_advance_after_a_held_ttl_is_undone_has_no_hold() -> None:
    _, record = step(settled_record(), topic(ttl_seconds=3600), START)
    now = advance_clock(START, 60_000)
    frontier, record = step(record, topic(), now)
    assert frontier == Frontier.open(now.wall_ms, topic())
    assert record.pending is None


@pytest.mark.parametrize(
    ("reached", "generation", "hold"),
    [
        (1, 1, None),
        (1, -1, Hold.FRONTIER),
        (1, 2, Hold.FRONTIER),
        (2, -2, Hold.FRONTIER),
        (2, -1, None),
        (-1, 2, None),
        (-1, -1, None),
        (-1, -2, Hold.FRONTIER),
        (-1, 3, Hold.FRONTIER),
        (3, 1, None),
    ],
)
def test_advance_to_a_newer_generation_is_held(reached: int, generation: int, hold: Hold | None) -> None:
    frontier, record = step(settled_record(reached), topic(generation), START)
    assert frontier.hold is hold
    assert frontier.generation == record.generation == (reached if hold else generation)


def test_advance_of_a_deleted_topic_ignores_its_ttl() -> None:
    frontier, record = step(settled_record(-1), topic(-1, 1), START)
    assert frontier.hold is None
    assert record.cutoff_ms == due_cutoff(START, 1)


def test_advance_to_deletion_of_consumed_messages_is_held() -> None:
    consumed = replace(topic(), properties={"retention": "consumed"})
    frontier, record = step(settled_record(), consumed, START)
    assert (frontier.hold, record.consumed) == (Hold.FRONTIER, False)
    frontier, record = step(record, consumed, advance_clock(START, HOLD_SECONDS * 1000))
    assert (frontier.hold, record.consumed) == (None, True)


def test_advance_with_zero_hold_seconds_releases_a_jump_at_once() -> None:
    shorter = topic(2, 60)
    for record in (settled_record(), None):
        frontier, after = step(record, shorter, START, hold_seconds=0)
        assert frontier == Frontier.open(START_MS, shorter)
        assert after == FrontierRecord(2, due_cutoff(START, 60), START, START_MS)


@pytest.mark.parametrize(("held_ms", "hold"), [(HOUR_MS - 1, Hold.FRONTIER), (HOUR_MS, None), (HOUR_MS + 1, None)])
def test_advance_after_hold_seconds_releases_a_held_jump(held_ms: int, hold: Hold | None) -> None:
    shorter = topic(2, 3600)
    _, record = step(settled_record(), shorter, START)
    now = advance_clock(START, held_ms)
    frontier, record = step(record, shorter, now)
    assert frontier.hold is hold
    if hold is None:
        assert frontier == Frontier.open(now.wall_ms, shorter)
        assert record == FrontierRecord(2, due_cutoff(now, 3600), now, START_MS)


def test_advance_after_a_wall_clock_step_keeps_a_held_jump() -> None:
    shorter = topic(ttl_seconds=3600)
    _, record = step(settled_record(), shorter, START)
    frontier, _ = step(record, shorter, step_clock(advance_clock(START, 1000), 30 * DAY_MS))
    assert frontier.hold is Hold.FRONTIER
    assert frontier.cutoff.ms == due_cutoff(START) + 1000


def test_advance_after_a_reboot_counts_the_downtime_of_a_held_jump() -> None:
    shorter = topic(ttl_seconds=3600)
    _, record = step(settled_record(), shorter, START)
    assert step(record, shorter, reboot(START, HOUR_MS - 1))[0].hold is Hold.FRONTIER
    assert step(record, shorter, reboot(START, HOUR_MS))[0].hold is None


@pytest.mark.parametrize("changed", [topic(1, 1800), topic(2, 3600)])
def test_advance_with_a_changed_jump_restarts_its_hold(changed: TopicMetadata) -> None:
    _, record = step(settled_record(), topic(1, 3600), START)
    now = advance_clock(START, HOUR_MS)
    frontier, record = step(record, changed, now)
    assert frontier.hold is Hold.FRONTIER
    assert record.pending == PendingJump(changed.generation, changed.ttl_seconds, now)


def test_advance_with_an_approved_jump_releases_it_once() -> None:
    shorter = topic(ttl_seconds=3600)
    _, record = step(settled_record(), shorter, START)
    now = advance_clock(START, 1000)
    frontier, record = step(approve(record, shorter), shorter, now)
    assert frontier == Frontier.open(now.wall_ms, shorter)
    assert (record.approved, record.pending) == (None, None)

    assert step(record, topic(ttl_seconds=60), now)[0].hold is Hold.FRONTIER
    assert step(record, shorter, step_clock(now, DAY_MS))[0].hold is Hold.FRONTIER


@pytest.mark.parametrize("other", [topic(1, 1800), topic(2, 3600), topic(-1, 3600)])
def test_approval_of_another_jump_is_discarded_and_rows_are_held(other: TopicMetadata) -> None:
    shorter = topic(1, 3600)
    _, record = step(settled_record(), shorter, START)
    frontier, record = step(approve(record, shorter), other, START)
    assert frontier.hold is Hold.FRONTIER
    assert record.approved is None
    assert step(record, shorter, START)[0].hold is Hold.FRONTIER


def test_advance_after_an_undone_jump_forgets_its_approval() -> None:
    shorter = topic(1, 3600)
    _, record = step(settled_record(), shorter, START)
    _, record = step(approve(record, shorter), topic(), START)
    assert step(record, shorter, START)[0].hold is Hold.FRONTIER


def test_advance_after_a_reboot_with_a_correct_clock_is_not_held() -> None:
    now = reboot(START, 2 * DAY_MS)
    frontier, record = step(settled_record(), topic(), now)
    assert frontier == Frontier.open(now.wall_ms, topic())
    assert record.at == now


def test_advance_after_a_clock_went_back_and_forth_is_a_jump() -> None:
    back = step_clock(START, -DAY_MS)
    frontier, record = step(settled_record(), topic(), back)
    assert frontier == Frontier.open(back.wall_ms, topic())
    frontier, _ = step(record, topic(), advance_clock(START, 1000))
    assert frontier.hold is Hold.FRONTIER
    assert frontier.cutoff.ms == due_cutoff(back) + 1000


def test_advance_of_a_hold_with_a_clock_set_back_lowers_the_cutoff() -> None:
    frontier, record = step(settled_record(), topic(2), step_clock(START, -DAY_MS))
    assert frontier.hold is Hold.FRONTIER
    assert frontier.cutoff.ms == record.cutoff_ms == due_cutoff(START) - DAY_MS


@pytest.mark.parametrize("generation", [1, 3, -3])
def test_advance_of_a_new_topic_holds_until_its_time_has_passed(generation: int) -> None:
    new = topic(generation)
    frontier, record = step(None, new, START)
    assert frontier == Frontier(START_MS, Cutoff(due_cutoff(START)), Cutoff(0), 0, Hold.FRONTIER)
    assert record == FrontierRecord(0, 0, START, START_MS, PendingJump(generation, TTL_SECONDS, START))

    frontier, record = step(record, new, advance_clock(START, HOUR_MS - 1))
    assert (frontier.hold, frontier.generation) == (Hold.FRONTIER, 0)
    frontier, record = step(record, new, advance_clock(START, HOUR_MS))
    assert frontier == Frontier.open(START_MS + HOUR_MS, new)
    assert record.first_seen_ms == START_MS


def test_admit_of_a_new_topic_has_an_open_frontier() -> None:
    record = admit(topic(3), START)
    assert record == FrontierRecord(3, due_cutoff(START), START, START_MS)
    assert step(record, topic(3), START)[0] == Frontier.open(START_MS, topic(3))
    assert step(record, topic(4), START)[0].hold is Hold.FRONTIER


def test_admit_with_a_ttl_longer_than_the_clock_has_cutoff_zero() -> None:
    assert admit(topic(), ClockAnchor(0, 0, "boot")).cutoff_ms == 0


def test_freeze_turns_the_frozen_time_into_a_held_jump() -> None:
    now = advance_clock(START, DAY_MS)
    record = freeze(settled_record(), now)
    assert record == replace(settled_record(), at=now)
    frontier, _ = step(record, topic(), advance_clock(now, 60_000))
    assert frontier.hold is Hold.FRONTIER
    assert frontier.cutoff.ms == due_cutoff(START) + 60_000


def test_freeze_for_days_restarts_the_hold() -> None:
    _, record = step(settled_record(), topic(2), START)
    record = approve(record, topic(2))
    assert (record.pending, record.approved) != (None, None)
    away = advance_clock(START, 2 * DAY_MS)
    record = freeze(record, away)
    assert (record.pending, record.approved) == (None, None)
    frontier, record = step(record, topic(2), advance_clock(away, 1000))
    assert frontier.hold is Hold.FRONTIER
    assert record.pending == PendingJump(2, TTL_SECONDS, advance_clock(away, 1000))


def test_advance_at_an_earlier_time_judges_by_that_time() -> None:
    now = advance_clock(START, HOUR_MS)
    _, held = step(settled_record(), topic(2), START)
    terms = {"hold_seconds": HOLD_SECONDS, "allowance_ms": ALLOWANCE_MS}
    frontier, _ = advance(held, topic(2), now, now_ms=START_MS - DAY_MS, **terms)
    assert frontier == Frontier.open(START_MS - DAY_MS, topic(2))


def test_freeze_of_a_new_topic_holds_it_afterwards() -> None:
    record = freeze(None, START)
    assert record == FrontierRecord(0, 0, START, START_MS)
    assert step(record, topic(3), advance_clock(START, 1000))[0].hold is Hold.FRONTIER
