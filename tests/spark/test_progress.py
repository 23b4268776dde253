"""Progress messages of Spark jobs: step, completed tasks and duration."""

from __future__ import annotations

import logging
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from janitor.spark import session as on
from janitor.spark.session import run_on_spark
from tests.support import raising
from tms_core.errors import Interrupted


class Tracker:
    """A status tracker with two stages, one half completed."""

    def getActiveStageIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return [7, 8]

    def getStageInfo(self, stage: int) -> SimpleNamespace | None:  # noqa: N802
        return SimpleNamespace(numCompletedTasks=3, numTasks=6) if stage == 7 else None


class FakeSession:
    """A classic session."""

    def __init__(self) -> None:
        self.described: list[str] = []
        self.sparkContext = SimpleNamespace(setJobDescription=self.described.append, statusTracker=Tracker)


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "LOOK_SECONDS", 0.01)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages without times."""
    return [record.getMessage().rpartition(" after ")[0] for record in caplog.records]


def test_run_on_spark_logs_progress_and_names_the_job(caplog: pytest.LogCaptureFixture) -> None:
    spark, is_logged = FakeSession(), Event()
    with caplog.at_level(logging.INFO):
        name = "sweep, step 2 of 3: invert"

        def check() -> None:
            if messages(caplog):
                is_logged.set()

        run_on_spark(cast(Any, spark), lambda: is_logged.wait(60), check, name=name)
    assert messages(caplog)[0] == f"{name}: 3 of 6 tasks done"
    assert messages(caplog)[-1] == f"{name}: finished"
    assert spark.described == [name]


def test_run_on_spark_with_connect_logs_reported_progress(caplog: pytest.LogCaptureFixture) -> None:
    handlers: list[Any] = []
    remote = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    remote.registerProgressHandler, remote.removeProgressHandler = handlers.append, handlers.remove
    is_logged = Event()

    def check() -> None:
        if messages(caplog):
            is_logged.set()
        for handler in handlers:
            stages = [SimpleNamespace(num_completed_tasks=1, num_tasks=4)]
            handler(stages=stages, inflight_tasks=2, operation_id="one", done=False)

    with caplog.at_level(logging.INFO):
        run_on_spark(remote, lambda: is_logged.wait(60), check, name="count")
    assert messages(caplog) == ["count: 1 of 4 tasks done", "count: finished"]
    assert handlers == []


def test_run_on_spark_without_tasks_logs_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "getActiveStageIds", lambda _: [])
    is_logged = Event()
    with caplog.at_level(logging.INFO):
        run_on_spark(
            cast(Any, FakeSession()),
            lambda: is_logged.wait(60),
            lambda: is_logged.set() if messages(caplog) else None,
            name="count",
        )
    assert messages(caplog)[0] == "count: no tasks running"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped")])
def test_run_on_spark_interrupted_with_the_jvm_raises_interruption(error: BaseException) -> None:
    called = Event()

    class EndedJvm(FakeSession):
        def interruptAll(self) -> None:  # noqa: N802 - Spark's name
            called.set()
            raise ConnectionRefusedError("the JVM has ended")

    with pytest.raises(type(error)):
        run_on_spark(cast(Any, EndedJvm()), lambda: called.wait(60), raising(error))
    assert called.is_set()


def test_run_on_spark_if_short_or_unnamed_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert run_on_spark(cast(Any, object()), lambda: 3) == 3
        checked = Event()
        run_on_spark(cast(Any, object()), lambda: checked.wait(60), checked.set)
    assert messages(caplog) == []
