"""Writing from an event loop: by the loop itself where no request waits for it, else by threads at the turn's end.

To hand a batch to a thread and be called back costs more than all the rest of a small request, since each of the two
threads wakes while the other one holds the interpreter. So:

* A request that is the only one in the whole server, is small, and goes to a disk of this machine that has been quick
  so far, is written by the loop itself: only the client that sent it waits for the loop then. As soon as one write has
  taken longer than :data:`QUICK_SECONDS`, threads write all that comes, until a write was quick again. So a disk that
  has become slow holds up the loop once; and LevelDB slows writers down by a millisecond before it ever stops them.
* Else a batch is begun when the loop has nothing left to do in this turn and is about to wait. What the turn accepted
  for one topic is one batch then. Where that is all that the server has to answer, and as small, the loop writes it,
  too; else a thread does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter

from tms_core.messaging.work import THREADS, Batch, Work

#: What a write may take that the loop waits for, in seconds: as long as it takes to answer a dozen requests.
QUICK_SECONDS = 0.001
#: What a request may have that the loop writes, in bytes of payloads and of what each has beside it.
SMALL_BYTES = 64 << 10


class Turns(Work):
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
        """Whether the loop keeps none waiting but requests that are to be written, and these not for long."""
        return self.quick and self.bytes <= SMALL_BYTES and self.alone is not None and self.alone(self.requests)

    def _write(self, batch: Batch) -> None:
        started = perf_counter()
        batch()
        self.quick = perf_counter() - started < QUICK_SECONDS
