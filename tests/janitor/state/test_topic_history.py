"""The history of topics: changes of metadata, and sizes, both bounded."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from janitor.state.base import State
from janitor.state.records import TopicCount
from janitor.state.topic_history import (
    CHANGES,
    MAX_CHANGES,
    MAX_SIZES,
    SIZED_TOPICS,
    SIZES,
    SIZES_MS,
    SKETCHED_SIZES,
    Change,
    Size,
    save_sizes,
    save_topics,
    sketches,
    thin_out,
)
from tests.builders import DAY, HOUR, NOW_MS
from tms_core.topic import TopicId, TopicMetadata


def metadata(ttl_seconds: int, generation: int = 1, name: str = "orders") -> TopicMetadata:
    return TopicMetadata(TopicId("default", name), generation, ttl_seconds)


def test_save_topics_with_another_ttl_keeps_the_change(state: State) -> None:
    save_topics(state, [metadata(60), metadata(9, name="other")], 1)
    save_topics(state, [metadata(60), metadata(9, name="other")], 2)
    assert CHANGES.read(state) == {}
    save_topics(state, [metadata(30), metadata(9, name="other")], 3)
    save_topics(state, [metadata(30, -1), metadata(9, name="other")], 4)
    assert CHANGES.read(state) == {"default:orders": [Change(3, 60, 30, 1, 1), Change(4, 30, 30, 1, -1)]}


def test_save_topics_keeps_the_last_changes(state: State) -> None:
    for number in range(MAX_CHANGES + 5):
        save_topics(state, [metadata(number + 1)], number)
    found = CHANGES.read(state)["default:orders"]
    assert len(found) == MAX_CHANGES
    assert found[-1] == Change(MAX_CHANGES + 4, MAX_CHANGES + 4, MAX_CHANGES + 5, 1, 1)


def test_save_topics_without_a_topic_deletes_its_changes(state: State) -> None:
    save_topics(state, [metadata(60), metadata(9, name="other")], 1)
    save_topics(state, [metadata(30), metadata(9, name="other")], 2)
    save_topics(state, [metadata(9, name="other")], 3)
    save_topics(state, [metadata(8, name="other")], 4)
    assert set(CHANGES.read(state)) == {"default:other"}


@given(st.lists(st.integers(1, 3 * HOUR), max_size=300))
def test_thin_out_keeps_few_sizes_in_order_with_the_newest(gaps: list[int]) -> None:
    found: list[Size] = []
    at_ms = NOW_MS
    for gap in gaps:
        at_ms += gap
        found = thin_out(found, Size(at_ms, 1, 1))
        assert found[-1].counted_ms == at_ms
    assert len(found) == min(len(gaps), MAX_SIZES)
    assert found == sorted(found)
    assert all(size.counted_ms >= at_ms - SIZES_MS for size in found)


def test_thinned_of_equal_times_spans_all_without_large_gaps() -> None:
    found: list[Size] = []
    for minute in range(2000):
        found = thin_out(found, Size(NOW_MS + 60_000 * minute, 1, 1))
    times = [size.counted_ms for size in found]
    assert times[0] == NOW_MS
    assert max(after - before for before, after in pairwise(times)) <= 4 * 2000 * 60_000 / MAX_SIZES


def test_thin_out_with_the_clock_set_back_drops_later_sizes() -> None:
    assert thin_out([Size(5 * DAY, 1, 1), Size(9 * DAY, 1, 1)], Size(6 * DAY, 2, 2)) == [
        Size(5 * DAY, 1, 1),
        Size(6 * DAY, 2, 2),
    ]


def test_save_sizes_of_many_topics_keeps_the_largest(state: State) -> None:
    many = {TopicId("a", f"t{n}"): TopicCount(1, n, None, None, NOW_MS) for n in range(SIZED_TOPICS + 3)}
    save_sizes(state, many)
    assert "a:t2" not in SIZES.read(state)
    assert SIZES.read(state)["a:t3"] == [Size(NOW_MS, 1, 3)]


def test_sketches_have_few_sizes_from_first_to_last(state: State) -> None:
    orders, once = TopicId("a", "orders"), TopicId("a", "once")
    assert sketches(state) == {}
    for number in range(MAX_SIZES):
        counts = {orders: TopicCount(1, number, None, None, NOW_MS + number * 60_000)}
        save_sizes(state, counts | ({once: TopicCount(1, 7, None, None, NOW_MS)}))
    found = sketches(state)
    assert found["a:once"] == [(NOW_MS, 7)]
    times = [at_ms for at_ms, _ in found["a:orders"]]
    assert (times[0], times[-1]) == (NOW_MS, NOW_MS + (MAX_SIZES - 1) * 60_000)
    assert SKETCHED_SIZES // 2 <= len(times) <= SKETCHED_SIZES
    assert times == sorted(set(times))
    assert all(size_bytes == (at_ms - NOW_MS) // 60_000 for at_ms, size_bytes in found["a:orders"])
