"""The daemon: sweeps and other jobs on a schedule, with detection of hanging and failing jobs.

Each task is a job: the sweep, the transaction snapshot, the topics, the background count, housekeeping, and a tick. The
tick renews the lease and collects the status for operators. A failing job does not stop the daemon. The engine, not the
daemon, decides about deletions.

A stop is an event that each run checks between two batches, so it takes effect within one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock

from janitor.archive.restore import Request, RestoreResult
from janitor.daemon.schedule import Schedule
from janitor.daemon.snapshot_refresh import CachedSource
from janitor.daemon.trigger import Trigger, interval_trigger
from janitor.daemon.watched import RunWatcher
from janitor.metrics import Metrics
from janitor.report import Report
from janitor.run.engine import Engine
from janitor.run.log import RunLog
from janitor.run.plan_file import PlanFile
from janitor.state.base import RunRecord, State
from janitor.status import collect
from janitor.status.collect import Deployment, Live
from janitor.status.status import SnapshotFigures, Status
from tms_core.errors import LeaseLost, StopRequested, StoreError, TmsError
from tms_core.topic import TopicId

#: The interval at which the status is updated and the lease renewed, in seconds.
TICK_SECONDS = 5
#: The interval at which the main thread watches the schedule, in seconds.
WATCH_SECONDS = 1.0
#: The interval at which the status is collected again without an event, in seconds.
COLLECT_SECONDS = 30
#: The interval at which the metadata table is read for the status, in seconds; sweeps read it separately.
TOPICS_SECONDS = 60
#: The minimum interval between runs of the jobs that follow a sweep, in seconds.
AFTER_SWEEP_SECONDS = 15
#: The interval at which past runs, ledger and archive are pruned, in seconds.
HOUSEKEEPING_SECONDS = 3600
#: The time without a tick after which the process counts as hanging, in milliseconds.
LATE_TICK_MS = 60_000
#: The time without a heartbeat after which a run counts as hanging, in milliseconds; no call may take that long.
HUNG_RUN_MS = 900_000

#: The jobs that delete rows and update the status.
ESSENTIAL = frozenset({"sweep", "tick"})

logger = logging.getLogger(__name__)


#: A background task, such as a count; raises ``TmsError`` on failure.
PeriodicTask = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic task and its interval.

    Attributes:
        after_sweeps: whether the task also runs soon after a sweep that deleted rows.
    """

    name: str
    seconds: int
    task: PeriodicTask
    after_sweeps: bool = False


@dataclass(frozen=True, slots=True)
class DaemonPlan:
    """The schedule and the tasks of a daemon.

    Attributes:
        trigger: the times of sweeps.
        adopt: whether the first sweep adopts a store.
        patterns: the topics to sweep; empty: all.
        snapshot_seconds: the interval at which the transaction snapshot is read.
        jobs: further tasks.
        refusal: returns the reason why the surrounding server cannot work now; empty if it can.
        topic_changes: returns the number of topic changes by the server in this process, if there is one.
        stop: the event that stops the daemon.
    """

    trigger: Trigger
    adopt: bool = False
    patterns: tuple[str, ...] = ()
    snapshot_seconds: int = 30
    jobs: Sequence[Job] = ()
    refusal: Callable[[], str] = str
    topic_changes: Callable[[], int] = int
    stop: Event = field(default_factory=Event)


class Daemon:
    """The jobs and their life cycle; also the views of the HTTP server (``janitor.http.app.StatusViews``).

    Args:
        engine: the engine, with the clock, state and lease of the daemon.
        watched: the engine's observer.
        source: the snapshots of the engine; None without snapshots.
        schedule: runs the jobs.
        deployment: the description of this janitor for status page and metrics.
        metrics: the metrics for Prometheus.
        plan: the times of the jobs.
    """

    def __init__(
        self,
        engine: Engine,
        watched: RunWatcher,
        source: CachedSource | None,
        schedule: Schedule,
        deployment: Deployment,
        metrics: Metrics,
        plan: DaemonPlan,
    ) -> None:
        self.engine = engine
        self._watched = watched
        self._source = source
        self._schedule = schedule
        self._state = engine.deps.state
        self._deployment = deployment
        self._metrics = metrics
        self._clock = engine.deps.clock
        self._lease = engine.deps.lease
        self._plan = plan
        self.stop = plan.stop
        self._collecting = Lock()
        #: Monotonic times, which a wrong clock does not affect.
        self._started_ms = self._ticked_ms = self._clock.monotonic_ms()
        self._log = RunLog(deployment.arguments)
        self._failing: dict[str, str] = {}
        self._was_leader = True
        self._is_start_recorded = False
        self._outdated = True
        self._collected_changes = plan.topic_changes()
        self._collected_ms = self._clock.monotonic_ms()
        self._is_full_requested = False
        self._followed_ms = -AFTER_SWEEP_SECONDS * 1000
        self._status = collect.collect(self._state, deployment, self._clock, self._live())
        self._add_jobs()

    # -- life cycle ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run jobs until :attr:`stop` is set."""
        self._schedule.start()
        try:
            while not self.stop.is_set():
                self._schedule.watch(WATCH_SECONDS)
        finally:
            self._schedule.shutdown(wait=True)

    def request_stop(self) -> None:
        """Stop all jobs within one batch; safe in any thread."""
        self.stop.set()
        # Wake the loop that watches the schedule.
        self._schedule.run_now("tick")

    def sweep_now(self) -> None:
        """Sweep as soon as possible without skipping topics; safe in any thread."""
        self._is_full_requested = True
        self._schedule.run_now("sweep")

    def refresh_status(self) -> None:
        """Collect the status again, including the topics, for an operator."""
        try:
            self.engine.remember_topics()
        except StoreError as error:
            # The rest of the status is still useful.
            logger.warning("topics could not be read for the status: %s", error)
        self._outdated = True
        self.tick()

    # -- decisions of operators (``janitor.control.api.Decider``) ------------------------------------------------------

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Adopt the store, as :meth:`janitor.run.engine.Engine.adopt`; repeat counts, which this may delete."""
        adopted = self.engine.adopt(once_for=once_for, store_id=store_id)
        for job in self._plan.jobs:
            self._schedule.run_now(job.name)
        return adopted

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Approve held rows, as :meth:`janitor.run.engine.Engine.approve`."""
        return self.engine.approve(patterns, clock=clock, once_for=once_for)

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        """Apply a plan, as :meth:`janitor.run.engine.Engine.apply`, visible in the status like other runs."""
        with self._watched.run():
            return self.engine.apply(wanted, adopt=adopt)

    def restore(self, folder: Path, request: Request) -> RestoreResult:
        """Restore archived rows, as :meth:`janitor.run.engine.Engine.restore`, visible in the status like runs."""
        with self._watched.run():
            return self.engine.restore(folder, request)

    def is_running(self) -> bool:
        """Return whether a run is in progress."""
        return self.engine.is_running()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _add_jobs(self) -> None:
        if self._source is not None:
            self._add("snapshot", interval_trigger(self._plan.snapshot_seconds), self._source.refresh, at_once=True)
        self._add("sweep", self._plan.trigger, self.sweep, at_once=True)
        self._add("topics", interval_trigger(TOPICS_SECONDS), self._show_topics, at_once=True)
        self._add("housekeeping", interval_trigger(HOUSEKEEPING_SECONDS), self.engine.prune_history, at_once=True)
        self._add("tick", interval_trigger(TICK_SECONDS), self.tick, at_once=True)
        for job in self._plan.jobs:
            self._add(job.name, interval_trigger(job.seconds), job.task, at_once=True)

    def _show_topics(self) -> None:
        self.engine.remember_topics()
        self._outdated = True
        self.tick()

    def _add(self, name: str, trigger: Trigger, task: PeriodicTask, *, at_once: bool = False) -> None:
        self._schedule.add(name, trigger, partial(self._run_task, name, task), at_once=at_once)

    def _run_task(self, name: str, task: PeriodicTask) -> None:
        """Run a task; log its failure and show it in the status."""
        if self.stop.is_set():
            return
        try:
            task()
        except StopRequested:
            logger.info("job %s was cancelled, because the janitor is stopping", name)
        except TmsError as error:
            if self._failing.get(name) != str(error):
                logger.error("%s failed: %s", name, error)
            self._show_failing(name, str(error))
        else:
            self._show_failing(name, "")

    def failed(self, name: str, error: BaseException) -> None:
        """Record that a job failed by a bug; the log has its traceback."""
        self._show_failing(name, f"{type(error).__name__}: {error}")

    def _show_failing(self, name: str, error: str) -> None:
        with self._collecting:
            if self._failing.get(name, "") == error:
                return
            self._failing = {job: problem for job, problem in {**self._failing, name: error}.items() if problem}
            self._status = replace(self._status, failing=self._failing)

    def sweep(self) -> None:
        """Run a sweep, or a plan if the daemon only makes plans."""
        if not self._leads():
            return
        incremental, self._is_full_requested = not self._is_full_requested, False
        try:
            with self._watched.run():
                if self._deployment.mode == "plan_only":
                    report = self.engine.rehearse(patterns=self._plan.patterns)
                else:
                    report = self.engine.run_once(
                        adopt=self._plan.adopt, patterns=self._plan.patterns, incremental=incremental
                    )
            self._log.write(report)
        except BaseException:
            self._outdated = True
            self._schedule.run_now("tick")
            raise
        self._outdated = True
        self.tick()
        if report.mode == "apply" and report.deleted_bytes:
            self._follow_sweep()

    def _follow_sweep(self) -> None:
        """Run the jobs that follow a sweep, unless they ran in the last ``AFTER_SWEEP_SECONDS``."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._followed_ms >= AFTER_SWEEP_SECONDS * 1000:
            self._followed_ms = now_ms
            for job in self._plan.jobs:
                if job.after_sweeps:
                    self._schedule.run_now(job.name)

    def tick(self) -> None:
        """Renew the lease, and keep the status current.

        Collecting the status takes half a second with ten thousand topics. Therefore it is collected after an event and
        at intervals; in between, only values that change by time are updated.
        """
        self._ticked_ms = self._clock.monotonic_ms()
        try:
            self.engine.renew_lease()
        except LeaseLost as error:
            logger.error("%s", error)
        live = self._live()
        if not self._is_start_recorded:
            # In a job, so that an unavailable state does not end the daemon, and the next tick tries again.
            self._state.save_note(collect.DAEMON_NOTE, {"started_ms": live.started_ms})
            self._is_start_recorded = True
        # One thread at a time: if an older status replaced a newer status, counters would decrease.
        with self._collecting:
            if self._outdated or self._ticked_ms - self._collected_ms >= COLLECT_SECONDS * 1000:
                self._collect(live)
            else:
                self._status = replace(
                    self._status,
                    now_ms=live.heartbeat_ms,
                    heartbeat_ms=live.heartbeat_ms,
                    next_run_ms=live.next_run_ms,
                    running=live.running,
                    leader=live.leader,
                )

    def _collect(self, live: Live) -> None:
        """Collect the status; an event during the collection makes it outdated again."""
        self._outdated = False
        try:
            status = collect.collect(self._state, self._deployment, self._clock, live)
        except TmsError:
            self._outdated = True
            raise
        self._collected_ms = self._ticked_ms
        self._status = status = replace(status, failing=self._failing, snapshot=self._newest(status.snapshot))
        self._metrics.update(status)

    def _newest(self, last_run: SnapshotFigures) -> SnapshotFigures:
        """Return the last read snapshot, which may be newer than the snapshot of the last run."""
        loaded = self._source.seen if self._source is not None else None
        if loaded is None or (
            last_run.timestamp_ms is not None and loaded.snapshot.timestamp_ms <= last_run.timestamp_ms
        ):
            return last_run
        snapshot = loaded.snapshot
        return replace(
            last_run,
            timestamp_ms=snapshot.timestamp_ms,
            source=loaded.name,
            invalid=len(snapshot.invalid),
            in_progress=len(snapshot.in_progress),
        )

    def _leads(self) -> bool:
        """Return whether this process holds the lease; try to regain a lost lease."""
        leads = self.engine.regain_lease()
        if not leads and self._was_leader:
            logger.warning("sweeps stop while another process has the lease")
        self._was_leader = leads
        return leads

    def _live(self) -> Live:
        now_ms = self._clock.now_ms()
        return Live(
            started_ms=now_ms - (self._clock.monotonic_ms() - self._started_ms),
            heartbeat_ms=now_ms,
            next_run_ms=self._schedule.next_run_ms("sweep"),
            running=self._watched.running,
            leader=self._lease is None or self._lease.held,
        )

    # -- views ---------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the status of the last tick, or a newer status if this process has changed a topic since."""
        changes = self._plan.topic_changes()
        if changes != self._collected_changes:
            # Set it first, so that only one reader collects, and no change during the collection is missed.
            self._collected_changes = changes
            try:
                self.refresh_status()
            except TmsError as error:
                # The tick fails, too, and the status shows its error.
                logger.warning("the status could not be collected: %s", error)
        return self._status

    def runs(self, limit: int) -> list[RunRecord]:
        """Return the last runs, newest first."""
        return self._state.runs(limit)

    def past(self) -> AbstractContextManager[State]:
        """Return the state, which has the history."""
        return nullcontext(self._state)

    def metrics(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the metrics as text and their content type, by a scraper's ``Accept`` header."""
        return self._metrics.render(accept)

    def alive(self) -> str:
        """Return the reason to restart this process; empty if it is healthy."""
        late_ms = self._clock.monotonic_ms() - self._ticked_ms
        if late_ms > LATE_TICK_MS:
            return f"no activity in this process for {late_ms // 1000} s"
        silent_ms = self._watched.silent_ms()
        if silent_ms > HUNG_RUN_MS:
            return f"the current run has sent no heartbeat for {silent_ms // 1000} s"
        return ""

    def ready(self) -> str:
        """Return the reason why this process cannot work now; empty if it can, also while paused."""
        if self.stop.is_set():
            return "the janitor is stopping"
        failures = [f"{job} fails: {error}" for job, error in self._failing.items() if job in ESSENTIAL]
        return "; ".join(filter(None, [*failures, self._plan.refusal()]))
