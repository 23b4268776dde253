"""A worker of the consumer group of ``make run``, which counts each event exactly once, even if it is killed.

A batch of events and its counts are one transaction. If a worker is killed, its batch is not counted; after the
transaction has timed out, another worker receives the same events.
"""

from __future__ import annotations

import signal
import sys
import time

from tms_core.client import Client

#: The topic of the events, the group that counts them, and the topic of the counts.
EVENTS, GROUP, COUNTED = "demo:events", "counters", "demo:counted"
#: The events of a batch, and the seconds that a worker pauses in it, so that you can watch the progress.
BATCH, SECONDS = 10, 0.3
#: The seconds without an event after which a worker stops, for example because the server has stopped.
IDLE_SECONDS = 20
#: The timeout of a batch's transaction in seconds, after which another worker receives the events of a killed worker.
TIMEOUT_SECONDS = 2


def main(url: str, transactions: str) -> None:
    """Count events until SIGTERM, or until no event has arrived for :data:`IDLE_SECONDS`.

    Args:
        url: the URL of the server.
        transactions: ``HOST:PORT`` of its transaction service.
    """
    with Client(url, transactions=transactions) as client:
        work = client.work(
            EVENTS, GROUP, batch=BATCH, order="none", timeout_seconds=TIMEOUT_SECONDS, idle_seconds=IDLE_SECONDS
        )
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        for tx, batch in work:
            tx.publish(COUNTED, [event.payload for event in batch])
            time.sleep(SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
