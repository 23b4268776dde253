"""Payloads that messages refer to: the searched window, and the definition of a reference."""

from __future__ import annotations

import pytest

from janitor.rules.ranges import Lifetime, find_referenced, search_range, timeless_range
from tms_core.rowkey import LONG_MAX, MessageKey, PayloadKey, generation_prefix, time_prefix
from tms_core.tables.base import KeyRange, MessageValue
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

TOPIC = TopicId("default", "t1")
LIFETIME = Lifetime(max_ms=90_000, grace_ms=10_000, allowance_ms=300)
STARTED_MS = 1_000_000
POINTER = STARTED_MS * 1_000_000 + 7
SINCE_MS = 1_020_000
#: The end of the transaction's window, after which it cannot publish.
END_MS = STARTED_MS + 100_000

WHOLE = KeyRange(time_prefix(TOPIC.prefix, 2, SINCE_MS), generation_prefix(TOPIC.prefix, 3))


def stored(write_ms: int, pointer: int = POINTER) -> PayloadKey:
    return PayloadKey(TOPIC, 2, pointer, write_ms, 0)


def window(*payloads: PayloadKey, since_ms: int = SINCE_MS) -> KeyRange:
    return search_range(TOPIC, 2, since_ms, payloads, LIFETIME)


def test_window_of_a_transaction_allows_for_clock_and_grace() -> None:
    assert LIFETIME.window_start_ms(POINTER) == STARTED_MS - 300
    assert LIFETIME.window_end_ms(POINTER) == END_MS


@pytest.mark.parametrize("write_ms", [STARTED_MS - 300, STARTED_MS, END_MS - 1])
def test_window_of_a_payload_in_its_time_ends_with_the_transaction(write_ms: int) -> None:
    assert window(stored(write_ms)) == KeyRange(WHOLE.start, time_prefix(TOPIC.prefix, 2, END_MS))


@pytest.mark.parametrize("write_ms", [0, STARTED_MS - 301, END_MS, LONG_MAX])
def test_window_of_a_payload_at_another_time_is_everything(write_ms: int) -> None:
    assert window(stored(write_ms)) == WHOLE


@pytest.mark.parametrize("pointer", [-(2**63), -1, 1, LONG_MAX])
def test_window_of_a_pointer_chosen_by_a_client_is_the_whole_topic(pointer: int) -> None:
    assert window(stored(STARTED_MS, pointer)) == WHOLE


def test_window_of_several_payloads_has_the_latest_end() -> None:
    later = stored(STARTED_MS + 5, POINTER + 5_000_000)
    assert window(stored(STARTED_MS), later, stored(STARTED_MS)).stop == time_prefix(TOPIC.prefix, 2, END_MS + 5)
    assert window(stored(STARTED_MS), stored(0), stored(STARTED_MS)) == WHOLE


@pytest.mark.parametrize("since_ms", [END_MS, END_MS + 1])
def test_window_with_a_cutoff_after_its_end_is_empty(since_ms: int) -> None:
    found = window(stored(STARTED_MS), since_ms=since_ms)
    assert found.start == found.stop == time_prefix(TOPIC.prefix, 2, since_ms)


@pytest.mark.parametrize(("grace_ms", "allowance_ms", "late_ms"), [(10_000, 9_999, 10_000), (300, 10_000, 10_000)])
def test_window_ends_by_grace_or_allowance(grace_ms: int, allowance_ms: int, late_ms: int) -> None:
    assert Lifetime(90_000, grace_ms, allowance_ms).window_end_ms(POINTER) == STARTED_MS + 90_000 + late_ms


def test_window_without_payloads_is_empty() -> None:
    found = window(since_ms=0)
    assert found.start == found.stop


def search(
    rows: dict[tuple[int, int, int], MessageValue], wanted: set[int], *windows: KeyRange, page_rows: int = 100
) -> tuple[set[int], int, int]:
    """Search for references; return the found pointers, the number of reads, and the pages after which it yielded.

    Args:
        rows: by generation, publish time and sequence.
        windows: the key ranges to search; by default WHOLE.
    """
    store = MemoryStore()
    store.message.put([(MessageKey(TOPIC, *parts).pack(), value) for parts, value in rows.items()])
    pages = len(list(find_referenced(store.message, windows or (WHOLE,), wanted, page_rows)))
    store.calls.clear()
    found = set().union(*find_referenced(store.message, windows or (WHOLE,), wanted, page_rows))
    return found, store.calls["cells"], pages


def reference(pointer: int) -> MessageValue:
    return MessageValue(pointer, None)


def test_search_finds_the_requested_references() -> None:
    rows = {(2, SINCE_MS, 0): reference(5), (2, SINCE_MS, 1): reference(6), (2, SINCE_MS, 2): reference(7)}
    assert search(rows, {5, 7, 8})[0] == {5, 7}


def test_reference_that_a_plan_deletes_does_not_count() -> None:
    store = MemoryStore()
    going, staying = (MessageKey(TOPIC, 2, SINCE_MS, sequence).pack() for sequence in (0, 1))
    store.message.put([(going, reference(5)), (staying, reference(6))])
    assert list(find_referenced(store.message, (WHOLE,), {5, 6}, 10, lambda key: key == going)) == [{6}]


def test_reference_that_was_rolled_back_counts() -> None:
    assert search({(2, SINCE_MS, 0): reference(-5)}, {5})[0] == {5}


def test_reference_by_the_lowest_pointer_is_found() -> None:
    lowest = -(2**63)
    assert search({(2, SINCE_MS, 0): reference(lowest)}, {lowest})[0] == {lowest}


@pytest.mark.parametrize("value", [MessageValue(5, b"x"), MessageValue(5, b""), MessageValue(None, b"x")])
def test_search_ignores_messages_with_an_inline_payload(value: MessageValue) -> None:
    assert search({(2, SINCE_MS, 0): value}, {5})[0] == set()


@pytest.mark.parametrize(
    ("generation", "publish_ms", "found"),
    [
        (2, SINCE_MS - 1, set()),
        (2, SINCE_MS, {5}),
        (2, SINCE_MS + 1, {5}),
        (2, LONG_MAX, {5}),
        (1, SINCE_MS, set()),
        (3, SINCE_MS, set()),
    ],
)
def test_reference_outside_a_window_is_left_out(generation: int, publish_ms: int, found: set[int]) -> None:
    assert search({(generation, publish_ms, 0): reference(5)}, {5})[0] == found


@pytest.mark.parametrize(("publish_ms", "found"), [(END_MS - 1, {POINTER}), (END_MS, set())])
def test_reference_at_the_end_of_a_window_is_outside(publish_ms: int, found: set[int]) -> None:
    rows = {(2, publish_ms, 65535): reference(POINTER)}
    assert search(rows, {POINTER}, window(stored(STARTED_MS)))[0] == found


@pytest.mark.parametrize(
    ("generation", "publish_ms", "found"),
    [(2, -1, {5}), (2, -(2**63), {5}), (2, 0, set()), (2, LONG_MAX, set()), (1, -1, set()), (3, -1, set())],
)
def test_reference_of_a_negative_time_has_a_window(generation: int, publish_ms: int, found: set[int]) -> None:
    rows = {(generation, publish_ms, 0): reference(5)}
    assert search(rows, {5}, timeless_range(TOPIC, 2))[0] == found


def test_search_of_several_windows_stops_when_all_is_found() -> None:
    rows = {(2, SINCE_MS, 0): reference(5), (2, -1, 0): reference(6), (2, 0, 0): reference(7)}
    windows = (window(stored(STARTED_MS)), timeless_range(TOPIC, 2))
    assert search(rows, {5, 6, 7}, *windows) == ({5, 6}, 2, 2)
    assert search(rows, {5}, *windows) == ({5}, 1, 1)


def test_search_of_many_messages_yields_after_each_page() -> None:
    rows = {(2, SINCE_MS, sequence): MessageValue(None, b"x") for sequence in range(5)}
    assert search(rows, {5}, page_rows=2) == (set(), 3, 3)


def test_search_after_the_last_match_reads_no_more_pages() -> None:
    rows = {(2, SINCE_MS, sequence): reference(5) for sequence in range(5)}
    assert search(rows, {5}, page_rows=2) == ({5}, 1, 1)


def test_search_for_nothing_reads_nothing() -> None:
    assert search({(2, SINCE_MS, 0): reference(5)}, set()) == (set(), 0, 0)
    assert search({(2, SINCE_MS, 0): reference(5)}, {5}, KeyRange(WHOLE.start, WHOLE.start)) == (set(), 0, 0)
