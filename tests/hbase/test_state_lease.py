"""Two janitor processes with state and lease in HBase: one is suspended, the other takes over, the first resumes.

The first one stops itself, so that the moment is exact: between two batches, when the call of a batch is about to
begin, and in the end of its run between its last look at the lease and the commit. Time passes on manual clocks only.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
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
MOMENTS = {
    "between batches": 0,
    "a batch is about to begin": 1,
    "an inversion is about to begin": 1,
    "the end is about to be written": 0,
}


def open_state(thrift: str, prefix: bytes, clock: ManualClock, thrift2: Sequence[str] = ()) -> HBaseState:
    return HBaseState(
        HBaseSettings(thrift=(thrift,), thrift2=tuple(thrift2) or None, namespace="janitor_test"),
        prefix=prefix,
        clock=clock,
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_janitor_resumed_after_lost_lease_writes_at_most_one_batch(hbase_tables: Tables, moment: str) -> None:
    server, store, prefix = hbase_tables.server, hbase_tables.store(), secrets.token_bytes(4)
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with open_state(server.thrift, prefix, clock, [str(server.thrift2)]) as state:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + BATCH_ROWS * BATCHES))
        orders.tx(INVALID, *range(NOW_MS - MINUTE, NOW_MS - MINUTE + BATCH_ROWS * BATCHES))
        kit = janitor(store, state=state, clock=clock, batch_rows=BATCH_ROWS, workers=1)
        kit.snapshots.invalid = [INVALID]
        kit.engine.adopt()
        words = [server.thrift, store.identity().rpartition(":")[2], prefix.hex(), moment]
        command = [sys.executable, "-m", "tests.hbase.test_state_lease", *words]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
            try:
                assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1]), "it ended before it came to that moment"
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
        assert output["after"] <= MOMENTS[moment], output
        assert "second has" in output["ended"]
        assert (state.boundary(), state.frontiers(), state.ledger(100)) == (proven, frontiers, ledger)
        assert {run.id: run.result for run in state.runs(9)} == {lost: "lost", proven.run_id: "done"}
        assert len(orders.times()) == BATCH_ROWS * BATCHES
        assert set(orders.pointers()) == {-INVALID}


class FirstJanitor:
    """A janitor that stops itself once at the named step and counts its batches."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.written = 0
        self.stopped_at: int | None = None

    def at(self, moment: str) -> None:
        if moment == self.moment and self.stopped_at is None:
            self.stopped_at = self.written
            # To this thread, which then does nothing more; sent to the process, another one would get it first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def counted(self, change: Callable[..., Any], moment: str) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            if self.written:
                self.at(moment)
            self.written += 1
            return change(*arguments)

        return counting

    def committed(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        def committing(table: JanitorTable, key: bytes, old: bytes, new: bytes) -> Any:
            if b'"claim"' in new:
                self.at("the end is about to be written")
            return swap(table, key, old, new)

        return committing

    def checked(self, check: Callable[[], None]) -> Callable[[], None]:
        def checking() -> None:
            if self.written:
                self.at("between batches")
            check()

        return checking

    def sweep(self, store: HBaseStore, state: HBaseState, clock: ManualClock) -> dict[str, Any]:
        lease = Lease(state, "first", SECONDS, clock)
        lease.acquire()
        lease.check = self.checked(lease.check)  # type: ignore[method-assign]
        kit = janitor(store, state=state, clock=clock, batch_rows=BATCH_ROWS, workers=1, lease=lease)
        kit.snapshots.invalid = [INVALID]
        kit.engine.recover()
        try:
            ended = kit.engine.run_once().guards[-1].message
        except StateBusy as error:
            ended = error.message
        return {"after": self.written - (self.stopped_at or 0), "ended": ended}


def main(thrift: str, namespace: str, prefix: str, moment: str) -> None:
    first = FirstJanitor(moment)
    patches = [
        patch.object(HBaseTable, "delete", first.counted(HBaseTable.delete, "a batch is about to begin")),
        patch.object(
            HBaseMessageTable, "invert", first.counted(HBaseMessageTable.invert, "an inversion is about to begin")
        ),
        patch.object(JanitorTable, "swap", first.committed(JanitorTable.swap)),
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
