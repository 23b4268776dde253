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
from tests.janitor.stats.conftest import CountKit
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.rowkey import generation_prefix
from tms_core.tables.base import MessageValue
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId

#: A key of ``default:a``: its prefix, generation, publish time and sequence.
MESSAGE_KEY = len("default:a:") + 4 + 8 + 2
PAYLOAD_KEY = MESSAGE_KEY + 8


def counter(kit: CountKit, *, rate: int = 1_000_000, **options: Any) -> TopicSizeCounter:
    clock = options.pop("clock", kit.clock)
    return TopicSizeCounter(read_only(kit.store), kit.state, clock, rows_per_second=rate, **options)


def read_counts(kit: CountKit) -> dict[str, int]:
    return {found.topic: count.messages for found, count in kit.state.counts().items()}


def pages(kit: CountKit) -> list[str]:
    """Return a list of later page reads, by the first letter of the topic."""
    read: list[str] = []

    def note(call: Call) -> None:
        if call.name == "message.rows":
            read.append(call.arguments[0].split(b":")[1].decode())

    watch(kit.store, before=note)
    return read


def test_size_of_rows_of_every_kind_is_exact(kit: CountKit) -> None:
    a = kit.topic("a")
    a.plain(NOW_MS - DAY, NOW_MS, body=b"12345")
    a.tx(7, NOW_MS + 1, body=b"123")
    a.tx(-7, NOW_MS + 2, body=b"")
    a.ref(9, NOW_MS + 3)
    a.stored(9, NOW_MS, NOW_MS, body=b"1234567890")
    counter(kit).step()
    size = 5 * MESSAGE_KEY + 2 * 5 + (8 + 3) + 8 + 8 + 2 * (PAYLOAD_KEY + 10)
    assert kit.state.counts() == {a.id: TopicCount(5, size, NOW_MS - DAY, NOW_MS + 3, NOW_MS)}


@pytest.mark.parametrize("generation", [2, 2**31 - 1])
def test_size_leaves_out_other_generations_and_topics(kit: CountKit, generation: int) -> None:
    a = kit.topic("a", generation=generation)
    a.plain(NOW_MS)
    a.stored(1, NOW_MS, body=b"")
    a.at(generation - 1).plain(NOW_MS)
    a.at(generation - 1).stored(1, NOW_MS)
    if generation < 2**31 - 1:
        a.at(generation + 1).plain(NOW_MS)
        a.at(generation + 1).stored(1, NOW_MS)
    unknown_topic(kit.store, "default:a-b", generation).plain(NOW_MS)
    unknown_topic(kit.store, "default:aa", generation).plain(NOW_MS)
    counter(kit).step()
    found = kit.state.counts()[a.id]
    assert (found.messages, found.size_bytes) == (1, MESSAGE_KEY + 4 + PAYLOAD_KEY)


def test_count_with_a_bug_keeps_the_previous_count_and_is_repeated(kit: CountKit) -> None:
    a = kit.topic("a").plain(NOW_MS)
    sizes, bugs = counter(kit), [True]
    sizes.step()
    a.plain(NOW_MS + 1)
    watch(kit.store, before=fail_at("message.rows", ZeroDivisionError("a bug"), lambda _: bugs))
    kit.clock.advance(61 * SECOND)
    with pytest.raises(ZeroDivisionError):
        sizes.step()
    bugs.clear()
    sizes.step()
    assert read_counts(kit) == {"a": 1}
    kit.clock.advance(61 * SECOND)
    sizes.step()
    assert read_counts(kit) == {"a": 2}


def test_size_excludes_unrecognized_rows(kit: CountKit) -> None:
    a = kit.topic("a").plain(NOW_MS, body=b"").stored(1, NOW_MS, body=b"")
    before = generation_prefix(a.id.prefix, 1)
    for tail in (b"", b"\x00", b"\x00" * 9, b"\x00" * 11, b"\x7f" * 12, b"\xff" * 10):
        kit.store.message.put([(before + tail, MessageValue(None, b"x"))])
    for tail in (b"", b"\x00" * 10, b"\x00" * 19, b"\x00" * 8 + b"\xff" * 10):
        kit.store.payload.put([(before + tail, b"x")])
    counter(kit).step()
    assert kit.state.counts()[a.id] == TopicCount(1, MESSAGE_KEY + PAYLOAD_KEY, NOW_MS, NOW_MS, NOW_MS)


@pytest.mark.parametrize("rows", [99, 100, 101, 1099, 1100, 1101, 2500])
def test_size_of_several_pages_counts_each_row_once(kit: CountKit, rows: int) -> None:
    a = kit.topic("a").plain(*range(NOW_MS, NOW_MS + rows), body=b"")
    a.stored(1, *range(NOW_MS, NOW_MS + rows), body=b"")
    counter(kit).step()
    size = rows * (MESSAGE_KEY + PAYLOAD_KEY)
    assert kit.state.counts()[a.id] == TopicCount(rows, size, NOW_MS, NOW_MS + rows - 1, kit.clock.now_ms())


def test_size_of_large_payloads_uses_small_pages(kit: CountKit) -> None:
    body = b"x" * (PAGE_BYTES // 10)
    kit.topic("a").plain(*range(NOW_MS, NOW_MS + 130), body=body)
    limits: list[int] = []
    watch(kit.store, before=lambda call: limits.append(call.arguments[2]) if call.name == "message.rows" else None)
    counter(kit).step()
    assert limits[0] == 100
    assert set(limits[1:]) == {9}
    assert read_counts(kit) == {"a": 130}


def test_size_of_an_unreadable_topic_alone_stays(kit: CountKit) -> None:
    gone, deleted, unreadable = (TopicId.parse(f"default:{name}") for name in ("gone", "deleted", "unreadable"))
    kit.topic("deleted", generation=-1)
    unknown_topic(kit.store, "default:unreadable").write_metadata(b"{")
    old = TopicCount(3, 99, 1, 2, 3)
    kit.state.save_counts(dict.fromkeys((gone, deleted, unreadable), old))
    counter(kit).step()
    assert kit.state.counts() == {unreadable: old}


def test_size_of_a_topic_created_again_is_counted_again(kit: CountKit) -> None:
    a = kit.topic("a").plain(*range(NOW_MS, NOW_MS + 500))
    count = counter(kit, rate=100, is_stopping=lambda: kit.clock.monotonic_ms() == DAY + SECOND)
    count.step()
    assert read_counts(kit) == {}
    kit.clock.advance(1)
    a.at(2).describe(ttl_seconds=60, generation=2).plain(NOW_MS, NOW_MS + 1)
    count.step()
    assert read_counts(kit) == {"a": 2}


def test_size_of_a_topic_that_fails_is_logged_once(kit: CountKit, caplog: pytest.LogCaptureFixture) -> None:
    old = TopicCount(3, 99, 1, 2, 3)
    for name in ("a", "b", "c"):
        kit.topic(name).plain(NOW_MS)
    kit.state.save_counts({TopicId.parse("default:b"): old})
    broken = [True]
    watch(
        kit.store,
        before=fail_at(
            "message.rows",
            StoreError("a block is corrupt."),
            lambda call: broken[0] and call.arguments[0].startswith(b"default:b:"),
        ),
    )
    count = counter(kit)
    for _ in range(3):
        count.step()
        kit.clock.advance(60 * SECOND)
    assert kit.state.counts()[TopicId.parse("default:b")] == old
    assert read_counts(kit) == {"a": 1, "b": 3, "c": 1}
    assert caplog.messages == ["topic default:b could not be counted and keeps its previous count: a block is corrupt."]
    broken[0] = False
    count.step()
    assert read_counts(kit)["b"] == 1


def test_size_counts_new_topics_first_and_then_the_oldest(kit: CountKit) -> None:
    for name in "abcd":
        kit.topic(name)
    for name, counted_ms in (("a", 30), ("b", 10), ("d", 20)):
        kit.state.save_counts({TopicId.parse(f"default:{name}"): TopicCount(0, 0, None, None, counted_ms)})
    read = pages(kit)
    counter(kit).step()
    assert read == ["c", "b", "d", "a"]


def test_size_with_a_fresh_count_reads_nothing(kit: CountKit) -> None:
    kit.topic("a")
    count = counter(kit, refresh_seconds=60)
    count.step()
    read = pages(kit)
    kit.clock.advance(60 * SECOND - 1)
    kit.clock.step(DAY)
    count.step()
    assert read == []
    kit.clock.advance(1)
    count.step()
    assert read == ["a"]


def test_sizes_over_time_have_each_count_and_nothing_else(kit: CountKit) -> None:
    a = kit.topic("a").plain(NOW_MS)
    count = counter(kit, refresh_seconds=60)
    count.step()
    kit.clock.advance(30 * SECOND)
    a.plain(NOW_MS + 1)
    count.step()
    assert [size.messages for size in SIZES.read(kit.state).get("default:a", [])] == [1]
    kit.clock.advance(30 * SECOND)
    count.step()
    assert [(size.counted_ms, size.messages) for size in SIZES.read(kit.state).get("default:a", [])] == [
        (NOW_MS, 1),
        (NOW_MS + 60 * SECOND, 2),
    ]


def test_size_of_a_swept_topic_is_counted_first(kit: CountKit) -> None:
    for name in "abc":
        kit.topic(name)
    count = counter(kit, refresh_seconds=60)
    count.step()
    read = pages(kit)
    kit.clock.advance(10 * SECOND)
    kit.state.add_ledger([entry(topic=TopicId.parse("default:b"), at_ms=kit.clock.now_ms())])
    kit.clock.advance(10 * SECOND)
    count.step()
    assert read == ["b"]
    kit.clock.advance(20 * SECOND)
    count.step()
    assert read == ["b"]
    kit.state.add_ledger([entry(topic=TopicId.parse("default:c"), at_ms=kit.clock.now_ms())])
    kit.clock.advance(60 * SECOND)
    count.step()
    assert read == ["b", "c", "a", "b"]


def test_size_counting_keeps_its_rate(kit: CountKit) -> None:
    kit.topic("a").plain(*range(NOW_MS, NOW_MS + 1099))
    kit.topic("b")
    counter(kit, rate=100).step()
    # One topic has an empty page of payloads, the other two empty pages.
    assert kit.clock.monotonic_ms() - DAY == (1099 + 3) * 10
    assert read_counts(kit) == {"a": 1099, "b": 0}


def test_size_counting_has_no_open_call_while_it_waits(kit: CountKit) -> None:
    """Rule S11."""
    calls_open: list[str] = []
    waits: list[list[str]] = []

    class WatchedClock(ManualClock):
        def sleep(self, seconds: float) -> None:
            waits.append(list(calls_open))
            super().sleep(seconds)

    kit.topic("a").plain(*range(NOW_MS, NOW_MS + 500)).stored(1, NOW_MS)

    def begin(call: Call) -> None:
        calls_open.append(call.name)

    def end(call: Call) -> None:
        calls_open.remove(call.name)

    watch(kit.store, begin, end)
    watch_state(kit.state, begin, end)
    counter(kit, clock=WatchedClock(NOW_MS, monotonic_ms=DAY), rate=100).step()
    assert len(waits) > 5
    assert not any(waits)


def test_size_of_a_huge_topic_alternates_with_other_due_topics(kit: CountKit) -> None:
    """At 1000 rows a second, a turn reads 2000 rows: two full pages, or two topics of 1000 rows with two pages each."""
    kit.topic("huge").plain(*range(NOW_MS, NOW_MS + 12_000))
    for number in range(8):
        kit.topic(f"s{number}").plain(*range(NOW_MS, NOW_MS + 1000))
    read = pages(kit)
    counter(kit, rate=1000).step()
    assert "".join("H" if name == "huge" else "." for name in read) == "HHH" + "HH...." * 4 + "HH"
    assert read_counts(kit)["huge"] == 12_000
    assert all(read_counts(kit)[f"s{number}"] == 1000 for number in range(8))


def test_size_of_an_empty_topic_has_no_times(kit: CountKit) -> None:
    a = kit.topic("a")
    counter(kit).step()
    assert kit.state.counts() == {a.id: TopicCount(0, 0, None, None, NOW_MS)}


def test_stopped_count_continues_at_its_position(kit: CountKit) -> None:
    kit.topic("a").plain(*range(NOW_MS, NOW_MS + 3000))
    stopping = [True]
    count = counter(kit, is_stopping=lambda: stopping[0])
    read, before = pages(kit), kit.store.calls.copy()
    count.step()
    assert kit.store.calls == before, "a stop before the start reads nothing"
    watch(kit.store, after=lambda call: stopping.__setitem__(0, call.name == "message.rows"))
    for _ in range(9):
        stopping[0] = False
        count.step()
    assert (read_counts(kit), read) == ({"a": 3000}, ["a"] * 4)


def test_stop_during_a_wait_ends_the_count(kit: CountKit) -> None:
    kit.topic("a").plain(*range(NOW_MS, NOW_MS + 100))
    counter(kit, rate=1, is_stopping=lambda: kit.clock.monotonic_ms() >= DAY + 5 * SECOND).step()
    assert (kit.clock.monotonic_ms(), kit.state.counts()) == (DAY + 5 * SECOND, {})


def test_sizes_over_time_are_saved_during_a_long_count(kit: CountKit) -> None:
    kit.topic("a").plain(NOW_MS)
    kit.topic("b").plain(*range(NOW_MS, NOW_MS + 80))
    kit.topic("c").plain(NOW_MS)
    seen: list[bool] = []

    def is_stopping() -> bool:
        seen.append("default:a" in SIZES.read(kit.state))
        return False

    counter(kit, rate=1, is_stopping=is_stopping).step()
    assert seen.index(True) < len(seen) - 1, "saved before the last page"


def test_sizes_that_cannot_be_saved_are_saved_later(kit: CountKit) -> None:
    kit.topic("a").plain(NOW_MS)
    full = [True]
    watch_state(kit.state, before=fail_at("state.save_counts", StoreError("the disk is full."), lambda _: full[0]))
    count = counter(kit)
    with pytest.raises(StoreError, match="full"):
        count.step()
    full[0] = False
    count.step()
    assert read_counts(kit) == {"a": 1}


def test_sizes_by_metadata_that_cannot_be_read_are_an_error(kit: CountKit) -> None:
    watch(kit.store, before=fail_at("metadata.rows", StoreError("the disk is gone.")))
    with pytest.raises(StoreError, match="the disk is gone"):
        counter(kit).step()


def test_sizes_of_many_topics_are_saved_together(kit: CountKit) -> None:
    for number in range(1000):
        kit.topic(f"t{number}")
    saved: list[int] = []
    watch_state(
        kit.state,
        before=lambda call: saved.append(kit.clock.monotonic_ms()) if call.name == "state.save_counts" else None,
    )
    counter(kit, rate=100).step()
    assert len(read_counts(kit)) == 1000
    assert len(saved) == pytest.approx((saved[-1] - DAY) / SAVE_EVERY_MS, abs=2)
    assert len(saved) < 10
