"""P16 and P17: what it costs to publish once, and in transactions, through a real server.

* **P16** requests of producers, whose numbers are written down before their rows, beside plain ones: batches of 500,
  and single messages of one and of sixteen producers.
* **P17** the same batches in transactions of 100 ms each, beside plain ones; the call that commits one begins the next.
  Beside it, in its details, the same as a producer. Also how many syncs a transaction with one batch costs, and how
  many calls of a transaction (start, canCommit, commit) eight clients get done in the time of a bare synced append to
  a log.

What was measured last is in ``docs/explanation/scale.md``, with the bars; put new figures there.

Clients are raw sockets, so that what is measured is the server. A disk is not always as fast, and LevelDB merges for
plain and other requests together, so they take turns of a tenth of a second, in random order, and a figure is the ratio
of what all turns of each came to, with its standard error. Messages have from 500 to 1,500 bytes: were all of 1,000,
five plain ones would fit into a block of LevelDB, but only four of those that have eight bytes more for their
transaction.
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
from tests.server.client import AVRO
from tests.server.process import Serve, configure
from tests.server.test_avro import block, long
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
from tms_core.transaction.rpc.line import SocketConnection

TURNS = size("TMS_BENCH_TURNS", 500)
TURN_SECONDS = 0.1
TOPIC = "default:bench"
#: The payloads of a batch, and a single one, in bytes.
BATCH, SINGLE = [b"x" * (500 + number * 617 % 1001) for number in range(500)], [b"x" * 1000]
#: Messages in a request, producers, and the bar.
CASES = ((BATCH, 1, 0.95), (SINGLE, 1, 0.5), (SINGLE, 16, 0.85))
#: Of publishing in transactions; of syncs for one, by how many clients there are; and of those in a row.
COMMITTED_BAR, SYNC_BARS, IN_A_ROW_BAR = 0.97, ((1, 3), (8, 1.5)), 2
#: How many times as many turns those in transactions take, which come close to their bar.
_MORE_TURNS = 2
#: Turns that do not count, and turns of calls beside bare appends, which take about a second each.
_WARMING, _CALL_TURNS = 5, 5
_TIMEOUT_SECONDS = 30
#: Transactions of which the syncs are counted, and the store's calls that sync.
TRANSACTIONS, _SYNCED = 1000, ("put", "set", "sync", "delete", "invert")
_HEAD = f"POST /v1/namespaces/default/topics/bench/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: {AVRO}\r\n"

Requests = Iterator[bytes]
#: Publishes for one turn; returns how many requests were answered.
Turn = Callable[[], int]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p16-") as folder, Serve(configure(Path(folder))) as server:
        with Client(server.url, transactions=server.transactions) as client:
            client.create_topic(TOPIC)
            for payloads, producers, bar in CASES:
                once(client, server.port, payloads, producers, bar)
            in_transactions(client, server)
        server.end()
    for clients, bar in SYNC_BARS:
        with tempfile.TemporaryDirectory(prefix="p17-") as folder:
            syncs(Path(folder), clients, bar)


def once(client: Client, port: int, payloads: list[bytes], producers: int, bar: float) -> None:
    """P16."""
    body = b"\x02" + block(payloads) + b"\0"
    plain = [repeated(body) for _ in range(producers)]
    names = [f"p{len(payloads)}-{number}" for number in range(producers)]
    numbers = [numbered(body, said(client, name), count(1)) for name in names]
    with connected(port, producers) as connections:
        rates = compared(lambda: publish(connections, plain), lambda: publish(connections, numbers), turns=TURNS)
    what = f"batches of {len(payloads)}" if payloads is BATCH else f"single messages of {producers} producers"
    tell("P16", f"published once ÷ plain, {what}", rates, bar, len(payloads))


def in_transactions(client: Client, server: Serve) -> None:
    """P17."""
    payloads, sequences = block(BATCH) + b"\0", count(1)
    producer = said(client, "transactional")
    with connected(server.port, 1) as connections, Transactions(server.transactions) as transactions:

        def plain() -> int:
            # Made anew as often as those in transactions are, so that the client has the same to do.
            return publish(connections, [repeated(b"\x02" + payloads)])

        def transactional(head: str) -> int:
            body = b"\0" + long(transactions.pointer) + payloads
            answered = publish(connections, [numbered(body, head, sequences) if head else repeated(body)])
            transactions.go_on()
            return answered

        rates = compared(plain, lambda: transactional(""), lambda: transactional(producer), turns=_MORE_TURNS * TURNS)
    details = {"as_a_producer": round(ratio(rates, 2), 3)}
    tell("P17", "in transactions of 100 ms ÷ plain, batches of 500", rates, COMMITTED_BAR, len(BATCH), **details)


class Transactions:
    """Transactions of which the commit of one begins the next.

    Attributes:
        pointer: the write pointer of the one in progress.
    """

    def __init__(self, address: str) -> None:
        self._connection = SocketConnection(address, _TIMEOUT_SECONDS)
        self.pointer = self._begun(wire.message(MessageKind.CALL, "startShort", 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def go_on(self) -> None:
        """Commit, and start the next transaction."""
        fields = (wire.i64(1, self.pointer), wire.string(2, "benchmark"))
        self.pointer = self._begun(wire.message(MessageKind.CALL, "commitAndStart", 1, *fields))

    def _begun(self, call: bytes) -> int:
        transaction = wire.read_message(self._connection.pass_on(call, _TIMEOUT_SECONDS)).fields[0]
        return int(transaction[1])


def syncs(folder: Path, clients: int, bar: float) -> None:
    """P17: syncs of the log and of the store per transaction with one batch, and calls beside bare synced appends."""
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

        def counted(name: str, work: Callable[[], object], bar: float) -> None:
            before = next(synced), sum(store.calls[name] for name in _SYNCED)
            work()
            after = next(synced) - 1, sum(store.calls[name] for name in _SYNCED)
            each = (sum(after) - sum(before)) / TRANSACTIONS
            report(Figure("P17", f"syncs per transaction with a batch, {name}", round(each, 2), at_most=bar))

        transaction(True)
        counted(f"{clients} at a time", lambda: list(threads.map(transaction, repeat(True, TRANSACTIONS))), bar)
        if clients == 1:
            counted(
                "each begun by the commit of the one before", lambda: in_a_row(manager, service, topic), IN_A_ROW_BAR
            )
        if clients > 1:
            rates = [(bare(), calls()) for _ in range(_CALL_TURNS + 1)][1:]
            tell("P17", f"start, canCommit and commit, {clients} at a time, ÷ bare synced appends", rates, 2, 1)


def in_a_row(manager: TransactionManager, service: MessagingService, topic: TopicId) -> None:
    """Run transactions with a batch each; the commit of one starts the next."""
    pointer = manager.start_short().transaction_id
    for _ in range(TRANSACTIONS):
        service.publish(topic, SINGLE * 10, pointer=pointer)
        manager.can_commit(pointer, [b"%d" % pointer])
        pointer = manager.commit_and_start(pointer).transaction_id


def compared(*kinds: Turn, turns: int) -> list[tuple[float, ...]]:
    """Return the requests per second of each kind in its turns, after some warm-up turns."""
    order, random = list(enumerate(kinds)), Random(1)
    found: list[tuple[float, ...]] = []
    for _ in range(_WARMING + turns):
        rates = [0.0] * len(kinds)
        random.shuffle(order)
        for at, turn in order:
            started = time.perf_counter()
            answered = turn()
            rates[at] = answered / (time.perf_counter() - started)
        found.append(tuple(rates))
    return found[_WARMING:]


def ratio(rates: Sequence[tuple[float, ...]], at: int = 1) -> float:
    """Return the rate of one kind relative to the plain one."""
    return statistics.fmean(one[at] for one in rates) / statistics.fmean(one[0] for one in rates)


def error(rates: Sequence[tuple[float, ...]]) -> float:
    """Return the standard error of the ratio."""
    whole, plain = ratio(rates), statistics.fmean(one[0] for one in rates)
    return statistics.stdev(one[1] - whole * one[0] for one in rates) / plain / math.sqrt(len(rates))


def tell(id_: str, name: str, rates: Sequence[tuple[float, ...]], bar: float, messages: int, **more: float) -> None:
    """Report a figure, with messages per second."""
    plain, other = (round(statistics.fmean(one[at] for one in rates) * messages) for at in (0, 1))
    details = {"plain": plain, "other": other, "standard_error": round(error(rates), 4), **more}
    report(Figure(id_, name, round(ratio(rates), 3), at_least=bar, details=details))


# --- requests --------------------------------------------------------------------------------------------------------


def said(client: Client, name: str) -> str:
    """Return the headers of a new producer instance's requests."""
    with client.producer(TOPIC, name) as producer:
        return f"X-TMS-Producer: {TOPIC}/{name}\r\nX-TMS-Generation: {producer.generation}\r\n"


def repeated(body: bytes) -> Requests:
    data = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
    while True:
        yield data


def numbered(body: bytes, head: str, sequences: Iterator[int]) -> Requests:
    front, back = f"{_HEAD}{head}X-TMS-Sequence: ".encode(), f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    for sequence in sequences:
        yield b"%s%d%s" % (front, sequence, back)


@contextmanager
def connected(port: int, producers: int) -> Iterator[list[socket.socket]]:
    """Yield a connection for each producer."""
    connections = [connect(port) for _ in range(producers)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def publish(connections: list[socket.socket], sources: list[Requests]) -> int:
    """Publish for one turn, with one request of each connection under way at a time; returns how many."""
    ends, answered = time.perf_counter() + TURN_SECONDS, 0
    with selectors.DefaultSelector() as waiting:
        for connection, source in zip(connections, sources, strict=True):
            connection.sendall(next(source))
            waiting.register(connection, selectors.EVENT_READ, source)
        while waiting.get_map():
            for key, _ in waiting.select():
                ready = cast(socket.socket, key.fileobj)
                receive(ready)
                answered += 1
                if time.perf_counter() < ends:
                    ready.sendall(next(key.data))
                else:
                    waiting.unregister(ready)
    return answered


def receive(connection: socket.socket) -> None:
    """Read an answer to its end; that of a publish in a transaction has a body."""
    answer = connection.recv(65536)
    while (end := answer.find(b"\r\n\r\n") + 4) < 4 or len(answer) < end + length_of(answer):
        answer += connection.recv(65536)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server said {answer!r}")


def length_of(answer: bytes) -> int:
    return int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


if __name__ == "__main__":
    main()
