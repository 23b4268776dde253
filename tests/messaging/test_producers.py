"""Producers: the newest instance is valid, repetitions take effect once, late requests are invisible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.builders import DAY, HOUR, NOW_MS, SECOND
from tests.kit.messaging import (
    BILLS,
    ORDERS,
    READ_NONE,
    GroupKit,
    Instance,
    fetch,
    group_kit,
    named,
    read_all,
    read_committed,
    read_payloads,
)
from tests.support import PATIENCE_SECONDS, act_after, act_before, each_raises, raising, wait_until
from tms_core.consumers.claim_rows import drained_key
from tms_core.consumers.claims import ConsumerGroup
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
from tms_core.messaging import cached_rows
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.producers.announcements import AHEAD_MS
from tms_core.messaging.producers.in_flight import InFlight
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import (
    LastTransaction,
    ProducerName,
    Registration,
    TransactionOutcome,
    clean_producer_rows,
    is_of_producer,
    transactions_of,
)
from tms_core.messaging.publish import pipeline
from tms_core.messaging.publish.pipeline import MessageWriteBatch
from tms_core.messaging.publish.workers import Batch, PublishFuture
from tms_core.rowkey import MessageId
from tms_core.tables.base import CELLS, KEYS, MESSAGES, MessageValue
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideChange
from tms_core.topic import TopicId, TopicMetadata


@pytest.fixture(params=["memory", "leveldb"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupKit]:
    with group_kit(request.param, tmp_path) as made:
        made.service.create_topic(BILLS)
        yield made


# --- instances -------------------------------------------------------------------------------------------------------


def test_register_again_gives_the_same_generation_and_another_a_higher(kit: GroupKit) -> None:
    one = Instance(kit)
    assert one.previous is None
    kit.restart()
    assert one.register() == (one.generation, None)
    two = Instance(kit)
    assert two.generation == one.generation + 1
    fenced = rf"Generation {one.generation} .* is fenced by generation {two.generation}\."
    with pytest.raises(ProducerFenced, match=fenced):
        one.publish(b"late")
    with pytest.raises(ProducerFenced, match=fenced):
        one.roll_back(kit.begin())
    kit.restart()
    with pytest.raises(ProducerFenced, match=fenced):
        one.publish(b"late")
    two.publish(b"a")
    assert read_all(kit) == [b"a"]


def test_register_of_two_first_instances_at_once_counts_one(kit: GroupKit) -> None:
    service, (first, second) = kit.service, (uuid4(), uuid4())
    other = kit.serve()
    one, two = service.producers.register(BILLS, "x", first), other.producers.register(BILLS, "x", second)
    assert two.generation == one.generation + 1
    service.invalidate()
    with pytest.raises(ProducerFenced):
        service.publish(BILLS, [b"a"], sent=Sent(BILLS, "x", one.generation, 1))
    other.close()


@pytest.mark.parametrize("end", ["commit", "roll back", "time out", "leave open", "abort alone"])
def test_register_reports_the_last_transaction_of_the_previous_instance(kit: GroupKit, end: str) -> None:
    previous, tx = Instance(kit), kit.begin()
    previous.publish(b"a", tx=tx, label="file 17 ü")
    if end == "commit":
        kit.commit(tx)
    elif end == "roll back":
        previous.roll_back(tx)
        kit.manager.abort(tx)
    elif end == "time out":
        kit.time_out(tx)
    elif end == "abort alone":
        kit.service.rollback(BILLS, tx.write_pointer)
        kit.manager.invalidate(tx.transaction_id)
    kit.restart()
    heir = Instance(kit)
    outcome = TransactionOutcome.COMMITTED if end == "commit" else TransactionOutcome.ABORTED
    assert heir.previous == LastTransaction(tx.write_pointer, "file 17 ü", outcome)
    assert read_committed(kit) == ([b"a"] if end == "commit" else [])
    # An instance without requests passes on what it has received.
    assert Instance(kit).previous == heir.previous
    if end == "leave open":
        with pytest.raises(Exception, match="not in progress"):
            kit.commit(tx)


@pytest.mark.parametrize("end", ["leave open", "roll back", "time out"])
def test_register_reports_the_commit_before_an_uncommitted_transaction(kit: GroupKit, end: str) -> None:
    one, committed = Instance(kit), kit.begin()
    one.publish(b"a", tx=committed, label="file 1")
    kit.commit(committed)
    for turn in range(2):
        instance, tx = one if not turn else Instance(kit), kit.begin()
        instance.publish(b"b", tx=tx, label="file 2")
        if end == "roll back":
            instance.roll_back(tx)
            kit.manager.abort(tx)
        elif end == "time out":
            kit.time_out(tx)
            kit.service.rollback(BILLS, tx.write_pointer)
            clean(kit)
            kit.manager.truncate_invalid([tx.transaction_id])
        # With file 2 only, the next instance would repeat file 1.
        assert Instance(kit).previous == LastTransaction(
            committed.write_pointer, "file 1", TransactionOutcome.COMMITTED
        )
    assert read_committed(kit) == [b"a"]


def test_register_aborts_an_open_transaction_with_a_checkpoint(kit: GroupKit) -> None:
    kit.publish(b"order")
    one, tx = Instance(kit), kit.begin()
    assert kit.poll(tx) == [b"order"]
    checkpoint = kit.manager.checkpoint(tx)
    one.publish(b"bill", tx=checkpoint, label="file 1")
    assert Instance(kit).previous == LastTransaction(checkpoint.write_pointer, "file 1", TransactionOutcome.ABORTED)
    # Otherwise the order would be processed without a visible bill.
    with pytest.raises(NotInProgress):
        kit.commit(tx)
    assert kit.poll(kit.begin()) == [b"order"]


def test_register_aborts_an_open_transaction_that_only_reads(kit: GroupKit) -> None:
    kit.publish(b"order")
    one, tx = Instance(kit), kit.begin()
    assert kit.poll(tx) == [b"order"]
    for _ in range(2):
        one.begin(tx, "file 1")
    [begun] = kit.service.producers.get(BILLS, "importer")[1]
    assert (begun.pointer, begun.label) == (tx.write_pointer, "file 1")
    kit.restart()
    heir = Instance(kit)
    assert heir.previous == LastTransaction(tx.write_pointer, "file 1", TransactionOutcome.ABORTED)
    with pytest.raises(NotInProgress):
        kit.commit(tx)
    late = kit.begin()
    assert kit.poll(late) == [b"order"]
    with pytest.raises(ProducerFenced):
        one.begin(late)
    heir.begin(late, "file 1")
    kit.commit(late)
    assert Instance(kit).previous == LastTransaction(late.write_pointer, "file 1", TransactionOutcome.COMMITTED)
    assert (read_all(kit), kit.poll(kit.begin())) == ([], [])


def test_note_of_transactions_keeps_open_and_rejects_ended_transactions(kit: GroupKit) -> None:
    one = Instance(kit)
    for number in range(5):
        tx = kit.begin()
        one.begin(tx, str(number))
        assert [begun.label for begun in kit.service.producers.get(BILLS, "importer")[1]] == [str(number)]
        kit.commit(tx)
    assert len(transactions_of(kit.side, ProducerName(BILLS, 1, "importer"))) == 2
    with pytest.raises(TransactionEnded):
        one.begin(tx)
    rolled_back = kit.begin()
    one.begin(rolled_back)
    one.roll_back(rolled_back)
    with pytest.raises(TransactionEnded):
        one.begin(rolled_back)
    with pytest.raises(BadRequest, match="too long"):
        one.begin(kit.begin(), "x" * 1001)
    with pytest.raises(BadRequest, match=r"^0 .*write pointer"):
        kit.service.store_transaction(one.sent(), 0)
    with pytest.raises(TransactionEnded):
        kit.service.store_transaction(one.sent(), kit.begin().write_pointer + 10**6)


def test_sequence_number_after_a_gap_is_accepted_and_skipped_rejected(kit: GroupKit) -> None:
    one = Instance(kit)
    one.publish(b"1")
    # Number 2 went to another topic, and number 3 was lost.
    one.publish(b"2", topic=ORDERS)
    one.sequence = 3
    one.publish(b"4")
    with pytest.raises(BadRequest, match=r"Request 3 .*importer .* 4"):
        kit.service.publish(BILLS, [b"3"], sent=Sent(BILLS, "importer", one.generation, 3))
    assert (read_all(kit), read_all(kit, ORDERS)) == ([b"1", b"4"], [b"2"])


@pytest.mark.parametrize("managed", [True, False])
def test_register_during_a_note_ends_its_work(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, managed: bool) -> None:
    one, tx = Instance(kit), kit.begin()
    if not managed:
        kit.service.producers._transactions = kit.service.producers._requests._transactions = None
    heirs: list[Instance] = []
    act_before(monkeypatch, kit.side, "exchange_each", lambda: heirs.append(Instance(kit)))
    with pytest.raises(ProducerFenced):
        one.begin(tx)
    assert heirs[0].previous is None


def test_register_after_several_transactions_reports_the_last(kit: GroupKit) -> None:
    one = Instance(kit)
    for number in range(5):
        tx = kit.begin()
        one.publish(b"%d" % number, tx=tx, label=str(number))
        assert [begun.label for begun in kit.service.producers.get(BILLS, "importer")[1]] == [str(number)]
        kit.commit(tx)
    assert Instance(kit).previous == LastTransaction(tx.write_pointer, "4", TransactionOutcome.COMMITTED)
    assert kit.service.producers.get(BILLS, "importer")[1] == []


@pytest.mark.parametrize("announces_oldest", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_note_of_transactions_managed_elsewhere_reads_few_rows(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch, announces_oldest: bool, restarted: bool
) -> None:
    def detach_manager() -> None:
        producers = kit.service.producers
        producers._transactions = producers._requests._transactions = None

    detach_manager()
    one, most, rows = Instance(kit), list[int](), kit.side.rows

    def read(start: bytes, *rest: Any) -> Any:
        found = rows(start, *rest)
        if start[:1] == b"t":
            most.append(len(found.items))
        return found

    monkeypatch.setattr(kit.side, "rows", read)
    for number in range(100):
        tx = kit.begin()
        sent = one.sent(label=str(number))._replace(oldest_open=tx.write_pointer if announces_oldest else 0)
        kit.service.publish(BILLS, [b"a"], pointer=tx.write_pointer, sent=sent)
        kit.commit(tx)
        if restarted and number % 10 == 0:
            kit.restart()
            detach_manager()
    assert max(most) <= (2 if announces_oldest else 32)
    heir = Instance(kit)
    assert heir.previous == LastTransaction(tx.write_pointer, "99", TransactionOutcome.PENDING)
    assert len(rows(b"t", b"u", 1000).items) == (2 if announces_oldest else 100)
    # During the longest lifetime of a transaction, the outcome of the others is unknown.
    kit.clock.advance(2 * HOUR)
    for _ in range(5):
        tx = kit.begin()
        heir.publish(b"b", tx=tx)
        kit.commit(tx)
    assert len(rows(b"t", b"u", 1000).items) <= 6


def test_instance_of_a_deleted_producer_is_fenced(kit: GroupKit) -> None:
    one, tx = Instance(kit), kit.begin()
    one.publish(b"a", tx=tx, label="x")
    [(name, known, open_)] = kit.service.producers.of(BILLS)
    assert (name, known.generation) == ("importer", one.generation)
    assert [begun.pointer for begun in open_] == [tx.write_pointer]
    kit.service.producers.delete(BILLS, "importer")
    assert kit.service.producers.of(BILLS) == []
    each_raises(
        ProducerNotFound,
        lambda: kit.service.producers.get(BILLS, "importer"),
        lambda: kit.service.producers.delete(BILLS, "importer"),
    )
    with pytest.raises(ProducerFenced, match="is not registered"):
        one.publish(b"b")
    with pytest.raises(Exception, match="not in progress"):
        kit.commit(tx)
    again = Instance(kit)
    assert again.generation > one.generation + 1
    assert again.previous is None


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_interrupted_deletion_is_finished_by_a_repeat(kit: GroupKit, at: int, behind: bool) -> None:
    one, tx = Instance(kit), kit.begin()
    one.publish(b"a", tx=tx)
    with pytest.MonkeyPatch.context() as patched:
        failing, exchange = FailingWrite(at, StoreError, behind=behind), kit.side.exchange_each
        patched.setattr(kit.side, "exchange_each", lambda changes: failing.write(partial(exchange, changes)))
        with pytest.raises(StoreError):
            kit.service.producers.delete(BILLS, "importer")
    is_deleted = (at, behind) == (2, True)
    with pytest.raises(ProducerNotFound) if is_deleted else nullcontext():
        kit.service.producers.delete(BILLS, "importer")
    with pytest.raises(NotInProgress):
        kit.commit(tx)
    assert kit.side.rows(b"q", b"r", 10).items == kit.side.rows(b"t", b"u", 10).items == []
    with pytest.raises(ProducerNotFound):
        kit.service.producers.delete(BILLS, "importer")
    assert Instance(kit).generation > one.generation + 1


def test_producer_beyond_the_most_names_is_rejected(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "MAX_NAMES", 3)
    for name in ("a", "b", "c"):
        kit.service.producers.register(BILLS, name, uuid4())
    for _ in range(2):
        with pytest.raises(BadRequest, match="3 producers"):
            kit.service.producers.register(BILLS, "d", uuid4())
        # Another instance is the same producer, and each topic has its own limit.
        kit.service.producers.register(BILLS, "a", uuid4())
        kit.restart()
    kit.service.producers.register(ORDERS, "d", uuid4())
    kit.side.delete([ProducerName(BILLS, 1, "b").key])
    kit.service.producers.register(BILLS, "d", uuid4())
    with pytest.raises(BadRequest):
        kit.service.producers.register(BILLS, "b", uuid4())


def test_names_of_many_topics_stay_bounded(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_rows, "MAX_NAMES", 2)
    monkeypatch.setattr(kit.service.producers._names._numbers, "_max_keys", 3)
    for life in range(8):
        for name in ("a", "b"):
            kit.service.producers.register(BILLS, f"{name}{life}", uuid4())
        with pytest.raises(BadRequest, match="has 2 producers"):
            kit.service.producers.register(BILLS, "c", uuid4())
        assert len(kit.service.producers._names._numbers) <= 3
        kit.service.delete_topic(BILLS)
        kit.service.create_topic(BILLS, {})


def test_request_of_an_invalid_producer_is_rejected(kit: GroupKit) -> None:
    one = Instance(kit)
    with pytest.raises(BadRequest, match="'a/b'"):
        kit.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "a/b", 1, 1))
    for sequence in (0, 2**63):
        with pytest.raises(BadRequest, match=f"^{sequence} "):
            kit.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "importer", one.generation, sequence))
    with pytest.raises(BadRequest, match="1002 bytes"):
        one.publish(b"a", label="ü" * 501)
    with pytest.raises(BadRequest):
        kit.service.producers.register(BILLS, "x", UUID(int=0))
    with pytest.raises(ProducerFenced):
        kit.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "none", 1, 1))
    assert read_all(kit) == []


# --- repetition ------------------------------------------------------------------------------------------------------


@contextmanager
def failing_puts(table: Any) -> Iterator[pytest.MonkeyPatch]:
    """Fail the writes of a table after they took effect."""
    put = table.put

    def put_and_fail(rows: Sequence[Any]) -> None:
        put(rows)
        raise StoreError("The disk is full.")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table, "put", put_and_fail)
        yield patched


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_repeat_of_a_request_has_its_answer_and_no_effect(kit: GroupKit, restarted: bool, inside: bool) -> None:
    one, tx = Instance(kit), kit.begin() if inside else None
    for number in range(3):
        first = one.publish(b"%d" % number, b"x", tx=tx)
        if restarted:
            kit.restart()
        assert one.publish(b"%d" % number, b"x", tx=tx, again=True) == first
    if tx is not None:
        kit.commit(tx)
    assert read_committed(kit) == [b"0", b"x", b"1", b"x", b"2", b"x"]
    one.sequence = 1
    with pytest.raises(BadRequest, match="request 3"):
        one.publish(b"old", again=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_payloads_stored_twice_are_published_once(kit: GroupKit, restarted: bool) -> None:
    one, tx = Instance(kit), kit.begin()
    for batch in ((b"a", b"b"), (b"c",)):
        one.store(*batch, tx=tx)
        if restarted:
            kit.restart()
        one.store(*batch, tx=tx, again=True)
    assert one.publish(tx=tx) == one.publish(tx=tx, again=True)
    kit.commit(tx)
    assert read_committed(kit) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("kind", ["store", "publish what was stored"])
def test_repeat_after_failed_rows_counts_once(kit: GroupKit, kind: str) -> None:
    one, before = Instance(kit), kit.begin()
    one.publish(b"0", tx=before)
    kit.commit(before)
    # From now on, the service searches for no data of a new transaction.
    kit.clock.advance(600 * SECOND)
    tx = kit.begin()
    table: Any = kit.store.payload
    if kind != "store":
        one.store(b"a", tx=tx)
        table = kit.store.message
    with failing_puts(table) as patch:
        patch.setattr(kit.store.message, "invert", raising(StoreError("HBase is away.")))
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
    kit.commit(tx)
    assert read_committed(kit) == [b"0", b"a", b"b"]


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_repeat_of_a_request_written_by_this_server_reads_no_rows(kit: GroupKit, requests: int) -> None:
    producer = Instance(kit)
    for number in range(requests):
        producer.publish(b"%d" % number)
    before = kit.store.calls.copy()
    producer.publish(b"again", again=True)
    assert kit.store.calls["keys"] == before["keys"]
    assert read_all(kit) == [b"%d" % number for number in range(requests)]


@pytest.mark.parametrize("restarted", [False, True])
def test_repeat_with_other_messages_gets_the_first_response(kit: GroupKit, restarted: bool) -> None:
    one = Instance(kit)
    first = one.publish(b"a", b"b")
    if restarted:
        kit.restart()
    assert one.publish(b"c", b"d", again=True) == first
    for other in ([b"c"], [b"c", b"d", b"e"]):
        with pytest.raises(BadRequest, match="another number of messages"):
            one.publish(*other, again=True)
    assert read_committed(kit) == [b"a", b"b"]


@pytest.mark.parametrize(("properties", "options"), [({"ttl": "60"}, {}), ({}, {"ttl_seconds": 60})])
def test_repeat_after_the_messages_may_have_expired_is_not_known(
    kit: GroupKit, properties: dict[str, str], options: dict[str, Any]
) -> None:
    kit.service.create_topic(named("short"), properties)
    one = Instance(kit)
    publish = partial(one.publish, b"a", topic=named("short"), **options)
    publish()
    publish(again=True)
    kit.clock.advance(61 * SECOND)
    publish(again=True)
    kit.store.message.delete(kit.store.message.read(KEYS, b"", None, 10).items)
    kit.restart()
    with pytest.raises(MessagingError, match="is unknown, because"):
        publish(again=True)


def test_repeat_after_all_consumers_processed_is_not_known(kit: GroupKit) -> None:
    eaten = named("eaten")
    kit.service.create_topic(eaten, {"retention": "consumed"})
    one = Instance(kit)
    one.publish(b"a", topic=eaten)
    kit.store.message.delete(kit.store.message.read(KEYS, b"", None, 10).items)
    announce(kit.side, TopicMetadata(eaten, 1, 3600), (NOW_MS + 1) << 16)
    kit.restart()
    with pytest.raises(MessagingError, match="is unknown, because"):
        one.publish(b"a", topic=eaten, again=True)


@pytest.mark.parametrize("how", ["plain", "in a transaction", "stored"])
def test_repeat_of_a_partly_processed_request_keeps_the_rest(kit: GroupKit, how: str) -> None:
    eaten, table = named("eaten"), kit.store.payload if how == "stored" else kit.store.message
    kit.service.create_topic(eaten, {"retention": "consumed"})
    one, tx = Instance(kit), kit.begin()
    sent = one.sent()

    def send() -> None:
        if how == "stored":
            kit.service.store(eaten, [b"a", b"b"], pointer=tx.write_pointer, sent=sent)
        else:
            pointer = None if how == "plain" else tx.write_pointer
            kit.service.publish(eaten, [b"a", b"b"], pointer=pointer, sent=sent)

    send()
    table.delete(table.read(KEYS, b"", None, 1).items)
    announce(kit.side, TopicMetadata(eaten, 1, 3600), (NOW_MS << 16) + 1)
    kit.restart()
    with pytest.raises(MessagingError, match="is unknown, because"):
        send()
    assert len(table.read(KEYS, b"", None, 10).items) == 1
    assert (
        how != "in a transaction" or kit.store.message.read(CELLS, b"", None, 10).items[0].pointer == tx.write_pointer
    )


def test_new_ids_after_a_clock_step_follow_processed_messages(kit: GroupKit) -> None:
    eaten = named("eaten")
    kit.service.create_topic(eaten, {"retention": "consumed"})
    announce(kit.side, TopicMetadata(eaten, 1, 3600), (NOW_MS + SECOND) << 16)
    kit.restart()
    kit.service.publish(eaten, [b"a"])
    kit.service.consumers.put(eaten, "billing", READ_NONE)
    tx = kit.begin()
    assert [one.payload for one in kit.service.groups.poll(eaten, "billing", GroupPoll(tx, 10)).messages] == [b"a"]


# --- announced ahead -------------------------------------------------------------------------------------------------


@pytest.fixture
def announcements(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the keys that are written to the side table."""
    keys: list[bytes] = []
    exchange_each = kit.side.exchange_each

    def record_keys(changes: Sequence[SideChange]) -> list[bool]:
        keys.extend(change.key for change in changes)
        return exchange_each(changes)

    monkeypatch.setattr(kit.side, "exchange_each", record_keys)
    return keys


def test_announcement_of_a_lone_producer_covers_many_requests(kit: GroupKit, announcements: list[bytes]) -> None:
    one, other = Instance(kit), Instance(kit, "other")
    announcements.clear()
    sent = [b"%d" % number for number in range(100)]
    for payload in sent:
        one.publish(payload)
    assert len(announcements) < 10
    assert read_all(kit) == sent
    announcements.clear()
    for number in range(10):
        (one, other)[number % 2].publish(b"x")
    # The first request was announced before; one more change deletes the announcement.
    assert len(announcements) == 10


@contextmanager
def one_batch(kit: GroupKit) -> Iterator[None]:
    """Write all requests of the block in one batch at its end."""
    batches: list[Batch] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kit.service.workers, "run", batches.append)
        yield
    for batch in batches:
        batch()


def publish_in_one_batch(*calls: tuple[Instance, Sequence[bytes]], again: bool = False) -> None:
    """Publish in one batch, each request for its instance."""
    kit = calls[0][0].kit
    with one_batch(kit):
        answers = [kit.service.submit_publish(BILLS, payloads, sent=one.sent(again=again)) for one, payloads in calls]
    for answer in answers:
        answer.result()


def test_announcement_of_several_producers_is_one_write(kit: GroupKit, announcements: list[bytes]) -> None:
    some = [Instance(kit, name) for name in "abc"]
    announcements.clear()
    for number in range(40):
        publish_in_one_batch(*((one, [b"%s%d" % (one.name.encode(), number)]) for one in reversed(some)))
    assert len(announcements) < 25
    assert read_all(kit) == [b"%s%d" % (name, number) for number in range(40) for name in (b"c", b"b", b"a")]
    announcements.clear()
    # One write deletes all announcements.
    kit.publish(b"other topic")
    assert announcements == []
    kit.service.publish(BILLS, [b"x"])
    assert len(announcements) == 3


@pytest.mark.parametrize("number", range(4, 42, 3))
def test_kill_after_announcements_of_several_keeps_each_request_once(kit: GroupKit, number: int) -> None:
    some = [Instance(kit, name) for name in "abc"]
    expected: list[bytes] = []
    for at in range(number):
        # Only some of them each time, so that their announcements end at different times.
        calls = [(one, [b"%s%d" % (one.name.encode(), at)] * 2) for one in some if at % 7 != ord(one.name) % 7]
        publish_in_one_batch(*calls)
        expected += [payload for _, payloads in calls for payload in payloads]
    kit.restart()
    for one in some:
        with pytest.raises(BadRequest, match="is older than its last request"):
            kit.service.publish(BILLS, [b"x"], sent=Sent(BILLS, one.name, one.generation, one.sequence - 1))
    publish_in_one_batch(*calls, again=True)
    publish_in_one_batch(*((one, [b"last"]) for one in some))
    assert sorted(read_all(kit)) == sorted([*expected, *[b"last"] * 3])


@pytest.mark.parametrize(
    ("then", "messages"),
    [("others", 1), ("a larger request", 65), ("more than have lanes", 31), ("one of them in a ttl", 1)],
)
def test_other_writes_do_not_count_as_requests_of_several_producers(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch, then: str, messages: int
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)
    one, other = Instance(kit, "a"), Instance(kit, "b")
    one.sequence = other.sequence = 30
    publish_in_one_batch((one, [b"31"]), (other, [b"31"]))
    kit.clock.advance(1)
    if then == "others":
        kit.service.publish(BILLS, [b"x"] * messages)
    elif then == "more than have lanes":
        publish_in_one_batch(*((Instance(kit, f"c{number}"), [b"x"]) for number in range(messages)))
    else:
        other.publish(*[b"x"] * messages, ttl_seconds=60 if then == "one of them in a ttl" else None)
    kit.restart()
    for again in (False, True):
        publish_in_one_batch((one, [b"32"]), again=again)
    kit.restart()
    publish_in_one_batch((one, [b"32"]), again=True)
    publish_in_one_batch((one, [b"33"]), (other, [b"33"]))
    assert read_all(kit) == [b"31", b"31", *[b"x"] * messages, b"32", b"33", b"33"]


@pytest.mark.parametrize("how", ["by turns", "together", "each in the place before"])
def test_ids_of_many_batches_stay_near_the_clock(kit: GroupKit, announcements: list[bytes], how: str) -> None:
    one, other = Instance(kit, "a"), Instance(kit, "b")
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
            publish_in_one_batch(*calls, again=again)

    def latest_ms() -> int:
        return max(MessageId.parse(message.id).publish_ms for message in fetch(kit.service, BILLS))

    for number in range(600):
        publish(number)
    assert NOW_MS + AHEAD_MS <= latest_ms() <= NOW_MS + AHEAD_MS + 1
    # After a crash, no announced id is assigned.
    for _ in range(3):
        kit.restart()
        publish(0)
        assert latest_ms() <= NOW_MS + 2 * AHEAD_MS + 2
    kit.clock.advance(2 * AHEAD_MS)
    announcements.clear()
    for number in range(60):
        publish(number)
    assert len(announcements) < 40
    assert read_all(kit) == [b"x"] * sent


@pytest.mark.parametrize("together", [False, True])
def test_inverted_announced_rows_are_not_done(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)
    one, other, tx = Instance(kit, "a"), Instance(kit, "b"), kit.begin()
    if together:
        publish_in_one_batch((one, [b"0"]), (other, [b"0"]))
    one.publish(b"1", tx=tx)
    with failing_puts(kit.store.message), pytest.raises(StoreError):
        one.publish(b"2", tx=tx)
    kit.restart()
    for _ in range(2):
        one.publish(b"2", tx=tx, again=True)
    kit.commit(tx)
    assert read_committed(kit) == [*[b"0"] * 2 * together, b"1", b"2"]


@pytest.mark.parametrize("waited_ms", [AHEAD_MS - 1, AHEAD_MS, AHEAD_MS + 1])
def test_kill_after_the_end_of_an_announcement_keeps_each_request_once(kit: GroupKit, waited_ms: int) -> None:
    one = Instance(kit)
    for number in range(4):
        one.publish(b"%d" % number)
    kit.clock.advance(waited_ms)
    one.publish(b"late", b"and")
    kit.restart()
    one.publish(b"late", b"and", again=True)
    assert read_all(kit) == [b"0", b"1", b"2", b"3", b"late", b"and"]


@pytest.mark.parametrize("end", ["goes on", "repeats"])
@pytest.mark.parametrize("number", range(4, 42, 3))
def test_kill_after_announcements_keeps_each_request_once(kit: GroupKit, number: int, end: str) -> None:
    one = Instance(kit)
    # Requests use the places in turn, and other writes use the first place.
    one.sequence = 25
    sent = [b"%d" % each for each in range(number)]
    for payload in sent:
        one.publish(payload, b"and")
    kit.restart()
    if end == "repeats":
        one.publish(sent[-1], b"and", again=True)
    with pytest.raises(BadRequest, match="is older than its last request"):
        kit.service.publish(BILLS, [b"x"], sent=Sent(BILLS, "importer", one.generation, one.sequence - 1))
    one.publish(b"last")
    assert read_all(kit) == [*(each for payload in sent for each in (payload, b"and")), b"last"]


@pytest.mark.parametrize(
    ("then", "messages"),
    [("others", 1), ("another producer", 1), ("a larger request", 2049), ("payloads", 0), ("a newer instance", 0)],
)
def test_other_writes_do_not_count_as_announced_requests(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch, then: str, messages: int
) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)
    one, other, tx = Instance(kit), Instance(kit, "other"), kit.begin()
    one.sequence = 30
    one.publish(b"31")
    kit.clock.advance(1)
    if then == "others":
        kit.service.publish(BILLS, [b"x"] * messages)
    elif messages:
        (other if then == "another producer" else one).publish(*[b"x"] * messages)
    elif then == "payloads":
        one.store(b"x", tx=tx)
    else:
        one = Instance(kit)
        one.sequence = 31
    kit.restart()
    one.publish(b"32")
    one.publish(b"32", again=True)
    one.publish(b"33")
    kit.restart()
    one.publish(b"33", again=True)
    assert read_all(kit) == [b"31", *[b"x"] * messages, b"32", b"33"]


def test_register_after_announcements_reports_the_open_transaction(kit: GroupKit, announcements: list[bytes]) -> None:
    one = Instance(kit)
    for _ in range(10):
        one.publish(b"a")
    announcements.clear()
    tx = kit.begin()
    for _ in range(10):
        one.publish(b"b", tx=tx, label="file 1")
    assert len(announcements) == 1
    assert Instance(kit).previous == LastTransaction(tx.write_pointer, "file 1", TransactionOutcome.ABORTED)
    assert read_committed(kit) == [b"a"] * 10


def test_restore_during_a_write_is_no_announced_request(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)
    one = Instance(kit)
    one.sequence = 30
    one.publish(b"31")

    def restore_and_poll() -> None:
        # As by the janitor of the process, followed by the poll of a consumer.
        kit.service.invalidate(BILLS)
        read_all(kit)

    act_before(monkeypatch, MessageWriteBatch, "place", restore_and_poll)
    kit.service.publish(BILLS, [b"x"])
    kit.restart()
    one.publish(b"32")
    assert read_all(kit) == [b"31", b"x", b"32"]


def test_repeat_of_an_inverted_request_is_written(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tx = Instance(kit), kit.begin()
    # The transaction has timed out, but the manager could not log the timeout.
    monkeypatch.setattr(pipeline, "is_late", lambda *_: True)
    with pytest.raises(TransactionEnded):
        one.publish(b"a", tx=tx)
    monkeypatch.undo()
    one.publish(b"a", tx=tx, again=True)
    kit.manager.can_commit(tx.transaction_id, [])
    kit.manager.commit(tx.transaction_id)
    assert read_committed(kit) == [b"a"]


def test_publish_of_a_slow_producer_after_expiry_and_restart_is_written(kit: GroupKit) -> None:
    short, one = named("short"), Instance(kit)
    kit.service.create_topic(short, {"ttl": "60"})
    for _ in range(10):
        one.publish(b"a", topic=short)
        kit.clock.advance(61 * SECOND)
    kit.restart()
    one.publish(b"b", topic=short)
    assert read_all(kit, short) == [b"b"]


@pytest.mark.parametrize(
    "why", ["others write to the table", "it goes when it was processed", "it has a ttl of its own"]
)
def test_announcement_is_for_one_request_if_rows_may_go(kit: GroupKit, announcements: list[bytes], why: str) -> None:
    one, options = Instance(kit), dict[str, Any](ttl_seconds=60) if why == "it has a ttl of its own" else {}
    if why == "others write to the table":
        kit.side.private = False
    elif why == "it goes when it was processed":
        kit.service.update_topic(BILLS, {"retention": "consumed"})
    announcements.clear()
    for _ in range(20):
        one.publish(b"a", **options)
    assert len(announcements) == 20


def test_kill_after_messages_may_have_expired_is_not_known(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)
    short = named("short")
    kit.service.create_topic(short)
    one = Instance(kit)
    for payload in (b"a", b"b"):
        one.publish(payload, topic=short)
    kit.service.update_topic(short, {"ttl": "60"})
    kit.clock.advance(61 * SECOND)
    kit.store.message.delete(kit.store.message.read(KEYS, b"", None, 10).items)
    kit.restart()
    with pytest.raises(MessagingError, match="is unknown, because"):
        one.publish(b"b", topic=short, again=True)
    Instance(kit).publish(b"c", topic=short)
    assert read_all(kit, short) == [b"c"]


# --- a kill at every durable write -----------------------------------------------------------------------------------


class Crash(Exception):
    """The end of the process, which rolls back nothing."""


class FailingWrite:
    """A durable write of the store or the side table that fails.

    Attributes:
        at: the number of the write, from 1; 0: all writes succeed.
        behind: whether the write takes effect before it fails.
        error: the error.
        writes: the number of writes.
    """

    def __init__(self, at: int, error: type[Exception], *, behind: bool) -> None:
        self.at, self.behind, self.error, self.writes = at, behind, error, 0

    def write(self, do: Callable[[], Any]) -> Any:
        self.writes += 1
        if self.writes != self.at:
            return do()
        if self.behind:
            do()
        raise self.error("the write failed")


def fail_write(kit: GroupKit, failing: FailingWrite) -> None:
    store: Any = kit.store
    side: Any = kit.side
    puts = {table: table.put for table in (store.message, store.payload)}
    exchange = side.exchange_each
    for table, put in puts.items():
        table.put = lambda rows, put=put: failing.write(lambda: put(rows))
    side.exchange_each = lambda changes: [failing.write(partial(exchange, [change]))[0] for change in changes]


def story(kit: GroupKit, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Publish outside and in a transaction, store payloads, and register another instance."""
    instance = uuid4()
    registered = [call(lambda: kit.service.producers.register(BILLS, "importer", instance))]
    number = 0

    def send(do: Callable[[Sent], Any], label: str = "") -> None:
        nonlocal number
        number += 1
        sent = Sent(BILLS, "importer", registered[0].generation, number, label)
        call(lambda: do(sent))

    send(lambda sent: kit.service.publish(BILLS, [b"0"], sent=sent))
    send(lambda sent: kit.service.publish(BILLS, [b"1", b"2"], sent=sent))
    tx = kit.begin(3000)
    send(lambda sent: kit.service.publish(ORDERS, [b"3"], pointer=tx.write_pointer, sent=sent), "first")
    send(lambda sent: kit.service.store(BILLS, [b"4", b"5"], pointer=tx.write_pointer, sent=sent))
    send(lambda sent: kit.service.publish(BILLS, [], pointer=tx.write_pointer, sent=sent))
    kit.commit(tx)
    left = kit.begin(3000)
    send(lambda sent: kit.service.publish(BILLS, [b"never"], pointer=left.write_pointer, sent=sent), "second")
    late = Sent(BILLS, "importer", registered[0].generation, number + 1)
    heir = uuid4()
    known = call(lambda: kit.service.producers.register(BILLS, "importer", heir))
    assert known.generation == registered[0].generation + 1
    assert known.previous == LastTransaction(tx.write_pointer, "first", TransactionOutcome.COMMITTED)
    with pytest.raises(NotInProgress):
        kit.commit(left)
    with pytest.raises(ProducerFenced):
        call(lambda: kit.service.publish(BILLS, [b"late"], sent=late))
    registered[0], number = known, 0
    send(lambda sent: kit.service.publish(BILLS, [b"6"], sent=sent))


def play_story(at: int, error: type[Exception], *, behind: bool) -> tuple[list[bytes], int]:
    """Return the messages after the failure of a durable write, and the number of writes."""
    failing = FailingWrite(at, error, behind=behind)
    kit = GroupKit(MemoryStore(), MemorySide())
    kit.service.create_topic(BILLS)
    fail_write(kit, failing)

    def call(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except (Crash, StoreError):
            if error is Crash:
                kit.restart()
                # Messages of others do not get the announced ids.
                kit.publish(b"other")
                kit.service.publish(BILLS, [b"other"])
            return do()

    try:
        story(kit, call)
        found = sorted(read_committed(kit) + read_committed(kit, ORDERS))
        return [payload for payload in found if payload != b"other"], failing.writes
    finally:
        kit.close()


@pytest.mark.parametrize("error", [Crash, StoreError])
@pytest.mark.parametrize("alone", [0, 4])
def test_repeat_after_failed_write_counts(monkeypatch: pytest.MonkeyPatch, alone: int, error: type[Exception]) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", alone)
    expected, writes = play_story(0, error, behind=False)
    assert expected == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert writes >= (16 if alone else 15)
    for at in range(1, writes + 1):
        for behind in (False, True):
            assert play_story(at, error, behind=behind)[0] == expected, (at, behind)


def test_failed_write_inverts_rows_of_transactions_but_not_of_producers(kit: GroupKit) -> None:
    one, submit, pointer = Instance(kit), kit.service.submit_publish, kit.begin().write_pointer
    with failing_puts(kit.store.message), one_batch(kit):
        answers = [
            submit(BILLS, [b"a"]),
            submit(BILLS, [b"b"], pointer=pointer),
            submit(BILLS, [b"c"], pointer=pointer, sent=one.sent()),
        ]
    each_raises(StoreError, *(answer.result for answer in answers))
    rows = kit.store.message.read(MESSAGES, b"", None, 10).items
    assert [value.pointer for _, value in rows] == [None, -pointer, pointer]


def test_repeat_of_a_partly_written_request_keeps_each_row_once(kit: GroupKit) -> None:
    one, tx = Instance(kit), kit.begin()
    for inside in (None, tx):
        one.publish(b"a", b"b", b"c", tx=inside)
        [*_, key] = kit.store.message.read(KEYS, b"", None, 100).items
        kit.store.message.delete([key])
        kit.restart()
        one.publish(b"a", b"b", b"c", tx=inside, again=True)
    kit.commit(tx)
    assert read_committed(kit) == [b"a", b"b", b"c"] * 2


def test_repeat_of_lost_payloads_stores_them_at_the_same_keys(kit: GroupKit) -> None:
    one, tx = Instance(kit), kit.begin()
    one.store(b"a", tx=tx)
    keys = kit.store.payload.read(KEYS, b"", None, 10).items
    kit.store.payload.delete(keys)
    kit.restart()
    one.store(b"a", tx=tx, again=True)
    assert kit.store.payload.read(KEYS, b"", None, 10).items == keys


@pytest.mark.parametrize("inside", [False, True])
def test_large_request_without_its_announcement(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    one, payloads = Instance(kit), [b"%d" % number for number in range(250)]
    tx = kit.begin() if inside else None
    with monkeypatch.context() as patched:
        patched.setattr(kit.side, "exchange_each", raising(StoreError("The disk is full.")))
        with pytest.raises(StoreError):
            one.publish(*payloads, tx=tx)
    assert kit.store.message.read(KEYS, b"", None, 1000).items == []
    for _ in range(2):
        one.publish(*payloads, tx=tx, again=True)
    if tx is not None:
        kit.commit(tx)
    assert read_committed(kit) == payloads


def test_large_request_of_a_fenced_producer_stops_no_other(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.side, "private", False)
    one, other = Instance(kit), Instance(kit, "other")
    payloads = [b"%d" % number for number in range(250)]
    registered = ProducerName(BILLS, 1, "importer").key

    def fence() -> None:
        known = Registration.parse(kit.side.get(registered) or b"")
        kit.side.put([(registered, known._replace(generation=known.generation + 1).pack())])

    act_after(monkeypatch, kit.side, "exchange_each", fence)
    with one_batch(kit):
        answers = [kit.service.submit_publish(BILLS, payloads, sent=instance.sent()) for instance in (one, other)]
    with pytest.raises(ProducerFenced):
        answers[0].result()
    answers[1].result()
    assert read_committed(kit) == payloads


# --- late writes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abort", "invalidate"])
def test_write_in_an_ended_transaction_is_rejected(kit: GroupKit, end: str) -> None:
    tx = kit.begin()
    kit.manager.abort(tx) if end == "abort" else getattr(kit.manager, end)(tx.transaction_id)
    with one_batch(kit):
        pointers = (None, tx.write_pointer, None)
        answers = [kit.service.submit_publish(BILLS, [b"a"], pointer=pointer) for pointer in pointers]
    with pytest.raises(TransactionEnded, match=f"{tx.write_pointer} is not in progress"):
        answers[1].result()
    with pytest.raises(TransactionEnded):
        kit.service.store(BILLS, [b"late"], pointer=tx.write_pointer)
    assert read_all(kit) == [b"a", b"a"]


@pytest.mark.parametrize("end", ["commit", "abort", "invalidate"])
@pytest.mark.parametrize("cached", [True, False])
def test_write_in_a_transaction_that_ends_during_it_is_not_visible(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch, end: str, cached: bool
) -> None:
    tx = kit.begin()
    kit.service.store(BILLS, [b"stored"], pointer=tx.write_pointer)
    kit.service.publish(BILLS, [], pointer=tx.write_pointer)
    if end == "abort":
        kit.service.rollback(BILLS, tx.write_pointer)
    for table, write in (("message", kit.service.publish), ("payload", kit.service.store)):
        late = kit.begin() if table == "payload" else tx
        act = {
            "commit": lambda late=late: kit.commit(late),
            "abort": lambda late=late: kit.manager.abort(late),
            "invalidate": lambda late=late: kit.time_out(late),
        }[end]
        act_before(monkeypatch, getattr(kit.store, table), "put", act)
        with pytest.raises(TransactionEnded):
            write(BILLS, [b"late"], pointer=late.write_pointer)
    if not cached:
        kit.restart()
    assert read_committed(kit) == ([b"stored"] if end == "commit" else [])


@pytest.mark.parametrize("inverts", [True, False])
def test_late_write_is_hidden_in_the_cache(kit: GroupKit, monkeypatch: pytest.MonkeyPatch, inverts: bool) -> None:
    tx = kit.begin()
    if not inverts:
        monkeypatch.setattr(kit.store.message, "invert", raising(StoreError("The disk is full.")))
    act_before(monkeypatch, kit.store.message, "put", lambda: kit.commit(tx))
    with pytest.raises(TransactionEnded):
        kit.service.publish(BILLS, [b"late"], pointer=tx.write_pointer)
    assert read_payloads(kit.service, BILLS, NOW_MS, transaction=kit.begin()) == []


def test_publish_of_a_plain_message_enters_no_stage_of_transactions(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("admit", "announce", "recheck", "publish"):
        monkeypatch.setattr(MessageWriteBatch, stage, raising(AssertionError(stage)))
    for stage in ("admit_by_topic", "is_in_time", "is_late", "release", "check_stored_payloads"):
        monkeypatch.setattr(pipeline, stage, raising(AssertionError(stage)))
    kit.service.publish(BILLS, [b"a", b"b"])
    assert read_all(kit) == [b"a", b"b"]


def test_late_write_of_a_dead_server_is_not_seen(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    tx = kit.begin()
    put = kit.store.message.put

    def abort_and_die(rows: list[tuple[bytes, MessageValue]]) -> None:
        kit.manager.abort(tx)
        put(rows)
        raise Crash

    monkeypatch.setattr(kit.store.message, "put", abort_and_die)
    with pytest.raises(Crash):
        kit.service.publish(BILLS, [b"late"], pointer=tx.write_pointer)
    kit.restart()
    assert read_all(kit) == [b"late"]
    assert read_committed(kit) == []
    assert kit.manager.status(tx.transaction_id) == "invalid"
    # A later abort is not an invalidation.
    other = kit.begin()
    kit.manager.abort(other)
    assert kit.manager.status(other.transaction_id) == "ended"


def test_rejected_write_of_another_principal_keeps_the_note_of_a_running_write(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx, submit = kit.begin(), kit.service.submit_publish

    def reject_then_abort() -> None:
        with pytest.raises(TransactionEnded):
            submit(ORDERS, [b"b"], pointer=tx.write_pointer, principal="other").result()
        kit.manager.abort(tx)

    # Before the rows are noted, only the note of the running write makes the abort an invalidation.
    act_before(monkeypatch, kit.side, "put", reject_then_abort)
    with pytest.raises(TransactionEnded):
        submit(BILLS, [b"a"], pointer=tx.write_pointer, principal="owner", ttl_seconds=60).result()
    assert kit.manager.status(tx.transaction_id) == "invalid"


def test_request_during_its_roll_back_is_not_seen(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tx = Instance(kit), kit.begin()
    one.publish(b"a", tx=tx)
    act_before(monkeypatch, kit.store.message, "put", lambda: one.roll_back(tx))
    with pytest.raises(TransactionEnded):
        one.publish(b"b", tx=tx)
    one.roll_back(tx)
    with pytest.raises(TransactionEnded, match="rolled back"):
        one.publish(b"c", tx=tx)
    kit.manager.abort(tx)
    assert read_committed(kit) == []


def test_register_waits_for_a_request_in_flight(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.in_flight._WAIT_SECONDS", 0.01)
    one, heir = Instance(kit), uuid4()

    def register() -> None:
        with pytest.raises(Unavailable, match="still being written"):
            kit.service.producers.register(BILLS, "importer", heir)
        with pytest.raises(Unavailable, match="is running"):
            kit.service.producers._requests.admit(
                TopicMetadata(BILLS, 1, 3600), Sent(BILLS, "importer", one.generation, 2), None, 1
            )

    act_before(monkeypatch, kit.store.message, "put", register)
    one.sequence += 1
    kit.service.publish(BILLS, [b"a"], sent=Sent(BILLS, "importer", one.generation, 1))
    assert kit.service.producers.register(BILLS, "importer", heir).generation == one.generation + 1
    with pytest.raises(ProducerFenced):
        one.publish(b"b")
    assert read_all(kit) == [b"a"]


# --- the janitor -----------------------------------------------------------------------------------------------------


def clean(kit: GroupKit, *, gone: bool = False, bills: int = 0) -> tuple[int, int]:
    """Delete rows of producers as the janitor, after a deletion of all topics or of old generations of ``bills``."""
    seen = kit.manager.visibility()
    idle_before_ms = kit.clock.now_ms() - 7 * DAY

    def is_gone(topic: TopicId, generation: int) -> bool:
        return gone or (topic == BILLS and generation < bills)

    return clean_producer_rows(kit.side, seen.is_invalid, seen.is_undecided, is_gone, idle_before_ms)


def test_invalid_transaction_of_a_producer_stays_aborted_off_the_list(kit: GroupKit) -> None:
    one, tx = Instance(kit), kit.begin()
    one.publish(b"a", tx=tx)
    kit.time_out(tx)
    kit.service.rollback(BILLS, tx.write_pointer)
    assert clean(kit) == (1, 0)
    assert clean(kit) == (0, 0)
    kit.manager.truncate_invalid([tx.transaction_id])
    assert Instance(kit).previous == LastTransaction(tx.write_pointer, "", TransactionOutcome.ABORTED)


@pytest.mark.parametrize("end", ["invalid", "committed"])
def test_pending_previous_transaction_is_reported_aborted_after_truncation(kit: GroupKit, end: str) -> None:
    one, tx = Instance(kit), kit.begin()
    kit.commit(tx) if end == "committed" else kit.time_out(tx)
    key = ProducerName(BILLS, 1, "importer").key
    previous = LastTransaction(tx.write_pointer, "file 17", TransactionOutcome.PENDING)
    known = Registration(one.generation, one.uuid, NOW_MS, previous, settled=True)
    kit.side.put([(key, known.pack())])
    kit.service.invalidate()
    assert clean(kit) == (int(end == "invalid"), 0)
    assert clean(kit) == (0, 0)
    kit.manager.truncate_invalid([tx.transaction_id])
    outcome = TransactionOutcome.COMMITTED if end == "committed" else TransactionOutcome.ABORTED
    assert Instance(kit).previous == previous._replace(outcome=outcome)


def test_clean_producer_rows_marks_the_previous_transaction_of_a_changing_producer(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = kit.begin()
    kit.time_out(tx)
    key = ProducerName(BILLS, 1, "importer").key
    previous = LastTransaction(tx.write_pointer, "file 17", TransactionOutcome.PENDING)
    known = Registration(NOW_MS, uuid4(), NOW_MS, previous, settled=True)
    kit.side.put([(key, known.pack())])
    changed = known._replace(generation=NOW_MS + 1)
    act_before(monkeypatch, kit.side, "exchange", lambda: kit.side.put([(key, changed.pack())]))
    assert clean(kit) == (1, 0)
    aborted = previous._replace(outcome=TransactionOutcome.ABORTED)
    assert kit.side.get(key) == changed._replace(previous=aborted).pack()


@pytest.mark.parametrize("inside", [False, True])
def test_clean_producer_rows_keeps_a_new_registration(
    kit: GroupKit, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    made: list[Instance] = []
    rows = kit.side.rows

    def register_after_read(start: bytes, *rest: Any) -> Any:
        found = rows(start, *rest)
        if start == b"w" and not made:
            made.append(Instance(kit))
            made[0].publish(b"a", tx=kit.begin() if inside else None)
        return found

    monkeypatch.setattr(kit.side, "rows", register_after_read)
    clean(kit)
    made[0].publish(b"a", tx=None, again=True) if not inside else None
    assert read_all(kit) == [b"a"]
    assert len(kit.service.producers.get(BILLS, "importer")[1]) == int(inside)
    kit.restart()
    made[0].publish(b"a", again=True) if not inside else None
    assert read_all(kit) == [b"a"]


def test_clean_producer_rows_deletes_idle_producers_without_open_transactions(kit: GroupKit) -> None:
    before = kit.manager.start_short()
    Instance(kit, "idle").publish(b"before", tx=before)
    kit.commit(before)
    idle, open_, busy = (Instance(kit, name) for name in ("idle", "open", "busy"))
    idle.publish(b"a")
    kit.clock.advance(6 * DAY)
    tx = kit.manager.start_long()
    open_.publish(b"b", tx=tx)
    busy.publish(b"c")
    kit.clock.advance(2 * DAY)
    assert clean(kit) == (0, 1)
    assert len(kit.side.rows(b"q", b"r", 10).items) == 2
    kit.clock.advance(5 * DAY + HOUR)
    busy.publish(b"d")
    assert clean(kit) == (0, 0)
    assert [name for name, *_ in kit.service.producers.of(BILLS)] == ["busy", "open"]
    with pytest.raises(ProducerFenced, match="idle for a week"):
        idle.publish(b"e")
    heir = Instance(kit, "idle")
    assert heir.generation > idle.generation
    assert heir.previous is None
    kit.commit(tx)
    assert clean(kit) == (0, 1)
    assert clean(kit, gone=True) == (0, 0)
    assert kit.side.rows(b"p", b"z", 10).items == []


def test_producer_of_a_recreated_topic_has_to_register_again(kit: GroupKit) -> None:
    one = Instance(kit)
    one.publish(b"a")
    kit.service.delete_topic(BILLS)
    kit.service.create_topic(BILLS)
    with pytest.raises(ProducerFenced):
        one.publish(b"b")
    kit.clock.advance(1)
    heir = Instance(kit)
    assert heir.generation > one.generation
    heir.publish(b"b")
    assert read_all(kit) == [b"b"]


def test_register_in_a_topic_recreated_at_once_fences_older_instances(kit: GroupKit) -> None:
    instances = [Instance(kit)]
    instances[0].publish(b"0", topic=ORDERS)
    for number in (1, 2):
        kit.service.delete_topic(BILLS)
        kit.service.create_topic(BILLS)
        instances.append(heir := Instance(kit))
        heir.publish(b"%d" % number, topic=ORDERS)
        for old in instances[:-1]:
            assert heir.generation > old.generation
            with pytest.raises(ProducerFenced):
                old.publish(b"late", topic=ORDERS)
    assert read_all(kit, ORDERS) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("swept", [False, True])
def test_register_after_its_topic_was_recreated_hides_older_requests(kit: GroupKit, swept: bool) -> None:
    for turn in range(2):
        one, tx = Instance(kit), kit.begin()
        one.publish(b"%d" % turn, tx=tx, topic=ORDERS)
        kit.service.delete_topic(BILLS)
        kit.service.create_topic(BILLS)
        if swept:
            clean(kit, bills=turn + 2)
        kit.clock.advance(SECOND)
        heir = Instance(kit)
        assert heir.generation > one.generation
        assert heir.previous is None
        assert kit.side.rows(b"t", b"u", 10).items == []
        with pytest.raises(NotInProgress):
            kit.commit(tx)
        if swept:
            clean(kit, bills=turn + 2)
            assert len(kit.side.rows(b"w", b"x", 10).items) == 1
    assert read_committed(kit, ORDERS) == []


def test_register_in_a_recreated_topic_waits_for_requests(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.in_flight._WAIT_SECONDS", 0.01)
    one, tx = Instance(kit), kit.begin()

    def recreate_topic() -> None:
        kit.service.delete_topic(BILLS)
        kit.service.create_topic(BILLS)
        with pytest.raises(Unavailable, match="still being written"):
            Instance(kit)

    act_before(monkeypatch, kit.store.message, "put", recreate_topic)
    one.publish(b"a", tx=tx, topic=ORDERS)
    Instance(kit)
    with pytest.raises(NotInProgress):
        kit.commit(tx)


def test_request_of_an_instance_registered_at_another_server_is_written(kit: GroupKit) -> None:
    Instance(kit).publish(b"a")
    with kit.serve() as other:
        known = other.producers.register(BILLS, "importer", uuid4())
    kit.service.publish(BILLS, [b"b"], sent=Sent(BILLS, "importer", known.generation, 1))
    assert read_all(kit) == [b"a", b"b"]


def test_request_fenced_before_its_announcement_is_rejected(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.side, "private", False)
    one = Instance(kit)
    one.publish(b"a")
    with kit.serve() as other:
        register = partial(other.producers.register, BILLS, "importer", uuid4())
        act_before(monkeypatch, kit.side, "exchange_each", register)
        with pytest.raises(ProducerFenced):
            one.publish(b"b")
    assert read_all(kit) == [b"a"]


def test_request_of_a_fenced_producer_fails_no_other_of_its_batch(kit: GroupKit) -> None:
    previous, newest = Instance(kit), Instance(kit)
    with one_batch(kit):
        answers = [
            kit.service.submit_publish(BILLS, [payload], sent=instance.sent())
            for instance, payload in ((previous, b"a"), (newest, b"b"))
        ]
    with pytest.raises(ProducerFenced):
        answers[0].result()
    answers[1].result()
    assert read_all(kit) == [b"b"]


def test_registration_waits_until_the_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a timeout, only a notification ends the wait of the registration.
    monkeypatch.setattr("tms_core.messaging.producers.in_flight._WAIT_SECONDS", None)
    requests = InFlight()
    assert requests.begin(b"request", b"producer", 1)
    waiting = Thread(target=requests.wait_for_older, args=(b"producer", "importer", 2), daemon=True)
    waiting.start()
    wait_until(lambda: requests._waiting)
    assert waiting.is_alive()
    requests.end([b"request"])
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()


def test_is_of_producer_of_other_rows_is_false() -> None:
    producer, group = ProducerName(BILLS, 1, "importer"), ConsumerGroup(BILLS, 1, "importer")
    assert is_of_producer(producer.key)
    assert is_of_producer(producer.transaction_key(7))
    others = [producer.request_key(BILLS.prefix), group.prefix, drained_key(group), b"t", b"tp", b"m" + BILLS.prefix]
    assert [key for key in others if is_of_producer(key)] == []


def test_client_that_continues_at_once_meets_no_running_request(kit: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tx, settle = Instance(kit), kit.begin(), PublishFuture.set_outcome

    def give_up() -> None:
        one.roll_back(tx)
        kit.manager.abort(tx)

    steps: Iterator[Callable[[], object]] = iter([lambda: one.publish(tx=tx), give_up])

    def set_outcome(answer: PublishFuture[object], result: object) -> None:
        if step := next(steps, None):
            step()
        settle(answer, result)

    monkeypatch.setattr(PublishFuture, "set_outcome", set_outcome)
    one.store(b"a", tx=tx)
    assert (kit.manager.is_in_progress(tx.write_pointer), kit.manager.invalid_size()) == (False, 0)
