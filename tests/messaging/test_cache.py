"""The message cache: contents, results, and validity after changes of the store."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import HOUR, NOW_MS, SECOND, Snapshots, adopted_janitor, pointer
from tests.kit.avro import decoded
from tests.kit.messaging import HOUR_SECONDS, Kit, P, named, reader
from tms_core.messaging.cache import CachedRun, MessageCache
from tms_core.messaging.ids import Ids
from tms_core.messaging.model import MESSAGE_BYTES, FetchRequest, MessageList, SharedList
from tms_core.rowkey import MessageId, MessageKey, PayloadKey
from tms_core.server.codec import avro
from tms_core.tables.base import MESSAGES, MessageValue, TxCell

A, B = b"a", b"b"


def run(first: int, *payloads: bytes, pointer: int | None = None) -> CachedRun:
    return CachedRun(first, len(payloads), pointer, payloads, sum(map(len, payloads)))


def filled() -> MessageCache:
    cache = MessageCache(1 << 20)
    cache.open(A, Ids(10))
    cache.add(A, [run(10, b"x", b"y"), run(20, b"z")])
    return cache


# --- reads -----------------------------------------------------------------------------------------------------------


def test_cache_without_room_forgets_the_oldest_runs_of_all_topics() -> None:
    one = run(0, bytes(1000)).weight
    cache = MessageCache(one * 4)
    cache.open(A, Ids(0))
    cache.open(B, Ids(0))
    for number in range(3):
        cache.add(A, [run(10 * number, bytes(1000))])
        cache.add(B, [run(10 * number, bytes(1000))])
    assert cache.stats.weight == one * 4
    for prefix in (A, B):
        assert cache.read(prefix, 0, 100, 1 << 20, 0) is None
        assert cache.read(prefix, 1, 100, 1 << 20, 0) == [run(10, bytes(1000)), run(20, bytes(1000))]


@pytest.mark.parametrize(
    ("at", "stop", "firsts"),
    [
        (10, 100, [10, 20]),
        (11, 100, [10, 20]),
        (12, 100, [20]),
        (20, 100, [20]),
        (21, 100, []),
        (10, 20, [10]),
        (10, 10, []),
    ],
)
def test_read_between_positions_gives_the_runs_of_the_range(at: int, stop: int, firsts: list[int]) -> None:
    found = filled().read(A, at, stop, 1 << 20, 0)
    assert found is not None
    assert [item.first for item in found] == firsts


def test_read_with_a_small_limit_gives_one_run() -> None:
    assert filled().read(A, 10, 100, 1, 0) == [run(10, b"x", b"y")]


def test_invalidate_of_a_topic_when_full_frees_space_for_others() -> None:
    one = run(0, bytes(1000)).weight
    cache = MessageCache(one * 2)
    cache.open(A, Ids(0))
    cache.open(B, Ids(0))
    cache.add(A, [run(0, bytes(1000))])
    cache.add(B, [run(0, bytes(1000))])
    cache.invalidate(A, 5)
    assert cache.stats.weight == one
    cache.add(A, [run(10, bytes(1000))])
    assert cache.read(B, 0, 100, 1 << 20, 0) == [run(0, bytes(1000))]
    assert cache.read(A, 4, 100, 1 << 20, 0) is None
    assert cache.read(A, 5, 100, 1 << 20, 0) == [run(10, bytes(1000))]
    cache.add(A, [run(20, bytes(1000))])
    assert cache.read(B, 0, 100, 1 << 20, 0) is None
    assert cache.read(A, 5, 100, 1 << 20, 0) == [run(10, bytes(1000)), run(20, bytes(1000))]
    cache.add(B, [run(10, bytes(1000))])
    cache.drop(A)
    cache.drop(A)
    assert cache.read(A, 5, 100, 1 << 20, 0) is None
    assert cache.stats.weight == one


@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 1), (1, 1)])
def test_read_after_a_rollback_of_part_of_a_run_needs_the_store(first: int, last: int) -> None:
    cache = MessageCache(1 << 20)
    cache.open(A, Ids(0))
    cache.add(A, [run(0, b"x", b"y", b"z", pointer=7), run(3, b"x")])
    cache.roll_back(A, first, last, 7)
    assert cache.read(A, 0, 100, 1 << 20, 0) is None
    assert cache.read(A, 4, 100, 1 << 20, 0) == []


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(0, 3000), st.data())
def test_read_in_any_room_is_complete_from_there_on(sizes: list[int], limit_bytes: int, data: st.DataObject) -> None:
    cache = MessageCache(limit_bytes)
    cache.open(A, Ids(3))
    added: list[CachedRun] = []
    at = 3
    for size in sizes:
        added.append(run(at, *[b"x" * 20] * size))
        cache.add(A, added[-1:])
        at += size + data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, at + 1))
    found = cache.read(A, start, at + 10, 1 << 20, 0)
    assert cache.stats.weight <= limit_bytes
    if found is not None:
        assert found == [item for item in added if item.stop > start]


# --- with a service and a janitor ------------------------------------------------------------------------------------


def hits(kit: Kit) -> int:
    return kit.service.cache.stats.hits


def test_poll_of_a_consumer_without_lag_does_not_read_the_store(kit: Kit) -> None:
    kit.publish("orders", b"before the restart")
    kit.restart()
    last = kit.ids()[-1]
    before = kit.store.calls["rows"]
    for number in range(5):
        assert kit.payloads(start=last, inclusive=False) == []
        kit.publish("orders", b"%d" % number)
        assert kit.payloads(start=last, inclusive=False) == [b"%d" % number]
        last = kit.ids(start=last)[-1]
    # A consumer that starts with its last message reads the store, because that row is not in the cache.
    assert kit.store.calls["rows"] == before + 1
    assert hits(kit) >= 5


def test_fetch_after_the_janitor_inverted_hides_the_message(kit: Kit) -> None:
    kit.restart(max_lifetime_seconds=HOUR_SECONDS, grace_seconds=HOUR_SECONDS)
    failed = pointer(NOW_MS - HOUR + SECOND)
    kit.publish("orders", b"failed", pointer=failed)
    kit.publish("orders", b"fine")
    snapshots = Snapshots(kit.clock, invalid=[failed])
    adopted_janitor(kit.store, clock=kit.clock, snapshots=snapshots, hold_seconds=0)
    assert kit.store.message.read(MESSAGES, b"", None, 1).items[0][1].pointer == -failed
    assert kit.payloads(start=NOW_MS, transaction=reader(invalid=[failed])) == [b"fine"]
    # A transaction may be forgotten only after its lifetime and the grace period.
    kit.clock.advance(HOUR + SECOND)
    assert kit.payloads(start=NOW_MS, transaction=reader()) == [b"fine"]


def test_fetch_after_the_janitor_deleted_shows_nothing_from_memory(kit: Kit) -> None:
    kit.create("short", ttl="60")
    kit.publish("short", b"old")
    kit.clock.advance(30 * SECOND)
    kit.publish("short", b"new")
    janitor_kit = adopted_janitor(kit.store, clock=kit.clock, hold_seconds=0)
    kit.clock.advance(31 * SECOND)
    janitor_kit.engine.run_once()
    assert kit.payloads("short") == [b"new"]
    # Messages that were deleted during a shorter TTL do not reappear.
    kit.service.update_topic(named("short"), {"ttl": "10"})
    janitor_kit.engine.run_once()
    kit.service.update_topic(named("short"), {"ttl": "600"})
    stored = [value.payload for _, value in kit.store.message.read(MESSAGES, b"", None, 10).items]
    assert kit.payloads("short") == stored


def test_invalidate_after_foreign_rows_shows_them_and_ids_continue(kit: Kit) -> None:
    kit.publish("orders", b"a")
    theirs = MessageKey(named("orders"), 1, NOW_MS + 7, 9).pack()
    kit.store.message.put([(theirs, MessageValue(P, b"theirs"))])
    kit.put("orders", P, b"stored")
    assert kit.payloads() == [b"a"]
    kit.service.invalidate(named("orders"))
    kit.publish("orders", b"b")
    assert kit.payloads() == [b"a", b"theirs", b"b"]
    assert kit.ids()[-1] == MessageId(NOW_MS + 7, 10)
    kit.store.message.invert([TxCell(theirs, P, False)])
    kit.service.invalidate()
    assert kit.payloads(start=NOW_MS, transaction=reader()) == [b"a", b"b"]


def test_store_after_invalidate_keeps_payloads_of_another_server(kit: Kit) -> None:
    kit.put("orders", P, b"ours")
    theirs = PayloadKey(named("orders"), 1, P, NOW_MS, 1).pack()
    kit.store.payload.put([(theirs, b"theirs")])
    kit.service.invalidate(named("orders"))
    kit.put("orders", P, b"more")
    kit.publish("orders", pointer=P)
    assert kit.payloads() == [b"ours", b"theirs", b"more"]


def test_fetch_after_a_failed_batch_returns_the_stored_rows(kit: Kit) -> None:
    kit.publish("orders", b"a")
    put = kit.store.message.put

    def put_half(rows: object) -> None:
        put(rows[:1])  # type: ignore[index]
        raise OSError("a bug in the store")

    kit.store.message.put = put_half  # type: ignore[method-assign]
    with pytest.raises(OSError, match="bug"):
        kit.publish("orders", b"b", b"c")
    kit.store.message.put = put  # type: ignore[method-assign]
    kit.publish("orders", b"d")
    assert kit.payloads() == [b"a", b"b", b"d"]


# --- shared messages -------------------------------------------------------------------------------------------------

MANY = [b"%04d" % number + bytes(96) for number in range(1000)]


@pytest.fixture
def encoded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of messages of each encoding; the cache has space to share all."""
    kit.restart(cache_bytes=16 << 20)
    counts: list[int] = []
    items = avro._items

    def count_items(ids: list[bytes], *columns: Any) -> list[bytes]:
        counts.append(len(ids))
        return items(ids, *columns)

    monkeypatch.setattr(avro, "_items", count_items)
    return counts


def answer(kit: Kit, start: MessageId | int | None = None, topic: str = "orders", **options: Any) -> list[bytes]:
    pages = kit.service.fetch(named(topic), FetchRequest(start, **options))
    return [payload for _, payload in decoded(b"".join(avro.AvroCodec().write_messages(pages)))]


def test_tail_read_by_two_consumers_is_encoded_once(kit: Kit, encoded: list[int]) -> None:
    kit.publish("orders", *MANY)
    kit.publish("orders", b"alone")
    assert answer(kit) == [*MANY, b"alone"]
    assert sum(encoded) == 1001
    encoded.clear()
    assert answer(kit) == [*MANY, b"alone"]
    assert answer(kit, NOW_MS, transaction=reader()) == [*MANY, b"alone"]
    # Shorter lists are not shared.
    assert encoded == [1, 1]
    assert kit.payloads() == [*MANY, b"alone"]


@pytest.mark.parametrize("limit", [1, 31, 468, 469, 470, 999, 1000])
@pytest.mark.parametrize("first", [0, 1, 468, 469, 999])
def test_read_inside_a_shared_part_gives_only_its_range(kit: Kit, encoded: list[int], first: int, limit: int) -> None:
    kit.publish("orders", *MANY)
    start = MessageId(NOW_MS, first)
    expected = MANY[first : first + limit]
    for _ in range(2):
        assert answer(kit, start, limit=limit) == expected
        size = sum(len(payload) + MESSAGE_BYTES for payload in expected)
        assert answer(kit, start, limit_bytes=size) == expected
        assert answer(kit) == MANY
    encoded.clear()
    assert answer(kit, MessageId(NOW_MS, 1)) == MANY[1:]
    # A part has 469 messages of 100 bytes; only a part with excluded messages is encoded again.
    assert encoded == [468]


def test_shared_run_hides_invalid_and_undecided_messages(kit: Kit, encoded: list[int]) -> None:
    published = kit.publish("orders", *MANY, pointer=P)
    kit.publish("orders", *MANY[:100])
    assert answer(kit) == answer(kit, NOW_MS, transaction=reader()) == MANY + MANY[:100]
    assert sum(encoded) == 1100
    assert answer(kit, NOW_MS, transaction=reader(invalid=[P])) == MANY[:100]
    assert answer(kit, NOW_MS, transaction=reader(in_progress=[P])) == []
    kit.service.rollback(named("orders"), published)
    assert answer(kit, NOW_MS, transaction=reader()) == MANY[:100]
    assert answer(kit) == MANY + MANY[:100]
    assert sum(encoded) == 1100


@pytest.mark.usefixtures("encoded")
def test_shared_run_hides_expired_messages(kit: Kit) -> None:
    kit.publish("orders", *MANY, ttl=60)
    assert answer(kit) == answer(kit) == MANY
    kit.clock.advance(60 * SECOND)
    assert answer(kit) == MANY
    kit.clock.advance(1)
    assert answer(kit) == []
    kit.publish("orders", *MANY)
    assert answer(kit) == MANY
    kit.service.update_topic(named("orders"), {"ttl": "10"})
    kit.clock.advance(11 * SECOND)
    assert answer(kit) == []


@pytest.mark.usefixtures("encoded")
def test_shared_run_of_a_recreated_topic_is_not_shown(kit: Kit) -> None:
    kit.publish("orders", *MANY)
    assert answer(kit) == MANY
    before = kit.ids()
    kit.service.delete_topic(named("orders"))
    assert kit.service.cache.stats.weight == 0
    kit.create("orders")
    kit.publish("orders", *reversed(MANY))
    kit.create("others")
    kit.publish("others", *MANY)
    # At a stopped clock, the ids are equal, too.
    assert kit.ids("orders") == kit.ids("others") == before
    assert answer(kit) == answer(kit) == MANY[::-1]
    assert answer(kit, topic="others") == MANY


def test_encode_of_very_different_sizes_joins_none_larger_than_a_page(kit: Kit, encoded: list[int]) -> None:
    sizes = [300_000, *[0] * 100]
    kit.publish("orders", *map(bytes, sizes))
    for _ in range(2):
        assert list(map(len, answer(kit))) == sizes
    # The first 21 of the 101 messages are a part, which contains the large message.
    assert sum(encoded) == 101 + 21


def part(size: int) -> SharedList:
    found = SharedList(MessageList([], []))
    found.size = size
    return found


def test_share_beyond_the_room_keeps_the_newest_parts_and_all_runs() -> None:
    rows = run(0, *[b"x"] * 32)
    cache = MessageCache(10_000)
    cache.open(A, Ids(0))
    cache.add(A, [rows])
    found = cache.read(A, 0, 100, 1 << 20, 0)
    assert found is not None
    parts = found[0].shared
    assert parts == {}
    kept = [cache.share(parts, first, part(1000)) for first in (1, 3, 2, 0, 4)]
    # A quarter of the memory is reserved for parts; a part older than all others replaces none.
    assert (kept, list(parts)) == ([True, True, True, False, True], [3, 4])
    assert cache.stats.weight == rows.weight + 2000
    assert not cache.share(parts, 5, part(2501))
    assert list(parts) == [3, 4]
    cache.share(parts, 6, part(1000))
    cache.drop(A)
    assert (parts, cache.stats.weight) == ({}, 0)
