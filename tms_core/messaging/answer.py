"""The result of a request, which a thread can wait for, or an event loop receive through a callback.

``concurrent.futures.Future`` is the same with a condition and states that are not needed here. To make one, settle it
and read it costs as much as writing a small message into LevelDB's memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock
from typing import Generic, TypeVar, cast

R = TypeVar("R")


class Answer(Generic[R]):
    """A result or an error that comes once; threads may share it."""

    __slots__ = ("_calls", "_done", "_error", "_lock", "_result")

    def __init__(self) -> None:
        self._lock = Lock()
        self._done = False
        self._result: R | None = None
        self._error: BaseException | None = None
        self._calls: tuple[Callable[[], object], ...] = ()

    def done(self) -> bool:
        """Whether it is there."""
        return self._done

    def set_result(self, result: R) -> None:
        """Settle it with a result."""
        self._result = result
        self._settle()

    def set_exception(self, error: BaseException) -> None:
        """Settle it with an error."""
        self._error = error
        self._settle()

    def when_done(self, call: Callable[[], object]) -> None:
        """Have something called by the thread that settles it; at once if it is settled."""
        with self._lock:
            if not self._done:
                self._calls += (call,)
                return
        call()

    def result(self, timeout_seconds: float | None = None) -> R:
        """The result, as soon as it is there.

        Raises:
            TimeoutError: it is not, after that time.
            BaseException: whatever went wrong instead.
        """
        if not self._done:
            settled = Event()
            self.when_done(settled.set)
            if not settled.wait(timeout_seconds):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return cast(R, self._result)

    def _settle(self) -> None:
        with self._lock:
            self._done = True
        for call in self._calls:
            call()
