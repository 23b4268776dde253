"""The state as one SQLite file, ``state.sqlite3``, in a folder of its own.

One file rather than many, so that a run's end is one commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
)
from janitor.state.decided import NOTE as DECIDED
from janitor.state.sqlite.file import BUSY_SECONDS, FILE_NAME
from janitor.state.sqlite.history import SqliteHistory
from janitor.state.sqlite.ids import SqliteIds
from tms_core.topic import TopicId

__all__ = ["BUSY_SECONDS", "FILE_NAME", "SqliteState"]

_FORGET_STORE = (
    "DELETE FROM frontiers",
    "DELETE FROM open_ids",
    "DELETE FROM evidence",
    "DELETE FROM claim",
    "DELETE FROM thorough",
    "DELETE FROM strikes",
    "DELETE FROM counts",
)


class SqliteState(SqliteIds, SqliteHistory):
    """The state of one store; see :class:`~janitor.state.sqlite.file.SqliteFile` for how it is opened."""

    def store(self) -> StoreRecord | None:
        row = self._one("SELECT mark, identity, adopted_ms, snapshot_timestamp_ms, snapshot_write_pointer FROM store")
        return StoreRecord(*row) if row else None

    def save_store(self, record: StoreRecord) -> None:
        with self.transaction():
            known = self.store()
            if known is not None and known.mark != record.mark:
                for statement in _FORGET_STORE:
                    self._connection.execute(statement)
                self._connection.execute("DELETE FROM notes WHERE name <> ?", (DECIDED,))
                self._forget_what_was_read()
            self._connection.execute(
                "INSERT OR REPLACE INTO store VALUES (1, ?, ?, ?, ?, ?)",
                (
                    record.mark,
                    record.identity,
                    record.adopted_ms,
                    record.snapshot_timestamp_ms,
                    record.snapshot_write_pointer,
                ),
            )

    def anchor(self) -> ClockAnchor | None:
        row = self._one("SELECT wall_ms, running_ms, boot_id FROM anchor")
        return ClockAnchor(*row) if row else None

    def save_anchor(self, anchor: ClockAnchor) -> None:
        self._write("INSERT OR REPLACE INTO anchor VALUES (1, ?, ?, ?)", [_anchor(anchor)])

    def frontiers(self) -> dict[TopicId, FrontierRecord]:
        rows = self._rows("SELECT * FROM frontiers ORDER BY namespace, topic")
        return {TopicId(namespace, topic): _frontier(*columns) for namespace, topic, *columns in rows}

    def save_frontiers(self, records: Mapping[TopicId, FrontierRecord]) -> None:
        self._write(
            "INSERT OR REPLACE INTO frontiers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_frontier_row(topic, record) for topic, record in records.items()),
        )

    def evidence(self) -> list[Evidence]:
        rows = self._rows(
            "SELECT start, stop, snapshot_timestamp_ms, bound, started_ms, run_id FROM evidence ORDER BY start"
        )
        return [Evidence(*row) for row in rows]

    def replace_evidence(self, evidence: Sequence[Evidence]) -> None:
        with self.transaction():
            self._connection.execute("DELETE FROM evidence")
            self._write(
                "INSERT INTO evidence VALUES (?, ?, ?, ?, ?, ?)",
                ((e.start, e.stop, e.snapshot_timestamp_ms, e.bound, e.started_ms, e.run_id) for e in evidence),
            )

    def claim(self) -> Claim | None:
        row = self._one("SELECT bound, made_ms, run_id FROM claim")
        return Claim(*row) if row else None

    def save_claim(self, claim: Claim | None) -> None:
        with self.transaction():
            self._connection.execute("DELETE FROM claim")
            if claim is not None:
                self._write("INSERT INTO claim VALUES (1, ?, ?, ?)", [(claim.bound, claim.made_ms, claim.run_id)])

    def last_thorough_ms(self) -> int | None:
        row = self._one("SELECT completed_ms FROM thorough")
        return row[0] if row else None

    def save_last_thorough_ms(self, completed_ms: int) -> None:
        self._write("INSERT OR REPLACE INTO thorough VALUES (1, ?)", [(completed_ms,)])

    def pauses(self) -> list[Pause]:
        return [Pause(*row) for row in self._rows("SELECT pattern, since_ms FROM pauses")]

    def pause(self, pattern: str, since_ms: int) -> None:
        self._write("INSERT OR IGNORE INTO pauses VALUES (?, ?)", [(pattern, since_ms)])

    def resume(self, pattern: str) -> bool:
        return self._write("DELETE FROM pauses WHERE pattern = ?", [(pattern,)]) > 0

    def strikes(self) -> dict[TopicId, Strikes]:
        rows = self._rows(
            "SELECT namespace, topic, count, last_ms, error, quarantined_ms, probe_ms FROM strikes"
            " ORDER BY namespace, topic"
        )
        return {TopicId(namespace, topic): Strikes(*rest) for namespace, topic, *rest in rows}

    def save_strikes(self, changed: Mapping[TopicId, Strikes | None]) -> None:
        with self.transaction():
            self._write(
                "DELETE FROM strikes WHERE namespace = ? AND topic = ?",
                ((topic.namespace, topic.topic) for topic in changed),
            )
            self._write(
                "INSERT INTO strikes VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (topic.namespace, topic.topic, s.count, s.last_ms, s.error, s.quarantined_ms, s.probe_ms)
                    for topic, s in changed.items()
                    if s is not None
                ),
            )

    def lease(self) -> bytes | None:
        row = self._one("SELECT value FROM lease")
        return row[0] if row else None

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        with self.transaction():
            if self.lease() != expected:
                return False
            self._write("INSERT OR REPLACE INTO lease VALUES (1, ?)", [(value,)])
            return True


def _anchor(anchor: ClockAnchor) -> tuple[int, int, str]:
    return anchor.wall_ms, anchor.running_ms, anchor.boot_id


def _frontier_row(topic: TopicId, record: FrontierRecord) -> tuple[object, ...]:
    pending = record.pending
    waiting = (pending.generation, pending.ttl_seconds, *_anchor(pending.since)) if pending else (None,) * 5
    return (
        topic.namespace,
        topic.topic,
        record.generation,
        record.cutoff_ms,
        *_anchor(record.at),
        record.first_seen_ms,
        *waiting,
        *(record.approved or (None, None))[:2],
        record.consumed
        | (pending is not None and pending.consumed) << 1
        | (record.approved is not None and record.approved[2]) << 2,
    )


def _frontier(*columns: Any) -> FrontierRecord:
    generation, cutoff_ms, wall_ms, running_ms, boot_id, first_seen_ms, *rest = columns
    pending_generation, pending_ttl_seconds, *since, approved_generation, approved_ttl_seconds, consumed = rest
    pending = approved = None
    if pending_generation is not None:
        pending = PendingJump(pending_generation, pending_ttl_seconds, ClockAnchor(*since), bool(consumed & 2))
    if approved_generation is not None:
        approved = (approved_generation, approved_ttl_seconds, bool(consumed & 4))
    at = ClockAnchor(wall_ms, running_ms, boot_id)
    return FrontierRecord(generation, cutoff_ms, at, first_seen_ms, pending, approved, bool(consumed & 1))
