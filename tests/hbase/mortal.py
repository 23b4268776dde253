"""A process that sweeps and dies, for ``test_faults.py``: python -m tests.hbase.mortal THRIFT NAMESPACE STATE K ...

For each K a child of this process, forked from it and so quickly made, sweeps the scene's store with a state in the
folder STATE and is killed at its K-th Thrift call: before it, or for an odd K after the answer has come. Other threads
are in the midst of calls by then. It prints how each child ended: ``killed``, or ``exit-0`` where K was not reached.
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
from tests.hbase.moments import watch_calls
from tests.hbase.scene import sweeper
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.store import HBaseStore


def sweep(thrift: str, namespace: str, folder: Path, k: int) -> None:
    calls, lock = count(1), threading.Lock()

    def tick(*_: Any) -> None:
        with lock:
            if next(calls) == k:
                os.kill(os.getpid(), signal.SIGKILL)

    with HBaseStore(HBaseSettings(thrift=(thrift,), namespace=namespace)) as store, SqliteState(folder) as state:
        watch_calls(store.pool, **{"after" if k % 2 else "before": tick})
        kit = sweeper(store, state=state)
        kit.engine.recover()
        kit.engine.run_once(adopt=True)


def main() -> None:
    thrift, namespace, folder, *moments = sys.argv[1:]
    for k in map(int, moments):
        child = os.fork()
        if child == 0:
            sweep(thrift, namespace, Path(folder), k)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write("killed\n" if os.WIFSIGNALED(status) else f"exit-{os.WEXITSTATUS(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
