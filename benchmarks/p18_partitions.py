"""P18: sixteen consumers of a group on sixteen partitions of a real server, compared with one consumer per core.

Both consume the same backlog in order, without assigned partitions. The first figure is the share of the sixteen
consumers' polls that find no message or a partition of another consumer, from their start until the backlog is empty.
The second one is their rate, divided by the rate of one consumer per core.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, report
from tests.server.process import Serve, configure
from tests.support import size
from tms_core.client import Client
from tms_core.client.transactions.participant import ClaimedBatch, GroupClaims

PARTITIONS = CONSUMERS = 16
BATCH, BYTES = 50, 1000
#: Batches in each partition, and turns.
BATCHES, TURNS = size("TMS_BENCH_PARTITION_BATCHES", 120), size("TMS_BENCH_TURNS", 3)
CORES = os.cpu_count() or 1
#: The time without a message after which a consumer stops, in seconds.
_IDLE_SECONDS = 4

#: The time of a poll of a partition, and the number of returned messages.
Poll = tuple[float, int]
_spawn = multiprocessing.get_context("spawn")


def main() -> None:
    ratios, shares, rates = [], [], []
    with tempfile.TemporaryDirectory(prefix="p18-") as folder, Serve(configure(Path(folder))) as server:
        address = (server.url, server.transactions)
        for turn in range(TURNS):
            few, _ = measure_consumers(address, f"default:few{turn}", CORES)
            many, share = measure_consumers(address, f"default:many{turn}", CONSUMERS)
            ratios.append(many / few)
            shares.append(share)
            rates.append(many)
        server.end()
    details = {"messages_per_second": round(statistics.median(rates)), "one_consumer_per_core": CORES}
    name = f"polls of {CONSUMERS} consumers on {PARTITIONS} partitions that found nothing or were held"
    report(Figure("P18", name, round(statistics.median(shares), 3), at_most=0.2, details=details))
    name = f"rate of {CONSUMERS} consumers on {PARTITIONS} partitions ÷ one consumer per core"
    report(Figure("P18", name, round(statistics.median(ratios), 2), at_least=0.8, details=details))


def measure_consumers(address: tuple[str, str], topic: str, consumers: int) -> tuple[float, float]:
    """Return the messages per second of some consumers, a process per core, and the share of polls without messages."""
    with Client(address[0], transactions=address[1]) as client:
        client.create_topic(topic, properties={"partitions": str(PARTITIONS)})
        for _ in range(BATCHES * PARTITIONS):
            client.publish(topic, [b"x" * BYTES] * BATCH)
    results: Queue[list[Poll]] = _spawn.Queue()
    ready = _spawn.Barrier(CORES)
    shares = [consumers // CORES + (at < consumers % CORES) for at in range(CORES)]
    processes = [_spawn.Process(target=run_consumers, args=(address, topic, share, ready, results)) for share in shares]
    for process in processes:
        process.start()
    polls = sorted(poll for _ in processes for poll in results.get(timeout=600))
    for process in processes:
        process.join()
    successful = [poll for poll in polls if poll[1]]
    if sum(number for _, number in successful) != BATCHES * PARTITIONS * BATCH:
        raise RuntimeError("messages were lost or consumed twice")
    first, last = polls[0][0], successful[-1][0]
    counted = [poll for poll in polls if poll[0] <= last]
    return BATCHES * PARTITIONS * BATCH / (last - first), 1 - len(successful) / len(counted)


def run_consumers(address: tuple[str, str], topic: str, consumers: int, ready: Any, results: Queue[list[Poll]]) -> None:
    """Run a process with some consumers, each a thread with its own client."""
    polls: list[Poll] = []
    GroupClaims.claim = record_polls(GroupClaims.claim, polls)  # type: ignore[method-assign]

    def work() -> None:
        with Client(address[0], transactions=address[1]) as client:
            for _ in client.work(topic, "group", batch=BATCH, idle_seconds=_IDLE_SECONDS):
                pass

    threads = [threading.Thread(target=work) for _ in range(consumers)]
    ready.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(polls)


def record_polls(claim: Callable[..., Any], polls: list[Poll]) -> Callable[..., Any]:
    """Return a function that records each poll of a partition."""

    async def record(self: GroupClaims, *arguments: Any) -> ClaimedBatch:
        batch: ClaimedBatch = await claim(self, *arguments)
        polls.append((time.monotonic(), len(batch.messages)))
        return batch

    return record


if __name__ == "__main__":
    main()
