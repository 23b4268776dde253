"""Positions of consumers on every kind of side table: storage, holds and lag."""

from __future__ import annotations

import pytest

from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, Topic, topic, watch
from tests.hbase.conftest import hbase, hbase_tables
from tests.salted import SaltedStore
from tests.test_side import side
from tms_core.consumers import lag
from tms_core.consumers.lag import PAGE_ROWS, Lag
from tms_core.consumers.positions import Floor, Position, Positions, cutoff_at, unread_from
from tms_core.errors import FormatError
from tms_core.rowkey import Cutoff, MessageId, MessageKey, PayloadKey, time_prefix
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import Expiries, MemorySide, SideTable
from tms_core.topic import TopicId, TopicMetadata

__all__ = ["hbase", "hbase_tables", "side"]

ORDERS = TopicMetadata(TopicId("default", "orders"), 1, 3600)
READ_NONE = MessageId(0, 0)
#: The cutoff before which messages are due.
DUE = Cutoff(NOW_MS - HOUR)


def at(message: MessageId, name: str = "billing", since_ms: int = 0) -> Position:
    return Position(name, message, NOW_MS, since_ms)


def of(name: str, generation: int = 1) -> TopicMetadata:
    return TopicMetadata(TopicId.parse(name), generation, 3600)


@pytest.fixture(params=[MemoryStore, SaltedStore], ids=["whole", "salted"])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.param()
    return made


@pytest.fixture
def orders(store: Store) -> Topic:
    return topic(store, "default:orders", ttl_seconds=3600)


# --- positions -------------------------------------------------------------------------------------------------------


def test_position_written_again_or_deleted_has_the_last_value(side: SideTable) -> None:
    positions = Positions(side)
    first, later = at(READ_NONE), Position("billing", MessageId(NOW_MS, 65_535, 5, 6), NOW_MS + 1, NOW_MS - 1)
    for position in (first, later, first):
        positions.put(ORDERS, position)
        assert positions.get(ORDERS, "billing") == position
    assert positions.get(ORDERS, "billin") is None
    positions.delete(ORDERS, "billing")
    positions.delete(ORDERS, "billing")
    assert positions.get(ORDERS, "billing") is None
    assert positions.all() == {}


def test_positions_of_several_topics_and_generations_stay_apart(side: SideTable) -> None:
    positions = Positions(side)
    # A colon is also a byte of a generation, and topics have common prefixes.
    lives = [of("default:orders"), of("default:orders", 0x3A3A), of("default:orders", 2), of("default:orders-b")]
    for number, life in enumerate(lives):
        for name in ("b", "a-b", "a"):
            positions.put(life, at(MessageId(number, 0), name))
    for number, life in enumerate(lives):
        assert positions.of(life) == [at(MessageId(number, 0), name) for name in ("a", "a-b", "b")]
    assert positions.all() == {(life.topic, life.generation): positions.of(life) for life in lives}
    positions.delete_previous(lives[1])
    assert {key for _, key in positions.all()} == {0x3A3A, 1}
    assert (lives[0].topic, 1) not in positions.all()


def test_positions_and_expiries_in_one_table_stay_apart(side: SideTable) -> None:
    positions, expiries = Positions(side), Expiries(side)
    key = MessageKey(ORDERS.topic, 1, NOW_MS, 0).pack()
    expiries.put([(key, NOW_MS + 1)])
    positions.put(ORDERS, at(READ_NONE))
    assert list(positions.all()) == [(ORDERS.topic, 1)]
    assert [expiry.key for expiry in expiries.due(NOW_MS + DAY, 10)] == [key]
    assert expiries.between(b"", None, 10).items == [(key, NOW_MS + 1)]


def test_position_of_an_invalid_row_raises() -> None:
    table = MemorySide()
    Positions(table).put(ORDERS, at(READ_NONE))
    [(key, value)] = table.rows(b"", None, 1).items
    table.put([(key, value + b"x")])
    with pytest.raises(FormatError, match=r"billing .*37 bytes"):
        Positions(table).get(ORDERS, "billing")
    table.put([(key, value), (b"cno topic", value)])
    assert list(Positions(table).all()) == [(ORDERS.topic, 1)]


# --- holds -----------------------------------------------------------------------------------------------------------


def cutoff_ms(store: Store, *positions: Position, max_hold_seconds: int = 86400, due: Cutoff = DUE) -> int:
    kept = Positions(MemorySide())
    for position in positions:
        kept.put(ORDERS, position)
    found = Floor(kept, store, max_hold_seconds).cutoff(ORDERS, due)
    assert found <= due
    return found.ms - DUE.ms


@pytest.mark.parametrize(
    ("times_ms", "read_ms", "expected_ms"),
    [
        ([-3, -2, -1], -3, -2),
        ([-3, -2, -1], -4, -3),
        ([-3, -2, -1], -2, -1),
        ([-3, -2, -1], -1, 0),
        ([-3, -2, 0], -2, 0),
        ([-3, 1], 1, 0),
        ([], -5, 0),
        ([-3], 10, 0),
    ],
)
def test_cutoff_is_at_the_oldest_unread(
    store: Store, orders: Topic, times_ms: list[int], read_ms: int, expected_ms: int
) -> None:
    for time_ms in times_ms:
        orders.store.message.put([(MessageKey(orders.id, 1, DUE.ms + time_ms, 0).pack(), MessageValue(None, b"x"))])
    assert cutoff_ms(store, at(MessageId(DUE.ms + read_ms, 0))) == expected_ms


@pytest.mark.parametrize(("max_hold_seconds", "expected_ms"), [(9, -9_000), (10, -10_000), (11, -10_000)])
def test_cutoff_with_a_longest_hold_holds_nothing_beyond_it(
    store: Store, orders: Topic, max_hold_seconds: int, expected_ms: int
) -> None:
    orders.plain(*(DUE.ms - back for back in (12_000, 10_000, 9_000, 1_000)))
    assert cutoff_ms(store, at(MessageId(DUE.ms - 12_000, 0)), max_hold_seconds=max_hold_seconds) == expected_ms


def test_unrecognized_and_other_generations_are_not_unread(store: Store, orders: Topic) -> None:
    prefix = time_prefix(ORDERS.topic.prefix, 1, DUE.ms - 9)
    store.message.put([(prefix + tail, MessageValue(None, b"x")) for tail in (b"", b"\0", b"\0\0\0")])
    orders.at(2).plain(DUE.ms - 8)
    orders.plain(DUE.ms - 3)
    assert cutoff_ms(store, at(READ_NONE)) == -3


def test_position_inside_payloads_keeps_their_row_unread(store: Store, orders: Topic) -> None:
    stored_ms = DUE.ms - 90
    for number in range(3):
        key = (orders.id, 1, 7, stored_ms, number)
        store.payload.put([(_payload_key(*key), b"x")])
    orders.ref(-7, DUE.ms - 50).tx(7, DUE.ms - 40)
    for sequence, expected in ((0, -50), (1, -50), (2, -40)):
        assert cutoff_ms(store, at(MessageId(DUE.ms - 50, 0, stored_ms, sequence))) == expected
    # The id of a payload, of a row with its own payload, and of a deleted row.
    assert cutoff_ms(store, at(MessageId(DUE.ms - 40, 1, stored_ms, 0))) == 0
    assert cutoff_ms(store, at(MessageId(DUE.ms - 45, 0, stored_ms, 0))) == -40


def test_cutoff_of_a_consumer_without_due_unread_rows_reads_nothing(store: Store, orders: Topic) -> None:
    orders.plain(DUE.ms - 5, DUE.ms + 5)
    reads: list[str] = []
    watch(store, before=lambda call: reads.append(call.name))
    assert cutoff_ms(store, at(MessageId(DUE.ms, 0))) == 0
    positions = Positions(MemorySide())
    positions.put(ORDERS, at(READ_NONE))
    floor = Floor(positions, store, 60)
    for from_ms in (DUE.ms, NOW_MS):
        assert cutoff_at(ORDERS, NOW_MS, floor, from_ms) == DUE
    assert reads == []
    assert cutoff_at(ORDERS, NOW_MS, floor, DUE.ms - 1) == Cutoff(DUE.ms - 5)


# --- lag -------------------------------------------------------------------------------------------------------------


def count_lags(
    store: Store,
    *positions: Position,
    floor: Floor | None = None,
    expiries: Expiries | None = None,
    most: int | None = None,
) -> list[Lag]:
    return lag.finish(
        lag.count(lag.LagTables(store, expiries or Expiries(MemorySide()), floor), ORDERS, positions, NOW_MS, most)
    )


def summarize(lags: list[Lag]) -> dict[str, tuple[int, int | None]]:
    return {found.position.name: (found.messages, found.oldest_ms) for found in lags}


def test_lag_of_several_consumers_counts_from_each_position(store: Store, orders: Topic) -> None:
    times = [NOW_MS + number for number in range(10)]
    orders.plain(*times)
    orders.at(2).plain(*times)
    topic(store, "default:orders-b", ttl_seconds=60).plain(*times)
    positions = [at(MessageId(NOW_MS + read, read), f"c{read}") for read in (4, 9, 0, 8)]
    found = count_lags(store, *positions, at(READ_NONE, "none"), at(MessageId(NOW_MS + 4, 4), "same"))
    assert summarize(found) == {
        "c0": (9, times[1]),
        "c4": (5, times[5]),
        "c8": (1, times[9]),
        "c9": (0, None),
        "none": (10, times[0]),
        "same": (5, times[5]),
    }
    assert not any(one.at_least for one in found)
    assert [one.seconds(NOW_MS + 10_000) for one in found] == [9.999, 9.995, 9.991, 0.0, 10.0, 9.995]
    assert found[0].seconds(NOW_MS) == 0.0


def test_lag_counts_the_messages_of_a_plain_reader(store: Store, orders: Topic) -> None:
    orders.plain(DUE.ms - 1, DUE.ms, NOW_MS).tx(7, NOW_MS).tx(-7, NOW_MS).ref(8, NOW_MS)
    orders.stored(8, NOW_MS, NOW_MS)
    store.message.put(
        [(time_prefix(orders.id.prefix, 1, NOW_MS) + tail, MessageValue(None, b"")) for tail in (b"", b"\0")]
    )
    assert summarize(count_lags(store, at(READ_NONE))) == {"billing": (6, DUE.ms)}
    negative = MessageKey(orders.id, 1, -1, 0).pack()
    store.message.put([(negative, MessageValue(None, b""))])
    floor = Floor(Positions(MemorySide()), store, 60)
    assert summarize(count_lags(store, at(READ_NONE), floor=floor)) == {"billing": (7, DUE.ms - 1)}


def test_lag_excludes_messages_after_their_own_ttl(store: Store, orders: Topic) -> None:
    orders.plain(*(NOW_MS - 10 + number for number in range(5)))
    keys = [key.pack() for key, _ in orders.messages()]
    expiries = Expiries(MemorySide())
    expiries.put([(keys[0], NOW_MS - 1), (keys[1], NOW_MS), (keys[3], NOW_MS + 1)])
    assert summarize(count_lags(store, at(READ_NONE), expiries=expiries)) == {"billing": (3, NOW_MS - 8)}
    assert summarize(count_lags(store, at(READ_NONE))) == {"billing": (5, NOW_MS - 10)}


def test_lag_of_a_position_inside_stored_payloads_counts_the_rest(store: Store, orders: Topic) -> None:
    store.payload.put([(_payload_key(orders.id, 1, 7, NOW_MS, number), b"x") for number in range(5)])
    orders.ref(7, NOW_MS).plain(NOW_MS + 1)
    for read, messages, oldest_ms in ((0, 5, NOW_MS), (3, 2, NOW_MS), (4, 1, NOW_MS + 1)):
        [found] = count_lags(store, at(MessageId(NOW_MS, 0, NOW_MS, read)))
        assert (found.messages, found.oldest_ms, found.at_least) == (messages, oldest_ms, False)
    positions = [at(MessageId(NOW_MS, 0, NOW_MS, read), f"c{read}") for read in range(5)]
    all_of_them = count_lags(store, *positions, at(READ_NONE, "none"))
    assert [one.messages for one in all_of_them] == [5, 4, 3, 2, 1, 6]


@pytest.mark.parametrize("pointer", [7, -7])
def test_lag_after_a_large_transaction_counts_its_payloads(store: Store, orders: Topic, pointer: int) -> None:
    rows = 2 * PAGE_ROWS + 5
    store.payload.put([(_payload_key(orders.id, 1, 7, NOW_MS + at // 60_000, at % 60_000), b"x") for at in range(rows)])
    orders.plain(NOW_MS).ref(pointer, NOW_MS + 1).plain(NOW_MS + 2)
    [found] = count_lags(store, at(READ_NONE))
    assert (found.messages, found.at_least) == (rows + 2, False)
    [found] = count_lags(store, at(READ_NONE), most=100)
    assert found.at_least
    assert found.messages <= 102


@pytest.mark.parametrize(
    ("name", "generation", "messages"),
    [("default:orders", 1, 50), ("default:orders", 2, 1), ("default:orders-b", 1, 1)],
)
def test_lag_of_a_topic_counts_payloads_of_its_generation(
    store: Store, orders: Topic, name: str, generation: int, messages: int
) -> None:
    orders.ref(7, NOW_MS)
    store.payload.put([(_payload_key(of(name).topic, generation, 7, NOW_MS, number), b"x") for number in range(50)])
    [found] = count_lags(store, at(READ_NONE))
    assert (found.messages, found.at_least) == (messages, False)


@pytest.mark.parametrize("rows", [PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, 2 * PAGE_ROWS + 1])
def test_lag_over_several_pages_counts_each_row_once(rows: int) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=3600).plain(*range(NOW_MS, NOW_MS + rows))
    steps = lag.count(
        lag.LagTables(store, Expiries(MemorySide()), None),
        ORDERS,
        [at(READ_NONE), at(MessageId(NOW_MS + 9, 9), "far")],
        NOW_MS,
    )
    read = []
    while True:
        try:
            read.append(next(steps))
        except StopIteration as end:
            found: list[Lag] = end.value
            break
    assert sum(read) == rows
    assert summarize(found) == {"billing": (rows, NOW_MS), "far": (rows - 10, NOW_MS + 10)}


@pytest.mark.parametrize("most", [1, 3, 4, 5, 9, 10, 11])
def test_lag_with_a_limit_is_a_minimum_with_the_oldest_time(store: Store, orders: Topic, most: int) -> None:
    orders.plain(*(NOW_MS + number for number in range(10)))
    far, near = count_lags(store, at(READ_NONE, "far"), at(MessageId(NOW_MS + 5, 5), "near"), most=most)
    assert (near.messages, near.at_least, near.oldest_ms) == (min(most, 4), most < 4, NOW_MS + 6)
    # Beyond the limit, one more row is read.
    assert (far.messages, far.at_least, far.oldest_ms) == (max(min(most, 10), near.messages + 1), most < 10, NOW_MS)


def test_lag_is_expired_if_unread_messages_may_be_deleted(store: Store, orders: Topic) -> None:
    orders.plain(NOW_MS)
    for position, expired in (
        (at(MessageId(DUE.ms - 1, 0)), True),
        (at(MessageId(DUE.ms, 0)), False),
        (at(MessageId(1, 0), since_ms=DUE.ms), False),
        (at(MessageId(1, 0), since_ms=DUE.ms - 1), True),
        # A consumer that has read nothing is judged by the time of its registration.
        (at(READ_NONE, since_ms=DUE.ms - 1), False),
        (Position("billing", READ_NONE, DUE.ms, DUE.ms - HOUR), False),
        (Position("billing", READ_NONE, DUE.ms - 1, DUE.ms - HOUR), True),
        (Position("billing", MessageId(0, 65_535), DUE.ms, DUE.ms - HOUR), False),
    ):
        assert [one.expired for one in count_lags(store, position)] == [expired]
    # Held messages are not deleted.
    floor = Floor(Positions(MemorySide()), store, 60)
    for read_ms, expired in ((DUE.ms - 1, False), (DUE.ms - 60_000, False), (DUE.ms - 60_001, True)):
        found = count_lags(store, at(MessageId(read_ms, 0), "a"), at(MessageId(NOW_MS, 0), "b"), floor=floor)
        assert [one.expired for one in found] == [expired, False]


def test_unread_from_a_position_starts_at_the_next_key(store: Store) -> None:
    key = MessageKey(ORDERS.topic, 1, NOW_MS, 3).pack()
    assert unread_from(store, ORDERS, at(MessageId(NOW_MS, 3)), Cutoff(0)) == key + b"\0"
    late = time_prefix(ORDERS.topic.prefix, 1, NOW_MS + SECOND)
    assert unread_from(store, ORDERS, at(MessageId(NOW_MS, 3)), Cutoff(NOW_MS + SECOND)) == late
    assert unread_from(store, ORDERS, at(MessageId(NOW_MS, 3), since_ms=NOW_MS + SECOND), Cutoff(MINUTE)) == late


def _payload_key(topic_id: TopicId, generation: int, pointer: int, write_ms: int, sequence: int) -> bytes:
    return PayloadKey(topic_id, generation, pointer, write_ms, sequence).pack()
