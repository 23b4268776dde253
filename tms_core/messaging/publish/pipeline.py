"""The write path: the stages of a batch of requests to one topic.

    admit → place → announce → write → recheck → publish → respond

Each stage returns the entries for the next stage. Rejected entries and repeated requests get their outcome and skip the
remaining stages. ``docs/explanation/architecture.md`` has a diagram.

* **admit** (:mod:`.admission`) checks that the topic accepts the request, that the transaction is in progress, and that
  the newest instance of the producer sends the request.
* **place** assigns a position to each entry, which determines the ids of its messages.
* **announce** stores, with a sync, the facts that must be durable before the rows exist.
* **write** (:mod:`.rows`) stores the rows. The rows of a request are contiguous, and readers see no message of a batch
  before the whole batch is durable.
* **recheck** rolls back the rows of transactions that are no longer in progress.
* **publish** adds the rows to the cache, records the publishes of producers and transactions, and wakes waiting polls.
* **respond** (:mod:`.queue`) sends each client its outcome, after the running writes are no longer reported.

An entry without a transaction, a producer or a TTL is *plain*, and most entries are plain. A batch of plain entries
skips announce and recheck, and no stage checks its entries again. A batch without transactions skips recheck.

A failed write may be incomplete, because HBase does not write batches atomically. Rows outside transactions then cannot
be rolled back. A client that does not know the outcome invalidates its transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, cast

from tms_core.messaging.cache import CachedRun
from tms_core.messaging.ids import expires_ms, milliseconds, tail
from tms_core.messaging.producers.last_request import place_request
from tms_core.messaging.publish.admission import (
    admit_by_topic,
    admit_producers,
    admit_transactions,
    check_stored_payloads,
    is_in_time,
    is_late,
    release,
    require_open,
    transaction_ended_error,
)
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry, remaining
from tms_core.messaging.publish.open_topics import OpenTopic
from tms_core.messaging.publish.rows import MessageRows, PayloadRows, TopicRows
from tms_core.messaging.topics.catalog import TRANSACTIONS
from tms_core.topic import TopicMetadata

_IS_PLAIN = attrgetter("is_plain")


class WriteBatch(ABC):
    """A batch of requests to one topic.

    Attributes:
        now_ms: the publish time, in milliseconds.
        is_plain: whether all entries are plain.
        is_transactional: whether some entries are in transactions.
        table: the class of its rows.
        rows: the rows in their table.
    """

    table: ClassVar[type[TopicRows]]

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        self.context = context
        self.topic = topic
        self.rows = self.table(context, topic)
        self.now_ms = 0
        self.is_plain = self.is_transactional = False

    def process(self, entries: Sequence[PublishEntry]) -> None:
        """Run entries through all stages except respond.

        Raises:
            TmsError: entries without an outcome were not written, or their outcome is unknown.
        """
        # Checked once here, so that no stage checks the entries of a plain batch again.
        self.is_plain = all(map(_IS_PLAIN, entries))
        self.is_transactional = bool([entry for entry in entries if entry.pointer is not None])
        if TRANSACTIONS in self.topic.properties:
            entries = admit_by_topic(self.topic, entries)
            if not entries:
                return
        self.now_ms = self.context.clock.publish_ms()
        if self.is_plain:
            require_open(self.topic)
            self.commit(entries)
            return
        try:
            if admitted := self.admit(entries):
                self.commit(admitted)
        finally:
            # Also after an error, because newer instances of producers and ends of transactions wait for this.
            release(self.context, entries)

    def admit(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Reject entries whose transaction or producer may not write."""
        if self.is_transactional:
            entries = admit_transactions(self.context, entries, self.now_ms)
        entries = admit_producers(self.context, self.topic, self.rows, entries, self.now_ms)
        # After repeated requests got their outcome, also if the topic was sealed after their first attempt.
        if entries:
            require_open(self.topic)
        return entries

    @abstractmethod
    def commit(self, entries: Sequence[PublishEntry]) -> None:
        """Run admitted entries through the stages place, announce, write, recheck and publish."""

    def recheck(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Roll back and reject entries whose transaction was decided while the rows were being written."""
        for entry in entries:
            if entry.pointer is not None and is_late(self.context, entry):
                self.rows.roll_back([entry])
                entry.row_pointer = -entry.pointer
                entry.drop(transaction_ended_error(entry.pointer))
        return remaining(entries)


class MessageWriteBatch(WriteBatch):
    """A batch of messages."""

    table = MessageRows

    def commit(self, entries: Sequence[PublishEntry]) -> None:
        context = self.context
        open_topic = context.open_topics.messages(self.topic)
        first = context.open_topics.next_position(open_topic, self.topic, self.now_ms)
        entries = self.place(open_topic, entries, first)
        if not entries:
            return
        stop = entries[-1].stop
        # Readers stop before the reserved positions. Otherwise a reader could pass these rows before they exist, and
        # would never return to them.
        open_topic.ids.reserve(first, stop)
        try:
            # Withdraw before the write: after a crash, all rows inside an announcement count as rows of its producer.
            if open_topic.ahead.is_stale:
                context.announcements.withdraw(open_topic.ahead, entries, first)
            if not self.is_plain:
                entries = self.announce(open_topic, entries)
            self.rows.write(entries)
            written = entries
            if self.is_transactional:
                entries = self.recheck(entries)
            # The cache must have every row from its first position on, including rows that were rolled back.
            context.cache.add(
                open_topic.prefix,
                [
                    CachedRun(one.first, one.rows, one.row_pointer, one.messages or None, one.size, one.ttl_ms)
                    for one in written
                ],
            )
        except BaseException:
            # It is unknown which rows exist, so readers must read the store.
            context.cache.invalidate(open_topic.prefix, stop)
            context.open_topics.note_failed()
            raise
        finally:
            open_topic.ids.release()
        if not self.is_plain:
            # Rows rolled back by the recheck do not count as written: the transaction manager may have forgotten an end
            # that it could not log, and then a repeated request must write the rows again.
            context.announcements.note_written(entries)
        if self.is_transactional:
            self.publish(entries)
        if open_topic.wakes:
            open_topic.wake_polls()

    def place(self, open_topic: OpenTopic, entries: Sequence[PublishEntry], at: int) -> Sequence[PublishEntry]:
        """Assign positions from ``at`` on; reject entries of transactions that may not write there."""
        context = self.context
        if open_topic.ahead.lanes or not self.is_plain:
            entries = context.announcements.arrange(open_topic.ahead, self.topic, entries, at, self.now_ms)
        if self.is_plain:
            for entry in entries:
                entry.first, at = at, at + entry.rows
            return entries
        for entry in entries:
            if entry.announced is not None:
                at = entry.announced.first
            elif entry.lane and entry.sent is not None:
                at = place_request(entry.lane, entry.sent.sequence, at)
            if entry.pointer is None or (
                is_in_time(context, entry, at) and check_stored_payloads(context, self.topic, entry)
            ):
                entry.first, at = at, at + entry.rows
        return remaining(entries) if self.is_transactional else entries

    def announce(self, open_topic: OpenTopic, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Store the positions of producers' rows and the TTLs of messages; report written transactions."""
        entries = self.context.announcements.announce(entries, open_topic.ahead)
        expiring = [entry for entry in entries if entry.ttl_ms is not None]
        if expiring:
            # Rule L6: the TTL is durable before its message. After a crash in between, a run deletes the unused TTL; in
            # the other order, the message would live as long as the topic's TTL.
            open_topic.has_ttls = True
            self.context.expiries.put(
                (open_topic.prefix + tail(at), expires_ms(at, cast(int, entry.ttl_ms)))
                for entry in expiring
                for at in range(entry.first, entry.stop)
            )
        if self.is_transactional and (manager := self.context.transactions) is not None:
            # Before the write: from here on, an abort invalidates the transaction unless its rows are rolled back. The
            # rows of an aborted transaction would be visible.
            for entry in entries:
                if entry.pointer is not None:
                    manager.note_written(entry.pointer, str(self.topic.topic), entry.rows)
        return entries

    def publish(self, entries: Sequence[PublishEntry]) -> None:
        """Record the publishes of transactions, and set their outcomes."""
        manager, name = self.context.transactions, str(self.topic.topic)
        for entry in entries:
            if entry.pointer is not None and manager is not None:
                manager.note_published(entry.pointer, name, milliseconds(entry.first))
            self.rows.conclude(entry)


class PayloadWriteBatch(WriteBatch):
    """A batch of stored payloads; readers see them once a message of the transaction refers to them."""

    table = PayloadRows

    def commit(self, entries: Sequence[PublishEntry]) -> None:
        entries = self.context.announcements.announce(self.place(entries))
        self.rows.write(entries)
        entries = self.recheck(entries)
        self.context.announcements.note_written(entries)
        for entry in entries:
            self.rows.conclude(entry)

    def place(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Assign each entry a position after the stored payloads of its transaction."""
        for entry in entries:
            ids = self.context.open_topics.payloads(self.topic, cast(int, entry.pointer))
            at = ids.first(self.now_ms)
            if is_in_time(self.context, entry, at):
                entry.first = announced_position(entry, at)
                ids.skip(entry.stop)
        return remaining(entries)


def announced_position(entry: PublishEntry, at: int) -> int:
    """Return the position of payloads: ``at``, or the announced position of a repeated request.

    A late write of a former leader then writes the same rows, and changes nothing.
    """
    admission = entry.admission
    return at if admission is None or admission.repeated is None else admission.repeated.request.first
