"""A worker of a consumer group as a separate process, which turns orders into bills until it is killed.

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
#: After how long without an order a last worker ends, in seconds: longer than a transaction that was left open.
IDLE_SECONDS = 4


def main(url: str, transactions: str, idle_seconds: float | None) -> None:
    """Work until killed, or until there is nothing for so long."""
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


def billed(server: Serve, orders: set[bytes]) -> list[bytes]:
    """All bills, once all of these orders are billed, or there was time enough for it.

    Their number proves nothing: orders that nobody acknowledged may be billed, too, while others wait for the end of a
    killed worker's transaction.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert worker(server, str(IDLE_SECONDS)).wait(timeout=PATIENCE_SECONDS) == 0
        if orders <= set(found := bills(server)) or time.monotonic() > until:
            return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else None)
