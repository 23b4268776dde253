"""Two janitors with state and lease in HBase: one is paused, the other takes over, and the first one resumes.

The first janitor is a process that pauses itself at an exact step: between two batches, before the call of a batch, or
at the end of its run between its last check of the lease and the commit. Clocks are manual.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from janitor.state.hbase.state import HBaseState
from janitor.state.hbase.table import JanitorTable
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, janitor, pointer, topic
from tests.hbase.tables import Tables
from tests.kit.hbase_servers import is_paused, pause_this_process
from tests.support import wait_until
from tms_core.clock import ManualClock
from tms_core.errors import LeaseHeld, StateBusy
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.cells import HBaseMessageTable, HBaseTable
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.lease import Lease

ROOT = Path(__file__).parents[2]
SECONDS = 60
BATCH_ROWS, BATCHES = 10, 6
INVALID = pointer(NOW_MS - DAY)
#: The steps before which the first janitor pauses, with the maximum number of its batches after the pause.
STEPS = {"check of the lease": 0, "delete": 1, "inversion": 1, "commit of the run": 0}


def open_state(thrift: str, prefix: bytes, clock: ManualClock, thrift2: Sequence[str] = ()) -> HBaseState:
    return HBaseState(
        HBaseSettings(thrift=(thrift,), thrift2=tuple(thrift2) or None, namespace="janitor_test"),
        prefix=prefix,
        clock=clock,
    )


@pytest.mark.parametrize("step", STEPS)
def test_janitor_resumed_after_lost_lease_writes_at_most_one_batch(hbase_tables: Tables, step: str) -> None:
    server, store, prefix = hbase_tables.server, hbase_tables.store(), secrets.token_bytes(4)
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with open_state(server.thrift, prefix, clock, [str(server.thrift2)]) as state:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + BATCH_ROWS * BATCHES))
        orders.tx(INVALID, *range(NOW_MS - MINUTE, NOW_MS - MINUTE + BATCH_ROWS * BATCHES))
        kit = janitor(store, state=state, clock=clock, batch_rows=BATCH_ROWS, workers=1, invalid=[INVALID]).adopt()
        arguments = [server.thrift, store.identity().rpartition(":")[2], prefix.hex(), step]
        command = [sys.executable, "-m", "tests.hbase.test_state_lease", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
            try:
                wait_until(lambda: is_paused(first))
                assert state.boundary() is None
                lease = Lease(state, "second", SECONDS, clock)
                with pytest.raises(LeaseHeld, match="first"):
                    lease.acquire()
                clock.sleep(SECONDS + 1)
                lease.acquire()
                second = kit.restart(lease=lease)
                [lost] = second.engine.recover()
                second.engine.run_once()
                proven, frontiers, ledger = state.boundary(), state.frontiers(), state.ledger(100)
                assert proven is not None
                assert proven.run_id != lost
                first.send_signal(signal.SIGCONT)
                output = json.loads(first.communicate(timeout=120)[0])
            finally:
                first.kill()
        assert output["late batches"] <= STEPS[step], output
        assert "second has" in output["error"]
        assert (state.boundary(), state.frontiers(), state.ledger(100)) == (proven, frontiers, ledger)
        assert {run.id: run.result for run in state.runs(9)} == {lost: "lost", proven.run_id: "done"}
        assert len(orders.times()) == BATCH_ROWS * BATCHES
        assert set(orders.pointers()) == {-INVALID}


class FirstJanitor:
    """A janitor that pauses itself once before a step, and counts its batches."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.batches = 0
        self.batches_before_pause: int | None = None

    def reach(self, step: str) -> None:
        if step == self.step and self.batches_before_pause is None:
            self.batches_before_pause = self.batches
            pause_this_process()

    def watch_batches(self, change: Callable[..., Any], step: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.batches:
                self.reach(step)
            self.batches += 1
            return change(*arguments)

        return call

    def watch_commit(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        def call(table: JanitorTable, key: bytes, old: bytes, new: bytes) -> Any:
            if b'"claim"' in new:
                self.reach("commit of the run")
            return swap(table, key, old, new)

        return call

    def watch_checks(self, check: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            if self.batches:
                self.reach("check of the lease")
            check()

        return call

    def sweep(self, store: HBaseStore, state: HBaseState, clock: ManualClock) -> dict[str, Any]:
        lease = Lease(state, "first", SECONDS, clock)
        lease.acquire()
        lease.check = self.watch_checks(lease.check)  # type: ignore[method-assign]
        kit = janitor(store, state=state, clock=clock, batch_rows=BATCH_ROWS, workers=1, lease=lease, invalid=[INVALID])
        kit.engine.recover()
        try:
            message = kit.engine.run_once().guards[-1].message
        except StateBusy as error:
            message = error.message
        return {"late batches": self.batches - (self.batches_before_pause or 0), "error": message}


def main(thrift: str, namespace: str, prefix: str, step: str) -> None:
    first = FirstJanitor(step)
    patches = [
        patch.object(HBaseTable, "delete", first.watch_batches(HBaseTable.delete, "delete")),
        patch.object(HBaseMessageTable, "invert", first.watch_batches(HBaseMessageTable.invert, "inversion")),
        patch.object(JanitorTable, "swap", first.watch_commit(JanitorTable.swap)),
    ]
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    store, state = (
        HBaseStore(HBaseSettings(thrift=(thrift,), namespace=namespace)),
        open_state(thrift, bytes.fromhex(prefix), clock),
    )
    with ExitStack() as stack, store, state:
        for each in patches:
            stack.enter_context(each)
        sys.stdout.write(json.dumps(first.sweep(store, state, clock)))


if __name__ == "__main__":
    main(*sys.argv[1:])
