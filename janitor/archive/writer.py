"""The archive writer: rows are written to Parquet files before their deletion, to make it reversible (invariant S16).

A batch is deleted only after its file is complete, synced and renamed, and its name is synced. Therefore a row is in
the store, in the archive, or in both, at each point of a crash. Each row is archived with the outcome of its
transaction, because a later restore could not determine it.

The cost is one file and a few syncs per batch: deletions take longer, and a store with many small topics creates many
small files. In return there is nothing to keep consistent: no index and no open files, and the removal of a day deletes
its folders.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from janitor.archive import folder as archive_folder
from janitor.archive import parquet
from janitor.rules.policy import Rule
from janitor.sweep.transactions import TransactionView
from tms_core.clock import Clock
from tms_core.errors import ArchiveError
from tms_core.tables.base import MESSAGES, PAYLOADS, MessageReads, MessageValue, Page, PayloadReads
from tms_core.topic import TopicId
from tms_core.transaction.model import VisibilityState

T = TypeVar("T")
V = TypeVar("V", MessageValue, bytes)

#: The number of rows in the first page of a batch, and the maximum of a page.
FIRST_PAGE_ROWS, PAGE_ROWS = 32, 1000
#: The approximate maximum of payload bytes in a page, and the size after which a row group is written.
GROUP_BYTES = 4 << 20

_FULL = "Free disk space, or lower janitor.archive.keep_days; nothing is deleted until the archive can be written."
_FORBIDDEN = "Run as a user who may write there; nothing is deleted until the archive can be written."
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN),
}
_OTHER = "Check the disk; nothing is deleted until the archive can be written."


class CommitState(StrEnum):
    """The known outcome of a row's transaction at the time of archiving."""

    NONE = "none"
    COMMITTED = "committed"
    INVALID = "invalid"
    ROLLED_BACK = "rolled_back"
    UNDECIDED = "undecided"


def commit_state(pointer: int | None, snapshot: VisibilityState | None, rule: Rule) -> CommitState:
    """Return the known outcome of the transaction of a row to delete.

    A rollback changes rows of the topic's generation at that time only, in CDAP and in tms serve. Therefore a positive
    pointer in an old generation may belong to an aborted transaction whose rows the rollback missed. The invalid list
    does not have that transaction, so the pointer does not prove a commit.

    Args:
        pointer: the stored pointer; None outside transactions.
        snapshot: a usable snapshot (invariant S14), or None.
        rule: the rule that deletes the row.
    """
    if pointer is None:
        return CommitState.NONE
    if pointer < 0:
        return CommitState.ROLLED_BACK
    if pointer == 0:
        # No transaction has this id, so no rollback can hide the row: every reader sees it.
        return CommitState.COMMITTED
    if snapshot is None:
        return CommitState.UNDECIDED
    if snapshot.is_invalid(pointer):
        return CommitState.INVALID
    in_doubt = rule is Rule.OLD_GENERATION or snapshot.is_undecided(pointer)
    return CommitState.UNDECIDED if in_doubt else CommitState.COMMITTED


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A batch in the archive.

    Attributes:
        path: its file; None if no row could be read.
        keys: the keys of archived rows, in order. Other rows of the batch are already deleted or unreadable; do not
            delete them.
    """

    path: Path | None
    keys: list[bytes]

    def discard(self) -> None:
        """Remove the file, because its rows are not deleted.

        Raises:
            ArchiveError: the file cannot be removed, which is harmless: a restore does not change existing rows.
        """
        if self.path is None:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _archive_error(self.path, error) from error


class ParquetArchive:
    """A folder of archived rows.

    Args:
        folder: the folder, which is created with the first file.
        clock: the clock that determines the day.

    Raises:
        ConfigurationError: pyarrow is not installed.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        parquet.require_pyarrow()
        self.folder = folder
        self._clock = clock

    def begin(self, run_id: str, transactions: TransactionView, first: int = 1) -> RunArchive:
        """Return an archive for the rows of one run.

        Args:
            run_id: the id of the run.
            transactions: the facts about transactions in the run.
            first: the number of the first file; concurrent processes of a run have separate ranges of numbers.
        """
        return RunArchive(self.folder, self._clock, run_id, transactions.snapshot, first)

    def expire(self, keep_days: int, now_ms: int) -> int:
        """Remove archived days older than ``keep_days`` days.

        Args:
            now_ms: a time that the guards accept; a clock that is ahead would delete the archive.

        Returns:
            The number of removed files.

        Raises:
            ArchiveError: a file cannot be removed.
        """
        return archive_folder.remove_old_days(self.folder, keep_days, now_ms)


class RunArchive:
    """The archive during one run; created by :meth:`ParquetArchive.begin`."""

    def __init__(
        self, folder: Path, clock: Clock, run_id: str, snapshot: VisibilityState | None, first: int = 1
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._run_id = run_id
        self._snapshot = snapshot
        self._numbers = count(first)
        self._durable_folders: set[Path] = set()

    def save(
        self, topic: TopicId, generation: int, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> SavedFile:
        """Write one batch durably.

        This may take a while. Therefore the caller checks again whether the rows may be deleted, and then deletes
        exactly ``SavedFile.keys``.

        Args:
            topic, generation, rule: the common values of all rows.
            table: the table of the rows.
            keys: the keys of the rows, ascending.

        Raises:
            ArchiveError: no row of the batch is in the archive.
            StoreError: the rows could not be read.
        """
        deleted_ms = self._clock.now_ms()
        same = {
            "table": table.name,
            "rule": str(rule),
            "run_id": self._run_id,
            "deleted_ms": deleted_ms,
            "generation": generation,
            "snapshot_timestamp_ms": None if self._snapshot is None else self._snapshot.timestamp_ms,
        }
        saved: list[bytes] = []
        groups = _groups(self._rows(table, rule, keys), same, saved)
        first = next(groups, None)
        if first is None:
            return SavedFile(None, saved)
        day = archive_folder.day_path(self._folder, topic, archive_folder.day_of(deleted_ms))
        try:
            # S16: write a temporary file, sync it, then rename it, so that a crash leaves no incomplete archive file.
            path = self._next_path(day)
            archive_folder.create(path, lambda stream: parquet.write(stream, topic, chain([first], groups)))
        except OSError as error:
            raise _archive_error(day, error) from error
        return SavedFile(path, saved)

    def _rows(
        self, table: MessageReads | PayloadReads, rule: Rule, keys: Sequence[bytes]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the values that differ between rows, page by page."""
        if isinstance(table, MessageReads):
            for page in pick_rows(partial(table.read, MESSAGES), keys):
                yield [_message(key, value, self._snapshot, rule) for key, value in page]
        else:
            for stored in pick_rows(partial(table.read, PAYLOADS), keys):
                yield [_payload(key, value, self._snapshot, rule) for key, value in stored]

    def _next_path(self, day: Path) -> Path:
        """Return the path of a new file in a durable folder."""
        if day not in self._durable_folders:
            # A crash can lose a synced file if the entry of its folder is not synced.
            archive_folder.make_durable(day, self._folder)
            self._durable_folders.add(day)
        paths = (day / archive_folder.file_name(self._run_id, number) for number in self._numbers)
        return next(path for path in paths if not path.exists())


def pick(
    read: Callable[[bytes, bytes | None, int], Page[list[T]]],
    key_of: Callable[[T], bytes],
    size_of: Callable[[T], int],
    keys: Sequence[bytes],
) -> Iterator[list[T]]:
    """Yield the rows of a table with these keys, page by page; skip keys without a row.

    The keys of a batch may be adjacent, or scattered among other rows. Therefore a page is twice as long as the number
    of rows found in the previous page: adjacent keys need few pages, and scattered keys read few other rows.

    Args:
        read: reads a page of a table.
        key_of: returns the key of an item.
        size_of: returns the size of an item in bytes; pages of large items are shorter.
        keys: the keys, ascending.
    """
    at, limit = 0, FIRST_PAGE_ROWS
    while at < len(keys):
        page = read(keys[at], keys[-1] + b"\x00", limit)
        end = len(keys) if page.resume is None else bisect_left(keys, page.resume, at)
        targets = set(keys[at:end])
        found = [item for item in page.items if key_of(item) in targets]
        yield found
        at = end
        average_bytes = sum(map(size_of, page.items)) // max(1, len(page.items))
        limit = max(1, min(2 * len(found), PAGE_ROWS, GROUP_BYTES // max(1, average_bytes)))


def pick_rows(
    read: Callable[[bytes, bytes | None, int], Page[list[tuple[bytes, V]]]], keys: Sequence[bytes]
) -> Iterator[list[tuple[bytes, V]]]:
    """Yield the rows of a table with these keys and their values, as :func:`pick`."""
    return pick(read, lambda row: row[0], _payload_bytes, keys)


def _payload_bytes(row: tuple[bytes, MessageValue | bytes]) -> int:
    return len(row[1] if isinstance(row[1], bytes) else row[1].payload or b"")


def _groups(
    pages: Iterator[list[dict[str, Any]]], same: Mapping[str, Any], saved: list[bytes]
) -> Iterator[dict[str, list[Any]]]:
    """Yield row groups as columns, and append the keys of their rows to ``saved``."""
    rows: list[dict[str, Any]] = []
    size = 0
    for page in pages:
        rows += page
        saved += [row["key"] for row in page]
        size += sum(len(row["payload"] or b"") for row in page)
        if size >= GROUP_BYTES:
            yield _columns(rows, same)
            rows, size = [], 0
    if rows:
        yield _columns(rows, same)


def _columns(rows: list[dict[str, Any]], same: Mapping[str, Any]) -> dict[str, list[Any]]:
    repeated = {name: [value] * len(rows) for name, value in same.items()}
    return {**repeated, **{name: [row[name] for row in rows] for name in rows[0]}}


def _message(key: bytes, value: MessageValue, snapshot: VisibilityState | None, rule: Rule) -> dict[str, Any]:
    return {
        "key": key,
        "publish_ms": _number(key[-10:-2]),
        "sequence": _number(key[-2:]),
        "write_pointer": value.pointer,
        "write_ms": None,
        "payload_sequence": None,
        "payload": value.payload,
        "verdict": str(commit_state(value.pointer, snapshot, rule)),
    }


def _payload(key: bytes, value: bytes, snapshot: VisibilityState | None, rule: Rule) -> dict[str, Any]:
    pointer = int.from_bytes(key[-18:-10], "big", signed=True)
    return {
        "key": key,
        "publish_ms": None,
        "sequence": None,
        "write_pointer": pointer,
        "write_ms": _number(key[-10:-2]),
        "payload_sequence": _number(key[-2:]),
        "payload": value,
        "verdict": str(commit_state(pointer, snapshot, rule)),
    }


def _number(data: bytes) -> int:
    """Return a time or a sequence id; negative times do not occur, since such rows are never deleted (L0)."""
    return int.from_bytes(data, "big")


def _archive_error(path: Path, error: OSError) -> ArchiveError:
    return ArchiveError(f"{path} cannot be written: {error}.", _HINTS.get(error.errno or 0, _OTHER))
