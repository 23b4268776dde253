"""Whether the next batch may be written, and when.

A run that was right to start may not be right to go on: its lease may be lost (rule S12), an operator may have paused a
topic or asked the process to stop. So a run asks here before every batch, and after every page it shows that it is
alive (rule S10): a run that hangs in a call stops showing it, its lease runs out, and the next holder closes it.

How fast rows may be deleted is a plain account of rows against time: each batch is paid for after it was written, with
nothing open (rule S11), and the wait is as long as the batch was worth. No burst is saved up while idle, so a store
that sat still for an hour is not hit by an hour's worth of deletes.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from threading import Lock

from janitor.state.base import Pause, State
from tms_core.clock import Clock
from tms_core.errors import Halted
from tms_core.tables.lease import Lease
from tms_core.topic import TopicId

#: How often a run's heartbeat is written, in milliseconds of running time.
HEARTBEAT_MS = 5_000
#: A wait is taken in pieces, so that the run can be stopped in between.
LONGEST_SLEEP_SECONDS = 1.0


class Withheld(Exception):
    """Nothing more may be deleted in this topic now; it has not failed, and the others go on."""


def never() -> bool:
    """Never request a stop."""
    return False


class Permission:
    """What one run asks before it writes; ``Halted``, ``LeaseLost`` and ``StateError`` say that the run is over.

    Args:
        state: where pauses and the heartbeat are.
        lease: the lease the run works under; None where there is none to lose.
        clock: the clock of the heartbeat.
        halted: whether a stop was requested.
    """

    def __init__(
        self, state: State, lease: Lease | None, clock: Clock, run_id: str, halted: Callable[[], bool] = never
    ) -> None:
        self._state = state
        self._lease = lease
        self._clock = clock
        self._run_id = run_id
        self._halted = halted
        # When it began it was written down as alive already.
        self._beaten_ms = clock.running_ms()
        self._begun = False

    def check(self, topic: TopicId) -> None:
        """Called before every batch of a topic's rows; raises ``Withheld`` where the topic was paused.

        Raises:
            Halted, LeaseLost, StateError: the run is over.
            Withheld: the topic was paused.
        """
        if any(fnmatchcase(str(topic), pause.pattern) for pause in self._pauses()):
            raise Withheld

    def check_all(self) -> None:
        """Called before what concerns the whole store; raises ``Withheld`` where something was paused.

        Raises:
            Halted, LeaseLost, StateError: the run is over.
            Withheld: something was paused.
        """
        if self._pauses():
            raise Withheld

    def alive(self) -> None:
        """Called before and after every page, and in every wait.

        Raises:
            Halted, LeaseLost, StateError: the run is over.
        """
        self.stop_if_halted()
        if self._lease is not None:
            self._lease.renew_if_due()
        self._beat()

    def _pauses(self) -> list[Pause]:
        """Return the pauses, if the run may continue."""
        self.stop_if_halted()
        if self._lease is not None:
            self._lease.check()
        self._beat()
        return self._state.pauses()

    def _beat(self) -> None:
        """Say that the run is alive, and check whether it may be: a reading run must stop with its lease too."""
        now_ms = self._clock.running_ms()
        due = now_ms - self._beaten_ms >= HEARTBEAT_MS
        if self._lease is not None and (due or not self._begun):
            self._lease.check()
        self._begun = True
        if due:
            self._beaten_ms = now_ms
            self._state.beat(self._run_id, self._clock.now_ms())

    def stop_if_halted(self) -> None:
        """Raise ``Halted`` if a stop was requested; nothing is read or written."""
        if self._halted():
            raise Halted("the run was asked to stop; what was done is done, the next one goes on from there.")


class Pacer:
    """Keeps the rate of all who share it at or under a limit.

    Args:
        rows_per_second: the limit; None for no limit.
        clock: what time is measured and waited by.
        alive: called between two pieces of a wait, and before each page of a count; its error stops both.
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
