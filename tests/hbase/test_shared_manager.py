"""Two ``tms serve`` on one HBase that share a transaction manager, whose leader is stopped and killed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread

import pytest

from tests.hbase.tables import Tables
from tests.hbase.test_two_servers import Pair, leader_of, leads
from tests.server.process import TMS, Serve
from tests.support import PATIENCE_SECONDS, wait_until
from tms_core.errors import Conflict, TransactionError
from tms_core.server.managing import PAGE_ROWS, may_have_undecided
from tms_core.tables.base import MessageValue
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown

#: What is committed before the next blow, by each of the clients.
SOME = 10
#: Timeouts that no test lives to see.
LONG_SECONDS = 3600


class Worker:
    """A thread that starts transactions at one server and commits every other one."""

    def __init__(self, server: Serve, name: str) -> None:
        self._name = name
        self._client = TransactionClient(server.transactions, timeout_seconds=10)
        self.started: list[int] = []
        self.committed: list[int] = []
        #: Those of which it is not known whether they were committed.
        self.unclear: set[int] = set()
        self.conflicts: set[str] = set()
        self._stop = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._client.close()

    def more(self) -> None:
        wanted = len(self.committed) + SOME
        wait_until(lambda: len(self.committed) >= wanted)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                transaction = self._client.start_short(LONG_SECONDS, self._name).transaction_id
            except TransactionError:
                time.sleep(0.1)
                continue
            self.started.append(transaction)
            if len(self.started) % 2:
                self._commit(transaction)

    def _commit(self, transaction: int) -> None:
        while not self._stop.is_set():
            try:
                self._client.can_commit(transaction, [b"%d" % transaction])
                self._client.commit(transaction)
            except OutcomeUnknown:
                self.unclear.add(transaction)
                return
            except Conflict as error:
                # The manager is another one since it began: it has to be asked again.
                self.conflicts.add(error.key)
            except TransactionError:
                time.sleep(0.1)
            else:
                self.committed.append(transaction)
                return


def counts(workers: list[Worker], client: TransactionClient) -> None:
    """Check the acknowledged commits as a client sees them."""
    started = [transaction for worker in workers for transaction in worker.started]
    assert len(set(started)) == len(started)
    committed = {transaction for worker in workers for transaction in worker.committed}
    unclear = {transaction for worker in workers for transaction in worker.unclear}
    state = client.latest().snapshot
    open_pointers = state.open_pointers
    assert all("restart" in key for worker in workers for key in worker.conflicts)
    assert not committed & open_pointers
    assert not committed & set(state.invalid)
    assert set(started) - committed - unclear == set(started) & open_pointers - unclear
    assert client.start_short().transaction_id > max(started)


def answered(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except TransactionError:
        return False
    return True


@pytest.mark.parametrize("slots", [1, 2])
def test_shared_manager_survives_killed_servers(hbase_tables: Tables, tmp_path: Path, slots: int) -> None:
    pair = Pair(hbase_tables, tmp_path, source="manager", slots=slots, servers=min(2, slots))
    with pair.server("a") as one, pair.server("b") as other:
        first, second = (one, other) if slots > 1 else leader_of(one, other)
        workers = [Worker(server, f"{at}") for server in (first, second) for at in range(2)]
        with ExitStack() as stack:
            for worker in workers:
                stack.callback(worker.end)
            for worker in workers:
                worker.more()
            first.process.send_signal(signal.SIGSTOP)
            # Those of the second server are answered by that one now.
            workers[2].more()
            first.process.send_signal(signal.SIGCONT)
            for worker in workers:
                worker.more()
            leader = first if slots > 1 else leader_of(one, other)[0]
            follower = second if leader is first else first
            leader.kill()
            workers[0 if follower is first else 2].more()
        with TransactionClient(follower.transactions) as client:
            counts(workers, client)
        follower.end()
        with pair.server("c") as third:
            wait_until(lambda: leads(third))
            with TransactionClient(third.transactions) as client:
                wait_until(lambda: answered(client.invalid_size))
                counts(workers, client)


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
    pair, folder = Pair(hbase_tables, tmp_path, source="manager"), tmp_path / "none"
    pair.leader["advertise"] = None
    with pair.server("a") as alone, TransactionClient(alone.transactions) as client:
        aborted = client.start_short().transaction_id
        with hbase_tables.open(pair.namespace) as store:
            store.message.put([(b"key", MessageValue(aborted, b"x"))])
        client.invalidate(aborted)
        alone.end()
    pair.leader["advertise"] = "http://127.0.0.1:0"
    folder.rename(tmp_path / "away")
    command = [str(TMS), "serve", "--config", str(pair.configure("a")), "--no-janitor"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "has no transaction log" in refused.stderr
    (tmp_path / "away").rename(folder)
    with pair.server("a") as first:
        wait_until(lambda: leads(first))
        rmtree(folder)
        with pair.server("b") as second, TransactionClient(second.transactions) as client:
            assert client.invalid_size() == 1
            first.end()
            wait_until(lambda: leads(second))
            wait_until(lambda: answered(client.invalid_size))
            assert list(client.latest().snapshot.invalid) == [aborted]
