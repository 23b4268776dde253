"""A worker of a consumer group, as a process of its own: orders become bills until it is killed.

python -m tests.server.group_worker URL HOST:PORT [idle seconds]
"""

from __future__ import annotations

import sys

from tms_core.client import Client

ORDERS, BILLS, GROUP = "default:orders", "default:bills", "billing"
TIMEOUT_SECONDS = 2


def main(url: str, transactions: str, idle_seconds: float | None) -> None:
    """Work until killed, or until there is nothing for so long."""
    with Client(url, transactions=transactions) as client:
        work = client.work(
            ORDERS, GROUP, batch=7, order="none", timeout_seconds=TIMEOUT_SECONDS, idle_seconds=idle_seconds
        )
        for tx, batch in work:
            tx.publish(BILLS, [order.payload for order in batch])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else None)
