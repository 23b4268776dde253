"""A program whose sweeps are killed: python -m tests.hbase.killed_sweeps THRIFT NAMESPACE STATE K ...

For each K, a child process sweeps the store with a state in the folder STATE, and is killed at its K-th Thrift call:
before the call, or for an odd K after the response. Calls of other threads may be in progress. The program prints the
end of each child: ``killed``, or ``exit-0`` if it made fewer calls. Children are forks, because forks start fast.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

from janitor.state.sqlite.state import SqliteState
from tests.hbase.sweep_kit import sweep_kit
from tests.hbase.thrift_calls import watch_calls
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.store import HBaseStore


def sweep(thrift: str, namespace: str, folder: Path, k: int) -> None:
    calls, lock = count(1), threading.Lock()

    def kill_at_k(*_: Any) -> None:
        with lock:
            if next(calls) == k:
                os.kill(os.getpid(), signal.SIGKILL)

    with HBaseStore(HBaseSettings(thrift=(thrift,), namespace=namespace)) as store, SqliteState(folder) as state:
        watch_calls(store.pool, **{"after" if k % 2 else "before": kill_at_k})
        kit = sweep_kit(store, state=state)
        kit.engine.recover()
        kit.engine.run_once(adopt=True)


def main() -> None:
    thrift, namespace, folder, *numbers = sys.argv[1:]
    for k in map(int, numbers):
        child = os.fork()
        if child == 0:
            sweep(thrift, namespace, Path(folder), k)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write("killed\n" if os.WIFSIGNALED(status) else f"exit-{os.WEXITSTATUS(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
