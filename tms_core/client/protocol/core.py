"""The core that both clients share: requests, repetition, and reading responses.

Everything is a coroutine over a ``Wire`` (:mod:`tms_core.client.protocol.wire`). The client repeats a request if the
server was not reached, or responds that it did nothing. It repeats an idempotent request also after an unknown outcome.
Therefore a client never publishes twice unless the program repeats the publish.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakValueDictionary

from tms_core.client.protocol.calls import LIMITED, POSITION, WAITED, Call
from tms_core.client.protocol.endpoint import Options
from tms_core.client.protocol.messages import Message, MessageDecoder
from tms_core.client.protocol.values import Measured
from tms_core.client.protocol.wire import Pieces, Wire
from tms_core.errors import (
    ConfigurationError,
    FormatError,
    PartitionsChanged,
    TmsError,
    Unanswered,
    Unavailable,
)
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.topics.partitions import Layout
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown, ServiceUnavailable

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The shortest time limit of an attempt, in seconds.
_SHORTEST_SECONDS = 0.001
#: Errors after which nothing was done, so that a repetition does no harm.
NOT_DONE = (Unavailable, ServiceUnavailable)
#: Errors with an unknown outcome.
UNKNOWN = (Unanswered, OutcomeUnknown)
#: Errors that the program did not cause: a server or a connection failed, or a topic was changed.
INTERRUPTED = (*NOT_DONE, *UNKNOWN, PartitionsChanged)


class Write(Protocol):
    """A function that sends requests that write messages."""

    async def __call__(self, call: Call[T]) -> T: ...


class WritingTransaction(Protocol):
    """A transaction of this client that records the writes with its pointer."""

    async def publish_now(self, core: Core, topic: TopicId, call: Call[RollbackRange]) -> RollbackRange:
        """Send a publish, and include it in a rollback of the transaction."""
        ...

    async def store_now(self, core: Core, call: Call[None]) -> None:
        """Send a store with one of the transaction's pointers."""
        ...


class Core:
    """The core of a client, and the state that its transactions and consumers share.

    Args:
        service: the transaction service.
    """

    def __init__(self, wire: Wire, service: TransactionClient, options: Options) -> None:
        self.wire = wire
        self.service = service
        self.limits = options.limits
        self.random = options.random
        self.monotonic = options.monotonic
        self._measure = options.measure
        self._retry = options.retry
        self._stop = wire.stop()
        self._limit_seconds: float | None = None
        self._write: Write | None = None
        #: The producer's topic; None: the client writes without a producer.
        self.home: TopicId | None = None
        #: The layouts read so far, and the number of the next publish without a key.
        self.layouts: dict[TopicId, Layout | None] = {}
        self.turns = count()
        #: The rotations of consumers, by topic and group; their class is above this module.
        self.rotations: dict[tuple[str, str], Any] = {}
        #: The transactions that this client has started, by process and id.
        self.transactions: WeakValueDictionary[tuple[int, int], WritingTransaction] = WeakValueDictionary()

    def within(self, seconds: float) -> Core:
        """Return a copy whose calls take at most so many seconds, including all attempts and pauses.

        Raises:
            ConfigurationError: ``seconds`` is not above 0.
        """
        if not seconds > 0:
            raise ConfigurationError(f"A limit of {seconds} s is not possible.", "Use a number above 0.")
        found = copy(self)
        found._limit_seconds = seconds
        return found

    def writing(self, write: Write, home: TopicId) -> Core:
        """Return a copy that sends requests that write messages with ``write``, for a producer of topic ``home``."""
        found = copy(self)
        found._write, found.home = write, home
        return found

    async def ask(self, call: Call[T]) -> T:
        """Send a request, and repeat it if that does no harm.

        Raises:
            MessagingError: the error of the last attempt.
        """
        if call.writes and self._write is not None:
            return await self._write(call)
        return await self.repeat(lambda left: self.send(call, left), again=call.again)

    async def send(self, call: Call[T], seconds: float | None = None) -> T:
        """Send a request once.

        Args:
            seconds: the time limit; None: that of ``Timeouts``.

        Raises:
            MessagingError: the server did not respond, or responded with an error.
        """
        if self._measure is None or not call.messages:
            return await self.wire.ask(call, seconds)
        with self._measuring("publish", call) as measured:
            found = await self.wire.ask(call, seconds)
            measured(call.messages, call.payload_bytes)
        return found

    async def open(self, call: Call[Any]) -> Reading:
        """Send a poll, and repeat it if that does no harm."""
        return await self.repeat(lambda left: self.open_once(call, left), again=call.again)

    async def open_once(self, call: Call[Any], seconds: float | None = None) -> Reading:
        """Send a poll once; arguments and errors as of :meth:`send`."""
        if self._measure is None:
            return Reading(await self.wire.open(call, seconds))
        with self._measuring("poll", call) as measured:
            return Reading(await self.wire.open(call, seconds), measured)

    @contextmanager
    def _measuring(
        self, operation: Literal["publish", "poll"], call: Call[Any]
    ) -> Iterator[Callable[[int, int], None]]:
        """Report a request that fails in the block to the hook; call the yielded function after a success."""
        began = self.monotonic()
        done: list[float] = []

        def report(messages: int, size: int, error: str = "") -> None:
            seconds = (done[0] if done else self.monotonic()) - began
            measure = self._measure
            if measure is not None:
                try:
                    measure(Measured(operation, call.topic, messages, size, seconds, error))
                except Exception:  # a program's metrics must not fail what they count
                    logger.exception("the hook measure failed")

        try:
            yield report
        except TmsError as error:
            report(0, 0, type(error).__name__)
            raise
        finally:
            done.append(self.monotonic())

    async def repeat(self, attempt: Callable[[float | None], Coroutine[Any, Any, T]], *, again: bool) -> T:
        """Repeat an attempt as often as :class:`Retry` allows, within the time limit.

        Args:
            attempt: the attempt; it gets its time limit in seconds, or None.
            again: whether to repeat it also after an unknown outcome.
        """
        known = (*NOT_DONE, *UNKNOWN) if again else NOT_DONE
        ends = None if self._limit_seconds is None else self.monotonic() + self._limit_seconds
        unknown: TmsError | None = None
        for failures in count(1):
            try:
                return await attempt(None if ends is None else max(_SHORTEST_SECONDS, ends - self.monotonic()))
            except known as error:
                seconds = self._retry.pause_seconds(failures, self.random, retry_seconds_of(error))
                unknown = error if isinstance(error, UNKNOWN) else unknown
                if not self._retry.again(failures) or (ends is not None and self.monotonic() + seconds >= ends):
                    if unknown is not None and unknown is not error:
                        # This attempt did nothing, but an earlier attempt may have. The caller must not repeat it.
                        raise unknown from error
                    raise
                logger.info("trying again in %.1f s: %s", seconds, error)
                await self._stop.wait(seconds)
        raise AssertionError("every retry failed")


def retry_seconds_of(error: TmsError) -> float | None:
    """Return the pause in seconds that a server requested with its error; None: it requested no pause."""
    return error.retry_after_seconds if isinstance(error, Unavailable) else None


class Reading:
    """A response to a poll while it arrives.

    Attributes:
        waited: whether it is empty after the full wait.
        limited: whether the server may have returned less than requested.
    """

    def __init__(self, pieces: Pieces, measured: Callable[[int, int], None] | None = None) -> None:
        self._measured = measured
        self._messages = self._size = 0
        self.waited = WAITED in pieces.headers
        self.limited = LIMITED in pieces.headers
        self._pieces = pieces
        self._decoder = MessageDecoder()

    @property
    def position(self) -> MessageId | None:
        """Return the first id of the next poll; None: the next poll starts after the last received message.

        Raises:
            Unanswered: the header is invalid.
        """
        value = self._pieces.headers.get(POSITION)
        try:
            return None if value is None else MessageId.from_hex(value)
        except FormatError as error:
            raise Unanswered(f"The response has a position that cannot be read: {error}.") from error

    def text(self, name: str) -> str | None:
        """Return the value of a header; None: the header is missing."""
        return self._pieces.headers.get(name)

    def number(self, name: str) -> int | None:
        """Return the number in a header; None: the header is missing.

        Raises:
            Unanswered: the header is not a number.
        """
        value = self._pieces.headers.get(name)
        if value is not None and not value.isdecimal():
            raise Unanswered(f"The response has {name}: {value}, which is not a number.")
        return None if value is None else int(value)

    async def more(self) -> list[Message]:
        """Return the next messages; an empty list after the last one.

        Raises:
            Unanswered: the response was cut short, or is invalid.
        """
        while piece := await self._pieces.more():
            if found := self._decoder.feed(piece):
                if self._measured is not None:
                    self._messages += len(found)
                    self._size += sum(len(message.payload) for message in found)
                return found
        self._decoder.end()
        self._report_once()
        return []

    async def close(self) -> None:
        """Stop reading, and return the connection; a second call does nothing."""
        self._report_once()
        await self._pieces.close()

    def _report_once(self) -> None:
        """Report the number of received messages to the hook, once."""
        measured, self._measured = self._measured, None
        if measured is not None:
            measured(self._messages, self._size)
