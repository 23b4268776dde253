"""Names unrecognised rows in the log, each once: foreign rows (rule L0) and topics without metadata (L1)."""

from __future__ import annotations

import logging

from janitor.report import ForeignKey
from janitor.sweep.outcome import Outcome
from tms_core.tables.base import MetadataReads
from tms_core.topic import TopicId, readable_topics

logger = logging.getLogger(__name__)


class UnrecognisedRows:
    """Logs unrecognised rows, and remembers for the life of a process which were named already."""

    def __init__(self) -> None:
        self._named: set[ForeignKey | TopicId] = set()

    def name(self, outcome: Outcome, metadata: MetadataReads) -> None:
        """Log what a pass met and what was not logged before; not a topic that was made after the pass began.

        Args:
            metadata: as it is now.

        Raises:
            StoreError: it could not be read.
        """
        unknown = outcome.unknown - self._named
        if unknown:
            # One call, however many there are: a run shows between its calls that it lives (rule S10).
            prefixes = {topic.prefix for topic in unknown}
            unknown -= {found.topic for found in readable_topics(row for row in metadata.rows() if row[0] in prefixes)}
        for found in outcome.foreign:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table with an unrecognised key: %s", *found)
        for topic in sorted(unknown):
            logger.warning("left alone: rows of topic %s, which has no metadata that can be read", topic)
        self._named.update(outcome.foreign, unknown)
