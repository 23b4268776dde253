"""The threads that write batches, and the count of accepted requests.

The threads take batches from one queue. An executor of ``concurrent.futures`` would create a future for each batch and
acquire four locks, a fifth of the cost of publishing a message. :class:`PublishFuture` replaces its future for the same
reason.

For an event loop, a thread costs more than the rest of a small request, because each of the two threads wakes up while
the other thread holds the interpreter lock. Therefore :class:`EventLoopWorkers` works as follows:

* All requests of one iteration of the loop to one topic form one batch, which starts after the iteration.
* The loop itself writes a small batch that has all running requests of the server, if the disk is local and fast. Only
  the clients of that batch wait. After a write of more than :data:`QUICK_SECONDS`, threads write all batches until a
  write is quick again, so a slow disk blocks the loop once. (LevelDB delays writers by a millisecond before it stops
  them.)
* A thread writes any other batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from time import perf_counter
from typing import Generic, TypeVar

from tms_core.errors import Unavailable
from tms_core.logs.loggers import harmless

#: The number of threads, and the maximum number of topics that are written concurrently.
THREADS = 4

#: A function that writes queued requests of a topic and sets their outcomes. It never raises.
Batch = Callable[[], None]
R = TypeVar("R")
#: The maximum duration of a quick write in seconds: the time of about a dozen requests.
QUICK_SECONDS = 0.001
#: The maximum size of the requests that the loop itself writes, in bytes.
SMALL_BYTES = 64 << 10


class PublishFuture(Generic[R]):
    """A future: a result or an error that is set once; threads may share it."""

    __slots__ = ("_calls", "_done", "_lock", "_outcome")

    def __init__(self) -> None:
        self._lock = Lock()
        self._done = False
        self._outcome: R | BaseException | None = None
        self._calls: tuple[Callable[[], object], ...] = ()

    def done(self) -> bool:
        """Return whether the result or the error is set."""
        return self._done

    def set_outcome(self, outcome: R | BaseException) -> None:
        """Set the result or the error."""
        with self._lock:
            self._outcome, self._done = outcome, True
        for call in self._calls:
            # An error would leave the rest of the batch without an outcome.
            harmless(call)

    def when_done(self, call: Callable[[], object]) -> None:
        """Register a callback, which the thread that sets the outcome calls; call it immediately if the outcome is set.

        Errors of the callback are logged, and never raised.
        """
        with self._lock:
            if not self._done:
                self._calls += (call,)
                return
        harmless(call)

    def result(self, timeout_seconds: float | None = None) -> R:
        """Wait for the result and return it.

        Raises:
            TimeoutError: no result was set within ``timeout_seconds``.
            BaseException: the error that was set.
        """
        if not self._done:
            done = Event()
            self.when_done(done.set)
            if not done.wait(timeout_seconds):
                raise TimeoutError
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome  # type: ignore[return-value]  # the outcome is a result


class PublishWorkers:
    """The threads that write batches, and the count of requests without an outcome.

    Args:
        threads: the number of threads.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._requests = 0
        self._bytes = 0
        self._closed = False
        self._lock = Lock()
        self._finished = Condition(self._lock)
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        # Daemon threads: a process that exits without close() loses only requests without an outcome.
        self._threads = [Thread(target=self._serve, name=f"publish_{number}", daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def requests(self) -> int:
        """Return the number of accepted requests without an outcome."""
        return self._requests

    @property
    def bytes(self) -> int:
        """Return the weight of accepted requests without an outcome, in bytes."""
        return self._bytes

    def accept(self, size: int) -> None:
        """Count an accepted request.

        Args:
            size: the weight of the request in bytes.

        Raises:
            Unavailable: the service is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("This server is stopping.", "Try again after its restart.")
            self._requests += 1
            self._bytes += size

    def done(self, requests: int, size: int) -> None:
        """Subtract requests that have their outcome, and their weight in bytes."""
        with self._lock:
            self._requests -= requests
            self._bytes -= size
            if self._closed:
                self._finished.notify_all()

    def run(self, batch: Batch) -> None:
        """Queue a batch for a thread; return at once."""
        self._batches.put(batch)

    def close(self) -> None:
        """Reject further requests, and wait for all outcomes and threads; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._finished.wait_for(lambda: not self._requests)
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._batches.get()) is not None:
            task()


class EventLoopWorkers(PublishWorkers):
    """Publish workers for an event loop.

    Args:
        threads: the number of threads.

    Attributes:
        alone: a function that returns whether the server has no other requests than the given number; called in the
            loop. None: the loop never writes. The server sets it if the store is on this machine.
        quick: whether the last write was quick.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self.alone: Callable[[int], bool] | None = None
        self.quick = True
        #: The batches of the current iteration of the loop.
        self._turn_batches: list[Batch] = []
        #: Whether no other request was running when the first of these batches was queued.
        self._was_idle = False
        super().__init__(threads)

    def run(self, batch: Batch) -> None:
        """Schedule a batch: after this iteration of the loop, or in a thread if the caller runs no loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            super().run(partial(self._write, batch))
            return
        if not self._turn_batches:
            self._was_idle = self._requests == 1
            loop.call_soon(self._end_turn)
        self._turn_batches.append(batch)

    def _end_turn(self) -> None:
        batches, self._turn_batches = self._turn_batches, []
        if len(batches) == 1 and self._was_idle and self._loop_writes():
            self._write(batches[0])
            return
        for batch in batches:
            super().run(partial(self._write, batch))

    def _loop_writes(self) -> bool:
        """Return whether the loop may write itself: no other request would wait, and the disk is fast."""
        return self.quick and self._bytes <= SMALL_BYTES and self.alone is not None and self.alone(self._requests)

    def _write(self, batch: Batch) -> None:
        started = perf_counter()
        batch()
        self.quick = perf_counter() - started < QUICK_SECONDS
