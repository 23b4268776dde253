"""Writes of messages and payloads that are cut off, as a server that ends or is held up leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any


class Died(Exception):
    """The server ended."""


class FaultyWrites:
    """The writes of the message and the payload table, one of which the server does not survive.

    Attributes:
        fault: ``before`` or ``after``; ``late``: some rows are written, and the others wait; empty: none.
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
        for table in tables:
            table.put = partial(self._write, table.put)

    def _write(self, put: Callable[[Sequence[Any]], None], rows: Sequence[Any]) -> None:
        fault, self.fault = self.fault, ""
        if self.meanwhile:
            self.meanwhile.pop()()
        done = len(rows) if fault in ("", "after") else 0
        if fault == "late":
            done = self._random.randint(0, len(rows))
        put(rows[:done])
        if fault == "late":
            self.late.append(partial(put, rows[done:]))
            self.is_stalled = True
        if fault:
            raise Died
