"""P16 and P17: what it costs to publish once, and in transactions, through a real server.

* **P16** requests of producers, whose numbers are written down before their rows, beside plain ones: batches of 500,
  and single messages of one and of sixteen producers.
* **P17** the same batches in transactions of 100 ms each, beside plain ones: begun, published in and committed. Beside
  it, in its details, the same as a producer. Also how many syncs a transaction with one batch costs, and how many calls
  of a transaction (start, canCommit, commit) eight clients get done in the time of a bare synced append to a log.

What was measured last is in ``docs/scale.md``, with the bars; put new figures there.

Clients are raw sockets, so that what is measured is the server; plain and other requests take turns, since disks have
moods, and a figure is the median of the turns' ratios.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat
from pathlib import Path
from unittest.mock import patch

from benchmarks.figure import Figure, report
from benchmarks.p4_publish import connect
from tests.server.client import AVRO
from tests.server.process import Serve, configure
from tests.server.test_avro import block, long
from tests.support import size
from tms_core.client import Client, TransactionClient
from tms_core.clock import SystemClock
from tms_core.messaging.service import MessagingService
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage

TURNS = size("TMS_BENCH_TURNS", 5)
TOPIC, BYTES = "default:bench", 1000
#: Messages in a request, producers, requests of a turn, and the bar.
CASES = ((500, 1, 150, 0.95), (1, 1, 2000, 0.5), (1, 16, 6000, 0.85))
#: Of publishing in transactions; and of syncs for one, by how many clients there are.
COMMITTED_BAR, SYNC_BARS = 0.97, ((1, 3), (8, 1.5))
COMMIT_SECONDS = 0.1
#: Transactions of which the syncs are counted, and the store's calls that sync.
TRANSACTIONS, _SYNCED = 1000, ("put", "set", "sync", "delete", "invert")
_HEAD = f"POST /v1/namespaces/default/topics/bench/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: {AVRO}\r\n"

Requests = Iterator[bytes]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p16-") as folder, Serve(configure(Path(folder))) as server:
        with Client(server.url, transactions=server.transactions) as client:
            client.create_topic(TOPIC)
            for messages, producers, requests, bar in CASES:
                once(client, server.port, messages, producers, requests, bar)
            with TransactionClient(server.transactions) as service:
                in_transactions(client, server.port, service)
        server.end()
    for clients, bar in SYNC_BARS:
        with tempfile.TemporaryDirectory(prefix="p17-") as folder:
            syncs(Path(folder), clients, bar)


def once(client: Client, port: int, messages: int, producers: int, requests: int, bar: float) -> None:
    """P16."""
    body = b"\x02" + block([b"x" * BYTES] * messages) + b"\0"
    plain = [repeated(body) for _ in range(producers)]
    names = [f"p{messages}-{number}" for number in range(producers)]
    rates = compared(
        lambda: publish(port, plain, requests),
        lambda: publish(port, [numbered(body, said(client, name), count(1)) for name in names], requests),
    )
    what = f"batches of {messages}" if messages > 1 else f"single messages of {producers} producers"
    tell("P16", f"published once ÷ plain, {what}", rates, bar, messages)


def in_transactions(client: Client, port: int, service: TransactionClient) -> None:
    """P17."""
    messages, requests = CASES[0][0], 2 * CASES[0][2]
    payloads = block([b"x" * BYTES] * messages) + b"\0"
    # Made anew as often as those in transactions are, so that the clients have the same to do.
    plain = [made_anew(b"\x02" + payloads)]

    def transactional(head: str) -> float:
        return publish(port, [committing(service, payloads, head)], requests)

    as_producer = compared(lambda: publish(port, plain, requests), lambda: transactional(said(client, "transactional")))
    # A turn's ratio differs by a twentieth, also of plain ones to plain ones, and the bar is three hundredths away.
    rates = compared(lambda: publish(port, plain, requests), lambda: transactional(""), 3 * TURNS)
    details = {"as_a_producer": round(ratio(as_producer), 3)}
    tell("P17", "in transactions of 100 ms ÷ plain, batches of 500", rates, COMMITTED_BAR, messages, **details)


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
                service.publish(topic, [b"x" * BYTES] * 10, pointer=pointer)
            manager.can_commit(pointer, [b"%d" % pointer])
            manager.commit(pointer)

        def calls() -> float:
            started = time.perf_counter()
            list(threads.map(transaction, repeat(False, TRANSACTIONS)))
            return 3 * TRANSACTIONS / (time.perf_counter() - started)

        transaction(True)
        before = next(synced), sum(store.calls[name] for name in _SYNCED)
        list(threads.map(transaction, repeat(True, TRANSACTIONS)))
        after = next(synced) - 1, sum(store.calls[name] for name in _SYNCED)
        each = (sum(after) - sum(before)) / TRANSACTIONS
        report(Figure("P17", f"syncs per transaction with a batch, {clients} at a time", round(each, 2), at_most=bar))
        if clients > 1:
            rates = compared(bare, calls)
            tell("P17", f"start, canCommit and commit, {clients} at a time, ÷ bare synced appends", rates, 2, 1)


def compared(plain: Callable[[], float], other: Callable[[], float], turns: int = TURNS) -> list[tuple[float, float]]:
    """Requests per second of both, in turns, behind a turn that does not count."""
    return [(plain(), other()) for _ in range(turns + 1)][1:]


def ratio(rates: list[tuple[float, float]]) -> float:
    """The median of the other's rate to the plain one's."""
    return statistics.median(other / plain for plain, other in rates)


def tell(id_: str, name: str, rates: list[tuple[float, float]], bar: float, messages: int, **more: float) -> None:
    """Report a figure, with messages per second."""
    plain, other = (round(statistics.median(one) * messages) for one in zip(*rates, strict=True))
    report(Figure(id_, name, round(ratio(rates), 3), at_least=bar, details={"plain": plain, "other": other, **more}))


# --- requests --------------------------------------------------------------------------------------------------------


def said(client: Client, name: str) -> str:
    """What the requests of a new instance of a producer say of it."""
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


def made_anew(body: bytes) -> Requests:
    """The same request again and again, put together each 100 ms."""
    while True:
        requests, ends = repeated(body[:1] + body[1:]), time.perf_counter() + COMMIT_SECONDS
        while time.perf_counter() < ends:
            yield next(requests)


def committing(service: TransactionClient, payloads: bytes, head: str) -> Requests:
    """Requests in a transaction that is committed, and followed by another one, each 100 ms."""
    sequences = count(1)
    while True:
        tx, ends = service.start_short(), time.perf_counter() + COMMIT_SECONDS
        body = b"\0" + long(tx.write_pointer) + payloads
        requests = numbered(body, head, sequences) if head else repeated(body)
        while time.perf_counter() < ends:
            yield next(requests)
        service.commit(tx.transaction_id, tx.write_pointer)


def publish(port: int, sources: list[Requests], requests: int) -> float:
    """Requests per second that so many connections get done, each with one under way at a time."""
    with selectors.DefaultSelector() as waiting:
        connections = [connect(port) for _ in sources]
        for connection, source in zip(connections, sources, strict=True):
            waiting.register(connection, selectors.EVENT_READ, (connection, source))
        started = time.perf_counter()
        for connection, source in zip(connections, sources, strict=True):
            connection.sendall(next(source))
        sent, done = len(sources), 0
        while done < requests:
            for key, _ in waiting.select():
                ready, source = key.data
                receive(ready)
                done += 1
                if sent < requests:
                    ready.sendall(next(source))
                    sent += 1
        seconds = time.perf_counter() - started
        for connection in connections:
            connection.close()
    return requests / seconds


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
