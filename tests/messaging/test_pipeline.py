"""The stages of the write path, each alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.builders import HOUR, NOW_MS
from tests.kit.messaging import ORDERS, GroupKit
from tests.support import raising
from tms_core.errors import BadRequest, ProducerFenced, StoreError, TransactionEnded, TransactionExpired
from tms_core.messaging.ids import position
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.admission import admit_by_topic, admit_producers, admit_transactions, ended, release
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.messaging.publish.pipeline import MessageWriteBatch, PayloadWriteBatch
from tms_core.tables.base import KEYS, MESSAGES
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import TX_PER_MS

AT = position(NOW_MS)


@pytest.fixture
def kit() -> Iterator[GroupKit]:
    kit = GroupKit(MemoryStore(), MemorySide())
    yield kit
    kit.close()


@pytest.fixture
def context(kit: GroupKit) -> WriterContext:
    return kit.service._queues._context


@pytest.fixture
def topic(context: WriterContext) -> TopicMetadata:
    return context.topics.get(ORDERS)


@pytest.fixture
def batch(context: WriterContext, topic: TopicMetadata) -> MessageWriteBatch:
    batch = MessageWriteBatch(context, topic)
    batch.now_ms, batch.is_transactional = NOW_MS, True
    return batch


def entry(kit: GroupKit, *, rows: int = 1, **given: Any) -> PublishEntry:
    """A request in a transaction in progress, unless the test names another pointer."""
    given.setdefault("pointer", kit.begin().write_pointer)
    return PublishEntry([b"x"] * rows, **given)


def sent(kit: GroupKit, name: str = "importer", sequence: int = 1) -> Sent:
    generation = kit.service.producers.register(ORDERS, name, uuid4()).generation
    return Sent(ORDERS, name, generation, sequence)


def pointers(kit: GroupKit) -> list[int | None]:
    return [value.pointer for _, value in kit.store.message.read(MESSAGES, b"", None, 100).items]


@pytest.mark.parametrize(("wanted", "taken"), [("required", 1), ("forbidden", 0)])
def test_admit_by_topic_with_rule_drops_other_entries(
    kit: GroupKit, context: WriterContext, wanted: str, taken: int
) -> None:
    kit.service.update_topic(ORDERS, {"transactions": wanted})
    entries = [entry(kit, pointer=None), entry(kit)]
    assert admit_by_topic(context.topics.get(ORDERS), entries) == [entries[taken]]
    assert isinstance(entries[1 - taken].outcome, BadRequest)


def test_admit_transactions_after_end_drops_entry(kit: GroupKit, context: WriterContext) -> None:
    tx = kit.begin()
    late, open_, plain = entry(kit, pointer=tx.write_pointer), entry(kit), entry(kit, pointer=None)
    kit.manager.abort(tx)
    assert admit_transactions(context, [late, open_, plain], NOW_MS) == [open_, plain]
    assert isinstance(late.outcome, TransactionEnded)
    assert (late.is_begun, open_.is_begun, plain.is_begun) == (False, True, False)


@pytest.mark.parametrize("is_released", [False, True])
def test_release_after_admission_allows_an_abort(kit: GroupKit, context: WriterContext, is_released: bool) -> None:
    tx = kit.begin()
    entries = admit_transactions(context, [entry(kit, pointer=tx.write_pointer)], NOW_MS)
    if is_released:
        release(context, entries)
    kit.manager.abort(tx)
    assert kit.manager.visibility().is_invalid(tx.write_pointer) is not is_released


def test_admit_producers_with_fenced_and_newest_drops_fenced(
    context: WriterContext, topic: TopicMetadata, batch: MessageWriteBatch, kit: GroupKit
) -> None:
    former = entry(kit, pointer=None, sent=sent(kit))
    newest = entry(kit, pointer=None, sent=sent(kit))
    assert admit_producers(context, topic, batch.rows, [former], NOW_MS) == []
    assert admit_producers(context, topic, batch.rows, [newest], NOW_MS) == [newest]
    assert isinstance(former.outcome, ProducerFenced)
    assert newest.admission is not None


def test_place_of_expired_entry_leaves_no_gap(kit: GroupKit, context: WriterContext, batch: MessageWriteBatch) -> None:
    expired = entry(kit, rows=5, pointer=(NOW_MS - HOUR) * TX_PER_MS)
    others = [entry(kit), entry(kit)]
    assert batch.place(context.open_topics.messages(batch.topic), [others[0], expired, others[1]], AT) == others
    assert [one.first for one in others] == [AT, AT + 1]
    assert isinstance(expired.outcome, TransactionExpired)


def test_announce_of_fenced_producer_drops_entry(
    kit: GroupKit, context: WriterContext, batch: MessageWriteBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit.side, "private", False)
    open_topic = context.open_topics.messages(batch.topic)
    entries = [entry(kit, pointer=None, sent=sent(kit, name)) for name in "ab"]
    admit_producers(context, batch.topic, batch.rows, entries, NOW_MS)
    # Another server has registered a newer instance of the first one.
    name = entries[0].admission.keys.registered if entries[0].admission else b""
    monkeypatch.setattr(context.requests, "refusal_since", fenced := raising_for(name))
    assert batch.announce(open_topic, batch.place(open_topic, entries, AT)) == [entries[1]]
    assert entries[0].outcome is fenced(entries[0].admission)


def raising_for(key: bytes) -> Any:
    """Refuse the producer with this key."""
    error = ProducerFenced("Fenced.", "End.")
    return lambda admission: error if admission.keys.registered == key else None


@pytest.mark.parametrize("can_negate", [True, False])
def test_recheck_after_end_takes_back_and_drops(
    kit: GroupKit, batch: MessageWriteBatch, monkeypatch: pytest.MonkeyPatch, can_negate: bool
) -> None:
    tx = kit.begin()
    late, other = entry(kit, pointer=tx.write_pointer), entry(kit)
    late.first, other.first = AT, AT + 1
    batch.rows.write([late, other])
    kit.manager.invalidate(tx.transaction_id)
    if not can_negate:
        monkeypatch.setattr(kit.store.message, "invert", raising(StoreError("The disk is full.")))
    assert batch.recheck([late, other]) == [other]
    assert isinstance(late.outcome, TransactionEnded)
    assert (late.row_pointer, other.row_pointer) == (-tx.write_pointer, other.pointer)
    assert pointers(kit) == [-tx.write_pointer if can_negate else tx.write_pointer, other.pointer]


def test_process_that_fails_after_refusal_keeps_its_error(
    kit: GroupKit, batch: MessageWriteBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = kit.begin()
    refused, other = entry(kit, pointer=tx.write_pointer), entry(kit)
    kit.manager.abort(tx)
    monkeypatch.setattr(kit.store.message, "put", raising(StoreError("The disk is full.")))
    with pytest.raises(StoreError):
        batch.process([refused, other])
    assert str(refused.outcome) == str(ended(tx.write_pointer))
    assert not other.is_dropped


def test_place_of_payloads_puts_repeated_request_where_it_was(kit: GroupKit, context: WriterContext) -> None:
    tx, said = kit.begin(), sent(kit)
    kit.service.store(ORDERS, [b"x"], pointer=tx.write_pointer, sent=said)
    [key] = kit.store.payload.read(KEYS, b"", None, 10).items
    kit.store.payload.delete([key])
    kit.restart()
    context = kit.service._queues._context
    batch = PayloadWriteBatch(context, context.topics.get(ORDERS))
    batch.now_ms = NOW_MS
    again = entry(kit, pointer=tx.write_pointer, sent=said)
    entries = batch.admit([again])
    assert batch.place(entries) == [again]
    batch.rows.write(entries)
    assert kit.store.payload.read(KEYS, b"", None, 10).items == [key]
