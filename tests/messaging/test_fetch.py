"""Fetches: start, visibility, and end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import HOUR, NOW_MS, SECOND, Call, fail_at, watch
from tests.kit.messaging import Kit, P, named, reader
from tests.support import each_raises
from tms_core.errors import BadRequest, StoreError, TopicNotFound
from tms_core.messaging.fetcher import PAGE_BYTES
from tms_core.messaging.model import FetchRequest, RollbackRange
from tms_core.rowkey import MessageId, MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import MESSAGES, MessageValue, Page, Projection
from tms_core.tables.side import Expiries
from tms_core.transaction.model import Transaction, VisibilityLevel

TTL_MS = 7 * 24 * HOUR
Q = P + 1


@pytest.fixture(params=["cached", "stored"], autouse=True)
def source(kit: Kit, request: pytest.FixtureRequest) -> None:
    if request.param == "stored":
        kit.restart(cache_bytes=0)


def publish_each_second(kit: Kit) -> None:
    """Publish one message each second: a to e."""
    for letter in (b"a", b"b", b"c", b"d", b"e"):
        kit.publish("orders", letter)
        kit.clock.advance(SECOND)


def test_fetch_of_an_empty_topic_yields_no_page(kit: Kit) -> None:
    assert list(kit.service.fetch(named("orders"), FetchRequest())) == []


# --- start positions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_ms", "expected"),
    [
        (0, b"abcde"),
        (NOW_MS, b"abcde"),
        (NOW_MS + 1, b"bcde"),
        (NOW_MS + SECOND, b"bcde"),
        (NOW_MS + 4 * SECOND + 1, b""),
        (2**63 - 1, b""),
    ],
)
def test_fetch_from_a_time_returns_messages_since_that_time(kit: Kit, start_ms: int, expected: bytes) -> None:
    publish_each_second(kit)
    assert b"".join(kit.payloads(start=start_ms)) == expected


@pytest.mark.parametrize(
    ("start", "inclusive", "expected"),
    [
        (MessageId(NOW_MS + SECOND, 0), True, b"bcde"),
        (MessageId(NOW_MS + SECOND, 0), False, b"cde"),
        (MessageId(NOW_MS + SECOND, 1), False, b"cde"),
        (MessageId(NOW_MS + SECOND - 1, 65_535), False, b"bcde"),
        (MessageId(NOW_MS + 4 * SECOND, 0), False, b""),
        (MessageId(-1, 0), False, b"abcde"),
        (MessageId(2**63 - 1, 65_535), False, b""),
    ],
)
def test_fetch_starts_at_an_id_or_after_it(kit: Kit, start: MessageId, inclusive: bool, expected: bytes) -> None:
    publish_each_second(kit)
    assert b"".join(kit.payloads(start=start, inclusive=inclusive)) == expected


@pytest.mark.parametrize(("age_ms", "lives"), [(TTL_MS, True), (TTL_MS + 1, False)])
def test_fetch_at_the_ttl_hides_a_message_as_the_janitor_deletes_it(kit: Kit, age_ms: int, lives: bool) -> None:
    kit.publish("orders", b"a")
    kit.clock.advance(age_ms)
    expected = [b"a"] if lives else []
    assert kit.payloads() == kit.payloads(start=0) == kit.payloads(start=MessageId(NOW_MS, 0)) == expected


def test_fetch_after_an_expired_id_skips_no_message(kit: Kit) -> None:
    kit.create("short", ttl="1")
    kit.put("short", P, b"x", b"y")
    first = kit.publish("short", pointer=P)
    kit.clock.advance(SECOND + 1)
    kit.put("short", Q, b"p", b"q")
    kit.publish("short", pointer=Q)
    expired = MessageId(first.start_ms, first.start_sequence, NOW_MS + HOUR, 7)
    assert kit.payloads("short", expired, inclusive=False) == [b"p", b"q"]


@pytest.mark.parametrize("limit", [1, 2, 5, 6])
def test_fetch_in_steps_of_a_limit_gives_every_message_once(kit: Kit, limit: int) -> None:
    publish_each_second(kit)
    assert kit.payloads(limit=limit) == [b"a", b"b", b"c", b"d", b"e"][:limit]
    assert in_steps(kit, limit) == [b"a", b"b", b"c", b"d", b"e"]


# --- limits and pages ------------------------------------------------------------------------------------------------


def in_steps(kit: Kit, limit: int, **options: Transaction) -> list[bytes]:
    """Read as a consumer: each fetch starts after the last message."""
    found: list[bytes] = []
    start: MessageId | int = NOW_MS - SECOND
    while some := kit.fetch("orders", start, limit=limit, inclusive=False, **options):
        assert len(some) <= limit
        assert len(found) < 10_000, "endless loop"
        found += [message.payload for message in some]
        start = MessageId.parse(some[-1].id)
    return found


def test_fetch_and_roll_back_of_a_missing_topic_fail_at_once(kit: Kit) -> None:
    each_raises(
        TopicNotFound,
        lambda: kit.service.fetch(named("nothing"), FetchRequest()),
        lambda: kit.service.rollback(named("nothing"), RollbackRange(P, 0, 0, 1, 0)),
    )


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_fetch_of_many_bytes_bounds_each_page(kit: Kit, size: int) -> None:
    count = 3_000_000 // size if size > 10 else 10_000
    expected = [b"%06d" % number + bytes(size - 6) for number in range(count)]
    for first in range(0, count, 1000):
        kit.publish("orders", *expected[first : first + 1000])
    pages = list(kit.service.fetch(named("orders"), FetchRequest()))
    assert [message.payload for page in pages for message in page] == expected
    sizes = [sum(len(message.payload) for message in page) for page in pages]
    assert max(sizes) <= 2 * PAGE_BYTES


def test_fetch_during_publishes_ends_at_the_last_message_of_its_start(kit: Kit) -> None:
    publish_each_second(kit)
    pages = kit.service.fetch(named("orders"), FetchRequest())
    kit.publish("orders", b"later")
    assert [message.payload for page in pages for message in page] == [b"a", b"b", b"c", b"d", b"e"]
    assert kit.payloads()[-1] == b"later"


def test_fetch_while_a_batch_is_written_shows_nothing_of_it(kit: Kit) -> None:
    kit.publish("orders", b"a")
    found: list[list[bytes]] = []

    def look(call: Call) -> None:
        if call.name == "message.put":
            found.append(kit.payloads())

    watch(kit.store, before=look, after=look)
    kit.publish("orders", b"b", b"c")
    assert found == [[b"a"], [b"a"]]
    assert kit.payloads() == [b"a", b"b", b"c"]


def test_fetch_with_a_failing_store_raises_after_the_first_page(kit: Kit) -> None:
    kit.restart(cache_bytes=0)
    kit.publish("orders", *[b"x" * 1000] * 500)
    pages = kit.service.fetch(named("orders"), FetchRequest())
    assert next(pages)
    watch(kit.store, before=fail_at("message.rows", StoreError("The disk is gone.")))
    with pytest.raises(StoreError):
        list(pages)


def test_fetch_skips_unrecognized_rows(kit: Kit) -> None:
    prefix = generation_prefix(named("orders").prefix, 1)
    before = MessageKey(named("orders"), 1, NOW_MS - 1, 0).pack()
    kit.store.message.put(
        [
            (prefix + b"\0", MessageValue(None, b"short")),
            (before, MessageValue(None, b"ours")),
            (before + b"\0\0", MessageValue(None, b"long")),
            (MessageKey(named("orders"), 1, -1, 0).pack(), MessageValue(None, b"before 1970")),
        ]
    )
    kit.publish("orders", b"a")
    assert kit.payloads() == [b"ours", b"a"]
    assert in_steps(kit, 1) == [b"ours", b"a"]


# --- visibility ------------------------------------------------------------------------------------------------------


def publish_mixed(kit: Kit) -> RollbackRange:
    """Publish plain, committed, rolled back, plain and undecided (Q) messages, and a plain message."""
    kit.publish("orders", b"plain")
    kit.publish("orders", b"p", pointer=P)
    rolled = kit.publish("orders", b"rolled back", pointer=P)
    kit.service.rollback(named("orders"), rolled)
    kit.publish("orders", b"more")
    kit.publish("orders", b"q", pointer=Q)
    kit.publish("orders", b"last")
    return rolled


@pytest.mark.parametrize(
    ("transaction", "expected"),
    [
        (reader(), [b"plain", b"p", b"more", b"q", b"last"]),
        (reader(invalid=[P]), [b"plain", b"more", b"q", b"last"]),
        (reader(invalid=[Q]), [b"plain", b"p", b"more", b"last"]),
        (reader(invalid=[P, Q]), [b"plain", b"more", b"last"]),
        (reader(in_progress=[Q]), [b"plain", b"p", b"more"]),
        (reader(in_progress=[P]), [b"plain"]),
        (reader(read_pointer=P), [b"plain", b"p", b"more"]),
        (reader(read_pointer=P - 1), [b"plain"]),
        (reader(read_pointer=P - 1, write_pointer=P), [b"plain", b"p", b"more"]),
        (reader(read_pointer=P - 1, write_pointer=Q, invalid=[P]), [b"plain", b"more", b"q", b"last"]),
    ],
)
def test_transactional_fetch_stops_at_undecided(kit: Kit, transaction: Transaction, expected: list[bytes]) -> None:
    publish_mixed(kit)
    assert kit.payloads(start=NOW_MS, transaction=transaction) == expected
    assert kit.payloads(start=NOW_MS, transaction=transaction, limit=2) == expected[:2]
    assert in_steps(kit, 1, transaction=transaction) == expected


def test_fetch_in_a_transaction_without_its_writes_stops_at_them(kit: Kit) -> None:
    publish_mixed(kit)
    own = Transaction(P - 1, P, P, visibility_level=VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT)
    assert kit.payloads(start=NOW_MS, transaction=own) == [b"plain"]


def test_fetch_after_many_failed_rows_finds_the_messages(kit: Kit) -> None:
    for _ in range(5):
        kit.publish("orders", *[b"x"] * 500, pointer=P)
    kit.publish("orders", b"a", b"b")
    assert kit.payloads(start=NOW_MS, transaction=reader(invalid=[P]), limit=1) == [b"a"]


# --- payloads in the other table -------------------------------------------------------------------------------------


@pytest.fixture
def referring(kit: Kit) -> Kit:
    """Publish an inline message, two references and another inline message, at intervals of a second."""
    kit.publish("orders", b"first")
    kit.clock.advance(SECOND)
    kit.put("orders", P, *[b"p%d" % number for number in range(10)])
    kit.clock.advance(SECOND)
    kit.put("orders", P, b"p10")
    kit.put("orders", Q, b"q0")
    kit.publish("orders", pointer=P)
    kit.publish("orders", pointer=Q)
    kit.clock.advance(SECOND)
    kit.publish("orders", b"last")
    return kit


def test_fetch_of_references_gives_payloads_in_stored_order(referring: Kit) -> None:
    assert referring.payloads() == ALL
    assert referring.payloads(start=NOW_MS, transaction=reader()) == ALL
    ids = referring.ids()
    assert ids[1] == MessageId(NOW_MS + 2 * SECOND, 0, NOW_MS + SECOND, 0)
    assert ids[11] == MessageId(NOW_MS + 2 * SECOND, 0, NOW_MS + 2 * SECOND, 0)
    assert ids[12] == MessageId(NOW_MS + 2 * SECOND, 1, NOW_MS + 2 * SECOND, 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 11, 12, 13, 14, 100])
def test_fetch_of_references_in_steps_of_any_size_loses_nothing(referring: Kit, limit: int) -> None:
    assert in_steps(referring, limit) == ALL
    assert referring.payloads(limit=limit) == ALL[:limit]


ALL = [b"first", *[b"p%d" % number for number in range(11)], b"q0", b"last"]


@pytest.mark.parametrize("index", range(len(ALL)))
def test_fetch_from_or_after_any_id_returns_exactly_the_rest(referring: Kit, index: int) -> None:
    start = referring.ids()[index]
    assert referring.payloads(start=start) == ALL[index:]
    assert referring.payloads(start=start, inclusive=False) == ALL[index + 1 :]
    assert referring.payloads(start=start, inclusive=False, limit=1) == ALL[index + 1 : index + 2]


def test_fetch_after_an_id_between_two_payloads_drops_none(referring: Kit) -> None:
    between = MessageId(NOW_MS + 2 * SECOND, 0, NOW_MS + SECOND + 1, 0)
    assert referring.payloads(start=between, inclusive=False) == ALL[11:]
    assert referring.payloads(start=between) == ALL[11:]


def test_fetch_from_the_bare_id_of_a_reference_gives_all_its_payloads(referring: Kit) -> None:
    bare = MessageId(NOW_MS + 2 * SECOND, 0)
    assert referring.payloads(start=bare) == ALL[1:]
    assert referring.payloads(start=bare, inclusive=False) == ALL[12:]


def test_fetch_from_a_payload_part_without_payloads_gives_the_next_reference(referring: Kit) -> None:
    assert referring.payloads(start=MessageId(NOW_MS, 0, NOW_MS + HOUR, 3), inclusive=False) == ALL
    assert referring.payloads(start=MessageId(NOW_MS, 7, NOW_MS + HOUR, 3), inclusive=False) == ALL[1:]


def test_fetch_of_a_reference_without_payloads_uses_no_limit(kit: Kit) -> None:
    kit.publish("orders", pointer=P)
    kit.publish("orders", b"a")
    assert kit.payloads(limit=1) == [b"a"]


def test_fetch_of_a_rolled_back_reference_shows_it_to_plain_readers_only(kit: Kit) -> None:
    kit.put("orders", P, b"a", b"b")
    kit.service.rollback(named("orders"), kit.publish("orders", pointer=P))
    assert kit.payloads() == [b"a", b"b"]
    assert kit.payloads(start=NOW_MS, transaction=reader()) == []


def test_fetch_of_several_pages_of_stored_payloads_returns_all(kit: Kit) -> None:
    expected = [b"%06d" % number * 50 for number in range(2000)]
    kit.put("orders", P, *expected)
    prefix = PayloadKey(named("orders"), 1, P, NOW_MS, 0).pack()
    kit.store.payload.put([(prefix + b"foreign", b"foreign")])
    kit.publish("orders", pointer=P)
    assert kit.payloads() == expected
    assert in_steps(kit, 700) == expected


def test_rollback_of_a_range_with_rows_of_others_inverts_only_its_own(kit: Kit) -> None:
    first = kit.publish("orders", b"a", pointer=P)
    kit.publish("orders", b"q", pointer=Q)
    kit.publish("orders", b"plain")
    last = kit.publish("orders", b"b", pointer=P)
    kit.service.rollback(
        named("orders"), RollbackRange(P, first.start_ms, first.start_sequence, last.end_ms, last.end_sequence)
    )
    assert kit.payloads(start=NOW_MS, transaction=reader()) == [b"q", b"plain"]
    values = [value.pointer for _, value in kit.store.message.read(MESSAGES, b"", None, 10).items]
    assert values == [-P, Q, None, -P]


def test_rollback_twice_or_of_nothing_changes_no_row(kit: Kit) -> None:
    published = kit.publish("orders", b"a", pointer=P)
    for _ in range(2):
        kit.service.rollback(named("orders"), published)
    kit.service.rollback(named("orders"), published._replace(pointer=Q))
    kit.service.rollback(named("orders"), published._replace(start_ms=5, end_ms=4))
    assert kit.store.message.read(MESSAGES, b"", None, 10).items[0][1].pointer == -P


# --- rolling back ----------------------------------------------------------------------------------------------------


def test_roll_back_of_a_range_leaves_the_rest(kit: Kit) -> None:
    published = kit.publish("orders", b"a", *[b"x"] * 2500, b"c", pointer=P)
    kit.service.rollback(named("orders"), published._replace(start_sequence=1, end_sequence=2500))
    assert kit.payloads(start=NOW_MS, transaction=reader()) == [b"a", b"c"]
    assert len(kit.payloads()) == 2502


def test_rollback_after_a_topic_was_recreated_reaches_earlier_generations(kit: Kit) -> None:
    published = [kit.publish("orders", b"a", pointer=P), kit.publish("orders", b"q", pointer=Q)]
    kit.store.message.put([(named("orders").prefix + b"\0\0\1", MessageValue(P, b"foreign"))])
    for generation in (2, 3, 4):
        kit.service.delete_topic(named("orders"))
        kit.create("orders")
        if generation != 3:
            published.append(kit.publish("orders", b"b", pointer=P))
    kit.service.rollback(named("orders"), published[0]._replace(end_ms=published[3].end_ms))
    found = [
        (MessageKey.parse(key), value.pointer) for key, value in kit.store.message.read(MESSAGES, b"", None, 9).items
    ]
    assert [(key and key.generation, pointer) for key, pointer in found] == [
        (1, -P),
        (1, Q),
        (2, -P),
        (4, -P),
        (None, P),
    ]


@pytest.mark.parametrize(
    "wrong", [{"start_ms": -1}, {"end_ms": 2**63}, {"start_sequence": -1}, {"end_sequence": 65_536}]
)
def test_rollback_of_an_invalid_range_is_rejected(kit: Kit, wrong: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        kit.service.rollback(named("orders"), RollbackRange(P, 0, 0, 1, 0)._replace(**wrong))


def test_publish_with_an_own_ttl_stores_it_before_the_message(kit: Kit) -> None:
    stored: list[list[bytes]] = []

    def look(call: Call) -> None:
        if call.name == "message.put":
            stored.append(Expiries(kit.side).keys(b"", None, 10).items)

    watch(kit.store, before=look)
    kit.publish("orders", b"a", ttl=60)
    assert stored == [[MessageKey(named("orders"), 1, NOW_MS, 0).pack()]]


@pytest.mark.parametrize(("age_ms", "lives"), [(SECOND, True), (SECOND + 1, False)])
def test_fetch_after_the_own_ttl_of_a_message_hides_it(kit: Kit, age_ms: int, lives: bool) -> None:
    kit.publish("orders", b"a")
    kit.publish("orders", b"b", b"c", ttl=1)
    kit.publish("orders", b"d")
    kit.clock.advance(age_ms)
    assert kit.payloads() == ([b"a", b"b", b"c", b"d"] if lives else [b"a", b"d"])
    kit.restart()
    assert kit.payloads() == ([b"a", b"b", b"c", b"d"] if lives else [b"a", b"d"])


def test_fetch_of_a_message_with_a_ttl_longer_than_the_topic_uses_that_of_the_topic(kit: Kit) -> None:
    kit.create("short", ttl="1")
    kit.publish("short", b"a", ttl=100)
    kit.clock.advance(SECOND + 1)
    assert kit.payloads("short") == []


# --- TTLs of messages ------------------------------------------------------------------------------------------------


def test_fetch_after_the_own_ttl_of_a_reference_hides_its_payloads(kit: Kit) -> None:
    kit.put("orders", P, b"a")
    kit.publish("orders", pointer=P, ttl=1)
    kit.clock.advance(SECOND)
    assert kit.payloads() == [b"a"]
    kit.clock.advance(1)
    assert kit.payloads() == []


def test_fetch_skips_an_undecided_message_after_its_ttl(kit: Kit) -> None:
    kit.publish("orders", b"a", pointer=P, ttl=1)
    kit.publish("orders", b"b")
    assert kit.payloads(start=NOW_MS, transaction=reader(in_progress=[P])) == []
    kit.clock.advance(SECOND + 1)
    assert kit.payloads(start=NOW_MS, transaction=reader(in_progress=[P])) == [b"b"]


def test_own_ttl_of_a_request_in_two_milliseconds_counts_for_each_part(kit: Kit) -> None:
    kit.publish("orders", *[b"x"] * 65_535)
    kit.publish("orders", b"a", b"b", ttl=1)
    kit.clock.advance(SECOND + 1)
    assert kit.payloads()[65_535:] == [b"b"]
    kit.clock.advance(1)
    assert len(kit.payloads()) == 65_535


@pytest.mark.parametrize("ttl", [0, -1, 2**31])
def test_publish_with_an_invalid_ttl_is_rejected(kit: Kit, ttl: int) -> None:
    with pytest.raises(BadRequest):
        kit.publish("orders", b"a", ttl=ttl)


def test_publish_after_a_lost_message_with_own_ttl_inherits_no_ttl(kit: Kit) -> None:
    watch(
        kit.store,
        before=fail_at(
            "message.put", StoreError("The disk is gone."), lambda call: call.arguments[0][0][1].payload == b"lost"
        ),
    )
    with pytest.raises(StoreError):
        kit.publish("orders", b"lost", ttl=1)
    kit.restart()
    kit.publish("orders", b"a")
    kit.clock.advance(2 * SECOND)
    assert kit.payloads() == [b"a"]


def test_fetch_hides_many_messages_after_their_own_ttl(kit: Kit) -> None:
    kit.publish("orders", *[b"short"] * 9000, ttl=1)
    kit.publish("orders", b"long")
    kit.restart()
    assert len(kit.payloads()) == 9001
    kit.clock.advance(2 * SECOND)
    assert kit.payloads() == [b"long"]
    assert kit.payloads(transaction=reader()) == [b"long"]


@pytest.mark.parametrize("stored", [False, True])
def test_fetch_of_large_messages_reads_little_more_than_a_page(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    large = bytes(PAGE_BYTES)
    messages = [b"small"] * 50 + [large] * 10
    if stored:
        kit.service.store(named("orders"), messages, pointer=P)
        kit.service.publish(named("orders"), [], pointer=P)
    else:
        kit.publish("orders", *messages)
    kit.restart(cache_bytes=0)
    table = kit.store.payload if stored else kit.store.message
    reads: list[int] = []
    read = table.read

    def count_bytes(want: Projection[Any], *arguments: Any) -> Page[Any]:
        page: Page[Any] = read(want, *arguments)
        if want.call == "rows":
            payloads = page.items.payloads if want.part == "columns" else [row[1] for row in page.items]
            reads.append(sum(map(len, payloads)))
        return page

    monkeypatch.setattr(table, "read", count_bytes)
    assert kit.payloads("orders") == messages
    assert len(large) <= max(reads) < len(large) + PAGE_BYTES
