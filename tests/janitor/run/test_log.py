"""A daemon's log says what happened, and what troubles it when that begins."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from janitor.report import GuardNote, Report
from janitor.run.log import RunLog
from tests.builders import HOUR, NOW_MS, janitor, topic
from tms_core.tables.memory import MemoryStore


def report_of(*times_ms: int) -> Report:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(*times_ms)
    return janitor(store).engine.run_once(adopt=True)


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= level]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "janitor.run.log")


def test_given_a_run_that_deleted_when_written_then_its_figures_and_its_snapshot_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = report_of(NOW_MS - HOUR)
    RunLog().write(report)
    record = next(record for record in caplog.records if record.name == "janitor.run.log")
    figures = "1 expired, 0 old_generation, 0 processed, 0 invalid_transaction, 0 held"
    assert record.getMessage() == f"run {report.id}: {figures}; snapshot snapshot.{NOW_MS}"
    assert vars(record)["fields"]["snapshot"] == f"snapshot.{NOW_MS}"


def test_given_a_run_without_a_snapshot_when_written_then_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    RunLog().write(replace(report_of(NOW_MS - HOUR), snapshot=None))
    assert said(caplog)[-1].endswith("0 held; no snapshot")


def test_given_idle_runs_when_written_then_only_the_first_is_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log, report = RunLog(), report_of()
    log.write(report)
    assert len(said(caplog)) == 1
    log.write(report)
    assert said(caplog) == []


def test_given_a_guard_that_goes_on_warning_when_written_then_it_is_said_when_it_begins_and_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, calm = RunLog(), report_of()
    troubled = replace(calm, guards=[GuardNote("snapshot", False, "it is 200 s old")])
    worse = replace(calm, guards=[GuardNote("snapshot", False, "it is 260 s old")])
    for report, expected in ((troubled, 1), (worse, 0), (calm, 0), (worse, 1)):
        log.write(report)
        assert len(said(caplog, logging.WARNING)) == expected


def test_given_a_guard_that_trips_after_warning_when_written_then_it_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, calm = RunLog(), report_of()
    log.write(replace(calm, guards=[GuardNote("clock", False, "behind")]))
    log.write(replace(calm, guards=[GuardNote("clock", True, "ahead")]))
    assert said(caplog, logging.ERROR) == ["clock: ahead"]


def test_given_an_error_that_repeats_when_written_then_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    failing = replace(report_of(), errors=["topic default:orders: it is broken"])
    log.write(failing)
    log.write(failing)
    assert said(caplog, logging.ERROR) == ["topic default:orders: it is broken"]
