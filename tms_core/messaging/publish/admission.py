"""The first stage of the write path: reject requests that may not be written, and respond to repeated requests."""

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
                BadRequest(f"Topic {topic.topic} requires transactions.", "Publish the messages in a transaction.")
            )
        elif requirement == FORBIDDEN and entry.pointer is not None:
            entry.drop(
                BadRequest(f"Topic {topic.topic} forbids transactions.", "Publish the messages without a transaction.")
            )
    return remaining(entries)


def require_open(topic: TopicMetadata) -> None:
    """Check that a topic accepts messages.

    Raises:
        PartitionsChanged: messages go to the topic's partitions, or to partitions of a newer family.
    """
    if FAMILIES in topic.properties or SEALED in topic.properties:
        name = topic.topic if FAMILIES in topic.properties else topic.properties.get(PART_OF)
        raise PartitionsChanged(
            f"Topic {topic.topic} does not accept messages.",
            f"Publish to a current partition of {name}: tms topic show {topic.topic.namespace}:{name}",
        )


def admit_transactions(context: WriterContext, entries: Sequence[PublishEntry], now_ms: int) -> Sequence[PublishEntry]:
    """Report the writes to the transaction manager, and reject entries of transactions that are not in progress.

    During a reported write, the manager turns an abort of the transaction into an invalidation. Therefore readers never
    see late rows, even if this process crashes before the recheck. Call :func:`release` afterwards.
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
    requests.rows.invalidate_old(now_ms)
    for entry in entries:
        if (sent := entry.sent) is None:
            continue
        try:
            entry.admission = admission = requests.admit(topic, sent, entry.pointer, entry.rows)
            if (repeated := admission.repeated) is not None:
                last = repeated.request
                # If rows of the first attempt may be deleted, missing rows do not prove a failed write: keep the rest.
                may_be_deleted = _may_be_deleted(context, topic, entry, last.first, now_ms)
                if repeated.is_written or rows.has_all(entry, last, keeps_part=may_be_deleted):
                    entry.first = last.first
                    rows.conclude(entry)
                    entry.is_dropped = True
                elif may_be_deleted:
                    entry.drop(_unknown_outcome(sent))
            elif (
                # Announcements of earlier requests never cover a request with a TTL.
                admission.since is not None
                and entry.ttl_ms is None
                and _may_be_deleted(context, topic, entry, admission.since, now_ms)
            ):
                entry.drop(_unknown_outcome(sent))
        except TmsError as error:
            entry.drop(error)
    return remaining(entries)


def release(context: WriterContext, entries: Sequence[PublishEntry]) -> None:
    """Report that the writes of these entries have finished."""
    context.requests.in_flight.end([entry.admission.keys.request for entry in entries if entry.admission is not None])
    if (manager := context.transactions) is not None:
        for entry in entries:
            if entry.is_write_open:
                manager.end_write(cast(int, entry.pointer))


def is_in_time(context: WriterContext, entry: PublishEntry, at: int) -> bool:
    """Return whether the transaction of an entry may write at a position; if not, reject the entry.

    The publish time of the row counts, which may be ahead of the clock. Rule L5 relies on this bound: no row of a
    transaction is dated later than its start plus the lifetime.
    """
    if entry.pointer is None or transaction_ms(entry.pointer) + context.max_lifetime_ms > milliseconds(at):
        return True
    entry.drop(
        TransactionExpired(
            f"Transaction {entry.pointer} is older than {context.max_lifetime_ms // 1000} s, "
            "the maximum lifetime, so it cannot write.",
            "Start another transaction.",
        )
    )
    return False


def check_stored_payloads(context: WriterContext, topic: TopicMetadata, entry: PublishEntry) -> bool:
    """Return whether the stored payloads of an entry's transaction stay visible; if not, reject the entry.

    In CDAP a transaction publishes either messages or stored payloads to a topic. After a publish of messages, readers
    would never see the stored payloads.
    """
    if entry.pointer is None or not entry.messages or not context.open_topics.hides(topic, entry.pointer):
        return True
    entry.drop(
        BadRequest(
            f"Transaction {entry.pointer} has stored payloads in {topic.topic} that are not published.",
            "Publish the stored payloads first: send a publish request without messages.",
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


def transaction_ended_error(pointer: int | None) -> TransactionEnded:
    """Return the error for a request whose transaction is not in progress."""
    return TransactionEnded(
        f"Transaction {pointer} is not in progress, so it cannot write.", "Start another transaction."
    )


def _refusal(context: WriterContext, entry: PublishEntry) -> TmsError:
    """Return the error of a rejected entry: its producer is fenced, or its transaction is not in progress."""
    if entry.sent is not None:
        try:
            context.requests.require_newest(entry.sent)
        except TmsError as error:
            return error
    return transaction_ended_error(entry.pointer)


def _may_be_deleted(context: WriterContext, topic: TopicMetadata, entry: PublishEntry, first: int, now_ms: int) -> bool:
    """Return whether the janitor may have deleted rows from a position on (rules L3, L6 and L7)."""
    if entry.ttl_ms is not None and expires_ms(first, entry.ttl_ms) <= now_ms:
        return True
    if context.requests.is_processed(topic, first):
        return True
    return Cutoff.at(now_ms, topic.ttl_seconds).expires(milliseconds(first))


def _unknown_outcome(sent: Sent) -> MessagingError:
    return MessagingError(
        f"The outcome of request {sent.sequence} of producer {sent.name} is unknown, because its messages may have "
        "been deleted.",
        "Check whether the results of these messages exist.",
    )
