"""P22: the memory and the ``/ping`` latency of a server under attack.

A real server with its default memory; one attack after the other, each on a fresh server
(``tests/hostile/attacks.py``): 60 bodies of 10 MB that lack their last byte, 16 gzip bombs of 15 KB at a time, JSON of
small objects, 100 clients that do not read their responses of 9 MB, 500 slow sockets, and 16 abandoned polls over 2
million invisible rows. During an attack, probes request ``/ping`` on separate connections, and an honest client
publishes and polls. Memory is the growth of the process since the start of the attack.

With two processors, the server has one of them exclusively. The attackers are a separate process on the other one, with
a lower priority than the probes and the honest client on the same processor, so that the latency is the server's and
not a wait for the attackers. ``TMS_BENCH_HOSTILE_PINNED=0`` leaves the placement to the system.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from benchmarks.figure import Figure, report
from tests.hostile import attacks
from tests.hostile.attacks import Watch, milliseconds
from tests.server.process import TMS, Serve, configure
from tests.support import size

#: The size of the attacks, as a percentage of the full sizes.
PERCENT = size("TMS_BENCH_HOSTILE", 100)
#: The duration of each attack, in seconds.
SECONDS = size("TMS_BENCH_HOSTILE_SECONDS", 20)
#: The server's memory limit and the allowed growth beyond it, and the bar of ``/ping``.
MEMORY_MB, OVERHEAD_MB, PING_MS = 256, 100, 100
_PROCESSORS = sorted(os.sched_getaffinity(0))
#: Whether the server and the attackers are pinned to separate processors.
PINNED = size("TMS_BENCH_HOSTILE_PINNED", 1) == 1 and len(_PROCESSORS) > 1 and shutil.which("taskset") is not None
#: The nice value of the attackers.
_NICE = 10
_MB = 1 << 20


def share(full: int) -> int:
    """Return the configured share of a full number."""
    return max(1, full * PERCENT // 100)


ATTACKS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "unfinished bodies": lambda port: attacks.unfinished_bodies(port, share(60), 10 * _MB - 100),
    "gzip bombs": lambda port: attacks.gzip_bombs(port, share(16), 10 * _MB - 10),
    "JSON of small objects": lambda port: attacks.json_of_objects(port, share(16), 10 * _MB - 100),
    "readers who do not read": lambda port: attacks.stalled_readers(port, share(100)),
    "sockets that drip": lambda port: attacks.slow_senders(port, share(500), 5),
}


def start_server(folder: str) -> Serve:
    """Return a server, on a separate processor if there is one."""
    alone = ["taskset", "-c", str(_PROCESSORS[0])] if PINNED else []
    return Serve(configure(Path(folder)), tms=[*alone, str(TMS)])


@contextmanager
def run_attack(name: str, port: int) -> Iterator[None]:
    """Run an attack in a separate process."""
    spawning = multiprocessing.get_context("spawn")
    started, stop = spawning.Event(), spawning.Event()
    process = spawning.Process(target=_attack, args=(name, port, started, stop))
    process.start()
    try:
        started.wait()
        yield
    finally:
        stop.set()
        process.join()


def _attack(name: str, port: int, started: Event, stop: Event) -> None:
    os.nice(_NICE)
    with ATTACKS[name](port):
        started.set()
        stop.wait()


def measure_attack(name: str) -> Watch:
    """Return the measurements of one attack."""
    with tempfile.TemporaryDirectory(prefix="p22-") as folder, start_server(folder) as server:
        attacks.prepare(server, large=10, large_bytes=9 * _MB)
        with run_attack(name, server.port), Watch(server) as watch:
            time.sleep(SECONDS)
        server.end()
    return watch


def measure_abandoned_polls() -> tuple[Watch, float, float]:
    """Return the measurements of repeated abandoned polls: probes and memory, the longest response of a topic request,
    and the longest time until the server had stopped all polls, in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="p22-") as folder, start_server(folder) as server:
        attacks.prepare(server, invisible=share(2_000_000))
        end = time.monotonic() + SECONDS
        with Watch(server) as watch:
            rounds = [attacks.abandoned_polls(server, 16)]
            while time.monotonic() < end:
                rounds.append(attacks.abandoned_polls(server, 16))
        server.end()
    topic_seconds, seconds = map(max, zip(*rounds, strict=True))
    return watch, topic_seconds, seconds


def report_attack(name: str, watch: Watch, **more: float) -> None:
    """Report the two figures of an attack."""
    details = watch.figures() | more
    limit = MEMORY_MB + OVERHEAD_MB
    report(Figure("P22", f"{name}: MB more than before", round(watch.grown_mb, 1), at_most=limit, details=details))
    report(Figure("P22", f"{name}: /ping p99, ms", milliseconds(watch.pings, 99), at_most=PING_MS))


def main() -> None:
    if PINNED:
        os.sched_setaffinity(0, _PROCESSORS[1:])
    for name in ATTACKS:
        report_attack(name, measure_attack(name))
    report_abandoned()


def report_abandoned() -> None:
    """Report the figures of abandoned polls."""
    watch, topic_seconds, seconds = measure_abandoned_polls()
    more = {"topic_ms": round(topic_seconds * 1000, 1), "over_after_seconds": round(seconds, 2)}
    report_attack("abandoned polls", watch, **more)


if __name__ == "__main__":
    main()
