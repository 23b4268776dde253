"""The first stage of the write path: it rejects requests that may not be written, and answers repeated requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tms_core.errors import (
    BadRequest,
    MessagingError,
    PartitionsChanged,
    TmsError,
    TransactionEnded,
    TransactionExpired,
)
from tms_core.messaging.ids import expires_ms, milliseconds, position
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry, remaining
from tms_core.messaging.publish.rows import TopicRows
from tms_core.messaging.topics.catalog import FORBIDDEN, REQUIRED, TRANSACTIONS
from tms_core.messaging.topics.partitions import FAMILIES, PART_OF, SEALED
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import transaction_ms


def admit_by_topic(topic: TopicMetadata, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
    """Reject entries that violate the topic's property ``transactions``."""
    requirement = topic.properties.get(TRANSACTIONS)
    for entry in entries:
        if requirement == REQUIRED and entry.pointer is None:
            entry.drop(
                BadRequest(f"Topic {topic.topic} takes messages in transactions only.", "Publish in a transaction.")
            )
        elif requirement == FORBIDDEN and entry.pointer is not None:
            entry.drop(BadRequest(f"Topic {topic.topic} takes no messages in transactions.", "Publish outside of one."))
    return remaining(entries)


def require_open(topic: TopicMetadata) -> None:
    """Check that a topic takes messages.

    Raises:
        PartitionsChanged: its partitions, or partitions of a newer family, take them.
    """
    if FAMILIES in topic.properties or SEALED in topic.properties:
        name = topic.topic if FAMILIES in topic.properties else topic.properties.get(PART_OF)
        raise PartitionsChanged(
            f"Topic {topic.topic} takes no messages itself.", f"Publish to a partition that {name} names now."
        )


def admit_transactions(context: WriterContext, entries: Sequence[PublishEntry], now_ms: int) -> Sequence[PublishEntry]:
    """Note the running writes of transactions, and reject entries of transactions that are not in progress.

    If a transaction is aborted while a write is under way, the manager invalidates it instead. Then readers never see
    its late rows, even if this process dies before the recheck. Call :func:`release` afterwards.
    """
    if (manager := context.transactions) is None:
        return entries
    for entry in entries:
        if entry.pointer is not None:
            entry.is_write_open = manager.begin_write(entry.pointer, entry.principal)
            if not entry.is_write_open and is_in_time(context, entry, position(now_ms)):
                entry.drop(_refusal(context, entry))
    return remaining(entries)


def admit_producers(
    context: WriterContext, topic: TopicMetadata, rows: TopicRows, entries: Sequence[PublishEntry], now_ms: int
) -> Sequence[PublishEntry]:
    """Reject entries of fenced producers, and give repeated requests their first outcome.

    Newer instances of the producers wait until :func:`release` is called.
    """
    requests = context.requests
    requests.rows.forget_old(now_ms)
    for entry in entries:
        if (sent := entry.sent) is None:
            continue
        try:
            entry.admission = admission = requests.admit(topic, sent, entry.pointer, entry.rows)
            if (repeated := admission.repeated) is not None:
                last = repeated.request
                # If rows of the first attempt may be deleted, a part of them does not prove a failed write: keep it.
                may_be_deleted = _may_be_deleted(context, topic, entry, last.first, now_ms)
                if repeated.is_written or rows.has_all(entry, last, keeps=may_be_deleted):
                    entry.first = last.first
                    rows.conclude(entry)
                    entry.is_dropped = True
                elif may_be_deleted:
                    entry.drop(_not_known(sent))
            elif (
                # A request with a TTL is never covered by an announcement of an earlier request.
                admission.since is not None
                and entry.ttl_ms is None
                and _may_be_deleted(context, topic, entry, admission.since, now_ms)
            ):
                entry.drop(_not_known(sent))
        except TmsError as error:
            entry.drop(error)
    return remaining(entries)


def release(context: WriterContext, entries: Sequence[PublishEntry]) -> None:
    """Note that no write of these entries is under way any longer."""
    context.requests.in_flight.end([entry.admission.keys.request for entry in entries if entry.admission is not None])
    if (manager := context.transactions) is not None:
        for entry in entries:
            if entry.is_write_open:
                manager.end_write(cast(int, entry.pointer))


def is_in_time(context: WriterContext, entry: PublishEntry, at: int) -> bool:
    """Return whether the transaction of an entry may still write at a position; reject the entry if not.

    The time of the row decides, which may be ahead of the clock. Rule L5 relies on this bound: no row of a transaction
    is younger than its start plus the lifetime.
    """
    if entry.pointer is None or transaction_ms(entry.pointer) + context.max_lifetime_ms > milliseconds(at):
        return True
    entry.drop(
        TransactionExpired(
            f"Transaction {entry.pointer} is older than {context.max_lifetime_ms // 1000} s, "
            "the longest a transaction may write.",
            "Start another one.",
        )
    )
    return False


def shows_all(context: WriterContext, topic: TopicMetadata, entry: PublishEntry) -> bool:
    """Return whether an entry hides no stored payload of its transaction; reject the entry if it does.

    CDAP publishes either messages or stored payloads in a transaction. Readers would take the messages for the whole
    transaction, and never see the stored payloads.
    """
    if entry.pointer is None or not entry.messages or not context.open_topics.hides(topic, entry.pointer):
        return True
    entry.drop(
        BadRequest(
            f"Transaction {entry.pointer} has stored payloads in {topic.topic} that are not published.",
            "Publish them first, with a publish that has no messages.",
        )
    )
    return False


def is_late(context: WriterContext, entry: PublishEntry) -> bool:
    """Return whether the transaction of an entry is no longer in progress, or was rolled back by its producer."""
    if entry.pointer is None:
        return False
    manager, admission = context.transactions, entry.admission
    if manager is not None and not manager.is_in_progress(entry.pointer):
        return True
    return admission is not None and context.requests.is_void(admission.keys.producer, entry.pointer)


def ended(pointer: int | None) -> TransactionEnded:
    """Return the error for a request whose transaction is not in progress."""
    return TransactionEnded(
        f"Transaction {pointer} is not in progress, so it writes nothing.", "Start another transaction."
    )


def _refusal(context: WriterContext, entry: PublishEntry) -> TmsError:
    """Return the error of a rejected entry: its producer is fenced, or its transaction is not in progress."""
    if entry.sent is not None:
        try:
            context.requests.require_newest(entry.sent)
        except TmsError as error:
            return error
    return ended(entry.pointer)


def _may_be_deleted(context: WriterContext, topic: TopicMetadata, entry: PublishEntry, first: int, now_ms: int) -> bool:
    """Return whether rows from a position on may have been deleted since they were written (rules L3, L6 and L7)."""
    if entry.ttl_ms is not None and expires_ms(first, entry.ttl_ms) <= now_ms:
        return True
    if context.requests.is_processed(topic, first):
        return True
    return Cutoff.at(now_ms, topic.ttl_seconds).expires(milliseconds(first))


def _not_known(sent: Sent) -> MessagingError:
    return MessagingError(
        f"It is no longer known whether request {sent.sequence} of producer "
        f"{sent.name} was done: its messages would have expired by now.",
        "Check whether the results of these messages are there.",
    )
