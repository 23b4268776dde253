"""S11: waiting for the rate limit happens with nothing open: no iterator, no store call, no transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from janitor.state.sqlite.state import SqliteState
from janitor.sweep.executor import Pacer
from tests.builders import DAY, HOUR, NOW_MS, Call, Kit, Topic, janitor, pointer, topic, watch
from tests.disasters.spy import LevelDBSpy
from tms_core.clock import ManualClock
from tms_core.tables.base import Store
from tms_core.tables.leveldb.store import LevelDBStore

INVALID = pointer(NOW_MS - HOUR)
ROWS = 30
BATCH_ROWS = 4
ROWS_PER_SECOND = 2.0


class WatchedClock(ManualClock):
    """A clock that records at each wait the open iterators, calls and transactions."""

    def __init__(self) -> None:
        super().__init__(NOW_MS, monotonic_ms=DAY)
        self.found: list[tuple[int, int, int]] = []
        self.waits: list[float] = []
        self.calls_open = 0
        self.calls: list[str] = []
        self.transactions_open = 0
        self.spy: LevelDBSpy | None = None

    def sleep(self, seconds: float) -> None:
        iterators = self.spy.open_iterators if self.spy else 0
        self.found.append((iterators, self.calls_open, self.transactions_open))
        self.waits.append(seconds)
        super().sleep(seconds)


class WatchedState(SqliteState):
    """A state that reports its open transactions to the clock."""

    def __init__(self, clock: WatchedClock) -> None:
        self.clock = clock
        super().__init__(None)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.clock.transactions_open += 1
        try:
            with super().transaction():
                yield
        finally:
            self.clock.transactions_open -= 1


def set_up(store: Store, clock: WatchedClock) -> tuple[Kit, Topic]:
    """Return many due rows in both tables, and rows of an invalid transaction."""
    due = [NOW_MS - 3 * HOUR + number for number in range(ROWS)]
    orders = topic(store, "default:orders", ttl_seconds=7200)
    orders.plain(*due).stored(pointer(due[0]), *due).tx(INVALID, *range(NOW_MS - 10, NOW_MS))

    def count(step: int, call: Call) -> None:
        clock.calls_open += step
        clock.calls.append(call.name)

    watch(store, before=partial(count, 1), after=partial(count, -1))
    kit = janitor(store, clock=clock, state=WatchedState(clock), batch_rows=BATCH_ROWS, rows_per_second=ROWS_PER_SECOND)
    kit.snapshots.invalid = [INVALID]
    return kit, orders


def test_rate_limit_wait_holds_nothing_open(store: Store) -> None:
    clock = WatchedClock()
    kit, orders = set_up(store, clock)
    kit.engine.run_once(adopt=True)
    assert set(clock.found) == {(0, 0, 0)}
    assert sum(clock.waits) >= (2 * ROWS + 10) / ROWS_PER_SECOND
    assert max(clock.waits) <= BATCH_ROWS / ROWS_PER_SECOND
    assert orders.pointers() == [-INVALID] * 10
    assert {"message.delete", "payload.delete", "message.invert"} <= set(clock.calls)


def test_rate_limit_wait_on_leveldb_holds_no_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WatchedClock()
    clock.spy = LevelDBSpy(monkeypatch)
    with LevelDBStore(tmp_path, create=True) as store:
        kit, _ = set_up(store, clock)
        kit.engine.run_once(adopt=True)
    assert clock.spy.iterators > 20
    assert len(clock.found) > 15
    assert {iterators for iterators, _, _ in clock.found} == {0}


def test_rate_limit_after_idle_hour_allows_no_burst() -> None:
    clock = ManualClock(NOW_MS)
    pacer = Pacer(100, clock)
    pacer.throttle(100)
    clock.advance(HOUR)
    for payments in (1, 2, 3):
        pacer.throttle(50)
        assert clock.monotonic_ms() == 1000 + HOUR + payments * 500


def test_sweep_without_rate_limit_does_not_wait(store: Store) -> None:
    clock = WatchedClock()
    kit, _ = set_up(store, clock)
    kit.restart(rows_per_second=None).engine.run_once(adopt=True)
    assert clock.waits == []
