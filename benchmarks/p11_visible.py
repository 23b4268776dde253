"""P11: the latency from publish to a polling consumer, and the lag of a sweep during continuous publishing.

The server has the embedded janitor, as ``tms serve`` starts it. Publishers send by a schedule, and a consumer in a
separate process polls a few milliseconds after each response. Each message contains its due time, from which the
latency counts, so that the wait for a connection is included.

The topic's TTL is so short that messages come due all the time. A sweep that deletes rows leaves no row that was due at
its start, so the lag before the next such sweep finishes is the time since that start. The janitor sweeps every second,
and its incremental passes skip the topic for up to one TTL (``docs/explanation/decisions.md``): the intended lag is the
sum of both. The figure is the worst lag divided by the intended lag; the slope in the details shows whether the lag
grows. At the end, the benchmark also reads the oldest row of the store, to check the janitor's record.
"""

from __future__ import annotations

import json
import statistics
import struct
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figure import Figure, report
from benchmarks.load import TOPIC, Sample, percentile_ms, publish_request, send_on_schedule
from benchmarks.p5_latency import wait_for_page
from tests.kit.avro import MAX_INT, decoded
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import PATIENCE_SECONDS, size
from tms_core.rowkey import MessageKey
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

#: ``TMS_BENCH_VISIBLE_SECONDS=300`` is the full size.
SECONDS = size("TMS_BENCH_VISIBLE_SECONDS", 40)
#: The requests per second, and the messages per request.
REQUESTS_PER_SECOND, MESSAGES = 200, 25
TTL_SECONDS = 4
EVERY_SECONDS = 1
#: The consumer's pause after a response, in seconds.
PAUSE_SECONDS = 0.005
_DUE_TIME = struct.Struct(">d")
#: Makes a message 100 bytes long.
_PADDING = bytes(92)


class Sweep(NamedTuple):
    """A sweep that deleted rows: its start and finish, in seconds of wall time."""

    started: float
    finished: float


def consume(port: int, messages: int) -> list[Sample]:
    """Poll until a number of messages has arrived; return the due time and the arrival time of each message."""
    samples: list[Sample] = []
    start = b"\x04"
    with Client(port) as client:
        path = f"{TopicClient(client, TOPIC).path}/poll"
        while len(samples) < messages:
            answer = client.ask("POST", path, start + b"\0" + MAX_INT + b"\x02", content_type=AVRO)
            seen = time.monotonic()
            if answer.status != 200:
                raise RuntimeError(f"the server responded {answer.text}")
            if found := decoded(answer.body):
                samples += [Sample(_DUE_TIME.unpack_from(payload)[0], seen) for _, payload in found]
                last, _ = found[-1]
                start = b"\0\x28" + last
            time.sleep(PAUSE_SECONDS)
    return samples


def read_sweeps(page_url: str) -> list[Sweep]:
    """Return the sweeps that deleted rows, oldest first."""
    with urllib.request.urlopen(f"{page_url}api/runs?limit=1000") as answer:  # noqa: S310 our own server
        runs: list[dict[str, Any]] = json.load(answer)["runs"]
    return [
        Sweep(run["started_ms"] / 1000, run["finished_ms"] / 1000)
        for run in reversed(runs)
        if run["expired"] and run["result"] == "done"
    ]


def compute_lags(found: Sequence[Sweep]) -> Iterator[tuple[float, float]]:
    """Yield the finish of each sweep after the first, and how long the oldest row was overdue just before, in s."""
    for previous, this in pairwise(found):
        yield this.finished, this.finished - previous.started


def measure_overdue(store_path: Path, at_ms: float) -> float:
    """Return how long the oldest row of a closed store is overdue at a time, in seconds; 0: no row is."""
    with LevelDBStore(store_path) as store:
        keys = store.message.read(KEYS, TopicId("default", TOPIC).prefix, None, 1).items
    if not keys:
        return 0.0
    key = MessageKey.parse(keys[0])
    assert key is not None
    return max(0.0, at_ms / 1000 - key.publish_ms / 1000 - TTL_SECONDS)


def report_visible(published: Sequence[Sample], seen: Sequence[Sample]) -> None:
    details = {
        "messages": len(seen),
        "messages_per_second": REQUESTS_PER_SECOND * MESSAGES,
        "visible_p50_ms": round(percentile_ms(seen, 50), 1),
        "visible_max_ms": round(percentile_ms(seen, 100), 1),
        "publish_p50_ms": round(percentile_ms(published, 50), 1),
        "publish_p99_ms": round(percentile_ms(published, 99), 1),
    }
    name = "publish → visible to a polling consumer, p99 in ms"
    report(Figure("P11", name, round(percentile_ms(seen, 99), 1), at_most=50, details=details))


def report_lag(found: Sequence[Sweep], left_seconds: float) -> None:
    lag = list(compute_lags(found))
    if len(lag) < 2:
        raise RuntimeError(f"{len(found)} sweeps are too few for a slope of the lag; raise TMS_BENCH_VISIBLE_SECONDS")
    times, seconds = zip(*lag, strict=True)
    worst, intended = max(seconds), TTL_SECONDS + EVERY_SECONDS
    details = {
        "seconds": SECONDS,
        "rows_per_second": REQUESTS_PER_SECOND * MESSAGES,
        "sweeps": len(found),
        "lag_max_seconds": round(worst, 2),
        "lag_median_seconds": round(statistics.median(seconds), 2),
        "lag_meant_seconds": intended,
        "lag_slope_seconds_per_minute": round(statistics.linear_regression(times, seconds).slope * 60, 2),
        "sweep_max_seconds": round(max(sweep.finished - sweep.started for sweep in found), 2),
        "oldest_overdue_at_the_end_seconds": round(left_seconds, 2),
    }
    name = "sweep lag at worst ÷ what patience and schedule mean it to be"
    report(Figure("P11", name, round(max(worst, left_seconds) / intended, 2), at_most=1.5, details=details))


def main() -> None:
    requests = SECONDS * REQUESTS_PER_SECOND
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="p11-") as folder, ProcessPoolExecutor(1, mp_context=spawn) as consumer:
        config = configure(Path(folder))
        with Serve(config, janitor=True) as server:
            with Client(server.port) as client:
                TopicClient(client, TOPIC).create(ttl=str(TTL_SECONDS))
            # Start the consumer's process before the first message is due.
            consumer.submit(consume, server.port, 0).result(timeout=PATIENCE_SECONDS)
            seeing = consumer.submit(consume, server.port, requests * MESSAGES)
            published = send_on_schedule(server.port, message, REQUESTS_PER_SECOND, requests)
            seen = seeing.result(timeout=PATIENCE_SECONDS)
            found = read_sweeps(wait_for_page(config.with_suffix(".log")))
            server.end()
            ended_ms = time.time() * 1000
        left_seconds = measure_overdue(Path(folder) / "messaging", ended_ms)
    report_visible(published, seen)
    report_lag(found, left_seconds)


def message(due: float) -> bytes:
    """Return the request that is due at a time."""
    return publish_request(_DUE_TIME.pack(due) + _PADDING, MESSAGES)


if __name__ == "__main__":
    main()
