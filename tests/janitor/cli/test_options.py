"""Times, patterns, and options before and after the verb."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.app.options import Common
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tests.support import free_port
from tms_core.cli.typed import Moment, parse_time


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1700000000000", NOW_MS),
        ("0", 0),
        ("now", NOW_MS),
        ("now-1d2h", NOW_MS - DAY - 2 * HOUR),
        ("now+7d", NOW_MS + 7 * DAY),
        ("now+1d-2h30m", NOW_MS + DAY - 2 * HOUR - 30 * MINUTE),
        ("now-1500ms", NOW_MS - 1500),
        ("now+3s", NOW_MS + 3 * SECOND),
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-14T22:13:20", NOW_MS),
        ("2023-11-14T23:13:20+01:00", NOW_MS),
        ("2023-11-14 22:13:20.250", NOW_MS + 250),
        ("2023-11-14", NOW_MS - 22 * HOUR - 13 * MINUTE - 20 * SECOND),
    ],
)
def test_parse_time_of_each_form_returns_that_time(text: str, at_ms: int) -> None:
    moment = parse_time(text)
    assert moment is not None
    assert moment.at(NOW_MS) == at_ms


@pytest.mark.parametrize(
    "text", ["", "tomorrow", "-5", "1.5", "now-", "now1d", "now-1w", "now-d", "2023-13-01", "12:00"]
)
def test_parse_time_of_invalid_text_returns_none(text: str) -> None:
    assert parse_time(text) is None


@given(st.text())
def test_parse_time_of_any_text_never_raises(text: str) -> None:
    assert parse_time(text) is None or isinstance(parse_time(text), Moment)


@pytest.mark.parametrize(
    "line",
    [
        "plan --leveldb data/messaging --snapshots data/tx --format json",
        "--leveldb data/messaging --snapshots data/tx --format json plan",
        "--leveldb nowhere --format table plan --leveldb data/messaging --snapshots data/tx --format json",
    ],
)
def test_options_before_and_after_the_command_count_and_later_ones_win(kit: CommandKit, line: str) -> None:
    done = kit.run(line)
    assert done.code == 0
    assert done.json["totals"]["expired"] == 2


@pytest.mark.parametrize(("patterns", "rows"), [("'*:ret*'", 1), ("'a:*'", 0), ("default:orders --topic '*:ret*'", 4)])
def test_topic_patterns_select_the_rows_of_a_plan(kit: CommandKit, patterns: str, rows: int) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {apply: false, "))
    for command in ("plan", "run --once"):
        found = kit.janitor(f"{command} --topic {patterns} --format json").json
        assert sum(entry["rows"] for entry in found["topics"]) == rows


def test_config_show_names_the_origin_of_each_value(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_JANITOR__BATCH_ROWS", "7")
    shown = kit.janitor("config show --snapshots elsewhere --format json").json
    assert shown["janitor.batch_rows"] == {"value": 7, "origin": "environment TMS_JANITOR__BATCH_ROWS"}
    assert shown["transactions.directory"] == {"value": str(kit.folder / "elsewhere"), "origin": "flag --snapshots"}
    assert shown["transactions.grace_seconds"] == {"value": 3600, "origin": "file janitor.yaml"}
    assert shown["janitor.hold_seconds"] == {"value": 3600, "origin": "default"}


def test_leveldb_option_places_the_state_next_to_that_store(kit: CommandKit) -> None:
    assert kit.run("adopt --leveldb data/messaging").code == 0
    assert (kit.folder / "data/messaging.janitor/state.sqlite3").is_file()
    assert sorted(entry.name for entry in kit.store.iterdir()) == [
        "system.tms.message",
        "system.tms.meta",
        "system.tms.payload",
    ]


def test_options_of_a_daemon_lead_to_its_store_from_any_folder() -> None:
    common = Common(Path("janitor.yaml"), "data", "hbase-1:9090", "hdfs://name/tx")
    assert common.arguments() == "--config janitor.yaml --leveldb data --hbase hbase-1:9090 --snapshots hdfs://name/tx"
    here = Path.cwd()
    whole = f"--config {here}/janitor.yaml --leveldb {here}/data --hbase hbase-1:9090 --snapshots hdfs://name/tx"
    assert common.arguments(anywhere=True) == whole


def test_settings_file_of_the_environment_is_used_and_named_in_hints(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMS_CONFIG", "janitor.yaml")
    planned = kit.run("plan")
    assert planned.code == 0
    assert "janitor run --once --adopt --config janitor.yaml" in planned.out
    monkeypatch.setenv("TMS_CONFIG", "./missing.yaml")
    message = kit.run("plan").err
    assert "missing.yaml cannot be read" in message
    assert ("TMS_CONFIG" in message, "--config" in message) == (True, False)
    monkeypatch.setenv("TMS_CONFIG", "janitor.yaml")
    message = kit.run("plan --config missing.yaml").err
    assert ("TMS_CONFIG" in message, "--config FILE" in message) == (False, True)
    for line in ("--config janitor.yaml plan", "plan --config janitor.yaml"):
        assert kit.run(line).code == 0


def test_doctor_on_an_unreachable_hbase_connects_once(kit: CommandKit) -> None:
    found = kit.run(f"doctor --hbase 127.0.0.1:{free_port()} --format json")
    assert found.code == 1
    failed = {row["check"]: row["message"] for row in found.json if row["status"] == "fail"}
    assert "cannot be reached" in failed.pop("store")
    assert all(message.startswith("not checked") for message in failed.values())
    assert {"state", "clock", "cdap", "tables", "regions"} == set(failed)
