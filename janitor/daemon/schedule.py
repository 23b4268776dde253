"""The schedule: jobs by name, requests to run a job at once, and the correction after changes of the clock."""

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

#: The maximum number of threads, more than jobs, so that no job waits for a thread.
THREADS = 16


def _ignore(name: str, error: BaseException) -> None:
    """Do nothing: the error is already logged."""


class _QuietPool(ThreadPoolExecutor):
    """A pool of threads that logs only failures of its jobs, not two lines for each run."""

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        super().start(scheduler, alias)
        self._logger = _errors_only()


class Schedule:
    """Jobs by name.

    Args:
        clock: the clock whose monotonic time measures intervals.
        on_error: called in the job's thread after a job has raised an error. The error is already logged, and the job
            runs again when it is due. An error of this function is logged, too.
        scheduler: the APScheduler that runs the jobs; by default with threads. Tests pass a scheduler without threads.
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
        self._scheduler.add_listener(self._on_job_finished, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
        self._triggers: dict[str, Interval | Calendar] = {}
        # A signal handler may call its put() during its get(); a threading.Event could deadlock there.
        self._requests: SimpleQueue[str] = SimpleQueue()
        self._lock = Lock()
        self._running: set[str] = set()
        self._reruns: set[str] = set()
        self._expedited: set[str] = set()

    def add(self, name: str, trigger: Trigger, function: Callable[[], object], *, at_once: bool = False) -> None:
        """Add a job that runs a function.

        A run that comes due during the previous run is skipped. After the machine has slept, one run replaces all
        missed runs.

        Args:
            at_once: whether to run the job when the schedule starts.
        """
        self._triggers[name] = planned = trigger(self._clock)
        first = {}
        if at_once:
            self._expedited.add(name)
            first["next_run_time"] = wall_time(self._clock)
        self._scheduler.add_job(
            self._run_job,
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
        """Return the wall time of a job's next run; None if the schedule is not running."""
        job = self._scheduler.get_job(name) if self._scheduler.running else None
        if job is None or job.next_run_time is None:
            return None
        return round(job.next_run_time.timestamp() * 1000)

    def start(self) -> None:
        """Start to run jobs."""
        self._scheduler.start()

    def run_now(self, name: str) -> None:
        """Run a job at once; if it is running, run it again afterwards.

        The current or next call of :meth:`watch` starts the job. This is safe in any thread and in a signal handler.

        Raises:
            KeyError: the job does not exist.
        """
        if name not in self._triggers:
            raise KeyError(name)
        self._requests.put(name)

    def watch(self, wait_seconds: float = 0.0) -> None:
        """Run the jobs requested by :meth:`run_now`, and correct jobs that a changed wall clock has delayed.

        The main loop of the daemon calls this repeatedly. The next run of an interval moves to its monotonic time. The
        next run of a crontab line moves if the clock was set back and the line has an earlier time. If a due job has
        not started, because the clock was set forward or the machine slept, the scheduler is woken.

        Args:
            wait_seconds: the maximum wait for a request.
        """
        names = list(self._take_requests(wait_seconds))
        if not self._scheduler.running:
            return
        for name in names:
            self._expedite(name)
        for name, planned in self._triggers.items():
            self._correct_job(name, planned)

    def shutdown(self, *, wait: bool) -> None:
        """Stop the schedule; a second call has no effect.

        Args:
            wait: whether to wait for running jobs; jobs must not set this.
        """
        if self._scheduler.running:
            # Do not wait here: APScheduler would hold its locks, and a job that reads its next run would deadlock.
            self._scheduler.shutdown(wait=False)
        if wait:
            self._pool.shutdown(wait=True)

    def _run_job(self, name: str, function: Callable[[], object]) -> None:
        with self._lock:
            self._running.add(name)
            self._expedited.discard(name)
        function()

    def _on_job_finished(self, event: JobExecutionEvent) -> None:
        with self._lock:
            self._running.discard(event.job_id)
            is_rerun = event.job_id in self._reruns
            self._reruns.discard(event.job_id)
        if is_rerun:
            self._requests.put(event.job_id)
        if event.exception is not None:
            self._on_error(event.job_id, event.exception)

    def _take_requests(self, wait_seconds: float) -> Iterator[str]:
        try:
            yield self._requests.get(wait_seconds > 0, wait_seconds)
            while True:
                yield self._requests.get_nowait()
        except Empty:
            return

    def _expedite(self, name: str) -> None:
        with self._lock:
            if name in self._running:
                self._reruns.add(name)
                return
            self._expedited.add(name)
        self._scheduler.modify_job(name, next_run_time=wall_time(self._clock))

    def _correct_job(self, name: str, planned: Interval | Calendar) -> None:
        job, now = self._scheduler.get_job(name), wall_time(self._clock)
        if job is None or job.next_run_time is None or name in self._expedited:
            return
        due = planned.due(job.next_run_time, now)
        if abs(due - job.next_run_time) > SLACK:
            self._scheduler.modify_job(name, next_run_time=max(due, now))
        elif now - due > SLACK:
            self._scheduler.wakeup()


def _errors_only() -> logging.Logger:
    """Return the logger of APScheduler, without its messages about skipped runs."""
    logger = logging.getLogger(f"{__name__}.apscheduler")
    logger.setLevel(logging.ERROR)
    return logger
