"""P11: the latency from publish to a polling consumer, and the lag of a sweep during continuous publishing.

The server has the embedded janitor, as ``tms serve`` starts it. Publishers send by a schedule, and a consumer in a
separate process polls a few milliseconds after each response. Each message contains its due time, from which the
latency counts, so that the wait for a connection is included.

The topic's ttl is so short that messages come due all the time. A sweep that begins at one moment leaves nothing that
was due then; so when the next one has ended, the oldest row it found had been overdue since the one before began. A
patient sweep (``docs/explanation/decisions.md``) leaves rows for up to a ttl, and comes every second: a lag of both
together is what
is meant, and the figure is the worst one beside it. It must not grow either, which the slope tells. What is left in the
store at the end is looked at as well, whatever the janitor says of itself.
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
from benchmarks.load import TOPIC, Sample, milliseconds, offer, publishing
from benchmarks.p5_latency import page
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import Serve, configure
from tests.server.test_avro import decoded
from tests.server.test_messages import MAX_INT
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
_MOMENT = struct.Struct(">d")
#: Makes a message 100 bytes long.
_PADDING = bytes(92)


class Visit(NamedTuple):
    """A sweep that deleted rows: its start and finish, in seconds of wall time."""

    began: float
    ended: float


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
                raise RuntimeError(f"the server said {answer.text}")
            if found := decoded(answer.body):
                samples += [Sample(_MOMENT.unpack_from(payload)[0], seen) for _, payload in found]
                last, _ = found[-1]
                start = b"\0\x28" + last
            time.sleep(PAUSE_SECONDS)
    return samples


def visits(page_url: str) -> list[Visit]:
    """Return the sweeps that deleted rows, oldest first."""
    with urllib.request.urlopen(f"{page_url}api/runs?limit=1000") as answer:  # noqa: S310 it is our own
        runs: list[dict[str, Any]] = json.load(answer)["runs"]
    return [
        Visit(run["started_ms"] / 1000, run["finished_ms"] / 1000)
        for run in reversed(runs)
        if run["expired"] and run["result"] == "done"
    ]


def lags(found: Sequence[Visit]) -> Iterator[tuple[float, float]]:
    """Yield each time just before a sweep finished (except the first one), and how long the oldest row was overdue, in
    seconds.
    """
    for before, this in pairwise(found):
        yield this.ended, this.ended - before.began


def left_overdue(store_path: Path, at_ms: float) -> float:
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
        "visible_p50_ms": round(milliseconds(seen, 50), 1),
        "visible_max_ms": round(milliseconds(seen, 100), 1),
        "publish_p50_ms": round(milliseconds(published, 50), 1),
        "publish_p99_ms": round(milliseconds(published, 99), 1),
    }
    name = "publish → visible to a polling consumer, p99 in ms"
    report(Figure("P11", name, round(milliseconds(seen, 99), 1), at_most=50, details=details))


def report_lag(found: Sequence[Visit], left_seconds: float) -> None:
    lag = list(lags(found))
    if len(lag) < 2:
        raise RuntimeError(f"{len(found)} sweeps are too few to tell how the lag moves; publish for longer")
    moments, seconds = zip(*lag, strict=True)
    worst, meant = max(seconds), TTL_SECONDS + EVERY_SECONDS
    details = {
        "seconds": SECONDS,
        "rows_per_second": REQUESTS_PER_SECOND * MESSAGES,
        "sweeps": len(found),
        "lag_max_seconds": round(worst, 2),
        "lag_median_seconds": round(statistics.median(seconds), 2),
        "lag_meant_seconds": meant,
        "lag_slope_seconds_per_minute": round(statistics.linear_regression(moments, seconds).slope * 60, 2),
        "sweep_max_seconds": round(max(visit.ended - visit.began for visit in found), 2),
        "oldest_overdue_at_the_end_seconds": round(left_seconds, 2),
    }
    name = "sweep lag at worst ÷ what patience and schedule mean it to be"
    report(Figure("P11", name, round(max(worst, left_seconds) / meant, 2), at_most=1.5, details=details))


def main() -> None:
    requests = SECONDS * REQUESTS_PER_SECOND
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="p11-") as folder, ProcessPoolExecutor(1, mp_context=spawn) as consumer:
        config = configure(Path(folder))
        with Serve(config, janitor=True) as server:
            with Client(server.port) as client:
                TopicClient(client, TOPIC).create(ttl=str(TTL_SECONDS))
            # Its process is up before the first message is due.
            consumer.submit(consume, server.port, 0).result(timeout=PATIENCE_SECONDS)
            seeing = consumer.submit(consume, server.port, requests * MESSAGES)
            published = offer(server.port, message, REQUESTS_PER_SECOND, requests)
            seen = seeing.result(timeout=PATIENCE_SECONDS)
            found = visits(page(config.with_suffix(".log")))
            server.end()
            ended_ms = time.time() * 1000
        left_seconds = left_overdue(Path(folder) / "messaging", ended_ms)
    report_visible(published, seen)
    report_lag(found, left_seconds)


def message(due: float) -> bytes:
    """Return the request that is due at a time."""
    return publishing(_MOMENT.pack(due) + _PADDING, MESSAGES)


if __name__ == "__main__":
    main()
