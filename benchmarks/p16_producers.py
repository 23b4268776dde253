"""P16 and P17: the cost of producers and of transactions for publishers, on a real server.

* **P16** The rate of producers' requests, which the server announces before it writes their rows, divided by the rate
  of plain requests: batches of 500, and single messages of one and of sixteen producers.
* **P17** The rate of the same batches in transactions of 100 ms, divided by the plain rate; one call commits a
  transaction and starts the next one. The details have the rate of a producer in transactions. Also the syncs per
  transaction with one batch, and the rate of transaction calls (start, canCommit, commit) of eight clients divided by
  the rate of bare synced appends to a file.

``docs/explanation/scale.md`` has the latest figures and the bars; put new figures there.

Clients are raw sockets, so that the benchmark measures the server. The speed of a disk varies, and LevelDB merges the
rows of all requests together. Therefore the kinds of requests take turns of a tenth of a second in random order, and a
figure is the ratio of their mean rates, with its standard error. Messages have 500 to 1,500 bytes: if all messages had
1,000 bytes, a block of LevelDB would hold five plain messages, but only four with the eight bytes of a write pointer.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from random import Random
from typing import Self, cast
from unittest.mock import patch

from benchmarks.figure import Figure, report
from benchmarks.p4_publish import connect
from tests.kit.avro import block, long
from tests.server.client import AVRO
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.client import Client
from tms_core.clock import SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import MessageKind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.rpc.connection import SocketConnection

TURNS = size("TMS_BENCH_TURNS", 500)
TURN_SECONDS = 0.1
TOPIC = "default:bench"
#: The payloads of a batch, and of a single message.
BATCH, SINGLE = [b"x" * (500 + number * 617 % 1001) for number in range(500)], [b"x" * 1000]
#: The payloads of a request, the producers, and the bar.
CASES = ((BATCH, 1, 0.95), (SINGLE, 1, 0.5), (SINGLE, 16, 0.85))
#: The bars of P17: the ratio, the syncs per transaction by number of clients, and for consecutive transactions.
COMMITTED_BAR, SYNC_BARS, IN_A_ROW_BAR = 0.97, ((1, 3), (8, 1.5)), 2
#: The factor of turns for P17, whose ratio is close to its bar and therefore needs a smaller standard error.
_TURN_FACTOR = 2
#: The warm-up turns, and the turns of transaction calls and bare appends, which take about a second each.
_WARM_UP_TURNS, _CALL_TURNS = 5, 5
_TIMEOUT_SECONDS = 30
#: The transactions whose syncs are counted, and the store's calls that sync.
TRANSACTIONS, _SYNCED = 1000, ("put", "set", "sync", "delete", "invert")
_HEAD = f"POST /v1/namespaces/default/topics/bench/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: {AVRO}\r\n"

Requests = Iterator[bytes]
#: A function that publishes for one turn and returns the number of responses.
Turn = Callable[[], int]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p16-") as folder, Serve(configure(Path(folder))) as server:
        with Client(server.url, transactions=server.transactions) as client:
            client.create_topic(TOPIC)
            for payloads, producers, bar in CASES:
                report_producers(client, server.port, payloads, producers, bar)
            report_transactions(client, server)
        server.end()
    for clients, bar in SYNC_BARS:
        with tempfile.TemporaryDirectory(prefix="p17-") as folder:
            report_syncs(Path(folder), clients, bar)


def report_producers(client: Client, port: int, payloads: list[bytes], producers: int, bar: float) -> None:
    """Report P16 for one kind of request."""
    body = b"\x02" + block(payloads) + b"\0"
    plain = [repeated_requests(body) for _ in range(producers)]
    names = [f"p{len(payloads)}-{number}" for number in range(producers)]
    numbers = [numbered_requests(body, producer_headers(client, name), count(1)) for name in names]
    with open_connections(port, producers) as connections:
        rates = compare_in_turns(
            lambda: publish(connections, plain), lambda: publish(connections, numbers), turns=TURNS
        )
    case = f"batches of {len(payloads)}" if payloads is BATCH else f"single messages of {producers} producers"
    report_ratio("P16", f"published once ÷ plain, {case}", rates, bar, len(payloads))


def report_transactions(client: Client, server: Serve) -> None:
    """Report P17: the rate in transactions."""
    payloads, sequences = block(BATCH) + b"\0", count(1)
    producer = producer_headers(client, "transactional")
    with open_connections(server.port, 1) as connections, Transactions(server.transactions) as transactions:

        def plain() -> int:
            # Build the request in each turn, as the transactional client must, so that both clients do the same work.
            return publish(connections, [repeated_requests(b"\x02" + payloads)])

        def transactional(head: str) -> int:
            body = b"\0" + long(transactions.pointer) + payloads
            responses = publish(
                connections, [numbered_requests(body, head, sequences) if head else repeated_requests(body)]
            )
            transactions.commit_and_start()
            return responses

        rates = compare_in_turns(
            plain, lambda: transactional(""), lambda: transactional(producer), turns=_TURN_FACTOR * TURNS
        )
    details = {"as_a_producer": round(ratio(rates, 2), 3)}
    report_ratio(
        "P17", "in transactions of 100 ms ÷ plain, batches of 500", rates, COMMITTED_BAR, len(BATCH), **details
    )


class Transactions:
    """Consecutive transactions of one client: the commit of each starts the next one.

    Attributes:
        pointer: the write pointer of the transaction in progress.
    """

    def __init__(self, address: str) -> None:
        self._connection = SocketConnection(address, _TIMEOUT_SECONDS)
        self.pointer = self._call(wire.message(MessageKind.CALL, "startShort", 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def commit_and_start(self) -> None:
        """Commit, and start the next transaction."""
        fields = (wire.i64(1, self.pointer), wire.string(2, "benchmark"))
        self.pointer = self._call(wire.message(MessageKind.CALL, "commitAndStart", 1, *fields))

    def _call(self, call: bytes) -> int:
        transaction = wire.read_message(self._connection.forward_call(call, _TIMEOUT_SECONDS)).fields[0]
        return int(transaction[1])


def report_syncs(folder: Path, clients: int, bar: float) -> None:
    """Report P17: the syncs of log and store per transaction with one batch, and calls ÷ bare synced appends."""
    synced, fdatasync = count(), os.fdatasync

    def counting(file: int) -> None:
        next(synced)
        fdatasync(file)

    def bare() -> float:
        started = time.perf_counter()
        with (folder / "bare").open("wb", buffering=0) as file:
            for _ in range(TRANSACTIONS):
                file.write(bytes(80))
                fdatasync(file.fileno())
        return TRANSACTIONS / (time.perf_counter() - started)

    with (
        TransactionManager(DirectoryStorage(folder / "tx"), SystemClock()) as manager,
        LevelDBStore(folder / "messaging", create=True) as store,
        MessagingService(store, SystemClock(), side=MemorySide()) as service,
        ThreadPoolExecutor(clients) as threads,
        patch.object(os, "fdatasync", counting),
    ):
        topic = TopicId("default", "bench")
        service.create_topic(topic)

        def transaction(publishes: bool) -> None:
            pointer = manager.start_short().transaction_id
            if publishes:
                service.publish(topic, SINGLE * 10, pointer=pointer)
            manager.can_commit(pointer, [b"%d" % pointer])
            manager.commit(pointer)

        def calls() -> float:
            started = time.perf_counter()
            list(threads.map(transaction, repeat(False, TRANSACTIONS)))
            return 3 * TRANSACTIONS / (time.perf_counter() - started)

        def report_count(name: str, work: Callable[[], object], bar: float) -> None:
            before = next(synced), sum(store.calls[name] for name in _SYNCED)
            work()
            after = next(synced) - 1, sum(store.calls[name] for name in _SYNCED)
            each = (sum(after) - sum(before)) / TRANSACTIONS
            report(Figure("P17", f"syncs per transaction with a batch, {name}", round(each, 2), at_most=bar))

        transaction(True)
        report_count(f"{clients} at a time", lambda: list(threads.map(transaction, repeat(True, TRANSACTIONS))), bar)
        if clients == 1:
            report_count(
                "each begun by the commit of the one before",
                lambda: run_consecutive(manager, service, topic),
                IN_A_ROW_BAR,
            )
        if clients > 1:
            rates = [(bare(), calls()) for _ in range(_CALL_TURNS + 1)][1:]
            report_ratio("P17", f"start, canCommit and commit, {clients} at a time, ÷ bare synced appends", rates, 2, 1)


def run_consecutive(manager: TransactionManager, service: MessagingService, topic: TopicId) -> None:
    """Run transactions with a batch each; the commit of one starts the next."""
    pointer = manager.start_short().transaction_id
    for _ in range(TRANSACTIONS):
        service.publish(topic, SINGLE * 10, pointer=pointer)
        manager.can_commit(pointer, [b"%d" % pointer])
        pointer = manager.commit_and_start(pointer).transaction_id


def compare_in_turns(*kinds: Turn, turns: int) -> list[tuple[float, ...]]:
    """Return the requests per second of each kind in its turns, after some warm-up turns."""
    order, random = list(enumerate(kinds)), Random(1)
    found: list[tuple[float, ...]] = []
    for _ in range(_WARM_UP_TURNS + turns):
        rates = [0.0] * len(kinds)
        random.shuffle(order)
        for index, turn in order:
            started = time.perf_counter()
            responses = turn()
            rates[index] = responses / (time.perf_counter() - started)
        found.append(tuple(rates))
    return found[_WARM_UP_TURNS:]


def ratio(rates: Sequence[tuple[float, ...]], index: int = 1) -> float:
    """Return the rate of one kind of request, divided by the plain rate."""
    return statistics.fmean(one[index] for one in rates) / statistics.fmean(one[0] for one in rates)


def error(rates: Sequence[tuple[float, ...]]) -> float:
    """Return the standard error of the ratio."""
    whole, plain = ratio(rates), statistics.fmean(one[0] for one in rates)
    return statistics.stdev(one[1] - whole * one[0] for one in rates) / plain / math.sqrt(len(rates))


def report_ratio(
    id_: str, name: str, rates: Sequence[tuple[float, ...]], bar: float, messages: int, **more: float
) -> None:
    """Report a figure, with messages per second."""
    plain, other = (round(statistics.fmean(one[index] for one in rates) * messages) for index in (0, 1))
    details = {"plain": plain, "other": other, "standard_error": round(error(rates), 4), **more}
    report(Figure(id_, name, round(ratio(rates), 3), at_least=bar, details=details))


# --- requests --------------------------------------------------------------------------------------------------------


def producer_headers(client: Client, name: str) -> str:
    """Return the headers of a new producer instance's requests."""
    with client.producer(TOPIC, name) as producer:
        return f"X-TMS-Producer: {TOPIC}/{name}\r\nX-TMS-Generation: {producer.generation}\r\n"


def repeated_requests(body: bytes) -> Requests:
    data = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
    while True:
        yield data


def numbered_requests(body: bytes, head: str, sequences: Iterator[int]) -> Requests:
    front, back = f"{_HEAD}{head}X-TMS-Sequence: ".encode(), f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for sequence in sequences:
        yield b"%s%d%s" % (front, sequence, back)


@contextmanager
def open_connections(port: int, producers: int) -> Iterator[list[socket.socket]]:
    """Yield a connection for each producer."""
    connections = [connect(port) for _ in range(producers)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def publish(connections: list[socket.socket], sources: list[Requests]) -> int:
    """Publish for one turn with one concurrent request per connection; return the number of responses."""
    ends, responses = time.perf_counter() + TURN_SECONDS, 0
    with selectors.DefaultSelector() as waiting:
        for connection, source in zip(connections, sources, strict=True):
            connection.sendall(next(source))
            waiting.register(connection, selectors.EVENT_READ, source)
        while waiting.get_map():
            for key, _ in waiting.select():
                ready = cast(socket.socket, key.fileobj)
                receive(ready)
                responses += 1
                if time.perf_counter() < ends:
                    ready.sendall(next(key.data))
                else:
                    waiting.unregister(ready)
    return responses


def receive(connection: socket.socket) -> None:
    """Read a response completely; only the response to a publish in a transaction has a body."""
    answer = connection.recv(65536)
    while (end := answer.find(b"\r\n\r\n") + 4) < 4 or len(answer) < end + length_of(answer):
        answer += connection.recv(65536)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server responded {answer!r}")


def length_of(answer: bytes) -> int:
    return int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


if __name__ == "__main__":
    main()
