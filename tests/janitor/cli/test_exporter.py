"""``janitor exporter``: the status of a state that other processes write."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from janitor.app.exporter import LATE_MS, REFRESH_SECONDS, Exporter
from janitor.app.leveldb_place import LevelDBPlace
from janitor.metrics import Metrics
from janitor.state.sqlite.state import FILE_NAME
from janitor.status.collect import Deployment as Shown
from janitor.sweep.run import Terms
from tests.builders import LIFETIME
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tests.virtual import VirtualEvent

SWEPT = b'tms_janitor_sweeps_total{result="done"} 1.0\n'

#: The command as the console script runs it.
RUN = "import sys; from janitor.cli.exporter import command; sys.exit(command(prog_name='exporter'))"


@pytest.fixture
def folder(kit: CommandKit) -> Path:
    """Return the folder of the state, which the first run creates."""
    return kit.folder / "data" / "janitor"


@pytest.fixture
def exporter(kit: CommandKit, folder: Path) -> Exporter:
    terms = Terms(3600, (), LIFETIME, True, 60)
    return Exporter(LevelDBPlace(folder, folder), Shown("store", "apply", "", terms), Metrics("top", 10), kit.clock)


def results(exporter: Exporter) -> list[str]:
    with exporter.past() as state:
        return [run.result for run in state.runs(10)] if state else []


def sweep(kit: CommandKit) -> None:
    assert kit.janitor("run --once --adopt").code == 0


def test_exporter_before_the_first_run_creates_no_state(exporter: Exporter, folder: Path) -> None:
    exporter.refresh()
    assert "no state" in exporter.ready()
    assert exporter.alive() == ""
    with exporter.past() as state:
        assert state is None
    assert exporter.status().last_run is None
    assert b"tms_janitor" not in exporter.metrics()[0]
    assert not folder.exists()


def test_exporter_after_a_run_shows_its_metrics(exporter: Exporter, kit: CommandKit) -> None:
    exporter.refresh()
    sweep(kit)
    exporter.refresh()
    assert exporter.ready() == ""
    assert SWEPT in exporter.metrics()[0]
    assert results(exporter) == ["done"]
    last = exporter.status().last_run
    assert last is not None
    assert last.expired == 2
    assert exporter.metrics("application/openmetrics-text")[0].endswith(b"# EOF\n")


def test_exporter_needs_no_store_and_leaves_the_state_unchanged(
    exporter: Exporter, kit: CommandKit, folder: Path
) -> None:
    sweep(kit)
    shutil.rmtree(kit.store)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    exporter.refresh()
    assert SWEPT in exporter.metrics()[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_status_of_runs_by_a_cronjob_shows_their_schedule(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("{state: data/janitor}", '{state: data/janitor, started_by: "CronJob 10 3 * * *"}'))
    sweep(kit)
    assert kit.janitor("status --format json").json["schedule"] == "CronJob 10 3 * * *"


def test_exporter_of_a_corrupt_state_keeps_the_last_values(exporter: Exporter, kit: CommandKit, folder: Path) -> None:
    sweep(kit)
    exporter.refresh()
    sound = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(b"no database" * 1000)
    exporter.refresh()
    exporter.refresh()
    assert "corrupt" in exporter.ready()
    assert SWEPT in exporter.metrics()[0]
    assert kit.streams.readouterr().err.count("is corrupt") == 1
    (folder / FILE_NAME).write_bytes(sound)
    exporter.refresh()
    assert exporter.ready() == ""


def test_exporter_of_a_replaced_state_shows_the_new_one(exporter: Exporter, kit: CommandKit, folder: Path) -> None:
    sweep(kit)
    exporter.refresh()
    shutil.rmtree(folder)
    assert kit.janitor("run --once").code == 3
    exporter.refresh()
    assert b'tms_janitor_sweeps_total{result="blocked"} 1.0\n' in exporter.metrics()[0]
    assert SWEPT not in exporter.metrics()[0]


def test_exporter_without_recent_refresh_is_not_alive(exporter: Exporter, kit: CommandKit) -> None:
    kit.clock.advance(LATE_MS + 1)
    exporter.refresh()
    kit.clock.advance(LATE_MS)
    assert exporter.alive() == ""
    kit.clock.advance(1)
    assert "60 s ago" in exporter.alive()


def test_exporter_reads_the_state_again_until_stopped(exporter: Exporter, kit: CommandKit) -> None:
    shown: list[int] = []

    def work() -> None:
        if len(stop.waits) == 2:
            shown.append(len(results(exporter)))
        elif len(stop.waits) < 4:
            sweep(kit)

    stop = VirtualEvent(kit.clock, work, ends_after=4 * REFRESH_SECONDS)
    exporter.keep_fresh(stop)
    assert stop.waits == [REFRESH_SECONDS] * 4
    assert shown == [1]
    assert SWEPT.replace(b"1.0", b"2.0") in exporter.metrics()[0]


@contextmanager
def serving(kit: CommandKit, port: int) -> Iterator[subprocess.Popen[str]]:
    kit.set(SETTINGS.replace("{state: data/janitor}", f"{{state: data/janitor, http: {{port: {port}}}}}"))
    command = [sys.executable, "-c", RUN, "--config", "janitor.yaml"]
    with subprocess.Popen(command, cwd=kit.folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_exporter_on_a_signal_exits_0(kit: CommandKit, number: signal.Signals) -> None:
    sweep(kit)
    with serving(kit, 0) as process:
        assert process.stderr is not None
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r":(\d+)/metrics", line)))
        assert SWEPT in get(port, "/metrics")[1]
        assert get(port, "/healthz")[0] == get(port, "/readyz")[0] == get(port, "/")[0] == 200
        process.send_signal(number)
        assert process.wait(60) == 0


def test_exporter_with_a_port_in_use_fails_and_names_the_cause(kit: CommandKit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, serving(kit, other.getsockname()[1]) as process:
        assert "another program or another setting uses already" in process.communicate(timeout=60)[1]
        assert process.returncode != 0
