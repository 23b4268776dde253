"""P14, P15 and P19: the cost of consumer groups on a real server.

* **P14** The rate of a read-process-write loop of a group, exactly once, divided by the rate of a consumer that stores
  its position after each batch and publishes outside transactions, at least once. Also the server's processor time for
  a poll and for a rollback with 400 open claims, divided by the time with 10 open claims.
* **P15** The messages per second that three producers and four consumers produce *and* consume in transactions, each in
  a separate process. The details compare the rate with synced LevelDB batches of the same bytes, because disks differ.
* **P19** The latency from publish to the worker's loop while another transaction stays open in the topic, without an
  order.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path
from queue import SimpleQueue

from benchmarks.figure import Figure, report
from benchmarks.p4_publish import BareStore
from tests.hostile.attacks import milliseconds
from tests.server.client import AVRO, TopicClient
from tests.server.client import Client as RestClient
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.client import Client, Transaction, TransactionClient
from tms_core.client.protocol.messages import encode_poll
from tms_core.rowkey import MessageId

BATCH, BYTES = 500, 1000
#: The batches per turn of P14, and the turns.
BATCHES, TURNS = size("TMS_BENCH_GROUP_BATCHES", 40), size("TMS_BENCH_TURNS", 5)
#: The batches of each producer of P15.
PRODUCED = size("TMS_BENCH_PRODUCED_BATCHES", 100)
PRODUCERS, CONSUMERS = 3, 4
LATENCY_MESSAGES = size("TMS_BENCH_LATE_MESSAGES", 100)
#: The compared numbers of open claims, the messages of a claim, and the polls with each number.
OPEN_CLAIM_COUNTS, CLAIM_MESSAGES, POLLS = (10, 400), 5, size("TMS_BENCH_GROUP_POLLS", 200)
#: The pause between two messages of P19, in seconds, after which the worker is idle again.
_PAUSE_SECONDS = 0.1
#: The time without a message after which a worker of P15 stops, in seconds.
_IDLE_SECONDS = 5

_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p14-") as folder:
        with Serve(configure(Path(folder))) as server:
            address = (server.url, server.transactions)
            compare_read_process_write(address)
            measure_open_claims(server)
            measure_latency(address)
            rate = produce_and_consume(address)
            server.end()
        bare = BareStore(Path(folder) / "bare").write(BATCH, BYTES, PRODUCED) * BATCH
    details = {"bare_synced_writes_per_second": round(bare), "share_of_bare": round(rate / bare, 3)}
    name = f"messages per second produced and consumed in transactions, {PRODUCERS} producers and {CONSUMERS} consumers"
    report(Figure("P15", name, round(rate), at_least=20_000, details=details))


def open_client(address: tuple[str, str]) -> Client:
    """Return a client of the server."""
    return Client(address[0], transactions=address[1])


def fill(client: Client, topic: str, batches: int) -> None:
    """Create a topic with a number of batches."""
    client.create_topic(topic)
    for _ in range(batches):
        client.publish(topic, [b"x" * BYTES] * BATCH)


# --- P14 -------------------------------------------------------------------------------------------------------------


def compare_read_process_write(address: tuple[str, str]) -> None:
    rates: dict[str, list[float]] = {"group": [], "plain": []}
    with open_client(address) as client:
        client.create_topic("default:bills")
        for turn in range(TURNS):
            topic = f"default:read{turn}"
            fill(client, topic, BATCHES)
            for name, loop in (("plain", at_least_once), ("group", exactly_once)):
                started = time.perf_counter()
                loop(client, topic)
                rates[name].append(BATCHES * BATCH / (time.perf_counter() - started))
    ratios = [group / plain for group, plain in zip(rates["group"], rates["plain"], strict=True)]
    details = {name: round(statistics.median(found)) for name, found in rates.items()}
    name = "read-process-write as a group ÷ at least once"
    report(Figure("P14", name, round(statistics.median(ratios), 2), at_least=1.0, details=details))


def at_least_once(client: Client, topic: str) -> None:
    """Publish bills for all orders; a crash may duplicate some bills."""
    messages, batch, done = client.consume(topic, consumer="plain"), [], 0
    for message in messages:
        batch.append(message.payload)
        if len(batch) == BATCH:
            client.publish("default:bills", batch)
            messages.commit()
            batch, done = [], done + BATCH
            if done == BATCHES * BATCH:
                messages.stop()


def exactly_once(client: Client, topic: str) -> None:
    """Publish bills for all orders, each exactly once."""
    done, work = 0, client.work(topic, "group", batch=BATCH)
    for tx, batch in work:
        tx.publish("default:bills", [order.payload for order in batch])
        done += len(batch)
        if done == BATCHES * BATCH:
            work.stop()


def measure_open_claims(server: Serve) -> None:
    """Measure the additional cost of a poll and a rollback while the group has many open claims."""
    medians: dict[str, list[float]] = {"poll": [], "roll back": []}
    with (
        open_client((server.url, server.transactions)) as client,
        TransactionClient(server.transactions) as manager,
        RestClient(server.port) as rest,
    ):
        fill(client, "default:claims", 1 + (max(OPEN_CLAIM_COUNTS) + 1) * CLAIM_MESSAGES // BATCH)
        group = TopicClient(rest, "claims/consumers/group")
        rest.ask("PUT", group.path, json.dumps({"position": str(MessageId(0, 0))}).encode())
        open_count = 0
        for number in OPEN_CLAIM_COUNTS:
            for _ in range(open_count, number):
                claim(group, manager.start_short(600))
            open_count, costs = number, {name: list[float]() for name in medians}
            for _ in range(POLLS):
                tx = manager.start_short()
                before = processor_seconds(server.process.pid)
                claim(group, tx)
                between = processor_seconds(server.process.pid)
                assert group.post("rollback", {"transactionWritePointer": str(tx.transaction_id)}).status == 200
                costs["roll back"].append(processor_seconds(server.process.pid) - between)
                costs["poll"].append(between - before)
                manager.abort(tx)
            for name, found in costs.items():
                medians[name].append(statistics.median(found))
    for name, (few, many) in medians.items():
        details = {
            f"ms_{number}": round(1000 * one, 2) for number, one in zip(OPEN_CLAIM_COUNTS, (few, many), strict=True)
        }
        text = f"processor time of a group's {name} with {OPEN_CLAIM_COUNTS[1]} open claims ÷ {OPEN_CLAIM_COUNTS[0]}"
        report(Figure("P14", text, round(many / few, 2), at_most=2, details=details))


def claim(group: TopicClient, tx: Transaction) -> None:
    """Claim a few messages without an order."""
    body = encode_poll(None, CLAIM_MESSAGES, tx, inclusive=True)
    answer = group.post("poll", body, content_type=AVRO, x_tms_order="none")
    assert (answer.status, bool(answer.body)) == (200, True)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, with sub-microsecond resolution (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


# --- P15 -------------------------------------------------------------------------------------------------------------


def produce(address: tuple[str, str], topic: str, started: Queue[float]) -> None:
    """Produce each batch in a transaction, and report the start time."""
    with open_client(address) as client:
        started.put(time.monotonic())
        for _ in range(PRODUCED):
            with client.transaction() as tx:
                tx.publish(topic, [b"x" * BYTES] * BATCH)


def consume(address: tuple[str, str], topic: str, done: Queue[tuple[float, int]]) -> None:
    """Work as a member of the group, and report the time and size of each batch."""
    with open_client(address) as client:
        for _, batch in client.work(topic, "workers", batch=BATCH, order="none", idle_seconds=_IDLE_SECONDS):
            done.put((time.monotonic(), len(batch)))


def produce_and_consume(address: tuple[str, str]) -> float:
    """Return the messages per second from the first publish until all messages are consumed."""
    topic, total = "default:events", PRODUCERS * PRODUCED * BATCH
    started: Queue[float] = _spawn.Queue()
    done: Queue[tuple[float, int]] = _spawn.Queue()
    with open_client(address) as client:
        client.create_topic(topic)
    processes = [_spawn.Process(target=consume, args=(address, topic, done)) for _ in range(CONSUMERS)]
    processes += [_spawn.Process(target=produce, args=(address, topic, started)) for _ in range(PRODUCERS)]
    for process in processes:
        process.start()
    consumed, last = 0, 0.0
    while consumed < total:
        at, number = done.get(timeout=120)
        consumed, last = consumed + number, max(last, at)
    first = min(started.get(timeout=1) for _ in range(PRODUCERS))
    for process in processes:
        process.join()
    return total / (last - first)


# --- P19 -------------------------------------------------------------------------------------------------------------


def measure_latency(address: tuple[str, str]) -> None:
    topic, seen = "default:late", SimpleQueue[float]()
    with open_client(address) as client, open_client(address) as publisher:
        client.create_topic(topic)
        work = client.work(topic, "workers", batch=BATCH, order="none")

        def work_on_topic() -> None:
            for _ in work:
                seen.put(time.monotonic())

        with publisher.transaction(timeout_seconds=600) as undecided:
            undecided.publish(topic, [b"undecided"])
            worker = threading.Thread(target=work_on_topic)
            worker.start()
            latencies = []
            for _ in range(LATENCY_MESSAGES):
                time.sleep(_PAUSE_SECONDS)
                started = time.monotonic()
                publisher.publish(topic, [b"next"])
                latencies.append(seen.get(timeout=60) - started)
            undecided.roll_back()
        work.stop()
        publisher.publish(topic, [b"last"])
        worker.join()
    details = {
        "messages": LATENCY_MESSAGES,
        "p50_ms": milliseconds(latencies, 50),
        "max_ms": milliseconds(latencies, 100),
    }
    name = "from publish to a worker's loop with a transaction open, p99, ms"
    report(Figure("P19", name, milliseconds(latencies, 99), at_most=50, details=details))


if __name__ == "__main__":
    main()
