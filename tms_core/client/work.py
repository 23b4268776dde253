"""Process a topic as a member of a consumer group, with one transaction for each batch.

The worker commits a batch when the program requests the next batch. If the program or the connection fails, the worker
rolls the batch back, and the server delivers its messages again. While the topic has no messages, no transaction is
open: a plain poll waits at the server for a message.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

from tms_core.client.consume.consuming import FAILED, IDLE, TRANSIENT, WAIT_SECONDS, Consuming, MessageBatches, ReadPlan
from tms_core.client.contexts import AsyncTransactionContext, TransactionContext, attach
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
#: The number of messages that an unordered reader claims in a transaction, few enough to process them within its
#: timeout.
UNORDERED_BATCH = 100
#: After these errors the batch is rolled back, and the server delivers its messages again.
_RETRYABLE = (*TRANSIENT, Conflict, ConsumerConflict, Invalidated, NotInProgress, PartitionsChanged)
#: The maximum number of topics that are polled in a round. If they have no messages, waiting costs less than polling
#: the others, because topics with messages are usually claimed by other members.
_MAX_POLLS = 4
#: The suffix of the name of a dead letter topic.
_DEAD = "-dead"
#: The wait for a message of one of several topics in seconds, before the wait for the next topic.
_WAIT_EACH_SECONDS = 1


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """Options of a worker of a consumer group.

    Attributes:
        batch: the maximum number of messages in a transaction.
        order: ``partition`` or ``none``.
        max_deliveries: the maximum number of deliveries of a message to the program; then the worker moves the message
            to ``TOPIC-dead``. None: unlimited.
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
            raise BadRequest(
                f"The batch {self.batch} or the number of deliveries {self.max_deliveries} is below 1.",
                "Use numbers of at least 1.",
            )
        consumer_calls.check_order(self.order)


class Worker:
    """A worker of a consumer group, for both clients.

    Args:
        topic: a topic, or a pattern of several topics.
        group: the name of the consumer group.

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
        #: Transactions that ended without a response of the server, and may still have claims.
        self._interrupted: list[ClientTransaction] = []
        self._pauses = 0
        self._paused: Retry | None = None
        self._idle_since = core.monotonic()
        #: Whether the last request got no response, so that the topic may have messages.
        self._is_disconnected = False
        self.stop = core.wire.stop()
        if self.stop.is_set():
            raise ClientClosed("The client is closed.", "Create another client.")

    async def next(self) -> tuple[ClientTransaction, list[Message]] | None:
        """Commit the current batch, and claim the next one; None after a stop or ``idle_seconds`` without messages.

        Raises:
            TmsError: a permanent error; or no server responds when the idle time is over.
        """
        found: list[Message] = []
        while True:
            try:
                await self._finish(starts_next=True)
                # A server that does not respond does not mean that the topic is idle, so try once more before the stop.
                if self.stop.is_set() or (self._is_idle_time_over() and not self._is_disconnected):
                    await self.release()
                    return None
                found = await self._claim()
                # After a failed poll, the rest of the round may have no topic to poll, and then gets no response.
                self._is_disconnected = self._is_disconnected and not self._topics.has_answer
            except ClientClosed:
                return None
            except _RETRYABLE as error:
                await self.release()
                self._is_disconnected = isinstance(error, TRANSIENT)
                if self._is_disconnected and self._is_idle_time_over():
                    raise
                await self._wait(FAILED, error)
            except BaseException:
                await self.release()
                raise
            if found and self._current is not None:
                self._paused = None
                return self._current, found

    async def release(self) -> None:
        """Roll back the current batch, which releases its messages."""
        current, self._current = self._current, None
        if current is None:
            return
        try:
            await current.roll_back()
        except _RETRYABLE as error:
            self._interrupted.append(current)
            logger.warning("the messages of a batch of %s could not be released immediately: %s", self._topic, error)

    async def finish(self, done: MessageId | None, *, whole: bool) -> None:
        """Commit the current batch up to a message, and release its other messages.

        Args:
            done: the last message that the program has processed; a message of another batch releases the whole batch.
            whole: do nothing unless ``done`` is the last message of the batch.
        """
        claims, batch_ids = self._claims, self._batch_ids
        if self._current is None or (whole and batch_ids[-1:] != [done]):
            return
        if claims is None or done not in batch_ids:
            await self.release()
            return
        claims.delivered_id = done
        await self._finish(starts_next=False)

    async def _finish(self, *, starts_next: bool) -> None:
        """Commit or roll back the transaction of the current batch.

        Args:
            starts_next: whether to start the next transaction with the call that commits.
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
                self._interrupted.append(current)
                raise

    async def _claim(self) -> list[Message]:
        """Claim the next batch; without messages, wait and return an empty list."""
        # Release the claims of interrupted transactions first: in the order `partition`, they block all later claims.
        await self._release_interrupted()
        options = self._options
        current = self._current or await ClientTransaction.begin(self.core, options.timeout_seconds)
        self._current, self._claims, self._batch_ids = current, None, []
        max_deliveries = options.max_deliveries
        found = await current.next_batch(
            self._topics, self._group, options.batch, options.order, max_deliveries, _MAX_POLLS
        )
        if found is None:
            # Never wait with an open transaction: it would time out, and every new snapshot would list it.
            await self.release()
            positions = {topic: position for topic, position in self._topics.positions.items() if position is not None}
            if not positions or len(positions) < len(self._topics.positions) or not self._topics.is_complete:
                await self._wait(IDLE, None)
            else:
                await self._wait_for_message(positions)
            return []
        topic, claims, batch = found
        whole = self._topics.whole(topic)
        if max_deliveries is not None:
            # Check the name here, because the topics of a pattern are not known earlier.
            dead_letters_of(whole)
        claims.delivered_id = batch.messages[-1].id
        self._claims, self._batch_ids = claims, [message.id for message in batch.messages]
        # The server halves failed batches, so a message that fails is finally alone in its batch.
        if max_deliveries is not None and batch.deliveries > max_deliveries and len(batch.messages) == 1:
            await self._send_to_dead_letters(current, whole, batch.messages[0])
            return []
        return batch.messages

    async def _release_interrupted(self) -> None:
        """Release the claims of transactions that were decided without a response of the server.

        Before the timeout of a transaction, this does not count a delivery; after it, this has no effect.
        """
        while self._interrupted:
            try:
                await self._interrupted[-1].release_uncounted()
            except _RETRYABLE as error:
                logger.info("the claims of a transaction in %s will be released later: %s", self._topic, error)
                return
            except TmsError as error:
                logger.warning("the claims of a transaction in %s could not be released: %s", self._topic, error)
            self._interrupted.pop()

    async def _send_to_dead_letters(self, current: ClientTransaction, topic: TopicId, message: Message) -> None:
        """Publish a message that could not be processed to the dead letter topic, in the same transaction."""
        dead = dead_letters_of(topic)
        with suppress(TopicExists):
            await self.core.ask(calls.create_topic(dead, None, None))
        logger.warning("message %s of %s moves to %s after too many deliveries", message.id, topic, dead)
        await current.publish(dead, [message.payload])

    async def _wait_for_message(self, positions: Mapping[TopicId, MessageId]) -> None:
        """Wait at the server, without a transaction, until one of the topics may have a message.

        One request can wait for one topic. Therefore the requests wait for each topic in turn, and poll the others. The
        wait stops when failed messages are delivered again.
        """
        retry_seconds = self._topics.retry_seconds
        deadline = None if retry_seconds is None else self.core.monotonic() + retry_seconds
        wait_seconds = WAIT_SECONDS if len(positions) == 1 else _WAIT_EACH_SECONDS
        if self._options.idle_seconds is not None:
            wait_seconds = min(wait_seconds, int(self._options.idle_seconds))
        for topic in cycle(positions):
            waited = False
            for one, seconds in {topic: wait_seconds, **dict.fromkeys(positions.keys() - {topic}, 0)}.items():
                pause_seconds = seconds if deadline is None else min(seconds, deadline - self.core.monotonic())
                if self.stop.is_set() or self._is_idle_time_over() or pause_seconds < 0:
                    return
                call = calls.poll(one, positions[one], 1, None, inclusive=True, wait_seconds=int(pause_seconds))
                reading = await self.core.open_once(call)
                try:
                    # A sealed topic gets no more messages, so the worker must read its successors.
                    if reading.text(calls.SEALED) is not None or await reading.more():
                        return
                finally:
                    await reading.close()
                waited |= reading.waited
            if not waited:
                await self._wait(IDLE, None)

    def _is_idle_time_over(self) -> bool:
        limit = self._options.idle_seconds
        return limit is not None and self.core.monotonic() - self._idle_since >= limit

    async def _wait(self, pauses: Retry, error: TmsError | None) -> None:
        """Pause; consecutive pauses for the same reason increase."""
        self._pauses = self._pauses + 1 if self._paused is pauses else 1
        self._paused = pauses
        seconds = pauses.pause_seconds(self._pauses, self.core.random)
        if error is not None:
            logger.warning("group %s retries %s in %.1f s: %s", self._group, self._topic, seconds, error)
        await self.stop.wait(seconds)


def dead_letters_of(topic: TopicId) -> TopicId:
    """Return the dead letter topic of a topic.

    Raises:
        BadRequest: the name would be too long.
    """
    dead = TopicId(topic.namespace, topic.topic + _DEAD)
    if len(dead.topic) > NAME_BYTES:
        raise BadRequest(
            f"The name of the dead letter topic of {topic} would have {len(dead.topic)} bytes.",
            f"Omit max_deliveries, or use a topic with a name of at most {NAME_BYTES - len(_DEAD)} bytes.",
        )
    return dead


class UnorderedReading:
    """A reader of committed messages as a member of a consumer group; undecided messages block no other message.

    A batch counts as processed when the program requests the next batch (at-least-once delivery).
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
        """Stop reading, and release unprocessed messages; a second call does nothing."""
        self.stop.set()
        await self._worker.finish(done, whole=False)


class GroupWork:
    """The batches of a consumer group, each with its transaction; see :meth:`tms_core.client.Client.work`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __iter__(self) -> Iterator[tuple[TransactionContext, list[Message]]]:
        try:
            while (found := run(self._worker.next())) is not None:
                yield attach(TransactionContext(self._worker.core), found[0]), found[1]
        finally:
            run(self._worker.release())

    def stop(self) -> None:
        """Stop the iteration after the current batch is committed; thread-safe."""
        self._worker.stop.set()


class AsyncGroupWork:
    """The batches of a consumer group for one task: ``async for tx, batch in client.work(…)``."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __aiter__(self) -> AsyncIterator[tuple[AsyncTransactionContext, list[Message]]]:
        try:
            while (found := await self._worker.next()) is not None:
                yield attach(AsyncTransactionContext(self._worker.core), found[0]), found[1]
        finally:
            await self._worker.release()

    def stop(self) -> None:
        """Stop the iteration after the current batch is committed; call it in the loop."""
        self._worker.stop.set()


def reading(core: Core, plan: ReadPlan, read: str) -> MessageBatches:
    """Return a reader that reads a topic until it is stopped.

    Args:
        read: ``uncommitted``, ``committed`` or ``unordered``; see :meth:`tms_core.client.Client.consume`.

    Raises:
        BadRequest: ``read`` is unknown, or does not allow another argument.
    """
    if read not in READS:
        raise BadRequest(f"The argument read cannot be {read!r}.", f"Use {', '.join(READS[:-1])} or {READS[-1]}.")
    if read != UNORDERED:
        return Consuming(core, plan, committed=read == COMMITTED)
    if plan.consumer is None or plan.start is not None:
        raise BadRequest(
            "Unordered reading needs a consumer, and cannot have a start.", "Set consumer, and omit start."
        )
    return UnorderedReading(Worker(core, plan.topic, plan.consumer, WorkOptions(UNORDERED_BATCH, "none")))
