"""Iterators over the messages of a poll and of a consumer, for ``for`` and ``async for``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from tms_core.client.consume.consuming import MessageBatches
from tms_core.client.protocol.calls import PollRequest
from tms_core.client.protocol.core import Core, Reading
from tms_core.client.protocol.messages import Message
from tms_core.client.protocol.wire import run
from tms_core.rowkey import MessageId


class _Poll:
    """A poll that sends its request with the first message; arguments as of :class:`Messages`."""

    def __init__(self, core: Core, ask: PollRequest, limit: int | None) -> None:
        self._core = core
        self._ask = ask
        self._left = limit
        self._last: MessageId | None = None
        self._limit_id: MessageId | None = None
        self._reading: Reading | None = None
        self.ended = False

    async def more(self) -> list[Message]:
        """Return the next messages; an empty list after the last message.

        If the server has limited its response, this sends further polls for the remaining messages.
        """
        while not self.ended:
            if self._reading is None:
                self._reading = await self._core.open(self._ask(self._last, self._left))
            if found := await self._reading.more():
                self._last = found[-1].id
                if self._left is not None:
                    self._left -= len(found)
                return found
            self.ended = not self._reading.limited or self._last is self._limit_id or self._left == 0
            self._reading, self._limit_id = None, self._last
        return []

    async def close(self) -> None:
        """Stop reading."""
        self.ended = True
        if self._reading is not None:
            await self._reading.close()


class Messages:
    """An iterator over the messages of a poll while the response arrives; for one thread.

    Args:
        ask: creates a request from the last received message (None: no message yet) and the remaining limit.
        limit: the maximum number of messages; None: all current messages.
    """

    def __init__(self, core: Core, ask: PollRequest, limit: int | None) -> None:
        self._poll = _Poll(core, ask, limit)
        self._batch: Iterator[Message] = iter(())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        for message in self._batch:
            return message
        self._batch = iter(run(self._poll.more()))
        return next(self._batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, and return the connection; a second call does nothing."""
        self._batch = iter(())
        run(self._poll.close())


class AsyncMessages:
    """An asynchronous iterator over the messages of a poll, for one task; see :class:`Messages`."""

    def __init__(self, core: Core, ask: PollRequest, limit: int | None) -> None:
        self._poll = _Poll(core, ask, limit)
        self._batch: Iterator[Message] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        for message in self._batch:
            return message
        self._batch = iter(await self._poll.more())
        for message in self._batch:
            return message
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop reading, and return the connection; a second call does nothing."""
        self._batch = iter(())
        await self._poll.close()


class _Consumption:
    """The common part of both consumptions; all messages before the last returned message count as processed."""

    def __init__(self, consuming: MessageBatches) -> None:
        self._consuming = consuming
        self._batch: Iterator[Message] = iter(())
        self._current_id: MessageId | None = None
        self._done: MessageId | None = None

    def stop(self) -> None:
        """Stop the iteration and its pause; thread-safe, or for an asynchronous iteration call it in the loop."""
        self._consuming.stop.set()

    def _next_in_batch(self) -> Message | None:
        """Mark the previous message as processed, and return the next message of the batch; None: no message left."""
        self._done = self._current_id
        if self._consuming.stop.is_set():
            return None
        for message in self._batch:
            self._current_id = message.id
            return message
        return None


class Consumption(_Consumption):
    """An iterator over the messages of a topic, for one thread; any thread may stop it."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        message = self._next_in_batch()
        if message is None:
            self._batch = iter(run(self._consuming.more(self._done)))
            message = self._next_in_batch()
        if message is None:
            raise StopIteration
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self) -> None:
        """Mark all returned messages as processed, and store the position."""
        self._done = self._current_id
        run(self._consuming.store(self._done))

    def close(self) -> None:
        """Stop, and store the position; the last returned message does not count as processed. Idempotent."""
        run(self._consuming.close(self._done))


class AsyncConsumption(_Consumption):
    """An asynchronous iterator over the messages of a topic, for one task; see :class:`Consumption`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = self._next_in_batch()
        if message is None:
            self._batch = iter(await self._consuming.more(self._done))
            message = self._next_in_batch()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def commit(self) -> None:
        """Mark all returned messages as processed, and store the position."""
        self._done = self._current_id
        await self._consuming.store(self._done)

    async def close(self) -> None:
        """Stop, and store the position, as :meth:`Consumption.close`."""
        await self._consuming.close(self._done)
