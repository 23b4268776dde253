"""The store with the leader's fence: two servers on one store, one of which is suspended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any
from uuid import UUID

import pytest

from tests.builders import NOW_MS, SECOND, pointer
from tests.kit.messaging import fetch, read_payloads, reader
from tests.kit.servers import DELAY_SECONDS, PREFIX, SECONDS, TOPIC, LeaderServer, Rows, TwoServers, WatchedTable
from tests.support import act_after, act_before, each_raises, raising
from tms_core.errors import StoreError, StoreUnavailable, Unavailable
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.ids import position, tail
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageId, generation_prefix
from tms_core.server.ha.fenced_store import FencedSide
from tms_core.server.ha.leadership import REACH_MS, Leadership, not_leader_error
from tms_core.server.ha.sealed_ranges import FRAME_ROWS, Gaps, PositionRange
from tms_core.server.ha.slot_assignment import Slots
from tms_core.tables.base import CELLS, KEYS, MESSAGES, MessageValue, Page, Projection
from tms_core.tables.side import SideChange

# --- permissions -----------------------------------------------------------------------------------------------------


def test_follower_rejects_requests_and_changes_nothing(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    service = two.other.service
    refused: list[Callable[[], object]] = [
        lambda: service.publish(TOPIC, [b"b"]),
        lambda: service.store(TOPIC, [b"b"], pointer=pointer(NOW_MS)),
        two.other.payloads,
        lambda: service.rollback(TOPIC, RollbackRange(pointer(NOW_MS), 0, 0, NOW_MS, 0)),
    ]
    for ask in refused:
        with pytest.raises(Unavailable, match=not_leader_error().message):
            ask()
    assert two.rows() == [b"a"]
    assert two.one.payloads() == [b"a"]


def test_follower_reaches_no_position_in_the_side_table(two: TwoServers) -> None:
    side, key = FencedSide(two.side, Slots([two.other.leadership])), b"c" + PREFIX + b"billing"
    two.side.put([(key, b"1")])
    each_raises(
        (Unavailable, StoreUnavailable),
        lambda: side.get(key),
        lambda: side.rows(key, key + b"\0", 1),
        lambda: side.put([(key, b"2")]),
        lambda: side.delete([key]),
        lambda: side.exchange(key, b"1", b"2"),
    )
    assert two.side.get(key) == b"1"


def test_leader_that_slept_during_a_read_returns_nothing(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    two.one.service.invalidate()
    read = two.one.message.read

    def read_slowly(want: Projection[Any], *arguments: Any) -> Page[Any]:
        page: Page[Any] = read(want, *arguments)
        if want.call == "rows":
            two.other.take_over()
        return page

    two.one.message.read = read_slowly
    with pytest.raises(Unavailable, match=not_leader_error().message):
        two.one.payloads()


def test_gaps_of_a_generation_hide_no_rows_of_others(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    [key] = two.store.message.read(KEYS, PREFIX, None, 10).items
    two.other.take_over()
    start, stop = generation_prefix(TOPIC.prefix, 0), generation_prefix(TOPIC.prefix, 2)
    assert two.other.fenced.message.reserved(start) > int.from_bytes(key[-10:], "big")
    assert two.other.fenced.message.read(KEYS, start, stop, 10).items == [key]


def test_leader_that_resigns_leaves_no_gaps(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    two.one.leadership.resign()
    assert two.other.step()
    two.other.service.publish(TOPIC, [b"b"])
    assert two.other.payloads() == [b"a", b"b"]
    assert two.side.get(b"g" + PREFIX) is None


# --- writes that come late -------------------------------------------------------------------------------------------


def fail_publish(server: LeaderServer, *payloads: bytes, **options: Any) -> None:
    """Publish, and check that the server reports an unknown outcome."""
    with pytest.raises(StoreUnavailable):
        server.service.publish(TOPIC, payloads, **options)


@pytest.mark.parametrize(
    ("messages", "done", "seen"),
    [
        (3, slice(0, 0), [b"first", b"after"]),
        (3, slice(1, 2), [b"first", b"1", b"after"]),
        (3, slice(2, 3), [b"first", b"2", b"after"]),
        (3, slice(0, 3), [b"first", b"0", b"1", b"2", b"after"]),
        (FRAME_ROWS, slice(0, 0), [b"first", b"after"]),
        (FRAME_ROWS, slice(FRAME_ROWS - 1, FRAME_ROWS), [b"first", b"%d" % (FRAME_ROWS - 1), b"after"]),
    ],
)
def test_late_rows_of_an_old_leader_are_hidden(two: TwoServers, messages: int, done: slice, seen: list[bytes]) -> None:
    two.one.service.publish(TOPIC, [b"first"])
    read: list[list[bytes]] = []

    def concurrent_action() -> None:
        two.other.take_over()
        two.other.service.publish(TOPIC, [b"after"])
        read.append(two.other.payloads())

    two.one.interrupt_write(concurrent_action, lambda rows: rows[done])
    batch = [b"%d" % number for number in range(messages)]
    fail_publish(two.one, *batch)
    assert len(two.rows()) == messages + 2, "the late rows exist"
    assert read == [seen]
    for server in (two.other, two.one, two.other, two.one):
        server.take_over()
        assert server.payloads() == seen
        assert server.fenced.message.read(KEYS, PREFIX, None, 100_000).items == [
            key for key, row in server.fenced.message.read(MESSAGES, PREFIX, None, 100_000).items
        ]


def test_former_leader_sends_no_second_piece_of_a_batch(two: TwoServers) -> None:
    two.one.interrupt_write(two.other.take_over, lambda rows: rows)
    fail_publish(two.one, *[b"m"] * (FRAME_ROWS + 1))
    assert len(two.rows()) == FRAME_ROWS
    assert two.other.payloads() == [b"m"] * FRAME_ROWS


def test_former_leader_leaves_late_rows_of_a_transaction_alone(two: TwoServers) -> None:
    two.one.interrupt_write(two.other.take_over, lambda rows: rows[:1])
    fail_publish(two.one, b"a", b"b", pointer=pointer(NOW_MS))
    assert [cell.pointer for cell in two.store.message.read(CELLS, PREFIX, None, 10).items] == [pointer(NOW_MS)] * 2


def test_former_leader_does_not_acknowledge_late_payloads(two: TwoServers, monkeypatch: pytest.MonkeyPatch) -> None:
    act_before(monkeypatch, two.one.payload, "put", two.other.take_over)
    with pytest.raises(StoreUnavailable):
        two.one.service.store(TOPIC, [b"a"], pointer=pointer(NOW_MS))


def test_late_rows_of_a_write_far_apart_are_hidden(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    at = position(NOW_MS + 1)
    rows = [(PREFIX + tail(one), MessageValue(None, b"late")) for one in (at, at + FRAME_ROWS)]

    def concurrent_action() -> None:
        two.other.take_over()
        assert two.other.payloads() == [b"a"]

    two.one.interrupt_write(concurrent_action, lambda rows: rows[1:])
    with pytest.raises(StoreUnavailable):
        two.one.fenced.message.put(rows)
    two.other.service.invalidate(TOPIC)
    assert two.other.payloads() == [b"a"]


def test_leader_of_a_new_term_waits_for_its_own_old_batch(two: TwoServers) -> None:
    def concurrent_action() -> None:
        two.other.take_over()
        for _ in range(2 * (SECONDS + DELAY_SECONDS)):
            two.clock.advance(SECOND)
            assert not two.one.step()
        assert two.one.lease.held

    two.one.interrupt_write(concurrent_action)
    fail_publish(two.one, b"late")
    two.one.take_over()
    assert two.one.payloads() == [b"late"], "the message arrived before the first read"


# --- failed writes that arrive late ----------------------------------------------------------------------------------


def fail_next_write(server: LeaderServer, done: Callable[[Rows], Rows], *, twice: bool = False) -> Callable[[], None]:
    """Fail the next write after some of its rows; return a function that writes the other rows, or all rows again."""
    put, left = server.message.put, list[Rows]()

    def fail_put(rows: Rows) -> None:
        server.message.put = put
        first = done(rows)
        put(first)
        left.append([row for row in rows if twice or row not in first])
        raise StoreUnavailable("HBase has not answered.", "Try again.")

    def arrive() -> None:
        put(left.pop())

    server.message.put = fail_put
    return arrive


def register_producer(two: TwoServers) -> Sent:
    """Register a producer; return the identity of its first request."""
    generation = two.one.service.producers.register(TOPIC, "importer", UUID(int=1)).generation
    return Sent(TOPIC, "importer", generation, 1)


@pytest.mark.parametrize("moment", ["after it is read", "after the next write", "after it is repeated"])
def test_late_rows_of_a_failed_write_are_seen_by_no_reader(two: TwoServers, moment: str) -> None:
    sent = register_producer(two)
    arrive = fail_next_write(two.one, lambda rows: rows[1:2])
    fail_publish(two.one, b"a", b"b", b"c", sent=sent)
    if moment == "after it is read":
        assert two.one.payloads() == []
    elif moment == "after the next write":
        two.one.service.publish(TOPIC, [b"d"])
    two.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    arrive()
    others = [b"d"] if moment == "after the next write" else []
    for server in (two.one, two.other):
        server.take_over()
        assert server.payloads() == [*others, b"a", b"b", b"c"]


def test_topic_with_an_undecided_write_is_neither_read_nor_written(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    arrive = fail_next_write(two.one, lambda _: [])
    fail_publish(two.one, b"b")
    exchange = two.side.exchange_each
    two.side.exchange_each = raising(StoreUnavailable("HBase is away.", "Try again."))  # type: ignore[method-assign]
    each_raises(
        StoreUnavailable, two.one.payloads, lambda: two.one.service.publish(TOPIC, [b"c"]), match="HBase is away"
    )
    # A late note of the failed write does not count, either.
    arrive()
    two.side.exchange_each = exchange  # type: ignore[method-assign]
    two.one.service.publish(TOPIC, [b"c"])
    assert two.one.payloads() == [b"a", b"c"]


def test_late_rows_of_a_failed_write_are_not_seen_by_the_next_leader(two: TwoServers) -> None:
    sent = register_producer(two)
    arrive = fail_next_write(two.one, lambda _: [])
    fail_publish(two.one, b"a", sent=sent)
    others = [b"b"] * (FRAME_ROWS + 1)
    two.one.service.publish(TOPIC, others)
    two.other.take_over()
    two.other.service.publish(TOPIC, [b"a"], sent=sent)
    arrive()
    assert two.other.payloads() == [*others, b"a"]


def read_on(server: LeaderServer, start: MessageId | None) -> tuple[list[bytes], MessageId | None]:
    """Return the payloads after a message and the next position."""
    found = fetch(server.service, TOPIC, start, inclusive=False)
    return [one.payload for one in found], MessageId.parse(found[-1].id) if found else start


def visible(server: LeaderServer, tx: int) -> list[bytes]:
    """Return what a later transaction sees after the transaction of this pointer was aborted."""
    later = reader(read_pointer=tx + 1, write_pointer=tx + 2)
    return read_payloads(server.service, TOPIC, transaction=later)


@pytest.mark.parametrize("twice", [False, True])
def test_repeat_of_a_half_done_write_gives_readers_each_message_once(two: TwoServers, twice: bool) -> None:
    sent = register_producer(two)
    arrive = fail_next_write(two.one, lambda rows: rows[1:2], twice=True)
    fail_publish(two.one, b"a", b"b", b"c", sent=sent)
    seen, at = read_on(two.one, None)
    two.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    if twice:
        # Also the rows of the first attempt, because the request was sent to HBase twice.
        arrive()
        two.one.service.invalidate(TOPIC)
        assert two.one.payloads() == [b"a", b"b", b"c"]
    assert seen + read_on(two.one, at)[0] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("moment", ["after it is rolled back", "as it is taken back"])
def test_late_rows_of_a_failed_write_in_a_transaction_are_not_seen(
    two: TwoServers, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    tx, arrive = pointer(NOW_MS), fail_next_write(two.one, lambda _: [])
    if moment == "as it is taken back":
        act_after(monkeypatch, two.one.message, "invert", arrive)
    fail_publish(two.one, b"late", pointer=tx)
    if moment == "after it is rolled back":
        two.one.service.rollback(TOPIC, tx)
        arrive()
    assert visible(two.one, tx) == []


@pytest.mark.parametrize("of_a_producer", [False, True])
def test_failed_write_is_known_to_the_next_leader_after_a_hand_back(two: TwoServers, of_a_producer: bool) -> None:
    sent = register_producer(two) if of_a_producer else None
    arrive = fail_next_write(two.one, lambda _: [])
    fail_publish(two.one, b"late", sent=sent)
    for _ in range(DELAY_SECONDS + 1):
        two.clock.advance(SECOND)
        two.one.step()
    two.one.leadership.resign()
    assert two.other.step()
    again = b"late" if of_a_producer else b"b"
    two.other.service.publish(TOPIC, [again], sent=sent)
    arrive()
    two.other.service.invalidate(TOPIC)
    assert two.other.payloads() == [again]


def test_write_that_fails_at_the_hand_back_keeps_the_lease(two: TwoServers, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, fails, put = Event(), Event(), two.one.message.put
    held = vars(two.one.leadership)
    held["failed"] = held.pop("_failed_ms")

    def wait_and_fail(_: Rows) -> None:
        two.one.message.put = put
        writes.set()
        assert fails.wait(10)
        raise StoreUnavailable("HBase has not answered.", "Try again.")

    def read_slowly(leadership: Leadership) -> int | None:
        """Pause the thread that returns the lease after its read."""
        found: int | None = vars(leadership)["failed"]
        fails.set()
        with suppress(StoreUnavailable):
            publishing.result()
        return found

    failed_ms = property(read_slowly, lambda leadership, ms: vars(leadership).update(failed=ms))
    monkeypatch.setattr(Leadership, "_failed_ms", failed_ms, raising=False)
    two.one.message.put = wait_and_fail
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(two.one.service.publish, TOPIC, [b"late"])
        assert writes.wait(10)
        two.one.leadership.hand_back()
        two.one.step()
        fails.set()
    assert two.cell.record.holder == "a"


def test_write_that_fails_with_a_program_error_keeps_the_lease(two: TwoServers) -> None:
    two.one.message.put = raising(ValueError("no row"))
    with pytest.raises(ValueError, match="no row"):
        two.one.service.publish(TOPIC, [b"late"])
    two.one.leadership.resign()
    assert two.cell.record.holder == "a"


@pytest.mark.parametrize("tx", [None, pointer(NOW_MS)])
def test_repeat_after_a_partial_write_of_a_former_leader_exists_once(two: TwoServers, tx: int | None) -> None:
    sent = register_producer(two)
    arrive = fail_next_write(two.one, lambda rows: rows[1:2], twice=True)
    fail_publish(two.one, b"a", b"b", b"c", pointer=tx, sent=sent)
    two.other.take_over()
    two.other.service.publish(TOPIC, [b"a", b"b", b"c"], pointer=tx, sent=sent)
    arrive()
    two.one.take_over()
    assert two.one.payloads() == [b"a", b"b", b"c"]


def test_registration_hides_a_failed_write_of_the_older_instance(two: TwoServers) -> None:
    sent = register_producer(two)
    arrive = fail_next_write(two.one, lambda _: [])
    fail_publish(two.one, b"late", sent=sent)
    two.one.service.producers.register(TOPIC, "importer", UUID(int=2))
    arrive()
    assert two.one.payloads() == []


def test_first_row_after_many_hidden_rows_takes_few_reads(two: TwoServers) -> None:
    fail_next_write(two.one, lambda rows: rows[1:])
    fail_publish(two.one, *[b"m"] * 2000)
    two.one.service.publish(TOPIC, [b"x"])
    calls = two.store.calls["keys"]
    assert two.one.fenced.message.first(PREFIX) is not None
    assert two.store.calls["keys"] - calls < 10


def test_failures_without_a_message_between_them_leave_one_gap(two: TwoServers) -> None:
    def fail(times: int) -> None:
        for _ in range(times):
            fail_next_write(two.one, lambda _: [])
            fail_publish(two.one, b"a", b"b")
            two.clock.advance(SECOND)

    fail(5)
    two.one.service.publish(TOPIC, [b"c"])
    fail(5)
    assert two.one.payloads() == [b"c"]
    assert len(Gaps.parse(two.side.get(b"g" + PREFIX)).spans) == 2


def test_unneeded_gaps_of_repeated_failures_are_deleted(two: TwoServers) -> None:
    for number in range(600):
        fail_next_write(two.one, (lambda rows: rows) if number < 5 else lambda _: [])
        fail_publish(two.one, b"a", b"b")
        two.one.service.publish(TOPIC, [b"c"])
        two.clock.advance(REACH_MS // 100)
        two.one.lease.renew()
    assert len(Gaps.parse(two.side.get(b"g" + PREFIX)).spans) < 520
    assert two.one.payloads() == [b"a", b"b", b"c"] * 5 + [b"c"] * 595


def test_failed_write_is_not_decided_after_gaps_of_another_server(two: TwoServers) -> None:
    fail_next_write(two.one, lambda _: [])
    fail_publish(two.one, b"late")
    read = two.side.get

    def read_changed(key: bytes) -> bytes | None:
        value = read(key)
        if key == b"g" + PREFIX:
            two.side.put([(key, Gaps((PositionRange(1, 2),)).pack())])
        return value

    two.side.get = read_changed  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        two.one.payloads()


# --- suspended threads during sealing --------------------------------------------------------------------------------


def test_next_leader_after_a_slow_clock_starts_after_its_first_ids(two: TwoServers) -> None:
    two.clock.step(200 * SECOND)
    two.one.service.publish(TOPIC, [b"a"])
    two.one.lease.renew()
    two.clock.step(-200 * SECOND)
    two.other.take_over()

    def concurrent_action() -> None:
        two.one.take_over()
        two.one.service.publish(TOPIC, [b"b"])

    two.other.interrupt_write(concurrent_action)
    fail_publish(two.other, b"late")
    two.one.service.invalidate(TOPIC)
    assert two.one.payloads() == [b"a", b"b"]


# --- reads and changes -----------------------------------------------------------------------------------------------


def test_next_leader_starts_after_a_consumer_that_is_ahead(two: TwoServers) -> None:
    def concurrent_action() -> None:
        two.other.take_over()
        two.other.service.publish(TOPIC, [b"b"])

    two.one.service.publish(TOPIC, [b"a"])
    two.one.service.consumers.put(TOPIC, "billing", MessageId(NOW_MS + 100_000, 0))
    two.one.interrupt_write(concurrent_action)
    fail_publish(two.one, b"late")
    two.other.service.invalidate(TOPIC)
    assert two.other.payloads() == [b"a", b"b"]


def test_seal_of_a_leader_that_slept_hides_nothing_of_others(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a"])
    two.other.take_over()
    two.one.take_over()
    get = two.side.get

    def read_slowly(key: bytes) -> bytes | None:
        if key == b"g" + PREFIX:
            two.side.get = get  # type: ignore[method-assign]
            two.other.take_over()
            two.other.service.publish(TOPIC, [b"x"])
        return get(key)

    two.side.get = read_slowly  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        two.one.payloads()
    two.other.service.publish(TOPIC, [b"y"])
    two.one.take_over()
    assert two.one.payloads() == [b"a", b"x", b"y"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_former_leader_in_a_rollback_does_not_know_the_outcome(
    two: TwoServers, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    published = two.one.service.publish(TOPIC, [b"a"], pointer=pointer(NOW_MS))
    assert published is not None
    act_after(monkeypatch, two.one.message, {"before": "read", "after": "invert"}[moment], two.other.take_over)
    with pytest.raises((StoreUnavailable, Unavailable)) as caught:
        two.one.service.rollback(TOPIC, published)
    assert isinstance(caught.value, Unavailable if moment == "before" else StoreUnavailable)


def test_resignation_after_a_failed_write_keeps_the_lease(two: TwoServers) -> None:
    changes: list[tuple[WatchedTable, str, Callable[[], object]]] = [
        (two.one.message, "put", lambda: two.one.service.publish(TOPIC, [b"a"])),
        (two.one.payload, "put", lambda: two.one.service.store(TOPIC, [b"a"], pointer=pointer(NOW_MS))),
        (two.one.message, "delete", lambda: two.one.fenced.message.delete([b"k"])),
    ]
    for table, name, change in changes:
        two.clock.advance(60 * SECOND)
        two.one.step()
        setattr(table, name, raising(StoreError("HBase is away.")))
        with pytest.raises(StoreError, match="HBase is away"):
            change()
    two.one.leadership.resign()
    assert two.cell.record.holder == "a"


def test_other_calls_are_delegated_to_the_store(two: TwoServers) -> None:
    fenced = two.other.fenced
    assert fenced.identity() == two.store.identity()
    assert fenced.message.estimate_bytes(b"", None) == two.store.message.estimate_bytes(b"", None)
    fenced.payload.sync()
    fenced.message.compact(b"a", b"b")
    fenced.close()
    two.one.service.publish(TOPIC, [b"a"])


# --- positions and claims --------------------------------------------------------------------------------------------

FIRST, SECOND_ID = MessageId(NOW_MS, 0), MessageId(NOW_MS, 1)
EVERY_ROW = reader()


def delay_position(
    two: TwoServers, change: Callable[[MessagingService], object], concurrent_action: Callable[[], object]
) -> None:
    """Delay the next position that the first server writes until another action has finished."""
    exchange = two.one.side.exchange_each

    def delayed_exchange(changes: Sequence[SideChange]) -> list[bool]:
        two.one.side.exchange_each = exchange
        concurrent_action()
        done: list[bool] = exchange(changes)
        return done

    two.one.side.exchange_each = delayed_exchange
    with pytest.raises((StoreUnavailable, Unavailable)):
        change(two.one.service)


def test_trap_c_late_position_of_a_former_leader_changes_nothing(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a", b"b"])
    two.one.service.consumers.put(TOPIC, "billing", MessageId(0, 0))

    def concurrent_action() -> None:
        two.other.take_over()
        two.other.service.consumers.put(TOPIC, "billing", SECOND_ID)

    delay_position(two, lambda service: service.consumers.put(TOPIC, "billing", FIRST), concurrent_action)
    assert two.other.service.consumers.get(TOPIC, "billing").id == SECOND_ID


def test_trap_c_late_base_of_a_former_leader_redelivers_nothing(two: TwoServers) -> None:
    two.one.service.publish(TOPIC, [b"a", b"b"])
    for server in (two.one, two.other):
        with suppress(Unavailable):
            server.service.consumers.put(TOPIC, "billing", MessageId(0, 0))
    first, second, third = pointer(NOW_MS, 1), pointer(NOW_MS, 2), pointer(NOW_MS, 3)

    def poll(service: MessagingService, tx: int) -> list[bytes]:
        seen = reader(read_pointer=tx - 1, write_pointer=tx)
        given = service.groups.poll(TOPIC, "billing", GroupPoll(seen, 1))
        return [message.payload for message in given.messages]

    assert poll(two.one.service, first) == [b"a"]

    def concurrent_action() -> None:
        two.other.take_over()
        assert poll(two.other.service, third) == [b"b"]

    # The first server merges the first claim, and is suspended before it writes the base.
    delay_position(two, lambda service: poll(service, second), concurrent_action)
    assert two.other.service.consumers.get(TOPIC, "billing").id == FIRST
    assert poll(two.other.service, pointer(NOW_MS, 4)) == []
