"""A real HBase for tests and manual use: ZooKeeper, master, region servers and Thrift servers in one JVM.

A mock would only repeat our assumptions about HBase. The Java program in ``src/`` starts HBase from Maven's jars in
about five seconds, with its data in a folder. The JVM stops once no process is connected to it as a user, so a killed
test run leaves no server behind. ``make hbase`` runs this module to start an HBase for a developer.

Commands of :meth:`HBaseServer.command`, with keys in hex and ``-`` for the empty key:

===============================  ==============================================================================
``flush TABLE``                  write the memory to files
``compact TABLE``                flush, then run a major compaction to its end
``regions TABLE``                return the start keys of the regions
``split TABLE KEY``              split a region, and wait until both daughters are open
``merge TABLE KEY``              merge the region of the key with the next region
``move TABLE KEY SERVER``        move the region of the key to a region server, by number
``cycle TABLE``                  close and open all regions
``set TABLE NAME VALUE``         set a table attribute, or remove it without a VALUE
``describe TABLE``               return the master's settings of the table
``drop TABLE``                   delete the table
``disable TABLE``, ``enable``    disable or enable the table
``snapshot TABLE NAME``          take a snapshot
``restore TABLE NAME``           restore a snapshot in place
``clone TABLE NAME``             restore a snapshot as a new table
``servers``                      return ``up`` or ``down`` for each region server
``start-server``                 start a region server, and return its number
``abort-server SERVER``          crash a region server, and wait until it has ended
``restart-master``               restart the master
``start-thrift KIND PORT …``     start ``thrift`` or ``thrift2`` on a port (0: a free port) with HBase settings
                                 NAME=VALUE, and return the port
``stop-thrift PORT``             stop a Thrift server
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
#: HBase's default ports, and CDAP's namespace.
THRIFT_PORT, THRIFT2_PORT = 9090, 9091
NAMESPACE = "cdap_system"
COMMAND_SECONDS = 600.0
#: The time limit of a call in a test, in seconds: longer than any successful call.
PATIENCE_SECONDS = 240


class ServerFailed(Exception):
    """HBase did not start, or a command failed; the message contains the end of its log."""


class Address(NamedTuple):
    """The host and the ports of a server; Thrift 2 and the port for commands may be None."""

    host: str
    thrift: int
    thrift2: int | None = None
    control: int | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``HOST:THRIFT_PORT[,THRIFT2_PORT[,CONTROL_PORT]]``, the format of ``HBASE_TEST_ADDRESS``."""
        host, _, ports = text.rpartition(":")
        return cls(host, *map(int, ports.split(",")))

    def __str__(self) -> str:
        return f"{self.host}:" + ",".join(str(port) for port in self[1:] if port is not None)


class HBaseServer:
    """A running HBase.

    Args:
        folder, pid: the folder and the process of an HBase that tests have started.
    """

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

    def require_thrift2(self) -> str:
        """Return the address of Thrift 2; skip the test if it is missing."""
        if self.thrift2 is None:
            require_or_skip(f"the HBase at {self.address} has no Thrift 2")
        return self.thrift2

    @property
    def zookeeper(self) -> int:
        """Return the port of ZooKeeper for HBase's own clients; skip the test if it is unknown."""
        if self.folder is None:
            require_or_skip(
                f"the port of ZooKeeper is unknown, because tests did not start the HBase at {self.address}"
            )
        port: int = json.loads((self.folder / "ready").read_text())["zookeeper"]
        return port

    def settings(self, namespace: str, *, admin: bool = False, **options: Any) -> HBaseSettings:
        """Return the settings of clients; with ``admin`` for both interfaces."""
        given = {"thrift": (self.thrift,), "namespace": namespace, "timeout_seconds": PATIENCE_SECONDS, **options}
        return HBaseSettings(**given, thrift2=(str(self.thrift2),) if admin else None)

    def command(self, *words: str | int | bytes) -> str:
        """Run a command and return its response; skip the test if this HBase accepts no commands.

        Args:
            words: the command of the table above; bytes are sent in hex.
        """
        if self.address.control is None:
            require_or_skip(f"the HBase at {self.address}, which tests did not start, accepts no commands")
        line = " ".join((word.hex() or "-") if isinstance(word, bytes) else str(word) for word in words)
        with socket.create_connection((self.address.host, self.address.control), COMMAND_SECONDS) as connection:
            return _ask(connection, line)

    def join(self) -> None:
        """Register this process as a user, so that the server continues to run."""
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
        """Unregister this process as a user; the last user stops the server and deletes its data."""
        if self._user is None:
            return
        with self._user as user:
            self._user = None
            if int(_ask(user, "leave")) > 0 or self.pid is None:
                return
            os.kill(self.pid, signal.SIGTERM)
            # The server may be the child of another process; the kernel closes the connection once it has ended.
            while user.recv(1):
                pass
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server and wait until it has ended; :func:`start` can start it again with its data."""
        if self._user is None or self.pid is None:
            raise ServerFailed(f"tests did not start the HBase at {self.address} and cannot kill it")
        _kill(self.pid)
        self._user.close()
        self._user = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def start(folder: Path, *, region_servers: int = 1, properties: Mapping[str, str] | None = None) -> HBaseServer:
    """Start a server and register this process as its user."""
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
    server = server_of(folder)
    server.join()
    return server


def server_of(folder: Path) -> HBaseServer:
    """Return the server that was started with a folder, without a registration."""
    ready = json.loads((folder / "ready").read_text())
    address = Address("127.0.0.1", ready["thrift"], ready["thrift2"], ready["control"])
    return HBaseServer(address, folder, ready["pid"])


class ThriftProcess:
    """A Thrift 1 server in a separate JVM, which tests can kill and pause without harm to HBase."""

    def __init__(self, server: HBaseServer, port: int = 0) -> None:
        if server.folder is None:
            raise ServerFailed(f"tests did not start the HBase at {server.address} and cannot add a Thrift server")
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
    # Without --add-opens, HBase logs warnings and reads files in another way.
    options = [f"-Xmx{heap}", *SHORT_LIVED, "--add-opens=java.base/java.nio=ALL-UNNAMED"]
    command = ["java", *options, "-cp", class_path, *words]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    # Reaps the JVM if it ends before this process.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def _ask(connection: socket.socket, line: str) -> str:
    connection.settimeout(COMMAND_SECONDS)
    connection.sendall(line.encode() + b"\n")
    with connection.makefile("rb") as answers:
        answer = answers.readline().decode().rstrip("\n")
    if not answer.startswith("OK"):
        raise ServerFailed(f"{line}: {answer or 'the server has ended'}")
    return answer[2:].strip()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # ProcessLookupError: the process has ended between the open and the read.
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
def at_default_ports(
    server: HBaseServer, thrift: int = THRIFT_PORT, thrift2: int = THRIFT2_PORT
) -> Iterator[HBaseServer]:
    """Run additional Thrift servers on fixed ports until the block ends."""
    wanted = (("thrift", thrift), ("thrift2", thrift2))
    first, second = (int(server.command("start-thrift", kind, port)) for kind, port in wanted)
    address = Address(server.address.host, first, second, server.address.control)
    try:
        yield HBaseServer(address, server.folder, server.pid)
    finally:
        for port in (first, second):
            server.command("stop-thrift", port)


@click.command()
@click.option("--fill", type=click.IntRange(min=0), default=0, help="Create CDAP's tables with this many messages.")
def main(fill: int) -> None:
    """Start a server for a developer and print its addresses; Ctrl-C stops it."""
    if reason := maven.missing():
        raise SystemExit(reason)
    click.echo("starting HBase (the first time, Maven downloads about 75 MB)")
    with (
        tempfile.TemporaryDirectory(prefix="tms-hbase-") as folder,
        start(Path(folder)) as started,
        at_default_ports(started) as server,
    ):
        if fill:
            from tests.hbase.tables import fill_tables  # noqa: PLC0415 it imports this module

            click.echo(f"filling the tables of {NAMESPACE} with {fill_tables(server, NAMESPACE, fill):,} messages")
        click.echo(
            f"""HBase is running with its data in {folder}
  Thrift 1        {server.thrift}
  Thrift 2        {server.thrift2}
  create tables   .venv/bin/tms admin create-tables --thrift2 {server.thrift2}
  plan a sweep    .venv/bin/janitor plan --hbase {server.thrift}
  run tests       HBASE_TEST_ADDRESS={server.address} make test
Ctrl-C stops HBase and deletes its data."""
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            click.echo("\nstopping")


if __name__ == "__main__":
    main()
