"""Janitor processes on one HBase, with state and lease in it.

Two that sweep once: the first one stops itself inside a batch, past its lease; the other one takes over and finishes;
then the first is woken. And a daemon. Time is the machine's, so nothing here waits for anything but conditions.

As a module this is the ``janitor`` command, but for what its first argument, a role, changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from janitor.app import place as leases
from janitor.cli.main import execute
from janitor.state.hbase.state import HBaseState
from janitor.state.hbase.table import JanitorTable
from tests.builders import DAY, HOUR, MINUTE, Topic, pointer, topic
from tests.hbase.server import PATIENCE_SECONDS
from tests.hbase.tables import Tables, write_config
from tests.support import require_or_skip
from tms_core.tables import lease
from tms_core.tables.hbase.cells import HBaseMessageTable, HBaseTable
from tms_core.tables.lease import LeaseRecord
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import Snapshot, VisibilityState

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2
BATCH_ROWS, ROWS = 10, 120


class TwoJanitorsKit:
    """A store with rows to delete and to invert, and the settings of its janitors."""

    def __init__(self, tables: Tables, folder: Path, *, workers: int) -> None:
        server = tables.server
        if server.thrift2 is None:
            require_or_skip(f"the HBase at {server.address} has no Thrift 2")
        namespace = tables.make()
        self.settings = server.settings(namespace, admin=True, connections=8)
        self.store = tables.open(namespace)
        self.now_ms = time.time_ns() // 1_000_000
        self.invalid = pointer(self.now_ms - DAY)
        self.orders: Topic = topic(self.store, "default:orders", ttl_seconds=3600)
        self.orders.plain(*(self.now_ms - 2 * HOUR + number for number in range(ROWS)))
        self.orders.tx(self.invalid, *(self.now_ms - MINUTE + number for number in range(ROWS)))
        self._write_snapshot(folder / "tx")
        transactions = {
            "source": "directory",
            "directory": str(folder / "tx"),
            "max_lifetime_seconds": 3600,
            "grace_seconds": 3600,
            "snapshot_interval_seconds": 86_400,
        }
        settings = {
            "batch_rows": BATCH_ROWS,
            "workers": workers,
            "every_seconds": 3600,
            "lease": {"seconds": LEASE_SECONDS},
            "http": {"port": 0},
            "state": str(folder / "state"),
        }
        self.config = folder / "janitor.yaml"
        write_config(self.config, self.settings, transactions=transactions, janitor=settings)

    def memory(self) -> HBaseState:
        return HBaseState(self.settings)

    @contextmanager
    def janitor(self, role: str, *arguments: str, output_file: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """Start a janitor process with a role and end it with the block."""
        command = [sys.executable, "-m", "tests.hbase.test_two_janitors", role, *arguments]
        command += ["--config", str(self.config)]
        pipe = subprocess.PIPE
        with ExitStack() as stack:
            errors = stack.enter_context(output_file.open("wb")) if output_file else pipe
            process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=errors, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            yield process

    @property
    def is_clean(self) -> bool:
        return self.orders.times() == [self.now_ms - MINUTE + number for number in range(ROWS)] and set(
            self.orders.pointers()
        ) == {-self.invalid}

    def _write_snapshot(self, folder: Path) -> None:
        folder.mkdir()
        newest = pointer(self.now_ms)
        state = VisibilityState(self.now_ms, newest, newest, array("q", [self.invalid]), ())
        with (folder / f"snapshot.{self.now_ms}").open("wb") as stream:
            write_snapshot(stream, Snapshot(state))


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("moment", "workers"), [("delete", 4), ("swap", 1)], ids=["inside a batch", "at its end"])
def test_janitor_resumed_after_takeover_writes_at_most_its_batches(
    hbase_tables: Tables, tmp_path: Path, moment: str, workers: int
) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=workers)
    with kit.store, kit.memory() as state, kit.janitor(f"stops-at-{moment}", "run", "--once", "--adopt") as first:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1]), "it ended before it came to that moment"
        assert state.boundary() is None
        [lost] = state.unfinished_runs()
        held = LeaseRecord.parse(state.lease())
        assert held is not None
        until(lambda: time.time() > held.renewed_ms / 1000 + held.seconds, first)
        with kit.janitor("impatient", "run", "--once", "--format", "json") as second:
            output, complaint = second.communicate(timeout=PATIENCE_SECONDS)
        assert second.returncode == 0, complaint
        report = json.loads(output)
        proven, ledger, frontiers = state.boundary(), state.ledger(100), state.frontiers()
        assert proven is not None
        assert (proven.run_id, str(proven.bound)) == (report["id"], report["boundary"])
        first.send_signal(signal.SIGCONT)
        output, complaint = first.communicate(timeout=PATIENCE_SECONDS)
        assert (first.returncode, "Traceback" in complaint) == (4, False), complaint
        assert "the lease was lost" in output
        batches = [line for line in complaint.splitlines() if line == "a batch after it was woken"]
        assert len(batches) <= workers
        assert (state.boundary(), state.ledger(100), state.frontiers()) == (proven, ledger, frontiers)
        assert {run.id: run.result for run in state.runs(9)} == {lost.id: "lost", proven.run_id: "done"}
        assert kit.is_clean


def test_stopped_daemon_releases_its_lease(hbase_tables: Tables, tmp_path: Path) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=4)
    with kit.store, kit.memory() as state, kit.janitor("plain", "run", "--adopt") as daemon:
        until(lambda: [run.result for run in state.runs(1)] == ["done"], daemon)
        assert kit.is_clean
        proven, held = state.boundary(), LeaseRecord.parse(state.lease())
        assert (proven is not None, held is not None and held.holder != "") == (True, True)
        daemon.send_signal(signal.SIGTERM)
        _, complaint = daemon.communicate(timeout=PATIENCE_SECONDS)
        assert daemon.returncode == 0, complaint
        left = LeaseRecord.parse(state.lease())
        assert left is not None
        assert left.holder == ""


def test_killed_daemon_is_replaced_and_standby_waits(hbase_tables: Tables, tmp_path: Path) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=4)
    output = tmp_path / "third"
    with kit.store, kit.memory() as state, kit.janitor("plain", "run", "--adopt") as first:
        until(lambda: [run.result for run in state.runs(1)] == ["done"], first)
        first.kill()
        first.wait()
        with kit.janitor("plain", "run") as second:
            until(lambda: len(state.runs(9)) == 2, second)
            taken = LeaseRecord.parse(state.lease())
            assert taken is not None
            assert f":{second.pid}:" in taken.holder
            with kit.janitor("plain", "run", output_file=output) as third:
                until(lambda: b"on standby" in output.read_bytes(), third)
                third.send_signal(signal.SIGTERM)
                assert third.wait(PATIENCE_SECONDS) == 0, output.read_text()
            held = LeaseRecord.parse(state.lease())
            assert held is not None
            assert (held.holder, held.fence) == (taken.holder, taken.fence)


def stop_at(owner: Any, name: str, is_it: Callable[[Any], bool]) -> None:
    """Stop the whole process when a certain call is about to be made, and say of each batch from then on that it is."""
    lock, stopped = threading.Lock(), [False]

    def watched(change: Callable[..., Any], stops: bool) -> Callable[..., Any]:
        def changing(*arguments: Any) -> Any:
            with lock:
                if stops and not stopped[0] and is_it(arguments):
                    stopped[0] = True
                    os.kill(os.getpid(), signal.SIGSTOP)
                if stopped[0] and change.__name__ != "swap":
                    sys.stderr.write("a batch after it was woken\n")
            return change(*arguments)

        return changing

    for each, change in {(HBaseTable, "delete"), (HBaseMessageTable, "invert"), (owner, name)}:
        setattr(each, change, watched(getattr(each, change), stops=(each, change) == (owner, name)))


def main(role: str, arguments: Sequence[str]) -> int:
    leases.STANDBY_SECONDS = LEASE_SECONDS / 4
    if role == "impatient":
        # Both processes have the same clock, so it can be believed at once.
        lease.WALL_ALLOWANCE_MS = 0
    elif role == "stops-at-delete":
        batches = count(1)
        stop_at(HBaseTable, "delete", lambda _: next(batches) == 3)
    elif role == "stops-at-swap":
        # The end of its run: the memory's root, with a claim in it.
        stop_at(JanitorTable, "swap", lambda arguments: b'"claim"' in arguments[-1])
    return execute(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
