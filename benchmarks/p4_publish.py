"""P4: the cost of HTTP: publishes and reads through ``tms serve``, compared with bare LevelDB on the same disk.

The server is a separate process without the janitor. Clients are raw sockets that build their requests once, so that
the benchmark measures the server. Bare loops and the server take turns, because the speed of a disk varies, and each
figure is the median of the turns. A bare write is one synced batch per published batch, with rows as long as the
server's; a bare read is one iterator over such rows.

A figure's ``before`` is its value on a busy machine of two processors before the optimization that its bar requires.

CDAP's server also syncs each batch, by ``msync`` of a mapped file; warm-up turns precede the measured turns.
"""

from __future__ import annotations

import selectors
import socket
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.figure import Figure, report
from tests.interop.java import Interop
from tests.kit.avro import POLL_ALL, block
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.client.protocol.messages import encode_poll
from tms_core.clock import SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageId, MessageKey
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.codec.varint import varint
from tms_core.transaction.model import TX_PER_MS, Transaction

TURNS = size("TMS_BENCH_TURNS", 5)
TOPIC = TopicId("default", "bench")
#: The batches of 500 messages of 1 kB in a turn, and the single messages.
LARGE, SINGLE = 100, 3000
#: The concurrent producers of such batches, the bar, and the value before the optimization.
BATCH_CASES = ((1, 0.8, 0.63), (4, 1.0, 0.61))
PRODUCERS = 16
#: The requests that CDAP's server gets too (producers, messages in a request, requests), and the short turns per turn.
AGAINST_CDAP = ((1, 1, 3000), (1, 100, 1500), (PRODUCERS, 1, 6000))
SHORT_TURNS = 10
#: The messages per page of a paging reader.
_PAGE = 500
_AVRO_HEADERS = {"Content-Type": AVRO}
_PATH = f"/v1/namespaces/{TOPIC.namespace}/topics/{TOPIC.topic}"


def request(verb: str, body: bytes) -> bytes:
    head = f"POST {_PATH}/{verb} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {AVRO}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def publish_request(messages: int, length: int) -> bytes:
    return request("publish", b"\x02" + block([b"x" * length] * messages) + b"\0")


def publish(port: int, data: bytes, requests: int, producers: int) -> float:
    """Return the requests per second of several producers, each with one concurrent request."""
    with selectors.DefaultSelector() as waiting:
        connections = [connect(port) for _ in range(producers)]
        for number, connection in enumerate(connections):
            waiting.register(connection, selectors.EVENT_READ, number)
        started = time.perf_counter()
        for connection in connections:
            connection.sendall(data)
        sent, done = producers, 0
        while done < requests:
            for key, _ in waiting.select():
                connection = connections[key.data]
                answer = connection.recv(65536)
                if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")):
                    raise RuntimeError(f"the server responded {answer!r}")
                done += 1
                if sent < requests:
                    connection.sendall(data)
                    sent += 1
        seconds = time.perf_counter() - started
        for connection in connections:
            connection.close()
    return requests / seconds


def fetch(port: int, body: bytes = POLL_ALL) -> float:
    """Return the seconds of a client that discards what it reads."""
    buffer = bytearray(1 << 20)
    with connect(port) as connection:
        started = time.perf_counter()
        connection.sendall(request("poll", body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        while connection.recv_into(buffer):
            pass
        return time.perf_counter() - started


def fetch_pages(port: int, length: int) -> float:
    """Return the messages per second of a client that reads 500 at a time, each poll after the last message.

    Args:
        length: the length of each message, in bytes.
    """
    found, start = 0, None
    # The last id precedes the payload's length, the payload, and the end of the array.
    tail_bytes = len(varint(length)) + length + 1
    started = time.perf_counter()
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        while True:
            connection.request("POST", f"{_PATH}/poll", encode_poll(start, _PAGE, None, inclusive=False), _AVRO_HEADERS)
            answer = connection.getresponse().read()
            if len(answer) < tail_bytes:
                return found / (time.perf_counter() - started)
            start = MessageId.parse(answer[-tail_bytes - 20 : -tail_bytes])
            found += round(len(answer) / (tail_bytes + 20))


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class BareStore:
    """A bare LevelDB with rows as long as the server's."""

    def __init__(self, folder: Path) -> None:
        self._database = plyvel.DB(str(folder), create_if_missing=True)
        self._position = 1_700_000_000_000 << 16

    def write(self, messages: int, length: int, batches: int) -> float:
        """Return the synced batches per second."""
        value = bytes(1 + length)
        started = time.perf_counter()
        for _ in range(batches):
            batch = self._database.write_batch(sync=True)
            for _ in range(messages):
                self._position += 1
                batch.put(MessageKey(TOPIC, 1, self._position >> 16, self._position & 0xFFFF).pack(), value)
            batch.write()
        return batches / (time.perf_counter() - started)

    def read(self) -> float:
        """Return the rows per second."""
        rows = 0
        started = time.perf_counter()
        with self._database.iterator() as found:
            for _ in found:
                rows += 1
        return rows / (time.perf_counter() - started)


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """Yield the port of a server with an empty topic."""
    folder.mkdir()
    with Serve(configure(folder)) as process:
        with Client(process.port) as client:
            TopicClient(client, TOPIC.topic).create()
        yield process.port
        process.end()


def syncs_per_batch(folder: Path, batches: int = 200) -> float:
    """Return the synced writes per batch, for batches that are sent one after the other."""
    with (
        LevelDBStore(folder, create=True) as store,
        MessagingService(store, SystemClock(), side=MemorySide()) as service,
    ):
        service.create_topic(TOPIC)
        service.publish(TOPIC, [b"x"])
        writes = ("put", "set", "sync", "delete", "invert")
        before = sum(store.calls[name] for name in writes)
        for _ in range(batches):
            service.publish(TOPIC, [b"x"] * 10)
        return (sum(store.calls[name] for name in writes) - before) / batches


def compare_in_turns(
    measure: Callable[[], float], baseline: Callable[[], float], count: int = TURNS
) -> tuple[float, float, float]:
    """Return the medians of the turns' ratios and of both rates. The first turn is a warm-up."""
    pairs = [(measure(), baseline()) for _ in range(count + 1)][1:]
    ours, others = zip(*pairs, strict=True)
    return statistics.median(o / b for o, b in pairs), statistics.median(ours), statistics.median(others)


def measure_batches(scratch: Path) -> None:
    """Measure publishes of large batches, and then reads of their messages."""
    bare, data = BareStore(scratch / "bare-large"), publish_request(500, 1000)
    with server(scratch / "large") as port:
        for producers, bar, before in BATCH_CASES:
            ratio, ours, other = compare_in_turns(
                partial(publish, port, data, LARGE, producers), lambda: bare.write(500, 1000, LARGE)
            )
            details = {"before": before, "messages_per_second": round(ours * 500)}
            details["bare_messages_per_second"] = round(other * 500)
            name = f"HTTP publish, 1 kB × 500, {producers} at a time, ÷ bare synced writes"
            report(Figure("P4", name, round(ratio, 3), at_least=bar, details=details))
        rows = len(BATCH_CASES) * LARGE * (TURNS + 1) * 500
        report_read_rates("fetch ÷ bare reads", 0.5, 0.31, compare_in_turns(lambda: rows / fetch(port), bare.read))
        pages = compare_in_turns(lambda: fetch_pages(port, 1000), bare.read)
        report_read_rates(f"fetch in pages of {_PAGE} ÷ bare reads", 0.4, 0.27, pages)
    measure_transactional_reads(scratch / "transactional")


def report_read_rates(name: str, bar: float, before: float, found: tuple[float, float, float]) -> None:
    """Report the rates of readers."""
    ratio, ours, other = found
    details = {"before": before, "messages_per_second": round(ours), "beside_per_second": round(other)}
    report(Figure("P4", name, round(ratio, 3), at_least=bar, details=details))


def measure_transactional_reads(folder: Path) -> None:
    """Compare a reader in a transaction with one outside, on messages published in transactions."""
    folder.mkdir()
    pointer = SystemClock().now_ms() * TX_PER_MS
    with (
        LevelDBStore(folder / "messaging", create=True) as store,
        MessagingService(store, SystemClock(), side=MemorySide()) as service,
    ):
        service.create_topic(TOPIC)
        for number in range(2 * LARGE):
            service.publish(TOPIC, [b"x" * 1000] * 500, pointer=pointer + number)
    ended = pointer + 2 * LARGE
    reader = Transaction(ended, ended, ended, array("q"), array("q"))
    body = encode_poll(None, None, reader, inclusive=True)
    with Serve(configure(folder)) as process:
        port, rows = process.port, 2 * LARGE * 500
        pairs = compare_in_turns(lambda: rows / fetch(port, body), lambda: rows / fetch(port))
        process.end()
    report_read_rates("fetch in a transaction ÷ without", 0.8, 0.81, pairs)


def measure_singles(scratch: Path) -> None:
    """Measure single publishes, compared with bare LevelDB and, if Java is available, with CDAP's server."""
    bare, one = BareStore(scratch / "bare-single"), publish_request(1, 100)
    with server(scratch / "single") as port, cdap_server(scratch / "cdap") as cdap_port:
        ratio, ours, other = compare_in_turns(
            lambda: publish(port, one, SINGLE * 4, PRODUCERS), lambda: bare.write(1, 100, SINGLE)
        )
        details: dict[str, float] = {"before": 2.16, "messages_per_second": round(ours)}
        details["bare_messages_per_second"] = round(other)
        name = f"one by one, {PRODUCERS} producers, ÷ bare single synced writes"
        report(Figure("P4", name, round(ratio, 3), at_least=2.0, details=details))
        ratio, ours, other = compare_in_turns(lambda: publish(port, one, SINGLE, 1), lambda: bare.write(1, 100, SINGLE))
        details = {"before": 0.86, "messages_per_second": round(ours), "bare_messages_per_second": round(other)}
        report(Figure("P4", "one by one, ÷ bare single synced writes", round(ratio, 3), at_least=0.6, details=details))
        if cdap_port is not None:
            for producers, messages, requests in AGAINST_CDAP:
                compare_with_cdap(port, cdap_port, producers, messages, requests)


def compare_with_cdap(port: int, cdap_port: int, producers: int, messages: int, requests: int) -> None:
    """Measure both servers in short turns, so that both run under the same load of the machine and its disk."""
    data, share = publish_request(messages, 100), requests // SHORT_TURNS
    ratio, ours, theirs = compare_in_turns(
        lambda: publish(port, data, share, producers),
        lambda: publish(cdap_port, data, share, producers),
        TURNS * SHORT_TURNS,
    )
    details = {"messages_per_second": round(ours * messages), "cdap_messages_per_second": round(theirs * messages)}
    name = f"publish, 100 bytes × {messages}, {producers} at a time, ÷ CDAP's own server"
    report(Figure("P4", name, round(ratio, 3), details=details))


@contextmanager
def cdap_server(folder: Path) -> Iterator[int | None]:
    """Yield the port of CDAP's own server with an empty topic; None without Java."""
    java = Interop()
    if java.available():
        yield None
        return
    java.build()
    command = [*java.command("co.cask.cdap.messaging.server.MessagingServer"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        port = int(next(line for line in process.stdout if line.strip().isdigit()))
        with Client(port) as client:
            TopicClient(client, TOPIC.topic).create()
        yield port
        process.kill()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p4-") as scratch:
        measure_batches(Path(scratch))
        measure_singles(Path(scratch))
        syncs = syncs_per_batch(Path(scratch) / "syncs")
        report(Figure("P4", "synced writes per acknowledged batch", syncs, at_most=2))


if __name__ == "__main__":
    main()
