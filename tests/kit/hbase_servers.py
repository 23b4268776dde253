"""Servers as processes on the same HBase tables, and clients in threads that work while servers fail.

    with HBaseServers(hbase_tables, tmp_path) as servers:
        leader, follower = wait_for_leader(servers.start("a"), servers.start("b"))
        publisher = Publisher(follower)
        with working([publisher]):
            leader.pause()
            wait_for_more([publisher], 25)

Time is real, so tests wait for conditions only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any, Self

from tests.hbase.tables import Tables, write_config
from tests.server.client import Client
from tests.server.process import TMS, Serve
from tests.support import PATIENCE_SECONDS, wait_until

#: The ordinal of each server by its name; ``c`` replaces ``a``.
ORDINALS = {"a": 0, "b": 1, "c": 0}
ANY_ADDRESS = "127.0.0.1:0"


class HBaseServers:
    """Two servers on new tables, which contend for the leadership.

    Args:
        folder: the folder of the settings files.
        slots: the number of slots, which the servers share.
        source: ``transactions.source`` of the servers.
        transactions: the address of a transaction service elsewhere; None: the servers have one.
        leader: additional settings of ``server.leader``.

    Attributes:
        namespace: the namespace of the tables.
        leader: the settings ``server.leader`` of servers that start from now on.
        running: the running servers by name.
    """

    def __init__(
        self,
        tables: Tables,
        folder: Path,
        *,
        slots: int = 1,
        source: str = "none",
        transactions: str | None = None,
        **leader: object,
    ) -> None:
        self.namespace = tables.make()
        self.leader = {
            "advertise": "http://127.0.0.1:0",
            "seconds": 3,
            "fencing_delay_seconds": 1,
            "slots": slots,
            "servers": min(2, slots),
            **leader,
        }
        self.running: dict[str, Serve] = {}
        self._hbase = tables.server.settings(self.namespace, buckets=4)
        self._folder = folder
        self._slots, self._source, self._transactions = slots, source, transactions
        self._addresses: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def configure(self, name: str) -> Path:
        """Write the settings file of a server."""
        port, thrift = self._addresses.get(name, (0, self._transactions or ANY_ADDRESS))
        transactions = {
            "source": self._source,
            "thrift": thrift,
            "directory": str(self._folder / "log"),
            "snapshot_interval_seconds": 1,
        }
        server = {"port": port, "leader": {**self.leader, "ordinal": ORDINALS[name]}}
        return write_config(self._folder / f"{name}.yaml", self._hbase, transactions=transactions, server=server)

    def start(self, name: str, *tms: str) -> Serve:
        """Start a server on free ports, or start it again on its previous ports.

        Args:
            tms: the command line of ``tms``.
        """
        if name in self.running:
            self.kill(name)
        server = self.running[name] = Serve(self.configure(name), tms=tms or (str(TMS),))
        server.transactions = self._transactions or server.transactions
        self._addresses[name] = server.port, server.transactions or ANY_ADDRESS
        return server

    def kill(self, name: str) -> None:
        self.running.pop(name).__exit__()

    def wait_for_shares(self) -> None:
        """Wait until each server leads its share of the slots, or one server leads the only slot."""
        shares = [(self._slots + 1) // 2, self._slots // 2]
        names = sorted(self.running)

        def are_led() -> bool:
            led = [led_slots(self.running[name]) for name in names]
            return led == shares or (self._slots == 1 and led == shares[::-1])

        wait_until(are_led)


def read_gauge(server: Serve, name: str) -> int:
    with Client(server.port) as client:
        found = re.search(rf"^{name} (\S+)$", client.ask("GET", "/metrics").text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def led_slots(server: Serve) -> int:
    """Return the number of slots that a server leads."""
    return read_gauge(server, "tms_server_slots")


def leads_first_slot(server: Serve) -> bool:
    return read_gauge(server, "tms_server_is_leader") == 1


def wait_for_leader(one: Serve, other: Serve) -> tuple[Serve, Serve]:
    """Wait until one of two servers leads the first slot; return this server first."""
    wait_until(lambda: leads_first_slot(one) or leads_first_slot(other))
    return (one, other) if leads_first_slot(one) else (other, one)


class WorkerThread(Thread):
    """A thread that repeats :meth:`work` until it is stopped.

    Attributes:
        acknowledged: the acknowledged messages or transactions.
        stopping: set once the thread must stop.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.acknowledged: list[Any] = []
        self.stopping = Event()
        self._errors: list[Exception] = []

    def work(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.work()
        except Exception as error:  # noqa: BLE001 check() raises it in the test
            self._errors.append(error)

    def check(self) -> None:
        """Raise the error that has stopped the thread, if any."""
        for error in self._errors:
            raise error


@contextmanager
def working(workers: Sequence[WorkerThread]) -> Iterator[None]:
    """Run workers until the block ends."""
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stopping.set()
        for worker in workers:
            worker.join(PATIENCE_SECONDS)
    for worker in workers:
        assert not worker.is_alive()
        worker.check()


def wait_for_more(workers: Sequence[WorkerThread], number: int) -> None:
    """Wait until each worker has ``number`` more acknowledged messages or transactions."""
    wanted = {worker: len(worker.acknowledged) + number for worker in workers}

    def are_acknowledged() -> bool:
        for worker in workers:
            worker.check()
        return all(len(worker.acknowledged) >= count for worker, count in wanted.items())

    wait_until(are_acknowledged)


def pause_this_process() -> None:
    """Suspend this process until another process resumes it."""
    # A signal to the process may be handled by another thread, while this thread continues for a moment.
    signal.pthread_kill(get_ident(), signal.SIGSTOP)


def is_paused(process: subprocess.Popen[Any]) -> bool:
    """Return whether a child process has suspended itself since the last call; fail if it has ended."""
    pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
    assert pid == 0 or os.WIFSTOPPED(status), "the process has ended without a pause"
    return pid != 0
