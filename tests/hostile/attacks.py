"""Attacks on a server process, and measurements during an attack.

Each attack is a context manager that lasts as long as its block. A :class:`Watch` continuously requests ``/ping``,
publishes and polls like honest clients, and reads the memory of the server.
"""

from __future__ import annotations

import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.kit.avro import block
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import Serve
from tests.support import PATIENCE_SECONDS
from tms_core.client import Client as TmsClient
from tms_core.client.protocol.messages import encode_poll
from tms_core.transaction.rpc.client import TransactionClient

#: Topics of honest clients, of large messages, and of rows invisible to transactional readers.
HONEST, LARGE, INVISIBLE, EMPTY = "honest", "large", "invisible", "empty"
#: A poll for all messages.
EVERYTHING = b"\x04\x01\x02\x02"
#: Pause between two rounds of honest clients, in seconds.
_PAUSE_SECONDS = 0.02
#: Empty messages per request, just below 10 MB.
_EMPTY_MESSAGES = 150_000
#: A name of the maximum length in a request head, by number.
_LONG = "{:06d}" + "a" * 60_000
_PATH = "/v1/namespaces/default/topics/{}"


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) / 1024


@dataclass
class Watch:
    """Measurements of honest clients and probes during an attack.

    Args:
        server: the attacked server.
        polls: whether honest clients publish and poll.

    Attributes:
        pings: durations of ``/ping`` in seconds, each on a new connection, like a probe.
        rounds: durations of one publish and poll of an honest client, in seconds.
        failures: errors of honest clients.
        before_mb, peak_mb: memory at the start, and its maximum.
    """

    server: Serve
    polls: bool = True
    pings: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    before_mb: float = 0.0
    peak_mb: float = 0.0

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self.before_mb = self.peak_mb = anonymous_mb(self.server.process.pid)
        work = (self._ping, self._measure_memory, *([self._publish_and_poll] if self.polls else []))
        self._threads = [threading.Thread(target=self._repeat, args=(one,)) for one in work]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    @property
    def grown_mb(self) -> float:
        """The growth of memory in MB."""
        return self.peak_mb - self.before_mb

    def until(self, rounds: int) -> None:
        """Wait for ``rounds`` more honest rounds."""
        wanted, end = len(self.rounds) + rounds, time.monotonic() + PATIENCE_SECONDS
        while len(self.rounds) < wanted:
            assert time.monotonic() < end, f"honest clients make no progress: {self.failures}"
            time.sleep(0.05)

    def figures(self) -> dict[str, float]:
        """Format the measurements in milliseconds and MB."""
        return {
            "pings": len(self.pings),
            "ping_p50_ms": milliseconds(self.pings, 50),
            "ping_p99_ms": milliseconds(self.pings, 99),
            "ping_max_ms": milliseconds(self.pings, 100),
            "honest_rounds": len(self.rounds),
            "honest_p99_ms": milliseconds(self.rounds, 99),
            "failures": len(self.failures),
            "memory_before_mb": round(self.before_mb, 1),
            "memory_grown_mb": round(self.grown_mb, 1),
        }

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            try:
                work()
            except (OSError, EOFError, AssertionError) as error:
                self.failures.append(f"{work.__name__}: {error!r}")

    def _ping(self) -> None:
        began = time.monotonic()
        with Client(self.server.port) as client:
            assert client.ask("GET", "/ping").status == 200
        self.pings.append(time.monotonic() - began)

    def _publish_and_poll(self) -> None:
        with Client(self.server.port) as client:
            topic = TopicClient(client, HONEST)
            while not self._ended.wait(_PAUSE_SECONDS):
                began = time.monotonic()
                topic.publish("hello")
                assert topic.poll(limit=1) == ["hello"]
                self.rounds.append(time.monotonic() - began)

    def _measure_memory(self) -> None:
        self.peak_mb = max(self.peak_mb, anonymous_mb(self.server.process.pid))


def milliseconds(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile of durations in milliseconds."""
    if not seconds:
        return 0.0
    ranked = sorted(seconds)
    return round(ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] * 1000, 1)


# --- before an attack ------------------------------------------------------------------------------------------------


def prepare(server: Serve, *, large: int = 0, large_bytes: int = 0, invisible: int = 0, empty: int = 0) -> None:
    """Create the topics and publish the messages that attacks read.

    Args:
        large, large_bytes: number and size of large messages.
        invisible: number of rows of an invalid transaction.
        empty: number of messages without a payload.
    """
    with TmsClient(server.url, transactions=server.transactions) as client:
        for name in (HONEST, LARGE, INVISIBLE, EMPTY):
            client.create_topic(f"default:{name}")
        for _ in range(large):
            client.publish(f"default:{LARGE}", [bytes(large_bytes)])
        for first in range(0, empty, _EMPTY_MESSAGES):
            client.publish(f"default:{EMPTY}", [b""] * min(_EMPTY_MESSAGES, empty - first))
        if invisible:
            publish_invisible(server, client, invisible)


def publish_invisible(server: Serve, client: TmsClient, rows: int) -> None:
    """Publish rows that no transactional reader sees."""
    with TransactionClient(server.transactions) as service:
        transaction = service.start_short(600)
        for first in range(0, rows, _EMPTY_MESSAGES):
            count = min(_EMPTY_MESSAGES, rows - first)
            client.publish(f"default:{INVISIBLE}", [b""] * count, transaction=transaction)
        service.invalidate(transaction.transaction_id)


# --- attacks ---------------------------------------------------------------------------------------------------------


def _head(topic: str, verb: str, length: int) -> bytes:
    path = f"{_PATH.format(topic)}/{verb}"
    named = f"Host: localhost\r\nContent-Type: {AVRO}\r\nContent-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\n{named}\r\n".encode()


@contextmanager
def unfinished_bodies(port: int, count: int, size: int) -> Iterator[None]:
    """Send large publishes without the last byte; reconnect after a close."""
    body = b"\x02" + block([bytes(size - 20)])

    def attack(ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as connection:
                connection.sendall(_head(LARGE, "publish", len(body) + 1))
                for first in range(0, len(body), 1 << 20):
                    connection.sendall(body[first : first + (1 << 20)])
                    if ended.is_set():
                        return
                while not ended.wait(0.1) and _is_open(connection):
                    pass

    with _attackers([attack] * count):
        yield


@contextmanager
def gzip_bombs(port: int, count: int, size: int) -> Iterator[None]:
    """Send small bodies that inflate to large ones, one after the other."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packing.compress(b"\x02\x02" + bytes(size)) + packing.flush()

    def attack(ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(OSError, EOFError), Client(port) as client:
                headers = {"content_type": AVRO, "content_encoding": "gzip"}
                client.ask("POST", f"{_PATH.format(LARGE)}/publish", bomb, **headers)

    with _attackers([attack] * count):
        yield


@contextmanager
def json_of_objects(port: int, count: int, size: int) -> Iterator[None]:
    """Send JSON that is small as text and large as objects, one after the other."""
    body = b'{"messages": [' + b"{}," * (size // 3) + b"{}]}"

    def attack(ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(OSError, EOFError), Client(port) as client:
                client.ask("POST", f"{_PATH.format(LARGE)}/publish", body, content_type="application/json")

    with _attackers([attack] * count):
        yield


@contextmanager
def stalled_readers(port: int, count: int) -> Iterator[None]:
    """Poll all large messages and read no response; reconnect after a close."""

    def attack(ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(OSError), Client(port) as client:
                client.send("POST", f"{_PATH.format(LARGE)}/poll", EVERYTHING, content_type=AVRO)
                while not ended.wait(0.1) and _is_open(client.socket):
                    pass

    with _attackers([attack] * count):
        yield


@contextmanager
def slow_senders(port: int, count: int, every_seconds: float) -> Iterator[None]:
    """Send single bytes at intervals, half of the clients of a head, half of a body."""

    def attack(ended: threading.Event) -> None:
        with ExitStack() as stack:
            while not ended.wait(every_seconds):
                stack.close()
                for number in range(count):
                    with suppress(OSError):
                        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                        head = _head(LARGE, "publish", 1_000_000)
                        connection.sendall(head[:1] if number % 2 else head)

    with _attackers([attack]):
        yield


def abandoned_polls(server: Serve, count: int) -> tuple[float, float]:
    """Poll over all invisible rows from clients that disconnect at once.

    Returns:
        The duration of a topic request during the polls, and the time until all polls ended.
    """
    with TransactionClient(server.transactions) as service:
        view = service.start_short()
        service.abort(view)
    body = encode_poll(None, None, view, inclusive=True)
    with Client(server.port) as client:
        done = _polls_done(client)
    polls = [Client(server.port) for _ in range(count)]
    for poll in polls:
        poll.send("POST", f"{_PATH.format(INVISIBLE)}/poll", body, content_type=AVRO)
    for poll in polls:
        poll.__exit__()
    began = time.monotonic()
    with Client(server.port) as client:
        assert client.ask("GET", _PATH.format(HONEST)).status == 200
        answered = time.monotonic() - began
        while _polls_done(client) < done + count:
            assert time.monotonic() < began + PATIENCE_SECONDS
            time.sleep(0.05)
    return answered, time.monotonic() - began


def _polls_done(client: Client) -> int:
    """Return the number of finished polls, answered or abandoned."""
    page = client.ask("GET", "/metrics").text
    counts = re.findall(r'^tms_requests_total\{code="\d+",route="poll"\} (\S+)$', page, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def _is_open(connection: socket.socket) -> bool:
    """Return whether the connection is open; read no response."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _attackers(attacks: Sequence[Callable[[threading.Event], None]]) -> Iterator[None]:
    ended = threading.Event()
    threads = [threading.Thread(target=attack, args=(ended,)) for attack in attacks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)


def long_names(server: Serve, count: int) -> None:
    """Request topics with long names, and publish as producers with long names."""
    with Client(server.port) as client:
        for number in range(count):
            name = _LONG.format(number)
            assert client.ask("GET", _PATH.format(name)).status == 404
            headers = {"x_tms_producer": f"default:{HONEST}/{name}", "x_tms_generation": "1", "x_tms_sequence": "1"}
            path, body = _PATH.format(HONEST) + "/publish", b'{"messages":["a"]}'
            assert client.ask("POST", path, body, content_type="application/json", **headers).status == 400
