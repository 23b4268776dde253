"""The background count: what it finds, what it costs, and who has to wait for whom."""

from __future__ import annotations

from typing import Any

import pytest

from janitor.state.base import State, TopicCount
from janitor.state.topic_history import sizes
from janitor.stats.scheduler import SAVE_EVERY_MS
from janitor.stats.topic_sizes import PAGE_BYTES, Census
from tests.builders import DAY, NOW_MS, SECOND, Call, topic, unknown_topic, watch, watch_state
from tests.janitor.state.entries import entry
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.rowkey import generation_prefix
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId

#: A key of ``default:a``: its prefix, generation, publish time and sequence.
MESSAGE_KEY = len("default:a:") + 4 + 8 + 2
PAYLOAD_KEY = MESSAGE_KEY + 8

ORDERS = TopicId.parse("default:orders")


def census(store: Store, state: State, clock: ManualClock, *, rate: int = 1_000_000, **options: Any) -> Census:
    return Census(read_only(store), state, clock, rows_per_second=rate, **options)


def counted(state: State) -> dict[str, int]:
    return {found.topic: count.messages for found, count in state.counts().items()}


def pages(store: Store) -> list[str]:
    """Topics whose pages are read from now on, by their first letter, in order."""
    read: list[str] = []

    def note(call: Call) -> None:
        if call.name == "message.rows":
            read.append(call.arguments[0].split(b":")[1].decode())

    watch(store, before=note)
    return read


# --- what is counted -------------------------------------------------------------------------------------------------


def test_given_messages_of_all_kinds_when_counted_then_figures_are_exact(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    a = topic(store, "default:a", ttl_seconds=60)
    a.plain(NOW_MS - DAY, NOW_MS, body=b"12345")
    a.tx(7, NOW_MS + 1, body=b"123")
    a.tx(-7, NOW_MS + 2, body=b"")
    a.ref(9, NOW_MS + 3)
    a.stored(9, NOW_MS, NOW_MS, body=b"1234567890")
    census(store, state, clock).step()
    size = 5 * MESSAGE_KEY + 2 * 5 + (8 + 3) + 8 + 8 + 2 * (PAYLOAD_KEY + 10)
    assert state.counts() == {a.id: TopicCount(5, size, NOW_MS - DAY, NOW_MS + 3, NOW_MS)}


def test_given_an_empty_topic_when_counted_then_it_has_no_times(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    a = topic(store, "default:a", ttl_seconds=60)
    census(store, state, clock).step()
    assert state.counts() == {a.id: TopicCount(0, 0, None, None, NOW_MS)}


@pytest.mark.parametrize("generation", [2, 2**31 - 1])
def test_given_rows_of_other_generations_and_topics_when_counted_then_they_are_not(
    store: MemoryStore, state: State, clock: ManualClock, generation: int
) -> None:
    a = topic(store, "default:a", ttl_seconds=60, generation=generation)
    a.plain(NOW_MS)
    a.stored(1, NOW_MS, body=b"")
    a.at(generation - 1).plain(NOW_MS)
    a.at(generation - 1).stored(1, NOW_MS)
    if generation < 2**31 - 1:
        a.at(generation + 1).plain(NOW_MS)
        a.at(generation + 1).stored(1, NOW_MS)
    unknown_topic(store, "default:a-b", generation).plain(NOW_MS)
    unknown_topic(store, "default:aa", generation).plain(NOW_MS)
    census(store, state, clock).step()
    found = state.counts()[a.id]
    assert (found.messages, found.size_bytes) == (1, MESSAGE_KEY + 4 + PAYLOAD_KEY)


def test_given_foreign_rows_when_counted_then_they_are_left_out(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    a = topic(store, "default:a", ttl_seconds=60).plain(NOW_MS, body=b"").stored(1, NOW_MS, body=b"")
    before = generation_prefix(a.id.prefix, 1)
    for tail in (b"", b"\x00", b"\x00" * 9, b"\x00" * 11, b"\x7f" * 12, b"\xff" * 10):
        store.message.put([(before + tail, MessageValue(None, b"x"))])
    for tail in (b"", b"\x00" * 10, b"\x00" * 19, b"\x00" * 8 + b"\xff" * 10):
        store.payload.put([(before + tail, b"x")])
    census(store, state, clock).step()
    assert state.counts()[a.id] == TopicCount(1, MESSAGE_KEY + PAYLOAD_KEY, NOW_MS, NOW_MS, NOW_MS)


@pytest.mark.parametrize("rows", [99, 100, 101, 1099, 1100, 1101, 2500])
def test_given_a_topic_of_some_pages_when_counted_then_no_row_is_missed_or_counted_twice(
    store: MemoryStore, state: State, clock: ManualClock, rows: int
) -> None:
    a = topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + rows), body=b"")
    a.stored(1, *range(NOW_MS, NOW_MS + rows), body=b"")
    census(store, state, clock).step()
    size = rows * (MESSAGE_KEY + PAYLOAD_KEY)
    assert state.counts()[a.id] == TopicCount(rows, size, NOW_MS, NOW_MS + rows - 1, NOW_MS + clock.now_ms() - NOW_MS)


def test_given_large_payloads_when_counted_then_a_page_holds_few(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    body = b"x" * (PAGE_BYTES // 10)
    topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 130), body=body)
    limits: list[int] = []
    watch(store, before=lambda call: limits.append(call.arguments[2]) if call.name == "message.rows" else None)
    census(store, state, clock).step()
    assert limits[0] == 100
    assert set(limits[1:]) == {9}
    assert counted(state) == {"a": 130}


# --- topics come and go ----------------------------------------------------------------------------------------------


def test_given_topics_gone_deleted_or_unreadable_when_counted_then_only_the_last_keeps_its_count(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    gone, deleted, unreadable = (TopicId.parse(f"default:{name}") for name in ("gone", "deleted", "unreadable"))
    topic(store, "default:deleted", ttl_seconds=60, generation=-1)
    unknown_topic(store, "default:unreadable").write_metadata(b"{")
    old = TopicCount(3, 99, 1, 2, 3)
    state.save_counts(dict.fromkeys((gone, deleted, unreadable), old))
    census(store, state, clock).step()
    assert state.counts() == {unreadable: old}


def test_given_a_topic_created_anew_while_it_is_counted_when_that_goes_on_then_the_new_one_is_counted(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    a = topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 500))
    count = census(store, state, clock, rate=100, halted=lambda: clock.running_ms() == DAY + SECOND)
    count.step()
    assert counted(state) == {}
    clock.advance(1)
    a.at(2).describe(ttl_seconds=60, generation=2).plain(NOW_MS, NOW_MS + 1)
    count.step()
    assert counted(state) == {"a": 2}


def test_given_a_topic_that_cannot_be_read_when_counted_then_it_is_said_once_and_the_others_are_counted(
    store: MemoryStore, state: State, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    old = TopicCount(3, 99, 1, 2, 3)
    for name in ("a", "b", "c"):
        topic(store, f"default:{name}", ttl_seconds=60).plain(NOW_MS)
    state.save_counts({TopicId.parse("default:b"): old})
    broken = [True]

    def fail(call: Call) -> None:
        if broken[0] and call.name == "message.rows" and call.arguments[0].startswith(b"default:b:"):
            raise StoreError("a block is corrupt.")

    watch(store, before=fail)
    count = census(store, state, clock)
    for _ in range(3):
        count.step()
        clock.advance(60 * SECOND)
    assert state.counts()[TopicId.parse("default:b")] == old
    assert counted(state) == {"a": 1, "b": 3, "c": 1}
    assert caplog.messages == [
        "topic default:b could not be counted, its figures stay as they were: a block is corrupt."
    ]
    broken[0] = False
    count.step()
    assert counted(state)["b"] == 1


def test_given_metadata_that_cannot_be_read_when_counted_then_that_is_an_error(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    def fail(call: Call) -> None:
        if call.name == "metadata.rows":
            raise StoreError("the disk is gone.")

    watch(store, before=fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        census(store, state, clock).step()


# --- order, budget ---------------------------------------------------------------------------------------------------


def test_given_topics_counted_before_when_counted_then_new_ones_come_first_and_then_the_oldest_counts(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    for name in "abcd":
        topic(store, f"default:{name}", ttl_seconds=60)
    for name, counted_ms in (("a", 30), ("b", 10), ("d", 20)):
        state.save_counts({TopicId.parse(f"default:{name}"): TopicCount(0, 0, None, None, counted_ms)})
    read = pages(store)
    census(store, state, clock).step()
    assert read == ["c", "b", "d", "a"]


def test_given_a_count_that_is_fresh_when_asked_again_then_nothing_is_read(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:a", ttl_seconds=60)
    count = census(store, state, clock, refresh_seconds=60)
    count.step()
    read = pages(store)
    clock.advance(60 * SECOND - 1)
    clock.step(DAY)
    count.step()
    assert read == []
    clock.advance(1)
    count.step()
    assert read == ["a"]


def test_given_counts_when_they_are_made_again_then_the_sizes_over_time_have_each_and_nothing_is_written_between(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    a = topic(store, "default:a", ttl_seconds=60).plain(NOW_MS)
    count = census(store, state, clock, refresh_seconds=60)
    count.step()
    clock.advance(30 * SECOND)
    a.plain(NOW_MS + 1)
    count.step()
    assert [size.messages for size in sizes(state, "default:a")] == [1]
    clock.advance(30 * SECOND)
    count.step()
    assert [(size.counted_ms, size.messages) for size in sizes(state, "default:a")] == [
        (NOW_MS, 1),
        (NOW_MS + 60 * SECOND, 2),
    ]


def test_given_a_count_that_takes_long_then_the_sizes_over_time_do_not_wait_for_its_end(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(NOW_MS)
    topic(store, "default:b", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 80))
    topic(store, "default:c", ttl_seconds=60).plain(NOW_MS)
    seen: list[bool] = []

    def halted() -> bool:
        seen.append(bool(sizes(state, "default:a")))
        return False

    census(store, state, clock, rate=1, halted=halted).step()
    assert seen.index(True) < len(seen) - 1, "before the last page was read"


def test_given_a_topic_that_was_swept_since_it_was_counted_then_it_is_counted_first_and_at_once(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    for name in "abc":
        topic(store, f"default:{name}", ttl_seconds=60)
    count = census(store, state, clock, refresh_seconds=60)
    count.step()
    read = pages(store)
    clock.advance(10 * SECOND)
    state.add_ledger([entry(topic=TopicId.parse("default:b"), at_ms=clock.now_ms())])
    clock.advance(10 * SECOND)
    count.step()
    assert read == ["b"]
    clock.advance(20 * SECOND)
    count.step()
    assert read == ["b"]
    state.add_ledger([entry(topic=TopicId.parse("default:c"), at_ms=clock.now_ms())])
    clock.advance(60 * SECOND)
    count.step()
    assert read == ["b", "c", "a", "b"]


def test_given_a_budget_when_counted_then_it_is_kept(store: MemoryStore, state: State, clock: ManualClock) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 1099))
    topic(store, "default:b", ttl_seconds=60)
    census(store, state, clock, rate=100).step()
    # One topic has an empty page of payloads, the other two empty pages.
    assert clock.running_ms() - DAY == (1099 + 3) * 10
    assert counted(state) == {"a": 1099, "b": 0}


def test_given_a_budget_when_it_is_waited_for_then_nothing_is_open(store: MemoryStore, state: State) -> None:
    """Rule S11."""
    calls_open: list[str] = []
    waits: list[list[str]] = []

    class Watching(ManualClock):
        def sleep(self, seconds: float) -> None:
            waits.append(list(calls_open))
            super().sleep(seconds)

    topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 500)).stored(1, NOW_MS)

    def begin(call: Call) -> None:
        calls_open.append(call.name)

    def end(call: Call) -> None:
        calls_open.remove(call.name)

    watch(store, begin, end)
    watch_state(state, begin, end)
    census(store, state, Watching(NOW_MS, running_ms=DAY), rate=100).step()
    assert len(waits) > 5
    assert not any(waits)


def test_given_a_huge_topic_when_counted_then_turns_alternate_with_what_is_due(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    """At 1000 rows a second a turn has 2000: two full pages, or two topics of a thousand, of which each takes two."""
    topic(store, "default:huge", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 12_000))
    for number in range(8):
        topic(store, f"default:s{number}", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 1000))
    read = pages(store)
    census(store, state, clock, rate=1000).step()
    turns = "".join("H" if name == "huge" else "." for name in read)
    assert turns == "HHH" + "HH...." * 4 + "HH"
    assert counted(state)["huge"] == 12_000
    assert all(counted(state)[f"s{number}"] == 1000 for number in range(8))


def test_given_a_huge_topic_when_counted_for_long_then_the_small_ones_are_counted_again_meanwhile(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:huge", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 20_000))
    topic(store, "default:small", ttl_seconds=60).plain(NOW_MS)
    read = pages(store)
    census(store, state, clock, rate=100, refresh_seconds=60).step()
    assert 3 <= read.count("small") <= 5
    assert counted(state) == {"huge": 20_000, "small": 1}


# --- stopping, saving ------------------------------------------------------------------------------------------------


def test_given_a_count_that_is_halted_when_asked_again_then_it_goes_on_where_it_was(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 3000))
    stopping = [False]
    count = census(store, state, clock, halted=lambda: stopping[0])
    read = pages(store)
    watch(store, after=lambda call: stopping.__setitem__(0, call.name == "message.rows"))
    steps = 0
    while not state.counts():
        stopping[0] = False
        count.step()
        steps += 1
        assert len(read) <= steps, "one page after the word, and no more"
    assert counted(state) == {"a": 3000}
    assert read == ["a"] * 4


def test_given_a_word_to_stop_during_a_wait_when_counted_then_the_wait_ends(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(*range(NOW_MS, NOW_MS + 100))
    count = census(store, state, clock, rate=1, halted=lambda: clock.running_ms() >= DAY + 5 * SECOND)
    count.step()
    assert clock.running_ms() == DAY + 5 * SECOND
    assert state.counts() == {}


def test_given_a_word_to_stop_before_it_begins_when_counted_then_nothing_is_read(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    count = census(store, state, clock, halted=lambda: True)
    before = store.operations
    count.step()
    assert store.operations == before


def test_given_many_topics_when_counted_then_counts_are_saved_together_and_at_the_end(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    for number in range(1000):
        topic(store, f"default:t{number}", ttl_seconds=60)
    saved: list[int] = []
    watch_state(
        state, before=lambda call: saved.append(clock.running_ms()) if call.name == "state.save_counts" else None
    )
    census(store, state, clock, rate=100).step()
    assert len(counted(state)) == 1000
    assert len(saved) == pytest.approx((saved[-1] - DAY) / SAVE_EVERY_MS, abs=2)
    assert len(saved) < 10


def test_given_counts_that_cannot_be_saved_when_counted_then_they_are_saved_later(
    store: MemoryStore, state: State, clock: ManualClock
) -> None:
    topic(store, "default:a", ttl_seconds=60).plain(NOW_MS)
    full = [True]

    def fail(call: Call) -> None:
        if call.name == "state.save_counts" and full[0]:
            raise StoreError("the disk is full.")

    watch_state(state, before=fail)
    count = census(store, state, clock)
    with pytest.raises(StoreError, match="full"):
        count.step()
    full[0] = False
    count.step()
    assert counted(state) == {"a": 1}
