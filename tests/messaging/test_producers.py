"""Producers: the newest instance counts, what is repeated is done once, what comes late is not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.builders import DAY, HOUR, NOW_MS, SECOND
from tests.messaging.desk import named
from tests.messaging.group_desk import ORDERS, READ_NONE, GroupDesk, opened
from tests.support import raising
from tms_core.consumers.retention import announce
from tms_core.errors import (
    BadRequest,
    MessagingError,
    NotInProgress,
    ProducerFenced,
    ProducerNotFound,
    StoreError,
    TransactionEnded,
    Unavailable,
)
from tms_core.messaging import remembered
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.producers.announcements import AHEAD_MS
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import (
    LastTransaction,
    ProducerName,
    Registration,
    TransactionOutcome,
    begun_by,
    tidy,
)
from tms_core.messaging.publish import pipeline
from tms_core.messaging.publish.pipeline import MessageWriteBatch
from tms_core.messaging.publish.workers import Answer, Batch
from tms_core.messaging.remembered import RememberedRows
from tms_core.rowkey import MessageId
from tms_core.tables.base import CELLS, KEYS, MessageValue
from tms_core.tables.memory import MemoryStore
from tms_core.tables.recently_used import RecentlyUsed
from tms_core.tables.side import MemorySide, SideChange
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction

BILLS = named("bills")


class Instance:
    """One instance of a producer, which numbers its requests."""

    def __init__(self, desk: GroupDesk, name: str = "importer") -> None:
        self.desk, self.name, self.uuid, self.sequence = desk, name, uuid4(), 0
        self.generation, self.former = self.register()

    def register(self) -> tuple[int, LastTransaction | None]:
        known = self.desk.service.producers.register(BILLS, self.name, self.uuid)
        return known.generation, known.former

    def sent(self, *, again: bool = False, label: str = "") -> Sent:
        self.sequence += not again
        return Sent(BILLS, self.name, self.generation, self.sequence, label)

    def publish(
        self, *messages: bytes, tx: Transaction | None = None, again: bool = False, label: str = "", **options: Any
    ) -> object:
        sent, pointer = self.sent(again=again, label=label), None if tx is None else tx.write_pointer
        topic = options.pop("topic", BILLS)
        return self.desk.service.publish(topic, messages, pointer=pointer, sent=sent, **options)

    def store(self, *messages: bytes, tx: Transaction, again: bool = False) -> None:
        self.desk.service.store(BILLS, messages, pointer=tx.write_pointer, sent=self.sent(again=again))

    def begin(self, tx: Transaction, label: str = "") -> None:
        self.desk.service.note_begun(self.sent(label=label), tx.write_pointer)

    def roll_back(self, tx: Transaction) -> None:
        self.desk.service.producers.roll_back(self.sent(again=True), tx.write_pointer)
        self.desk.service.rollback(BILLS, tx.write_pointer)


@pytest.fixture(params=["memory", "leveldb"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupDesk]:
    with opened(request.param, tmp_path) as made:
        made.service.create_topic(BILLS)
        yield made


def seen(desk: GroupDesk, topic: TopicId = BILLS) -> list[bytes]:
    """What a transaction that begins now reads."""
    reader = desk.begin()
    found = [one.payload for page in desk.service.fetch(topic, FetchRequest(transaction=reader)) for one in page]
    desk.manager.abort(reader)
    return found


def everything(desk: GroupDesk, topic: TopicId = BILLS) -> list[bytes]:
    return [one.payload for page in desk.service.fetch(topic, FetchRequest()) for one in page]


# --- instances -------------------------------------------------------------------------------------------------------


def test_given_an_instance_when_it_asks_again_then_it_has_the_same_generation_and_another_one_a_higher(
    desk: GroupDesk,
) -> None:
    one = Instance(desk)
    assert one.former is None
    desk.restart()
    assert one.register() == (one.generation, None)
    two = Instance(desk)
    assert two.generation == one.generation + 1
    with pytest.raises(ProducerFenced, match=f"generation {two.generation} now, and {one.generation} is fenced"):
        one.publish(b"late")
    desk.restart()
    with pytest.raises(ProducerFenced):
        one.publish(b"late")
    two.publish(b"a")
    assert everything(desk) == [b"a"]


def test_given_two_first_starts_at_once_then_each_has_a_number_of_its_own_and_one_of_them_counts(
    desk: GroupDesk,
) -> None:
    service, (first, second) = desk.service, (uuid4(), uuid4())
    other = desk.serve()
    one, two = service.producers.register(BILLS, "x", first), other.producers.register(BILLS, "x", second)
    assert two.generation == one.generation + 1
    service.forget()
    with pytest.raises(ProducerFenced):
        service.publish(BILLS, [b"a"], sent=Sent(BILLS, "x", one.generation, 1))
    other.close()


@pytest.mark.parametrize("end", ["commit", "roll back", "time out", "leave open", "abort alone"])
def test_given_a_former_that_ended_somehow_when_the_next_is_registered_then_it_is_told_what_became_of_its_last(
    desk: GroupDesk, end: str
) -> None:
    former, tx = Instance(desk), desk.begin()
    former.publish(b"a", tx=tx, label="file 17 ü")
    if end == "commit":
        desk.commit(tx)
    elif end == "roll back":
        former.roll_back(tx)
        desk.manager.abort(tx)
    elif end == "time out":
        desk.time_out(tx)
    elif end == "abort alone":
        desk.service.rollback(BILLS, tx.write_pointer)
        desk.manager.invalidate(tx.transaction_id)
    desk.restart()
    heir = Instance(desk)
    outcome = TransactionOutcome.COMMITTED if end == "commit" else TransactionOutcome.ABORTED
    assert heir.former == LastTransaction(tx.write_pointer, "file 17 ü", outcome)
    assert seen(desk) == ([b"a"] if end == "commit" else [])
    # One that does nothing hands on what it was told.
    assert Instance(desk).former == heir.former
    if end == "leave open":
        with pytest.raises(Exception, match="not in progress"):
            desk.commit(tx)


@pytest.mark.parametrize("end", ["leave open", "roll back", "time out"])
def test_given_a_committed_transaction_and_then_one_that_is_not_then_the_next_instance_is_told_of_the_first(
    desk: GroupDesk, end: str
) -> None:
    one, committed = Instance(desk), desk.begin()
    one.publish(b"a", tx=committed, label="file 1")
    desk.commit(committed)
    for turn in range(2):
        instance, tx = one if not turn else Instance(desk), desk.begin()
        instance.publish(b"b", tx=tx, label="file 2")
        if end == "roll back":
            instance.roll_back(tx)
            desk.manager.abort(tx)
        elif end == "time out":
            desk.time_out(tx)
            desk.service.rollback(BILLS, tx.write_pointer)
            clean(desk)
            desk.manager.truncate_invalid([tx.transaction_id])
        # Told of file 2 alone, it would publish file 1 again.
        assert Instance(desk).former == LastTransaction(committed.write_pointer, "file 1", TransactionOutcome.COMMITTED)
    assert seen(desk) == [b"a"]


def test_given_a_transaction_with_a_checkpoint_when_a_newer_instance_is_registered_then_nothing_of_it_is_committed(
    desk: GroupDesk,
) -> None:
    desk.publish(b"order")
    one, tx = Instance(desk), desk.begin()
    assert desk.poll(tx) == [b"order"]
    one.publish(b"bill", tx=desk.manager.checkpoint(tx), label="file 1")
    heir = Instance(desk)
    assert heir.former is not None
    assert heir.former.outcome is TransactionOutcome.ABORTED
    # Or the order would be done, and its bill never be seen.
    with pytest.raises(NotInProgress):
        desk.commit(tx)
    assert desk.poll(desk.begin()) == [b"order"]


def test_given_a_transaction_that_only_reads_when_a_newer_instance_is_registered_then_nothing_of_it_is_committed(
    desk: GroupDesk,
) -> None:
    desk.publish(b"order")
    one, tx = Instance(desk), desk.begin()
    assert desk.poll(tx) == [b"order"]
    for _ in range(2):
        one.begin(tx, "file 1")
    [begun] = desk.service.producers.get(BILLS, "importer")[1]
    assert (begun.pointer, begun.label) == (tx.write_pointer, "file 1")
    desk.restart()
    heir = Instance(desk)
    assert heir.former == LastTransaction(tx.write_pointer, "file 1", TransactionOutcome.ABORTED)
    with pytest.raises(NotInProgress):
        desk.commit(tx)
    late = desk.begin()
    assert desk.poll(late) == [b"order"]
    with pytest.raises(ProducerFenced):
        one.begin(late)
    heir.begin(late, "file 1")
    desk.commit(late)
    assert Instance(desk).former == LastTransaction(late.write_pointer, "file 1", TransactionOutcome.COMMITTED)
    assert (everything(desk), desk.poll(desk.begin())) == ([], [])


def test_given_transactions_that_only_read_then_decided_ones_are_not_kept_and_ended_ones_are_refused(
    desk: GroupDesk,
) -> None:
    one = Instance(desk)
    for number in range(5):
        tx = desk.begin()
        one.begin(tx, str(number))
        assert [begun.label for begun in desk.service.producers.get(BILLS, "importer")[1]] == [str(number)]
        desk.commit(tx)
    assert len(begun_by(desk.side, ProducerName(BILLS, 1, "importer"))) == 2
    with pytest.raises(TransactionEnded):
        one.begin(tx)
    rolled_back = desk.begin()
    one.begin(rolled_back)
    one.roll_back(rolled_back)
    with pytest.raises(TransactionEnded):
        one.begin(rolled_back)
    with pytest.raises(BadRequest, match="too long"):
        one.begin(desk.begin(), "x" * 1001)
    with pytest.raises(BadRequest, match="0 is no write pointer"):
        desk.service.note_begun(one.sent(), 0)
    with pytest.raises(TransactionEnded):
        desk.service.note_begun(one.sent(), desk.begin().write_pointer + 10**6)


def test_number_that_skips_is_taken_and_what_it_skipped_is_refused(desk: GroupDesk) -> None:
    one = Instance(desk)
    one.publish(b"1")
    # Number 2 goes to another topic, and 3 got lost on its way.
    one.publish(b"2", topic=ORDERS)
    one.sequence = 3
    one.publish(b"4")
    with pytest.raises(BadRequest, match="Request 3 of producer importer comes after its request 4"):
        desk.service.publish(BILLS, [b"3"], sent=Sent(BILLS, "importer", one.generation, 3))
    assert (everything(desk), everything(desk, ORDERS)) == ([b"1", b"4"], [b"2"])


@pytest.mark.parametrize("managed", [True, False])
def test_given_a_newer_instance_that_comes_while_a_transaction_is_written_down_then_it_is_refused_or_ended(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, managed: bool
) -> None:
    one, tx = Instance(desk), desk.begin()
    if not managed:
        desk.service.producers._transactions = desk.service.producers._requests._transactions = None
    exchange_each = desk.side.exchange_each
    heirs: list[Instance] = []

    def late(changes: Sequence[SideChange]) -> list[bool]:
        monkeypatch.setattr(desk.side, "exchange_each", exchange_each)
        heirs.append(Instance(desk))
        return exchange_each(changes)

    monkeypatch.setattr(desk.side, "exchange_each", late)
    with pytest.raises(ProducerFenced):
        one.begin(tx)
    assert heirs[0].former is None


def test_given_several_transactions_then_the_last_one_is_told_and_decided_ones_are_not_kept(desk: GroupDesk) -> None:
    one = Instance(desk)
    for number in range(5):
        tx = desk.begin()
        one.publish(b"%d" % number, tx=tx, label=str(number))
        assert [begun.label for begun in desk.service.producers.get(BILLS, "importer")[1]] == [str(number)]
        desk.commit(tx)
    heir = Instance(desk)
    assert heir.former is not None
    assert (heir.former.label, heir.former.outcome) == ("4", TransactionOutcome.COMMITTED)
    assert desk.service.producers.get(BILLS, "importer")[1] == []


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_given_many_transactions_that_are_managed_elsewhere_when_another_begins_then_few_rows_are_read(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, *, told: bool, restarted: bool
) -> None:
    def elsewhere() -> None:
        producers = desk.service.producers
        producers._transactions = producers._requests._transactions = None

    elsewhere()
    one, most, rows = Instance(desk), list[int](), desk.side.rows

    def read(start: bytes, *rest: Any) -> Any:
        found = rows(start, *rest)
        if start[:1] == b"t":
            most.append(len(found.items))
        return found

    monkeypatch.setattr(desk.side, "rows", read)
    for number in range(100):
        tx = desk.begin()
        sent = one.sent(label=str(number))._replace(oldest_open=tx.write_pointer if told else 0)
        desk.service.publish(BILLS, [b"a"], pointer=tx.write_pointer, sent=sent)
        desk.commit(tx)
        if restarted and number % 10 == 0:
            desk.restart()
            elsewhere()
    assert max(most) <= (2 if told else 32)
    heir = Instance(desk)
    assert heir.former is not None
    assert (heir.former.label, heir.former.outcome) == ("99", TransactionOutcome.PENDING)
    left = len(rows(b"t", b"u", 1000).items)
    assert left == (2 if told else 100)
    # As long as a transaction may last, nothing of the others is known.
    desk.clock.advance(2 * HOUR)
    for _ in range(5):
        tx = desk.begin()
        heir.publish(b"b", tx=tx)
        desk.commit(tx)
    assert len(rows(b"t", b"u", 1000).items) <= 6


def test_given_a_producer_when_listed_shown_and_deleted_then_its_instance_is_fenced(desk: GroupDesk) -> None:
    one, tx = Instance(desk), desk.begin()
    one.publish(b"a", tx=tx, label="x")
    [(name, known, open_)] = desk.service.producers.of(BILLS)
    assert (name, known.generation, [begun.pointer for begun in open_]) == (
        "importer",
        one.generation,
        [tx.write_pointer],
    )
    desk.service.producers.delete(BILLS, "importer")
    assert desk.service.producers.of(BILLS) == []
    for call in (desk.service.producers.get, desk.service.producers.delete):
        with pytest.raises(ProducerNotFound):
            call(BILLS, "importer")
    with pytest.raises(ProducerFenced, match="not known"):
        one.publish(b"b")
    with pytest.raises(Exception, match="not in progress"):
        desk.commit(tx)
    again = Instance(desk)
    assert again.generation > one.generation + 1
    assert again.former is None


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_given_a_deletion_that_is_cut_off_when_it_is_repeated_then_it_is_finished(
    desk: GroupDesk, at: int, *, behind: bool
) -> None:
    one, tx = Instance(desk), desk.begin()
    one.publish(b"a", tx=tx)
    with pytest.MonkeyPatch.context() as patched:
        dies, exchange = Dies(at, StoreError, behind=behind), desk.side.exchange_each
        patched.setattr(desk.side, "exchange_each", lambda changes: dies.write(partial(exchange, changes)))
        with pytest.raises(StoreError):
            desk.service.producers.delete(BILLS, "importer")
    if (at, behind) == (2, True):
        with pytest.raises(ProducerNotFound):
            desk.service.producers.delete(BILLS, "importer")
    else:
        desk.service.producers.delete(BILLS, "importer")
    with pytest.raises(NotInProgress):
        desk.commit(tx)
    assert desk.side.rows(b"q", b"r", 10).items == desk.side.rows(b"t", b"u", 10).items == []
    with pytest.raises(ProducerNotFound):
        desk.service.producers.delete(BILLS, "importer")
    assert Instance(desk).generation > one.generation + 1


def test_given_as_many_producers_as_a_topic_may_have_then_no_other_name_is_taken_until_one_is_forgotten(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "MOST_NAMES", 3)
    for name in ("a", "b", "c"):
        desk.service.producers.register(BILLS, name, uuid4())
    for _ in range(2):
        with pytest.raises(BadRequest, match="has 3 producers, the most there may be"):
            desk.service.producers.register(BILLS, "d", uuid4())
        # Another instance is no other producer, and another topic has its own.
        desk.service.producers.register(BILLS, "a", uuid4())
        desk.restart()
    desk.service.producers.register(ORDERS, "d", uuid4())
    desk.side.delete([ProducerName(BILLS, 1, "b").key])
    desk.service.producers.register(BILLS, "d", uuid4())
    with pytest.raises(BadRequest):
        desk.service.producers.register(BILLS, "b", uuid4())


def test_given_more_topics_than_are_counted_then_what_is_known_of_them_does_not_grow_and_the_bound_holds(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "MOST_NAMES", 2)
    monkeypatch.setattr(desk.service.producers._names._numbers, "_most", 3)
    for life in range(8):
        for name in ("a", "b"):
            desk.service.producers.register(BILLS, f"{name}{life}", uuid4())
        with pytest.raises(BadRequest, match="has 2 producers"):
            desk.service.producers.register(BILLS, "c", uuid4())
        assert len(desk.service.producers._names._numbers) <= 3
        desk.service.delete_topic(BILLS)
        desk.service.create_topic(BILLS, {})


def test_given_what_is_no_producer_then_it_is_refused(desk: GroupDesk) -> None:
    one = Instance(desk)
    with pytest.raises(BadRequest, match="cannot be a producer"):
        desk.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "a/b", 1, 1))
    for sequence in (0, 2**63):
        with pytest.raises(BadRequest, match=f"^{sequence} is no sequence number"):
            desk.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "importer", one.generation, sequence))
    with pytest.raises(BadRequest, match="A label of 1002 bytes is too long"):
        one.publish(b"a", label="ü" * 501)
    with pytest.raises(BadRequest):
        desk.service.producers.register(BILLS, "x", UUID(int=0))
    with pytest.raises(ProducerFenced):
        desk.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "none", 1, 1))
    assert everything(desk) == []


# --- repetition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_given_a_request_when_repeated_then_it_is_there_once_and_answered_alike(
    desk: GroupDesk, *, restarted: bool, inside: bool
) -> None:
    one, tx = Instance(desk), desk.begin() if inside else None
    for number in range(3):
        first = one.publish(b"%d" % number, b"x", tx=tx)
        if restarted:
            desk.restart()
        assert one.publish(b"%d" % number, b"x", tx=tx, again=True) == first
    if tx is not None:
        desk.commit(tx)
    assert seen(desk) == [b"0", b"x", b"1", b"x", b"2", b"x"]
    one.sequence = 1
    with pytest.raises(BadRequest, match="comes after its request 3"):
        one.publish(b"old", again=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_given_payloads_that_are_stored_twice_then_they_are_published_once(desk: GroupDesk, *, restarted: bool) -> None:
    one, tx = Instance(desk), desk.begin()
    for batch in ((b"a", b"b"), (b"c",)):
        one.store(*batch, tx=tx)
        if restarted:
            desk.restart()
        one.store(*batch, tx=tx, again=True)
    assert one.publish(tx=tx) == one.publish(tx=tx, again=True)
    desk.commit(tx)
    assert seen(desk) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("kind", ["store", "publish what was stored"])
def test_given_a_request_that_failed_behind_its_rows_when_repeated_then_it_is_known_what_is_stored_and_not_published(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    one, before = Instance(desk), desk.begin()
    one.publish(b"0", tx=before)
    desk.commit(before)
    # From here on nothing of a new transaction is looked up.
    desk.clock.advance(600 * SECOND)
    tx = desk.begin()
    table: Any = desk.store.payload
    if kind != "store":
        one.store(b"a", tx=tx)
        table = desk.store.message
    put = table.put

    def fails(rows: Sequence[Any]) -> None:
        put(rows)
        raise StoreError("HBase is away.")

    with monkeypatch.context() as patch:
        patch.setattr(table, "put", fails)
        patch.setattr(desk.store.message, "invert", raising(StoreError("HBase is away.")))
        with pytest.raises(StoreError):
            one.store(b"a", tx=tx) if kind == "store" else one.publish(tx=tx)
    if kind == "store":
        one.store(b"a", tx=tx, again=True)
        with pytest.raises(BadRequest, match="not published"):
            one.publish(b"b", tx=tx)
        one.publish(tx=tx)
    else:
        one.publish(tx=tx, again=True)
    one.publish(b"b", tx=tx)
    desk.commit(tx)
    assert seen(desk) == [b"0", b"a", b"b"]


def test_given_another_number_of_messages_under_the_same_number_then_it_is_refused(desk: GroupDesk) -> None:
    one = Instance(desk)
    one.publish(b"a")
    with pytest.raises(BadRequest, match="was sent before with another number of messages"):
        one.publish(b"b", b"c", again=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_given_as_many_other_messages_under_the_same_number_then_the_former_are_answered_and_stay(
    desk: GroupDesk, *, restarted: bool
) -> None:
    one = Instance(desk)
    first = one.publish(b"a", b"b")
    if restarted:
        desk.restart()
    assert one.publish(b"c", b"d", again=True) == first
    assert seen(desk) == [b"a", b"b"]


def test_given_a_repetition_after_the_messages_may_have_expired_then_what_is_not_known_is_said(desk: GroupDesk) -> None:
    desk.service.create_topic(named("short"), {"ttl": "60"})
    one = Instance(desk)
    one.publish(b"a", topic=named("short"))
    one.publish(b"a", topic=named("short"), again=True)
    desk.clock.advance(61 * SECOND)
    one.publish(b"a", topic=named("short"), again=True)
    desk.store.message.delete(desk.store.message.read(KEYS, b"", None, 10).items)
    desk.restart()
    with pytest.raises(MessagingError, match="no longer known"):
        one.publish(b"a", topic=named("short"), again=True)


def test_given_a_repetition_after_all_consumers_have_processed_then_it_is_not_done_again(desk: GroupDesk) -> None:
    eaten = named("eaten")
    desk.service.create_topic(eaten, {"retention": "consumed"})
    one = Instance(desk)
    one.publish(b"a", topic=eaten)
    desk.store.message.delete(desk.store.message.read(KEYS, b"", None, 10).items)
    announce(desk.side, TopicMetadata(eaten, 1, 3600), (NOW_MS + 1) << 16)
    desk.restart()
    with pytest.raises(MessagingError, match="no longer known"):
        one.publish(b"a", topic=eaten, again=True)


@pytest.mark.parametrize("how", ["plain", "in a transaction", "stored"])
def test_given_a_request_of_which_a_part_was_processed_and_went_when_it_is_repeated_then_the_rest_stays(
    desk: GroupDesk, how: str
) -> None:
    eaten, table = named("eaten"), desk.store.payload if how == "stored" else desk.store.message
    desk.service.create_topic(eaten, {"retention": "consumed"})
    one, tx = Instance(desk), desk.begin()
    sent = one.sent()

    def send() -> None:
        if how == "stored":
            desk.service.store(eaten, [b"a", b"b"], pointer=tx.write_pointer, sent=sent)
        else:
            pointer = None if how == "plain" else tx.write_pointer
            desk.service.publish(eaten, [b"a", b"b"], pointer=pointer, sent=sent)

    send()
    table.delete(table.read(KEYS, b"", None, 1).items)
    announce(desk.side, TopicMetadata(eaten, 1, 3600), (NOW_MS << 16) + 1)
    desk.restart()
    with pytest.raises(MessagingError, match="no longer known"):
        send()
    assert len(table.read(KEYS, b"", None, 10).items) == 1
    assert (
        how != "in a transaction" or desk.store.message.read(CELLS, b"", None, 10).items[0].pointer == tx.write_pointer
    )


def test_given_all_messages_processed_and_gone_when_the_clock_is_set_back_then_no_new_one_begins_before_the_next_group(
    desk: GroupDesk,
) -> None:
    eaten = named("eaten")
    desk.service.create_topic(eaten, {"retention": "consumed"})
    announce(desk.side, TopicMetadata(eaten, 1, 3600), (NOW_MS + SECOND) << 16)
    desk.restart()
    desk.service.publish(eaten, [b"a"])
    desk.service.consumers.put(eaten, "billing", READ_NONE)
    tx = desk.begin()
    assert [one.payload for one in desk.service.groups.poll(eaten, "billing", GroupPoll(tx, 10)).messages] == [b"a"]


def test_given_a_producer_in_one_topic_when_it_publishes_to_several_then_each_has_its_own_last_request(
    desk: GroupDesk,
) -> None:
    one = Instance(desk)
    one.publish(b"a")
    one.publish(b"b", topic=ORDERS)
    desk.restart()
    one.publish(b"b", topic=ORDERS, again=True)
    assert (everything(desk), everything(desk, ORDERS)) == ([b"a"], [b"b"])


# --- announced ahead -------------------------------------------------------------------------------------------------


@pytest.fixture
def announcements(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of what is written to the side table from now on."""
    keys: list[bytes] = []
    exchange_each = desk.side.exchange_each

    def noted(changes: Sequence[SideChange]) -> list[bool]:
        keys.extend(change.key for change in changes)
        return exchange_each(changes)

    monkeypatch.setattr(desk.side, "exchange_each", noted)
    return keys


def test_given_a_producer_alone_when_it_publishes_then_one_announcement_is_for_many_requests(
    desk: GroupDesk, announcements: list[bytes]
) -> None:
    one, other = Instance(desk), Instance(desk, "other")
    announcements.clear()
    sent = [b"%d" % number for number in range(100)]
    for payload in sent:
        one.publish(payload)
    assert len(announcements) < 10
    assert everything(desk) == sent
    announcements.clear()
    for number in range(10):
        (one, other)[number % 2].publish(b"x")
    # One more takes back what was announced.
    assert len(announcements) == 11


def at_once(*calls: tuple[Instance, Sequence[bytes]], again: bool = False) -> None:
    """Publish in one batch, each for its instance."""
    service, batches = calls[0][0].desk.service, list[Batch]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service.workers, "run", batches.append)
        answers = [service.submit_publish(BILLS, payloads, sent=one.sent(again=again)) for one, payloads in calls]
    for batch in batches:
        batch()
    for answer in answers:
        answer.result()


def test_given_several_producers_at_once_when_they_publish_then_one_write_announces_many_requests_of_all(
    desk: GroupDesk, announcements: list[bytes]
) -> None:
    some = [Instance(desk, name) for name in "abc"]
    announcements.clear()
    for number in range(40):
        at_once(*((one, [b"%s%d" % (one.name.encode(), number)]) for one in reversed(some)))
    assert len(announcements) < 25
    assert everything(desk) == [b"%s%d" % (name, number) for number in range(40) for name in (b"c", b"b", b"a")]
    announcements.clear()
    # One write takes back what was announced for all.
    desk.publish(b"other topic")
    assert announcements == []
    desk.service.publish(BILLS, [b"x"])
    assert len(announcements) == 3


@pytest.mark.parametrize("number", range(4, 42, 3))
def test_given_several_producers_that_have_announced_when_the_server_is_killed_then_each_request_is_there_once(
    desk: GroupDesk, number: int
) -> None:
    some = [Instance(desk, name) for name in "abc"]
    expected: list[bytes] = []
    for at in range(number):
        # Not all of them each time, so that their announcements end at different times.
        calls = [(one, [b"%s%d" % (one.name.encode(), at)] * 2) for one in some if at % 7 != ord(one.name) % 7]
        at_once(*calls)
        expected += [payload for _, payloads in calls for payload in payloads]
    desk.restart()
    for one in some:
        with pytest.raises(BadRequest, match="comes after its request"):
            desk.service.publish(BILLS, [b"x"], sent=Sent(BILLS, one.name, one.generation, one.sequence - 1))
    at_once(*calls, again=True)
    at_once(*((one, [b"last"]) for one in some))
    assert sorted(everything(desk)) == sorted([*expected, *[b"last"] * 3])


@pytest.mark.parametrize("then", ["others", "a larger request", "more than have lanes", "one of them in a ttl"])
def test_given_several_producers_that_have_announced_when_something_else_is_written_then_it_is_not_taken_for_theirs(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", 0)
    one, other = Instance(desk, "a"), Instance(desk, "b")
    one.sequence = other.sequence = 30
    at_once((one, [b"31"]), (other, [b"31"]))
    desk.clock.advance(1)
    expected = [b"31", b"31"]
    if then == "others":
        desk.service.publish(BILLS, [b"x"])
        expected += [b"x"]
    elif then == "a larger request":
        other.publish(*[b"x"] * 65)
        expected += [b"x"] * 65
    elif then == "one of them in a ttl":
        other.publish(b"x", ttl_seconds=60)
        expected += [b"x"]
    else:
        at_once(*((Instance(desk, f"c{number}"), [b"x"]) for number in range(31)))
        expected += [b"x"] * 31
    desk.restart()
    for again in (False, True):
        at_once((one, [b"32"]), again=again)
    desk.restart()
    at_once((one, [b"32"]), again=True)
    at_once((one, [b"33"]), (other, [b"33"]))
    assert everything(desk) == [*expected, b"32", b"33", b"33"]


@pytest.mark.parametrize("how", ["by turns", "together", "each in the place before"])
def test_given_more_batches_than_milliseconds_when_each_begins_one_then_ids_stay_near_the_clock(
    desk: GroupDesk, announcements: list[bytes], how: str
) -> None:
    one, other = Instance(desk, "a"), Instance(desk, "b")
    sent = 0

    def publish(number: int) -> None:
        nonlocal sent
        if how == "each in the place before":
            one.sequence += 30
            calls = [(one, [b"x"])]
        elif how == "by turns" and number:
            calls = [((one, other)[number % 2], [b"x"])]
        else:
            calls = [(one, [b"x"]), (other, [b"x"])]
        sent += len(calls)
        for again in (False, True):
            at_once(*calls, again=again)

    def latest_ms() -> int:
        return max(
            MessageId.parse(each.id).publish_ms for page in desk.service.fetch(BILLS, FetchRequest()) for each in page
        )

    for number in range(600):
        publish(number)
    assert NOW_MS + AHEAD_MS <= latest_ms() <= NOW_MS + AHEAD_MS + 1
    # After a crash no id is given that may have been announced.
    for _ in range(3):
        desk.restart()
        publish(0)
        assert latest_ms() <= NOW_MS + 2 * AHEAD_MS + 2
    desk.clock.advance(2 * AHEAD_MS)
    announcements.clear()
    for number in range(60):
        publish(number)
    assert len(announcements) < 40
    assert everything(desk) == [b"x"] * sent


@pytest.mark.parametrize("together", [False, True])
def test_given_requests_announced_ahead_when_rows_of_a_write_that_failed_were_negated_then_they_are_not_taken_for_done(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", 0)
    one, other, tx = Instance(desk, "a"), Instance(desk, "b"), desk.begin()
    if together:
        at_once((one, [b"0"]), (other, [b"0"]))
    one.publish(b"1", tx=tx)
    put = desk.store.message.put

    def fails(rows: Sequence[tuple[bytes, MessageValue]]) -> None:
        put(rows)
        raise StoreError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(desk.store.message, "put", fails)
        with pytest.raises(StoreError):
            one.publish(b"2", tx=tx)
    desk.restart()
    for _ in range(2):
        one.publish(b"2", tx=tx, again=True)
    desk.commit(tx)
    assert seen(desk) == [*[b"0"] * 2 * together, b"1", b"2"]


@pytest.mark.parametrize("end", ["goes on", "repeats"])
@pytest.mark.parametrize("number", range(4, 42, 3))
def test_given_requests_announced_ahead_when_the_server_is_killed_then_each_is_there_once(
    desk: GroupDesk, number: int, end: str
) -> None:
    one = Instance(desk)
    # The places of requests are used by turns, and the first of them is where others write.
    one.sequence = 25
    sent = [b"%d" % each for each in range(number)]
    for payload in sent:
        one.publish(payload, b"and")
    desk.restart()
    if end == "repeats":
        one.publish(sent[-1], b"and", again=True)
    with pytest.raises(BadRequest, match="comes after its request"):
        desk.service.publish(BILLS, [b"x"], sent=Sent(BILLS, "importer", one.generation, one.sequence - 1))
    one.publish(b"last")
    assert everything(desk) == [*(each for payload in sent for each in (payload, b"and")), b"last"]


@pytest.mark.parametrize("then", ["others", "another producer", "a larger request", "payloads", "a newer instance"])
def test_given_requests_announced_ahead_when_something_else_is_written_then_it_is_not_taken_for_a_request(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", 0)
    one, other, tx = Instance(desk), Instance(desk, "other"), desk.begin()
    one.sequence = 30
    one.publish(b"31")
    desk.clock.advance(1)
    expected = [b"31"]
    if then == "others":
        desk.service.publish(BILLS, [b"x"])
        expected += [b"x"]
    elif then == "another producer":
        other.publish(b"x")
        expected += [b"x"]
    elif then == "a larger request":
        one.publish(*[b"x"] * 2049)
        expected += [b"x"] * 2049
    elif then == "payloads":
        one.store(b"x", tx=tx)
    else:
        one = Instance(desk)
        one.sequence = 31
    desk.restart()
    one.publish(b"32")
    one.publish(b"32", again=True)
    one.publish(b"33")
    desk.restart()
    one.publish(b"33", again=True)
    assert everything(desk) == [*expected, b"32", b"33"]


def test_given_a_transaction_when_requests_were_announced_ahead_then_the_next_instance_knows_of_it(
    desk: GroupDesk, announcements: list[bytes]
) -> None:
    one = Instance(desk)
    for _ in range(10):
        one.publish(b"a")
    announcements.clear()
    tx = desk.begin()
    for _ in range(10):
        one.publish(b"b", tx=tx, label="file 1")
    assert len(announcements) == 1
    heir = Instance(desk)
    assert heir.former == LastTransaction(tx.write_pointer, "file 1", TransactionOutcome.ABORTED)
    assert seen(desk) == [b"a"] * 10


def test_given_requests_announced_ahead_when_a_restore_ends_during_the_next_write_then_that_is_not_taken_for_a_request(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", 0)
    one, placed = Instance(desk), MessageWriteBatch.place
    one.sequence = 30
    one.publish(b"31")

    def late(self: MessageWriteBatch, *args: Any) -> Any:
        # As the janitor in the server's process does, and a consumer looks for messages.
        desk.service.forget(BILLS)
        everything(desk)
        return placed(self, *args)

    monkeypatch.setattr(MessageWriteBatch, "place", late)
    desk.service.publish(BILLS, [b"x"])
    monkeypatch.undo()
    desk.restart()
    one.publish(b"32")
    assert everything(desk) == [b"31", b"x", b"32"]


def test_given_what_was_negated_when_its_transaction_goes_on_all_the_same_then_its_repetition_is_written(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tx = Instance(desk), desk.begin()
    # Its time was over, and the manager could not write that down.
    monkeypatch.setattr(pipeline, "is_late", lambda *_: True)
    with pytest.raises(TransactionEnded):
        one.publish(b"a", tx=tx)
    monkeypatch.undo()
    one.publish(b"a", tx=tx, again=True)
    desk.manager.can_commit(tx.transaction_id, [])
    desk.manager.commit(tx.transaction_id)
    assert seen(desk) == [b"a"]


def test_given_a_slow_producer_and_messages_that_live_for_less_when_the_server_was_restarted_then_it_goes_on(
    desk: GroupDesk,
) -> None:
    short, one = named("short"), Instance(desk)
    desk.service.create_topic(short, {"ttl": "60"})
    for _ in range(10):
        one.publish(b"a", topic=short)
        desk.clock.advance(61 * SECOND)
    desk.restart()
    one.publish(b"b", topic=short)
    assert everything(desk, short) == [b"b"]


@pytest.mark.parametrize(
    "why", ["others write to the table", "it goes when it was processed", "it has a ttl of its own"]
)
def test_given_what_may_be_gone_or_come_late_when_a_producer_is_alone_then_each_request_is_announced(
    desk: GroupDesk, announcements: list[bytes], why: str
) -> None:
    one, options = Instance(desk), dict[str, Any](ttl_seconds=60) if why == "it has a ttl of its own" else {}
    if why == "others write to the table":
        desk.side.private = False
    elif why == "it goes when it was processed":
        desk.service.update_topic(BILLS, {"retention": "consumed"})
    announcements.clear()
    for _ in range(20):
        one.publish(b"a", **options)
    assert len(announcements) == 20


def test_given_a_kill_and_messages_that_may_have_expired_then_it_is_not_known_what_was_announced_ahead(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", 0)
    short = named("short")
    desk.service.create_topic(short)
    one = Instance(desk)
    for payload in (b"a", b"b"):
        one.publish(payload, topic=short)
    desk.service.update_topic(short, {"ttl": "60"})
    desk.clock.advance(61 * SECOND)
    desk.store.message.delete(desk.store.message.read(KEYS, b"", None, 10).items)
    desk.restart()
    with pytest.raises(MessagingError, match="no longer known"):
        one.publish(b"b", topic=short, again=True)
    heir = Instance(desk)
    heir.publish(b"c", topic=short)
    assert everything(desk, short) == [b"c"]


# --- a kill at every durable write -----------------------------------------------------------------------------------


class Died(Exception):
    """The process ended: nothing is taken back."""


class Dies:
    """Counts durable writes of store and side table, and has one of them fail, before or behind it.

    Attributes:
        at: which one, from 1; 0: none.
        behind: whether it is done all the same.
        error: how it fails.
        writes: how many there were.
    """

    def __init__(self, at: int, error: type[Exception], *, behind: bool) -> None:
        self.at, self.behind, self.error, self.writes = at, behind, error, 0

    def write(self, do: Callable[[], Any]) -> Any:
        self.writes += 1
        if self.writes != self.at:
            return do()
        if self.behind:
            do()
        raise self.error("it died")


def deadly(desk: GroupDesk, dies: Dies) -> None:
    store: Any = desk.store
    side: Any = desk.side
    puts = {table: table.put for table in (store.message, store.payload)}
    exchange = side.exchange_each
    for table, put in puts.items():
        table.put = lambda rows, put=put: dies.write(lambda: put(rows))
    side.exchange_each = lambda changes: [dies.write(partial(exchange, [change]))[0] for change in changes]


def story(desk: GroupDesk, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Publish without and in a transaction, store, and be followed by another instance."""
    instance = uuid4()
    registered = [call(lambda: desk.service.producers.register(BILLS, "importer", instance))]
    number = 0

    def send(do: Callable[[Sent], Any], label: str = "") -> None:
        nonlocal number
        number += 1
        sent = Sent(BILLS, "importer", registered[0].generation, number, label)
        call(lambda: do(sent))

    send(lambda sent: desk.service.publish(BILLS, [b"0"], sent=sent))
    send(lambda sent: desk.service.publish(BILLS, [b"1", b"2"], sent=sent))
    tx = desk.begin(3000)
    send(lambda sent: desk.service.publish(ORDERS, [b"3"], pointer=tx.write_pointer, sent=sent), "first")
    send(lambda sent: desk.service.store(BILLS, [b"4", b"5"], pointer=tx.write_pointer, sent=sent))
    send(lambda sent: desk.service.publish(BILLS, [], pointer=tx.write_pointer, sent=sent))
    desk.commit(tx)
    left = desk.begin(3000)
    send(lambda sent: desk.service.publish(BILLS, [b"never"], pointer=left.write_pointer, sent=sent), "second")
    late = Sent(BILLS, "importer", registered[0].generation, number + 1)
    heir = uuid4()
    known = call(lambda: desk.service.producers.register(BILLS, "importer", heir))
    assert known.generation == registered[0].generation + 1
    assert known.former == LastTransaction(tx.write_pointer, "first", TransactionOutcome.COMMITTED)
    with pytest.raises(NotInProgress):
        desk.commit(left)
    with pytest.raises(ProducerFenced):
        call(lambda: desk.service.publish(BILLS, [b"late"], sent=late))
    registered[0], number = known, 0
    send(lambda sent: desk.service.publish(BILLS, [b"6"], sent=sent))


def played(at: int, error: type[Exception], *, behind: bool) -> tuple[list[bytes], int]:
    """What is there when one durable write fails, and how many there were."""
    dies = Dies(at, error, behind=behind)
    desk = GroupDesk(MemoryStore(), MemorySide())
    desk.service.create_topic(BILLS)
    deadly(desk, dies)

    def call(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except (Died, StoreError):
            if error is Died:
                desk.restart()
                # What another one publishes does not get the ids that were announced.
                desk.publish(b"other")
                desk.service.publish(BILLS, [b"other"])
            return do()

    try:
        story(desk, call)
        found = sorted(seen(desk) + seen(desk, ORDERS))
        return [payload for payload in found if payload != b"other"], dies.writes
    finally:
        desk.close()


@pytest.mark.parametrize("error", [Died, StoreError])
@pytest.mark.parametrize("alone", [0, 4])
def test_given_any_durable_write_that_fails_when_requests_are_repeated_then_each_was_done_once(
    monkeypatch: pytest.MonkeyPatch, alone: int, error: type[Exception]
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE", alone)
    expected, writes = played(0, error, behind=False)
    assert expected == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert writes >= (16 if alone else 15)
    for at in range(1, writes + 1):
        for behind in (False, True):
            assert played(at, error, behind=behind)[0] == expected, (at, behind)


def test_given_rows_that_came_in_part_when_repeated_then_each_is_there_once(desk: GroupDesk) -> None:
    one, tx = Instance(desk), desk.begin()
    for inside in (None, tx):
        one.publish(b"a", b"b", b"c", tx=inside)
        [*_, key] = desk.store.message.read(KEYS, b"", None, 100).items
        desk.store.message.delete([key])
        desk.restart()
        one.publish(b"a", b"b", b"c", tx=inside, again=True)
    desk.commit(tx)
    assert seen(desk) == [b"a", b"b", b"c"] * 2


@pytest.mark.parametrize("inside", [False, True])
def test_given_a_large_request_when_it_is_announced_in_vain_then_nothing_is_written_until_it_is_repeated(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    one, payloads = Instance(desk), [b"%d" % number for number in range(250)]
    tx = desk.begin() if inside else None
    with monkeypatch.context() as patched:
        patched.setattr(desk.side, "exchange_each", raising(StoreError("The disk is full.")))
        with pytest.raises(StoreError):
            one.publish(*payloads, tx=tx)
    assert desk.store.message.read(KEYS, b"", None, 1000).items == []
    for _ in range(2):
        one.publish(*payloads, tx=tx, again=True)
    if tx is not None:
        desk.commit(tx)
    assert seen(desk) == payloads


def test_given_a_large_request_when_a_newer_instance_counts_behind_its_announcement_then_the_other_is_written(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Instance(desk), Instance(desk, "other")
    payloads = [b"%d" % number for number in range(250)]
    exchange_each = desk.side.exchange_each
    registered = ProducerName(BILLS, 1, "importer").key

    def fenced(changes: Sequence[SideChange]) -> list[bool]:
        made = exchange_each(changes)
        known = Registration.parse(desk.side.get(registered) or b"")
        desk.side.put([(registered, known._replace(generation=known.generation + 1).pack())])
        return made

    submit = desk.service.submit_publish
    with monkeypatch.context() as patched, held(desk, patched):
        patched.setattr(desk.side, "exchange_each", fenced)
        answers = [submit(BILLS, payloads, sent=instance.sent()) for instance in (one, other)]
    with pytest.raises(ProducerFenced):
        answers[0].result()
    answers[1].result()
    assert seen(desk) == payloads


@contextmanager
def held(desk: GroupDesk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is handed over in the block is one batch, written when it ends."""
    batches: list[Callable[[], None]] = []
    with monkeypatch.context() as patched:
        patched.setattr(desk.service.workers, "run", batches.append)
        yield
    for batch in batches:
        batch()


# --- what comes late -------------------------------------------------------------------------------------------------


def meanwhile(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], table: str = "message"
) -> None:
    """Have something happen between the look before a write and the write, once."""
    found = getattr(desk.store, table)
    put = found.put

    def late(rows: Any) -> None:
        monkeypatch.setattr(found, "put", put)
        act()
        put(rows)

    monkeypatch.setattr(found, "put", late)


@pytest.mark.parametrize("end", ["commit", "abort", "invalidate"])
def test_given_a_transaction_that_has_ended_when_something_is_written_then_it_is_refused(
    desk: GroupDesk, end: str
) -> None:
    tx = desk.begin()
    desk.manager.abort(tx) if end == "abort" else getattr(desk.manager, end)(tx.transaction_id)
    with pytest.raises(TransactionEnded, match="not in progress"):
        desk.service.publish(BILLS, [b"late"], pointer=tx.write_pointer)
    with pytest.raises(TransactionEnded):
        desk.service.store(BILLS, [b"late"], pointer=tx.write_pointer)
    assert everything(desk) == []


@pytest.mark.parametrize("end", ["commit", "abort", "invalidate"])
@pytest.mark.parametrize("cached", [True, False])
def test_given_a_transaction_that_ends_while_something_is_written_then_no_transaction_sees_that(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, end: str, *, cached: bool
) -> None:
    tx = desk.begin()
    desk.service.store(BILLS, [b"stored"], pointer=tx.write_pointer)
    desk.service.publish(BILLS, [], pointer=tx.write_pointer)
    if end == "abort":
        desk.service.rollback(BILLS, tx.write_pointer)
    for table, write in (("message", desk.service.publish), ("payload", desk.service.store)):
        late = desk.begin() if table == "payload" else tx
        act = {
            "commit": lambda late=late: desk.commit(late),
            "abort": lambda late=late: desk.manager.abort(late),
            "invalidate": lambda late=late: desk.time_out(late),
        }[end]
        meanwhile(desk, monkeypatch, act, table)
        with pytest.raises(TransactionEnded):
            write(BILLS, [b"late"], pointer=late.write_pointer)
    if not cached:
        desk.restart()
    assert seen(desk) == ([b"stored"] if end == "commit" else [])


def test_given_a_transaction_that_is_aborted_and_a_server_that_dies_during_a_write_then_it_is_not_seen(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = desk.begin()
    put = desk.store.message.put

    def last(rows: list[tuple[bytes, MessageValue]]) -> None:
        desk.manager.abort(tx)
        put(rows)
        raise Died

    monkeypatch.setattr(desk.store.message, "put", last)
    with pytest.raises(Died):
        desk.service.publish(BILLS, [b"late"], pointer=tx.write_pointer)
    desk.restart()
    assert everything(desk) == [b"late"]
    assert seen(desk) == []
    assert desk.manager.status(tx.transaction_id) == "invalid"
    # Afterwards an abort is an abort.
    other = desk.begin()
    desk.manager.abort(other)
    assert desk.manager.status(other.transaction_id) == "ended"


def test_given_a_producer_that_rolls_back_when_a_request_of_that_transaction_comes_then_it_is_not_seen(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tx = Instance(desk), desk.begin()
    one.publish(b"a", tx=tx)
    meanwhile(desk, monkeypatch, lambda: one.roll_back(tx))
    with pytest.raises(TransactionEnded):
        one.publish(b"b", tx=tx)
    one.roll_back(tx)
    with pytest.raises(TransactionEnded, match="rolled back"):
        one.publish(b"c", tx=tx)
    desk.manager.abort(tx)
    assert seen(desk) == []


def test_given_a_request_under_way_when_a_newer_instance_is_registered_then_that_waits_for_it(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.in_flight._WAIT_SECONDS", 0.01)
    one, heir = Instance(desk), uuid4()

    def register() -> None:
        with pytest.raises(Unavailable, match="still being written"):
            desk.service.producers.register(BILLS, "importer", heir)
        with pytest.raises(Unavailable, match="under way"):
            desk.service.producers._requests.admit(
                TopicMetadata(BILLS, 1, 3600), Sent(BILLS, "importer", one.generation, 2), None, 1
            )

    meanwhile(desk, monkeypatch, register)
    one.sequence += 1
    desk.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "importer", one.generation, 1))
    assert desk.service.producers.register(BILLS, "importer", heir).generation == one.generation + 1
    with pytest.raises(ProducerFenced):
        one.publish(b"b")
    assert everything(desk) == [b"a"]


# --- the janitor -----------------------------------------------------------------------------------------------------


def clean(desk: GroupDesk, *, gone: bool = False, bills: int = 0) -> tuple[int, int]:
    """The janitor comes; all topics are gone, or the generations of one before some number."""
    seen = desk.manager.visibility()
    idle_before_ms = desk.clock.now_ms() - 7 * DAY

    def is_gone(topic: TopicId, generation: int) -> bool:
        return gone or (topic == BILLS and generation < bills)

    return tidy(desk.side, seen.is_invalid, seen.is_undecided, is_gone, idle_before_ms)


def test_given_an_invalid_transaction_when_its_id_leaves_the_list_then_it_stays_aborted(desk: GroupDesk) -> None:
    one, tx = Instance(desk), desk.begin()
    one.publish(b"a", tx=tx)
    desk.time_out(tx)
    desk.service.rollback(BILLS, tx.write_pointer)
    assert clean(desk) == (1, 0)
    assert clean(desk) == (0, 0)
    desk.manager.truncate_invalid([tx.transaction_id])
    heir = Instance(desk)
    assert heir.former is not None
    assert heir.former.outcome is TransactionOutcome.ABORTED


@pytest.mark.parametrize("end", ["invalid", "committed"])
def test_given_a_former_that_is_pending_when_its_id_leaves_the_invalid_list_then_it_is_told_as_it_ended(
    desk: GroupDesk, end: str
) -> None:
    one, tx = Instance(desk), desk.begin()
    desk.commit(tx) if end == "committed" else desk.time_out(tx)
    key = ProducerName(BILLS, 1, "importer").key
    former = LastTransaction(tx.write_pointer, "file 17", TransactionOutcome.PENDING)
    known = Registration(one.generation, one.uuid, NOW_MS, former, settled=True)
    desk.side.put([(key, known.pack())])
    desk.service.forget()
    assert clean(desk) == (int(end == "invalid"), 0)
    assert clean(desk) == (0, 0)
    desk.manager.truncate_invalid([tx.transaction_id])
    outcome = TransactionOutcome.COMMITTED if end == "committed" else TransactionOutcome.ABORTED
    assert Instance(desk).former == former._replace(outcome=outcome)


def test_given_a_producer_that_is_changed_while_its_former_is_marked_then_it_is_marked_all_the_same(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = desk.begin()
    desk.time_out(tx)
    key = ProducerName(BILLS, 1, "importer").key
    former = LastTransaction(tx.write_pointer, "file 17", TransactionOutcome.PENDING)
    known = Registration(NOW_MS, uuid4(), NOW_MS, former, settled=True)
    desk.side.put([(key, known.pack())])
    exchange = desk.side.exchange

    def late(*change: Any, **more: Any) -> bool:
        monkeypatch.setattr(desk.side, "exchange", exchange)
        desk.side.put([(key, known._replace(generation=NOW_MS + 1).pack())])
        return exchange(*change, **more)

    monkeypatch.setattr(desk.side, "exchange", late)
    assert clean(desk) == (1, 0)
    found = Registration.parse(desk.side.get(key) or b"")
    assert found == known._replace(generation=NOW_MS + 1, former=former._replace(outcome=TransactionOutcome.ABORTED))


@pytest.mark.parametrize("inside", [False, True])
def test_given_a_producer_that_is_registered_while_the_janitor_looks_then_nothing_of_it_is_forgotten(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch, *, inside: bool
) -> None:
    made: list[Instance] = []
    rows = desk.side.rows

    def later(start: bytes, *rest: Any) -> Any:
        found = rows(start, *rest)
        if start == b"w" and not made:
            made.append(Instance(desk))
            made[0].publish(b"a", tx=desk.begin() if inside else None)
        return found

    monkeypatch.setattr(desk.side, "rows", later)
    clean(desk)
    made[0].publish(b"a", tx=None, again=True) if not inside else None
    assert everything(desk) == [b"a"]
    assert len(desk.service.producers.get(BILLS, "importer")[1]) == int(inside)
    desk.restart()
    made[0].publish(b"a", again=True) if not inside else None
    assert everything(desk) == [b"a"]


def test_given_a_producer_that_does_nothing_for_a_week_then_it_is_forgotten_unless_something_is_open(
    desk: GroupDesk,
) -> None:
    before = desk.manager.start_short()
    Instance(desk, "idle").publish(b"before", tx=before)
    desk.commit(before)
    idle, open_, busy = (Instance(desk, name) for name in ("idle", "open", "busy"))
    idle.publish(b"a")
    desk.clock.advance(6 * DAY)
    tx = desk.manager.start_long()
    open_.publish(b"b", tx=tx)
    busy.publish(b"c")
    desk.clock.advance(2 * DAY)
    assert clean(desk) == (0, 1)
    desk.clock.advance(5 * DAY + HOUR)
    busy.publish(b"d")
    assert clean(desk) == (0, 0)
    assert [name for name, *_ in desk.service.producers.of(BILLS)] == ["busy", "open"]
    with pytest.raises(ProducerFenced, match="idle too long"):
        idle.publish(b"e")
    heir = Instance(desk, "idle")
    assert heir.generation > idle.generation
    assert heir.former is None
    desk.commit(tx)
    assert clean(desk) == (0, 1)
    assert clean(desk, gone=True) == (0, 0)
    assert desk.side.rows(b"p", b"z", 10).items == []


def test_given_a_topic_that_is_made_again_then_its_producers_begin_anew(desk: GroupDesk) -> None:
    one = Instance(desk)
    one.publish(b"a")
    desk.service.delete_topic(BILLS)
    desk.service.create_topic(BILLS)
    with pytest.raises(ProducerFenced):
        one.publish(b"b")
    desk.clock.advance(1)
    heir = Instance(desk)
    assert heir.generation > one.generation
    heir.publish(b"b")
    assert everything(desk) == [b"b"]


@pytest.mark.parametrize("swept", [False, True])
def test_given_a_home_that_is_made_again_when_an_instance_is_registered_then_nothing_of_older_ones_becomes_visible(
    desk: GroupDesk, *, swept: bool
) -> None:
    for turn in range(2):
        one, tx = Instance(desk), desk.begin()
        one.publish(b"%d" % turn, tx=tx, topic=ORDERS)
        desk.service.delete_topic(BILLS)
        desk.service.create_topic(BILLS)
        if swept:
            clean(desk, bills=turn + 2)
        desk.clock.advance(SECOND)
        heir = Instance(desk)
        assert heir.generation > one.generation
        assert heir.former is None
        with pytest.raises(NotInProgress):
            desk.commit(tx)
        if swept:
            clean(desk, bills=turn + 2)
            assert len(desk.side.rows(b"w", b"x", 10).items) == 1
    assert seen(desk, ORDERS) == []


def test_given_a_request_under_way_when_its_home_is_made_again_then_the_next_instance_waits_for_it(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.in_flight._WAIT_SECONDS", 0.01)
    one, tx = Instance(desk), desk.begin()

    def made_again() -> None:
        desk.service.delete_topic(BILLS)
        desk.service.create_topic(BILLS)
        with pytest.raises(Unavailable, match="still being written"):
            Instance(desk)

    meanwhile(desk, monkeypatch, made_again)
    one.publish(b"a", tx=tx, topic=ORDERS)
    Instance(desk)
    with pytest.raises(NotInProgress):
        desk.commit(tx)


def test_given_the_moment_of_the_test_then_generations_begin_with_it(desk: GroupDesk) -> None:
    assert Instance(desk).generation == NOW_MS


class Forgetful(RecentlyUsed[bytes, bytes | None]):
    """Rows that another thread forgets as soon as one was looked for."""

    def move_to_end(self, key: bytes, last: bool = True) -> None:
        super().move_to_end(key, last)
        if last and len(self) > self._most:
            self.clear()


def test_given_a_row_that_is_forgotten_while_it_is_looked_for_then_it_is_read_and_not_taken_for_none() -> None:
    side = MemorySide()
    side.put([(b"key", b"rolled back")])
    rows = RememberedRows(side)
    rows._rows = Forgetful(1)
    rows._rows[b"key"] = b"rolled back"
    rows._rows._most = 0
    assert rows.get(b"key") == b"rolled back"


def test_given_a_client_that_goes_on_as_soon_as_it_is_answered_then_nothing_of_its_request_is_in_the_way(
    desk: GroupDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tx, settle = Instance(desk), desk.begin(), Answer.set_result

    def give_up() -> None:
        one.roll_back(tx)
        desk.manager.abort(tx)

    steps: Iterator[Callable[[], object]] = iter([lambda: one.publish(tx=tx), give_up])

    def goes_on(answer: Answer[object], result: object) -> None:
        if step := next(steps, None):
            step()
        settle(answer, result)

    monkeypatch.setattr(Answer, "set_result", goes_on)
    one.store(b"a", tx=tx)
    assert (desk.manager.is_in_progress(tx.write_pointer), desk.manager.invalid_size()) == (False, 0)
