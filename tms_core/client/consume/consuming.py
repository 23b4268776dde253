"""Continuous reading of a topic: the next request, the pauses, and the position after an error.

A poll returns the messages that existed at its start. The next poll starts after the last message, or at the position
of the response. Without messages, the server waits for a message. While messages are undecided, or the server does not
respond, the pauses between polls increase.

When the program requests more messages, it has processed the earlier messages, and the client stores the position.
After a crash, a program receives some messages again, and misses none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from tms_core.client.protocol import calls, consumer_calls
from tms_core.client.protocol.core import NOT_DONE, UNKNOWN, Core, Reading
from tms_core.client.protocol.messages import Message, Start
from tms_core.client.protocol.values import Retry
from tms_core.client.protocol.wire import Stop
from tms_core.client.transactions.transaction import view_of
from tms_core.errors import ClientClosed, ConsumerNotFound, TmsError, TopicNotFound
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)

#: The default time that the server waits before it sends an empty response, in seconds; a stop takes effect within it.
WAIT_SECONDS = 5
#: The pauses while messages are undecided, or if the server does not wait.
IDLE = Retry(first_seconds=0.02, factor=1.5, longest_seconds=1)
#: The pauses while the server does not respond.
FAILED = Retry(first_seconds=0.1, longest_seconds=10)
#: Transient errors.
TRANSIENT = (*NOT_DONE, *UNKNOWN)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The topic of a consumer, and its options.

    Attributes:
        start, inclusive: the start, as of a poll.
        consumer: the name of the consumer whose position is stored, and overrides ``start``; None: no position is
            stored.
        idle, failed: the pauses.
        wait_seconds: the maximum time that the server waits for a message; None: :data:`WAIT_SECONDS`.
    """

    topic: TopicId
    start: Start
    inclusive: bool
    consumer: str | None
    idle: Retry
    failed: Retry
    wait_seconds: int | None = None


class MessageBatches(Protocol):
    """A source of a topic's messages in batches."""

    stop: Stop

    async def more(self, done: MessageId | None) -> list[Message]:
        """Wait for messages and return them; an empty list after a stop."""
        ...

    async def store(self, done: MessageId | None) -> None:
        """Store the last message that the program has processed."""
        ...

    async def close(self, done: MessageId | None) -> None:
        """Stop, and store the last processed message; a second call does nothing."""
        ...


class Consuming:
    """A consumer of one topic.

    Args:
        committed: whether to read only committed messages; otherwise also messages that are or may be rolled back.

    Raises:
        ClientClosed: the client is closed.
    """

    def __init__(self, core: Core, plan: ReadPlan, *, committed: bool) -> None:
        self._core = core
        self._plan = plan
        self._topic = plan.topic
        self._start = plan.start
        self._inclusive = plan.inclusive
        self._consumer = plan.consumer
        self._committed = committed
        self._waited = False
        self._reading: Reading | None = None
        self._has_started = False
        self._pauses = 0
        self._paused: Retry | None = None
        self._stored: MessageId | None = None
        self.stop = core.wire.stop()
        if self.stop.is_set():
            raise ClientClosed("The client is closed.", "Create another client.")

    async def more(self, done: MessageId | None) -> list[Message]:
        """Wait for messages and return them; an empty list after a stop, or after the client was closed.

        Raises:
            MessagingError: a permanent error: the topic does not exist, or the permission is missing.
        """
        await self.store(done)
        while not self.stop.is_set():
            try:
                found = await self._next()
            except TRANSIENT as error:
                await self._drop()
                await self._wait(self._plan.failed, error)
                continue
            except ClientClosed:
                break
            if found:
                self._paused = None
                self._start, self._inclusive = found[-1].id, False
                return found
            if self._waited:
                self._paused = None
            else:
                await self._wait(self._plan.idle, None)
        await self._drop()
        return []

    async def store(self, done: MessageId | None) -> None:
        """Store the position; after a transient error, the next call stores it."""
        if self._consumer is None or done is None or done == self._stored:
            return
        try:
            await self._core.ask(consumer_calls.set_position(self._topic, self._consumer, done))
        except ClientClosed:
            logger.warning(
                "the position of consumer %s in %s is not stored: the client is closed", self._consumer, self._topic
            )
        except TRANSIENT as error:
            logger.warning(
                "the position of consumer %s in %s is not stored yet: %s", self._consumer, self._topic, error
            )
        else:
            self._stored = done

    async def close(self, done: MessageId | None) -> None:
        """Stop, and store the position; a second call does nothing."""
        self.stop.set()
        await self._drop()
        await self.store(done)

    async def _next(self) -> list[Message]:
        """Return the next messages; an empty list if no message is available."""
        if not self._has_started and self._consumer is not None:
            await self._load(self._consumer)
        self._has_started = True
        polled = self._reading is None
        if self._reading is None:
            self._reading = await self._core.open_once(await self._poll())
        found = await self._reading.more()
        if found:
            return found
        ended, self._reading = self._reading, None
        self._waited = ended.waited
        if ended.position is not None:
            self._start, self._inclusive = ended.position, True
        # Messages may have arrived since the start of a response with messages, so poll again immediately.
        return [] if polled else await self._next()

    async def _load(self, consumer: str) -> None:
        try:
            self._stored = await self._core.wire.ask(consumer_calls.position(self._topic, consumer))
        except (ConsumerNotFound, TopicNotFound):
            # The next poll reports a missing topic.
            return
        self._start, self._inclusive = self._stored, False

    async def _poll(self) -> calls.Call[None]:
        view = await self._core.wire.call_blocking(view_of, self._core.service) if self._committed else None
        wait_seconds = WAIT_SECONDS if self._plan.wait_seconds is None else self._plan.wait_seconds
        return calls.poll(self._topic, self._start, None, view, inclusive=self._inclusive, wait_seconds=wait_seconds)

    async def _wait(self, pauses: Retry, error: TmsError | None) -> None:
        self._pauses = self._pauses + 1 if pauses is self._paused else 1
        self._paused = pauses
        seconds = pauses.pause_seconds(self._pauses, self._core.random)
        if error is not None:
            logger.warning("poll of %s failed, next attempt in %.1f s: %s", self._topic, seconds, error)
        await self.stop.wait(seconds)

    async def _drop(self) -> None:
        if self._reading is not None:
            reading, self._reading = self._reading, None
            await reading.close()
