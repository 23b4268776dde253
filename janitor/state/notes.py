"""The names of all notes that are kept in the state (:meth:`janitor.state.base.State.note`).

They stand together because two of one name would be read as each other. Names stay, since states have them.
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Note(StrEnum):
    """The name of a note; what its value is, the modules say that write it."""

    CONSUMERS = "consumers"
    DAEMON = "daemon"
    DECISIONS = "decided"
    IN_PROGRESS = "in_progress"
    KEPT = "kept"
    LATE = "late_transactions"
    LINEAGE = "lineage"
    OVERDUE = "overdue"
    REFUTED = "refuted"
    REHEARSED = "rehearsed_ms"
    RESTORED = "restored"
    ROUND = "round"
    SNAPSHOT = "snapshot"
    STATISTICS = "statistics"
    SUCCESS = "success_ms"
    TOPICS = "topics"
    TOPIC_CHANGES = "topic_changes"
    TOPIC_SIZES = "topic_sizes"
    TRANSACTION_ENDS = "transactions_decided"
    WANTED = "thorough_wanted_ms"
