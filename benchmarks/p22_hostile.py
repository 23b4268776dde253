"""P22: memory and ``/ping`` of a server that is attacked: does it stay within its bound, and answer its probes?

A real server with its default memory; one attack after the other, each on a fresh server
(``tests/hostile/attacks.py``): 60 bodies of 10 MB that lack their last byte, 16 gzip bombs of 15 KB at a time, JSON of
small objects, 100 readers who do not read messages of 9 MB, 500 sockets that drip, and 16 abandoned polls over 2
million rows that the reader may not see. All the time probes ask ``/ping`` on connections of their own, and an honest
client publishes and polls. Memory is what the process takes beyond the moment before the attack.

Attackers and server share this machine's processors, so the latency of the probes is also that of attackers in Python.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.figure import Figure, report
from tests.hostile import attacks
from tests.hostile.attacks import Watch, milliseconds
from tests.server.process import Serve, configure
from tests.support import size

#: Percent of the full sizes.
PERCENT = size("TMS_BENCH_HOSTILE", 100)
#: For how long each attack goes on.
SECONDS = size("TMS_BENCH_HOSTILE_SECONDS", 20)
MEMORY_MB, BESIDE_MB, PING_MS = 256, 100, 100
_MB = 1 << 20


def share(full: int) -> int:
    """As many as are wanted, of the full number."""
    return max(1, full * PERCENT // 100)


ATTACKS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "unfinished bodies": lambda port: attacks.unfinished_bodies(port, share(60), 10 * _MB - 100),
    "gzip bombs": lambda port: attacks.gzip_bombs(port, share(16), 10 * _MB - 10),
    "JSON of small objects": lambda port: attacks.json_of_objects(port, share(16), 10 * _MB - 100),
    "readers who do not read": lambda port: attacks.readers_who_do_not_read(port, share(100)),
    "sockets that drip": lambda port: attacks.drips(port, share(500), 5),
}


def attacked(name: str) -> Watch:
    """What one attack came to."""
    with tempfile.TemporaryDirectory(prefix="p22-") as folder, Serve(configure(Path(folder))) as server:
        attacks.prepare(server, large=10, large_bytes=9 * _MB)
        with Watch(server) as watch, ATTACKS[name](server.port):
            time.sleep(SECONDS)
        server.end()
    return watch


def abandoned() -> tuple[Watch, float, float]:
    """What abandoned polls came to: probes and memory, how long a topic took, and after how long all were over."""
    with tempfile.TemporaryDirectory(prefix="p22-") as folder, Serve(configure(Path(folder))) as server:
        attacks.prepare(server, invisible=share(2_000_000))
        with Watch(server, polls=False) as watch:
            answered, seconds = attacks.abandoned_polls(server, 16)
            time.sleep(1)
        server.end()
    return watch, answered, seconds


def report_attack(name: str, watch: Watch, **more: float) -> None:
    """Its two figures."""
    details = watch.figures() | more
    limit = MEMORY_MB + BESIDE_MB
    report(Figure("P22", f"{name}: MB more than before", round(watch.grown_mb, 1), at_most=limit, details=details))
    report(Figure("P22", f"{name}: /ping p99, ms", milliseconds(watch.pings, 99), at_most=PING_MS))


def main() -> None:
    for name in ATTACKS:
        report_attack(name, attacked(name))
    watch, answered, seconds = abandoned()
    more = {"topic_ms": round(answered * 1000, 1), "over_after_seconds": round(seconds, 2)}
    report_attack("abandoned polls", watch, **more)


if __name__ == "__main__":
    main()
