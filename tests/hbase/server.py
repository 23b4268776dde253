"""A real HBase for tests and manual use: ZooKeeper, master, region servers and Thrift servers in one JVM.

A mock of HBase would prove what we believe about HBase. ``src/`` holds the small Java program that starts the real one
from Maven's jars, in about five seconds, with its data in a folder of the caller's. It lives as long as somebody is
connected to it as a user, so that a test run that was killed leaves no server behind.

``python -m tests.hbase.server`` (``make hbase``) starts one for a person.

What :meth:`HBaseServer.command` takes (keys in hex, ``-`` for the empty one):

===============================  ==============================================================================
``flush TABLE``                  memory to files
``compact TABLE``                flush, then a major compaction; returns when it is over
``regions TABLE``                the regions' start keys
``split TABLE KEY``              returns when both daughters are open
``merge TABLE KEY``              the region of the key with the one behind it
``move TABLE KEY SERVER``        the region of the key to another region server, by number
``cycle TABLE``                  close and open all regions
``set TABLE NAME VALUE``         a table attribute; without VALUE it is removed
``describe TABLE``               the table's settings as the master has them
``drop TABLE``
``disable TABLE``, ``enable``
``snapshot TABLE NAME``
``restore TABLE NAME``           a snapshot, in place
``clone TABLE NAME``             a snapshot, as a new table
``servers``                      ``up`` or ``down`` for each region server
``start-server``                 one more; answers its number
``abort-server SERVER``          as if it had crashed; returns when it has ended
``restart-master``
``start-thrift KIND PORT …``     ``thrift`` or ``thrift2``; port 0: a free one; more HBase settings as NAME=VALUE;
                                 answers the port
``stop-thrift PORT``
===============================  ==============================================================================
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import click

from tests import maven
from tests.interop.java import SHORT_LIVED
from tests.support import is_listening, require_or_skip
from tms_core.settings.models import HBaseSettings

HERE = Path(__file__).parent
START_SECONDS = 300.0
#: HBase's usual ports, and CDAP's namespace.
THRIFT_PORT, THRIFT2_PORT = 9090, 9091
NAMESPACE = "cdap_system"
COMMAND_SECONDS = 600.0
#: The time limit of a call in a test; a longer call never returns.
PATIENCE_SECONDS = 240


class ServerFailed(Exception):
    """HBase did not start, or did not do what it was told; the text carries the end of its log."""


class Address(NamedTuple):
    """Where a server listens; the last two are None where it does not."""

    host: str
    thrift: int
    thrift2: int | None = None
    control: int | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:THRIFT_PORT[,THRIFT2_PORT[,CONTROL_PORT]]``, as ``HBASE_TEST_ADDRESS`` holds it."""
        host, _, ports = text.rpartition(":")
        return cls(host, *map(int, ports.split(",")))

    def __str__(self) -> str:
        return f"{self.host}:" + ",".join(str(port) for port in self[1:] if port is not None)


class HBaseServer:
    """A running server as seen by one of its users."""

    def __init__(self, address: Address, folder: Path | None = None, pid: int | None = None) -> None:
        self.address = address
        self.folder = folder
        self.pid = pid
        self._user: socket.socket | None = None

    @property
    def thrift(self) -> str:
        return f"{self.address.host}:{self.address.thrift}"

    @property
    def thrift2(self) -> str | None:
        return None if self.address.thrift2 is None else f"{self.address.host}:{self.address.thrift2}"

    @property
    def zookeeper(self) -> int:
        """Return the port of ZooKeeper for HBase's own clients; skip the test if it is unknown."""
        if self.folder is None:
            require_or_skip(
                f"the ZooKeeper of the HBase at {self.address} is not known, as that of one is which tests start"
            )
        port: int = json.loads((self.folder / "ready").read_text())["zookeeper"]
        return port

    def settings(self, namespace: str, *, admin: bool = False, **options: Any) -> HBaseSettings:
        """Return the settings of clients; with ``admin`` for both interfaces."""
        given = {"thrift": (self.thrift,), "namespace": namespace, "timeout_seconds": PATIENCE_SECONDS, **options}
        return HBaseSettings(**given, thrift2=(str(self.thrift2),) if admin else None)

    def command(self, *words: str | int | bytes) -> str:
        """Have the server do something, or leave the test where it takes no commands; bytes are written in hex."""
        if self.address.control is None:
            require_or_skip(f"the HBase at {self.address} takes no commands, as one does that the tests start")
        line = " ".join((word.hex() or "-") if isinstance(word, bytes) else str(word) for word in words)
        with socket.create_connection((self.address.host, self.address.control), COMMAND_SECONDS) as connection:
            return _ask(connection, line)

    def join(self) -> None:
        """Become one of its users: it stays while there is one."""
        if self.address.control is None:
            return
        user = socket.create_connection((self.address.host, self.address.control), COMMAND_SECONDS)
        try:
            _ask(user, "join")
        except BaseException:
            user.close()
            raise
        self._user = user

    def leave(self) -> None:
        """Stop being a user; the last one stops the server and removes its data."""
        if self._user is None:
            return
        with self._user as user:
            self._user = None
            if int(_ask(user, "leave")) > 0 or self.pid is None:
                return
            os.kill(self.pid, signal.SIGTERM)
            # The kernel closes the connection when the process is gone, whoever its parent is.
            while user.recv(1):
                pass
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server and wait until it has ended. Its data stays, for :func:`start`."""
        if self._user is None or self.pid is None:
            raise ServerFailed(f"the HBase at {self.address} is not ours to kill")
        _kill(self.pid)
        self._user.close()
        self._user = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def start(folder: Path, *, region_servers: int = 1, properties: Mapping[str, str] | None = None) -> HBaseServer:
    """Start a server and become its user."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    settings = [f"{name}={value}" for name, value in (properties or {}).items()]
    pid = _java(["fixture.Main", str(folder), str(region_servers), *settings], folder / "log")
    deadline = time.monotonic() + START_SECONDS
    try:
        while not (folder / "ready").exists():
            if not _is_alive(pid) or time.monotonic() > deadline:
                raise ServerFailed(f"HBase did not start:\n{_tail(folder / 'log')}")
            time.sleep(0.05)
    except BaseException:
        _kill(pid)
        raise
    server = of_folder(folder)
    server.join()
    return server


def of_folder(folder: Path) -> HBaseServer:
    """Return the server that was started on ``folder``, without becoming its user."""
    ready = json.loads((folder / "ready").read_text())
    address = Address("127.0.0.1", ready["thrift"], ready["thrift2"], ready["control"])
    return HBaseServer(address, folder, ready["pid"])


class ThriftProcess:
    """A Thrift 1 server in a JVM of its own, to be killed, stopped and started again without harm to HBase."""

    def __init__(self, server: HBaseServer, port: int = 0) -> None:
        if server.folder is None:
            raise ServerFailed(f"the HBase at {server.address} is not ours to add a Thrift server to")
        self.port = port or _free_port()
        self._log = server.folder / f"thrift-{self.port}.log"
        self._conf = server.folder / "conf"
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server on the same port and wait until it listens."""
        words = ["org.apache.hadoop.hbase.thrift.ThriftServer", "-b", "127.0.0.1", "-p", str(self.port)]
        self.pid = _java([*words, "--infoport", "-1", "start"], self._log, first=[self._conf])
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if not _is_alive(self.pid) or time.monotonic() > deadline:
                _kill(self.pid)
                raise ServerFailed(f"Thrift did not start:\n{_tail(self._log)}")
            time.sleep(0.05)

    def kill(self) -> None:
        _kill(self.pid)

    def pause(self) -> None:
        """Suspend the server: connections stay open without responses."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _java(words: Sequence[str], log: Path, first: Sequence[Path] = ()) -> int:
    """Start a JVM that outlives this process, and return its process id."""
    class_path = ":".join(map(str, [*first, *maven.build(HERE)]))
    heap = os.environ.get("HBASE_TEST_HEAP", "1g")
    # Without this flag HBase warns about reads it then does another way.
    command = [
        "java",
        f"-Xmx{heap}",
        *SHORT_LIVED,
        "--add-opens=java.base/java.nio=ALL-UNNAMED",
        "-cp",
        class_path,
        *words,
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    # Reaped here if it dies first; otherwise it is the system's.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def _ask(connection: socket.socket, line: str) -> str:
    connection.settimeout(COMMAND_SECONDS)
    connection.sendall(line.encode() + b"\n")
    with connection.makefile("rb") as answers:
        answer = answers.readline().decode().rstrip("\n")
    if not answer.startswith("OK"):
        raise ServerFailed(f"{line}: {answer or 'the server is gone'}")
    return answer[2:].strip()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # The second where it ends between opening and reading.
        return False


def _kill(pid: int) -> None:
    if _is_alive(pid):
        os.kill(pid, signal.SIGKILL)
    while _is_alive(pid):
        time.sleep(0.01)


def _free_port() -> int:
    """Return a port outside the range that the system assigns to connections."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("\tat ")]
    return "\n".join(lines[-20:])


@contextmanager
def at_usual_ports(
    server: HBaseServer, thrift: int = THRIFT_PORT, thrift2: int = THRIFT2_PORT
) -> Iterator[HBaseServer]:
    """Serve at fixed ports while the block runs."""
    wanted = (("thrift", thrift), ("thrift2", thrift2))
    first, second = (int(server.command("start-thrift", kind, port)) for kind, port in wanted)
    address = Address(server.address.host, first, second, server.address.control)
    try:
        yield HBaseServer(address, server.folder, server.pid)
    finally:
        for port in (first, second):
            server.command("stop-thrift", port)


@click.command()
@click.option("--fill", type=click.IntRange(min=0), default=0, help="Make CDAP's tables with so many messages in them.")
def main(fill: int) -> None:
    """Start a server for a developer and say how to reach it; Ctrl-C stops it."""
    if reason := maven.missing():
        raise SystemExit(reason)
    click.echo("starting HBase (the first time Maven fetches about 75 MB)")
    with (
        tempfile.TemporaryDirectory(prefix="tms-hbase-") as folder,
        start(Path(folder)) as started,
        at_usual_ports(started) as server,
    ):
        if fill:
            from tests.hbase.tables import fill_tables  # noqa: PLC0415 it imports this module

            click.echo(f"filling the tables of {NAMESPACE} with {fill_tables(server, NAMESPACE, fill):,} messages")
        click.echo(
            f"""HBase is up, with its data in {folder}
  Thrift 1      {server.thrift}
  Thrift 2      {server.thrift2}
  make tables   .venv/bin/tms admin create-tables --thrift2 {server.thrift2}
  clean them    .venv/bin/janitor plan --hbase {server.thrift}
  in tests      HBASE_TEST_ADDRESS={server.address} make test
Ctrl-C stops it and removes its data."""
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            click.echo("\nstopping")


if __name__ == "__main__":
    main()
