"""How fast rows may be deleted.

A plain account of rows against time: each batch is paid for after it was written, with nothing open (rule S11), and
the wait is as long as the batch was worth. No burst is saved up while idle, so a store that sat still for an hour is
not hit by an hour's worth of deletes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tms_core.clock import Clock

#: A wait is taken in pieces, so that the run can be stopped in between.
LONGEST_SLEEP_SECONDS = 1.0


class Pacer:
    """Keeps the rate of all who share it at or under a limit.

    Args:
        rows_per_second: the limit; None for no limit.
        clock: what time is measured and waited by.
        alive: called between two pieces of a wait, and before each page of a count; what it raises ends both.
    """

    def __init__(self, rows_per_second: float | None, clock: Clock, alive: Callable[[], None] = lambda: None) -> None:
        self._rate = rows_per_second
        self._clock = clock
        self.alive = alive
        self._free_at_ms = 0.0
        self._lock = Lock()

    def pay(self, rows: int) -> float:
        """Wait until ``rows`` more are within the limit.

        Returns:
            Seconds waited.
        """
        if not self._rate:
            return 0.0
        with self._lock:
            now_ms = float(self._clock.running_ms())
            self._free_at_ms = max(self._free_at_ms, now_ms) + rows * 1000 / self._rate
            seconds = max(0.0, (self._free_at_ms - now_ms) / 1000)
        left = seconds
        while left > 0:
            self._clock.sleep(min(left, LONGEST_SLEEP_SECONDS))
            self.alive()
            left -= LONGEST_SLEEP_SECONDS
        return seconds
