"""The background count of topic sizes: results, costs, and waits."""

from __future__ import annotations

from typing import Any

import pytest

from janitor.state.base import TopicCount
from janitor.state.topic_history import SIZES
from janitor.stats.scheduler import SAVE_EVERY_MS
from janitor.stats.topic_sizes import PAGE_BYTES, TopicSizeCounter
from tests.builders import DAY, NOW_MS, SECOND, Call, fail_at, unknown_topic, watch, watch_state
from tests.janitor.state.entries import entry
from tests.janitor.stats.conftest import Place
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.rowkey import generation_prefix
from tms_core.tables.base import MessageValue
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId

#: A key of ``default:a``: its prefix, generation, publish time and sequence.
MESSAGE_KEY = len("default:a:") + 4 + 8 + 2
PAYLOAD_KEY = MESSAGE_KEY + 8


def census(place: Place, *, rate: int = 1_000_000, **options: Any) -> TopicSizeCounter:
    clock = options.pop("clock", place.clock)
    return TopicSizeCounter(read_only(place.store), place.state, clock, rows_per_second=rate, **options)


def counted(place: Place) -> dict[str, int]:
    return {found.topic: count.messages for found, count in place.state.counts().items()}


def pages(place: Place) -> list[str]:
    """Topics whose pages are read from now on, by their first letter, in order."""
    read: list[str] = []

    def note(call: Call) -> None:
        if call.name == "message.rows":
            read.append(call.arguments[0].split(b":")[1].decode())

    watch(place.store, before=note)
    return read


def test_size_of_rows_of_every_kind_is_exact(place: Place) -> None:
    a = place.topic("a")
    a.plain(NOW_MS - DAY, NOW_MS, body=b"12345")
    a.tx(7, NOW_MS + 1, body=b"123")
    a.tx(-7, NOW_MS + 2, body=b"")
    a.ref(9, NOW_MS + 3)
    a.stored(9, NOW_MS, NOW_MS, body=b"1234567890")
    census(place).step()
    size = 5 * MESSAGE_KEY + 2 * 5 + (8 + 3) + 8 + 8 + 2 * (PAYLOAD_KEY + 10)
    assert place.state.counts() == {a.id: TopicCount(5, size, NOW_MS - DAY, NOW_MS + 3, NOW_MS)}


@pytest.mark.parametrize("generation", [2, 2**31 - 1])
def test_size_leaves_out_other_generations_and_topics(place: Place, generation: int) -> None:
    a = place.topic("a", generation=generation)
    a.plain(NOW_MS)
    a.stored(1, NOW_MS, body=b"")
    a.at(generation - 1).plain(NOW_MS)
    a.at(generation - 1).stored(1, NOW_MS)
    if generation < 2**31 - 1:
        a.at(generation + 1).plain(NOW_MS)
        a.at(generation + 1).stored(1, NOW_MS)
    unknown_topic(place.store, "default:a-b", generation).plain(NOW_MS)
    unknown_topic(place.store, "default:aa", generation).plain(NOW_MS)
    census(place).step()
    found = place.state.counts()[a.id]
    assert (found.messages, found.size_bytes) == (1, MESSAGE_KEY + 4 + PAYLOAD_KEY)


def test_count_with_a_bug_keeps_the_previous_count_and_is_repeated(place: Place) -> None:
    a = place.topic("a").plain(NOW_MS)
    sizes, bugs = census(place), [True]
    sizes.step()
    a.plain(NOW_MS + 1)
    watch(place.store, before=fail_at("message.rows", ZeroDivisionError("a bug"), lambda _: bugs))
    place.clock.advance(61 * SECOND)
    with pytest.raises(ZeroDivisionError):
        sizes.step()
    bugs.clear()
    sizes.step()
    assert counted(place) == {"a": 1}
    place.clock.advance(61 * SECOND)
    sizes.step()
    assert counted(place) == {"a": 2}


def test_size_excludes_unrecognized_rows(place: Place) -> None:
    a = place.topic("a").plain(NOW_MS, body=b"").stored(1, NOW_MS, body=b"")
    before = generation_prefix(a.id.prefix, 1)
    for tail in (b"", b"\x00", b"\x00" * 9, b"\x00" * 11, b"\x7f" * 12, b"\xff" * 10):
        place.store.message.put([(before + tail, MessageValue(None, b"x"))])
    for tail in (b"", b"\x00" * 10, b"\x00" * 19, b"\x00" * 8 + b"\xff" * 10):
        place.store.payload.put([(before + tail, b"x")])
    census(place).step()
    assert place.state.counts()[a.id] == TopicCount(1, MESSAGE_KEY + PAYLOAD_KEY, NOW_MS, NOW_MS, NOW_MS)


@pytest.mark.parametrize("rows", [99, 100, 101, 1099, 1100, 1101, 2500])
def test_size_of_several_pages_counts_each_row_once(place: Place, rows: int) -> None:
    a = place.topic("a").plain(*range(NOW_MS, NOW_MS + rows), body=b"")
    a.stored(1, *range(NOW_MS, NOW_MS + rows), body=b"")
    census(place).step()
    size = rows * (MESSAGE_KEY + PAYLOAD_KEY)
    assert place.state.counts()[a.id] == TopicCount(rows, size, NOW_MS, NOW_MS + rows - 1, place.clock.now_ms())


def test_size_of_large_payloads_uses_small_pages(place: Place) -> None:
    body = b"x" * (PAGE_BYTES // 10)
    place.topic("a").plain(*range(NOW_MS, NOW_MS + 130), body=body)
    limits: list[int] = []
    watch(place.store, before=lambda call: limits.append(call.arguments[2]) if call.name == "message.rows" else None)
    census(place).step()
    assert limits[0] == 100
    assert set(limits[1:]) == {9}
    assert counted(place) == {"a": 130}


def test_size_of_an_unreadable_topic_alone_stays(place: Place) -> None:
    gone, deleted, unreadable = (TopicId.parse(f"default:{name}") for name in ("gone", "deleted", "unreadable"))
    place.topic("deleted", generation=-1)
    unknown_topic(place.store, "default:unreadable").write_metadata(b"{")
    old = TopicCount(3, 99, 1, 2, 3)
    place.state.save_counts(dict.fromkeys((gone, deleted, unreadable), old))
    census(place).step()
    assert place.state.counts() == {unreadable: old}


def test_size_of_a_topic_created_again_is_counted_again(place: Place) -> None:
    a = place.topic("a").plain(*range(NOW_MS, NOW_MS + 500))
    count = census(place, rate=100, is_stopping=lambda: place.clock.monotonic_ms() == DAY + SECOND)
    count.step()
    assert counted(place) == {}
    place.clock.advance(1)
    a.at(2).describe(ttl_seconds=60, generation=2).plain(NOW_MS, NOW_MS + 1)
    count.step()
    assert counted(place) == {"a": 2}


def test_size_of_a_topic_that_fails_is_logged_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    old = TopicCount(3, 99, 1, 2, 3)
    for name in ("a", "b", "c"):
        place.topic(name).plain(NOW_MS)
    place.state.save_counts({TopicId.parse("default:b"): old})
    broken = [True]
    watch(
        place.store,
        before=fail_at(
            "message.rows",
            StoreError("a block is corrupt."),
            lambda call: broken[0] and call.arguments[0].startswith(b"default:b:"),
        ),
    )
    count = census(place)
    for _ in range(3):
        count.step()
        place.clock.advance(60 * SECOND)
    assert place.state.counts()[TopicId.parse("default:b")] == old
    assert counted(place) == {"a": 1, "b": 3, "c": 1}
    assert caplog.messages == ["topic default:b could not be counted and keeps its previous count: a block is corrupt."]
    broken[0] = False
    count.step()
    assert counted(place)["b"] == 1


def test_size_counts_new_topics_first_and_then_the_oldest(place: Place) -> None:
    for name in "abcd":
        place.topic(name)
    for name, counted_ms in (("a", 30), ("b", 10), ("d", 20)):
        place.state.save_counts({TopicId.parse(f"default:{name}"): TopicCount(0, 0, None, None, counted_ms)})
    read = pages(place)
    census(place).step()
    assert read == ["c", "b", "d", "a"]


def test_size_with_a_fresh_count_reads_nothing(place: Place) -> None:
    place.topic("a")
    count = census(place, refresh_seconds=60)
    count.step()
    read = pages(place)
    place.clock.advance(60 * SECOND - 1)
    place.clock.step(DAY)
    count.step()
    assert read == []
    place.clock.advance(1)
    count.step()
    assert read == ["a"]


def test_sizes_over_time_have_each_count_and_nothing_else(place: Place) -> None:
    a = place.topic("a").plain(NOW_MS)
    count = census(place, refresh_seconds=60)
    count.step()
    place.clock.advance(30 * SECOND)
    a.plain(NOW_MS + 1)
    count.step()
    assert [size.messages for size in SIZES.read(place.state).get("default:a", [])] == [1]
    place.clock.advance(30 * SECOND)
    count.step()
    assert [(size.counted_ms, size.messages) for size in SIZES.read(place.state).get("default:a", [])] == [
        (NOW_MS, 1),
        (NOW_MS + 60 * SECOND, 2),
    ]


def test_size_of_a_swept_topic_is_counted_first(place: Place) -> None:
    for name in "abc":
        place.topic(name)
    count = census(place, refresh_seconds=60)
    count.step()
    read = pages(place)
    place.clock.advance(10 * SECOND)
    place.state.add_ledger([entry(topic=TopicId.parse("default:b"), at_ms=place.clock.now_ms())])
    place.clock.advance(10 * SECOND)
    count.step()
    assert read == ["b"]
    place.clock.advance(20 * SECOND)
    count.step()
    assert read == ["b"]
    place.state.add_ledger([entry(topic=TopicId.parse("default:c"), at_ms=place.clock.now_ms())])
    place.clock.advance(60 * SECOND)
    count.step()
    assert read == ["b", "c", "a", "b"]


def test_size_counting_keeps_its_rate(place: Place) -> None:
    place.topic("a").plain(*range(NOW_MS, NOW_MS + 1099))
    place.topic("b")
    census(place, rate=100).step()
    # One topic has an empty page of payloads, the other two empty pages.
    assert place.clock.monotonic_ms() - DAY == (1099 + 3) * 10
    assert counted(place) == {"a": 1099, "b": 0}


def test_size_counting_has_no_open_call_while_it_waits(place: Place) -> None:
    """Rule S11."""
    calls_open: list[str] = []
    waits: list[list[str]] = []

    class Watching(ManualClock):
        def sleep(self, seconds: float) -> None:
            waits.append(list(calls_open))
            super().sleep(seconds)

    place.topic("a").plain(*range(NOW_MS, NOW_MS + 500)).stored(1, NOW_MS)

    def begin(call: Call) -> None:
        calls_open.append(call.name)

    def end(call: Call) -> None:
        calls_open.remove(call.name)

    watch(place.store, begin, end)
    watch_state(place.state, begin, end)
    census(place, clock=Watching(NOW_MS, monotonic_ms=DAY), rate=100).step()
    assert len(waits) > 5
    assert not any(waits)


def test_size_of_a_huge_topic_alternates_with_other_due_topics(place: Place) -> None:
    """At 1000 rows a second, a turn reads 2000 rows: two full pages, or two topics of 1000 rows with two pages each."""
    place.topic("huge").plain(*range(NOW_MS, NOW_MS + 12_000))
    for number in range(8):
        place.topic(f"s{number}").plain(*range(NOW_MS, NOW_MS + 1000))
    read = pages(place)
    census(place, rate=1000).step()
    assert "".join("H" if name == "huge" else "." for name in read) == "HHH" + "HH...." * 4 + "HH"
    assert counted(place)["huge"] == 12_000
    assert all(counted(place)[f"s{number}"] == 1000 for number in range(8))


def test_size_of_an_empty_topic_has_no_times(place: Place) -> None:
    a = place.topic("a")
    census(place).step()
    assert place.state.counts() == {a.id: TopicCount(0, 0, None, None, NOW_MS)}


def test_sizes_that_are_stopped_go_on_where_they_were(place: Place) -> None:
    place.topic("a").plain(*range(NOW_MS, NOW_MS + 3000))
    stopping = [True]
    count = census(place, is_stopping=lambda: stopping[0])
    read, before = pages(place), place.store.calls.copy()
    count.step()
    assert place.store.calls == before, "a stop before the start reads nothing"
    watch(place.store, after=lambda call: stopping.__setitem__(0, call.name == "message.rows"))
    for _ in range(9):
        stopping[0] = False
        count.step()
    assert (counted(place), read) == ({"a": 3000}, ["a"] * 4)


def test_sizes_that_are_stopped_in_a_wait_end_it(place: Place) -> None:
    place.topic("a").plain(*range(NOW_MS, NOW_MS + 100))
    census(place, rate=1, is_stopping=lambda: place.clock.monotonic_ms() >= DAY + 5 * SECOND).step()
    assert (place.clock.monotonic_ms(), place.state.counts()) == (DAY + 5 * SECOND, {})


def test_sizes_over_time_are_saved_during_a_long_count(place: Place) -> None:
    place.topic("a").plain(NOW_MS)
    place.topic("b").plain(*range(NOW_MS, NOW_MS + 80))
    place.topic("c").plain(NOW_MS)
    seen: list[bool] = []

    def is_stopping() -> bool:
        seen.append("default:a" in SIZES.read(place.state))
        return False

    census(place, rate=1, is_stopping=is_stopping).step()
    assert seen.index(True) < len(seen) - 1, "before the last page was read"


def test_sizes_that_cannot_be_saved_are_saved_later(place: Place) -> None:
    place.topic("a").plain(NOW_MS)
    full = [True]
    watch_state(place.state, before=fail_at("state.save_counts", StoreError("the disk is full."), lambda _: full[0]))
    count = census(place)
    with pytest.raises(StoreError, match="full"):
        count.step()
    full[0] = False
    count.step()
    assert counted(place) == {"a": 1}


def test_sizes_by_metadata_that_cannot_be_read_are_an_error(place: Place) -> None:
    watch(place.store, before=fail_at("metadata.rows", StoreError("the disk is gone.")))
    with pytest.raises(StoreError, match="the disk is gone"):
        census(place).step()


def test_sizes_of_many_topics_are_saved_together(place: Place) -> None:
    for number in range(1000):
        place.topic(f"t{number}")
    saved: list[int] = []
    watch_state(
        place.state,
        before=lambda call: saved.append(place.clock.monotonic_ms()) if call.name == "state.save_counts" else None,
    )
    census(place, rate=100).step()
    assert len(counted(place)) == 1000
    assert len(saved) == pytest.approx((saved[-1] - DAY) / SAVE_EVERY_MS, abs=2)
    assert len(saved) < 10
