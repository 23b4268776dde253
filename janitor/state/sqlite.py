"""The memory as one SQLite file, ``state.sqlite3``, in a folder of its own.

One file rather than many, so that a run's end is one commit. The journal is SQLite's plain rollback journal and not
the write-ahead log: commits are few, the folder may lie on a network volume, where a write-ahead log does not work, and
between runs there is one file to copy. ``synchronous`` is EXTRA, which also syncs the folder after the journal is gone:
a claim must not come true only until the power fails.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from janitor.state import schema
from janitor.state.base import (
    Claim,
    ClockAnchor,
    Evidence,
    FrontierRecord,
    OpenIdRecord,
    PendingJump,
    RunRecord,
    State,
    StoreRecord,
)
from tms_core.errors import StoreBusy, StoreError
from tms_core.topic import TopicId

FILE_NAME = "state.sqlite3"
#: How long to wait for another process that is writing, in seconds; a commit takes milliseconds.
BUSY_SECONDS = 10.0

_FORGET_STORE = (
    "DELETE FROM frontiers",
    "DELETE FROM open_ids",
    "DELETE FROM evidence",
    "DELETE FROM claim",
    "DELETE FROM thorough",
)

#: An update in place, because SQLite leaves a page alone on which nothing changes; a replacement it writes always.
_SAVE_OPEN_ID = """
    INSERT INTO open_ids VALUES (?, ?, ?, ?) ON CONFLICT (pointer) DO UPDATE
    SET first_seen_ms = excluded.first_seen_ms, scanned_ms = excluded.scanned_ms, closed_ms = excluded.closed_ms"""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteState(State):
    """The memory in a file. Threads may share one; processes may each have their own on the same folder.

    Args:
        folder: where ``state.sqlite3`` is or shall be, made (for this user only) if it is not there; None keeps the
            memory in memory, see :meth:`in_memory`.
        busy_seconds: how long to wait for another process that is writing.

    Raises:
        StoreError: the file is corrupt, another program's, a newer version's, or cannot be opened.
        StoreBusy: another process is writing it all that time.
    """

    def __init__(self, folder: Path | None, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self._where = "the state in memory" if folder is None else str(folder / FILE_NAME)
        self._lock = RLock()
        self._depth = 0
        if folder is not None:
            _prepare(folder)
        with self._border():
            self._connection = sqlite3.connect(
                ":memory:" if folder is None else folder / FILE_NAME,
                timeout=busy_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            self._open()
        except StoreError:
            self._connection.close()
            raise

    @classmethod
    def in_memory(cls) -> SqliteState:
        """A memory that ends with the object."""
        return cls(None)

    def close(self) -> None:
        with self._lock, self._border():
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock, self._border():
            if self._depth and not self._connection.in_transaction:
                raise StoreError(f"{self._where}: the transaction was rolled back when something inside it failed.")
            inner = self._depth > 0
            self._connection.execute("SAVEPOINT inner_part" if inner else "BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                self._connection.execute("RELEASE inner_part" if inner else "COMMIT")
            except BaseException:
                self._undo(inner)
                raise
            finally:
                self._depth -= 1

    def store(self) -> StoreRecord | None:
        row = self._one("SELECT mark, identity, adopted_ms, snapshot_timestamp_ms, snapshot_write_pointer FROM store")
        return StoreRecord(*row) if row else None

    def save_store(self, record: StoreRecord) -> None:
        with self.transaction():
            known = self.store()
            if known is not None and known.mark != record.mark:
                for statement in _FORGET_STORE:
                    self._connection.execute(statement)
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
            "INSERT OR REPLACE INTO frontiers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_frontier_row(topic, record) for topic, record in records.items()),
        )

    def open_ids(self) -> dict[int, OpenIdRecord]:
        with self._lock, self._border():
            rows = self._connection.execute("SELECT pointer, first_seen_ms, scanned_ms, closed_ms FROM open_ids")
            return {row[0]: OpenIdRecord(*row) for row in rows}

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        self._write(
            _SAVE_OPEN_ID,
            ((record.pointer, record.first_seen_ms, record.scanned_ms, record.closed_ms) for record in records),
        )

    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        self._write("DELETE FROM open_ids WHERE pointer = ?", ((pointer,) for pointer in pointers))

    def begin_run(self, run: RunRecord) -> None:
        self._write(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)",
            [(run.id, run.mode, run.started_ms, run.finished_ms, run.result, run.report)],
        )

    def finish_run(self, run_id: str, finished_ms: int, result: str, report: str) -> None:
        changed = self._write(
            "UPDATE runs SET finished_ms = ?, result = ?, report = ? WHERE id = ?",
            [(finished_ms, result, report, run_id)],
        )
        if not changed:
            raise StoreError(f"{self._where}: no run {run_id} began here.")

    def runs(self, limit: int) -> list[RunRecord]:
        rows = self._rows(
            "SELECT id, mode, started_ms, finished_ms, result, report FROM runs"
            " ORDER BY started_ms DESC, rowid DESC LIMIT ?",
            (limit,),
        )
        return [RunRecord(*row) for row in rows]

    def prune_runs(self, before_ms: int) -> int:
        return self._write("DELETE FROM runs WHERE started_ms < ?", [(before_ms,)])

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

    def _open(self) -> None:
        with self._border():
            self._connection.execute("PRAGMA synchronous = EXTRA")
            if schema.version(self._connection, self._where) == 0:
                with self.transaction():
                    schema.create(self._connection, self._where)

    def _undo(self, inner: bool) -> None:
        if not self._connection.in_transaction:  # SQLite itself has undone everything, as it does when the disk is full
            return
        if inner:
            self._connection.execute("ROLLBACK TO inner_part")
            self._connection.execute("RELEASE inner_part")
        else:
            self._connection.execute("ROLLBACK")

    def _write(self, statement: str, rows: Iterable[Sequence[object]]) -> int:
        """Run one statement for each of the rows, all or none; returns how many rows it changed."""
        with self.transaction():
            return self._connection.executemany(statement, rows).rowcount

    def _rows(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        with self._lock, self._border():
            return self._connection.execute(query, parameters).fetchall()

    def _one(self, query: str) -> Any:
        rows = self._rows(query)
        return rows[0] if rows else None

    @contextmanager
    def _border(self) -> Iterator[None]:
        """Turns SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _BUSY:
                raise StoreBusy(
                    f"{self._where} is being written by another process.", "Wait for it to end, then try again."
                ) from error
            if code in _CORRUPT:
                raise StoreError(
                    f"{self._where} is corrupt: {error}.", f"Move its folder away: {schema.LOSS}"
                ) from error
            if code == sqlite3.SQLITE_CONSTRAINT:
                raise StoreError(f"{self._where} cannot hold this: {error}.") from error
            raise StoreError(
                f"{self._where} cannot be used: {error}.", "Check the folder's rights and the space on its disk."
            ) from error


def _prepare(folder: Path) -> None:
    """Make the folder and an empty file that only this user can read.

    A file that is there is not opened here: closing it again would drop the locks that this process holds on it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(folder / FILE_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError as error:
        if not (folder / FILE_NAME).is_file():
            raise StoreError(
                f"the state folder {folder} cannot be made: {error}.", "Name a folder you may write in janitor.state."
            ) from error


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
        *(record.approved or (None, None)),
    )


def _frontier(*columns: Any) -> FrontierRecord:
    generation, cutoff_ms, wall_ms, running_ms, boot_id, first_seen_ms, *rest = columns
    pending_generation, pending_ttl_seconds, *since, approved_generation, approved_ttl_seconds = rest
    pending = approved = None
    if pending_generation is not None:
        pending = PendingJump(pending_generation, pending_ttl_seconds, ClockAnchor(*since))
    if approved_generation is not None:
        approved = (approved_generation, approved_ttl_seconds)
    at = ClockAnchor(wall_ms, running_ms, boot_id)
    return FrontierRecord(generation, cutoff_ms, at, first_seen_ms, pending, approved)
