"""Writes of messages and payloads that are cut off, as a server that ends or is held up leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tms_core.errors import StoreUnavailable
from tms_core.tables.base import MessageValue


class Died(Exception):
    """The server ended."""


class FaultyWrites:
    """The writes of the message and the payload table, of which one fails, or the server does not survive it.

    Attributes:
        fault: ``before`` or ``after``; ``late``: some rows are written, and the others wait; ``slow``: so, too, but the
            server goes on, and is told that the store has not answered; empty: none.
        late: what waits.
        is_stalled: whether the server waits that wrote it.
        meanwhile: what happens while something is on its way to the disk.
    """

    def __init__(self, random: Random, *tables: Any) -> None:
        self.fault = ""
        self.late: list[Callable[[], object]] = []
        self.is_stalled = False
        self.meanwhile: list[Callable[[], object]] = []
        self._random = random
        #: Whether what is taken back next waits, and the server with it.
        self._holds_take_back = False
        for table in tables:
            table.put = partial(self._write, table.put)
            for name in ("delete", "invert"):
                if hasattr(table, name):
                    setattr(table, name, partial(self._take_back, getattr(table, name)))

    def heal(self) -> None:
        """Nothing more fails."""
        self.fault, self._holds_take_back = "", False

    def _write(self, put: Callable[[Sequence[Any]], None], rows: Sequence[Any]) -> None:
        fault, self.fault = self.fault, ""
        if self.meanwhile:
            self.meanwhile.pop()()
        done = len(rows) if fault in ("", "after") else 0
        if fault in ("late", "slow"):
            done = self._random.randint(0, len(rows))
        put(rows[:done])
        if fault in ("late", "slow"):
            self.late.append(partial(put, [*filter(self._comes_again, rows[:done]), *rows[done:]]))
        if fault == "slow":
            self._holds_take_back = self._random.random() < 0.5
            raise StoreUnavailable("The store does not answer.", "Try again.")
        if fault:
            self.is_stalled = fault == "late"
            raise Died

    def _comes_again(self, row: tuple[bytes, Any]) -> bool:
        """Whether a row comes once more that is there, since it was sent twice; not of a transaction, which may have
        been rolled back meanwhile."""
        return isinstance(row[1], MessageValue) and row[1].pointer is None

    def _take_back(self, change: Callable[..., Any], *given: Any) -> Any:
        holds, self._holds_take_back = self._holds_take_back, False
        if not holds:
            return change(*given)
        self.late.append(partial(change, *given))
        self.is_stalled = True
        raise StoreUnavailable("The store does not answer.", "Try again.")
