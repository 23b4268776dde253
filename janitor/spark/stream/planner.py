"""Where the next batch of a stream ends, and whether the stream has missed something.

Two things tell of messages that expired before they were read. Where a batch ended because it was full, the message
that followed is written down, and has to be the first of the next batch. Where it had read all, a time is written down
before which nothing was left; once that is older than the topic's ttl, messages may have come and gone. An idle stream
therefore says from time to time how late it is, which makes an empty batch four times within each ttl.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from janitor.spark.stream.feed import Feed
from janitor.spark.stream.messages import messages, newest
from janitor.spark.stream.offsets import EARLIEST, Offset, StreamPosition, Stretch
from tms_core.client import Client, MessageId, Transaction
from tms_core.client.messages import time_at
from tms_core.clock import Clock
from tms_core.errors import Refused
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import TX_PER_MS

logger = logging.getLogger(__name__)

#: How often within its topic's ttl an idle stream writes down how late it is.
_TIMES = 4


class _Until(NamedTuple):
    """What there was when a query began that ends when it has read that."""

    now_ms: int
    view: Transaction | None
    last: MessageId | None


class _Extent(NamedTuple):
    """What lies behind a place.

    Attributes:
        stretches: the messages of a batch.
        first: the first message.
        following: the one behind the batch, where there is one already.
    """

    stretches: tuple[Stretch, ...]
    first: MessageId | None
    following: MessageId | None


class Planner:
    """Plans the batches of one query.

    Args:
        feed: what to read.
        clock: what is too old by now.
    """

    def __init__(self, feed: Feed, clock: Clock) -> None:
        self._feed = feed
        self._clock = clock
        self._client: Client = feed.client()
        self._until: _Until | None = None

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def stay(self) -> None:
        """From now on plan what is decided now, up to the last message now; nothing later."""
        now_ms = self._clock.now_ms()
        last = newest(self._client, self._feed.topic, now_ms)
        self._until = _Until(now_ms, self.view(), last)

    def view(self) -> Transaction | None:
        """What is committed now. A transaction that only reads need not stay open."""
        if not self._feed.committed:
            return None
        with self._client.transaction() as transaction:
            transaction.roll_back()
        return transaction.transaction

    def next(self, before: Offset | None, most: int | None) -> Offset:
        """The offset that ends the next batch.

        Args:
            before: the one that ended the last; None: there was none.
            most: messages in a batch, at most; None: all there are.

        Returns:
            ``before`` itself where there is nothing to read.

        Raises:
            Refused: messages may be lost, and ``failOnDataLoss`` is set.
            MessagingError, TransactionError: the server or the transaction service does not answer, or refuses.
        """
        begun = before or self._begin()
        now_ms, view, _ = self._until or (self._clock.now_ms(), self.view(), None)
        read = self._read(begun.at, view, most)
        topic = self._client.topic(self._feed.topic)
        if topic.generation != begun.generation:
            self._made_again(begun)
            return self.next(Offset(str(topic.topic), topic.generation, EARLIEST, self._clock.now_ms()), most)
        if before is not None:
            self._check_for_loss(before, read, topic)
        end = StreamPosition.behind(read.stretches[-1].last) if read.stretches else begun.at
        checked_ms = max(begun.checked_ms, self._all_read_ms(end, read, view, now_ms))
        found = replace(begun, at=end, checked_ms=checked_ms, following=read.following, stretches=read.stretches)
        news = read.stretches or before is None or before.following not in (None, read.first)
        late = (checked_ms - begun.checked_ms) * _TIMES > topic.ttl_seconds * 1000
        return found if news or late else begun

    # --- its parts ---------------------------------------------------------------------------------------------------

    def _begin(self) -> Offset:
        """Where a query without a checkpoint begins; ``latest`` is settled here, once and for all."""
        feed = self._feed
        topic = self._client.topic(feed.topic)
        place = feed.begin
        if place is None:
            last = newest(self._client, feed.topic, self._clock.now_ms())
            place = EARLIEST if last is None else StreamPosition.behind(last)
        return Offset(str(feed.topic), topic.generation, place, place.ms)

    def _read(self, place: StreamPosition, view: Transaction | None, most: int | None) -> _Extent:
        """Read from a place to where a batch ends."""
        stretches: list[Stretch] = []
        first = last = following = None
        count = 0
        limit = None if most is None else most + 1
        found = messages(self._client, self._feed.topic, place, view=view, limit=limit)
        for number, message in enumerate(found):
            first = first or message.id
            if number == most or self._is_later(message.id):
                following = message.id
                break
            last, count = message.id, count + 1
            if count == self._feed.stretch_messages:
                stretches.append(Stretch(place, last, count))
                place, count = StreamPosition.behind(last), 0
        if last is not None and count:
            stretches.append(Stretch(place, last, count))
        return _Extent(tuple(stretches), first, following)

    def _is_later(self, message: MessageId) -> bool:
        """Whether a message is not for a query that ends."""
        return self._until is not None and (self._until.last is None or message > self._until.last)

    def _all_read_ms(self, end: StreamPosition, read: _Extent, view: Transaction | None, now_ms: int) -> int:
        """The time before which nothing is left to be read behind a read that began at ``now_ms``."""
        if read.following is not None:
            return end.ms
        if view is None or not view.in_progress:
            return now_ms
        with self._client.poll(self._feed.topic, start=end.start, inclusive=end.inclusive, limit=1) as found:
            blocked = next(found, None) is not None
        return max(end.ms, min(now_ms, view.in_progress[0] // TX_PER_MS)) if blocked else now_ms

    # --- what may be lost --------------------------------------------------------------------------------------------

    def _check_for_loss(self, before: Offset, read: _Extent, topic: TopicMetadata) -> None:
        following, first = before.following, read.first
        if following is not None:
            if first is None or first > following:
                self._lost(f"Messages of {topic.topic} from {following} on have expired before the query read them.")
            return
        cutoff = Cutoff.at(self._clock.now_ms(), topic.ttl_seconds)
        if cutoff.expires(before.checked_ms):
            since, until = time_at(before.checked_ms), time_at(cutoff.ms)
            self._lost(
                f"What was published in {topic.topic} between {since:%Y-%m-%d %H:%M:%S} and {until:%Y-%m-%d %H:%M:%S} "
                "UTC has expired before the query read it, if there was something: it did not run, or an open "
                "transaction held it back."
            )

    def _made_again(self, begun: Offset) -> None:
        self._lost(
            f"{begun.topic} was deleted and made again: what the query had not read of generation {begun.generation} "
            "is gone."
        )

    def _lost(self, what: str) -> None:
        lost(self._feed, what)


def lost(feed: Feed, what: str) -> None:
    """Say that messages may be lost: ``failOnDataLoss`` says how.

    Raises:
        Refused: by ending the query.
    """
    if feed.fail_on_loss:
        raise Refused(what, "Set failOnDataLoss to false to go on with what is there.")
    logger.warning("%s", what)
