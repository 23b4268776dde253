"""When a job runs: at an interval or by a crontab line, also when a clock is set."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from apscheduler.triggers.base import BaseTrigger
from cronsim import CronSim

from janitor.settings import crontab
from tms_core.clock import Clock

#: A difference below this is not corrected.
SLACK = timedelta(seconds=1)

_MILLISECOND = timedelta(milliseconds=1)


class Interval(BaseTrigger):
    """An interval by monotonic time; the returned wall time is only its present equivalent."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._interval_ms = round(seconds * 1000)
        self._clock = clock
        self._due_ms: int | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the time of the next run. APScheduler calls it twice for a run, and must get the same time."""
        monotonic_ms = self._clock.monotonic_ms()
        if self._due_ms is None:
            self._due_ms = monotonic_ms + self._interval_ms
        # A run due within the slack is the run that starts now: two clocks may differ by a millisecond.
        lag_ms = monotonic_ms + min(self._interval_ms // 2, SLACK // _MILLISECOND) - self._due_ms
        if lag_ms >= 0:
            self._due_ms += (lag_ms // self._interval_ms + 1) * self._interval_ms
        # Always later than now, also when the clock was set back just now: APScheduler counts missed runs until it is.
        return max(now, wall_time(self._clock)) + (self._due_ms - monotonic_ms) * _MILLISECOND

    def due(self, planned: datetime, now: datetime) -> datetime:
        """Return where the run that was planned ought to be, by the clock as it stands now."""
        if self._due_ms is None:
            return planned
        return now + (self._due_ms - self._clock.monotonic_ms()) * _MILLISECOND

    def __str__(self) -> str:
        return f"every {self._seconds:g} s"


class Calendar(BaseTrigger):
    """A crontab line, in UTC. A clock that was set back a little does not bring the last run again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last: datetime | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the first run in the future: those between the last one and now are past, however many they are."""
        self._last = previous_fire_time
        return self.after(now if previous_fire_time is None else max(previous_fire_time, now))

    def due(self, planned: datetime, now: datetime) -> datetime:
        """Return the time as :class:`Interval` does, never later: a run missed while the machine slept is made up."""
        found = self.after(now)
        return min(planned, self.after(found) if found == self._last else found)

    def after(self, moment: datetime) -> datetime:
        """Return the first minute it fires that is later than a moment, in UTC."""
        return next(CronSim(self._text, moment))

    def __str__(self) -> str:
        return f"cron {self._text}"


#: Returns the trigger of a job, which APScheduler calls for the time of the next run.
Trigger = Callable[[Clock], Interval | Calendar]


def every(seconds: float) -> Trigger:
    """Return a trigger with an interval in seconds of monotonic time, independent of the wall clock."""
    return partial(Interval, seconds)


def cron(text: str) -> Trigger:
    """Run by a crontab line (:func:`janitor.settings.crontab`).

    Raises:
        ValueError: it is not a crontab line.
    """
    line = crontab(text)
    return lambda _: Calendar(line)


def wall_time(clock: Clock) -> datetime:
    """Return the wall clock as APScheduler reads it."""
    return datetime.fromtimestamp(0, UTC) + clock.now_ms() * _MILLISECOND
