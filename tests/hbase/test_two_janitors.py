"""Janitor processes on one HBase, with state and lease in it: takeovers from paused and killed janitors.

Time is real, so tests wait for conditions only. ``python -m tests.hbase.test_two_janitors ROLE`` is the command
``janitor``, which the role changes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
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
from tests.builders import DAY, HOUR, MINUTE, Topic, pointer, save_snapshot, topic, visibility
from tests.hbase.server import PATIENCE_SECONDS
from tests.hbase.tables import Tables, write_config
from tests.kit.hbase_servers import is_paused, pause_this_process
from tests.support import wait_until
from tms_core.tables import lease
from tms_core.tables.hbase.cells import HBaseMessageTable, HBaseTable
from tms_core.tables.lease import LeaseRecord

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2
LATE_BATCH = "a batch after the pause"
BATCH_ROWS, ROWS = 10, 120


class TwoJanitorsKit:
    """A store with rows to delete and to invert, and the settings of its janitors."""

    def __init__(self, tables: Tables, folder: Path, *, workers: int) -> None:
        namespace = tables.make()
        self.settings = tables.server.settings(namespace, admin=True, connections=8)
        self.store = tables.open(namespace)
        self.now_ms = time.time_ns() // 1_000_000
        self.invalid = pointer(self.now_ms - DAY)
        self.orders: Topic = topic(self.store, "default:orders", ttl_seconds=3600)
        self.orders.plain(*(self.now_ms - 2 * HOUR + number for number in range(ROWS)))
        self.orders.tx(self.invalid, *(self.now_ms - MINUTE + number for number in range(ROWS)))
        save_snapshot(folder / "tx", visibility(self.now_ms, [self.invalid]))
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

    def state(self) -> HBaseState:
        return HBaseState(self.settings)

    @contextmanager
    def janitor(self, role: str, *arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run a janitor process until the block ends."""
        command = [sys.executable, "-m", "tests.hbase.test_two_janitors", role, *arguments]
        command += ["--config", str(self.config)]
        pipe = subprocess.PIPE
        with ExitStack() as stack:
            errors = stack.enter_context(log.open("wb")) if log else pipe
            process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=errors, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            yield process

    @property
    def is_clean(self) -> bool:
        return self.orders.times() == [self.now_ms - MINUTE + number for number in range(ROWS)] and set(
            self.orders.pointers()
        ) == {-self.invalid}


def wait_while_running(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
    """Wait for a condition, or fail once the process has ended."""

    def is_true() -> Any:
        assert process.poll() is None, process.communicate()
        return condition()

    wait_until(is_true)


@pytest.mark.parametrize(("call", "workers"), [("delete", 4), ("swap", 1)], ids=["during a batch", "at the end"])
def test_janitor_resumed_after_takeover_writes_at_most_its_batches(
    hbase_tables: Tables, tmp_path: Path, call: str, workers: int
) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=workers)
    with kit.store, kit.state() as state, kit.janitor(f"pauses-before-{call}", "run", "--once", "--adopt") as first:
        wait_until(lambda: is_paused(first))
        assert state.boundary() is None
        [lost] = state.unfinished_runs()
        held = LeaseRecord.parse(state.lease())
        assert held is not None
        wait_until(lambda: time.time() > held.renewed_ms / 1000 + held.seconds)
        with kit.janitor("trusts-clocks", "run", "--once", "--format", "json") as second:
            output, errors = second.communicate(timeout=PATIENCE_SECONDS)
        assert second.returncode == 0, errors
        report = json.loads(output)
        proven, ledger, frontiers = state.boundary(), state.ledger(100), state.frontiers()
        assert proven is not None
        assert (proven.run_id, str(proven.bound)) == (report["id"], report["boundary"])
        first.send_signal(signal.SIGCONT)
        output, errors = first.communicate(timeout=PATIENCE_SECONDS)
        assert (first.returncode, "Traceback" in errors) == (4, False), errors
        assert "the lease was lost" in output
        assert errors.splitlines().count(LATE_BATCH) <= workers
        assert (state.boundary(), state.ledger(100), state.frontiers()) == (proven, ledger, frontiers)
        assert {run.id: run.result for run in state.runs(9)} == {lost.id: "lost", proven.run_id: "done"}
        assert kit.is_clean


def test_stopped_daemon_releases_its_lease(hbase_tables: Tables, tmp_path: Path) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=4)
    with kit.store, kit.state() as state, kit.janitor("unchanged", "run", "--adopt") as daemon:
        wait_while_running(daemon, lambda: [run.result for run in state.runs(1)] == ["done"])
        assert kit.is_clean
        proven, held = state.boundary(), LeaseRecord.parse(state.lease())
        assert (proven is not None, held is not None and held.holder != "") == (True, True)
        daemon.send_signal(signal.SIGTERM)
        _, errors = daemon.communicate(timeout=PATIENCE_SECONDS)
        assert daemon.returncode == 0, errors
        released = LeaseRecord.parse(state.lease())
        assert released is not None
        assert released.holder == ""


def test_killed_daemon_is_replaced_and_standby_waits(hbase_tables: Tables, tmp_path: Path) -> None:
    kit = TwoJanitorsKit(hbase_tables, tmp_path, workers=4)
    log = tmp_path / "third"
    with kit.store, kit.state() as state, kit.janitor("unchanged", "run", "--adopt") as first:
        wait_while_running(first, lambda: [run.result for run in state.runs(1)] == ["done"])
        first.kill()
        first.wait()
        with kit.janitor("unchanged", "run") as second:
            wait_while_running(second, lambda: len(state.runs(9)) == 2)
            before = LeaseRecord.parse(state.lease())
            assert before is not None
            assert f":{second.pid}:" in before.holder
            with kit.janitor("unchanged", "run", log=log) as third:
                wait_while_running(third, lambda: b"on standby" in log.read_bytes())
                third.send_signal(signal.SIGTERM)
                assert third.wait(PATIENCE_SECONDS) == 0, log.read_text()
            after = LeaseRecord.parse(state.lease())
            assert after is not None
            assert (after.holder, after.fence) == (before.holder, before.fence)


def pause_before(owner: Any, name: str, is_chosen: Callable[[Any], bool]) -> None:
    """Pause this process before a chosen call, and report each later batch on standard error."""
    lock, paused = threading.Lock(), [False]

    def watched(change: Callable[..., Any], pauses: bool) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with lock:
                if pauses and not paused[0] and is_chosen(arguments):
                    paused[0] = True
                    pause_this_process()
                if paused[0] and change.__name__ != "swap":
                    sys.stderr.write(f"{LATE_BATCH}\n")
            return change(*arguments)

        return call

    for each, change in {(HBaseTable, "delete"), (HBaseMessageTable, "invert"), (owner, name)}:
        setattr(each, change, watched(getattr(each, change), pauses=(each, change) == (owner, name)))


def main(role: str, arguments: Sequence[str]) -> int:
    """Run the command with a role.

    Args:
        role: ``unchanged``; ``trusts-clocks``: the lease of another janitor expires by the wall clock, because all
            processes have the same clock; ``pauses-before-delete`` the third batch; ``pauses-before-swap``: before the
            run ends.
    """
    leases.STANDBY_SECONDS = LEASE_SECONDS / 4
    if role == "trusts-clocks":
        lease.WALL_ALLOWANCE_MS = 0
    elif role == "pauses-before-delete":
        batches = count(1)
        pause_before(HBaseTable, "delete", lambda _: next(batches) == 3)
    elif role == "pauses-before-swap":
        # The end of a run writes the root of the state with a claim.
        pause_before(JanitorTable, "swap", lambda arguments: b'"claim"' in arguments[-1])
    return execute(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
