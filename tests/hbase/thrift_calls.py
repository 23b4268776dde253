"""Actions before chosen Thrift calls of a sweep, such as the fifth ``mutateRows``.

A page of keys takes two calls and a batch at least one, so an action can come before any step of a sweep.

    calls = CallSchedule(store.pool)
    calls.before("mutateRows", 5, lambda: server.command("split", table, key))
    kit.engine.run_once()
    assert calls.all_made
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tms_core.clock import SystemClock
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.thrift import Call, ThriftConnection

#: A function that receives the name and the arguments of a Thrift call.
BeforeCall = Callable[[str, Any], None]
#: A function that receives the name, the arguments and the response of a Thrift call.
AfterCall = Callable[[str, Any, Any], None]


class CallSchedule:
    """Actions before chosen calls of a pool."""

    def __init__(self, pool: HBasePool) -> None:
        self._actions: dict[tuple[str, int], Callable[[], object]] = {}
        self._made: Counter[str] = Counter()
        self._due: deque[Callable[[], object]] = deque()
        self._lock, self._acting = threading.Lock(), threading.Lock()
        watch_calls(pool, before=self._before)

    def before(self, call: str, number: int, action: Callable[[], object]) -> None:
        """Run an action in the thread of the ``number``-th call of a name from now on, before the call.

        Only one action runs at a time; other threads continue.
        """
        with self._lock:
            self._actions[call, self._made[call] + number] = action

    @property
    def all_made(self) -> bool:
        """Return whether all chosen calls were made."""
        return not self._actions

    def _before(self, name: str, _arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._made[name] += 1
            action = self._actions.pop((name, self._made[name]), None)
            if action is None:
                return
            self._due.append(action)
        with self._acting:
            self._due.popleft()()


class OpenScanner:
    """The id and the start row of the scanner that a pool has opened last."""

    def __init__(self, pool: HBasePool) -> None:
        self.id, self.start = 0, b""
        watch_calls(pool, after=self._after)

    def _after(self, name: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if name == "scannerOpenWithScan":
            self.id, self.start = answer, arguments[1].startRow


class SleeplessClock(SystemClock):
    """The system clock with sleeps of no duration."""

    def sleep(self, seconds: float) -> None:
        """Yield the processor only."""
        super().sleep(0)


def watch_calls(pool: HBasePool, before: BeforeCall | None = None, after: AfterCall | None = None) -> None:
    """Call functions before and after each later Thrift call of a pool; an error of theirs is an error of the call.

    For calls that are sent together, all functions run before the first call, or after the last response.
    """
    borrow = pool.connection

    def watched(calls: Sequence[Call], make: Callable[[Sequence[Call]], list[Any]]) -> list[Any]:
        if before is not None:
            for name, arguments in calls:
                before(name, arguments)
        answers = make(calls)
        if after is not None:
            for (name, arguments), answer in zip(calls, answers, strict=True):
                after(name, arguments, answer)
        return answers

    @contextmanager
    def connection() -> Iterator[ThriftConnection]:
        with borrow() as borrowed:
            make = borrowed.calls
            # Restore the method afterwards: the next borrower watches it again.
            vars(borrowed)["calls"] = lambda calls: watched(calls, make)
            try:
                yield borrowed
            finally:
                vars(borrowed)["calls"] = make

    vars(pool)["connection"] = connection
