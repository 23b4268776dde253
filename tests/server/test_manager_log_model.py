"""Managers on one log, suspended at any point while others lead: responses stay valid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import pytest

from tests.server.test_manager_log import Late
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

#: How many histories are played, and what happens in each.
HISTORIES, STEPS, PAUSES, DEEP = 250, 120, 60, 3
#: How likely a change of leader is at a step, a pause at a call of the table, and a lost call or answer.
CHANGE, PAUSE, LOST = 0.1, 0.1, 0.02
#: How likely the leader's memory is compared with the log.
LOOK = 0.2
LONG_SECONDS = 3600

T = TypeVar("T")


class Paused(Late):
    """One server's way to the table: while it calls, other servers may do this and that."""

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
            raise StoreUnavailable("it did not come there.")
        made = change()
        self.before(key)
        if luck > 1 - LOST:
            raise StoreUnavailable("there was no answer.")
        return made


class Node:
    def __init__(self, history: History) -> None:
        self._history = history
        self.busy = False
        #: Its lease, and that in which it has taken over.
        self.fence = self.ready = -1
        self.manager = TransactionManager(SideStorage(Paused(history.side, history), self._lease), history.clock)

    def _lease(self) -> Callable[[], bool]:
        fence = self.fence
        if fence != self._history.fence:
            raise not_leader_error()
        return lambda: fence == self._history.fence

    def do(self, work: Callable[[], object]) -> None:
        """Do something, which may fail; alone, as far as this server is concerned."""
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
    """What happens, by a seed.

    Attributes:
        possible: what may be the state of each transaction that was answered to a client.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.side, self.clock = MemorySide(), ManualClock(NOW_MS)
        self.possible: dict[int, set[str]] = {}
        self.transactions: list[Transaction] = []
        self.fence = self._depth = 0
        self._pauses = PAUSES
        self._nodes = [Node(self) for _ in range(3)]
        self._leader = self._nodes[0]

    def play(self) -> None:
        for _ in range(STEPS):
            self._step(CHANGE)
        last = self._manager_of(self.side)
        assert all(last.status(pointer) in possible for pointer, possible in self.possible.items())
        assert last.start_short().transaction_id > max([0, *self.possible])

    def run_concurrent_step(self) -> None:
        """Some steps of the other servers, now and then."""
        if self._pauses and self._depth < DEEP and self.random.random() < PAUSE:
            self._pauses -= 1
            self._depth += 1
            for _ in range(self.random.randrange(1, 5)):
                self._step(4 * CHANGE)
            self._depth -= 1

    def _step(self, change: float) -> None:
        node = self._leader if self.random.random() < 0.7 else self.random.choice(self._nodes)
        if node.busy:
            return
        if self.random.random() < change:
            self.fence += 1
            self._leader, node.fence = node, self.fence
            node.do(node.begin)
            return
        works = (self._start, self._start, self._commit, self._abort, self._invalidate, self._keep, self._ask)
        work = self.random.choice(works)
        node.do(lambda: work(node.manager))
        if self.fence == node.fence == node.ready and node.manager.is_running and self.random.random() < LOOK:
            self._knows(node.manager)

    def _knows(self, manager: TransactionManager) -> None:
        """What the leader's memory has, by which it lets publish, is what the log has."""
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
        # One without effect is answered, too; after the log has failed, one of an older transaction invalidates it.
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
        """A snapshot lacks nothing that was answered before it was asked for."""
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
