"""The background count of consumer lag: results, stored values, and short locks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from janitor.state.records import Note
from janitor.stats import consumer_lag as lag
from janitor.stats.consumer_lag import LagCount
from janitor.sweep.executor import Pacer
from tests.builders import DAY, HOUR, NOW_MS, SECOND, Call, Topic, pointer, unknown_topic, watch_state
from tests.janitor.stats.conftest import CountKit
from tests.kit.messaging import READ_NONE
from tests.support import raising
from tms_core.consumers.claim_rows import pack
from tms_core.consumers.claims import ConsumerGroup, GroupClaim
from tms_core.consumers.lag import PAGE_ROWS, LagTables
from tms_core.consumers.positions import Floor, Position, Positions
from tms_core.errors import StopRequested, StoreError
from tms_core.rowkey import MessageId
from tms_core.tables.read_only import read_only
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import InProgress, VisibilityState


def read(kit: CountKit, orders: Topic, message: MessageId, name: str = "billing") -> None:
    metadata = TopicMetadata(orders.id, orders.generation, 3600)
    Positions(kit.side).put(metadata, Position(name, message, NOW_MS - 5, NOW_MS - HOUR))


def counter(kit: CountKit, *, rate: int | None = None, **options: Any) -> LagCount:
    store, side, clock = kit.store, kit.side, kit.clock
    floor = Floor(Positions(side), store, options.pop("hold_seconds")) if "hold_seconds" in options else None
    is_stopping = options.pop("is_stopping", lambda: False)

    def ending() -> None:
        if is_stopping():
            raise StopRequested("the count was stopped.")

    pacer = options.pop("pacer", None) or Pacer(rate, clock, ending)
    return LagCount(LagTables(read_only(store), Expiries(side), floor), side, kit.state, clock, pacer, **options)


def read_lags(kit: CountKit) -> dict[str, int]:
    return {
        f"{item['topic']}/{item['consumer']}": item["lag_messages"] for item in kit.state.note(Note.CONSUMERS) or ()
    }


def test_lag_of_consumers_is_saved_with_its_time(kit: CountKit) -> None:
    orders = kit.topic("orders", ttl_seconds=3600, generation=3)
    orders.plain(NOW_MS - 2 * HOUR, NOW_MS - 9, NOW_MS - 8, NOW_MS - 7)
    read(kit, orders, MessageId(NOW_MS - 9, 1))
    read(kit, orders, READ_NONE, "audit")
    before = kit.side.rows(b"", None, 10)
    counter(kit).step()
    common = {
        "tms_namespace": "default",
        "topic": "orders",
        "generation": 3,
        "updated_ms": NOW_MS - 5,
        "expired": False,
        "counted_ms": NOW_MS,
        "open_claims": 0,
        "redelivered": 0,
    }
    assert kit.state.note(Note.CONSUMERS) == [
        {**common, "consumer": "audit", "position_ms": 0, "lag_messages": 3, "oldest_unread_ms": NOW_MS - 9},
        {**common, "consumer": "billing", "position_ms": NOW_MS - 9, "lag_messages": 2, "oldest_unread_ms": NOW_MS - 8},
    ]
    assert kit.side.rows(b"", None, 10) == before


IN_PROGRESS, INVALID, COMMITTED, NEWER = (pointer(NOW_MS - 40 + ten) for ten in (0, 10, 20, 30))
READER = VisibilityState(
    NOW_MS - 15, COMMITTED, COMMITTED, array("q", [INVALID]), (InProgress(IN_PROGRESS, NOW_MS + DAY, 0, None),)
).dummy_transaction


def claim(kit: CountKit, orders: Topic, claims: list[tuple[int, int, int]]) -> None:
    """Write claims, each with the time of its message, its transaction and its number of deliveries."""
    group = ConsumerGroup(orders.id, orders.generation, "billing")
    for at_ms, holder, tries in claims:
        kit.side.put([pack(group, GroupClaim(MessageId(at_ms - 1, 9), MessageId(at_ms, 9), holder, tries))])


def read_claims(kit: CountKit) -> dict[str, tuple[int, int]]:
    return {
        item["consumer"]: (item["open_claims"], item["redelivered"]) for item in kit.state.note(Note.CONSUMERS) or ()
    }


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([(1, IN_PROGRESS, 1), (2, NEWER, 1)], (2, 0)),
        ([(1, IN_PROGRESS, 2), (2, IN_PROGRESS, 3)], (2, 2)),
        ([(1, INVALID, 1), (2, 0, 1)], (0, 0)),
        ([(1, INVALID, 2), (2, 0, 2)], (0, 2)),
        ([(1, COMMITTED, 2), (3, COMMITTED, 2)], (0, 0)),
        ([(-9, IN_PROGRESS, 2)], (0, 0)),
    ],
    ids=["open", "open again", "void", "void again", "processed", "after the position"],
)
def test_lag_of_a_group_counts_open_and_redelivered_claims(
    kit: CountKit, claims: list[tuple[int, int, int]], expected: tuple[int, int]
) -> None:
    orders = kit.topic("orders", ttl_seconds=3600).plain(NOW_MS)
    read(kit, orders, MessageId(NOW_MS - 5, 9))
    read(kit, orders, READ_NONE, "billing2")
    claim(kit, orders, [(NOW_MS - 5 + after, holder, tries) for after, holder, tries in claims])
    before = kit.side.rows(b"", None, 10)
    counter(kit, reader=READER).step()
    assert read_claims(kit) == {"billing": expected, "billing2": (0, 0)}
    assert kit.side.rows(b"", None, 10) == before


@pytest.mark.parametrize(
    ("holders", "unread"),
    [
        ([COMMITTED, COMMITTED], 1),
        ([COMMITTED, IN_PROGRESS], 2),
        ([COMMITTED, INVALID], 2),
        ([IN_PROGRESS, COMMITTED], 3),
        ([NEWER], 3),
    ],
    ids=["processed", "processed and open", "processed and void", "processed after an open claim", "unseen"],
)
def test_lag_after_committed_claims_counts_them_as_read(kit: CountKit, holders: list[int], unread: int) -> None:
    orders = kit.topic("orders", ttl_seconds=3600).plain(*range(NOW_MS - 9, NOW_MS - 5))
    read(kit, orders, MessageId(NOW_MS - 9, 9))
    claim(kit, orders, [(NOW_MS - 8 + at, holder, 1) for at, holder in enumerate(holders)])
    counter(kit, reader=READER).step()
    assert read_lags(kit) == {"orders/billing": unread}
    [figures] = kit.state.note(Note.CONSUMERS) or []
    assert figures["position_ms"] == NOW_MS - 6 - unread
    assert figures["updated_ms"] == NOW_MS - 5
    # Without a snapshot the claims are undecided.
    kit.clock.advance(60 * SECOND)
    counter(kit).step()
    assert read_lags(kit) == {"orders/billing": 3}


def test_lag_counts_claims_against_the_rate(kit: CountKit) -> None:
    orders = kit.topic("orders", ttl_seconds=3600).plain(NOW_MS)
    read(kit, orders, READ_NONE)
    claim(kit, orders, [(NOW_MS + at, IN_PROGRESS, 1) for at in range(4)])
    counter(kit, rate=1).step()
    assert kit.clock.monotonic_ms() - DAY == 5 * SECOND


def test_lag_with_a_damaged_claim_counts_the_others(kit: CountKit, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        made = kit.topic(name, ttl_seconds=3600).plain(NOW_MS)
        read(kit, made, READ_NONE)
    kit.side.put([(ConsumerGroup(TopicId("default", "a"), 1, "billing").prefix + b"x", b"")])
    counter(kit).step()
    assert read_lags(kit) == {"b/billing": 1}
    assert len(caplog.messages) == 1
    assert "the lag of the consumers of default:a could not be counted: the claim" in caplog.messages[0]


def test_lag_with_a_consumer_hold_counts_held_messages(kit: CountKit) -> None:
    orders = kit.topic("orders", ttl_seconds=3600)
    orders.plain(NOW_MS - HOUR - 61 * SECOND, NOW_MS - HOUR - 1, NOW_MS)
    Positions(kit.side).put(TopicMetadata(orders.id, 1, 3600), Position("billing", READ_NONE, NOW_MS, 0))
    counter(kit).step()
    assert read_lags(kit) == {"orders/billing": 1}
    kit.clock.advance(1)
    counter(kit, hold_seconds=60).step()
    assert read_lags(kit) == {"orders/billing": 2}


def test_lag_of_deleted_or_unreadable_topics_is_none(kit: CountKit) -> None:
    for name, generation in (("gone", 1), ("deleted", -1), ("again", 2), ("unreadable", 1)):
        made = unknown_topic(kit.store, f"default:{name}").plain(NOW_MS)
        if name == "unreadable":
            made.write_metadata(b"{")
        elif name != "gone":
            made.describe(ttl_seconds=60, generation=generation)
        read(kit, made, READ_NONE)
    kept = kit.topic("kept")
    read(kit, kept, READ_NONE)
    count = counter(kit)
    count.step()
    assert read_lags(kit) == {"kept/billing": 0}
    kept.describe(ttl_seconds=60, generation=-1)
    count.step()
    assert kit.state.note(Note.CONSUMERS) == []


def test_lag_of_an_earlier_process_stays_until_counted_again(kit: CountKit) -> None:
    orders, other = (kit.topic(name).plain(NOW_MS) for name in ("orders", "other"))
    for one in (orders, other):
        read(kit, one, READ_NONE)
    counter(kit).step()
    orders.plain(NOW_MS + 1)
    Positions(kit.side).delete(TopicMetadata(other.id, 1, 60), "billing")
    counter(kit, is_stopping=lambda: True).step()
    assert read_lags(kit) == {"orders/billing": 1}
    counter(kit).step()
    assert read_lags(kit) == {"orders/billing": 2}


def test_lag_that_an_adoption_has_removed_is_saved_again(kit: CountKit) -> None:
    read(kit, kit.topic("orders").plain(NOW_MS), READ_NONE)
    count = counter(kit)
    count.step()
    kit.state.save_note(Note.CONSUMERS, None)
    count.step()
    assert read_lags(kit) == {"orders/billing": 1}


def test_lag_by_positions_that_cannot_be_read_is_an_error(kit: CountKit, monkeypatch: pytest.MonkeyPatch) -> None:
    count = counter(kit)
    monkeypatch.setattr(kit.side, "rows", raising(StoreError("the disk is gone.")))
    with pytest.raises(StoreError, match="the disk is gone"):
        count.step()


def test_lag_of_a_far_consumer_does_not_delay_other_consumers(kit: CountKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "TURN_ROWS", PAGE_ROWS)
    far = kit.topic("a-far", ttl_seconds=86400).plain(*range(NOW_MS, NOW_MS + 3 * PAGE_ROWS + 1))
    near = kit.topic("near", ttl_seconds=86400).plain(NOW_MS)
    read(kit, far, READ_NONE)
    read(kit, near, READ_NONE)
    seen: list[dict[str, int]] = []

    def note(call: Call) -> None:
        if call.name == "state.save_note":
            seen.append({f"{item['topic']}": item["lag_messages"] for item in call.arguments[1]})
            near.plain(NOW_MS)

    watch_state(kit.state, before=note)
    counter(kit, rate=PAGE_ROWS // 50, refresh_seconds=40).step()
    assert seen[:2] == [{"near": 1}, {"near": 2}]
    assert seen[-1]["a-far"] == 3 * PAGE_ROWS + 1
