"""Progress of long work: one line on a terminal, updated at most ten times a second; nothing elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from janitor.report import EXPECTED, MEASURED, Observer, ignore_progress
from tms_core.logs.printable import duration
from tms_core.topic import TopicId

_EVERY_SECONDS = 0.1
#: The time before the first progress line, in seconds: short commands print none.
_QUIET_SECONDS = 0.5
_PHASES = {
    "message": "messages",
    "invert": "searching for invalid transactions",
    "payload": "payloads",
    "references": "searching for messages that need payloads",
    "compact": "freeing disk space",
    "audit": "verifying every row against the boundary",
    "read": "reading",
    "wait": "waiting for the current run to finish",
}


def describe_share(done: int, expected: int, passed_ms: int) -> str:
    """Return the share of finished due rows and the remaining time, after a comma; empty if unknown.

    The expected number is an estimate, so more rows may follow at 100 %.
    """
    part = min(done / expected, 0.99) if expected else 0.0
    if not part or passed_ms <= 0:
        return ""
    return f", {part:.0%} of due rows, about {duration(round(passed_ms * (1 - part) / part))} left"


@contextmanager
def progress(stream: TextIO) -> Iterator[Observer]:
    """Yield an observer that shows the progress of the block, if the stream is a terminal."""
    if not stream.isatty():
        yield ignore_progress
        return
    line = _Line(stream)
    try:
        yield line
    finally:
        line.clear()


class _Line:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows = self._done = self._expected = 0
        self._began = time.monotonic()
        self._next = self._began + _QUIET_SECONDS
        self._has_output = False

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        now = time.monotonic()
        if phase == EXPECTED:
            self._expected, self._done, self._began = rows, 0, now
            return
        self._rows += rows
        self._done += rows if phase == MEASURED else 0
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        where = f" of {topic}" if topic else ""
        read = f", {self._rows:,} rows read" if self._rows else ""
        far = describe_share(self._done, self._expected, round((now - self._began) * 1000)) if phase == MEASURED else ""
        self._stream.write(f"\r\x1b[K{_PHASES.get(phase, phase)}{where}{read}{far}")
        self._stream.flush()
        self._has_output = True

    def clear(self) -> None:
        if self._has_output:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
