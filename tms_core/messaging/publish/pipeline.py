"""The write path: what happens to the requests of one topic that are written together.

    admit → place → announce → write → recheck → publish → answer

Each stage takes entries and returns the entries that go on. An entry that is refused carries its error and drops out,
and so does a repeated request. ``docs/explanation/architecture.md`` has a diagram.

* **admit** (:mod:`.admission`): the topic takes the request, its transaction is in progress, and the newest instance of
  its producer sends it.
* **place** gives each entry its position, and with it the ids of its messages.
* **announce** writes down, synced, what must be known before the rows exist.
* **write** (:mod:`.rows`) stores the rows. Messages of one request are contiguous, and readers see nothing of a batch
  before all of it is durable.
* **recheck** takes the rows of transactions back that are no longer in progress.
* **publish** puts the rows into the cache, where readers find them, and notes what transactions have published.
* **answer** (:mod:`.queue`) gives each client its outcome, when no entry of the batch is noted as under way any longer.

An entry without transaction, producer and own ttl is *plain*, as nearly all are. A batch of plain entries skips
announce and recheck, and no stage asks about any of the three.

A write that fails may be done in part, because HBase has no batches. Rows outside transactions cannot be taken back
then. A client that does not know the outcome invalidates its transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from tms_core.messaging.cache import CachedRun
from tms_core.messaging.ids import expires_ms, milliseconds, tail
from tms_core.messaging.producers.last_request import placed
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.admission import (
    admit_by_topic,
    admit_producers,
    admit_transactions,
    ended,
    is_in_time,
    is_late,
    release,
    require_open,
    shows_all,
)
from tms_core.messaging.publish.context import WriterContext
from tms_core.messaging.publish.entry import PublishEntry, remaining
from tms_core.messaging.publish.open_topics import OpenTopic
from tms_core.messaging.publish.rows import MessageRows, PayloadRows, TopicRows
from tms_core.messaging.topics.catalog import TRANSACTIONS
from tms_core.topic import TopicMetadata


class WriteBatch(ABC):
    """Requests of one topic that are written together.

    Attributes:
        now_ms: the time at which they are published.
        is_plain: whether all of them are plain.
        rows: where their rows are stored.
        open_topic: the topic's messages, once a batch of messages has written there.
    """

    rows: TopicRows
    open_topic: OpenTopic | None = None

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        self.context = context
        self.topic = topic
        self.now_ms = 0
        self.is_plain = False

    def process(self, entries: Sequence[PublishEntry]) -> None:
        """Take entries through all stages but the last.

        Raises:
            TmsError: entries without an outcome are not written, or not known to be.
        """
        # Decided once, here: no stage asks an entry of a plain batch again.
        self.is_plain = not [entry for entry in entries if not entry.is_plain]
        if not self.is_plain or TRANSACTIONS in self.topic.properties:
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
            release(self.context, entries)

    def admit(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Refuse entries whose transaction or producer may not write."""
        entries = admit_transactions(self.context, entries, self.now_ms)
        entries = admit_producers(self.context, self.topic, self.rows, entries, self.now_ms)
        # A request that was written before the topic took no more messages is answered as it was then.
        if entries:
            require_open(self.topic)
        return entries

    @abstractmethod
    def commit(self, entries: Sequence[PublishEntry]) -> None:
        """Place, announce, write, recheck and publish."""

    def wake(self) -> None:
        """Wake the polls that wait for messages of the topic."""
        if self.open_topic is not None and self.open_topic.wakes:
            self.open_topic.tell()

    def recheck(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Take back and refuse entries whose transaction is no longer in progress."""
        for entry in entries:
            if entry.pointer is not None and is_late(self.context, entry):
                self.rows.take_back([entry])
                entry.row_pointer = -entry.pointer
                entry.drop(ended(entry.pointer))
        return remaining(entries)


class MessageWriteBatch(WriteBatch):
    """Messages that are written together."""

    rows: MessageRows

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        super().__init__(context, topic)
        self.rows = MessageRows(context, topic)

    def commit(self, entries: Sequence[PublishEntry]) -> None:
        context = self.context
        open_topic = context.open_topics.messages(self.topic)
        first = context.open_topics.next_position(open_topic, self.topic, self.now_ms)
        entries = self.place(open_topic, entries, first)
        if not entries:
            return
        self.open_topic = open_topic
        stop = entries[-1].stop
        # Readers stop before the first position that is taken, until it is released.
        open_topic.ids.take(first, stop)
        try:
            # Whoever writes: these rows must not be taken for rows of producers after a crash.
            if open_topic.ahead.is_stale:
                context.announcements.withdraw(open_topic.ahead, entries, first)
            if not self.is_plain:
                entries = self.announce(open_topic, entries)
            self.rows.write(entries)
            written = entries
            if not self.is_plain:
                entries = self.recheck(entries)
            # The cache has all rows from some position on, also the rows that were taken back.
            context.cache.add(
                open_topic.prefix,
                [CachedRun(one.first, one.row_pointer, one.messages or None, one.size, one.ttl_ms) for one in written],
            )
        except BaseException:
            context.cache.forget(open_topic.prefix, stop)
            context.open_topics.note_failed()
            raise
        finally:
            open_topic.ids.release()
        if not self.is_plain:
            self.publish(entries)

    def place(self, open_topic: OpenTopic, entries: Sequence[PublishEntry], at: int) -> Sequence[PublishEntry]:
        """Give each entry its position, from a position on; refuse entries of transactions that may not write there."""
        context = self.context
        if open_topic.ahead.seats or not self.is_plain:
            entries = context.announcements.arrange(open_topic.ahead, self.topic, entries, at, self.now_ms)
        if self.is_plain:
            for entry in entries:
                entry.first, at = at, at + entry.rows
            return entries
        for entry in entries:
            if entry.seat is not None:
                at = placed(entry.seat, cast(Sent, entry.sent).sequence, at)
            if is_in_time(context, entry, at) and shows_all(context, self.topic, entry):
                entry.first, at = at, at + entry.rows
        return remaining(entries)

    def announce(self, open_topic: OpenTopic, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Write down the positions of producers' rows, ttls of messages, and which transactions have rows here."""
        entries = self.context.announcements.announce(entries, open_topic.ahead)
        mortal = [entry for entry in entries if entry.ttl_ms is not None]
        if mortal:
            open_topic.mortal = True
            self.context.expiries.put(
                (open_topic.prefix + tail(at), expires_ms(at, cast(int, entry.ttl_ms)))
                for entry in mortal
                for at in range(entry.first, entry.stop)
            )
        if (manager := self.context.transactions) is not None:
            # From here on an abort makes the transaction invalid, unless the rows are taken back.
            for entry in entries:
                if entry.pointer is not None:
                    manager.note_written(entry.pointer, str(self.topic.topic), entry.rows)
        return entries

    def publish(self, entries: Sequence[PublishEntry]) -> None:
        """Note what producers and transactions have published."""
        # Rows that were negated do not count: a repetition writes them again, because a transaction manager that could
        # not log the end of a transaction may forget it.
        self.context.announcements.note_written(entries)
        manager, name = self.context.transactions, str(self.topic.topic)
        for entry in entries:
            if entry.pointer is not None and manager is not None:
                manager.note_published(entry.pointer, name, milliseconds(entry.first))
            self.rows.conclude(entry)


class PayloadWriteBatch(WriteBatch):
    """Stored payloads that are written together; readers see them once a message of the transaction refers to them."""

    rows: PayloadRows

    def __init__(self, context: WriterContext, topic: TopicMetadata) -> None:
        super().__init__(context, topic)
        self.rows = PayloadRows(context, topic)

    def commit(self, entries: Sequence[PublishEntry]) -> None:
        entries = self.context.announcements.announce(self.place(entries))
        self.rows.write(entries)
        entries = self.recheck(entries)
        self.context.announcements.note_written(entries)
        for entry in entries:
            self.rows.conclude(entry)

    def place(self, entries: Sequence[PublishEntry]) -> Sequence[PublishEntry]:
        """Give each entry its position after the payloads that its transaction has stored."""
        for entry in entries:
            ids = self.context.open_topics.payloads(self.topic, cast(int, entry.pointer))
            at = ids.first(self.now_ms)
            if is_in_time(self.context, entry, at):
                entry.first = announced_position(entry, at)
                ids.skip(entry.stop)
        return remaining(entries)


def announced_position(entry: PublishEntry, at: int) -> int:
    """Return where payloads are written: at ``at``, but repeated payloads where they were announced before.

    A late write of a former leader then changes nothing.
    """
    admission = entry.admission
    return at if admission is None or admission.repeated is None else admission.repeated.first
