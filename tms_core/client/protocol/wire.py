"""The interface between the client's logic and its I/O, with and without an event loop.

Both clients share their logic as coroutines over a :class:`Wire`. The wire of the asynchronous client waits in its
event loop. The wire of the plain client never suspends: its coroutines finish in their first step, so :func:`run`
completes them without a loop. That costs one or two frames per call, and avoids a second copy of the logic.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tms_core.client.protocol.calls import Call

P = ParamSpec("P")
T = TypeVar("T")


class Pieces(Protocol):
    """The body of a response while it arrives.

    Attributes:
        headers: the headers of the response; names in any case.
    """

    headers: Mapping[str, str]

    async def more(self) -> bytes:
        """Return the next piece; empty after the last one.

        Raises:
            Unanswered: the body was cut short.
        """
        ...

    async def close(self) -> None:
        """Stop reading; a second call does nothing."""
        ...


class Stop(Protocol):
    """A stop signal that is set once, with pauses that it interrupts."""

    def set(self) -> None:
        """Set the signal, and interrupt its pauses."""
        ...

    def is_set(self) -> bool:
        """Return whether the signal is set."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait until the signal is set, at most so many seconds."""
        ...


class Wire(Protocol):
    """A connection to the server, and the kind of waiting for it."""

    async def ask(self, call: Call[T], seconds: float | None = None) -> T:
        """Send a request and read its whole response, in at most so many seconds.

        Raises:
            Unavailable: the server was not reached.
            Unanswered: the server was reached, and did not respond.
            MessagingError: as of :func:`tms_core.client.protocol.calls.check`.
        """
        ...

    async def open(self, call: Call[Any], seconds: float | None = None) -> Pieces:
        """Send a request and return its body, to be read piece by piece; raises as :meth:`ask`.

        Args:
            seconds: the time limit for the first piece.
        """
        ...

    def stop(self) -> Stop:
        """Make a stop signal; it is set when the client is closed."""
        ...

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may block."""
        ...

    async def begin(self, begins: Callable[[], T], ends: Callable[[T], object]) -> T:
        """Call the blocking function ``begins``; if the caller is cancelled, undo its result with ``ends``."""
        ...


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result.

    Raises:
        TypeError: it suspends. The error is raised inside the coroutine, so its traceback shows the ``await``.
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
    """Return the method of the plain client for a method of the asynchronous client."""

    @wraps(method)
    def plain(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    return plain
