"""Until when transactions have ended, for topics whose messages wait for theirs (property ``hold: transaction``).

When a transaction was committed is written down nowhere. So a run notes the begin of the oldest one in progress, and
once that note is some minutes old, whatever was published before that begin was decided at least so long ago. Two such
moments are enough: the one that counts, and the next one, which is growing old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from janitor.law.policy import Frontier, Hold
from janitor.law.references import Lifetime
from janitor.state.notes import Note
from tms_core.rowkey import Cutoff
from tms_core.transaction.model import VisibilityState, transaction_ms

#: The note that has both moments.
DECIDED = Note.TRANSACTION_ENDS
#: How long after the end of its transaction a message is there at least, in milliseconds.
SEEN_MS = 300_000


class Decided(NamedTuple):
    """What is known of the ends of transactions.

    Attributes:
        before_ms: what was published before this moment was decided :data:`SEEN_MS` ago.
        next_ms: what was published before this one was decided by ``noted_ms``.
        noted_ms: the time of the snapshot that said so.
    """

    before_ms: int
    next_ms: int
    noted_ms: int


def decided(
    now_ms: int, note: Mapping[str, int] | None, snapshot: VisibilityState | None, lifetime: Lifetime
) -> Decided:
    """What is known by now.

    Args:
        now_ms: the moment rows are judged by.
        note: what was known by the run before; None: nothing.
        snapshot: what is known of transactions now; None: nothing.
        lifetime: how long a transaction may write. What is older than that was decided, whatever is known of it.
    """
    known = Decided(0, 0, 0) if note is None else Decided(**note)
    if snapshot is not None:
        taken_ms = snapshot.timestamp_ms
        begun_ms = min([taken_ms, *map(transaction_ms, snapshot.open_pointers)]) - lifetime.allowance_ms
        if known.noted_ms == 0 or taken_ms < known.noted_ms:
            known = Decided(known.before_ms, begun_ms, taken_ms)
        elif taken_ms - known.noted_ms >= SEEN_MS:
            known = Decided(max(known.before_ms, known.next_ms), begun_ms, taken_ms)
    over_ms = now_ms - lifetime.max_ms - lifetime.allowance_ms - SEEN_MS
    return known._replace(before_ms=max(0, known.before_ms, over_ms))


def until_decided(frontier: Frontier, decided_ms: int) -> Frontier:
    """A frontier that stops where transactions may have ended only now."""
    frontier = replace(frontier, decided_ms=decided_ms)
    if decided_ms >= frontier.cutoff.ms:
        return frontier
    return replace(frontier, cutoff=Cutoff(decided_ms), hold=frontier.hold or Hold.TRANSACTION)
