"""The janitor's state between runs.

Nearly all of it makes a deletion *less* likely. Without state, the janitor could not distinguish a cutoff jump from the
passage of time (invariant S8), a copy of a store from the store (invariant S13), or an invalid transaction whose client
may still write from a finished transaction. Lost state is safe: the store is a first contact again. Wrong state would
be dangerous. Therefore related values are written atomically (:meth:`State.transaction`).

Times are milliseconds since the epoch; write pointers, bounds and times are signed 64-bit numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from janitor.state.documents import damage_as_error
from janitor.state.ids import InvalidIds
from janitor.state.ledger import RecordedLedger
from janitor.state.records import (
    EVERYTHING,
    MARK_BYTES,
    UNKNOWN_MS,
    ClockAnchor,
    CounterKey,
    Evidence,
    FrontierRecord,
    KnownIds,
    LedgerEntry,
    Note,
    OpenIdRecord,
    Pause,
    PendingJump,
    ProvenBoundary,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
    row_of,
)
from janitor.state.runs import RecordedRuns
from janitor.state.values import unpack
from tms_core.errors import StateError
from tms_core.topic import TopicId

__all__ = [
    "EVERYTHING",
    "MARK_BYTES",
    "UNKNOWN_MS",
    "ClockAnchor",
    "CounterKey",
    "Evidence",
    "FrontierRecord",
    "KnownIds",
    "LedgerEntry",
    "OpenIdRecord",
    "Pause",
    "PendingJump",
    "ProvenBoundary",
    "RunRecord",
    "State",
    "StoreRecord",
    "Strikes",
    "TopicCount",
]

T = TypeVar("T")

#: The history of topics; no deletion rule depends on it.
_HISTORY = frozenset({Note.TOPICS, Note.TOPIC_CHANGES, Note.TOPIC_SIZES})
#: The first parts of the names of values that describe one store.
_STORE_VALUES = frozenset({"frontiers", "ids", "evidence", "claim", "full_pass", "strikes", "counts", "note"})


class State(InvalidIds, RecordedLedger, RecordedRuns):
    """The janitor's state of one store.

    Every method raises ``StateError`` if the state cannot be read or written, and ``StateBusy`` if another process
    writes it for too long.
    """

    def store(self) -> StoreRecord | None:
        """Return the record of the store; None before the first contact."""
        return self._value(StoreRecord, "store")

    def save_store(self, record: StoreRecord) -> None:
        """Save the record of the store.

        A state describes at most one store. If ``mark`` differs from the saved mark, this deletes all data about the
        previous store: frontiers, open ids, evidence, boundary, the last full pass, strikes, counts and notes. Equal
        names of topics and equal pointers mean something else in another store. The history (runs, ledger, counters),
        pauses and the lease stay. If the identity is the same, as after a restore, the history of topics stays too,
        because operators ask why rows are held.
        """

        def save() -> None:
            known = self.store()
            if known is not None and known.mark != record.mark:
                history = _HISTORY if known.identity == record.identity else ()
                names_to_keep = {f"note.{note}" for note in (Note.DECISIONS, *history)}
                for name in self._read(lambda view: view.names()):
                    if name.partition(".")[0] in _STORE_VALUES and name not in names_to_keep:
                        self._save_packed(name, None)
            self._save("store", record)

        self._write(save)

    def anchor(self) -> ClockAnchor | None:
        """Return the last saved reading of the clocks."""
        return self._value(ClockAnchor, "anchor")

    def save_anchor(self, anchor: ClockAnchor) -> None:
        self._save("anchor", anchor)

    def clock_ms(self) -> int | None:
        """Return the time of the server that stores the state (invariant S7); None if the state is a file."""
        return self.driver.clock_ms()

    def frontiers(self) -> dict[TopicId, FrontierRecord]:
        """Return the frontier of each known topic."""
        return self._by_topic(FrontierRecord, "frontiers")

    def save_frontiers(self, records: Mapping[TopicId, FrontierRecord]) -> None:
        """Save these frontiers; frontiers of other topics are unchanged."""
        self._save_by_topic("frontiers", records)

    def evidence(self) -> list[Evidence]:
        """Return the evidence, in key order."""
        return self._value(list[Evidence], "evidence") or []

    def replace_evidence(self, evidence: Sequence[Evidence]) -> None:
        """Replace all evidence by these intervals."""
        if len({interval.start for interval in evidence}) < len(evidence):
            raise StateError(f"{self.driver.name}: two intervals of evidence have the same start.")
        self._save("evidence", sorted(evidence, key=lambda interval: interval.start) or None)

    def boundary(self) -> ProvenBoundary | None:
        """Return the last published boundary."""
        return self._value(ProvenBoundary, "claim")

    def save_boundary(self, proven: ProvenBoundary | None) -> None:
        """Publish a proven boundary; None withdraws it."""
        self._save("claim", proven)

    def last_full_pass_ms(self) -> int | None:
        """Return the time of the last full pass; None: there was no full pass."""
        return self._value(int, "full_pass")

    def save_last_full_pass_ms(self, completed_ms: int) -> None:
        self._save("full_pass", completed_ms)

    # -- pauses and failures of topics --------------------------------------------------------------------------------

    def pauses(self) -> list[Pause]:
        """Return the pauses. This is cheap, because runs call it before each batch."""
        return [Pause(pattern, since_ms) for pattern, since_ms in self._pauses().items()]

    def pause(self, pattern: str, since_ms: int) -> None:
        """Pause topics; a pattern that is already paused keeps its start."""
        self._write(lambda: self._save("pauses", {pattern: since_ms} | self._pauses()))

    def resume(self, pattern: str) -> bool:
        """Delete a pause; return whether exactly this pattern was paused."""

        def delete() -> bool:
            pauses = self._pauses()
            found = pauses.pop(pattern, None) is not None
            self._save("pauses", pauses or None)
            return found

        return self._write(delete)

    def _pauses(self) -> dict[str, int]:
        return self._value(dict[str, int], "pauses") or {}

    def strikes(self) -> dict[TopicId, Strikes]:
        """Return the topics with failures, including quarantined ones."""
        return self._by_topic(Strikes, "strikes")

    def save_strikes(self, changed: Mapping[TopicId, Strikes | None]) -> None:
        """Save failures of topics (None deletes them); other topics are unchanged."""
        self._save_by_topic("strikes", changed)

    # -- the lease (invariant S12), outside transactions, which may commit after the lease expires --------------------

    def lease(self) -> bytes | None:
        """Return the lease as its holder wrote it; None without a lease. This is cheap: runs call it for each batch."""
        return self.driver.lease()

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the lease if it is still ``expected``; return whether it was written."""
        return self.driver.swap_lease(expected, value)

    # -- the state itself, counts and notes ---------------------------------------------------------------------------

    def created_ms(self) -> int | None:
        """Return the time of the first run with this state; None if not recorded. Nothing older is known."""
        return self._value(int, "created")

    def retire_times(self, now_ms: int) -> None:
        """Discard recorded times in the future, which a wrong clock left.

        Call this in the transaction that accepts the clock. The history keeps its times.

        Args:
            now_ms: the accepted time.
        """
        if (self.created_ms() or now_ms) > now_ms:
            self._save("created", now_ms)
        if (self.last_full_pass_ms() or now_ms) > now_ms:
            self._save("full_pass", None)
        succeeded = self.note(Note.SUCCESS, dict[str, int]) or {}
        self.save_note(Note.SUCCESS, {table: ms for table, ms in succeeded.items() if ms <= now_ms} or None)
        last = next(iter(self.runs(1)), None)
        if last is not None and max(last.started_ms, last.heartbeat_ms or 0, last.finished_ms or 0) > now_ms:
            self.save_note(Note.RETIRED, last.id)

    def save_created_ms(self, created_ms: int) -> None:
        """Record the creation of this state, unless it is recorded."""
        self._write(lambda: self._save("created", created_ms if (known := self.created_ms()) is None else known))

    def counts(self) -> dict[TopicId, TopicCount]:
        """Return the last background counts."""
        return self._by_topic(TopicCount, "counts")

    def save_counts(self, changed: Mapping[TopicId, TopicCount | None]) -> None:
        """Save counts of topics (None deletes them); other topics are unchanged."""
        self._save_by_topic("counts", changed)

    def note(self, name: str, kind: Any = Any) -> Any:
        """Return a small value by name; None if it does not exist.

        Args:
            kind: the type of the value; any JSON value by default.
        """
        return self._value(kind, f"note.{name}")

    def save_note(self, name: str, value: Any) -> None:
        """Save a small JSON value by name; None deletes the value."""
        self._save(f"note.{name}", value)

    def _by_topic(self, kind: type[T], name: str) -> dict[TopicId, T]:
        """Return the records of a value with one record per topic, in the order of topics."""
        rows = self._value(list[Any], name) or []
        with damage_as_error(name):
            records = unpack(list[kind], [row[2:] for row in rows])  # type: ignore[valid-type]
            return {TopicId(row[0], row[1]): record for row, record in zip(rows, records, strict=True)}

    def _save_by_topic(self, name: str, changed: Mapping[TopicId, object]) -> None:
        """Change records of a value with one record per topic; None deletes a record."""

        def save() -> None:
            known = self._value(list[Any], name) or []
            with damage_as_error(name):
                rows: dict[tuple[str, str], Sequence[Any]] = {(row[0], row[1]): row for row in known}
            for topic, record in changed.items():
                key = topic.namespace, topic.topic
                rows[key] = () if record is None else (*key, *row_of(record))
            self._save(name, [row for _, row in sorted(rows.items()) if row] or None)

        if changed:
            self._write(save)
