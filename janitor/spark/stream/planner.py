"""The next batch of a stream: its last position, and whether the stream has missed messages.

Two facts reveal messages that expired unread. If a batch was full, the message after it is stored, and must be the
first of the next batch. If a batch had read everything, a time is stored before which no message was left; once that
time is older than the topic's TTL, messages may have expired unread. Therefore an idle stream stores a new time at
intervals, in an empty batch four times within each TTL.

Each partition of a topic is planned separately, under one view. After a change of the number of partitions, the new
ones start once the old ones are read completely, in a batch of their own or later, so that messages of one key stay in
order. The old ones are checked as long as the server has them: a request that was accepted before the seal may still
add messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from janitor.spark.stream.feed import Feed
from janitor.spark.stream.messages import messages, newest
from janitor.spark.stream.offsets import EARLIEST, Offset, StreamOffset, StreamPosition, Stretch
from tms_core.client import Client, MessageId, TopicId, Transaction
from tms_core.client.protocol.messages import time_at
from tms_core.clock import Clock
from tms_core.errors import Refused
from tms_core.messaging.topics.partitions import Family, Layout, layout_of
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import NO_TX_IN_PROGRESS, TX_PER_MS

logger = logging.getLogger(__name__)

#: How often within the TTL of its topic an idle stream saves its position.
_TIMES = 4


class _Moment(NamedTuple):
    """The facts by which a batch is planned.

    Attributes:
        topic: the topic of the stream.
        now_ms: the time.
        view: the visible transactions; None: all messages.
        last: the last messages of a bounded query; None: the query is unbounded.
    """

    topic: TopicMetadata
    now_ms: int
    view: Transaction | None
    last: Mapping[TopicId, MessageId | None] | None

    @property
    def families(self) -> list[list[TopicId]]:
        """Return the partitions with its messages, oldest first, without partitions that are not open yet.

        Raises:
            Refused: the topic has routes.
        """
        layout = layout_of(self.topic.topic, self.topic.properties) or Layout(self.topic.topic, (Family(0, 1),))
        if layout.routes:
            raise Refused(
                f"{layout.topic} has a copy of each message for each of its routes.",
                f"Set topic to one of {', '.join(str(layout.route(name)) for name in layout.routes)}.",
            )
        sealed = [one for one in layout.families if one.sealed_ms is not None]
        return [layout.members(one) for one in layout.families[: len(sealed) + 1]]

    def is_later(self, topic: TopicId, message: MessageId) -> bool:
        """Return whether a message is too late for a bounded query."""
        if self.last is None:
            return False
        last = self.last.get(topic)
        return last is None or message > last


class _Extent(NamedTuple):
    """The messages after a position.

    Attributes:
        stretches: the messages of a batch.
        first: the first message.
        following: the first message after the batch; None: there is none yet.
    """

    stretches: tuple[Stretch, ...]
    first: MessageId | None
    following: MessageId | None


_NOTHING = _Extent((), None, None)


class Planner:
    """Plans the batches of one query.

    Args:
        feed: the messages to read.
        clock: the clock for their ages.
    """

    def __init__(self, feed: Feed, clock: Clock) -> None:
        self._feed = feed
        self._clock = clock
        self._client: Client = feed.client()
        self._until: _Moment | None = None

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def stay(self) -> None:
        """Plan only the current messages and decisions from now on."""
        topic, now_ms = self._client.topic(self._feed.topic), self._clock.now_ms()
        moment = _Moment(topic, now_ms, None, None)
        last = {part: newest(self._client, part, now_ms) for family in moment.families for part in family}
        self._until = moment._replace(view=self.view(), last=last)

    def view(self) -> Transaction | None:
        """Return the current view of transactions. Its transaction is aborted at once, because reading does not need
        it.
        """
        if not self._feed.committed:
            return None
        with self._client.transaction() as transaction:
            transaction.roll_back()
        return transaction.transaction

    def next(self, before: StreamOffset | None, most: int | None) -> StreamOffset:
        """Return the offset of the next batch.

        Args:
            before: the offset of the last batch; None: there was no batch.
            most: the most messages in a batch, but at least one per partition; None: all.

        Returns:
            ``before`` itself if there is nothing to read.

        Raises:
            Refused: messages may be lost, and ``failOnDataLoss`` is set.
            MessagingError, TransactionError: the server or the transaction service does not respond, or rejects the
                request.
        """
        now_ms = self._clock.now_ms()
        moment = self._until or _Moment(self._client.topic(self._feed.topic), now_ms, self.view(), None)
        known = {} if before is None else {TopicId.parse(part.topic): part for part in before.parts}
        place = self._feed.begin if before is None else _place_of_new(before)
        if before is not None and before.generation != moment.topic.generation:
            self._report_recreation(before)
            known, place = {}, EARLIEST
        found: list[Offset] = []
        families = moment.families
        topics = {part for family in families for part in family}
        old_parts = [part for topic, part in known.items() if topic not in topics]
        for part in old_parts:
            self._check_for_loss(part, _NOTHING, moment.topic.ttl_seconds)
        is_news = before is None or len(old_parts) > 0
        for family in families:
            if known.keys().isdisjoint(family) and place is not None and not self._are_read(found, moment):
                break
            for number, topic in enumerate(family):
                # Each partition gets its share of the rest.
                read = sum(stretch.messages for part in found for stretch in part.stretches)
                share = None if most is None else max(1, (most - read) // (len(family) - number))
                part, news = self._next_of(topic, known.get(topic), place, moment, share)
                found.append(part)
                is_news = is_news or news
        if before is not None and not is_news:
            return before
        return StreamOffset(str(moment.topic.topic), moment.topic.generation, tuple(found))

    # --- its parts ---------------------------------------------------------------------------------------------------

    def _next_of(
        self, topic: TopicId, before: Offset | None, place: StreamPosition | None, moment: _Moment, most: int | None
    ) -> tuple[Offset, bool]:
        """Return the offset of the next batch in one topic or partition, and whether there is anything to store.

        Args:
            before: the offset of the last batch; None: the topic starts with this one.
            place: its first position in that case.
        """
        start = before or self._begin(topic, place)
        read = self._read(topic, start.at, moment, most)
        metadata = self._client.topic(topic)
        if metadata.generation != start.generation:
            self._report_recreation(start)
            first_offset = Offset(start.topic, metadata.generation, EARLIEST, self._clock.now_ms())
            return self._next_of(topic, first_offset, None, moment, most)[0], True
        if before is not None:
            self._check_for_loss(before, read, metadata.ttl_seconds)
        end = StreamPosition.after_message(read.stretches[-1].last) if read.stretches else start.at
        checked_ms = max(start.checked_ms, self._all_read_ms(topic, end, read, moment))
        found = replace(start, at=end, checked_ms=checked_ms, following=read.following, stretches=read.stretches)
        news = len(read.stretches) > 0 or before is None or before.following not in (None, read.first)
        return found, news or (checked_ms - start.checked_ms) * _TIMES > metadata.ttl_seconds * 1000

    def _begin(self, topic: TopicId, place: StreamPosition | None) -> Offset:
        """Return where a topic or partition is started; ``latest`` is settled here, once and for all."""
        generation = self._client.topic(topic).generation
        if place is None:
            last = newest(self._client, topic, self._clock.now_ms())
            place = EARLIEST if last is None else StreamPosition.after_message(last)
        return Offset(str(topic), generation, place, place.ms)

    def _are_read(self, sealed: Sequence[Offset], moment: _Moment) -> bool:
        """Return whether sealed partitions are read completely, and nothing in them is undecided."""
        if any(part.stretches or part.following for part in sealed):
            return False
        if moment.view is None:
            return True
        # All that is not invalid is committed to this view.
        view = replace(moment.view, read_pointer=NO_TX_IN_PROGRESS, in_progress=())
        for part in sealed:
            topic, end = TopicId.parse(part.topic), part.at
            with self._client.poll(topic, start=end.start, inclusive=end.inclusive, limit=1, transaction=view) as rest:
                if next(rest, None) is not None:
                    return False
        return True

    def _read(self, topic: TopicId, place: StreamPosition, moment: _Moment, most: int | None) -> _Extent:
        """Read from a position to the last message of a batch."""
        stretches: list[Stretch] = []
        first = last = following = None
        count = 0
        limit = None if most is None else most + 1
        found = messages(self._client, topic, place, view=moment.view, limit=limit)
        for number, message in enumerate(found):
            first = first or message.id
            if number == most or moment.is_later(topic, message.id):
                following = message.id
                break
            last, count = message.id, count + 1
            if count == self._feed.stretch_messages:
                stretches.append(Stretch(place, last, count))
                place, count = StreamPosition.after_message(last), 0
        if last is not None and count:
            stretches.append(Stretch(place, last, count))
        return _Extent(tuple(stretches), first, following)

    def _all_read_ms(self, topic: TopicId, end: StreamPosition, read: _Extent, moment: _Moment) -> int:
        """Return the time before which nothing is left to be read behind a read that started at the moment."""
        view, now_ms = moment.view, moment.now_ms
        if read.following is not None:
            return end.ms
        if view is None or not view.in_progress:
            return now_ms
        with self._client.poll(topic, start=end.start, inclusive=end.inclusive, limit=1) as found:
            blocked = next(found, None) is not None
        return max(end.ms, min(now_ms, view.in_progress[0] // TX_PER_MS)) if blocked else now_ms

    # --- messages that may be lost -----------------------------------------------------------------------------------

    def _check_for_loss(self, before: Offset, read: _Extent, ttl_seconds: int) -> None:
        following, first = before.following, read.first
        if following is not None:
            if first is None or first > following:
                self._report_loss(
                    f"Messages of {before.topic} from {following} on have expired before the query read them."
                )
            return
        cutoff = Cutoff.at(self._clock.now_ms(), ttl_seconds)
        if cutoff.expires(before.checked_ms):
            since, until = time_at(before.checked_ms), time_at(cutoff.ms)
            self._report_loss(
                f"What was published in {before.topic} between {since:%Y-%m-%d %H:%M:%S} and {until:%Y-%m-%d %H:%M:%S} "
                "UTC has expired before the query read it, if there was something: it did not run, or an open "
                "transaction held it back."
            )

    def _report_recreation(self, start: Offset | StreamOffset) -> None:
        self._report_loss(
            f"{start.topic} was deleted and created again: messages that the query had not read of generation "
            f"{start.generation} are gone."
        )

    def _report_loss(self, what: str) -> None:
        lost(self._feed, what)


def _place_of_new(before: StreamOffset) -> StreamPosition:
    """Return the start of new partitions: the start of the query, until it has read messages of another one."""
    return next((part.at for part in before.parts if part.at.inclusive), EARLIEST)


def lost(feed: Feed, what: str) -> None:
    """Say that messages may be lost: ``failOnDataLoss`` says how.

    Raises:
        Refused: by ending the query.
    """
    if feed.fail_on_loss:
        raise Refused(what, "Set failOnDataLoss to false to go on with what is there.")
    logger.warning("%s", what)
