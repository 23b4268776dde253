"""Consumers of a service: registration, holds, and that queries change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.builders import DAY, HOUR, NOW_MS, SECOND
from tests.kit.messaging import Kit, P, memory, named, reader
from tests.support import each_raises
from tms_core.clock import CLOCK_ALLOWANCE_MS
from tms_core.errors import BadRequest, ConsumerNotFound, quoted
from tms_core.messaging import cached_rows
from tms_core.messaging.groups import positions
from tms_core.rowkey import MessageId

ORDERS = named("orders")
READ_NONE = MessageId(0, 0)
#: A message lives for a minute, and for two more minutes until a consumer has read it.
TTL_MS, HOLD_SECONDS = 60 * SECOND, 120


@pytest.fixture(params=["cached", "stored"])
def held(kit: Kit, request: pytest.FixtureRequest) -> Kit:
    """Return a kit with a consumer hold and one message each second, a to e."""
    kit.restart(consumer_hold_seconds=HOLD_SECONDS, cache_bytes=0 if request.param == "stored" else 1 << 20)
    kit.service.update_topic(ORDERS, {"ttl": "60"})
    for letter in (b"a", b"b", b"c", b"d", b"e"):
        kit.publish("orders", letter)
        kit.clock.advance(SECOND)
    return kit


def read_bytes(kit: Kit, start: MessageId | int | None = None) -> bytes:
    return b"".join(kit.payloads(start=start))


def put(kit: Kit, message: MessageId, name: str = "billing") -> None:
    kit.service.consumers.put(ORDERS, name, message)


def test_position_beyond_the_allowance_is_dated_now_and_reserves_no_ids(kit: Kit) -> None:
    put(kit, MessageId(NOW_MS + CLOCK_ALLOWANCE_MS, 0))
    assert kit.service.consumers.get(ORDERS, "billing").updated_ms == NOW_MS
    kit.publish("orders", b"a")
    assert [one.publish_ms for one in kit.ids()] == [NOW_MS]


def test_position_ahead_of_the_clock_within_the_allowance_precedes_new_ids(kit: Kit) -> None:
    last = MessageId(NOW_MS + CLOCK_ALLOWANCE_MS - 1, 5)
    put(kit, last)
    assert kit.service.consumers.get(ORDERS, "billing").updated_ms == last.publish_ms
    kit.publish("orders", b"a")
    assert kit.ids() == [last._replace(sequence=6)]


# --- visibility ------------------------------------------------------------------------------------------------------


def test_unread_message_after_its_ttl_stays_visible_until_read(held: Kit) -> None:
    ids = held.ids()
    put(held, ids[1])
    held.clock.advance(TTL_MS + HOUR // 60)
    assert read_bytes(held) == read_bytes(held, 0) == read_bytes(held, ids[0]) == read_bytes(held, NOW_MS) == b"cde"
    assert read_bytes(held, ids[3]) == b"de"
    assert held.payloads(start=ids[1], inclusive=False, transaction=reader()) == [b"c", b"d", b"e"]
    put(held, ids[3])
    assert read_bytes(held) == b"e"
    held.service.consumers.delete(ORDERS, "billing")
    assert read_bytes(held) == b""


def test_unread_message_after_the_longest_hold_is_hidden(held: Kit) -> None:
    put(held, READ_NONE)
    held.clock.advance(TTL_MS - 5 * SECOND + HOLD_SECONDS * SECOND)
    assert read_bytes(held) == b"abcde"
    held.clock.advance(1)
    assert read_bytes(held) == b"bcde"


def test_expired_message_stays_hidden_after_consumer_changes(held: Kit) -> None:
    ids = held.ids()
    held.clock.advance(TTL_MS - 3 * SECOND + 1)
    assert read_bytes(held) == b"de"
    put(held, READ_NONE)
    held.clock.advance(DAY // 24 // 60)
    assert read_bytes(held) == b"de"
    put(held, ids[4])
    assert read_bytes(held) == b""
    put(held, ids[3])
    assert read_bytes(held) == b""


def test_second_consumer_starts_with_messages_held_for_the_first(held: Kit) -> None:
    ids = held.ids()
    put(held, ids[1], "slow")
    held.clock.advance(TTL_MS)
    put(held, READ_NONE, "new")
    put(held, ids[4], "slow")
    assert read_bytes(held) == b"cde"


def test_messages_without_a_consumer_hold_expire_unread(held: Kit) -> None:
    held.restart(consumer_hold_seconds=None)
    put(held, READ_NONE)
    held.clock.advance(TTL_MS - 3 * SECOND + 1)
    assert read_bytes(held) == b"de"


def test_consumer_of_a_recreated_topic_holds_nothing(held: Kit) -> None:
    put(held, READ_NONE)
    put(held, READ_NONE, "other")
    held.service.delete_topic(ORDERS)
    held.create("orders", ttl="60")
    with pytest.raises(ConsumerNotFound):
        held.service.consumers.get(ORDERS, "billing")
    assert held.service.consumers.lags(ORDERS) == ([], held.clock.now_ms())
    held.publish("orders", b"x")
    held.clock.advance(TTL_MS + 1)
    assert read_bytes(held) == b""
    put(held, READ_NONE)
    assert [key[-7:] for key, _ in held.side.rows(b"c", b"d", 10).items] == [b"billing"]


def test_unread_payloads_of_a_transaction_stay_visible(held: Kit) -> None:
    held.put("orders", P, b"x", b"y")
    held.publish("orders", pointer=P)
    ids = held.ids()
    assert len(ids) == 7
    put(held, ids[5])
    held.clock.advance(TTL_MS + SECOND)
    assert read_bytes(held, ids[5]) == b"xy"
    assert held.payloads(start=ids[5], inclusive=False) == [b"y"]
    put(held, ids[6])
    assert read_bytes(held) == b""


# --- limits ----------------------------------------------------------------------------------------------------------


def test_consumer_beyond_the_most_names_is_rejected(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "MAX_NAMES", 3)
    kit.create("bills")
    for name in ("a", "b", "c"):
        put(kit, READ_NONE, name)
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"\b3 .*tms consumer delete default:orders NAME"):
            put(kit, READ_NONE, "d")
        # An existing consumer may still move, and another topic has its own limit.
        put(kit, MessageId(NOW_MS, 0), "a")
        kit.restart()
    kit.service.consumers.put(named("bills"), "d", READ_NONE)
    kit.service.consumers.delete(ORDERS, "b")
    put(kit, READ_NONE, "d")
    with pytest.raises(BadRequest):
        put(kit, READ_NONE, "b")
    assert [key[-1:] for key, _ in kit.side.rows(b"c", b"d", 10).items] == [b"d", b"a", b"c", b"d"]


def test_consumers_of_another_server_count_after_forget(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "MAX_NAMES", 3)
    put(kit, READ_NONE, "a")
    kit.serve().consumers.put(ORDERS, "b", READ_NONE)
    kit.serve().consumers.put(ORDERS, "c", READ_NONE)
    kit.service.invalidate()
    with pytest.raises(BadRequest):
        put(kit, READ_NONE, "d")


# --- responses -------------------------------------------------------------------------------------------------------


def test_lags_of_consumers_match_a_poll_and_move_nothing(held: Kit) -> None:
    ids = held.ids()
    for name, read in (("one", ids[0]), ("all", ids[4]), ("none", READ_NONE)):
        put(held, read, name)
    before = list(held.side.rows(b"", None, 100).items)
    for _ in range(2):
        lags, now_ms = held.service.consumers.lags(ORDERS)
        assert now_ms == held.clock.now_ms()
        assert [(found.position.name, found.messages, found.seconds(now_ms)) for found in lags] == [
            ("all", 0, 0.0),
            ("none", 5, 5.0),
            ("one", 4, 4.0),
        ]
        assert read_bytes(held) == b"abcde"
    assert held.side.rows(b"", None, 100).items == before


def test_lags_of_many_messages_count_up_to_the_limit(held: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "COUNTED_ROWS", 3)
    held.publish("orders", *[b"x"] * 5)
    held.service.consumers.put(named("orders"), "billing", MessageId(0, 0))
    [found], _ = held.service.consumers.lags(named("orders"))
    assert (found.messages, found.at_least) == (3, True)


def test_lags_after_expiry_count_no_expired_message_and_report_the_loss(held: Kit) -> None:
    ids = held.ids()
    put(held, ids[0])
    held.clock.advance(TTL_MS + HOLD_SECONDS * SECOND - 2 * SECOND + 1)
    [found], _ = held.service.consumers.lags(ORDERS)
    assert (found.messages, found.expired) == (1, True)
    assert read_bytes(held) == b"e"


def test_lag_of_a_consumer_that_sleeps_past_the_ttl_reports_the_loss(kit: Kit) -> None:
    kit.service.update_topic(ORDERS, {"ttl": "60"})
    kit.service.consumers.put(ORDERS, "billing", READ_NONE)
    for waited_ms, expired in ((0, False), (1, False), (TTL_MS - 1, False), (1, True)):
        kit.clock.advance(waited_ms)
        [found], _ = kit.service.consumers.lags(ORDERS)
        assert found.expired is expired
    kit.service.consumers.put(ORDERS, "billing", READ_NONE)
    kit.clock.advance(1)
    [found], _ = kit.service.consumers.lags(ORDERS)
    assert not found.expired


# --- valid names and positions ---------------------------------------------------------------------------------------


@pytest.fixture
def orders() -> Iterator[Kit]:
    made = memory(None)  # type: ignore[arg-type]
    made.create("orders")
    yield made
    made.close()


@pytest.mark.parametrize("name", ["", "a.b", "ä", "a:b", "a b", "a\n", "x" * 256])
def test_invalid_consumer_name_is_rejected(orders: Kit, name: str) -> None:
    service = orders.service.consumers
    each_raises(
        BadRequest,
        lambda: service.put(ORDERS, name, READ_NONE),
        lambda: service.get(ORDERS, name),
        match=re.escape(quoted(name)),
    )
    with pytest.raises(BadRequest):
        service.delete(ORDERS, name)
    assert service.lags(ORDERS)[0] == []


@pytest.mark.parametrize("message", [MessageId(-1, 0), MessageId(0, 0, -1, 0)])
def test_position_with_a_negative_time_is_rejected(orders: Kit, message: MessageId) -> None:
    with pytest.raises(BadRequest, match="1970"):
        orders.service.consumers.put(ORDERS, "billing", message)


def test_position_with_the_highest_id_has_no_lag(orders: Kit) -> None:
    orders.publish("orders", b"x")
    orders.service.consumers.put(ORDERS, "billing", MessageId(2**63 - 1, 65_535, 2**63 - 1, 65_535))
    [found], _ = orders.service.consumers.lags(ORDERS)
    assert (found.messages, found.oldest_ms) == (0, None)
