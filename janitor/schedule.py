"""When things are done: named jobs, each by its own trigger, in threads of their own (APScheduler 3).

APScheduler brings the threads, the rule that a job never runs twice at a time, and the survival of jobs that raise.
What it does not bring is a trust in clocks that would hold for years: it waits for a moment of the *wall* clock, so one
set back by an hour would put the next sweep off by an hour, and one set forward by a year would have it count a year of
missed runs one by one. So intervals are kept by the machine's running time here, crontab lines always look forward from
the present, and :meth:`Schedule.watch`, called every second or so, puts right what a changed clock has put wrong.
Traded: within that second a clock that was set forward may bring one run early, which does no harm.

Only this module knows APScheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Protocol

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.triggers.base import BaseTrigger

from janitor.crontab import Crontab
from tms_core.clock import Clock

#: More than there are jobs, so that none waits for a thread; they are made when they are needed.
THREADS = 16

#: By less than this a clock is not worth putting right.
SLACK = timedelta(seconds=1)

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Every:
    """Again and again, so many seconds of running time apart."""

    seconds: float

    def __str__(self) -> str:
        return f"every {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Cron:
    """By a crontab line, in UTC."""

    crontab: Crontab

    def __str__(self) -> str:
        return f"cron {self.crontab.text}"


Trigger = Every | Cron


def every(seconds: float) -> Trigger:
    """Run every so many seconds, whatever the wall clock does."""
    return Every(seconds)


def cron(text: str) -> Trigger:
    """Run by a crontab line (:mod:`janitor.crontab`).

    Raises:
        ValueError: it is none.
    """
    return Cron(Crontab.parse(text))


def _tell_nobody(name: str, error: BaseException) -> None:
    """The log is enough."""


class Schedule:
    """Jobs by name.

    Args:
        clock: by whose running time intervals are kept.
        on_error: told, in the job's thread, that a job raised. That is logged already, and the job goes on being run.
            What it raises itself is logged, too.
        scheduler: what runs the jobs; by default one with threads of its own. Tests bring one without.
    """

    def __init__(
        self,
        clock: Clock,
        on_error: Callable[[str, BaseException], None] = _tell_nobody,
        scheduler: BaseScheduler | None = None,
    ) -> None:
        self._clock = clock
        self._on_error = on_error
        self._pool = ThreadPoolExecutor(THREADS)
        self._scheduler = scheduler or BackgroundScheduler(
            timezone=UTC, executors={"default": self._pool}, logger=_errors_only()
        )
        self._scheduler.add_listener(self._ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        self._triggers: dict[str, Trigger] = {}
        self._plans: dict[str, _Plan] = {}
        # Its put() may interrupt its own get(), so a signal handler may call it; a threading.Event may deadlock there.
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self._lock = Lock()
        self._running: set[str] = set()
        self._again: set[str] = set()
        self._hurried: set[str] = set()

    def add(self, name: str, trigger: Trigger, function: Callable[[], object], *, at_once: bool = False) -> None:
        """Have a function run.

        A run that comes due while the last one still goes on is left out. Runs that were missed, because the machine
        slept or the schedule was paused, are made up for by one.

        Args:
            at_once: run it for the first time when the schedule starts, and not only when the trigger says so.
        """
        plan = _Interval(trigger, self._clock) if isinstance(trigger, Every) else _Calendar(trigger)
        first = {}
        if at_once:
            self._hurried.add(name)
            first["next_run_time"] = _wall_time(self._clock)
        self._triggers[name], self._plans[name] = trigger, plan
        self._scheduler.add_job(
            self._perform,
            plan,
            (name, function),
            id=name,
            name=name,
            misfire_grace_time=None,
            coalesce=True,
            max_instances=1,
            **first,
        )

    def describe(self, name: str) -> str:
        """When a job runs, in words: ``every 60 s``, ``cron */5 * * * *``."""
        return str(self._triggers[name])

    def next_run_ms(self, name: str) -> int | None:
        """When a job runs next, by the wall clock; None when the schedule has not started, or has ended."""
        job = self._scheduler.get_job(name) if self._scheduler.running else None
        if job is None or job.next_run_time is None:
            return None
        return round(job.next_run_time.timestamp() * 1000)

    def start(self) -> None:
        """Begin to run jobs."""
        self._scheduler.start()

    def run_now(self, name: str) -> None:
        """Have a job run at once, or, when it is running, once more after that.

        It is the next :meth:`watch` that sees to it, or the one that is waiting. Safe in any thread and in a signal
        handler.

        Raises:
            KeyError: there is no such job.
        """
        if name not in self._triggers:
            raise KeyError(name)
        self._wishes.put(name)

    def watch(self, wait_seconds: float = 0.0) -> None:
        """Grant wishes (:meth:`run_now`), and put jobs right that a changed wall clock has put off.

        To be called again and again, by the daemon's main loop. The next run of an interval is moved to where running
        time has it. That of a crontab line is moved when the clock was set back and the line gives a time before it. A
        job that is due and does not start, because the clock was set forward or the machine slept, is woken.

        Args:
            wait_seconds: how long to wait for a wish.
        """
        wishes = list(self._wished(wait_seconds))
        if not self._scheduler.running:
            return
        for name in wishes:
            self._grant(name)
        for name, plan in self._plans.items():
            self._put_right(name, plan)

    def pause(self) -> None:
        """Start no more jobs; those that run go on."""
        self._scheduler.pause()

    def resume(self) -> None:
        """Go on after :meth:`pause`; what came due meanwhile runs once."""
        self._scheduler.resume()

    def shutdown(self, *, wait: bool) -> None:
        """End it; a second time does nothing.

        Args:
            wait: return only when the jobs that run have ended. Then not to be called from one.
        """
        if self._scheduler.running:
            # Not with wait: APScheduler waits with its locks held, and a job that asks when it runs next would hang.
            self._scheduler.shutdown(wait=False)
        if wait:
            self._pool.shutdown(wait=True)

    def _perform(self, name: str, function: Callable[[], object]) -> None:
        with self._lock:
            self._running.add(name)
            self._hurried.discard(name)
        function()

    def _ended(self, event: JobExecutionEvent) -> None:
        with self._lock:
            self._running.discard(event.job_id)
            again = event.job_id in self._again
            self._again.discard(event.job_id)
        if again:
            self._wishes.put(event.job_id)
        if event.exception is not None:
            self._on_error(event.job_id, event.exception)

    def _wished(self, wait_seconds: float) -> Iterator[str]:
        try:
            yield self._wishes.get(wait_seconds > 0, wait_seconds)
            while True:
                yield self._wishes.get_nowait()
        except Empty:
            return

    def _grant(self, name: str) -> None:
        with self._lock:
            if name in self._running:
                self._again.add(name)
                return
            self._hurried.add(name)
        self._scheduler.modify_job(name, next_run_time=_wall_time(self._clock))

    def _put_right(self, name: str, plan: _Plan) -> None:
        job, now = self._scheduler.get_job(name), _wall_time(self._clock)
        if job is None or job.next_run_time is None or name in self._hurried:
            return
        due = plan.due(job.next_run_time, now)
        if abs(due - job.next_run_time) > SLACK:
            self._scheduler.modify_job(name, next_run_time=max(due, now))
        elif now - due > SLACK:
            self._scheduler.wakeup()


class _Plan(Protocol):
    """A trigger that can also say where the run that it planned ought to be, by the clock as it stands now."""

    def due(self, planned: datetime, now: datetime) -> datetime: ...


class _Interval(BaseTrigger):
    """An interval, kept by running time; the wall time it answers with is only where that lies at present."""

    def __init__(self, trigger: Every, clock: Clock) -> None:
        self._words = str(trigger)
        self._interval_ms = round(trigger.seconds * 1000)
        self._clock = clock
        self._due_ms: int | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The next run, told when one starts. APScheduler asks twice for the same run, and must hear the same."""
        running_ms = self._clock.running_ms()
        if self._due_ms is None:
            self._due_ms = running_ms + self._interval_ms
        # What comes within the slack is the run that starts now: two clocks may differ by a millisecond.
        behind_ms = running_ms + min(self._interval_ms // 2, SLACK // _MILLISECOND) - self._due_ms
        if behind_ms >= 0:
            self._due_ms += (behind_ms // self._interval_ms + 1) * self._interval_ms
        # Always later than now, also when the clock was set back just now: APScheduler counts missed runs until it is.
        return max(now, _wall_time(self._clock)) + (self._due_ms - running_ms) * _MILLISECOND

    def due(self, planned: datetime, now: datetime) -> datetime:
        if self._due_ms is None:
            return planned
        return now + (self._due_ms - self._clock.running_ms()) * _MILLISECOND

    def __str__(self) -> str:
        return self._words


class _Calendar(BaseTrigger):
    """A crontab line. A clock that was set back a little does not bring the last run again."""

    def __init__(self, trigger: Cron) -> None:
        self._words = str(trigger)
        self._crontab = trigger.crontab
        self._last: datetime | None = None

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first run in the future: those between the last one and now are past, however many they are."""
        self._last = previous_fire_time
        return self._crontab.after(now if previous_fire_time is None else max(previous_fire_time, now))

    def due(self, planned: datetime, now: datetime) -> datetime:
        """Never later than planned: a run whose time has come while the machine slept is made up for."""
        found = self._crontab.after(now)
        return min(planned, self._crontab.after(found) if found == self._last else found)

    def __str__(self) -> str:
        return self._words


def _wall_time(clock: Clock) -> datetime:
    return datetime.fromtimestamp(0, UTC) + clock.now_ms() * _MILLISECOND


def _errors_only() -> logging.Logger:
    """The scheduler's own log; that a run was left out, because the last one is still going on, is no news."""
    logger = logging.getLogger(f"{__name__}.apscheduler")
    logger.setLevel(logging.ERROR)
    return logger
