"""P25: this server compared with CDAP's server, with the same requests and one load generator, in turns.

Both sync each batch to the same disk. A figure is the median of the turns' ratios, because a machine's speed varies;
the details have the median rates of both, and this server's processor time per request. CDAP's server needs Java;
without Java, the benchmark measures nothing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.figure import Figure, report
from benchmarks.p4_publish import TOPIC, cdap_server, connect, fetch_pages, publish, publish_request, request
from tests.kit.avro import POLL_ALL
from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import size

TURNS = size("TMS_BENCH_TURNS", 20)
#: The warm-up turns, in which the JVM of CDAP's server compiles.
_WARM_UP_TURNS = 4
#: The name, producers, messages in a request, bytes of each message, requests in a turn, and the bar.
PUBLISHES = (
    ("single messages, 1 producer", 1, 1, 100, 400, 0.7),
    ("single messages, 16 producers", 16, 1, 100, 1200, 1.5),
    ("batches of 500, 1 producer", 1, 500, 1000, 20, 1.0),
)
#: The messages of 1 kB that readers read, and the turns and bars of reading.
_MESSAGES, _READ_TURNS = 50_000, 6
PAGES_BAR, FETCH_BAR = 0.9, 0.95
_TICKS = os.sysconf("SC_CLK_TCK")
_LAST_CHUNK = b"0\r\n\r\n"


class Comparison:
    """A comparison of this server with CDAP's server, in turns.

    Args:
        pid: the process id of this server.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")

    def _cpu_seconds(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def compare(
        self, name: str, bar: float, units: int, turns: int, ours: Callable[[], float], theirs: Callable[[], float]
    ) -> None:
        """Report the ratio of the two rates.

        Args:
            units: the requests of a turn, for the processor time per request.
            ours, theirs: a function that runs a turn and returns its rate.
        """
        pairs, cpu = [], 0.0
        for turn in range(_WARM_UP_TURNS + turns):
            before = self._cpu_seconds()
            mine = ours()
            if turn >= _WARM_UP_TURNS:
                cpu += self._cpu_seconds() - before
            pairs.append((mine, theirs()))
        pairs = pairs[_WARM_UP_TURNS:]
        mine, other = (round(statistics.median(rates)) for rates in zip(*pairs, strict=True))
        details = {"per_second": mine, "cdap_per_second": other, "cdap_best": round(max(rate for _, rate in pairs))}
        details["cpu_us_each"] = round(cpu / turns / units * 1e6)
        value = statistics.median(mine / theirs for mine, theirs in pairs)
        report(Figure("P25", f"{name} ÷ CDAP's own server", round(value, 3), at_least=bar, details=details))


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Comparison, int, int | None]]:
    """Start this server and CDAP's, each with an empty topic."""
    (folder / "ours").mkdir()
    with Serve(configure(folder / "ours")) as process, cdap_server(folder / "cdap") as cdap_port:
        with Client(process.port) as client:
            TopicClient(client, TOPIC.topic).create()
        yield Comparison(process.process.pid), process.port, cdap_port
        process.end()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p25-") as scratch:
        for name, producers, messages, length, requests, bar in PUBLISHES:
            folder = Path(scratch) / str(producers * messages)
            folder.mkdir()
            with servers(folder) as (comparison, port, cdap_port):
                if cdap_port is None:
                    return
                data = publish_request(messages, length)
                ours, theirs = (partial(publish, one, data, requests, producers) for one in (port, cdap_port))
                comparison.compare(name, bar, requests, TURNS, ours, theirs)
        (Path(scratch) / "reading").mkdir()
        with servers(Path(scratch) / "reading") as (comparison, port, cdap_port):
            if cdap_port is not None:
                compare_reads(comparison, port, cdap_port)


def compare_reads(comparison: Comparison, port: int, cdap_port: int) -> None:
    """Measure reads of the same messages from both servers."""
    for one in (port, cdap_port):
        publish(one, publish_request(500, 1000), _MESSAGES // 500, 1)
    comparison.compare(
        "pages of 500",
        PAGES_BAR,
        _MESSAGES // 500,
        _READ_TURNS,
        *(partial(fetch_pages, one, 1000) for one in (port, cdap_port)),
    )
    comparison.compare("long fetch", FETCH_BAR, 1, _READ_TURNS, *(partial(fetch_all, one) for one in (port, cdap_port)))


def fetch_all(port: int) -> float:
    """Return the messages per second of a client that reads all messages with one request, and discards them."""
    buffer, end = bytearray(1 << 20), b""
    with connect(port) as connection:
        started = time.perf_counter()
        connection.sendall(request("poll", POLL_ALL))
        # CDAP's server leaves the connection open. No message looks like the last chunk.
        while end != _LAST_CHUNK and (size := connection.recv_into(buffer)):
            end = (end + buffer[max(0, size - len(_LAST_CHUNK)) : size])[-len(_LAST_CHUNK) :]
        return _MESSAGES / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
