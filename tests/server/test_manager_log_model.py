"""Managers on one log, suspended at any point while others lead: responses stay valid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import pytest

from tests.kit.side import FaultySide
from tests.transaction.managers import NOW_MS
from tms_core.clock import ManualClock
from tms_core.errors import NotInProgress, StoreUnavailable, TmsError
from tms_core.server.ha import manager_log
from tms_core.server.ha.leadership import not_leader_error
from tms_core.server.ha.manager_log import SideStorage
from tms_core.tables.base import Page
from tms_core.tables.side import MemorySide
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import Transaction

#: The number of histories, and in each history the steps, the pauses and the depth of nested steps.
HISTORIES, STEPS, PAUSES, DEEP = 250, 120, 60, 3
#: The probabilities of a change of leader at a step, of a pause at a call of the table, and of a lost call or response.
CHANGE, PAUSE, LOST = 0.1, 0.1, 0.02
#: The probability of a comparison of the leader's memory with the log.
LOOK = 0.2
LONG_SECONDS = 3600

T = TypeVar("T")


class PausingSide(FaultySide):
    """The side table of one server, during whose calls other servers may take steps."""

    def __init__(self, side: MemorySide, history: History) -> None:
        super().__init__(side)
        self._history = history
        self.before = lambda _: history.run_concurrent_step()

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        self.before(start)
        return super().rows(start, stop, limit)

    def _change(self, key: bytes, change: Callable[[], T]) -> T:
        luck = self._history.random.random()
        self.before(key)
        if luck < LOST:
            raise StoreUnavailable("The call is lost.")
        made = change()
        self.before(key)
        if luck > 1 - LOST:
            raise StoreUnavailable("The response is lost.")
        return made


class LogServer:
    """A server with a transaction manager.

    Attributes:
        busy: whether the server executes a call.
        fence, ready: the fence of its lease, and the fence at its last takeover.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self.busy = False
        self.fence = self.ready = -1
        self.manager = TransactionManager(SideStorage(PausingSide(history.side, history), self._lease), history.clock)

    def _lease(self) -> Callable[[], bool]:
        fence = self.fence
        if fence != self._history.fence:
            raise not_leader_error()
        return lambda: fence == self._history.fence

    def do(self, work: Callable[[], object]) -> None:
        """Execute a call, which may fail; the server executes no other call at the same time."""
        self.busy = True
        try:
            with suppress(TmsError):
                work()
        finally:
            self.busy = False

    def begin(self) -> None:
        fence = self.fence
        self.manager.resume()
        self.ready = fence


class History:
    """A random history of servers and clients.

    Attributes:
        possible: the possible states of each transaction that a client knows.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.side, self.clock = MemorySide(), ManualClock(NOW_MS)
        self.possible: dict[int, set[str]] = {}
        self.transactions: list[Transaction] = []
        self.fence = self._depth = 0
        self._pauses = PAUSES
        self._servers = [LogServer(self) for _ in range(3)]
        self._leader = self._servers[0]

    def play(self) -> None:
        for _ in range(STEPS):
            self._step(CHANGE)
        last = self._manager_of(self.side)
        assert all(last.status(pointer) in possible for pointer, possible in self.possible.items())
        assert last.start_short().transaction_id > max([0, *self.possible])

    def run_concurrent_step(self) -> None:
        """Let other servers take some steps, with a small probability."""
        if self._pauses and self._depth < DEEP and self.random.random() < PAUSE:
            self._pauses -= 1
            self._depth += 1
            for _ in range(self.random.randrange(1, 5)):
                self._step(4 * CHANGE)
            self._depth -= 1

    def _step(self, change: float) -> None:
        server = self._leader if self.random.random() < 0.7 else self.random.choice(self._servers)
        if server.busy:
            return
        if self.random.random() < change:
            self.fence += 1
            self._leader, server.fence = server, self.fence
            server.do(server.begin)
            return
        works = (self._start, self._start, self._commit, self._abort, self._invalidate, self._keep, self._ask)
        work = self.random.choice(works)
        server.do(lambda: work(server.manager))
        if self.fence == server.fence == server.ready and server.manager.is_running and self.random.random() < LOOK:
            self._check_memory(server.manager)

    def _check_memory(self, manager: TransactionManager) -> None:
        """Check that the open transactions in the leader's memory equal those in the log."""
        copy = MemorySide()
        copy.put(self.side.rows(b"", None, 1 << 20).items)
        assert {pointer for pointer in self.possible if manager.is_in_progress(pointer)} == set(
            self._manager_of(copy).visibility().open_pointers
        ) & self.possible.keys()

    def _manager_of(self, side: MemorySide) -> TransactionManager:
        return TransactionManager(SideStorage(side, lambda: lambda: True), self.clock)

    # -- client operations --------------------------------------------------------------------------------------------

    def _start(self, manager: TransactionManager) -> None:
        transaction = manager.start_short(LONG_SECONDS)
        assert transaction.transaction_id not in self.possible
        self.possible[transaction.transaction_id] = {"in progress"}
        self.transactions.append(transaction)

    def _commit(self, manager: TransactionManager) -> None:
        def end(transaction: Transaction) -> None:
            manager.can_commit(transaction.transaction_id, [b"%d" % transaction.transaction_id])
            manager.commit(transaction.transaction_id)

        self._end("ended", end)

    def _abort(self, manager: TransactionManager) -> None:
        # An abort without an effect succeeds, too. After a failure of the log, it invalidates an older transaction.
        self._end("ended", manager.abort, "invalid")

    def _invalidate(self, manager: TransactionManager) -> None:
        def end(transaction: Transaction) -> None:
            if not manager.invalidate(transaction.transaction_id):
                raise NotInProgress("it has ended.")

        self._end("invalid", end)

    def _end(self, state: str, end: Callable[[Transaction], object], *other: str) -> None:
        open_ones = [one for one in self.transactions if "in progress" in self.possible[one.transaction_id]]
        if not open_ones:
            return
        transaction = self.random.choice(open_ones)
        possible = self.possible[transaction.transaction_id]
        possible |= {state, *other}
        with suppress(NotInProgress):
            end(transaction)
            possible.intersection_update({state, *other})
        possible.discard("in progress")
        assert possible

    def _keep(self, manager: TransactionManager) -> None:
        manager.take_snapshot()

    def _ask(self, manager: TransactionManager) -> None:
        """Check that a snapshot contains all changes that were acknowledged before."""
        before = {pointer for pointer, possible in self.possible.items() if possible == {"invalid"}}
        found = manager.visibility()
        assert before <= set(found.invalid)
        assert not before & found.open_pointers


@pytest.mark.parametrize("row_bytes", [30, manager_log.ROW_BYTES])
def test_managers_paused_anywhere_keep_acknowledged_changes(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_log, "ROW_BYTES", row_bytes)
    for seed in range(HISTORIES):
        try:
            History(seed).play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
