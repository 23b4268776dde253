from __future__ import annotations

import signal
import threading
import time as wall
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from janitor.daemon.schedule import Schedule
from janitor.daemon.trigger import cron, interval_trigger
from tests.builders import HOUR, MINUTE
from tests.virtual import VirtualTime, virtual_time
from tms_core.clock import ManualClock, SystemClock

#: A full minute, so that crontab lines are easy to read.
START_MS = 1_700_000_040_000
YEAR = 366 * 24 * HOUR


class Job:
    """A job that records the times of its runs.

    Args:
        takes: the duration of each of its first runs, in seconds.
    """

    def __init__(self, clock: ManualClock, *takes: float, raises: type[BaseException] | None = None) -> None:
        self._clock = clock
        self._takes = list(takes)
        self._raises = raises
        self._began_ms = clock.monotonic_ms()
        self.at: list[float] = []
        self.wall_ms: list[int] = []

    def __call__(self) -> None:
        self.at.append((self._clock.monotonic_ms() - self._began_ms) / 1000)
        self.wall_ms.append(self._clock.now_ms())
        if self._takes:
            self._clock.sleep(self._takes.pop(0))
        if self._raises is not None:
            raise self._raises("as planned")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS, monotonic_ms=HOUR)


@pytest.fixture
def time(clock: ManualClock) -> Iterator[VirtualTime]:
    with virtual_time(clock) as passing:
        yield passing


def start_job(time: VirtualTime, trigger: str | int, job: Job) -> Job:
    time.schedule.add("sweep", interval_trigger(trigger) if isinstance(trigger, int) else cron(trigger), job)
    time.schedule.start()
    return job


def test_interval_over_a_day_does_not_drift(time: VirtualTime) -> None:
    job = start_job(time, 60, Job(time.clock, *[0.7] * 2000))
    time.advance(24 * 3600)
    assert job.at == [60.0 * number for number in range(1, 1441)]


def test_interval_after_a_long_run_skips_the_overlapped_runs(time: VirtualTime) -> None:
    job = start_job(time, 60, Job(time.clock, 200))
    time.advance(400)
    assert job.at == [60, 300, 360]


@pytest.mark.parametrize(
    ("after_seconds", "step_ms"), [(0, -HOUR), (30, -HOUR), (59, -HOUR), (30, HOUR), (30, 50 * YEAR)]
)
def test_interval_with_a_clock_step_stays(time: VirtualTime, after_seconds: int, step_ms: int) -> None:
    job = start_job(time, 60, Job(time.clock))
    time.advance(60 + after_seconds)
    time.clock.step(step_ms)
    time.advance(180 - after_seconds)
    assert job.at == [60, 120, 180, 240]


def test_interval_with_a_late_watch_runs_early_once_after_a_jump(clock: ManualClock) -> None:
    with virtual_time(clock, watch_seconds=20) as time:
        other = Job(clock)
        time.schedule.add("other", interval_trigger(10), other)
        job = start_job(time, 60, Job(clock))
        time.advance(85)
        clock.step(50 * YEAR)
        time.advance(155)
        assert job.at == [60, 90, 120, 180, 240]
        assert other.at == [10.0 * number for number in range(1, 25)]


@pytest.mark.timeout(20)
def test_interval_with_a_clock_step_during_a_check_continues() -> None:
    class Stepping(ManualClock):
        armed = False

        def now_ms(self) -> int:
            found = super().now_ms()
            if self.armed:
                self.armed = False
                self.step(-HOUR)
            return found

    clock = Stepping(START_MS)
    with virtual_time(clock) as time:
        job = start_job(time, 60, Job(clock))
        time.advance(59.5)
        clock.armed = True
        time.advance(120.5)
        assert job.at == [60, 120, 180]


def test_schedule_after_machine_sleep_runs_each_due_job_once(time: VirtualTime) -> None:
    """During sleep every clock advances, except the clock that measures waits."""
    job, nightly = Job(time.clock), Job(time.clock)
    time.schedule.add("nightly", cron("0 3 * * *"), nightly)
    start_job(time, 60, job)
    time.advance(30)
    assert time.scheduler.wake_ms is not None
    time.scheduler.wake_ms += 10 * HOUR
    time.clock.advance(10 * HOUR)
    time.advance(90)
    assert job.at == [36030, 36060, 36120]
    assert nightly.at == [36030]


def test_cron_runs_on_the_minute(time: VirtualTime) -> None:
    time.clock.advance(17_250)
    job = start_job(time, "*/5 * * * *", Job(time.clock))
    time.advance(1800)
    assert [datetime.fromtimestamp(ms / 1000, UTC).strftime("%H:%M:%S.%f") for ms in job.wall_ms] == [
        f"{hour:02}:{minute:02}:00.000000"
        for hour, minute in [(22, 15), (22, 20), (22, 25), (22, 30), (22, 35), (22, 40)]
    ]


def test_cron_with_the_clock_set_back_counts_by_the_new_clock(time: VirtualTime) -> None:
    job = start_job(time, "*/10 * * * *", Job(time.clock))
    time.advance(600)
    [first] = job.wall_ms
    time.clock.step(-HOUR)
    time.advance(600)
    assert [ms - first for ms in job.wall_ms] == [0, 10 * MINUTE - HOUR]


def test_cron_with_the_clock_set_back_past_a_run_does_not_repeat_it(clock: ManualClock) -> None:
    with virtual_time(clock, watch_seconds=20) as time:
        job = start_job(time, "0 3 * * *", Job(clock))
        time.advance(6 * 3600)
        assert len(job.wall_ms) == 1
        clock.step(job.wall_ms[0] - clock.now_ms() - 10 * MINUTE)
        time.advance(3600)
        assert len(job.wall_ms) == 1
        time.advance(24 * 3600)
        assert [ms - job.wall_ms[0] for ms in job.wall_ms] == [0, 24 * HOUR]


@pytest.mark.parametrize("jump_ms", [HOUR, 50 * YEAR])
def test_cron_with_the_clock_set_forward_over_runs_runs_once(time: VirtualTime, jump_ms: int) -> None:
    job = start_job(time, "* * * * *", Job(time.clock))
    time.advance(90)
    time.clock.step(jump_ms)
    time.advance(3)
    assert len(job.at) == 2
    assert job.at[1] <= 92, "the watch wakes the scheduler, whose wait is longer"


def test_cron_in_a_zone_with_summer_time_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    wall.tzset()
    try:
        clock = ManualClock(int(datetime(2024, 3, 30, tzinfo=UTC).timestamp() * 1000))
        with virtual_time(clock, watch_seconds=60) as time:
            job = start_job(time, "30 1,2 * * *", Job(clock))
            time.advance(3 * 24 * 3600)
        found = [datetime.fromtimestamp(ms / 1000, UTC).strftime("%d %H:%M") for ms in job.wall_ms]
        assert found == [f"{day} {at}" for day in (30, 31, "01") for at in ("01:30", "02:30")]
    finally:
        monkeypatch.undo()
        wall.tzset()


def test_run_now_runs_the_job_once_and_keeps_the_interval(time: VirtualTime) -> None:
    job = start_job(time, 60, Job(time.clock))
    time.advance(70.5)
    time.schedule.run_now("sweep")
    time.advance(109.5)
    assert job.at == [60, 71, 120, 180]


def test_run_now_during_a_run_runs_the_job_once_more(time: VirtualTime) -> None:
    def request_run() -> None:
        job()
        if len(job.at) == 1:
            time.schedule.run_now("sweep")
            time.schedule.run_now("sweep")
            time.schedule.watch()

    job = Job(time.clock, 10)
    time.schedule.add("sweep", interval_trigger(60), request_run)
    time.schedule.start()
    time.advance(90)
    assert job.at == [60, 70]


def test_run_now_of_an_unknown_job_raises(time: VirtualTime) -> None:
    with pytest.raises(KeyError, match="nothing"):
        time.schedule.run_now("nothing")


def test_run_now_before_the_start_and_after_the_end_does_nothing(time: VirtualTime) -> None:
    job = Job(time.clock)
    time.schedule.add("sweep", interval_trigger(60), job)
    time.schedule.run_now("sweep")
    time.schedule.watch()
    time.schedule.start()
    time.schedule.shutdown(wait=True)
    time.schedule.run_now("sweep")
    time.schedule.watch()
    time.advance(120)
    assert job.at == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_job_that_raises_is_logged_and_runs_again(
    time: VirtualTime, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    other = Job(time.clock)
    time.schedule.add("other", interval_trigger(60), other)
    job = start_job(time, 60, Job(time.clock, raises=error))
    time.advance(120)
    assert job.at == other.at == [60, 120]
    assert [(name, type(raised)) for name, raised in time.errors] == [("sweep", error)] * 2
    [first, _] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "sweep (trigger: every 60 s" in first.getMessage()


def test_next_run_of_a_job_is_known_between_start_and_shutdown(time: VirtualTime) -> None:
    time.schedule.add("other", cron("*/5 * * * *"), Job(time.clock))
    assert time.schedule.next_run_ms("other") is None
    start_job(time, 60, Job(time.clock))
    assert time.schedule.next_run_ms("sweep") == START_MS + MINUTE
    time.advance(60)
    assert time.schedule.next_run_ms("sweep") == START_MS + 2 * MINUTE
    time.schedule.shutdown(wait=True)
    assert time.schedule.next_run_ms("sweep") is None


class ThreadedSchedule:
    """A schedule with real threads, and a job that runs until the test ends it."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.schedule = Schedule(SystemClock(), lambda name, _: self.errors.append(name))
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.runs = 0
        self.together = 0
        self.next_run_ms: int | None = 0

    def start(self, seconds: float, *, at_once: bool = False) -> None:
        """Start the schedule, and wait until its job runs."""
        self.schedule.add("job", interval_trigger(seconds), self.job, at_once=at_once)
        self.schedule.start()
        assert self.began.acquire(timeout=60)

    def job(self) -> None:
        self.runs += 1
        self.together += 1
        self.began.release()
        self.go.acquire()
        self.next_run_ms = self.schedule.next_run_ms("job")
        self.together -= 1


@pytest.fixture
def threads() -> Iterator[ThreadedSchedule]:
    made = ThreadedSchedule()
    yield made
    made.go.release(100)
    made.schedule.shutdown(wait=True)


def test_run_now_during_a_run_in_threads_runs_once_more(threads: ThreadedSchedule) -> None:
    threads.start(3600, at_once=True)
    threads.schedule.run_now("job")
    threads.schedule.watch()
    threads.go.release()
    threads.schedule.watch(60)
    assert threads.began.acquire(timeout=60)
    assert (threads.runs, threads.errors) == (2, [])


def test_job_that_is_still_running_is_not_started_again(threads: ThreadedSchedule) -> None:
    ticked = threading.Semaphore(0)
    threads.schedule.add("other", interval_trigger(0.01), ticked.release)
    threads.start(0.01)
    assert all(ticked.acquire(timeout=60) for _ in range(5))
    assert threads.runs == 1


def test_shutdown_with_wait_waits_for_the_running_job(threads: ThreadedSchedule) -> None:
    threads.start(3600, at_once=True)
    threads.schedule.shutdown(wait=False)
    threads.go.release()
    threads.schedule.shutdown(wait=True)
    assert threads.together == 0
    assert threads.next_run_ms is None


def test_run_now_in_a_signal_handler_runs_in_the_main_loop(threads: ThreadedSchedule) -> None:
    threads.schedule.add("job", interval_trigger(3600), threads.job)
    threads.schedule.start()
    before = signal.signal(signal.SIGHUP, lambda *_: threads.schedule.run_now("job"))
    try:
        signal.raise_signal(signal.SIGHUP)
        threads.schedule.watch(60)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert threads.began.acquire(timeout=60)
