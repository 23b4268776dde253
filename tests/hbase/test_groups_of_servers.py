"""Publishers and a consumer group on HBase with two servers, which are stopped and killed during the work.

Each order that is acknowledged is billed once. How often servers are hit: ``TMS_TEST_HAND_OVERS``.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hbase.publishers import KINDS, PARTITIONS, Publisher
from tests.hbase.tables import Tables
from tests.hbase.test_two_servers import Pair
from tests.server.client import Client
from tests.server.group_worker import BILLS, ORDERS, billed, bills, worker
from tests.server.process import Serve
from tests.support import free_port, size, wait_until
from tests.transaction.managers import served
from tms_core import client as library
from tms_core.clock import SystemClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

#: How many orders of each publisher are acknowledged before the next blow.
SOME = 6
#: How often a server is stopped, and one killed.
ROUNDS = size("TMS_TEST_HAND_OVERS", 1)


class Servers(Pair):
    """Two servers on the same tables, at fixed ports."""

    def __init__(self, tables: Tables, folder: Path, transactions: str | None, slots: int) -> None:
        source = "thrift" if transactions else "manager"
        super().__init__(tables, folder, source, slots=slots, servers=min(2, slots))
        self._transactions, self._slots = transactions, slots
        self.ports = {name: (free_port(), transactions or f"127.0.0.1:{free_port()}") for name in "ab"}
        self.running: dict[int, Serve] = {}

    def start(self, ordinal: int) -> None:
        self.running[ordinal] = server = self.server("ab"[ordinal])
        server.transactions = self._transactions or server.transactions

    def kill(self, ordinal: int) -> None:
        server = self.running.pop(ordinal)
        server.kill()
        server.__exit__()

    def leads(self, ordinal: int) -> int:
        with Client(self.running[ordinal].port) as client:
            for line in client.ask("GET", "/metrics").text.splitlines():
                if line.startswith("tms_server_slots "):
                    return int(float(line.split()[1]))
        raise AssertionError("it does not say")

    def settle(self) -> None:
        """Wait until each server leads its own slots, or one server leads the only slot."""
        own = (self._slots + 1) // 2, self._slots // 2
        either = {own, own[::-1]} if self._slots == 1 else {own}
        wait_until(lambda: (self.leads(0), self.leads(1)) in either)

    def led_by(self, turn: int) -> int:
        """Return a server that leads; in each turn another one if several lead."""
        leaders = [ordinal for ordinal in (0, 1) if self.leads(ordinal)]
        return leaders[turn % len(leaders)]

    def client(self, ordinal: int) -> library.Client:
        server = self.running[ordinal]
        return library.Client(server.url, transactions=server.transactions)


@pytest.fixture
def transactions() -> Iterator[str]:
    with TransactionManager(MemoryStorage(), SystemClock()) as manager, served(manager) as service:
        yield service.address


@contextmanager
def working(servers: Servers) -> Iterator[None]:
    with ExitStack() as stack:
        for server in [*servers.running.values()] * 2:
            process = stack.enter_context(worker(server))
            stack.callback(process.kill)
        yield


@contextmanager
def publishing(servers: Servers) -> Iterator[dict[int, list[Publisher]]]:
    publishers = {
        ordinal: [Publisher(server, kind) for kind in KINDS] for ordinal, server in sorted(servers.running.items())
    }
    with ExitStack() as stack:
        for publisher in [*publishers[0], *publishers[1]]:
            publisher.start()
            stack.callback(publisher.stop)
        yield publishers


def more(publishers: list[Publisher]) -> None:
    """Wait until each publisher has more acknowledged orders."""
    wanted = {publisher: len(publisher.acknowledged) + SOME for publisher in publishers}

    def enough() -> bool:
        for publisher in publishers:
            publisher.check()
        return all(len(publisher.acknowledged) >= count for publisher, count in wanted.items())

    wait_until(enough)


@pytest.mark.parametrize("own", [False, True], ids=["a service elsewhere", "their own manager"])
@pytest.mark.parametrize("slots", [1, 5], ids=["one leader", "a leader for each slot"])
def test_consumer_group_of_killed_servers_processes_each_order_once(
    hbase_tables: Tables, tmp_path: Path, transactions: str, slots: int, own: bool
) -> None:
    servers = Servers(hbase_tables, tmp_path, None if own else transactions, slots)
    try:
        for ordinal in (0, 1):
            servers.start(ordinal)
        servers.settle()
        with servers.client(0) as client:
            client.create_topic(ORDERS, properties={"partitions": str(PARTITIONS)})
            client.create_topic(BILLS)
        with working(servers), publishing(servers) as publishers:
            more([*publishers[0], *publishers[1]])
            for turn in range(ROUNDS):
                stopped = servers.led_by(turn)
                servers.running[stopped].process.send_signal(signal.SIGSTOP)
                more(publishers[1 - stopped])
                servers.running[stopped].process.send_signal(signal.SIGCONT)
                more(publishers[stopped])
                servers.settle()
                killed = servers.led_by(turn + 1)
                servers.kill(killed)
                more(publishers[1 - killed])
                servers.start(killed)
                servers.settle()
                more([*publishers[0], *publishers[1]])
        everybody = [*publishers[0], *publishers[1]]
        billed(servers.running[0], {order for publisher in everybody for order in publisher.acknowledged})
        check(everybody, Counter(bills(servers.running[1])))
    finally:
        for ordinal in list(servers.running):
            servers.kill(ordinal)


def check(publishers: list[Publisher], found: Counter[bytes]) -> None:
    """Check that each acknowledged order was billed once, and no rejected order."""
    acknowledged = {order for publisher in publishers for order in publisher.acknowledged}
    unknown = {order for publisher in publishers for order in publisher.unknown}
    assert [order for order, times in found.items() if times > 1] == []
    assert acknowledged - set(found) == set()
    assert set(found) - acknowledged - unknown == set()
