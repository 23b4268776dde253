"""Virtual time for a schedule: hours pass instantly, and each job runs at its exact time.

    clock = ManualClock(NOW_MS)
    with virtual_time(clock) as time:
        time.schedule.add("sweep", every(60), sweep)
        time.schedule.start()
        time.advance(3600)            # sixty sweeps

The schedule uses APScheduler without its thread. The thread would sleep by the monotonic clock, and then run the jobs
that are due by the wall clock; :meth:`VirtualTime.advance` does the same step by step, and runs the watch of the
daemon's main loop. Jobs run inline: a job that calls ``clock.sleep`` advances the clock, and no other job runs then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from math import ceil, inf
from threading import Event
from unittest.mock import patch

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.base import BaseScheduler

from janitor.daemon.schedule import Schedule
from tms_core.clock import ManualClock


class VirtualEvent(Event):
    """An event whose waits advance a manual clock instead of blocking.

    Args:
        during_wait: called after each advance.
        ends_after: the seconds of waiting after which the event is set.

    Attributes:
        waits: the timeout of each wait, in seconds.
    """

    def __init__(
        self, clock: ManualClock, during_wait: Callable[[], object] = lambda: None, *, ends_after: float = inf
    ) -> None:
        super().__init__()
        self._clock = clock
        self._ends_after = ends_after
        self.during_wait = during_wait
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self._clock.sleep(timeout)
        self.during_wait()
        if sum(self.waits) >= self._ends_after:
            self.set()
        return self.is_set()


class VirtualScheduler(BaseScheduler):
    """A scheduler that a test drives.

    Attributes:
        wake_ms: the monotonic time at which its thread would wake; None: it would wait for a wake-up.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.wake_ms: int | None = None
        super().__init__(timezone=UTC, executors={"default": DebugExecutor()})

    def wakeup(self) -> None:
        self.wake_ms = self._clock.monotonic_ms()

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self.wake_ms = None

    def process(self) -> None:
        """Run due jobs, as the thread does when it wakes."""
        self.wake_ms = None
        seconds = self._process_jobs()
        if not self._woken() and seconds is not None:
            self.wake_ms = self._clock.monotonic_ms() + ceil(seconds * 1000)

    def _woken(self) -> bool:
        return self.wake_ms is not None


@dataclass
class VirtualTime:
    """A schedule with its scheduler and clock.

    Attributes:
        errors: the name and the error of each failed job.
        watch_seconds: the interval of the watch in the daemon's main loop; None: no watch.
    """

    clock: ManualClock
    watch_seconds: float | None = 1.0
    errors: list[tuple[str, BaseException]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = VirtualScheduler(self.clock)
        self.schedule = Schedule(self.clock, lambda name, error: self.errors.append((name, error)), self.scheduler)
        self._watched_ms = self.clock.monotonic_ms()

    def advance(self, seconds: float) -> None:
        """Advance the clock; run each job that is due until then, inclusive, at its time."""
        end_ms = self.clock.monotonic_ms() + round(seconds * 1000)
        while True:
            self._move_to(min(end_ms, *self._wake_times()))
            due = [at_ms for at_ms in self._wake_times() if at_ms <= self.clock.monotonic_ms()]
            if not due and self.clock.monotonic_ms() >= end_ms:
                return
            if self.scheduler.wake_ms in due:
                self.scheduler.process()
            if self.watch_seconds is not None and self._next_watch_ms(self.watch_seconds) in due:
                self._watched_ms = self.clock.monotonic_ms()
                self.schedule.watch()

    def _wake_times(self) -> list[int]:
        watch = [] if self.watch_seconds is None else [self._next_watch_ms(self.watch_seconds)]
        return watch + ([] if self.scheduler.wake_ms is None else [self.scheduler.wake_ms])

    def _next_watch_ms(self, watch_seconds: float) -> int:
        return self._watched_ms + round(watch_seconds * 1000)

    def _move_to(self, monotonic_ms: int) -> None:
        self.clock.advance(max(0, monotonic_ms - self.clock.monotonic_ms()))


@contextmanager
def virtual_time(clock: ManualClock, *, watch_seconds: float | None = 1.0) -> Iterator[VirtualTime]:
    """Run a schedule whose scheduler reads this clock."""

    class Virtual(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(clock.now_ms() / 1000, tz)

    with patch("apscheduler.schedulers.base.datetime", Virtual):
        time = VirtualTime(clock, watch_seconds)
        yield time
        time.schedule.shutdown(wait=True)
