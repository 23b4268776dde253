"""What a run has taken so far, written down about once a second.

So counters move while a run works, and what a run took that is killed is counted when it is recovered. What is written
down is what its outcomes have counted (rule S15), and a failure to do so stops no sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from threading import Lock

from janitor.law.policy import Rule
from janitor.report import DataTable
from janitor.sweep.outcome import Counted
from tms_core.clock import Clock
from tms_core.errors import StateError

#: How often it is written down, in milliseconds of running time.
BOOK_MS = 1_000

#: Rows and bytes, by table and rule.
Sums = Mapping[tuple[DataTable, Rule], tuple[int, int]]

logger = logging.getLogger(__name__)


class Booking:
    """The sums of one run; threads that sweep different parts of a store may share it.

    Args:
        save: writes the sums down; raises ``StateError``.
        clock: paces it.
    """

    def __init__(self, save: Callable[[Sums], None], clock: Clock) -> None:
        self._save = save
        self._clock = clock
        self._sums: dict[tuple[DataTable, Rule], tuple[int, int]] = {}
        self._saved_ms = clock.running_ms()
        self._failed = False
        self._lock = Lock()

    def add(self, taken: Counted) -> None:
        """Add what was taken, and write the sums down where that is due."""
        with self._lock:
            rows, size_bytes = self._sums.get((taken.table, taken.rule), (0, 0))
            self._sums[taken.table, taken.rule] = (rows + taken.rows, size_bytes + taken.size_bytes)
            now_ms = self._clock.running_ms()
            if now_ms - self._saved_ms < BOOK_MS:
                return
            self._saved_ms = now_ms
            try:
                self._save(self._sums)
            except StateError as error:
                if not self._failed:
                    logger.warning(
                        "the counters of this run do not change in the metrics until it ends, because they cannot be "
                        "saved: %s",
                        error,
                    )
                self._failed = True
