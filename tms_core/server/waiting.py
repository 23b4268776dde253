"""Polls that wait for messages: how many there are, and what ends them when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Waiting:
    """The polls of a server that wait.

    Attributes:
        closed: whether none may wait any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._wakes: dict[Callable[[], None], None] = {}

    @property
    def polls(self) -> int:
        """How many wait."""
        return len(self._wakes)

    @contextmanager
    def waiting(self, wake: Callable[[], None]) -> Iterator[None]:
        """A poll waits while the block runs.

        Args:
            wake: ends it; may be called by any thread.
        """
        self._wakes[wake] = None
        try:
            yield
        finally:
            del self._wakes[wake]

    def close(self) -> None:
        """Have all end, and none begin; may be called by any thread."""
        self.closed = True
        for wake in list(self._wakes):
            wake()


def waking(came: asyncio.Future[None]) -> Callable[[], None]:
    """What ends waiting for a future of the running loop; may be called by any thread, and more than once."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not came.done():
            came.set_result(None)

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(end)

    return wake
