"""The schedule: jobs by name, requests to run one at once, and the correction of changed clocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC
from queue import Empty, SimpleQueue
from threading import Lock

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler

from janitor.daemon.trigger import SLACK, Calendar, Interval, Trigger, wall_time
from tms_core.clock import Clock

#: More threads than jobs, so that no job waits for a thread; they are created on demand.
THREADS = 16


def _ignore(name: str, error: BaseException) -> None:
    """Do nothing: the error is logged already."""


class _QuietPool(ThreadPoolExecutor):
    """A pool of threads that logs only failures of its jobs, not two lines for each run."""

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        super().start(scheduler, alias)
        self._logger = _errors_only()


class Schedule:
    """Jobs by name.

    Args:
        clock: the clock whose monotonic time measures intervals.
        on_error: called in the job's thread after a job raised. The error is logged already, and the job runs again
            when it is due. An error of this function is logged too.
        scheduler: runs the jobs; by default one with its own threads. Tests pass one without threads.
    """

    def __init__(
        self,
        clock: Clock,
        on_error: Callable[[str, BaseException], None] = _ignore,
        scheduler: BaseScheduler | None = None,
    ) -> None:
        self._clock = clock
        self._on_error = on_error
        self._pool = _QuietPool(THREADS)
        self._scheduler = scheduler or BackgroundScheduler(
            timezone=UTC, executors={"default": self._pool}, logger=_errors_only()
        )
        self._scheduler.add_listener(self._ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        self._triggers: dict[str, Interval | Calendar] = {}
        # Its put() may interrupt its own get(), so a signal handler may call it; a threading.Event may deadlock there.
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self._lock = Lock()
        self._running: set[str] = set()
        self._reruns: set[str] = set()
        self._hurried: set[str] = set()

    def add(self, name: str, trigger: Trigger, function: Callable[[], object], *, at_once: bool = False) -> None:
        """Add a job that runs a function.

        A run that is due while the previous one is still running is skipped. Missed runs, because the machine slept,
        are replaced by one run.

        Args:
            at_once: also run the job when the schedule starts.
        """
        self._triggers[name] = planned = trigger(self._clock)
        first = {}
        if at_once:
            self._hurried.add(name)
            first["next_run_time"] = wall_time(self._clock)
        self._scheduler.add_job(
            self._perform,
            planned,
            (name, function),
            id=name,
            name=name,
            misfire_grace_time=None,
            coalesce=True,
            max_instances=1,
            **first,
        )

    def next_run_ms(self, name: str) -> int | None:
        """Return the time of a job's next run, by the wall clock; None if the schedule is not running."""
        job = self._scheduler.get_job(name) if self._scheduler.running else None
        if job is None or job.next_run_time is None:
            return None
        return round(job.next_run_time.timestamp() * 1000)

    def start(self) -> None:
        """Start to run jobs."""
        self._scheduler.start()

    def run_now(self, name: str) -> None:
        """Run a job at once; if it is running, run it once more afterwards.

        The waiting or next call of :meth:`watch` starts it. It is safe in any thread and in a signal handler.

        Raises:
            KeyError: the job does not exist.
        """
        if name not in self._triggers:
            raise KeyError(name)
        self._wishes.put(name)

    def watch(self, wait_seconds: float = 0.0) -> None:
        """Run the jobs requested by :meth:`run_now`, and correct jobs that a changed wall clock has delayed.

        The daemon's main loop calls it repeatedly. The next run of an interval moves to its monotonic time. The next
        run of a crontab line moves if the clock was set back and the line has an earlier time. A due job that has not
        started, because the clock was set forward or the machine slept, is woken.

        Args:
            wait_seconds: how long to wait for a request.
        """
        wishes = list(self._wished(wait_seconds))
        if not self._scheduler.running:
            return
        for name in wishes:
            self._grant(name)
        for name, planned in self._triggers.items():
            self._correct_job(name, planned)

    def shutdown(self, *, wait: bool) -> None:
        """Stop the schedule; a second call does nothing.

        Args:
            wait: return only when running jobs have finished; not possible from a job.
        """
        if self._scheduler.running:
            # Not with wait: APScheduler waits with its locks held, and a job that reads its next run would hang.
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
            is_rerun = event.job_id in self._reruns
            self._reruns.discard(event.job_id)
        if is_rerun:
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
                self._reruns.add(name)
                return
            self._hurried.add(name)
        self._scheduler.modify_job(name, next_run_time=wall_time(self._clock))

    def _correct_job(self, name: str, planned: Interval | Calendar) -> None:
        job, now = self._scheduler.get_job(name), wall_time(self._clock)
        if job is None or job.next_run_time is None or name in self._hurried:
            return
        due = planned.due(job.next_run_time, now)
        if abs(due - job.next_run_time) > SLACK:
            self._scheduler.modify_job(name, next_run_time=max(due, now))
        elif now - due > SLACK:
            self._scheduler.wakeup()


def _errors_only() -> logging.Logger:
    """Return the scheduler's own log, without the messages about skipped runs."""
    logger = logging.getLogger(f"{__name__}.apscheduler")
    logger.setLevel(logging.ERROR)
    return logger
