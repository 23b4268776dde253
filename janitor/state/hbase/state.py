"""The state in a table of its own beside the store's, for a janitor that has no disk that stays.

Values are JSON, under names; records are lists of their fields in the order of :mod:`janitor.state.records`, bytes in
hex. How they are written together stands in :mod:`janitor.state.hbase.root`, what the table holds in
``docs/formats.md``, "State in HBase".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from janitor.state.base import (
    Claim,
    ClockAnchor,
    Evidence,
    FrontierRecord,
    Pause,
    PendingJump,
    StoreRecord,
    Strikes,
    TopicCount,
)
from janitor.state.decided import NOTE as DECIDED
from janitor.state.hbase.history import HBaseHistory
from janitor.state.hbase.ids import HBaseIds
from janitor.state.hbase.ledger import HBaseLedger
from janitor.state.hbase.table import TABLE
from tms_core.errors import StateError
from tms_core.topic import TopicId

__all__ = ["TABLE", "HBaseState"]

#: What was learnt about a store; a name up to its first dot.
_OF_STORE = frozenset({"frontiers", "ids", "evidence", "claim", "thorough", "strikes", "counts", "note"})


class HBaseState(HBaseIds, HBaseLedger, HBaseHistory):
    """The state of one store; see :class:`~janitor.state.hbase.transactions.HBaseTransactions` for how it is opened."""

    def store(self) -> StoreRecord | None:
        row = self._json("store")
        return StoreRecord(*row) if row else None

    def save_store(self, record: StoreRecord) -> None:
        def save() -> None:
            known = self.store()
            if known is not None and known.mark != record.mark:
                for name in self._read_view(lambda view: view.names()):
                    if name.partition(".")[0] in _OF_STORE and name != f"note.{DECIDED}":
                        self._save_packed(name, None)
            snapshot = record.snapshot_timestamp_ms, record.snapshot_write_pointer
            self._save("store", [record.mark, record.identity, record.adopted_ms, *snapshot])

        self._write(save)

    def anchor(self) -> ClockAnchor | None:
        row = self._json("anchor")
        return ClockAnchor(*row) if row else None

    def save_anchor(self, anchor: ClockAnchor) -> None:
        self._write(lambda: self._save("anchor", _anchor(anchor)))

    def clock_ms(self) -> int | None:
        return self._table.server_ms()

    def frontiers(self) -> dict[TopicId, FrontierRecord]:
        return {topic: _frontier(*row) for topic, row in self._by_topic("frontiers")}

    def save_frontiers(self, records: Mapping[TopicId, FrontierRecord]) -> None:
        self._save_by_topic("frontiers", {topic: _frontier_row(record) for topic, record in records.items()})

    def evidence(self) -> list[Evidence]:
        return [
            Evidence(bytes.fromhex(start), None if stop is None else bytes.fromhex(stop), *rest)
            for start, stop, *rest in self._json("evidence", [])
        ]

    def replace_evidence(self, evidence: Sequence[Evidence]) -> None:
        if len({interval.start for interval in evidence}) < len(evidence):
            raise StateError(f"{self._where} cannot hold this: two intervals of evidence have the same start.")
        rows = [
            [
                interval.start.hex(),
                None if interval.stop is None else interval.stop.hex(),
                interval.snapshot_timestamp_ms,
                interval.bound,
                interval.started_ms,
                interval.run_id,
            ]
            for interval in sorted(evidence, key=lambda interval: interval.start)
        ]
        self._write(lambda: self._save("evidence", rows or None))

    def claim(self) -> Claim | None:
        row = self._json("claim")
        return Claim(*row) if row else None

    def save_claim(self, claim: Claim | None) -> None:
        self._write(lambda: self._save("claim", claim and [claim.bound, claim.made_ms, claim.run_id]))

    def last_thorough_ms(self) -> int | None:
        completed_ms: int | None = self._json("thorough")
        return completed_ms

    def save_last_thorough_ms(self, completed_ms: int) -> None:
        self._write(lambda: self._save("thorough", completed_ms))

    def pauses(self) -> list[Pause]:
        return [Pause(pattern, since_ms) for pattern, since_ms in self._json("pauses", {}).items()]

    def pause(self, pattern: str, since_ms: int) -> None:
        self._write(lambda: self._save("pauses", {pattern: since_ms} | self._json("pauses", {})))

    def resume(self, pattern: str) -> bool:
        def take_back() -> bool:
            pauses = self._json("pauses", {})
            found = pauses.pop(pattern, None) is not None
            self._save("pauses", pauses or None)
            return found

        return self._write(take_back)

    def strikes(self) -> dict[TopicId, Strikes]:
        return {topic: Strikes(*row) for topic, row in self._by_topic("strikes")}

    def save_strikes(self, changed: Mapping[TopicId, Strikes | None]) -> None:
        rows = {
            topic: None if s is None else [s.count, s.last_ms, s.error, s.quarantined_ms, s.probe_ms]
            for topic, s in changed.items()
        }
        self._save_by_topic("strikes", rows)

    def counts(self) -> dict[TopicId, TopicCount]:
        return {topic: TopicCount(*row) for topic, row in self._by_topic("counts")}

    def save_counts(self, changed: Mapping[TopicId, TopicCount | None]) -> None:
        rows = {
            topic: None if c is None else [c.messages, c.size_bytes, c.oldest_ms, c.newest_ms, c.counted_ms]
            for topic, c in changed.items()
        }
        self._save_by_topic("counts", rows)

    def created_ms(self) -> int | None:
        created_ms: int | None = self._json("created")
        return created_ms

    def save_created_ms(self, created_ms: int) -> None:
        self._write(lambda: self._save("created", self._json("created", created_ms)))

    def note(self, name: str) -> Any:
        return self._json(f"note.{name}")

    def save_note(self, name: str, value: Any) -> None:
        self._write(lambda: self._save(f"note.{name}", value))

    def _by_topic(self, name: str) -> Iterable[tuple[TopicId, list[Any]]]:
        """The records of a value that has one for each topic, in the order of topics."""
        return ((TopicId(namespace, topic), row) for namespace, topic, *row in self._json(name, []))

    def _save_by_topic(self, name: str, changed: Mapping[TopicId, list[Any] | None]) -> None:
        """Change records of such a value; None removes a topic's."""

        def save() -> None:
            rows = {**dict(self._by_topic(name)), **changed}
            kept = [[t.namespace, t.topic, *row] for t, row in sorted(rows.items()) if row is not None]
            self._save(name, kept or None)

        self._write(save)


def _anchor(anchor: ClockAnchor) -> list[Any]:
    return [anchor.wall_ms, anchor.running_ms, anchor.boot_id]


def _frontier_row(record: FrontierRecord) -> list[Any]:
    pending = record.pending
    waiting = pending and [pending.generation, pending.ttl_seconds, _anchor(pending.since), pending.consumed]
    return [
        *(record.generation, record.cutoff_ms, _anchor(record.at), record.first_seen_ms, waiting, record.approved),
        record.consumed,
    ]


def _frontier(
    generation: int,
    cutoff_ms: int,
    at: list[Any],
    first_seen_ms: int,
    waiting: list[Any],
    approved: list[int],
    consumed: bool = False,
) -> FrontierRecord:
    pending = waiting and PendingJump(waiting[0], waiting[1], ClockAnchor(*waiting[2]), *waiting[3:])
    jump = (approved[0], approved[1], len(approved) > 2 and bool(approved[2])) if approved else None
    return FrontierRecord(generation, cutoff_ms, ClockAnchor(*at), first_seen_ms, pending or None, jump, consumed)
