"""One worker of the consumer group of ``make run``: counts each event exactly once, however it ends.

A batch of events, and the counts made of them, are one transaction. A worker that is killed in the middle has counted
nothing of its batch; when its transaction has timed out, another worker is given the same events.
"""

from __future__ import annotations

import signal
import sys
import time

from tms_core.client import Client

#: What is counted, by which group, and where the counts go.
EVENTS, GROUP, COUNTED = "demo:events", "counters", "demo:counted"
#: So many events at a time, and so long for them, so that one can look on.
BATCH, SECONDS = 10, 0.3
#: After how long without an event a worker ends, also where the server is gone.
IDLE_SECONDS = 20
#: After how long a worker that is gone counts as gone.
TIMEOUT_SECONDS = 2


def main(url: str, transactions: str) -> None:
    """Work until a signal says that it is enough.

    Args:
        url: the server.
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
