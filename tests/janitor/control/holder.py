"""A process that holds a LevelDB store and serves its control socket like a daemon.

    python -m tests.janitor.control.holder NOW_MS RUNNING_MS [WATCHED]

Start it in the folder of a kit (``tests.janitor.cli.conftest``). It prints ``ready`` and then reads its standard input:
after ``sweep`` it sweeps and prints ``swept``, and at the end of the input it exits. ``WATCHED`` is an operation of the
store, such as ``message.delete``: before each, the process prints its name and waits for ``go``, or exits on ``die``.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore, Thread

from janitor.app.options import Common
from janitor.app.session import Session
from janitor.control.api import ControlBackend, Observers, ReadEngine, process_identity
from janitor.control.server import ControlServer
from janitor.report import Observer
from janitor.run.engine import Engine
from janitor.settings import config_digest
from janitor.state.base import State
from janitor.status.collect import Live, collect
from janitor.status.status import Status
from tests.builders import Call, watch
from tms_core.clock import ManualClock
from tms_core.tables.read_only import read_only


def token_hex(size: int) -> str:
    """Return the same digits in every process."""
    return "ab" * size


def print_word(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


class HolderViews:
    """The status views of the holder."""

    def __init__(self, current: Session, state: State) -> None:
        self._current = current
        self._state = state
        self._live = Live(started_ms=current.clock.now_ms(), heartbeat_ms=current.clock.now_ms())

    def status(self) -> Status:
        return collect(self._state, self._current.deployment(), self._current.clock, self._live)

    def refresh_status(self) -> None:
        print_word("refreshed")

    def sweep_now(self) -> None:
        print_word("sweeping")


@contextmanager
def locked_engine(current: Session, watched: str) -> Iterator[tuple[Engine, Semaphore]]:
    """Lock the store and serve the control socket; yield the writing engine and a semaphore for its watched calls."""
    observers, gate = Observers(), Semaphore(0)
    with current.hold_store() as store, current.place.state() as state, current.lease(state, store) as lease:
        stop = stopping_at(watched, gate)
        watch(store, before=stop)
        engine = current.engine(store, state, observer=observers, lease=lease)

        def make_reader(observer: Observer, is_stopping: Callable[[], bool]) -> ReadEngine:
            face = read_only(store)
            watch(face, before=stop)
            return current.engine(face, state, observer=observer, is_stopping=is_stopping)

        who = process_identity(store.identity(), config_digest(current.settings))
        backend = ControlBackend(engine, make_reader, HolderViews(current, state), who, observers)
        server = ControlServer(current.state_path, backend)
        server.start()
        try:
            yield engine, gate
        finally:
            server.stop()


def stopping_at(watched: str, gate: Semaphore) -> Callable[[Call], None]:
    def stop(call: Call) -> None:
        if call.name == watched:
            print_word(watched)
            gate.acquire()

    return stop


def main(now_ms: int, monotonic_ms: int, watched: str = "") -> None:
    secrets.token_hex = token_hex  # type: ignore[assignment]
    current = Session(Common(config=Path("janitor.yaml")), ManualClock(now_ms, monotonic_ms=monotonic_ms))

    def sweep(engine: Engine) -> None:
        engine.run_once()
        print_word("swept")

    with locked_engine(current, watched) as (engine, gate):
        print_word("ready")
        for line in sys.stdin:
            match line.strip():
                case "sweep":
                    Thread(target=sweep, args=(engine,)).start()
                case "go":
                    gate.release()
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
