"""Messages, one after the other: of a poll, and forever. Each comes for ``for`` and for ``async for``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from tms_core.client.consume.consuming import MessageBatches
from tms_core.client.protocol.calls import Ask
from tms_core.client.protocol.core import Core, Reading
from tms_core.client.protocol.messages import Message
from tms_core.client.protocol.wire import run
from tms_core.rowkey import MessageId


class _Poll:
    """A poll whose request is sent with the first message; takes what :class:`Messages` takes."""

    def __init__(self, core: Core, ask: Ask, limit: int | None) -> None:
        self._core = core
        self._ask = ask
        self._left = limit
        self._last: MessageId | None = None
        self._asked: MessageId | None = None
        self._reading: Reading | None = None
        self.ended = False

    async def more(self) -> list[Message]:
        """Return the next messages; none after the last one. Another poll requests the messages that the server
        omitted.
        """
        while not self.ended:
            if self._reading is None:
                self._reading = await self._core.open(self._ask(self._last, self._left))
            if found := await self._reading.more():
                self._last = found[-1].id
                if self._left is not None:
                    self._left -= len(found)
                return found
            self.ended = not self._reading.limited or self._last is self._asked or self._left == 0
            self._reading, self._asked = None, self._last
        return []

    async def close(self) -> None:
        """Read no more."""
        self.ended = True
        if self._reading is not None:
            await self._reading.close()


class Messages:
    """The messages of a poll, while they come; for one thread.

    Args:
        core: the requesting principal.
        ask: makes the request, for the last message that came (None: none yet) and how many are still wanted.
        limit: the most messages to read; None: all there are now.
    """

    def __init__(self, core: Core, ask: Ask, limit: int | None) -> None:
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
        """Read no more; closing twice is no error."""
        self._batch = iter(())
        run(self._poll.close())


class AsyncMessages:
    """The messages of a poll, while they come; for one task. Takes what :class:`Messages` takes."""

    def __init__(self, core: Core, ask: Ask, limit: int | None) -> None:
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
        """Read no more; closing twice is no error."""
        self._batch = iter(())
        await self._poll.close()


class _Consumption:
    """The delivered messages and the processed ones: all before the last delivered one."""

    def __init__(self, consuming: MessageBatches) -> None:
        self._consuming = consuming
        self._batch: Iterator[Message] = iter(())
        self._given: MessageId | None = None
        self._done: MessageId | None = None

    def stop(self) -> None:
        """Stop the iteration, and a pause with it; may be called by any thread, or in the loop."""
        self._consuming.stop.set()

    def _give(self) -> Message | None:
        """Return the next message at hand. The request means that the previous one is processed."""
        self._done = self._given
        if self._consuming.stop.is_set():
            return None
        for message in self._batch:
            self._given = message.id
            return message
        return None


class Consumption(_Consumption):
    """The messages of a topic forever; for one thread, but any may stop it.

    Args:
        consuming: the reader them.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        message = self._give()
        if message is None:
            self._batch = iter(run(self._consuming.more(self._done)))
            message = self._give()
        if message is None:
            raise StopIteration
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self) -> None:
        """Mark all delivered messages as processed, and store the position."""
        self._done = self._given
        run(self._consuming.store(self._done))

    def close(self) -> None:
        """Stop it and store the position: the last delivered message does not count as processed. Closing twice is no
        error.
        """
        run(self._consuming.close(self._done))


class AsyncConsumption(_Consumption):
    """The messages of a topic forever; for one task. Takes what :class:`Consumption` takes."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = self._give()
        if message is None:
            self._batch = iter(await self._consuming.more(self._done))
            message = self._give()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def commit(self) -> None:
        """As :meth:`Consumption.commit`."""
        self._done = self._given
        await self._consuming.store(self._done)

    async def close(self) -> None:
        """As :meth:`Consumption.close`."""
        await self._consuming.close(self._done)
