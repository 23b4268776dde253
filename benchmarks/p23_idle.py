"""P23: the cost of an idle consumer of committed messages after many invisible rows, and its latency.

The client's ``consume(read="committed")`` reads from a real server a topic with 500,000 rows of an invalid transaction.
First, the benchmark measures the server's processor time without new messages. Then it publishes single messages
outside transactions, and measures the latency from before the publish to the consumer's loop.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from benchmarks.figure import Figure, report
from tests.hostile import attacks
from tests.hostile.attacks import INVISIBLE, milliseconds
from tests.server.process import Serve, configure
from tests.support import PATIENCE_SECONDS, size
from tms_core.client import Client

ROWS = size("TMS_BENCH_INVISIBLE_ROWS", 500_000)
IDLE_SECONDS = size("TMS_BENCH_IDLE_SECONDS", 30)
MESSAGES = size("TMS_BENCH_IDLE_MESSAGES", 100)
#: The pause between two messages, in seconds, after which the consumer is idle again.
_PAUSE_SECONDS = 0.3
_TOPIC = f"default:{INVISIBLE}"


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    seen: SimpleQueue[float] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="p23-") as folder, Serve(configure(Path(folder))) as server:
        attacks.prepare(server, invisible=ROWS)
        with Client(server.url, transactions=server.transactions) as client:
            messages = client.consume(_TOPIC, read="committed")

            def consume() -> None:
                for _ in messages:
                    seen.put(time.monotonic())

            consumer = threading.Thread(target=consume)
            consumer.start()
            client.publish(_TOPIC, [b"first"])
            seen.get(timeout=PATIENCE_SECONDS)
            before, consumer_before = processor_seconds(server.process.pid), time.process_time()
            time.sleep(IDLE_SECONDS)
            used = processor_seconds(server.process.pid) - before
            used_here = time.process_time() - consumer_before
            latencies = []
            for _ in range(MESSAGES):
                time.sleep(_PAUSE_SECONDS)
                started = time.monotonic()
                client.publish(_TOPIC, [b"next"])
                latencies.append(seen.get(timeout=PATIENCE_SECONDS) - started)
            messages.stop()
            consumer.join(PATIENCE_SECONDS)
        server.end()
    share = round(100 * used / IDLE_SECONDS, 2)
    details = {"rows": ROWS, "seconds": IDLE_SECONDS, "consumer_percent": round(100 * used_here / IDLE_SECONDS, 2)}
    report(
        Figure("P23", "an idle consumer's share of a processor, in the server, %", share, at_most=1, details=details)
    )
    details = {"messages": MESSAGES, "p50_ms": milliseconds(latencies, 50), "max_ms": milliseconds(latencies, 100)}
    name = "from the publish to an idle consumer's loop, p99, ms"
    report(Figure("P23", name, milliseconds(latencies, 99), at_most=50, details=details))


if __name__ == "__main__":
    main()
