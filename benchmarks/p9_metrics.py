"""P9: the time of a scrape with 10,000 topics, compared with plain gauges of prometheus-client.

With ``per_topic: top`` the bar is a time, because a scrape of more than a tenth of a second delays other work of this
process. If ``top`` covers all topics, the bar is the ratio to the same samples as plain gauges with labels in a
registry. Both run in one process, in turns, and the figure compares the medians. The product gets a new status before
every scrape, so its time includes the preparation of the samples; the plain gauges have their values already.

``python -m benchmarks.p9_metrics`` prints two JSON lines.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from benchmarks.figure import Figure, report
from janitor.metrics import Metrics
from janitor.status.status import Status, TopicFigures

TOPICS = 10_000
TOP = 200
RUNS = 15
MAX_TOP_MS = 100
MAX_RATIO = 1.2
NOW_MS = 1_700_000_000_000


def main() -> None:
    status = Status("0.1.0", "store", "running", "apply", "every 60 s", NOW_MS, topics=topics())
    report(measure_top(status))
    report(measure_all(status))


def topics() -> list[TopicFigures]:
    """Return topics of very different sizes, the same in every run."""
    chance = random.Random(9)
    found = []
    for number in range(TOPICS):
        messages = int(chance.paretovariate(0.5)) % 10**9
        oldest_ms = NOW_MS - chance.randrange(7 * 86_400_000)
        found.append(
            TopicFigures(
                f"namespace{number % 20}",
                f"events-of-service-{number}",
                generation=1,
                ttl_seconds=604_800,
                messages=messages,
                size_bytes=messages * chance.randrange(100, 2000),
                oldest_ms=oldest_ms,
                newest_ms=oldest_ms + chance.randrange(86_400_000),
                counted_ms=NOW_MS - chance.randrange(600_000),
            )
        )
    return found


def measure_top(status: Status) -> Figure:
    metrics = Metrics("top", TOP)
    [seconds] = in_turn(lambda: scrape(metrics, status))
    name = "time of a scrape of 10,000 topics with per_topic: top, in milliseconds"
    return Figure("P9", name, round(seconds * 1000, 2), at_most=MAX_TOP_MS, details=details(metrics))


def measure_all(status: Status) -> Figure:
    metrics, plain_scrape = Metrics("top", TOPICS), partial(generate_latest, plain_registry(status))
    # The product writes a few more samples, about the janitor itself; the comparison does not subtract them.
    assert samples(scrape(metrics, status)) >= samples(plain_scrape()) == 5 * TOPICS
    plain_seconds, seconds = in_turn(plain_scrape, lambda: scrape(metrics, status))
    more = {"plain_seconds": round(plain_seconds, 4), "scrape_seconds": round(seconds, 4)}
    name = "time of a scrape of 10,000 topics with per_topic: all ÷ prometheus-client's own gauges"
    found = details(metrics) | more
    return Figure("P9", name, round(seconds / plain_seconds, 3), at_most=MAX_RATIO, details=found)


def scrape(metrics: Metrics, status: Status) -> bytes:
    metrics.update(status)
    return metrics.render()[0]


def plain_registry(status: Status) -> CollectorRegistry:
    """Return the same samples as plain gauges, without a custom collector."""
    registry = CollectorRegistry()
    values: dict[str, Callable[[TopicFigures], float | None]] = {
        "messages": lambda topic: topic.messages,
        "bytes": lambda topic: topic.size_bytes,
        "stats_timestamp_seconds": lambda topic: (topic.counted_ms or 0) / 1000,
        "oldest_message_timestamp_seconds": lambda topic: (topic.oldest_ms or 0) / 1000,
        "newest_message_timestamp_seconds": lambda topic: (topic.newest_ms or 0) / 1000,
    }
    for name, value in values.items():
        gauge = Gauge(f"tms_topic_{name}", "The same.", ["tms_namespace", "topic"], registry=registry)
        for topic in status.topics:
            gauge.labels(topic.tms_namespace, topic.topic).set(value(topic) or 0)
    return registry


def details(metrics: Metrics) -> dict[str, Any]:
    text, _ = metrics.render()
    return {"topics": TOPICS, "samples": samples(text), "bytes": len(text), "runs": RUNS}


def samples(text: bytes) -> int:
    return sum(not line.startswith(b"#") for line in text.splitlines())


def in_turn(*candidates: Callable[[], object]) -> list[float]:
    """Return the median seconds of each candidate; the candidates take turns."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(RUNS):
        for candidate, taken in zip(candidates, seconds, strict=True):
            start = time.perf_counter()
            candidate()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
