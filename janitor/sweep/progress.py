"""Observers of a pass: told after every page, and never able to hurt it (rule S15)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tms_core.topic import TopicId

#: Told after every page: the phase, the topic, and how many rows the page had.
Observer = Callable[[str, TopicId | None, int], None]

logger = logging.getLogger(__name__)


def ignore_progress(phase: str, topic: TopicId | None, rows: int) -> None:
    """The observer of runs whose progress is not shown."""


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
