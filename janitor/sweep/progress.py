"""Observers of a pass: told after every page, and never able to hurt it (rule S15)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tms_core.topic import TopicId

#: Told before the first page, in the place of a phase: about how many rows the step of the messages will read, as far
#: as topics have been counted.
EXPECTED = "expected"
#: The phase that is expected to read so many.
MEASURED = "message"

#: Told after every page: the phase, the topic, and how many rows the page had.
Observer = Callable[[str, TopicId | None, int], None]

logger = logging.getLogger(__name__)


def ignore_progress(phase: str, topic: TopicId | None, rows: int) -> None:
    """The observer of runs whose progress is not shown."""


def share(done: int, expected: int) -> float | None:
    """How much of the work is done, from 0 to 0.99; None where it is not known how much there is.

    What is expected is an estimate, so that all of it may be done and there is more.
    """
    return min(done / expected, 0.99) if expected else None


def left_ms(done: int, expected: int, passed_ms: int) -> int | None:
    """How long the rest takes at the rate so far, in milliseconds; None where that cannot be told yet."""
    part = share(done, expected)
    return round(passed_ms * (1 - part) / part) if part and passed_ms > 0 else None


class Guarded:
    """An observer that cannot hurt: one that fails is named in the log and not called again."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        try:
            self._observer(phase, topic, rows)
        # Whatever it raises: showing progress must never stop a deletion half-way.
        except Exception:
            logger.exception("showing progress failed; the run goes on without it")
            self._observer = ignore_progress
