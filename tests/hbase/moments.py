"""Events in HBase during a sweep, at a moment that the test chooses.

A moment is a Thrift call that is about to be made: the fifth ``mutateRows``, or the second ``scannerGetList``, whose
scanner is open by then. A page of keys is two round trips and every batch is at least one, so no step of a sweep is out
of reach.

    moments = Moments(store.pool)
    moments.at("mutateRows", 5, lambda: server.command("split", table, key))
    kit.engine.run_once()
    assert moments.all_came
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

#: Told of a Thrift call: its name and what it is given.
CallWatcher = Callable[[str, Any], None]
#: Told of an answer: the call's name, what it was given, and what came.
AnswerWatcher = Callable[[str, Any, Any], None]


class Moments:
    """A schedule of events."""

    def __init__(self, pool: HBasePool) -> None:
        self._events: dict[tuple[str, int], Callable[[], object]] = {}
        self._came: Counter[str] = Counter()
        self._due: deque[Callable[[], object]] = deque()
        self._lock, self._acting = threading.Lock(), threading.Lock()
        watch_calls(pool, before=self._before)

    def at(self, call: str, number: int, act: Callable[[], object]) -> None:
        """Do something just before the call of that name that is the n-th from now on.

        The thread that makes the call does it, once what came before is over; the others go on.
        """
        with self._lock:
            self._events[call, self._came[call] + number] = act

    @property
    def all_came(self) -> bool:
        """Return whether all events have happened."""
        return not self._events

    def _before(self, name: str, _arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._came[name] += 1
            act = self._events.pop((name, self._came[name]), None)
            if act is None:
                return
            self._due.append(act)
        with self._acting:
            self._due.popleft()()


class ScannerMoments:
    """A schedule of events that also tracks the current scanner."""

    def __init__(self, pool: HBasePool) -> None:
        self.last, self.start = 0, b""
        watch_calls(pool, after=self._after)
        self.moments = Moments(pool)

    def _after(self, name: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if name == "scannerOpenWithScan":
            self.last, self.start = answer, arguments[1].startRow


class SleeplessClock(SystemClock):
    """The system clock with sleeps of no duration."""

    def sleep(self, seconds: float) -> None:
        """Yield the processor only."""
        super().sleep(0)


def watch_calls(pool: HBasePool, before: CallWatcher | None = None, after: AnswerWatcher | None = None) -> None:
    """Tell of every Thrift call of a pool from now on; what is told may raise, as the call could.

    Of calls that are made together all are told before, and all are told after.
    """
    borrow = pool.connection

    def tell(calls: Sequence[Call], ask: Callable[[Sequence[Call]], list[Any]]) -> list[Any]:
        if before is not None:
            for name, arguments in calls:
                before(name, arguments)
        answers = ask(calls)
        if after is not None:
            for (name, arguments), answer in zip(calls, answers, strict=True):
                after(name, arguments, answer)
        return answers

    @contextmanager
    def borrowed() -> Iterator[ThriftConnection]:
        with borrow() as connection:
            make = connection.calls
            # One call is many of one. Another borrower gets the connection as it was.
            vars(connection)["calls"] = lambda calls: tell(calls, make)
            try:
                yield connection
            finally:
                vars(connection)["calls"] = make

    vars(pool)["connection"] = borrowed
