"""A worker of a consumer group as a process, which publishes a bill for each order until it is killed.

python -m tests.server.group_worker URL HOST:PORT [idle seconds]
"""

from __future__ import annotations

import subprocess
import sys
import time

from tests.server.process import Serve
from tests.support import PATIENCE_SECONDS
from tms_core.client import Client

ORDERS, BILLS, GROUP = "default:orders", "default:bills", "billing"
TIMEOUT_SECONDS = 2
#: The idle time after which the last worker ends, in seconds: longer than the timeout of an open transaction.
IDLE_SECONDS = 4


def main(url: str, transactions: str, idle_seconds: float | None) -> None:
    """Work until the process is killed, or no order comes for the idle time."""
    with Client(url, transactions=transactions) as client:
        work = client.work(
            ORDERS, GROUP, batch=7, order="none", timeout_seconds=TIMEOUT_SECONDS, idle_seconds=idle_seconds
        )
        for tx, batch in work:
            tx.publish(BILLS, [order.payload for order in batch])


def worker(server: Serve, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.server.group_worker", server.url, server.transactions, *more]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def bills(server: Serve) -> list[bytes]:
    with Client(server.url, transactions=server.transactions) as client, client.transaction() as tx:
        return [message.payload for message in tx.poll(BILLS)]


def wait_for_bills(server: Serve, orders: set[bytes]) -> list[bytes]:
    """Run workers until all of the orders have a bill, or the time is over; return all bills.

    The number of bills proves nothing: unacknowledged orders may have bills, too, and other orders wait for the end of
    the transaction of a killed worker.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert worker(server, str(IDLE_SECONDS)).wait(timeout=PATIENCE_SECONDS) == 0
        if orders <= set(found := bills(server)) or time.monotonic() > deadline:
            return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else None)
