"""P5: the effect of a sweep on publishers: p99 latency while the janitor deletes, compared with an idle janitor.

The janitor is embedded in ``tms serve`` on LevelDB, and a separate process on HBase. Publishers send single messages by
a schedule (``benchmarks/load.py``), at half of the top rate that the benchmark has just measured on the same server.
Each turn is a quiet stretch, and a stretch in which the benchmark shortens a topic's TTL, so that a sweep finds many
due rows. In the second stretch, only requests count that were due during the sweep and its compaction, according to the
janitor's record of runs. The figure is the median of the turns' ratios, because a machine's speed varies. All
processes, including HBase, share one machine's processors with the publishers.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import hbase
from benchmarks.figure import Figure, report
from benchmarks.load import TOPIC, Sample, measure_top_rate, percentile_ms, publish_request, send_on_schedule
from benchmarks.stores import BODY
from tests.hbase.tables import Tables
from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import PATIENCE_SECONDS, size
from tms_core.rowkey import MessageKey
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, encode_properties

#: The due rows of a sweep.
ROWS = size("TMS_BENCH_SWEEP_ROWS", 200_000)
HBASE_ROWS = size("TMS_BENCH_HBASE_ROWS", 60_000)
#: The rate limit of the janitor on HBase; the embedded janitor limits its rate itself.
RATE = 10_000
TURNS = size("TMS_BENCH_TURNS", 5)
#: The duration of a stretch, in seconds.
STRETCH_SECONDS = size("TMS_BENCH_SECONDS", 6)
#: The requests for the measurement of the top rate.
TOP_REQUESTS = 10_000
#: The load as a percentage of the top rate; the figure is for the middle value.
LOADS = (10, 50, 90)
FIGURE_LOAD = 50
#: The TTLs of a topic and the age of its rows, in seconds: all rows are due by the short TTL, and none by the long TTL.
SHORT_TTL, ROW_AGE, LONG_TTL = 3600, 7200, 30 * 86_400
_JANITOR = Path(sys.executable).with_name("janitor")
_PUT_ROWS = 5_000


@dataclass(frozen=True)
class Deployment:
    """A server, a janitor, and topics with a TTL that the benchmark shortens.

    Attributes:
        port: the server's port.
        page: the URL of the janitor's status page.
        topics: the topics with ``rows`` rows each.
    """

    port: int
    page: str
    topics: list[TopicId]
    rows: int

    def publish(self, per_second: float, seconds: float) -> list[Sample]:
        return send_on_schedule(
            self.port, lambda _: publish_request(BODY), per_second, max(1, round(per_second * seconds))
        )

    def shorten(self, topic: TopicId) -> None:
        """Make all rows of a topic due."""
        with Client(self.port) as client:
            path = f"{TopicClient(client, topic.topic).path}/properties"
            answer = client.ask("PUT", path, json.dumps({"ttl": str(SHORT_TTL)}).encode())
        if answer.status != 200:
            raise RuntimeError(f"the ttl of {topic} could not be shortened: {answer.text}")

    def wait_for_sweep(self, since_ms: float) -> tuple[float, float]:
        """Wait for the sweep that found a topic's rows due; return its start and its finish in ms."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.page}api/runs?limit=100") as answer:  # noqa: S310 our own server
                runs: list[dict[str, Any]] = json.load(answer)["runs"]
            for run in runs:
                if run["started_ms"] >= since_ms and run["expired"] and run["finished_ms"]:
                    if run["expired"] != self.rows or run["result"] != "done":
                        raise RuntimeError(f"the sweep deleted {run['expired']} of {self.rows} rows: {run}")
                    return run["started_ms"], run["finished_ms"]
            time.sleep(0.2)
        raise TimeoutError(f"no sweep in {PATIENCE_SECONDS} s")


@dataclass(frozen=True)
class Turn:
    """The requests of a quiet stretch, the requests during a sweep, and the duration of the sweep."""

    quiet: list[Sample]
    swept: list[Sample]
    sweep_seconds: float

    def ratio(self, percent: int) -> float:
        return percentile_ms(self.swept, percent) / percentile_ms(self.quiet, percent)


def run_turn(deployment: Deployment, topic: TopicId, per_second: float) -> Turn:
    quiet = deployment.publish(per_second, STRETCH_SECONDS)
    wall = time.time() - time.monotonic()
    since_ms = (time.monotonic() + wall) * 1000
    deployment.shorten(topic)
    samples = deployment.publish(per_second, STRETCH_SECONDS)
    started_ms, finished_ms = deployment.wait_for_sweep(since_ms - 1)
    during = [sample for sample in samples if started_ms <= (sample.due + wall) * 1000 <= finished_ms]
    # Compactions of LevelDB must not continue in the next quiet stretch.
    time.sleep(1)
    return Turn(quiet, during, (finished_ms - started_ms) / 1000)


def measure(deployment: Deployment) -> tuple[float, dict[str, Any]]:
    """Return the figure, and its details."""
    measure_top_rate(deployment.port, publish_request(BODY), TOP_REQUESTS)
    top = measure_top_rate(deployment.port, publish_request(BODY), TOP_REQUESTS)
    at_load = {load: deployment.publish(top * load / 100, STRETCH_SECONDS) for load in LOADS}
    turns = [run_turn(deployment, topic, top * FIGURE_LOAD / 100) for topic in deployment.topics][1:]
    ratios = [one.ratio(99) for one in turns]
    details: dict[str, Any] = {
        "top_requests_per_second": round(top),
        "p50_ms_at_load_percent": {load: round(percentile_ms(found, 50), 2) for load, found in at_load.items()},
        "p99_ms_at_load_percent": {load: round(percentile_ms(found, 99), 2) for load, found in at_load.items()},
        "rows": deployment.rows,
        "ratios": [round(ratio, 2) for ratio in ratios],
        "ratio_of_p50": round(statistics.median(one.ratio(50) for one in turns), 2),
        "quiet_p99_ms": round(statistics.median(percentile_ms(one.quiet, 99) for one in turns), 2),
        "sweep_p99_ms": round(statistics.median(percentile_ms(one.swept, 99) for one in turns), 2),
        "sweep_seconds": round(statistics.median(one.sweep_seconds for one in turns), 2),
    }
    return round(statistics.median(ratios), 2), details


def fill(store: Store, rows: int) -> list[TopicId]:
    """Create a topic for each turn and one for warm-up, without due rows."""
    topics = [TopicId("default", f"swept{number}") for number in range(TURNS + 1)]
    oldest_ms = (int(time.time()) - ROW_AGE) * 1000 - rows
    for topic in topics:
        store.metadata.compare_and_set(topic.prefix, None, encode_properties({"generation": "1", "ttl": str(LONG_TTL)}))
        for first in range(0, rows, _PUT_ROWS):
            numbers = range(first, min(first + _PUT_ROWS, rows))
            keys = (MessageKey(topic, 1, oldest_ms + number, 0).pack() for number in numbers)
            store.message.put([(key, MessageValue(None, BODY)) for key in keys])
    return topics


def adopt_store(config: Path) -> None:
    """Adopt the store while no rows are due."""
    command = [str(_JANITOR), "run", "--once", "--adopt", "--config", str(config)]
    with config.with_suffix(".log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def wait_for_page(log: Path) -> str:
    """Wait for the address of the status page in a janitor's log, and return it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(r"status page: (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise TimeoutError(f"the janitor did not start: {log.read_text()}")


@contextmanager
def run_server(config: Path, *, janitor: bool) -> Iterator[Serve]:
    """Run a server with the topic for publishing."""
    with Serve(config, janitor=janitor) as server:
        with Client(server.port) as client:
            TopicClient(client, TOPIC).create()
        yield server
        server.end()


@contextmanager
def start_embedded() -> Iterator[Deployment]:
    """Run a server on LevelDB with an embedded janitor."""
    with tempfile.TemporaryDirectory(prefix="p5-") as folder:
        config = configure(Path(folder))
        with LevelDBStore(Path(folder) / "messaging", create=True) as store:
            topics = fill(store, ROWS)
        adopt_store(config)
        with run_server(config, janitor=True) as server:
            yield Deployment(server.port, wait_for_page(config.with_suffix(".log")), topics, ROWS)


@contextmanager
def start_on_hbase() -> Iterator[Deployment]:
    """Run HBase, a server, and the janitor in a separate process."""
    with ExitStack() as stack:
        running = stack.enter_context(hbase.server())
        tables = stack.enter_context(Tables(running))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p5-")))
        namespace = tables.make(buckets=hbase.BUCKETS)
        storage = {"thrift": [running.thrift], "namespace": namespace, "buckets": hbase.BUCKETS}
        config = configure(folder)
        settings = yaml.safe_load(config.read_text())
        settings["janitor"] |= {"rate_rows_per_second": RATE, "batch_rows": 500}
        settings |= {"storage": {"kind": "hbase", "hbase": storage}, "transactions": {"source": "none"}}
        config.write_text(yaml.safe_dump(settings))
        with HBaseStore(HBaseSettings(thrift=(running.thrift,), namespace=namespace, buckets=hbase.BUCKETS)) as store:
            topics = fill(store, HBASE_ROWS)
        # Flush the rows to files, as in an old store, so that HBase does not flush memory during the measurement.
        running.command("compact", f"{namespace}:tms.message")
        adopt_store(config)
        server = stack.enter_context(run_server(config, janitor=False))
        log = folder / "janitor.log"
        with log.open("w") as output:
            janitor = subprocess.Popen([str(_JANITOR), "run", "--config", str(config)], stdout=output, stderr=output)
        stack.callback(janitor.wait)
        stack.callback(janitor.kill)
        yield Deployment(server.port, wait_for_page(log), topics, HBASE_ROWS)


def main() -> None:
    with start_embedded() as deployment:
        ratio, details = measure(deployment)
    name = "p99 publish latency during a sweep ÷ without: embedded, LevelDB"
    report(Figure("P5", name, ratio, at_most=2.0, details=details))
    with start_on_hbase() as deployment:
        ratio, details = measure(deployment)
    name = "p99 publish latency during a sweep ÷ without: a process of its own, HBase"
    report(Figure("P5", name, ratio, at_most=1.2, details=details))


if __name__ == "__main__":
    main()
