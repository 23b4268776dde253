"""Workers of a group and their server are killed at random moments: each order is billed, once."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import yaml

from tests.server.client import PATIENCE_SECONDS
from tests.server.group_worker import BILLS, ORDERS
from tests.server.process import Serve, configure
from tests.support import free_port, size
from tms_core.client import Client

#: How long processes are killed, in seconds; 120 is the full size.
SECONDS = size("TMS_TEST_GROUP_SECONDS", 6)
WORKERS = 3
#: After how long without an order a last worker ends, in seconds: longer than a transaction that was left open.
IDLE_SECONDS = 4


def configured(folder: Path) -> Path:
    """Settings with ports that stay the same, so that workers find the server again."""
    path = configure(folder, port=free_port())
    settings = yaml.safe_load(path.read_text())
    settings["transactions"]["thrift"] = f"127.0.0.1:{free_port()}"
    path.write_text(yaml.safe_dump(settings))
    return path


def worker(server: Serve, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "tests.server.group_worker", server.url, server.transactions, *more]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def publish(server: Serve, first: int, count: int) -> None:
    with Client(server.url, transactions=server.transactions) as client, client.transaction() as tx:
        tx.publish(ORDERS, [b"%d" % number for number in range(first, first + count)])


def bills(server: Serve) -> list[bytes]:
    with Client(server.url, transactions=server.transactions) as client, client.transaction() as tx:
        return [message.payload for message in tx.poll(BILLS)]


def billed(server: Serve, orders: int) -> list[bytes]:
    """All bills, once there are enough and no order has come again for as long as a transaction may be left open."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert worker(server, str(IDLE_SECONDS)).wait(timeout=PATIENCE_SECONDS) == 0
        if len(found := bills(server)) >= orders or time.monotonic() > until:
            return found


def test_given_workers_and_a_server_that_are_killed_then_each_order_is_billed_exactly_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    config, orders, kills = configured(tmp_path), 0, Counter[str]()
    server = Serve(config, janitor=True)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with Client(server.url) as client:
            client.create_topic(ORDERS)
            client.create_topic(BILLS)
        workers = [worker(server) for _ in range(WORKERS)]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            publish(server, orders, 50)
            orders += 50
            time.sleep(chance.uniform(0.05, 0.6))
            if chance.random() < 0.3:
                server.kill()
                server.__exit__()
                server = Serve(config, janitor=True)
                kills["server"] += 1
            else:
                gone = workers.pop(0)
                gone.kill()
                gone.wait()
                workers.append(worker(server))
                kills["worker"] += 1
        assert sorted(billed(server, orders), key=int) == [b"%d" % number for number in range(orders)]
        assert kills.total()
    finally:
        for one in workers:
            one.kill()
            one.wait()
        server.__exit__()
