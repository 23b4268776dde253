"""The threads that write what was accepted, each a batch at a time, and a count of what is still to be done.

The threads are started once and take batches from one queue. A pool of ``concurrent.futures`` would do the same, but
makes a future for each batch and takes four locks, which is a fifth of what publishing one message costs here. So it is
with its futures: to make an :class:`Answer`, settle it and read it costs as much as writing a small message into
LevelDB's memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import Generic, TypeVar, cast

from tms_core.errors import Unavailable

#: How many batches are written at once, so as many topics.
THREADS = 4

#: Takes what is queued for a topic, writes it and answers it. Never raises.
Batch = Callable[[], None]
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


class Once(Generic[R]):
    """Makes something the first time it is asked for, by whichever thread asks; the others wait for that.

    Args:
        make: makes it; what it raises is raised to each that asks.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._made: list[R] = []
        self._lock = Lock()

    def __call__(self) -> R:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def begin(self) -> None:
        """Have it made, for those who ask later."""
        with suppress(Exception):
            self()


class Work:
    """Requests that were accepted and are not answered yet, and the threads that see to them.

    Args:
        threads: how many batches are written at once.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._requests = 0
        self._bytes = 0
        self._closed = False
        self._lock = Lock()
        self._answered = Condition(self._lock)
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        # A process that ends without close() need not wait for them: no caller was told that anything is written.
        self._threads = [Thread(target=self._serve, name=f"publish_{number}", daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def requests(self) -> int:
        """How many were accepted and are not answered yet."""
        return self._requests

    @property
    def bytes(self) -> int:
        """Their payloads together."""
        return self._bytes

    def accept(self, size: int) -> None:
        """One more request, of so many bytes.

        Raises:
            Unavailable: it is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("This server is stopping.", "Try again when it is back.")
            self._requests += 1
            self._bytes += size

    def done(self, requests: int, size: int) -> None:
        """So many are answered, of so many bytes together."""
        with self._lock:
            self._requests -= requests
            self._bytes -= size
            if self._closed:
                self._answered.notify_all()

    def run(self, batch: Batch) -> None:
        """Have a batch written; returns at once."""
        self._batches.put(batch)

    def aside(self, task: Batch) -> None:
        """Have something done by a thread that has nothing else to do, if there is one."""
        self._batches.put(task)

    def close(self) -> None:
        """Accept no more, and return when all is answered and the threads have ended; closing twice is no error."""
        with self._lock:
            self._closed = True
            self._answered.wait_for(lambda: not self._requests)
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._batches.get()) is not None:
            task()
