"""The store as a leader may use it: two servers on one store, one of which is stopped at the worst moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Event
from typing import Any
from uuid import UUID

import pytest

from tests.builders import NOW_MS, SECOND, pointer
from tests.kit.messaging import reader
from tests.server.test_leadership import DELAY_SECONDS, SECONDS, Node
from tests.support import raising
from tests.tables.test_lease import Cell
from tms_core.clock import ManualClock
from tms_core.errors import StoreError, StoreUnavailable, Unavailable
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.ids import position, tail
from tms_core.messaging.model import FetchRequest, RollbackRange
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageId, generation_prefix
from tms_core.server.ha.fenced_store import FencedSide, FencedStore
from tms_core.server.ha.leadership import REACH_MS, Leadership
from tms_core.server.ha.sealed_ranges import FRAME_ROWS, Gaps, PositionRange, SealedRanges
from tms_core.server.ha.slot_assignment import Slots
from tms_core.tables.base import CELLS, KEYS, MESSAGES, MessageValue, Origin, Page, TxCell, Want
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideChange
from tms_core.topic import TopicId

TOPIC = TopicId.parse("default:t")
PREFIX = generation_prefix(TOPIC.prefix, 1)
Rows = Sequence[tuple[bytes, MessageValue]]


class Watched:
    """A table, of which one call is done in another way."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Server(Node):
    """One of two servers on the same tables."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site.cell, name, site.clock)
        store = site.store
        slots = Slots([self.leadership])
        self.fenced = FencedStore(store, slots, SealedRanges(store.message, site.side, site.clock))
        self.message = vars(self.fenced.message)["_table"] = Watched(store.message)
        self.payload = vars(self.fenced.payload)["_table"] = Watched(store.payload)
        self.side = Watched(site.side)
        fenced_side = FencedSide(self.side, slots)  # type: ignore[arg-type]  # it does what a table does
        self.service = MessagingService(self.fenced, site.clock, side=site.side, fenced_side=fenced_side)

    def prepare(self) -> bool:
        return self.service.start_over(lambda _: True)

    def leads(self) -> None:
        """Take over from whoever leads, who is never heard of meanwhile."""
        for _ in range(2 * (SECONDS + DELAY_SECONDS)):
            if self.step():
                return
            self.clock.advance(SECOND)
        raise AssertionError("it does not get to lead")

    def payloads(self) -> list[bytes]:
        pages = self.service.fetch(TOPIC, FetchRequest())
        return [message.payload for page in pages for message in page]

    def interrupted(self, done: Callable[[Rows], Rows], meanwhile: Callable[[], object]) -> None:
        """The next write does some of its rows, then something happens, and then it does the others."""
        put = self.message.put

        def halfway(rows: Rows) -> None:
            self.message.put = put
            first = done(rows)
            put(first)
            meanwhile()
            put([row for row in rows if row not in first])

        self.message.put = halfway


class Site:
    """What two servers share."""

    def __init__(self) -> None:
        self.store, self.side, self.cell = MemoryStore(), MemorySide(), Cell()
        self.clock = ManualClock(NOW_MS, monotonic_ms=60_000)
        self.one, self.other = Server(self, "a"), Server(self, "b")
        self.one.leads()
        self.one.service.create_topic(TOPIC)

    @property
    def sealed_ranges(self) -> SealedRanges:
        """Those of the first server."""
        found: SealedRanges = vars(self.one.fenced.message)["_hook"]._sealed_ranges
        return found

    def close(self) -> None:
        for server in (self.one, self.other):
            server.service.close()

    def rows(self) -> list[bytes | None]:
        """What is in the store, in order."""
        return [row.payload for _, row in self.store.message.read(MESSAGES, PREFIX, None, 100_000).items]


@pytest.fixture
def site() -> Iterator[Site]:
    with closing(Site()) as made:
        yield made


# --- who may ---------------------------------------------------------------------------------------------------------


def test_given_a_server_that_does_not_lead_when_asked_then_it_says_so_and_nothing_is_done(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    service = site.other.service
    refused: list[Callable[[], object]] = [
        lambda: service.publish(TOPIC, [b"b"]),
        lambda: service.store(TOPIC, [b"b"], pointer=pointer(NOW_MS)),
        site.other.payloads,
        lambda: service.rollback(TOPIC, RollbackRange(pointer(NOW_MS), 0, 0, NOW_MS, 0)),
    ]
    for ask in refused:
        with pytest.raises(Unavailable, match="does not lead"):
            ask()
    assert site.rows() == [b"a"]
    assert site.one.payloads() == [b"a"]


def test_given_a_server_that_does_not_lead_when_a_topic_is_made_then_it_is_there_all_the_same(site: Site) -> None:
    other = TopicId.parse("default:other")
    site.other.service.create_topic(other)
    site.one.service.publish(other, [b"a"])


def test_given_a_leader_that_ends_in_good_order_when_the_next_one_leads_then_all_goes_on_without_gaps(
    site: Site,
) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.one.leadership.resign()
    assert site.other.step()
    site.other.service.publish(TOPIC, [b"b"])
    assert site.other.payloads() == [b"a", b"b"]
    assert site.side.get(b"g" + PREFIX) is None


def test_given_payloads_that_are_stored_when_they_are_published_then_the_leader_reads_them(site: Site) -> None:
    site.one.service.store(TOPIC, [b"a"], pointer=pointer(NOW_MS))
    site.one.service.store(TOPIC, [b"b"], pointer=pointer(NOW_MS))
    site.one.service.publish(TOPIC, [], pointer=pointer(NOW_MS))
    assert site.one.payloads() == [b"a", b"b"]
    assert len(site.one.fenced.payload.read(KEYS, TOPIC.prefix, None, 10).items) == 2


# --- writes that come late -------------------------------------------------------------------------------------------


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
def test_given_a_leader_stopped_in_a_write_when_it_is_woken_after_another_began_then_late_rows_are_never_seen(
    site: Site, messages: int, done: slice, seen: list[bytes]
) -> None:
    site.one.service.publish(TOPIC, [b"first"])
    read: list[list[bytes]] = []

    def meanwhile() -> None:
        site.other.leads()
        site.other.service.publish(TOPIC, [b"after"])
        read.append(site.other.payloads())

    site.one.interrupted(lambda rows: rows[done], meanwhile)
    batch = [b"%d" % number for number in range(messages)]
    with pytest.raises(StoreUnavailable, match="lost the lead"):
        site.one.service.publish(TOPIC, batch)
    assert len(site.rows()) == messages + 2, "the late rows are there"
    assert read == [seen]
    for server in (site.other, site.one, site.other, site.one):
        server.leads()
        assert server.payloads() == seen
        assert server.fenced.message.read(KEYS, PREFIX, None, 100_000).items == [
            key for key, row in server.fenced.message.read(MESSAGES, PREFIX, None, 100_000).items
        ]


def test_given_a_leader_stopped_between_two_pieces_of_a_batch_when_it_is_woken_then_the_second_is_not_sent(
    site: Site,
) -> None:
    site.one.interrupted(lambda rows: rows, site.other.leads)
    with pytest.raises(StoreUnavailable, match="not known"):
        site.one.service.publish(TOPIC, [b"m"] * (FRAME_ROWS + 1))
    assert len(site.rows()) == FRAME_ROWS
    assert site.other.payloads() == [b"m"] * FRAME_ROWS


def test_given_a_late_write_in_a_transaction_when_the_leader_is_woken_then_it_does_not_touch_the_rows_any_more(
    site: Site,
) -> None:
    site.one.interrupted(lambda rows: rows[:1], site.other.leads)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a", b"b"], pointer=pointer(NOW_MS))
    pointers = [cell.pointer for cell in site.store.message.read(CELLS, PREFIX, None, 10).items]
    assert pointers == [pointer(NOW_MS)] * 2


def test_given_late_payloads_when_the_leader_is_woken_then_they_are_not_acknowledged(site: Site) -> None:
    put = site.one.payload.put

    def late(rows: object) -> None:
        site.other.leads()
        put(rows)

    site.one.payload.put = late
    with pytest.raises(StoreUnavailable, match="lost the lead"):
        site.one.service.store(TOPIC, [b"a"], pointer=pointer(NOW_MS))


def test_given_gaps_when_the_next_leader_publishes_at_once_then_its_ids_are_behind_them(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.other.leads()
    # Its clock is far behind the former leader's.
    site.clock.step(-10 * 60 * SECOND)
    site.other.service.publish(TOPIC, [b"b"])
    assert site.other.payloads() == [b"a", b"b"]
    ends = site.other.fenced.message.reserved(PREFIX)
    [_, key] = site.store.message.read(KEYS, PREFIX, None, 10).items
    assert int.from_bytes(key[-10:], "big") == ends > position(NOW_MS)


def test_given_a_batch_of_a_former_term_when_it_gets_the_lease_again_then_it_does_not_begin_before_that_has_failed(
    site: Site,
) -> None:
    def meanwhile() -> None:
        site.other.leads()
        site.one.step()
        site.clock.advance(60 * SECOND)
        site.one.step()
        site.clock.advance(60 * SECOND)
        site.one.step()
        assert site.one.lease.held
        assert not site.one.leadership.leads

    site.one.interrupted(lambda rows: rows[:0], meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"])
    site.one.leads()
    assert site.one.payloads() == [b"late"], "it came before anybody could look"


# --- writes that fail, and come late all the same --------------------------------------------------------------------


def failing(server: Server, done: Callable[[Rows], Rows], *, twice: bool = False) -> Callable[[], None]:
    """The next write does some of its rows and fails; returns what does the others, or all of them once more."""
    put, left = server.message.put, list[Rows]()

    def fails(rows: Rows) -> None:
        server.message.put = put
        first = done(rows)
        put(first)
        left.append([row for row in rows if twice or row not in first])
        raise StoreUnavailable("HBase has not answered.", "Try again.")

    def arrive() -> None:
        put(left.pop())

    server.message.put = fails
    return arrive


def registered(site: Site) -> Sent:
    """What the first request of a producer says."""
    generation = site.one.service.producers.register(TOPIC, "importer", UUID(int=1)).generation
    return Sent(TOPIC, "importer", generation, 1)


@pytest.mark.parametrize("moment", ["after it is read", "after the next write", "after it is repeated"])
def test_given_a_write_that_failed_when_its_rows_come_late_then_no_reader_sees_them(site: Site, moment: str) -> None:
    sent = registered(site)
    arrive = failing(site.one, lambda rows: rows[1:2])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    if moment == "after it is read":
        assert site.one.payloads() == []
    elif moment == "after the next write":
        site.one.service.publish(TOPIC, [b"d"])
    site.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    arrive()
    others = [b"d"] if moment == "after the next write" else []
    for server in (site.one, site.other):
        server.leads()
        assert server.payloads() == [*others, b"a", b"b", b"c"]


def test_given_a_write_that_failed_and_is_there_when_repeated_then_it_counts_and_no_late_take_back_can_reach_it(
    site: Site,
) -> None:
    sent, takes_back = registered(site), list[str]()
    for name in ("delete", "invert"):
        setattr(site.one.message, name, lambda *_, name=name: takes_back.append(name))
    for number, tx in enumerate((None, pointer(NOW_MS)), 1):
        failing(site.one, lambda rows: rows)
        request = sent._replace(sequence=number)
        with pytest.raises(StoreUnavailable):
            site.one.service.publish(TOPIC, [b"%d" % number], pointer=tx, sent=request)
        site.other.leads()
        site.other.service.publish(TOPIC, [b"%d" % number], pointer=tx, sent=request)
        site.one.leads()
    assert site.one.payloads() == [b"1", b"2"]
    assert takes_back == []


def test_given_a_write_that_failed_when_it_cannot_be_decided_then_the_topic_is_neither_read_nor_written(
    site: Site,
) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"b"])
    exchange = site.side.exchange_each
    site.side.exchange_each = raising(StoreUnavailable("HBase is away.", "Try again."))  # type: ignore[method-assign]
    uses: list[Callable[[], object]] = [site.one.payloads, lambda: site.one.service.publish(TOPIC, [b"c"])]
    for use in uses:
        with pytest.raises(StoreUnavailable, match="HBase is away"):
            use()
    # Nor does it count now if it comes: what was sent to note that may be done late.
    arrive()
    site.side.exchange_each = exchange  # type: ignore[method-assign]
    site.one.service.publish(TOPIC, [b"c"])
    assert site.one.payloads() == [b"a", b"c"]


def test_given_a_failed_write_and_many_messages_behind_it_when_another_server_leads_then_its_rows_are_not_seen(
    site: Site,
) -> None:
    sent = registered(site)
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a"], sent=sent)
    others = [b"b"] * (FRAME_ROWS + 1)
    site.one.service.publish(TOPIC, others)
    site.other.leads()
    site.other.service.publish(TOPIC, [b"a"], sent=sent)
    arrive()
    assert site.other.payloads() == [*others, b"a"]


def read_on(server: Server, start: MessageId | None) -> tuple[list[bytes], MessageId | None]:
    """What a reader is given behind a message, and where it is then."""
    found = [one for page in server.service.fetch(TOPIC, FetchRequest(start, inclusive=False)) for one in page]
    return [one.payload for one in found], MessageId.parse(found[-1].id) if found else start


def visible(server: Server, tx: int) -> list[bytes]:
    """What a later transaction sees, where that of this pointer was aborted."""
    later = reader(read_pointer=tx + 1, write_pointer=tx + 2)
    return [one.payload for page in server.service.fetch(TOPIC, FetchRequest(transaction=later)) for one in page]


@pytest.mark.parametrize("twice", [False, True])
def test_given_a_write_of_which_a_part_was_done_when_repeated_then_a_reader_is_given_each_message_once(
    site: Site, twice: bool
) -> None:
    sent = registered(site)
    arrive = failing(site.one, lambda rows: rows[1:2], twice=True)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    seen, at = read_on(site.one, None)
    site.one.service.publish(TOPIC, [b"a", b"b", b"c"], sent=sent)
    if twice:
        # Also what was there already, since the request was sent to HBase twice.
        arrive()
        site.one.service.forget(TOPIC)
        assert site.one.payloads() == [b"a", b"b", b"c"]
    assert seen + read_on(site.one, at)[0] == [b"a", b"b", b"c"]


def test_given_a_part_of_a_request_that_a_former_leader_has_left_when_repeated_then_no_part_of_it_comes_twice(
    site: Site,
) -> None:
    sent = registered(site)
    for number, tx in enumerate((None, pointer(NOW_MS)), 1):
        arrive = failing(site.one, lambda rows: rows[1:2], twice=True)
        with pytest.raises(StoreUnavailable):
            site.one.service.publish(TOPIC, [b"a", b"b", b"c"], pointer=tx, sent=sent._replace(sequence=number))
        site.other.leads()
        site.other.service.publish(TOPIC, [b"a", b"b", b"c"], pointer=tx, sent=sent._replace(sequence=number))
        arrive()
        site.one.leads()
    assert site.one.payloads() == [b"a", b"b", b"c"] * 2


@pytest.mark.parametrize("moment", ["after it is rolled back", "as it is taken back"])
def test_given_a_failed_write_in_a_transaction_when_its_rows_come_late_then_no_reader_sees_them(
    site: Site, moment: str
) -> None:
    tx, invert = pointer(NOW_MS), site.one.message.invert
    arrive = failing(site.one, lambda _: [])

    def inverts(cells: Sequence[TxCell], origin: Origin | None) -> list[bool]:
        found: list[bool] = invert(cells, origin)
        arrive()
        return found

    if moment == "as it is taken back":
        site.one.message.invert = inverts
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"], pointer=tx)
    if moment == "after it is rolled back":
        site.one.service.rollback(TOPIC, tx)
        arrive()
    assert visible(site.one, tx) == []


@pytest.mark.parametrize("of_a_producer", [False, True])
def test_given_a_failed_write_when_the_lead_is_handed_back_then_the_next_leader_knows_of_it(
    site: Site, of_a_producer: bool
) -> None:
    sent = registered(site) if of_a_producer else None
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"], sent=sent)
    for _ in range(DELAY_SECONDS + 1):
        site.clock.advance(SECOND)
        site.one.step()
    site.one.leadership.resign()
    assert site.other.step()
    again = b"late" if of_a_producer else b"b"
    site.other.service.publish(TOPIC, [again], sent=sent)
    arrive()
    site.other.service.forget(TOPIC)
    assert site.other.payloads() == [again]


def test_given_messages_that_were_archived_when_a_write_fails_then_they_are_seen_once_they_are_restored(
    site: Site,
) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.other.leads()
    site.other.service.publish(TOPIC, [b"b"])
    site.clock.advance(SECOND)
    site.other.service.publish(TOPIC, [b"c"])
    archived = site.store.message.read(MESSAGES, PREFIX, None, 100).items
    site.clock.advance(3600 * SECOND)
    site.other.leads()
    site.store.message.delete([key for key, _ in archived])
    failing(site.other, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.other.service.publish(TOPIC, [b"late"])
    assert site.other.payloads() == []
    site.store.message.put(archived)
    site.other.service.forget(TOPIC)
    assert site.other.payloads() == [b"a", b"b", b"c"]


def test_given_rows_of_one_write_that_lie_far_apart_when_they_come_late_then_no_reader_sees_them(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    at = position(NOW_MS + 1)
    rows = [(PREFIX + tail(one), MessageValue(None, b"late")) for one in (at, at + FRAME_ROWS)]

    def meanwhile() -> None:
        site.other.leads()
        assert site.other.payloads() == [b"a"]

    site.one.interrupted(lambda rows: rows[1:], meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.fenced.message.put(rows)
    site.other.service.forget(TOPIC)
    assert site.other.payloads() == [b"a"]


def test_given_a_gap_that_is_written_late_when_the_rows_had_come_before_then_it_hides_nothing_acknowledged(
    site: Site,
) -> None:
    sent, exchange, left = registered(site), site.side.exchange_each, list[Sequence[SideChange]]()
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"a"], sent=sent)

    def unanswered(changes: Sequence[SideChange]) -> list[bool]:
        site.side.exchange_each = exchange  # type: ignore[method-assign]
        left.append(changes)
        raise StoreUnavailable("HBase has not answered.", "Try again.")

    site.side.exchange_each = unanswered  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        site.one.payloads()
    arrive()
    site.one.service.publish(TOPIC, [b"a"], sent=sent)
    exchange(left.pop())
    for server in (site.one, site.other):
        server.leads()
        assert server.payloads() == [b"a"]


def test_given_a_write_that_fails_with_an_error_of_the_program_when_the_lead_is_handed_back_then_it_is_not_at_once(
    site: Site,
) -> None:
    site.one.message.put = raising(ValueError("no row"))
    with pytest.raises(ValueError, match="no row"):
        site.one.service.publish(TOPIC, [b"late"])
    site.one.leadership.resign()
    assert site.cell.record.holder == "a"


def test_given_a_write_that_fails_as_the_lead_is_handed_back_then_it_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, fails, put = Event(), Event(), site.one.message.put
    held = vars(site.one.leadership)
    held["failed"] = held.pop("_failed_ms")

    def waiting(_: Rows) -> None:
        site.one.message.put = put
        writes.set()
        assert fails.wait(10)
        raise StoreUnavailable("HBase has not answered.", "Try again.")

    def slowly(leadership: Leadership) -> int | None:
        """The thread that gives the lease back is held up behind this look."""
        found: int | None = vars(leadership)["failed"]
        fails.set()
        with suppress(StoreUnavailable):
            publishing.result()
        return found

    failed_ms = property(slowly, lambda leadership, ms: vars(leadership).update(failed=ms))
    monkeypatch.setattr(Leadership, "_failed_ms", failed_ms, raising=False)
    site.one.message.put = waiting
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(site.one.service.publish, TOPIC, [b"late"])
        assert writes.wait(10)
        site.one.leadership.hand_back()
        site.one.step()
        fails.set()
    assert site.cell.record.holder == "a"


def test_given_writes_that_fail_again_and_again_then_the_gaps_that_are_not_needed_go(site: Site) -> None:
    for number in range(600):
        failing(site.one, (lambda rows: rows) if number < 5 else lambda _: [])
        with pytest.raises(StoreUnavailable):
            site.one.service.publish(TOPIC, [b"a", b"b"])
        site.one.service.publish(TOPIC, [b"c"])
        site.clock.advance(REACH_MS // 100)
        site.one.lease.renew()
    assert len(Gaps.parse(site.side.get(b"g" + PREFIX)).spans) < 520
    assert site.one.payloads() == [b"a", b"b", b"c"] * 5 + [b"c"] * 595


def test_given_many_rows_that_are_not_shown_when_the_first_one_is_looked_for_then_a_few_pages_are_read(
    site: Site,
) -> None:
    failing(site.one, lambda rows: rows[1:])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"m"] * 3000)
    site.one.service.publish(TOPIC, [b"x"])
    calls = site.store.calls["keys"]
    assert site.one.fenced.message.first(PREFIX) is not None
    assert site.store.calls["keys"] - calls < 10


def test_given_a_lease_that_was_lost_when_the_terms_begin_anew_then_topics_are_sealed_anew(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"x"])
    site.other.leads()
    site.one.leads()
    site.one.service.publish(TOPIC, [b"y"])
    site.cell.value = None
    for _ in range(2 * (SECONDS + DELAY_SECONDS)):
        site.clock.advance(SECOND)
        site.one.step()
    site.one.leads()
    site.one.service.forget(TOPIC)
    assert site.one.payloads() == [b"x", b"y"]


def test_given_a_store_that_fails_for_long_then_there_is_one_gap_and_another_behind_a_message(site: Site) -> None:
    def fail(times: int) -> None:
        for _ in range(times):
            failing(site.one, lambda _: [])
            with pytest.raises(StoreUnavailable):
                site.one.service.publish(TOPIC, [b"a", b"b"])
            site.clock.advance(SECOND)

    fail(5)
    site.one.service.publish(TOPIC, [b"c"])
    fail(5)
    assert site.one.payloads() == [b"c"]
    assert len(Gaps.parse(site.side.get(b"g" + PREFIX)).spans) == 2


def test_given_a_failed_write_of_a_former_term_when_it_leads_again_then_what_others_wrote_meanwhile_is_seen(
    site: Site,
) -> None:
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"])
    site.other.leads()
    site.other.service.publish(TOPIC, [b"a"])
    arrive()
    site.one.leads()
    assert site.one.payloads() == [b"a"]
    site.one.service.publish(TOPIC, [b"b"])
    assert site.one.payloads() == [b"a", b"b"]


def test_given_gaps_that_another_server_has_written_when_a_failed_write_is_to_be_decided_then_it_is_not(
    site: Site,
) -> None:
    failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"])
    read = site.side.get

    def changed(key: bytes) -> bytes | None:
        value = read(key)
        if key == b"g" + PREFIX:
            site.side.put([(key, Gaps((PositionRange(1, 2),)).pack())])
        return value

    site.side.get = changed  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="changed meanwhile"):
        site.one.payloads()


def test_given_a_failed_write_of_a_producer_when_the_next_instance_is_registered_then_nothing_of_it_comes_late(
    site: Site,
) -> None:
    register = site.one.service.producers.register
    sent = registered(site)
    arrive = failing(site.one, lambda _: [])
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"], sent=sent)
    register(TOPIC, "importer", UUID(int=2))
    arrive()
    assert site.one.payloads() == []


def test_given_a_consumer_that_is_ahead_when_a_leader_is_deposed_then_the_next_one_begins_behind_its_last_ids(
    site: Site,
) -> None:
    def meanwhile() -> None:
        site.other.leads()
        site.other.service.publish(TOPIC, [b"b"])

    site.one.service.publish(TOPIC, [b"a"])
    site.one.service.consumers.put(TOPIC, "billing", MessageId(NOW_MS + 100_000, 0))
    site.one.interrupted(lambda _: [], meanwhile)
    with pytest.raises(StoreUnavailable):
        site.one.service.publish(TOPIC, [b"late"])
    site.other.service.forget(TOPIC)
    assert site.other.payloads() == [b"a", b"b"]


# --- threads that are held up while they seal ------------------------------------------------------------------------


def test_given_a_thread_that_is_held_up_before_it_reads_the_gaps_when_others_have_led_then_it_hides_nothing_of_theirs(
    site: Site,
) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.other.leads()
    site.one.leads()
    get = site.side.get

    def slowly(key: bytes) -> bytes | None:
        if key == b"g" + PREFIX:
            site.side.get = get  # type: ignore[method-assign]
            site.other.leads()
            site.other.service.publish(TOPIC, [b"x"])
        return get(key)

    site.side.get = slowly  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        site.one.payloads()
    site.other.service.publish(TOPIC, [b"y"])
    site.one.leads()
    assert site.one.payloads() == [b"a", b"x", b"y"]


def test_given_a_thread_of_a_former_term_when_it_is_to_seal_then_it_does_not(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.other.leads()
    site.one.leads()
    term = site.one.leadership.term()
    site.other.leads()
    site.one.leads()
    site.one.service.publish(TOPIC, [b"x"])
    with pytest.raises(StoreUnavailable, match="lost the lead"):
        site.sealed_ranges.settle(term, PREFIX, site.one.leadership.confirm)
    site.one.service.publish(TOPIC, [b"y"])
    site.one.service.forget(TOPIC)
    assert site.one.payloads() == [b"a", b"x", b"y"]


def test_given_a_leader_whose_clock_is_behind_when_it_is_deposed_then_the_next_one_begins_behind_its_first_ids(
    site: Site,
) -> None:
    site.clock.step(200 * SECOND)
    site.one.service.publish(TOPIC, [b"a"])
    site.one.lease.renew()
    site.clock.step(-200 * SECOND)
    site.other.leads()

    def meanwhile() -> None:
        site.one.leads()
        site.one.service.publish(TOPIC, [b"b"])

    site.other.interrupted(lambda _: [], meanwhile)
    with pytest.raises(StoreUnavailable):
        site.other.service.publish(TOPIC, [b"late"])
    site.one.service.forget(TOPIC)
    assert site.one.payloads() == [b"a", b"b"]


# --- reads and changes -----------------------------------------------------------------------------------------------


def test_given_a_leader_stopped_while_it_reads_when_it_is_woken_then_nobody_gets_what_it_read(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    site.one.service.forget()
    read = site.one.message.read

    def slowly(want: Want[Any], *arguments: Any) -> Page[Any]:
        page: Page[Any] = read(want, *arguments)
        if want.call == "rows":
            site.other.leads()
        return page

    site.one.message.read = slowly
    with pytest.raises(Unavailable, match="does not lead"):
        site.one.payloads()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_given_a_leader_stopped_in_a_rollback_when_it_is_woken_then_it_says_that_it_does_not_know(
    site: Site, moment: str
) -> None:
    published = site.one.service.publish(TOPIC, [b"a"], pointer=pointer(NOW_MS))
    assert published is not None
    name = {"before": "read", "after": "invert"}[moment]
    call = getattr(site.one.message, name)

    def slowly(*arguments: object) -> object:
        answer = call(*arguments)
        site.other.leads()
        return answer

    setattr(site.one.message, name, slowly)
    with pytest.raises((StoreUnavailable, Unavailable)) as caught:
        site.one.service.rollback(TOPIC, published)
    assert isinstance(caught.value, Unavailable if moment == "before" else StoreUnavailable)


def test_given_a_server_that_does_not_lead_when_rows_are_to_be_taken_back_then_it_does_not_know(site: Site) -> None:
    with pytest.raises(StoreUnavailable, match="lost the lead"):
        site.other.fenced.payload.delete([b"k"])


def test_given_a_store_that_fails_when_written_then_the_lease_is_not_given_back_soon(site: Site) -> None:
    changes: list[tuple[Watched, str, Callable[[], object]]] = [
        (site.one.message, "put", lambda: site.one.service.publish(TOPIC, [b"a"])),
        (site.one.payload, "put", lambda: site.one.service.store(TOPIC, [b"a"], pointer=pointer(NOW_MS))),
        (site.one.message, "delete", lambda: site.one.fenced.message.delete([b"k"])),
    ]
    for table, name, change in changes:
        site.clock.advance(60 * SECOND)
        site.one.step()
        setattr(table, name, raising(StoreError("HBase is away.")))
        with pytest.raises(StoreError, match="HBase is away"):
            change()
    site.one.leadership.resign()
    assert site.cell.record.holder == "a"


def test_what_is_neither_read_nor_written_goes_to_the_store_itself(site: Site) -> None:
    fenced = site.other.fenced
    assert fenced.identity() == site.store.identity()
    assert fenced.message.estimate_bytes(b"", None) == site.store.message.estimate_bytes(b"", None)
    fenced.payload.sync()
    fenced.message.compact(b"a", b"b")
    fenced.close()
    site.one.service.publish(TOPIC, [b"a"])


def test_given_keys_that_are_of_no_topic_when_read_then_nothing_is_hidden(site: Site) -> None:
    assert site.one.fenced.message.read(KEYS, b"", None, 10).items == []
    assert site.one.fenced.message.read(MESSAGES, b"default:t:", None, 10).items == []


def test_given_gaps_in_a_generation_when_read_up_to_a_later_one_then_nothing_of_that_is_hidden(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a"])
    [key] = site.store.message.read(KEYS, PREFIX, None, 10).items
    site.other.leads()
    start, stop = generation_prefix(TOPIC.prefix, 0), generation_prefix(TOPIC.prefix, 2)
    assert site.other.fenced.message.reserved(start) > int.from_bytes(key[-10:], "big")
    assert site.other.fenced.message.read(KEYS, start, stop, 10).items == [key]
    assert [found for found, _ in site.other.fenced.message.read(MESSAGES, start, stop, 10).items] == [key]


# --- positions and claims ---------------------------------------------------------------------------------------------

FIRST, SECOND_ID = MessageId(NOW_MS, 0), MessageId(NOW_MS, 1)
EVERY_ROW = reader()


def late_position(site: Site, change: Callable[[MessagingService], object], meanwhile: Callable[[], object]) -> None:
    """The next position that the first server writes is on its way while something happens, then it arrives."""
    exchange = site.one.side.exchange_each

    def held_up(changes: Sequence[SideChange]) -> list[bool]:
        site.one.side.exchange_each = exchange
        meanwhile()
        done: list[bool] = exchange(changes)
        return done

    site.one.side.exchange_each = held_up
    with pytest.raises((StoreUnavailable, Unavailable)):
        change(site.one.service)


def test_given_a_server_that_does_not_lead_when_asked_for_consumers_then_nothing_is_done(site: Site) -> None:
    site.one.service.consumers.put(TOPIC, "billing", MessageId(0, 0))
    service = site.other.service
    refused: list[Callable[[], object]] = [
        lambda: service.consumers.put(TOPIC, "billing", FIRST),
        lambda: service.consumers.get(TOPIC, "billing"),
        lambda: service.consumers.delete(TOPIC, "billing"),
        lambda: service.groups.poll(TOPIC, "billing", GroupPoll(EVERY_ROW, 1)),
        lambda: service.groups.roll_back(TOPIC, "billing", 1),
    ]
    for ask in refused:
        with pytest.raises((Unavailable, StoreUnavailable)):
            ask()
    assert site.one.service.consumers.get(TOPIC, "billing").id == MessageId(0, 0)


def test_trap_c_given_a_late_position_of_a_deposed_leader_then_it_does_not_set_a_consumer_back(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a", b"b"])
    site.one.service.consumers.put(TOPIC, "billing", MessageId(0, 0))

    def meanwhile() -> None:
        site.other.leads()
        site.other.service.consumers.put(TOPIC, "billing", SECOND_ID)

    late_position(site, lambda service: service.consumers.put(TOPIC, "billing", FIRST), meanwhile)
    assert site.other.service.consumers.get(TOPIC, "billing").id == SECOND_ID


def test_trap_c_given_a_late_base_of_a_deposed_leader_then_what_is_done_is_not_given_out_again(site: Site) -> None:
    site.one.service.publish(TOPIC, [b"a", b"b"])
    for server in (site.one, site.other):
        with suppress(Unavailable):
            server.service.consumers.put(TOPIC, "billing", MessageId(0, 0))
    first, second, third = pointer(NOW_MS, 1), pointer(NOW_MS, 2), pointer(NOW_MS, 3)

    def poll(service: MessagingService, tx: int) -> list[bytes]:
        seen = reader(read_pointer=tx - 1, write_pointer=tx)
        given = service.groups.poll(TOPIC, "billing", GroupPoll(seen, 1))
        return [message.payload for message in given.messages]

    assert poll(site.one.service, first) == [b"a"]

    def meanwhile() -> None:
        site.other.leads()
        assert poll(site.other.service, third) == [b"b"]

    # The first server merges the first claim and is stopped before it writes that down.
    late_position(site, lambda service: poll(service, second), meanwhile)
    assert site.other.service.consumers.get(TOPIC, "billing").id == FIRST
    assert poll(site.other.service, pointer(NOW_MS, 4)) == []
