"""The threads that write what was accepted, each a batch at a time, and a count of what is still to be done.

The threads are started once and take batches from one queue. A pool of ``concurrent.futures`` would do the same, but
makes a future for each batch and takes four locks, which is a fifth of what publishing one message costs here. So it is
with its futures: to make an :class:`Answer`, settle it and read it costs as much as writing a small message into
LevelDB's memory does.

For an event loop that is still too much: to hand a batch to a thread and be called back costs more than all the rest of
a small request, since each of the two threads wakes while the other one holds the interpreter. So, with
:class:`EventLoopWorkers`:

* A request that is the only one in the whole server, is small, and goes to a disk of this machine that has been quick
  so far, is written by the loop itself: only the client that sent it waits for the loop then. As soon as one write has
  taken longer than :data:`QUICK_SECONDS`, threads write all that comes, until a write was quick again. So a disk that
  has become slow holds up the loop once; and LevelDB slows writers down by a millisecond before it ever stops them.
* Else a batch is started when the loop has nothing left to do in this turn and is about to wait. What the turn accepted
  for one topic is one batch then. Where that is all that the server has to answer, and as small, the loop writes it,
  too; else a thread does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from time import perf_counter
from typing import Generic, TypeVar, cast

from tms_core.errors import Unavailable

#: How many batches are written at once, so as many topics.
THREADS = 4

#: Takes what is queued for a topic, writes it and answers it. Never raises.
Batch = Callable[[], None]
R = TypeVar("R")
#: What a write may take that the loop waits for, in seconds: as long as it takes to answer a dozen requests.
QUICK_SECONDS = 0.001
#: What a request may have that the loop writes, in bytes of payloads and of what each has beside it.
SMALL_BYTES = 64 << 10


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
        """Return whether it is there."""
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
        """Return the result, as soon as it is there.

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


class PublishWorkers:
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
        """Return how many were accepted and are not answered yet."""
        return self._requests

    @property
    def bytes(self) -> int:
        """Return their payloads together, and what each has beside it."""
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

    def close(self) -> None:
        """Accept no more, and return when all is answered and the threads are over; closing twice is no error."""
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


class EventLoopWorkers(PublishWorkers):
    """Work whose batches come from an event loop, mostly.

    Args:
        threads: how many batches are written at once.

    Attributes:
        alone: tells, in the loop, whether there are no requests but so many; None: the loop never writes. To be set
            when the server is there, and the store on this machine.
        quick: whether the last write was.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self.alone: Callable[[int], bool] | None = None
        self.quick = True
        self._begun: list[Batch] = []
        #: Whether nothing was under way when the first of these was begun.
        self._was_idle = False
        super().__init__(threads)

    def run(self, batch: Batch) -> None:
        """Have a batch written: here and now, at the end of the turn, or at once if this is no loop's thread."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            super().run(partial(self._write, batch))
            return
        idle = self.requests == 1
        if idle and self._loop_writes():
            self._write(batch)
            return
        if not self._begun:
            self._was_idle = idle
            loop.call_soon(self._end_turn)
        self._begun.append(batch)

    def _end_turn(self) -> None:
        begun, self._begun = self._begun, []
        if len(begun) == 1 and self._was_idle and self._loop_writes():
            self._write(begun[0])
            return
        for batch in begun:
            super().run(partial(self._write, batch))

    def _loop_writes(self) -> bool:
        """Return whether the loop keeps none waiting but requests that are to be written, and these not for long."""
        return self.quick and self.bytes <= SMALL_BYTES and self.alone is not None and self.alone(self.requests)

    def _write(self, batch: Batch) -> None:
        started = perf_counter()
        batch()
        self.quick = perf_counter() - started < QUICK_SECONDS
