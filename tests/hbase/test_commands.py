"""The commands on a real HBase, with the state in a table of the same namespace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from janitor.cli.main import execute
from janitor.state.hbase.state import HBaseState
from janitor.status.collect import DAEMON_NOTE
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, topic
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables, write_config
from tms_core.clock import ManualClock
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.lease import Lease

Run = Callable[..., Any]


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.make()


@pytest.fixture
def run(hbase: HBaseServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    settings = hbase.settings(namespace, admin=hbase.thrift2 is not None)
    transactions = {"source": "none", "max_lifetime_seconds": 3600}
    config = write_config(tmp_path / "janitor.yaml", settings, transactions=transactions)
    clock = ManualClock(NOW_MS, monotonic_ms=HOUR)

    def run_command(*arguments: str) -> tuple[int, Any]:
        code = execute([*arguments, "--config", str(config), "--format", "json"], clock)
        output = capsys.readouterr()
        clock.advance(MINUTE)
        return code, json.loads(output.out) if output.out else output.err

    return run_command


def test_commands_work_on_hbase(hbase: HBaseServer, namespace: str, run: Run) -> None:
    with HBaseStore(hbase.settings(namespace, buckets=4)) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 40))
        live = list(range(NOW_MS - MINUTE, NOW_MS - MINUTE + 10))
        orders.plain(*live)

        code, plan = run("plan")
        assert (code, plan["totals"]["expired"]) == (0, 40)
        assert {entry["held"] for entry in plan["topics"]} == {"first_contact"}
        assert run("run", "--once")[0] == 3
        code, report = run("run", "--once", "--adopt")
        assert (code, report["totals"]["expired"], report["errors"]) == (0, 40, [])
        assert orders.times() == live

        assert run("pause", "default:*")[0] == 0
        code, status = run("status")
        assert (code, status["process"]) == (0, "between_runs")
        assert [pause["pattern"] for pause in status["paused"]] == ["default:*"]
        assert run("resume")[0] == 0
        code, history = run("history")
        assert code == 0
        assert [entry["result"] for entry in history["runs"]] == ["done", "blocked"]
        code, ledger = run("ledger")
        assert sum(entry["rows"] for entry in ledger["entries"]) == 40
        assert run("verify")[0] == 0
        assert run("boundary")[0] == 0
        code, findings = run("doctor")
        assert (code, {found["check"]: found["status"] for found in findings}["store"]) == (0, "ok")
        code, found = run("inspect", "message", "--topic", "default:orders")
        assert (code, sum(found["counts"].values())) == (0, 10)


def test_doctor_with_clock_days_ahead_fails(
    hbase: HBaseServer, namespace: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = run("doctor")
    assert (code, {found["check"]: found["status"] for found in findings}["clock"]) == (0, "ok")
    with HBaseState(hbase.settings(namespace)) as state:
        present_ms = state.clock_ms()
    assert present_ms is not None
    arguments = ["doctor", "--config", str(tmp_path / "janitor.yaml"), "--format", "json"]
    assert execute(arguments, ManualClock(present_ms + 6 * DAY, monotonic_ms=HOUR)) == 1
    [output] = [found["message"] for found in json.loads(capsys.readouterr().out) if found["check"] == "clock"]
    assert "ahead of that of HBase's servers; correct the wrong clock" in output


def test_status_of_remote_janitor_uses_its_lease(
    hbase: HBaseServer, namespace: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=HOUR)
    assert run("run", "--once", "--adopt")[0] == 0
    with HBaseState(hbase.settings(namespace)) as state:
        state.save_note(DAEMON_NOTE, True)
        assert run("status")[1]["process"] == "down"
        clock.advance(2 * MINUTE)
        Lease(state, "another:1", 60, clock).acquire()
        arguments = ["--config", str(tmp_path / "janitor.yaml")]
        assert execute(["status", *arguments], clock) == 0
        output = capsys.readouterr().out
        assert "No janitor is running" not in output
        assert "another:1 has the lease; shown from the saved state" in output
        clock.advance(MINUTE + 1)
        assert execute(["status", *arguments], clock) == 0
        output = capsys.readouterr().out
        assert "No janitor is running" in output
        assert "no daemon; shown from the saved state" in output


def test_plan_with_unreachable_hbase_fails(tmp_path: Path) -> None:
    config = tmp_path / "janitor.yaml"
    config.write_text("storage: {kind: hbase, hbase: {thrift: ['127.0.0.1:1'], timeout_seconds: 2}}\n")
    assert execute(["plan", "--config", str(config)], ManualClock(NOW_MS)) == 1
