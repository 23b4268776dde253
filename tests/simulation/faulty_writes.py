"""Interrupted writes of messages and payloads, as a killed or stalled server leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tms_core.errors import StoreUnavailable
from tms_core.tables.base import MessageValue


class ServerKilled(Exception):
    """The server was killed."""


class FaultyWrites:
    """Writes of the message and the payload table, the next of which fails or kills the server.

    Attributes:
        fault: ``before`` or ``after`` the write; ``late``: some rows are written and the others delayed; ``slow``: like
            ``late``, but the server survives with a timeout of the store; empty: none.
        late: the delayed writes.
        is_stalled: whether the server is blocked in a delayed write.
        during_write: calls to make during the next write.
    """

    def __init__(self, random: Random, *tables: Any) -> None:
        self.fault = ""
        self.late: list[Callable[[], object]] = []
        self.is_stalled = False
        self.during_write: list[Callable[[], object]] = []
        self._random = random
        #: Whether the next rollback is delayed and blocks the server.
        self._delays_rollback = False
        for table in tables:
            table.put = partial(self._write, table.put)
            for name in ("delete", "invert"):
                if hasattr(table, name):
                    setattr(table, name, partial(self._roll_back, getattr(table, name)))

    def heal(self) -> None:
        """Clear all faults."""
        self.fault, self._delays_rollback = "", False

    def _write(self, put: Callable[[Sequence[Any]], None], rows: Sequence[Any]) -> None:
        fault, self.fault = self.fault, ""
        if self.during_write:
            self.during_write.pop()()
        done = len(rows) if fault in ("", "after") else 0
        if fault in ("late", "slow"):
            done = self._random.randint(0, len(rows))
        put(rows[:done])
        if fault in ("late", "slow"):
            self.late.append(partial(put, [*filter(self._arrives_twice, rows[:done]), *rows[done:]]))
        if fault == "slow":
            self._delays_rollback = self._random.random() < 0.5
            raise StoreUnavailable("The store does not respond.", "Try again.")
        if fault:
            self.is_stalled = fault == "late"
            raise ServerKilled

    def _arrives_twice(self, row: tuple[bytes, Any]) -> bool:
        """Return whether a written row arrives twice; rows of a transaction may be rolled back by then."""
        return isinstance(row[1], MessageValue) and row[1].pointer is None

    def _roll_back(self, change: Callable[..., Any], *given: Any) -> Any:
        holds, self._delays_rollback = self._delays_rollback, False
        if not holds:
            return change(*given)
        self.late.append(partial(change, *given))
        self.is_stalled = True
        raise StoreUnavailable("The store does not respond.", "Try again.")
