"""The planner of a stream's batches, which also detects lost messages.

The offset of a batch reveals messages that expired unread. After a full batch, it stores the id of the next message,
which must be the first of the next batch. After a batch that read everything, it stores the time up to which the stream
has read. If that time is older than the topic's TTL, messages may have expired unread. Therefore an idle stream
refreshes the time with an empty batch, four times per TTL.

Each partition of a topic is planned separately, under one view. After a change of the number of partitions, a stream
starts the new partitions only after it has read the old ones completely, so that messages of one key stay in order.
It polls the old partitions as long as the server has them, because an accepted request may add messages after the seal.
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

#: How many times per TTL of its topic an idle stream saves its position.
_REFRESHES_PER_TTL = 4


class _ServerState(NamedTuple):
    """The state of the server for which a batch is planned.

    Attributes:
        topic: the metadata of the stream's topic.
        now_ms: the time of the state.
        view: the transaction whose view filters the messages; None: read uncommitted messages, too.
        last: the last message of each partition for a bounded query; None: the query is unbounded.
    """

    topic: TopicMetadata
    now_ms: int
    view: Transaction | None
    last: Mapping[TopicId, MessageId | None] | None

    @property
    def families(self) -> list[list[TopicId]]:
        """Return the partitions of each layout, oldest layout first: all sealed layouts and the first unsealed layout.

        Raises:
            Refused: the topic has routes.
        """
        layout = layout_of(self.topic.topic, self.topic.properties) or Layout(self.topic.topic, (Family(0, 1),))
        if layout.routes:
            raise Refused(
                f"{layout.topic} has routes, and each route has a copy of the messages.",
                f"Set topic to one of {', '.join(str(layout.route(name)) for name in layout.routes)}.",
            )
        sealed = [one for one in layout.families if one.sealed_ms is not None]
        return [layout.members(one) for one in layout.families[: len(sealed) + 1]]

    def is_later(self, topic: TopicId, message: MessageId) -> bool:
        """Return whether a message is too new for a bounded query."""
        if self.last is None:
            return False
        last = self.last.get(topic)
        return last is None or message > last


class _Extent(NamedTuple):
    """The result of a read from a position.

    Attributes:
        stretches: the ranges of messages in the batch.
        first: the first message after the position; None: the topic has no more messages.
        following: the first message after the batch; None: the batch has the topic's last message.
    """

    stretches: tuple[Stretch, ...]
    first: MessageId | None
    following: MessageId | None


_EMPTY_EXTENT = _Extent((), None, None)


class Planner:
    """A planner for the batches of one query.

    Args:
        feed: the topic to read, with the options of the query.
        clock: the clock for the expiry of messages.
    """

    def __init__(self, feed: Feed, clock: Clock) -> None:
        self._feed = feed
        self._clock = clock
        self._client: Client = feed.client()
        self._bound: _ServerState | None = None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def freeze_end(self) -> None:
        """Limit the query to the current messages and transactions, for the trigger ``availableNow``."""
        topic, now_ms = self._client.topic(self._feed.topic), self._clock.now_ms()
        state = _ServerState(topic, now_ms, None, None)
        last = {part: newest(self._client, part, now_ms) for family in state.families for part in family}
        self._bound = state._replace(view=self.view(), last=last)

    def view(self) -> Transaction | None:
        """Return a transaction with the current view, already aborted, because a view outlives its transaction."""
        if not self._feed.committed:
            return None
        with self._client.transaction() as transaction:
            transaction.roll_back()
        return transaction.transaction

    def next(self, before: StreamOffset | None, limit: int | None) -> StreamOffset:
        """Return the offset of the next batch.

        Args:
            before: the offset of the previous batch; None: this is the first batch.
            limit: the maximum number of messages in a batch, but at least one per partition; None: no limit.

        Returns:
            ``before`` itself if there are no new messages and no new time to store.

        Raises:
            Refused: messages may be lost, and ``failOnDataLoss`` is set.
            MessagingError, TransactionError: the server or the transaction service does not respond, or rejects the
                request.
        """
        now_ms = self._clock.now_ms()
        state = self._bound or _ServerState(self._client.topic(self._feed.topic), now_ms, self.view(), None)
        known = {} if before is None else {TopicId.parse(part.topic): part for part in before.parts}
        position = self._feed.begin if before is None else _start_of_new_partitions(before)
        if before is not None and before.generation != state.topic.generation:
            self._report_recreation(before)
            known, position = {}, EARLIEST
        found: list[Offset] = []
        families = state.families
        topics = {part for family in families for part in family}
        old_parts = [part for topic, part in known.items() if topic not in topics]
        for part in old_parts:
            self._check_for_loss(part, _EMPTY_EXTENT, state.topic.ttl_seconds)
        has_news = before is None or len(old_parts) > 0
        for family in families:
            if known.keys().isdisjoint(family) and position is not None and not self._is_completely_read(found, state):
                break
            for number, topic in enumerate(family):
                # Partitions that need less than their share leave the rest to the following partitions.
                read = sum(stretch.messages for part in found for stretch in part.stretches)
                share = None if limit is None else max(1, (limit - read) // (len(family) - number))
                part, news = self._plan_partition(topic, known.get(topic), position, state, share)
                found.append(part)
                has_news = has_news or news
        if before is not None and not has_news:
            return before
        return StreamOffset(str(state.topic.topic), state.topic.generation, tuple(found))

    # --- one partition -----------------------------------------------------------------------------------------------

    def _plan_partition(
        self,
        topic: TopicId,
        before: Offset | None,
        position: StreamPosition | None,
        state: _ServerState,
        limit: int | None,
    ) -> tuple[Offset, bool]:
        """Return the offset of the next batch in one topic or partition, and whether there is anything to store.

        Args:
            before: the offset of the previous batch; None: this batch is the partition's first.
            position: the start of the first batch; None: after the present messages.
        """
        start = before or self._start_offset(topic, position)
        read = self._read(topic, start.at, state, limit)
        metadata = self._client.topic(topic)
        if metadata.generation != start.generation:
            self._report_recreation(start)
            first_offset = Offset(start.topic, metadata.generation, EARLIEST, self._clock.now_ms())
            return self._plan_partition(topic, first_offset, None, state, limit)[0], True
        if before is not None:
            self._check_for_loss(before, read, metadata.ttl_seconds)
        end = StreamPosition.after_message(read.stretches[-1].last) if read.stretches else start.at
        checked_ms = max(start.checked_ms, self._checked_ms(topic, end, read, state))
        found = replace(start, at=end, checked_ms=checked_ms, following=read.following, stretches=read.stretches)
        news = len(read.stretches) > 0 or before is None or before.following not in (None, read.first)
        return found, news or (checked_ms - start.checked_ms) * _REFRESHES_PER_TTL > metadata.ttl_seconds * 1000

    def _start_offset(self, topic: TopicId, position: StreamPosition | None) -> Offset:
        """Return the offset from which to read a new topic or partition, with ``latest`` resolved to a message id."""
        generation = self._client.topic(topic).generation
        if position is None:
            last = newest(self._client, topic, self._clock.now_ms())
            position = EARLIEST if last is None else StreamPosition.after_message(last)
        return Offset(str(topic), generation, position, position.ms)

    def _is_completely_read(self, sealed: Sequence[Offset], state: _ServerState) -> bool:
        """Return whether sealed partitions are read completely, and have no messages of open transactions."""
        if any(part.stretches or part.following for part in sealed):
            return False
        if state.view is None:
            return True
        # This view shows the messages of open transactions as committed, and hides only invalid ones.
        view = replace(state.view, read_pointer=NO_TX_IN_PROGRESS, in_progress=())
        for part in sealed:
            topic, end = TopicId.parse(part.topic), part.at
            with self._client.poll(topic, start=end.start, inclusive=end.inclusive, limit=1, transaction=view) as rest:
                if next(rest, None) is not None:
                    return False
        return True

    def _read(self, topic: TopicId, position: StreamPosition, state: _ServerState, limit: int | None) -> _Extent:
        """Read from a position to the last message of a batch."""
        stretches: list[Stretch] = []
        first = last = following = None
        count = 0
        # The read includes the message after the batch, for the check for lost messages.
        read_limit = None if limit is None else limit + 1
        found = messages(self._client, topic, position, view=state.view, limit=read_limit)
        for number, message in enumerate(found):
            first = first or message.id
            if number == limit or state.is_later(topic, message.id):
                following = message.id
                break
            last, count = message.id, count + 1
            if count == self._feed.stretch_messages:
                stretches.append(Stretch(position, last, count))
                position, count = StreamPosition.after_message(last), 0
        if last is not None and count:
            stretches.append(Stretch(position, last, count))
        return _Extent(tuple(stretches), first, following)

    def _checked_ms(self, topic: TopicId, end: StreamPosition, read: _Extent, state: _ServerState) -> int:
        """Return the time before which the stream has read all messages, after a read of ``state``."""
        view, now_ms = state.view, state.now_ms
        if read.following is not None:
            return end.ms
        if view is None or not view.in_progress:
            return now_ms
        with self._client.poll(topic, start=end.start, inclusive=end.inclusive, limit=1) as found:
            blocked = next(found, None) is not None
        return max(end.ms, min(now_ms, view.in_progress[0] // TX_PER_MS)) if blocked else now_ms

    # --- lost messages -----------------------------------------------------------------------------------------------

    def _check_for_loss(self, before: Offset, read: _Extent, ttl_seconds: int) -> None:
        following, first = before.following, read.first
        if following is not None:
            if first is None or first > following:
                self._report_loss(
                    f"Messages of {before.topic} expired before the query read them, starting with {following}."
                )
            return
        cutoff = Cutoff.at(self._clock.now_ms(), ttl_seconds)
        if cutoff.expires(before.checked_ms):
            since, until = time_at(before.checked_ms), time_at(cutoff.ms)
            self._report_loss(
                f"Messages published to {before.topic} between {since:%Y-%m-%d %H:%M:%S} and "
                f"{until:%Y-%m-%d %H:%M:%S} UTC may have expired before the query read them: the query did not run, or "
                "an open transaction blocked them."
            )

    def _report_recreation(self, start: Offset | StreamOffset) -> None:
        self._report_loss(
            f"{start.topic} was deleted and created again: unread messages of generation {start.generation} are lost."
        )

    def _report_loss(self, text: str) -> None:
        report_loss(self._feed, text)


def _start_of_new_partitions(before: StreamOffset) -> StreamPosition:
    """Return the query's start position until the query has read a message, and the earliest position after that."""
    return next((part.at for part in before.parts if part.at.inclusive), EARLIEST)


def report_loss(feed: Feed, text: str) -> None:
    """Log that messages may be lost, or fail the query.

    Raises:
        Refused: ``failOnDataLoss`` is set.
    """
    if feed.fail_on_loss:
        raise Refused(text, "Set failOnDataLoss to false to continue with the remaining messages.")
    logger.warning("%s", text)
