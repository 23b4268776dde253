"""The interface between the client's logic and its I/O, with and without an event loop.

Both clients share their logic as coroutines over a :class:`Wire`. The wire of the asynchronous client waits in its
event loop. The wire of the plain client never suspends: its coroutines finish in their first step, so :func:`run`
completes them without a loop. This costs one or two stack frames per call, and avoids a second copy of the logic.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tms_core.client.protocol.calls import Call

P = ParamSpec("P")
T = TypeVar("T")


class Pieces(Protocol):
    """A response body that is read piece by piece as it arrives.

    Attributes:
        headers: the headers of the response; lookups ignore the case of names.
    """

    headers: Mapping[str, str]

    async def more(self) -> bytes:
        """Return the next piece; empty after the last one.

        Raises:
            Unanswered: the body is truncated.
        """
        ...

    async def close(self) -> None:
        """Stop reading; a second call does nothing."""
        ...


class Stop(Protocol):
    """A stop signal that is never cleared and interrupts pauses."""

    def set(self) -> None:
        """Set the signal, and interrupt running pauses."""
        ...

    def is_set(self) -> bool:
        """Return whether the signal is set."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait until the signal is set or the time is over."""
        ...


class Wire(Protocol):
    """A transport to the server that blocks either the thread or only the task."""

    async def ask(self, call: Call[T], seconds: float | None = None) -> T:
        """Send a request and read the complete response within a time limit.

        Raises:
            Unavailable: the client could not reach the server.
            Unanswered: the client reached the server, but got no response.
            MessagingError: the response is an error (:func:`tms_core.client.protocol.calls.check`).
        """
        ...

    async def open(self, call: Call[Any], seconds: float | None = None) -> Pieces:
        """Send a request and return the body of the response; raise the errors of :meth:`ask`.

        Args:
            seconds: the time limit for the first piece.
        """
        ...

    def stop(self) -> Stop:
        """Create a stop signal that is also set when the client is closed."""
        ...

    async def call_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may block."""
        ...

    async def start_or_undo(self, start: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Call the blocking function ``start``; if the caller is cancelled, pass the result to ``undo``."""
        ...


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result.

    Raises:
        TypeError: the coroutine suspends. The error is raised inside it, so the traceback shows the ``await``.
    """
    step = partial(coroutine.send, None)
    while True:
        try:
            step()
        except StopIteration as done:
            result: T = done.value
            return result
        step = partial(coroutine.throw, TypeError("A Client cannot await: use an AsyncClient."))


def waits(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Derive a method of the plain client from a method of the asynchronous client."""

    @wraps(method)
    def plain(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    return plain
