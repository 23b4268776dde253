"""Naming in the log what is nobody's: foreign rows (rule L0) and topics without metadata (L1), each once."""

from __future__ import annotations

import logging

from janitor.report import ForeignKey, Tally
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)


class Strangers:
    """Remembers, for the life of a process, what was named already."""

    def __init__(self) -> None:
        self._named: set[ForeignKey | TopicId] = set()

    def name(self, tally: Tally) -> None:
        """Name what a pass met and nobody named before."""
        for found in tally.foreign:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table that is none of ours, key %s", *found)
        for topic in sorted(tally.unknown):
            if topic not in self._named:
                logger.warning("left alone: rows of topic %s, which has no metadata that can be read", topic)
        self._named.update(tally.foreign, tally.unknown)
