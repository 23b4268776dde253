"""The progress of the current run, for the status and the detection of hanging runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

from janitor.report import EXPECTED, MEASURED
from janitor.status.status import Running
from tms_core.clock import Clock
from tms_core.topic import TopicId


class RunWatcher:
    """The engine's observer, which has the progress of the current run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._running: Running | None = None
        self._runs = 0
        self._seen_ms = clock.monotonic_ms()

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        with self._lock:
            self._seen_ms = self._clock.monotonic_ms()
            run = self._running
            if run is not None and phase == EXPECTED:
                self._running = replace(run, expected=rows)
            elif run is not None:
                self._running = replace(
                    run,
                    heartbeat_ms=self._clock.now_ms(),
                    phase=phase,
                    topic=str(topic) if topic else "",
                    rows=run.rows + rows,
                    done=run.done + (rows if phase == MEASURED else 0),
                )

    @contextmanager
    def run(self) -> Iterator[None]:
        """Mark a run as active inside the block; with overlapping runs, the last run clears the mark."""
        with self._lock:
            now_ms = self._clock.now_ms()
            self._seen_ms = self._clock.monotonic_ms()
            self._running = self._running or Running("", now_ms, now_ms, "beginning", "", 0)
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._running = None

    @property
    def running(self) -> Running | None:
        return self._running

    def silent_ms(self) -> int:
        """Return the time since the last heartbeat of the current run; 0 without a run. Takes no lock."""
        return self._clock.monotonic_ms() - self._seen_ms if self._running is not None else 0
