"""One SQLite file and how it is opened, written and locked; what is in it stands in the modules beside this one.

The journal is SQLite's plain rollback journal and not the write-ahead log: commits are few, the folder may lie on a
network volume, where a write-ahead log does not work, and between runs there is one file to copy. ``synchronous`` is
EXTRA, which also syncs the folder after the journal is gone: a claim must not come true only until the power fails.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Self

from janitor.state.sqlite import schema
from janitor.state.sqlite.booked import Booked
from janitor.state.sqlite.intents import Intents
from tms_core.errors import StateBusy, StateError

FILE_NAME = "state.sqlite3"
#: How long to wait for another process that is writing, in seconds; a commit takes milliseconds.
BUSY_SECONDS = 10.0

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteFile:
    """The state's file. Threads may share one; processes may each have their own on the same folder.

    Args:
        folder: where ``state.sqlite3`` is or shall be, made (for this user only) if it is not there; None keeps the
            state in memory, see :meth:`in_memory`.
        busy_seconds: how long to wait for another process that is writing.

    Raises:
        StateError: the file is corrupt, another program's, a newer version's, or cannot be opened.
        StateBusy: another process is writing it all that time.
    """

    def __init__(self, folder: Path | None, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self._where = "the state in memory" if folder is None else str(folder / FILE_NAME)
        self._intents = Intents(folder)
        self._booked = Booked(folder)
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
        except StateError:
            self._connection.close()
            raise

    @classmethod
    def in_memory(cls) -> Self:
        """A state that ends with the object."""
        return cls(None)

    def close(self) -> None:
        with self._lock, self._border():
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock, self._border():
            if self._depth and not self._connection.in_transaction:
                raise StateError(f"{self._where}: the transaction was rolled back when something inside it failed.")
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

    def _open(self) -> None:
        with self._border():
            self._connection.execute("PRAGMA synchronous = EXTRA")
            if schema.is_behind(self._connection, self._where):
                with self.transaction():
                    schema.make_tables(self._connection, self._where)

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

    @contextmanager
    def _view(self) -> Iterator[None]:
        """Reads inside the block see one and the same commit."""
        with self._lock, self._border():
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._undo(inner=False)

    def _rows(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        with self._lock, self._border():
            return self._connection.execute(query, parameters).fetchall()

    def _one(self, query: str) -> Any:
        rows = self._rows(query)
        return rows[0] if rows else None

    @contextmanager
    def _border(self) -> Iterator[None]:
        """Translates SQLite's errors into the state's."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _BUSY:
                raise StateBusy(
                    f"{self._where} is being written by another process.", "Wait for it to end, then try again."
                ) from error
            if code in _CORRUPT:
                raise StateError(
                    f"{self._where} is corrupt: {error}.", f"Move its folder away: {schema.LOSS}"
                ) from error
            if code == sqlite3.SQLITE_CONSTRAINT:
                raise StateError(f"{self._where} cannot hold this: {error}.") from error
            raise StateError(
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
            raise StateError(
                f"the state folder {folder} cannot be made: {error}.", "Name a folder you may write in janitor.state."
            ) from error
