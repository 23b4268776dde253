"""Writing from an event loop: what one turn of it accepted is begun together, when the turn is over.

To hand a batch to a thread and be called back costs as much as all the rest of a small request, since each of the two
threads wakes while the other one holds the interpreter. So two things are done here:

* A batch is handed over when the loop has nothing left to do in this turn and is about to wait. What the turn accepted
  for one topic is one batch then, and the thread finds the interpreter free.
* A request that is quite alone, small, and goes to a disk of this machine that has been quick so far is written by the
  loop itself. Nobody waits for the loop then but who sent it. As soon as one write took longer than
  :data:`QUICK_SECONDS`, from whatever thread, threads write all that comes, until a write was quick again: a disk that
  has become slow holds up the loop once, and LevelDB slows writers down by a millisecond before it ever stops them.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from tms_core.messaging.work import THREADS, Batch, Work

#: What a write may take that the loop waits for, in seconds: what it takes to answer a few dozen requests.
QUICK_SECONDS = 0.001
#: What a request may have that the loop writes, in bytes of payloads.
SMALL_BYTES = 64 << 10


class Turns(Work):
    """Work whose batches come from an event loop, mostly.

    Args:
        here: whether the loop itself may write: the store is on this machine.
        threads: how many batches are written at once.
    """

    def __init__(self, *, here: bool, threads: int = THREADS) -> None:
        super().__init__(threads)
        self._here = here
        self._quick = True
        self._begun: list[Batch] = []

    def run(self, batch: Batch) -> None:
        """Have a batch written at the end of the loop's turn, or at once if this is no loop's thread."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            super().run(batch)
            return
        self._begun.append(batch)
        if len(self._begun) == 1:
            loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        begun, self._begun = self._begun, []
        if self._here and self._quick and self.requests == 1 and self.bytes <= SMALL_BYTES:
            self._write(begun[0])
            return
        for batch in begun:
            super().run(batch)

    def _write(self, batch: Batch) -> None:
        started = perf_counter()
        batch()
        self._quick = perf_counter() - started < QUICK_SECONDS
