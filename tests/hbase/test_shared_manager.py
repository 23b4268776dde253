"""Two servers on one HBase that share a transaction manager, whose leader is paused and killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

import pytest

from tests.hbase.tables import Tables
from tests.kit.hbase_servers import (
    HBaseServers,
    WorkerThread,
    leads_first_slot,
    wait_for_leader,
    wait_for_more,
    working,
)
from tests.server.process import TMS, Serve
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.errors import Conflict, TransactionError
from tms_core.server.managing import PAGE_ROWS, may_have_undecided
from tms_core.tables.base import MessageValue
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown

T = TypeVar("T")

#: The commits of each worker between two faults.
SOME = 10
#: A timeout of transactions that is longer than the test.
LONG_SECONDS = 3600


class Committer(WorkerThread):
    """A worker that starts transactions at one server, and commits every other transaction.

    Attributes:
        started, acknowledged: the started and the committed transactions.
        unknown: transactions whose commit has an unknown outcome.
        conflicts: the keys of conflicts.
    """

    def __init__(self, server: Serve, name: str) -> None:
        super().__init__(name)
        self._client = TransactionClient(server.transactions, timeout_seconds=10)
        self.started: list[int] = []
        self.unknown: set[int] = set()
        self.conflicts: set[str] = set()

    def run(self) -> None:
        with self._client:
            super().run()

    def work(self) -> None:
        try:
            transaction = self._client.start_short(LONG_SECONDS, self.name).transaction_id
        except TransactionError:
            time.sleep(0.1)
            return
        self.started.append(transaction)
        if len(self.started) % 2:
            self._commit(transaction)

    def _commit(self, transaction: int) -> None:
        while not self.stopping.is_set():
            try:
                self._client.can_commit(transaction, [b"%d" % transaction])
                self._client.commit(transaction)
            except OutcomeUnknown:
                self.unknown.add(transaction)
                return
            except Conflict as error:
                # Another server has become the manager since the transaction began; repeat both calls.
                self.conflicts.add(error.key)
            except TransactionError:
                time.sleep(0.1)
            else:
                self.acknowledged.append(transaction)
                return


def call_until_success(call: Callable[[], T]) -> T:
    """Repeat a call until it succeeds: no server is the manager before the lease of a killed one has expired."""
    results: list[T] = []

    def succeeds() -> bool:
        try:
            results.append(call())
        except TransactionError:
            return False
        return True

    wait_until(succeeds)
    return results[0]


def check(workers: list[Committer], client: TransactionClient) -> None:
    """Check the acknowledged commits as a client sees them."""
    started = [transaction for worker in workers for transaction in worker.started]
    assert len(set(started)) == len(started)
    committed = {transaction for worker in workers for transaction in worker.acknowledged}
    unknown = {transaction for worker in workers for transaction in worker.unknown}
    state = call_until_success(client.state)
    open_pointers = state.open_pointers
    assert all("restart" in key for worker in workers for key in worker.conflicts)
    assert not committed & open_pointers
    assert not committed & set(state.invalid)
    assert set(started) - committed - unknown == set(started) & open_pointers - unknown
    assert call_until_success(client.start_short).transaction_id > max(started)


@pytest.mark.parametrize("slots", [1, 2])
def test_shared_manager_survives_killed_servers(hbase_tables: Tables, tmp_path: Path, slots: int) -> None:
    with HBaseServers(hbase_tables, tmp_path, source="manager", slots=slots) as servers:
        one, other = servers.start("a"), servers.start("b")
        first, second = (one, other) if slots > 1 else wait_for_leader(one, other)
        workers = [Committer(server, f"{at}") for server in (first, second) for at in range(2)]
        with working(workers):
            wait_for_more(workers, SOME)
            first.pause()
            # The second server becomes the manager.
            wait_for_more(workers[2:3], SOME)
            first.resume()
            wait_for_more(workers, SOME)
            leader = first if slots > 1 else wait_for_leader(one, other)[0]
            follower = second if leader is first else first
            leader.kill()
            wait_for_more([workers[0 if follower is first else 2]], SOME)
        with TransactionClient(follower.transactions) as client:
            check(workers, client)
        follower.end()
        third = servers.start("c")
        wait_until(lambda: leads_first_slot(third))
        with TransactionClient(third.transactions) as client:
            check(workers, client)


def test_may_have_undecided_finds_only_positive_pointers(hbase_tables: Tables) -> None:
    store = hbase_tables.store()
    assert not may_have_undecided(store)
    store.message.put([(b"a%06d" % number, MessageValue(None, b"x")) for number in range(2 * PAGE_ROWS)])
    assert not may_have_undecided(store)
    store.message.put([(b"b1", MessageValue(-7, b"x"))])
    assert not may_have_undecided(store)
    store.message.put([(b"b2", MessageValue(7, b"x"))])
    assert may_have_undecided(store)


def test_previously_standalone_server_reads_its_log_once(hbase_tables: Tables, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with HBaseServers(hbase_tables, tmp_path, source="manager", advertise=None) as servers:
        alone = servers.start("a")
        with TransactionClient(alone.transactions) as client:
            aborted = client.start_short().transaction_id
            with hbase_tables.open(servers.namespace) as store:
                store.message.put([(b"key", MessageValue(aborted, b"x"))])
            client.invalidate(aborted)
        alone.end()
        servers.leader["advertise"] = "http://127.0.0.1:0"
        log.rename(tmp_path / "away")
        command = [str(TMS), "serve", "--config", str(servers.configure("a")), "--no-janitor"]
        rejected = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert rejected.returncode == 2, rejected.stderr
        assert "has no transaction log" in rejected.stderr
        (tmp_path / "away").rename(log)
        first = servers.start("a")
        wait_until(lambda: leads_first_slot(first))
        rmtree(log)
        second = servers.start("b")
        with TransactionClient(second.transactions) as client:
            assert client.invalid_size() == 1
            first.end()
            wait_until(lambda: leads_first_slot(second))
            assert list(call_until_success(client.state).invalid) == [aborted]
