"""Holds for unread messages: extent, duration, and agreement with readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from janitor.report import Report
from janitor.rules.policy import Frontier, Hold, Reason, Rule
from janitor.state.base import EVERYTHING
from janitor.sweep.consumers import ConsumerHolds
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Call, Kit, Topic, janitor, pointer, topic, watch
from tests.kit.messaging import READ_NONE, fetch
from tests.salted import SaltedStore
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.consumers.positions import Floor, Position, Positions
from tms_core.errors import StoreError
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import Cutoff, MessageId, MessageKey
from tms_core.tables.base import Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries, MemorySide, SideTable
from tms_core.topic import TopicId, TopicMetadata

TTL_SECONDS, HOLD_SECONDS = 3600, 7200
#: Earlier messages are due.
DUE_MS = NOW_MS - HOUR


@pytest.fixture(params=[MemoryStore, SaltedStore], ids=["whole", "salted"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with request.param() as opened:
        yield opened


class ConsumedTopic:
    """A topic in a store, and the positions of its consumers."""

    def __init__(self, store: Store, side: SideTable | None = None) -> None:
        self.store, self.side = store, side or MemorySide()
        self.positions = Positions(self.side)
        self.orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS)


@pytest.fixture
def consumed(store: Store) -> ConsumedTopic:
    return ConsumedTopic(store)


def read(
    consumed: ConsumedTopic, message: MessageId, name: str = "billing", generation: int = 1, topic: Topic | None = None
) -> None:
    """Set the position of a consumer that started with the first message."""
    metadata = TopicMetadata((topic or consumed.orders).id, generation, TTL_SECONDS)
    consumed.positions.put(metadata, Position(name, message, NOW_MS, 0))


def kit_of(consumed: ConsumedTopic, *, hold_seconds: int = HOLD_SECONDS, **options: Any) -> Kit:
    """Return a janitor that holds unread messages and has adopted the store."""
    return janitor(consumed.store, side=consumed.side, consumer_hold_seconds=hold_seconds, batch_rows=3, **options)


def rows_by_hold(report: Report) -> dict[str, int]:
    """Return the number of rows by hold; deleted rows have an empty name."""
    found: dict[str, int] = {}
    for entry in report.topics:
        word = str(entry.held or "")
        found[word] = found.get(word, 0) + entry.rows
    return found


def test_unread_messages_are_held_and_shown(consumed: ConsumedTopic) -> None:
    times = [DUE_MS - back for back in (9, 8, 7, 6, 5)]
    consumed.orders.plain(*times, NOW_MS)
    read(consumed, MessageId(times[1], 1))
    kit = kit_of(consumed)
    for report in (kit.engine.preview(), kit.engine.run_once(adopt=True), kit.engine.run_once()):
        assert rows_by_hold(report)["consumer"] == report.held_rows() == 3
        [note] = [note for note in report.guards if note.guard == "consumer"]
        assert (
            note.message
            == "default:orders keeps messages that consumer billing has not read, for up to 7200 s after their ttl"
        )
    assert consumed.orders.times() == [*times[2:], NOW_MS]
    read(consumed, MessageId(times[3], 3))
    assert rows_by_hold(kit.engine.run_once()) == {"": 2, "consumer": 1}
    read(consumed, MessageId(times[4], 4))
    assert rows_by_hold(kit.engine.run_once()) == {"": 1}
    assert consumed.orders.times() == [NOW_MS]


@pytest.mark.parametrize(("wait_ms", "left"), [(-1, 3), (0, 3), (1, 2), (SECOND + 1, 1), (2 * SECOND + 1, 0)])
def test_longest_hold_that_is_over_deletes_unread_rows(consumed: ConsumedTopic, wait_ms: int, left: int) -> None:
    consumed.orders.plain(NOW_MS, NOW_MS + SECOND, NOW_MS + 2 * SECOND)
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    kit.engine.run_once(adopt=True)
    report = kit.run_after((TTL_SECONDS + HOLD_SECONDS) * SECOND + wait_ms)
    assert rows_by_hold(report) == {word: rows for word, rows in (("", 3 - left), ("consumer", left)) if rows}
    assert len(consumed.orders.times()) == left


def test_sweep_without_consumers_of_the_topic_holds_nothing(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(DUE_MS - 1)
    read(consumed, READ_NONE, generation=2)
    read(consumed, READ_NONE, topic=topic(consumed.store, "default:other", ttl_seconds=60))
    kit = kit_of(consumed)
    assert rows_by_hold(kit.engine.preview()) == {"first_contact": 1}
    read(consumed, READ_NONE)
    assert rows_by_hold(kit.engine.preview()) == {"consumer": 1}
    assert rows_by_hold(janitor(consumed.store).engine.run_once(adopt=True)) == {"": 1}


def test_consumer_with_the_largest_lag_is_named(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(DUE_MS - 2, DUE_MS - 1)
    for name, read_ms in (("a", NOW_MS), ("b", DUE_MS - 3), ("c", DUE_MS - 2)):
        read(consumed, MessageId(read_ms, 0), name)
    [note] = [note.message for note in kit_of(consumed).engine.preview().guards if note.guard == "consumer"]
    assert "messages that consumer b has not read" in note


def test_sweep_holds_the_payloads_of_held_messages(consumed: ConsumedTopic) -> None:
    begin_ms = DUE_MS - 30 * MINUTE
    used, free = pointer(begin_ms), pointer(begin_ms, 1)
    consumed.orders.stored(used, begin_ms, begin_ms + 1).stored(free, begin_ms)
    consumed.orders.plain(begin_ms + 2).ref(used, DUE_MS - 5)
    read(consumed, MessageId(begin_ms + 2, 3))
    kit = kit_of(consumed)
    report = kit.engine.run_once(adopt=True)
    assert rows_by_hold(report) == {"": 2, "consumer": 1}
    assert report.totals.kept[Reason.REFERENCED] == 2
    assert consumed.orders.times() == [DUE_MS - 5]
    assert consumed.orders.stored_times() == [begin_ms, begin_ms + 1]
    read(consumed, MessageId(DUE_MS - 5, 4, begin_ms + 1, 1))
    assert rows_by_hold(kit.engine.run_once()) == {"": 3}
    assert consumed.orders.stored_times() == []


def test_unread_invalid_rows_are_inverted_and_claimed(consumed: ConsumedTopic) -> None:
    invalid = pointer(NOW_MS - 5 * HOUR)
    consumed.orders.tx(invalid, DUE_MS - 5)
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    kit.snapshots.invalid = [invalid]
    kit.engine.run_once(adopt=True)
    assert consumed.orders.pointers() == [-invalid]
    kit.clock.advance(DAY)
    consumed.orders.plain(kit.clock.now_ms() - 2 * HOUR)
    report = kit.engine.run_once()
    assert rows_by_hold(report) == {"": 1, "consumer": 1}
    assert report.boundary is not None
    assert report.boundary >= invalid


def test_sweep_with_frontier_and_consumer_holds_uses_the_lower_cutoff(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(*(NOW_MS - back * MINUTE for back in (59, 40, 20)))
    read(consumed, MessageId(NOW_MS - 59 * MINUTE, 0))
    kit = kit_of(consumed)
    kit.engine.run_once(adopt=True)
    consumed.orders.describe(ttl_seconds=60)
    kit.clock.advance(2 * MINUTE)
    # The first is due by time, the others by the shorter TTL.
    assert rows_by_hold(kit.engine.run_once()) == {"": 1, "frontier": 2}
    kit.clock.advance(30 * MINUTE)
    # The second would be due by time now.
    assert rows_by_hold(kit.engine.run_once()) == {"frontier": 2}
    kit.engine.approve((EVERYTHING,), clock=True)
    assert rows_by_hold(kit.engine.run_once()) == {"consumer": 2}


@pytest.mark.parametrize("hold", [Hold.PAUSED, Hold.PROTECTED, Hold.QUARANTINED])
def test_lower_of_a_closed_frontier_returns_it_unchanged(consumed: ConsumedTopic, hold: Hold) -> None:
    consumed.orders.plain(DUE_MS - 1)
    read(consumed, READ_NONE)
    holds = ConsumerHolds(Floor(consumed.positions, consumed.store, HOLD_SECONDS))
    metadata = TopicMetadata(consumed.orders.id, 1, TTL_SECONDS)
    frontier = Frontier.closed(NOW_MS, metadata, hold)
    assert holds.lower(metadata, frontier) is frontier
    assert holds.waiting == {}
    lowered = holds.lower(metadata, Frontier.open(NOW_MS, metadata))
    assert (lowered.cutoff, lowered.due, lowered.hold) == (Cutoff(DUE_MS - 1), Cutoff(DUE_MS), Hold.CONSUMER)
    assert list(holds.waiting) == [consumed.orders.id]
    assert holds.lower(metadata, frontier) is frontier
    assert holds.waiting == {}, "the topic does not wait"
    consumed.positions.put(metadata, Position("billing", MessageId(NOW_MS, 0), NOW_MS, 0))
    assert ConsumerHolds(Floor(consumed.positions, consumed.store, HOLD_SECONDS)).lower(metadata, frontier) is frontier


def test_unread_messages_with_their_own_ttl_wait_hidden(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(DUE_MS - 9, NOW_MS - 2, NOW_MS - 1)
    key = MessageKey(consumed.orders.id, 1, NOW_MS - 1, 2).pack()
    expiries = Expiries(consumed.side)
    expiries.put([(key, NOW_MS)])
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    assert rows_by_hold(kit.engine.run_once(adopt=True)) == {"consumer": 2}
    assert [expiry.key for expiry in expiries.due(NOW_MS, 10)] == [key]
    read(consumed, MessageId(DUE_MS - 9, 0))
    assert rows_by_hold(kit.engine.run_once()) == {"": 2}
    assert consumed.orders.times() == [NOW_MS - 2]


def test_server_and_janitor_agree_on_existing_messages(store: Store) -> None:
    clock, side = ManualClock(NOW_MS, monotonic_ms=DAY), MemorySide()
    consumed = ConsumedTopic(store, side)
    orders = consumed.orders
    with MessagingService(
        store, clock, ServiceOptions(cache_bytes=0, consumer_hold_seconds=HOLD_SECONDS), side=side
    ) as service:
        kit = kit_of(consumed, clock=clock)
        kit.engine.run_once(adopt=True)
        for _ in range(6):
            service.publish(orders.id, [b"x"])
            clock.advance(10 * MINUTE)
        service.consumers.put(orders.id, "billing", MessageId(NOW_MS, 0))
        left = []
        for _ in range(20):
            clock.advance(10 * MINUTE + 1)
            fetched = [MessageId.parse(message.id) for message in fetch(service, orders.id)]
            kit.engine.run_once()
            assert [message.publish_ms for message in fetched] == orders.times()
            left.append(len(fetched))
        # The first one is read; the others are deleted two hours after their TTL.
        assert left == [5] * 12 + [4, 3, 2, 1, 0, 0, 0, 0]


def test_topic_whose_unread_messages_cannot_be_found_is_held(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(DUE_MS - HOLD_SECONDS * SECOND - 1, DUE_MS - 2, DUE_MS - 1)
    other = topic(consumed.store, "default:other", ttl_seconds=TTL_SECONDS).plain(DUE_MS - 1)
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    kit.engine.run_once(adopt=True)
    consumed.orders.plain(DUE_MS - HOLD_SECONDS * SECOND - 2)
    other.plain(DUE_MS - 1)
    looks = [0]

    def fail(call: Call) -> None:
        # A sweep searches for unread messages first.
        if call.name == "message.keys" and not looks[0]:
            looks[0] += 1
            raise StoreError("a block is corrupt.")

    watch(consumed.store, before=fail)
    assert rows_by_hold(kit.engine.run_once()) == {"": 2, "consumer": 2}
    assert (consumed.orders.times(), other.times()) == ([DUE_MS - 2, DUE_MS - 1], [])


def test_unreadable_positions_delete_nothing(consumed: ConsumedTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    consumed.orders.plain(DUE_MS - 1)
    kit = kit_of(consumed)
    monkeypatch.setattr(Positions, "all", raising(StoreError("the disk is gone.")))
    with pytest.raises(StoreError, match="the disk is gone"):
        kit.engine.run_once(adopt=True)
    assert consumed.orders.times() == [DUE_MS - 1]


def test_long_held_rows_are_counted_at_intervals(consumed: ConsumedTopic) -> None:
    consumed.orders.plain(*(NOW_MS + number * MINUTE for number in range(60)))
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    kit.engine.run_once(adopt=True)
    kit.clock.advance(HOUR + 1)
    counts = []
    for _ in range(40):
        counts.append(rows_by_hold(kit.engine.run_once(incremental=True)).get("consumer"))
        kit.clock.advance(20 * SECOND)
    # Counted when the hold starts, and then after each hundredth of the longest hold: 72 s.
    assert counts[0] == 1
    assert [count for count in counts if count] == sorted(count for count in counts if count)
    assert 10 <= sum(count is not None for count in counts) <= 14
    notes = kit.state.note("overdue")
    assert [(item["held"], item["rows"]) for item in notes] == [("consumer", max(count or 0 for count in counts))]
    assert rows_by_hold(kit.run_after(DAY, incremental=True)) == {"": 60}
    assert kit.state.note("overdue") == []


def test_hold_that_starts_between_two_counts_is_shown_at_once(consumed: ConsumedTopic) -> None:
    kit = kit_of(consumed)
    step_ms = HOLD_SECONDS * SECOND // 100
    kit.clock.advance(step_ms - DUE_MS % step_ms)
    consumed.orders.plain(kit.clock.now_ms() - HOUR + 5 * SECOND)
    read(consumed, READ_NONE)
    assert rows_by_hold(kit.engine.run_once(adopt=True)) == {}
    assert rows_by_hold(kit.run_after(6 * SECOND, incremental=True)) == {"consumer": 1}


def test_held_payloads_stay_noted_by_a_run_that_does_not_count_them(consumed: ConsumedTopic) -> None:
    begin_ms = NOW_MS - 90 * MINUTE
    consumed.orders.ref(pointer(begin_ms), begin_ms + 5).stored(pointer(begin_ms), begin_ms + 6)
    read(consumed, READ_NONE)
    kit = kit_of(consumed)
    kit.engine.run_once(adopt=True)
    overdue = kit.state.note("overdue")
    assert [(item["table"], item["held"]) for item in overdue] == [("message", "consumer"), ("payload", "consumer")]
    kit.engine.run_once(incremental=True)
    assert kit.state.note("overdue") == overdue


def test_report_of_many_waiting_topics_names_only_the_first() -> None:
    consumed = ConsumedTopic(MemoryStore())
    for number in range(25):
        made = topic(consumed.store, f"default:t{number:02}", ttl_seconds=TTL_SECONDS).plain(DUE_MS - 1)
        read(consumed, READ_NONE, topic=made)
    notes = [note.message for note in kit_of(consumed).engine.preview().guards if note.guard == "consumer"]
    assert len(notes) == 21
    assert notes[0].startswith("default:t00 keeps")
    assert notes[20] == "5 more topics keep unread messages"


def test_apply_of_a_plan_keeps_unread_messages(consumed: ConsumedTopic, tmp_path: Path) -> None:
    consumed.orders.plain(DUE_MS - 3, DUE_MS - 2, DUE_MS - 1)
    read(consumed, MessageId(DUE_MS - 3, 0))
    kit = kit_of(consumed)
    kit.engine.adopt()
    planned = kit.engine.preview(out=tmp_path / "plan")
    read(consumed, READ_NONE, "late")
    done = kit.engine.carry_out(tmp_path / "plan")
    assert (planned.total(Rule.EXPIRED), done.total(Rule.EXPIRED)) == (1, 0)
    consumed.positions.delete(TopicMetadata(TopicId("default", "orders"), 1, TTL_SECONDS), "late")
    read(consumed, MessageId(NOW_MS, 0))
    assert kit.engine.carry_out(tmp_path / "plan").total(Rule.EXPIRED) == 1
    assert consumed.orders.times() == [DUE_MS - 2, DUE_MS - 1]
