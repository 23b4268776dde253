"""Work through a topic as a member of a consumer group, one transaction for each batch, until the program stops.

While there are no messages, no transaction is open: a plain poll waits at the server for a message. The worker commits
a batch when the program requests the next batch. If the program or the connection fails in between, the worker rolls
the batch back, and the server delivers its messages again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

from tms_core.client.consume.consuming import FAILED, IDLE, PASSING, WAIT_SECONDS, Consuming, MessageBatches, ReadPlan
from tms_core.client.contexts import AsyncTransactionContext, TransactionContext, standing_for
from tms_core.client.protocol import calls, consumer_calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import INTERRUPTED, Core
from tms_core.client.protocol.messages import Message
from tms_core.client.protocol.values import Retry
from tms_core.client.protocol.wire import run
from tms_core.client.transactions.participant import GroupClaims
from tms_core.client.transactions.partitions import Rotation, pattern_of
from tms_core.client.transactions.transaction import ClientTransaction
from tms_core.errors import (
    BadRequest,
    ClientClosed,
    Conflict,
    ConsumerConflict,
    Invalidated,
    NotInProgress,
    PartitionsChanged,
    TmsError,
    TopicExists,
)
from tms_core.rowkey import MessageId
from tms_core.topic import NAME_BYTES, TopicId

logger = logging.getLogger(__name__)

#: The ways to read a topic; see :meth:`tms_core.client.Client.consume`.
READS = ("uncommitted", "committed", "unordered")
_, COMMITTED, UNORDERED = READS
#: How many messages an unordered reader claims at once: few enough to process them before the transaction times out.
UNORDERED_BATCH = 100
#: After these errors nothing of the batch is visible, and the server delivers it again.
_COMES_AGAIN = (*PASSING, Conflict, ConsumerConflict, Invalidated, NotInProgress, PartitionsChanged)
#: How many of several topics are polled in a row. If these have no messages, waiting costs less than polling the rest,
#: because other members usually hold the topics that have messages.
_MOST_CLAIMS = 4
#: The suffix of the name of a dead letter topic.
_DEAD = "-dead"
#: How long the server waits for a message of one topic of several before the next has its turn.
_WAIT_IN_TURN_SECONDS = 1


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """Options of a worker of a consumer group.

    Attributes:
        batch: the most messages in a transaction.
        order: ``partition`` or ``none``.
        max_deliveries: the highest number of deliveries of a message to the program; after that, the worker moves it to
            ``TOPIC-dead``. None: no limit.
        timeout_seconds: the timeout of a batch; None: the default of the transaction service.
        idle_seconds: the time without messages after which the worker stops, with an error if no server responds then;
            None: never.
    """

    batch: int
    order: str
    max_deliveries: int | None = None
    timeout_seconds: int | None = None
    idle_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or (self.max_deliveries is not None and self.max_deliveries < 1):
            raise BadRequest("A batch and a number of deliveries are at least 1.", "Give 1 or more.")
        consumer_calls.check_order(self.order)


class Worker:
    """A worker of a consumer group; both clients drive it.

    Args:
        topic, group: its topics and its group.

    Raises:
        BadRequest: the name of the dead letter topic would be too long.
        ClientClosed: the client is closed.
    """

    def __init__(self, core: Core, topic: Topic, group: str, options: WorkOptions) -> None:
        if options.max_deliveries is not None and pattern_of(topic) is None:
            dead_letters_of(topic_id(topic))
        self.core = core
        self._topics = Rotation(core, topic)
        self._topic = topic
        self._group = group
        self._options = options
        self._current: ClientTransaction | None = None
        self._claims: GroupClaims | None = None
        self._batch_ids: list[MessageId] = []
        #: Transactions that were decided while no server responded, and may still have claims.
        self._cut_off: list[ClientTransaction] = []
        self._pauses = 0
        self._paused: Retry | None = None
        self._idle_since = core.monotonic()
        #: Whether the last request got no response, so that it is not known whether there are messages.
        self._is_cut_off = False
        self.stop = core.wire.stop()
        if self.stop.is_set():
            raise ClientClosed("The client is closed.", "Make another one.")

    async def next(self) -> tuple[ClientTransaction, list[Message]] | None:
        """Commit the last batch, and claim the next one; None after a stop, or after ``idle_seconds`` without messages.

        Raises:
            TmsError: a permanent error, or no server responds when the idle time is over.
        """
        found: list[Message] = []
        while True:
            try:
                await self._finish(starts_next=True)
                # A server that does not respond is not an idle topic: the program must not take it for the end of its
                # work. Therefore one more attempt decides.
                if self.stop.is_set() or (self._is_over() and not self._is_cut_off):
                    await self.give_back()
                    return None
                found = await self._claim()
                # After a failed poll, the rest of a round may have no topic left to poll.
                self._is_cut_off = self._is_cut_off and not self._topics.has_answer
            except ClientClosed:
                return None
            except _COMES_AGAIN as error:
                await self.give_back()
                self._is_cut_off = isinstance(error, PASSING)
                if self._is_cut_off and self._is_over():
                    raise
                await self._wait(FAILED, error)
            except BaseException:
                await self.give_back()
                raise
            if found and self._current is not None:
                self._paused = None
                return self._current, found

    async def give_back(self) -> None:
        """Roll back the batch that the program has not finished."""
        current, self._current = self._current, None
        if current is None:
            return
        try:
            await current.roll_back()
        except _COMES_AGAIN as error:
            self._cut_off.append(current)
            logger.warning("a batch of %s could not be given back at once: %s", self._topic, error)

    async def finish(self, done: MessageId | None, *, whole: bool) -> None:
        """Commit the current batch up to a message, and return its other messages to the group.

        Args:
            done: the last message that the program has processed; if it is of another batch, the whole batch returns.
            whole: do nothing unless this is the last message of the batch.
        """
        claims, batch_ids = self._claims, self._batch_ids
        if self._current is None or (whole and batch_ids[-1:] != [done]):
            return
        if claims is None or done not in batch_ids:
            await self.give_back()
            return
        claims.delivered_id = done
        await self._finish(starts_next=False)

    async def _finish(self, *, starts_next: bool) -> None:
        """Commit or roll back the transaction of the current batch.

        Args:
            starts_next: start the next transaction in the same call as the commit.
        """
        current, self._current = self._current, None
        if current is None:
            return
        self._idle_since = self.core.monotonic()
        if current.cancelled:
            await current.roll_back()
        else:
            try:
                if starts_next and not self.stop.is_set():
                    self._current = await current.commit_and_begin()
                else:
                    await current.commit()
            except INTERRUPTED:
                self._cut_off.append(current)
                raise

    async def _claim(self) -> list[Message]:
        """Return the next batch; if there are no messages, wait and return an empty list."""
        # Return the claims of cut-off transactions first: in the order `partition`, they block every later claim.
        await self._disclaim()
        options = self._options
        current = self._current or await ClientTransaction.begin(self.core, options.timeout_seconds)
        self._current, self._claims, self._batch_ids = current, None, []
        most = options.max_deliveries
        found = await current.next_batch(self._topics, self._group, options.batch, options.order, most, _MOST_CLAIMS)
        if found is None:
            # Never wait with an open transaction: it would time out, and every new snapshot would list it.
            await self.give_back()
            places = {topic: place for topic, place in self._topics.positions.items() if place is not None}
            if not places or len(places) < len(self._topics.positions) or not self._topics.is_complete:
                await self._wait(IDLE, None)
            else:
                await self._until_there_is_something(places)
            return []
        topic, claims, batch = found
        whole = self._topics.whole(topic)
        if most is not None:
            # The topics of a pattern are known only now.
            dead_letters_of(whole)
        claims.delivered_id = batch.messages[-1].id
        self._claims, self._batch_ids = claims, [message.id for message in batch.messages]
        # Only a message that is alone in its batch is known to be the one that fails; the server halves failed batches.
        if most is not None and batch.deliveries > most and len(batch.messages) == 1:
            await self._send_to_dead_letters(current, whole, batch.messages[0])
            return []
        return batch.messages

    async def _disclaim(self) -> None:
        """Return the claims of transactions that were decided while no server responded.

        If it succeeds before the transactions time out, the server does not count a delivery. A later return does
        nothing.
        """
        while self._cut_off:
            try:
                await self._cut_off[-1].disclaim()
            except _COMES_AGAIN as error:
                logger.info("what a transaction has claimed of %s is given back later: %s", self._topic, error)
                return
            except TmsError as error:
                logger.warning("what a transaction has claimed of %s is not given back: %s", self._topic, error)
            self._cut_off.pop()

    async def _send_to_dead_letters(self, current: ClientTransaction, topic: TopicId, message: Message) -> None:
        """Publish a message that could not be processed to the dead letter topic, in the same transaction."""
        dead = dead_letters_of(topic)
        with suppress(TopicExists):
            await self.core.ask(calls.create_topic(dead, None, None))
        logger.warning("message %s of %s could not be processed; it is in %s", message.id, topic, dead)
        await current.publish(dead, [message.payload])

    async def _until_there_is_something(self, places: Mapping[TopicId, MessageId]) -> None:
        """Wait at the server, without a transaction, until one of the topics may have a message.

        One request waits for one topic. Therefore each topic has its turn of waiting, and the others are only polled.
        The wait stops when failed messages are delivered again.
        """
        retry_seconds = self._topics.retry_seconds
        ends = None if retry_seconds is None else self.core.monotonic() + retry_seconds
        wait_seconds = WAIT_SECONDS if len(places) == 1 else _WAIT_IN_TURN_SECONDS
        if self._options.idle_seconds is not None:
            wait_seconds = min(wait_seconds, int(self._options.idle_seconds))
        for topic in cycle(places):
            waited = False
            for one, seconds in {topic: wait_seconds, **dict.fromkeys(places.keys() - {topic}, 0)}.items():
                pause_seconds = seconds if ends is None else min(seconds, ends - self.core.monotonic())
                if self.stop.is_set() or self._is_over() or pause_seconds < 0:
                    return
                call = calls.poll(one, places[one], 1, None, inclusive=True, wait_seconds=int(pause_seconds))
                reading = await self.core.open_once(call)
                try:
                    # A sealed topic gets no message: its successors have to be read instead.
                    if reading.text(calls.SEALED) is not None or await reading.more():
                        return
                finally:
                    await reading.close()
                waited |= reading.waited
            if not waited:
                await self._wait(IDLE, None)

    def _is_over(self) -> bool:
        limit = self._options.idle_seconds
        return limit is not None and self.core.monotonic() - self._idle_since >= limit

    async def _wait(self, pauses: Retry, error: TmsError | None) -> None:
        """Pause; each pause for the same reason is longer than the last one."""
        self._pauses = self._pauses + 1 if self._paused is pauses else 1
        self._paused = pauses
        seconds = pauses.pause_seconds(self._pauses, self.core.random)
        if error is not None:
            logger.warning("group %s reads %s again in %.1f s: %s", self._group, self._topic, seconds, error)
        await self.stop.wait(seconds)


def dead_letters_of(topic: TopicId) -> TopicId:
    """Return the dead letter topic of a topic.

    Raises:
        BadRequest: its name would be too long.
    """
    dead = TopicId(topic.namespace, topic.topic + _DEAD)
    if len(dead.topic) > NAME_BYTES:
        raise BadRequest(
            f"With max_deliveries messages of {topic} go to a topic whose name would have {len(dead.topic)} bytes.",
            f"Leave max_deliveries out, or use a topic with a name of {NAME_BYTES - len(_DEAD)} bytes at most.",
        )
    return dead


class UnorderedReading:
    """A reader of committed messages, as a member of a consumer group; no message waits for an undecided message.

    A batch counts as processed with the request for the next one; the program processes each message at least once.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.stop = worker.stop

    async def more(self, done: MessageId | None) -> list[Message]:
        """Wait for messages and return them; an empty list after a stop, or after the client was closed.

        Raises:
            MessagingError: a permanent error: the topic does not exist, or the permission is missing.
        """
        found = await self._worker.next()
        return [] if found is None else found[1]

    async def store(self, done: MessageId | None) -> None:
        """Commit the batch if this is its last message; otherwise the batch stays claimed."""
        await self._worker.finish(done, whole=True)

    async def close(self, done: MessageId | None) -> None:
        """Stop reading and return unprocessed messages to the group; a second call does nothing."""
        self.stop.set()
        await self._worker.finish(done, whole=False)


class GroupWork:
    """The batches of a consumer group, each with its transaction; see :meth:`tms_core.client.Client.work`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __iter__(self) -> Iterator[tuple[TransactionContext, list[Message]]]:
        try:
            while (found := run(self._worker.next())) is not None:
                yield standing_for(TransactionContext(self._worker.core), found[0]), found[1]
        finally:
            run(self._worker.give_back())

    def stop(self) -> None:
        """Stop the iteration after the current batch is committed; may be called by any thread."""
        self._worker.stop.set()


class AsyncGroupWork:
    """The batches of a consumer group for one task: ``async for tx, batch in client.work(…)``."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __aiter__(self) -> AsyncIterator[tuple[AsyncTransactionContext, list[Message]]]:
        try:
            while (found := await self._worker.next()) is not None:
                yield standing_for(AsyncTransactionContext(self._worker.core), found[0]), found[1]
        finally:
            await self._worker.give_back()

    def stop(self) -> None:
        """Stop the iteration after the current batch is committed; call it in the loop."""
        self._worker.stop.set()


def reading(core: Core, plan: ReadPlan, read: str) -> MessageBatches:
    """Return a reader that reads a topic until it is stopped.

    Args:
        read: ``uncommitted``, ``committed`` or ``unordered``; see :meth:`tms_core.client.Client.consume`.

    Raises:
        BadRequest: ``read`` is unknown, or another argument does not fit it.
    """
    if read not in READS:
        raise BadRequest(f"{read!r} is not a way to read.", f"Give {', '.join(READS[:-1])} or {READS[-1]}.")
    if read != UNORDERED:
        return Consuming(core, plan, committed=read == COMMITTED)
    if plan.consumer is None or plan.start is not None:
        raise BadRequest("Reading unordered goes on where a consumer group is.", "Name a consumer, and no start.")
    return UnorderedReading(Worker(core, plan.topic, plan.consumer, WorkOptions(UNORDERED_BATCH, "none")))
