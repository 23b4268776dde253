"""Positions, the clock that ignores jumps, and the next free id."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import DAY, HOUR, NOW_MS
from tests.support import act_after
from tms_core.clock import OFF_MS, HonestClock, ManualClock
from tms_core.errors import BadRequest, ClockJumped
from tms_core.messaging.ids import POSITIONS, Ids, expires_ms, find_next_free, id_parts, milliseconds, position, tail
from tms_core.rowkey import LONG_MAX, MessageKey, generation_prefix
from tms_core.tables.base import Page
from tms_core.topic import TopicId

TOPIC = TopicId("default", "orders")
PREFIX = generation_prefix(TOPIC.prefix, 1)


@given(st.integers(0, LONG_MAX), st.integers(0, 65_535))
def test_position_of_an_id_is_the_tail_of_its_key(ms: int, sequence: int) -> None:
    at = position(ms, sequence)
    assert PREFIX + tail(at) == MessageKey(TOPIC, 1, ms, sequence).pack()
    assert id_parts(at) == (ms, sequence)
    assert milliseconds(at) == ms


def test_expires_of_a_row_at_exactly_its_ttl_is_later() -> None:
    assert expires_ms(position(1000, 7), 50) == 1051


def test_take_of_ids_ends_readers_before_them_until_release() -> None:
    ids = Ids(5)
    assert ids.end == 5
    first = ids.first(1)
    assert first == position(1)
    ids.reserve(first, first + 3)
    assert (ids.end, ids.next_free) == (first, first + 3)
    ids.release()
    assert ids.end == first + 3
    assert ids.first(1) == first + 3
    assert ids.first(0) == first + 3
    ids.skip(first)
    assert ids.next_free == first + 3


def test_take_of_ids_without_any_left_is_rejected() -> None:
    ids = Ids(POSITIONS - 1)
    ids.reserve(POSITIONS - 1, POSITIONS)
    ids.release()
    with pytest.raises(BadRequest):
        ids.reserve(POSITIONS, POSITIONS + 1)
    with pytest.raises(BadRequest):
        ids.skip(POSITIONS + 1)
    assert ids.end == POSITIONS


# --- the clock -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS, monotonic_ms=DAY)


@pytest.fixture
def honest(clock: ManualClock) -> HonestClock:
    return HonestClock(clock, 1000)


def test_honest_clock_rejects_only_a_jump_forward(clock: ManualClock, honest: HonestClock) -> None:
    clock.step(1000)
    assert honest.publish_ms() == honest.now_ms() == NOW_MS + 1000
    clock.step(1)
    with pytest.raises(ClockJumped):
        honest.publish_ms()
    assert honest.now_ms() == NOW_MS + 1000
    clock.advance(500)
    assert honest.now_ms() == NOW_MS + 1500
    clock.step(-1)
    assert honest.publish_ms() == honest.now_ms() == NOW_MS + 1500


def test_honest_clock_that_steps_back_publishes_no_earlier_than_readers_see(
    clock: ManualClock, honest: HonestClock
) -> None:
    clock.advance(5)
    assert honest.now_ms() == NOW_MS + 5
    clock.step(-HOUR)
    assert honest.publish_ms() == honest.now_ms() == NOW_MS + 5
    clock.advance(HOUR)
    assert honest.publish_ms() == honest.now_ms() == NOW_MS + 5
    clock.advance(1)
    assert honest.publish_ms() == honest.now_ms() == NOW_MS + 6


def test_honest_clock_after_a_step_back_rejects_a_jump_forward() -> None:
    clock = ManualClock(NOW_MS + DAY, monotonic_ms=DAY)
    honest = HonestClock(clock, 1000)
    clock.step(-DAY)
    honest.now_ms()
    clock.step(20 * HOUR)
    with pytest.raises(ClockJumped, match="72000 s"):
        honest.publish_ms()


@pytest.mark.parametrize("off_ms", [-HOUR, -DAY, -365 * DAY])
@pytest.mark.parametrize("looks", [True, False])
def test_honest_clock_that_is_right_again_publishes(
    clock: ManualClock, honest: HonestClock, off_ms: int, looks: bool
) -> None:
    for error_ms in (0, 900, -900):
        clock.advance(HOUR)
        clock.step(off_ms)
        for _ in range(3):
            if looks:
                honest.publish_ms()
            clock.advance(HOUR)
        clock.step(error_ms - off_ms)
        assert honest.publish_ms() == honest.now_ms() >= clock.now_ms() - 900
        clock.advance(10 * HOUR)
        assert honest.publish_ms() == clock.now_ms()


def test_honest_clock_that_is_right_again_rejects_a_jump(clock: ManualClock, honest: HonestClock) -> None:
    for step_ms in (-DAY, DAY):
        clock.step(step_ms)
        honest.publish_ms()
    clock.step(1001)
    with pytest.raises(ClockJumped):
        honest.publish_ms()


@pytest.mark.parametrize("looks_a_day", [1, 24, 864])
def test_honest_clock_does_not_add_up_daily_corrections(
    clock: ManualClock, honest: HonestClock, looks_a_day: int
) -> None:
    for _ in range(30):
        for _ in range(looks_a_day):
            clock.advance(DAY // looks_a_day)
            assert honest.publish_ms() == clock.now_ms()
        clock.step(900)
        assert honest.publish_ms() == clock.now_ms()


@pytest.mark.parametrize("behind_ms", [HOUR, 30 * DAY, NOW_MS])
@pytest.mark.parametrize(
    ("off_ms", "right"), [(-1001, False), (-1000, True), (HOUR, True), (OFF_MS, True), (OFF_MS + 1, False)]
)
def test_honest_clock_that_started_late_accepts_the_way_to_now(behind_ms: int, off_ms: int, right: bool) -> None:
    clock = ManualClock(NOW_MS - behind_ms, monotonic_ms=DAY)
    honest = HonestClock(clock, 1000)
    honest.note_past(NOW_MS)
    honest.publish_ms()
    # Halfway, the clock is still wrong.
    clock.step(behind_ms // 2)
    with pytest.raises(ClockJumped):
        honest.publish_ms()
    clock.step(NOW_MS + off_ms - clock.now_ms())
    if right:
        assert honest.publish_ms() == honest.now_ms() == honest.right_ms() == clock.now_ms()
        clock.step(1001)
    with pytest.raises(ClockJumped):
        honest.publish_ms()


@pytest.mark.parametrize("past_ms", [NOW_MS - 1, NOW_MS, NOW_MS + 1000])
def test_honest_clock_that_started_right_rejects_a_jump_at_any_time(
    clock: ManualClock, honest: HonestClock, past_ms: int
) -> None:
    honest.note_past(past_ms)
    clock.step(HOUR)
    with pytest.raises(ClockJumped):
        honest.publish_ms()


def test_honest_clock_takes_many_fast_steps_for_a_jump(clock: ManualClock, honest: HonestClock) -> None:
    for _ in range(2):
        clock.step(500)
        honest.publish_ms()
        clock.advance(1_999)
        honest.publish_ms()
    clock.step(4)
    with pytest.raises(ClockJumped):
        honest.publish_ms()
    clock.step(-1)
    # The clock forgives the two steps, a millisecond for each second.
    assert honest.publish_ms() == clock.now_ms()


def test_honest_clock_after_a_jump_rejects_until_it_is_right(clock: ManualClock, honest: HonestClock) -> None:
    clock.step(HOUR)
    for _ in range(100):
        clock.advance(DAY)
        with pytest.raises(ClockJumped, match="3600 s"):
            honest.publish_ms()
        assert honest.now_ms() == clock.now_ms() - HOUR + 1000
    clock.step(-HOUR)
    assert honest.publish_ms() == honest.now_ms() >= clock.now_ms()


def test_honest_clock_of_a_stopped_process_is_right_at_the_next_look(clock: ManualClock, honest: HonestClock) -> None:
    with pytest.MonkeyPatch.context() as patch:
        act_after(patch, clock, "monotonic_ms", lambda: clock.advance(HOUR))
        with pytest.raises(ClockJumped):
            honest.publish_ms()
    assert honest.publish_ms() == clock.now_ms()


# --- the last row ----------------------------------------------------------------------------------------------------


class Keys:
    """A table of keys that counts how often it is read."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = sorted(keys)
        self.reads = 0

    def read(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        self.reads += 1
        last = len(self._keys) if stop is None else bisect_left(self._keys, stop)
        first = bisect_left(self._keys, start)
        found = self._keys[first : min(last, first + limit)]
        return Page(found, found[-1] + b"\0" if first + limit < last else None)


POSITIONS_USED = st.one_of(
    st.integers(0, POSITIONS - 1),
    st.integers(position(NOW_MS - 5000), position(NOW_MS + 5000)),
    st.sampled_from([0, 1, POSITIONS - 1, position(NOW_MS), position(NOW_MS) - 1, position(NOW_MS, 65_535)]),
)


@given(st.lists(POSITIONS_USED, max_size=6), st.integers(0, 700), st.sampled_from([0, 1, NOW_MS, LONG_MAX]))
def test_first_free_finds_the_last_of_any_rows(used: list[int], more: int, now_ms: int) -> None:
    run = range(used[0], min(used[0] + more, POSITIONS)) if used else range(0)
    expected = max([*used, *run], default=-1) + 1
    others = [
        generation_prefix(TOPIC.prefix, 2) + tail(position(LONG_MAX)),
        generation_prefix(TOPIC.prefix, 0) + tail(position(LONG_MAX)),
        MessageKey(TOPIC, 1, -1, 0).pack(),
    ]
    keys = Keys([PREFIX + tail(at) for at in {*used, *run}] + others)
    assert find_next_free(keys.read, PREFIX, now_ms) == expected
    assert keys.reads < 300


def test_first_free_of_a_long_topic_takes_few_reads() -> None:
    now_at = position(NOW_MS)
    every_second = [PREFIX + tail(now_at - position(1000) * back) for back in range(1, 20_000)]
    for newest in (0, 100, 10_000):
        keys = Keys(every_second[newest:])
        assert find_next_free(keys.read, PREFIX, NOW_MS) == now_at - position(1000) * (newest + 1) + 1
        assert keys.reads < 40


@pytest.mark.parametrize("foreign", [tail(position(NOW_MS, 3)) + b"longer", tail(position(NOW_MS, 3))[:9]])
def test_first_free_starts_after_a_foreign_key(foreign: bytes) -> None:
    keys = Keys([PREFIX + foreign])
    assert PREFIX + tail(find_next_free(keys.read, PREFIX, NOW_MS)) > PREFIX + foreign


def test_first_free_after_pages_without_keys_reads_the_next_pages() -> None:
    full = Keys([PREFIX + tail(position(NOW_MS, 3))])

    def read(start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        page = full.read(start, stop, limit)
        return Page([], start + b"\0") if len(start) == len(PREFIX) + 10 else page

    assert find_next_free(read, PREFIX, NOW_MS) == position(NOW_MS, 4)
