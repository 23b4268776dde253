"""The log of a daemon: changes, each new problem once, and unrecognized rows once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from janitor.report import Entry, Report, Totals, UnrecognizedKey
from janitor.rules.policy import Hold, Rule
from janitor.run import prepare
from janitor.run.log import RunLog
from janitor.state.figures import GuardNote
from janitor.sweep.outcome import Outcome
from tests.builders import HOUR, NOW_MS, Call, Kit, janitor, topic, unknown_topic, watch
from tms_core.tables.base import MessageValue
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId


def report_of(*times_ms: int) -> Report:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60).plain(*times_ms)
    return janitor(store).engine.run_once(adopt=True)


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= level]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def log_info_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "janitor.run.log")


def test_log_of_a_run_has_its_counts_and_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(NOW_MS - HOUR)
    RunLog().write(report)
    record = next(record for record in caplog.records if record.name == "janitor.run.log")
    assert record.getMessage() == f"run {report.id}: 1 expired row deleted (judged by snapshot.{NOW_MS})"
    assert vars(record)["fields"]["expired"] == 1
    assert vars(record)["fields"]["snapshot"] == f"snapshot.{NOW_MS}"


def test_log_of_a_run_without_a_snapshot_says_so(caplog: pytest.LogCaptureFixture) -> None:
    RunLog().write(replace(report_of(NOW_MS - HOUR), snapshot=None))
    assert messages(caplog)[-1].endswith(": 1 expired row deleted (without a transaction snapshot)")


def test_log_of_a_guard_that_trips_after_a_warning_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    log, calm = RunLog(), report_of()
    log.write(replace(calm, guards=[GuardNote("clock", False, "behind")]))
    log.write(replace(calm, guards=[GuardNote("clock", True, "ahead")]))
    assert messages(caplog, logging.ERROR) == ["clock: ahead"]


@pytest.mark.parametrize(
    ("taken", "held", "words"),
    [
        ({}, 0, "nothing was due"),
        ({}, 1234, "nothing was due; 1,234 rows are held"),
        ({}, 1, "nothing was due; 1 row is held"),
        ({Rule.EXPIRED: 3560, Rule.OLD_GENERATION: 8}, 0, "3,560 expired and 8 old-generation rows deleted"),
        (
            {Rule.PROCESSED: 1, Rule.INVALID_TRANSACTION: 2},
            0,
            "1 processed row deleted, 2 rows of invalid transactions inverted",
        ),
    ],
)
def test_log_of_a_run_describes_its_results(
    caplog: pytest.LogCaptureFixture, taken: dict[Rule, int], held: int, words: str
) -> None:
    topic = TopicId("default", "orders")
    entries = [Entry(topic, 1, "message", rule, None, rows) for rule, rows in taken.items()]
    entries.append(Entry(topic, 1, "message", Rule.EXPIRED, Hold.FRONTIER, held))
    RunLog().write(replace(report_of(), totals=Totals.of("apply", entries, {})))
    assert f": {words} (" in messages(caplog)[-1]


def test_log_of_a_blocked_run_says_that_nothing_was_done(caplog: pytest.LogCaptureFixture) -> None:
    RunLog().write(
        replace(
            report_of(), guards=[GuardNote("adoption", True, "nothing is deleted, because this store is not adopted")]
        )
    )
    assert ": nothing was done (" in messages(caplog)[-2]


def test_log_of_idle_runs_has_only_the_first(caplog: pytest.LogCaptureFixture) -> None:
    log, report = RunLog(), report_of()
    log.write(report)
    assert len(messages(caplog)) == 1
    log.write(report)
    assert messages(caplog) == []


def test_log_of_a_guard_warns_when_it_starts_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    log, calm = RunLog(), report_of()
    troubled = replace(calm, guards=[GuardNote("snapshot", False, "it is 200 s old")])
    worse = replace(calm, guards=[GuardNote("snapshot", False, "it is 260 s old")])
    for report, expected in ((troubled, 1), (worse, 0), (calm, 0), (worse, 1)):
        log.write(report)
        assert len(messages(caplog, logging.WARNING)) == expected


def test_log_of_a_guard_has_a_complete_command(caplog: pytest.LogCaptureFixture) -> None:
    note = GuardNote("adoption", True, "not adopted; look at janitor plan, then: janitor adopt")
    RunLog("--config a.yaml").write(replace(report_of(), guards=[note]))
    assert caplog.messages[-1].endswith("look at janitor plan --config a.yaml, then: janitor adopt --config a.yaml")


def test_log_of_a_stopped_run_is_not_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    RunLog().write(replace(report_of(), guards=[GuardNote("interrupted", False, "the run was asked to stop")]))
    assert messages(caplog, logging.INFO)[-1] == "interrupted: the run was asked to stop"
    RunLog().write(replace(report_of(), guards=[GuardNote("interrupted", False, "the run was asked to stop")]))
    assert messages(caplog, logging.WARNING) == []


def test_log_of_a_repeated_error_has_it_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    failing = replace(report_of(), errors=["topic default:orders: it is broken"])
    log.write(failing)
    assert messages(caplog, logging.ERROR) == ["topic default:orders: it is broken"]
    log.write(failing)
    assert messages(caplog, logging.ERROR) == []


def janitor_with_unknown_rows(unknown_row_log: int) -> Kit:
    store = MemoryStore()
    unknown_topic(store, "default:lost").plain(1, NOW_MS)
    store.message.put([(b"#%04d" % number, MessageValue(None, b"?")) for number in range(unknown_row_log)])
    return janitor(store)


def named_rows(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("skipped")]


def test_log_names_an_unrecognized_row_and_topic_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    kit = janitor_with_unknown_rows(1)
    kit.engine.run_once(adopt=True)
    assert named_rows(caplog) == [
        "skipped a row of the message table with an unrecognized key: 2330303030",
        "skipped rows of topic default:lost, which has no readable metadata",
    ]
    kit.engine.preview()
    assert len(named_rows(caplog)) == 2


def test_log_of_a_topic_created_during_the_run_does_not_name_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    kit = janitor_with_unknown_rows(0)

    def make(call: Call) -> None:
        if call.name.startswith("message.") and kit.store.metadata.get(b"default:new:") is None:
            topic(kit.store, "default:new", ttl_seconds=60).plain(NOW_MS)

    watch(kit.store, before=make)
    kit.engine.run_once(adopt=True)
    lost = "skipped rows of topic default:lost, which has no readable metadata"
    assert named_rows(caplog) == [lost]


def test_unknown_row_log_has_the_last_ones(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "REMEMBERED_KEYS", 3)
    log, metadata = prepare.UnknownRowLog(), MemoryStore().metadata
    for number in range(10):
        log.name(Outcome(unrecognized=[UnrecognizedKey("message", f"{number:02}")]), metadata)
    log.name(Outcome(unrecognized=[UnrecognizedKey("message", "09")]), metadata)
    assert len(named_rows(caplog)) == 10
    assert [*log._named] == [UnrecognizedKey("message", key) for key in ("07", "08", "09")]
