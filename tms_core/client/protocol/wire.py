"""How requests leave and answers come, waiting or not.

What both clients do is written once, as coroutines over a :class:`Wire`. The one of the asynchronous client waits in
its event loop. The one of the plain client never hands control back: its coroutines finish in their first step, so
:func:`run` completes any of them without a loop. That costs a frame or two per call, and saves a second copy of every
decision.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tms_core.client.protocol.calls import Call

P = ParamSpec("P")
T = TypeVar("T")


class Pieces(Protocol):
    """An answer's body while it comes.

    Attributes:
        headers: the earlier part; names in any case.
    """

    headers: Mapping[str, str]

    async def more(self) -> bytes:
        """Return the next piece; empty after the last one.

        Raises:
            Unanswered: it was cut short.
        """
        ...

    async def close(self) -> None:
        """No more of it is wanted; closing twice is no error."""
        ...


class Stop(Protocol):
    """A stop signal that is set once, and pauses that it interrupts."""

    def set(self) -> None:
        """End it."""
        ...

    def is_set(self) -> bool:
        """Return whether it is stopped."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait until it is stopped, at most for so many seconds."""
        ...


class Wire(Protocol):
    """The way to the server."""

    async def ask(self, call: Call[T], seconds: float | None = None) -> T:
        """Send a request and read its whole answer, in so many seconds at most.

        Raises:
            MessagingError: as of :func:`tms_core.client.protocol.calls.check`, ``Unavailable`` where the server was not
                reached, ``Unanswered`` where it was and no answer came.
        """
        ...

    async def open(self, call: Call[Any], seconds: float | None = None) -> Pieces:
        """Send a request and read its answer piece by piece, of which the first has so many seconds; raises as
        :meth:`ask` does."""
        ...

    def stop(self) -> Stop:
        """Make a stop signal; it is set when the client is closed."""
        ...

    async def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that may block."""
        ...

    async def begin(self, begins: Callable[[], T], ends: Callable[[T], object]) -> T:
        """Call a blocking function, and undo its result if its caller was cancelled."""
        ...


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits; returns its result.

    Raises:
        TypeError: it does wait; it was told so where it stood.
    """
    step = partial(coroutine.send, None)
    while True:
        try:
            step()
        except StopIteration as done:
            result: T = done.value
            return result
        step = partial(coroutine.throw, TypeError("A Client waits for nothing awaitable: use an AsyncClient."))


def waits(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method of the plain client that does what one of the asynchronous client does."""

    @wraps(method)
    def plain(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    return plain
