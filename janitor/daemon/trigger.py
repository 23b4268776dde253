"""The triggers of jobs: an interval or a crontab line, both robust against changes of the clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from apscheduler.triggers.base import BaseTrigger
from cronsim import CronSim

from janitor.settings import crontab
from tms_core.clock import Clock

#: The difference up to which times are not corrected.
SLACK = timedelta(seconds=1)

_MILLISECOND = timedelta(milliseconds=1)


class Interval(BaseTrigger):
    """An interval of monotonic time; the returned wall time is its present equivalent."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._interval_ms = round(seconds * 1000)
        self._clock = clock
        self._due_ms: int | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the time of the next run. APScheduler calls this twice for a run, and must get the same time."""
        monotonic_ms = self._clock.monotonic_ms()
        if self._due_ms is None:
            self._due_ms = monotonic_ms + self._interval_ms
        # A run that is due within the slack starts now: the clocks may differ by milliseconds.
        lag_ms = monotonic_ms + min(self._interval_ms // 2, SLACK // _MILLISECOND) - self._due_ms
        if lag_ms >= 0:
            self._due_ms += (lag_ms // self._interval_ms + 1) * self._interval_ms
        # Return a time after now, also if the clock was just set back, or APScheduler would count missed runs.
        return max(now, wall_time(self._clock)) + (self._due_ms - monotonic_ms) * _MILLISECOND

    def due(self, planned: datetime, now: datetime) -> datetime:
        """Return the correct time of the planned run, according to the present clock."""
        if self._due_ms is None:
            return planned
        return now + (self._due_ms - self._clock.monotonic_ms()) * _MILLISECOND

    def __str__(self) -> str:
        return f"every {self._seconds:g} s"


class Calendar(BaseTrigger):
    """A crontab line in UTC. A clock that was set back a little does not repeat the last run."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last: datetime | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """Return the first run in the future; runs between the last run and now are skipped."""
        self._last = previous_fire_time
        return self.after(now if previous_fire_time is None else max(previous_fire_time, now))

    def due(self, planned: datetime, now: datetime) -> datetime:
        """Return the correct time of the planned run, never later, so that a run missed during sleep is made up."""
        found = self.after(now)
        return min(planned, self.after(found) if found == self._last else found)

    def after(self, moment: datetime) -> datetime:
        """Return the first time after a moment at which the line fires, in UTC."""
        return next(CronSim(self._text, moment))

    def __str__(self) -> str:
        return f"cron {self._text}"


#: Creates the trigger of a job, which APScheduler calls for the time of the next run.
Trigger = Callable[[Clock], Interval | Calendar]


def interval_trigger(seconds: float) -> Trigger:
    """Return a trigger with an interval in seconds of monotonic time, independent of the wall clock."""
    return partial(Interval, seconds)


def cron(text: str) -> Trigger:
    """Return a trigger by a crontab line (:func:`janitor.settings.crontab`).

    Raises:
        ValueError: the text is not a crontab line.
    """
    line = crontab(text)
    return lambda _: Calendar(line)


def wall_time(clock: Clock) -> datetime:
    """Return the wall time in the form that APScheduler uses."""
    return datetime.fromtimestamp(0, UTC) + clock.now_ms() * _MILLISECOND
