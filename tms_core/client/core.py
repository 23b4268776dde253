"""What both clients do, once: requests, repetition, and reading answers.

Everything is a coroutine over a :class:`~tms_core.client.wire.Wire` (which see). A request is sent again when the
server says that nothing was done, or was not reached; and, if it may be done twice, also when nobody knows. So nothing
is published twice by a client that was not told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from tms_core.client.calls import Call
from tms_core.client.messages import Message, MessageDecoder
from tms_core.client.values import Retry
from tms_core.client.wire import Pieces, Wire
from tms_core.errors import TmsError, Unanswered, Unavailable
from tms_core.transaction.line import OutcomeUnknown, ServiceUnavailable

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Nothing was done, so that doing it again does no harm.
NOT_DONE = (Unavailable, ServiceUnavailable)
#: Nobody knows whether it was done.
UNKNOWN = (Unanswered, OutcomeUnknown)


class Core:
    """The client.

    Args:
        wire: the way to the server.
        retry: how requests are tried again.
        random: what makes pauses differ.
    """

    def __init__(self, wire: Wire, retry: Retry, random: Random) -> None:
        self.wire = wire
        self.random = random
        self._retry = retry
        self._stop = wire.stop()

    async def ask(self, call: Call[T]) -> T:
        """Send a request, and again where that does no harm.

        Raises:
            MessagingError: what the last attempt came to.
        """
        return await self.repeat(lambda: self.wire.ask(call), again=call.again)

    async def open(self, call: Call[Any]) -> Reading:
        """Send a poll, and again where that does no harm."""
        return Reading(await self.repeat(lambda: self.wire.open(call), again=call.again))

    async def repeat(self, attempt: Callable[[], Coroutine[Any, Any, T]], *, again: bool) -> T:
        """Try something as often as :class:`Retry` says.

        Args:
            attempt: what is tried.
            again: whether it is tried again also when nobody knows whether it was done.
        """
        known = (*NOT_DONE, *UNKNOWN) if again else NOT_DONE
        for failures in range(1, self._retry.attempts):
            try:
                return await attempt()
            except known as error:
                await self._wait(failures, error)
        return await attempt()

    async def _wait(self, failures: int, error: TmsError) -> None:
        seconds = self._retry.pause_seconds(failures, self.random)
        logger.info("trying again in %.1f s: %s", seconds, error)
        await self._stop.wait(seconds)


class Reading:
    """An answer to a poll while it comes.

    Args:
        pieces: its bytes.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = MessageDecoder()

    async def more(self) -> list[Message]:
        """The next messages; none at the end.

        Raises:
            Unanswered: the answer was cut short, or makes no sense.
        """
        while piece := await self._pieces.more():
            if found := self._decoder.feed(piece):
                return found
        self._decoder.end()
        return []

    async def close(self) -> None:
        """No more messages are wanted; closing twice is no error."""
        await self._pieces.close()
