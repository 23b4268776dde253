"""What a run announces before it deletes, so that the ranges of a run that dies are known as well.

An announcement speaks of one topic, generation, table, rule and policy, and says between which keys rows may go; it is
durable before the first of them goes (``State.intend``). What really went is counted in the run's outcome, from which
the ledger is written when the run ends (:func:`janitor.sweep.outcome.ledger_entries`).
"""

from __future__ import annotations

from threading import Lock

from janitor.law.policy import Rule
from janitor.state.base import State
from janitor.sweep.context import TopicWork
from janitor.sweep.findings import Batch
from janitor.sweep.outcome import LedgerKey, Taken, ledger_entry
from tms_core.clock import Clock
from tms_core.rowkey import LONG_MAX, generation_prefix, position_prefix, time_prefix

#: How many entries are remembered at most, whatever ``history_days`` says: about 250 MB.
KEPT_ENTRIES = 1_000_000


class Ledger:
    """The announcements of one run; threads that sweep different parts of a store may share it.

    Args:
        state: where they are announced.
        clock: what they are dated by.
        run_id: whose they are.
        snapshot_timestamp_ms: of the transaction snapshot in use; None without one.
    """

    def __init__(self, state: State, clock: Clock, run_id: str, snapshot_timestamp_ms: int | None) -> None:
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._snapshot_timestamp_ms = snapshot_timestamp_ms
        self._announced: dict[LedgerKey, bytes] = {}
        self._lock = Lock()

    def announce(self, work: TopicWork, batch: Batch) -> int:
        """Called before a batch is deleted; returns what time it is.

        Raises:
            StateError: it could not be written down; nothing may be deleted then.
        """
        key, first, now_ms = LedgerKey.of(work, batch), batch.keys[0], self._clock.now_ms()
        with self._lock:
            # Parts of a store are swept side by side, so that a batch may begin before the one that was announced.
            if first < self._announced.get(key, b"\xff"):
                taken = Taken(now_ms, first, _furthest(work, batch), None, None, None)
                self._state.intend(ledger_entry(key, taken, self._run_id, self._snapshot_timestamp_ms))
                self._announced[key] = first
        return now_ms

    def now_ms(self) -> int:
        """What entries are dated by."""
        return self._clock.now_ms()


def _furthest(work: TopicWork, batch: Batch) -> bytes:
    """Where the deletes may come to."""
    prefix = work.topic.topic.prefix
    if batch.table == "message" and batch.rule is Rule.EXPIRED:
        return time_prefix(prefix, batch.generation, min(work.frontier.cutoff.ms, LONG_MAX))
    if batch.table == "message" and batch.rule is Rule.PROCESSED:
        return position_prefix(prefix, batch.generation, work.frontier.processed)
    return generation_prefix(prefix, batch.generation + 1)
