"""Late transactions: in progress for long, with messages at which readers in transactions wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from janitor.state.base import State
from janitor.state.notes import Note
from tms_core.clock import Clock
from tms_core.transaction.model import late_transactions

#: The note they are kept in: a list of objects, the one that readers have waited for longest first.
NOTE = Note.LATE
#: How long readers wait before a transaction is late, in milliseconds.
LATE_MS = 60_000
#: How many transactions are remembered, and how many topics of each.
MOST_LATE, MOST_TOPICS = 20, 20


class LateSource(Protocol):
    """What a transaction manager, here or at an address, tells of transactions in progress."""

    def published(self) -> dict[int, dict[str, int]]:
        """Where they have published, with the time of the first message in milliseconds."""
        ...

    def clients(self) -> dict[int, str]:
        """Who holds them."""
        ...


def note_late(state: State, transactions: LateSource, clock: Clock) -> None:
    """Remember the late transactions of this moment.

    Raises:
        TransactionError: the transaction service does not answer.
        StateError: the state could not be read or written.
    """
    late = late_transactions(transactions.published(), transactions.clients(), clock.now_ms() - LATE_MS)
    found: list[Mapping[str, Any]] = [
        {
            "transaction": str(one.pointer),
            "client": one.client,
            "since_ms": one.since_ms,
            "topics": [topic for topic, _ in one.topics[:MOST_TOPICS]],
            "more_topics": max(0, len(one.topics) - MOST_TOPICS),
        }
        for one in late[:MOST_LATE]
    ]
    if found != (state.note(NOTE) or []):
        state.save_note(NOTE, found)
