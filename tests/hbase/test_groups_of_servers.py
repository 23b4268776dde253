"""Publishers and a consumer group on HBase with two servers, which are paused and killed during the work.

Each acknowledged order is billed once. ``TMS_TEST_HAND_OVERS`` is the number of rounds with a pause and a kill; with
more than one round, the test also runs for all combinations of slots and transaction services.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hbase.publishers import MODES, PARTITIONS, Publisher
from tests.hbase.tables import Tables
from tests.kit.hbase_servers import HBaseServers, led_slots, wait_for_more, working
from tests.server.group_worker import BILLS, ORDERS, bills, wait_for_bills, worker
from tests.support import size
from tests.transaction.managers import served
from tms_core.client import Client
from tms_core.clock import SystemClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

#: The acknowledged orders of each publisher between two faults.
SOME = 6
ROUNDS = size("TMS_TEST_HAND_OVERS", 1)
#: The slots, and whether the servers share a transaction manager.
DEPLOYMENTS = {"one leader and a transaction service": (1, False), "leader per slot and shared manager": (5, True)}
if ROUNDS > 1:
    DEPLOYMENTS |= {"one leader and shared manager": (1, True), "leader per slot and transaction service": (5, False)}


@pytest.fixture
def transactions() -> Iterator[str]:
    with TransactionManager(MemoryStorage(), SystemClock()) as manager, served(manager) as service:
        yield service.address


def choose_leader(servers: HBaseServers, turn: int) -> str:
    """Return the name of a leader; if both servers lead, another leader in each turn."""
    leaders = [name for name, server in sorted(servers.running.items()) if led_slots(server)]
    return leaders[turn % len(leaders)]


@contextmanager
def group_workers(servers: HBaseServers) -> Iterator[None]:
    with ExitStack() as stack:
        for server in [*servers.running.values()] * 2:
            process = stack.enter_context(worker(server))
            stack.callback(process.kill)
        yield


@pytest.mark.parametrize(("slots", "own"), DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_consumer_group_of_killed_servers_processes_each_order_once(
    hbase_tables: Tables, tmp_path: Path, transactions: str, slots: int, own: bool
) -> None:
    source, address = ("manager", None) if own else ("thrift", transactions)
    with HBaseServers(hbase_tables, tmp_path, slots=slots, source=source, transactions=address) as servers:
        started = {name: servers.start(name) for name in "ab"}
        publishers = {name: [Publisher(server, mode) for mode in MODES] for name, server in started.items()}
        servers.wait_for_shares()
        with Client(started["a"].url, transactions=started["a"].transactions) as client:
            client.create_topic(ORDERS, properties={"partitions": str(PARTITIONS)})
            client.create_topic(BILLS)
        all_publishers = [*publishers["a"], *publishers["b"]]
        with group_workers(servers), working(all_publishers):
            wait_for_more(all_publishers, SOME)
            for turn in range(ROUNDS):
                paused = choose_leader(servers, turn)
                servers.running[paused].pause()
                wait_for_more(publishers[other(paused)], SOME)
                servers.running[paused].resume()
                wait_for_more(publishers[paused], SOME)
                servers.wait_for_shares()
                killed = choose_leader(servers, turn + 1)
                servers.kill(killed)
                wait_for_more(publishers[other(killed)], SOME)
                servers.start(killed)
                servers.wait_for_shares()
                wait_for_more(all_publishers, SOME)
        wait_for_bills(
            servers.running["a"], {order for publisher in all_publishers for order in publisher.acknowledged}
        )
        check(all_publishers, Counter(bills(servers.running["b"])))


def other(name: str) -> str:
    return "b" if name == "a" else "a"


def check(publishers: list[Publisher], found: Counter[bytes]) -> None:
    """Check that each acknowledged order was billed once, and no rejected order."""
    acknowledged = {order for publisher in publishers for order in publisher.acknowledged}
    unknown = {order for publisher in publishers for order in publisher.unknown}
    assert [order for order, times in found.items() if times > 1] == []
    assert acknowledged - set(found) == set()
    assert set(found) - acknowledged - unknown == set()
