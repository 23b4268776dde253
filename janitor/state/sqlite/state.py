"""The state as one SQLite file, ``state.sqlite3``, in a separate folder.

It is one file, so that the conclusion of a run is one commit. SQLite uses a rollback journal instead of a write-ahead
log: commits are few, the folder may be on a network volume, where a write-ahead log does not work, and between runs
there is one file to copy. ``synchronous`` is EXTRA, which also syncs the folder after the deletion of the journal: a
published boundary must survive a power failure.

The layout has a version number, so that a janitor rejects a file of another layout.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Self

from janitor.state.base import State
from janitor.state.documents import Changes, View, damage_as_error
from janitor.state.sqlite.loose import LooseFile
from tms_core.errors import StateBusy, StateError, StateUnavailable, is_full

#: The value of ``PRAGMA user_version`` in a file of this layout.
SCHEMA_VERSION = 7
#: The value of ``PRAGMA application_id`` in the janitor's files ("tmsj").
APPLICATION_ID = 0x746D736A

#: The consequences of a lost state file.
LOSS = (
    "this loses the adoption, the held jumps, the proven boundary and the history, but no messages: nothing is deleted "
    "until you adopt the store again."
)

_TABLES = (
    # With row ids: without them SQLite reads large values when it compares keys.
    "CREATE TABLE documents (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE history (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)


def is_new(connection: sqlite3.Connection, where: str) -> bool:
    """Return whether the open file has no tables; otherwise it has the tables of this layout.

    Args:
        where: the file, for messages.

    Raises:
        StateError: the file is another program's database, or has another layout.
    """
    # Query in this order, so that tables that another janitor creates in between are recognized.
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and (number or tables):
        raise StateError(f"{where} is a database of another program.", "Set janitor.state to another folder.")
    if number > SCHEMA_VERSION:
        raise StateError(
            f"{where} was written by a newer janitor (layout {number}; this version knows {SCHEMA_VERSION}).",
            f"Use the newer version, or move the folder away: {LOSS}",
        )
    if number not in (0, SCHEMA_VERSION):
        raise StateError(
            f"{where} has layout {number}, which no released janitor wrote (this version knows {SCHEMA_VERSION}).",
            f"Move the folder away: {LOSS}",
        )
    return bool(number == 0)


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Create the tables if they do not exist; call this inside a transaction."""
    if is_new(connection, where):
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


FILE_NAME = "state.sqlite3"
#: The maximum wait for another writing process, in seconds; a commit takes milliseconds.
BUSY_SECONDS = 10.0

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY})
#: Errors of SQLite; Python cannot decode an error that quotes damaged bytes of the file.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
#: The name of the lease, the only document that is written outside transactions.
_LEASE = "lease"
#: The number of rows in the first page and in the largest page of a scan; many readers need only the first page.
_FIRST_PAGE, _MAX_PAGE = 25, 1600
#: The size in bytes above which rows are compressed, and their first byte; uncompressed rows are JSON.
_LARGE, _COMPRESSED = 1024, b"x"
_PUT_DOCUMENT = "INSERT OR REPLACE INTO documents VALUES (?, ?)"
_PUT_ROW = "INSERT OR REPLACE INTO history VALUES (?, ?)"
_SCAN = "SELECT key, value FROM history WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
_SCAN_KEYS = "SELECT key, x'' FROM history WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"


def is_present(path: Path) -> bool:
    """Return whether a file of the state exists.

    ``Path.exists`` differs between versions of Python if the folder cannot be entered.

    Raises:
        StateError: this user cannot enter the folder, or it is not a folder.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StateError(
            f"{path} cannot be reached: {error.strerror}.",
            "Run the command as the janitor's user, or set janitor.state to a folder of this user.",
        ) from error
    return True


def copy_state(source: Path, target: Path) -> None:
    """Copy the state file to another folder without the lease, also while a janitor writes the file.

    Raises:
        StateError: the file could not be read or written.
    """
    try:
        with (
            closing(sqlite3.connect(f"file:{source / FILE_NAME}?mode=ro", uri=True)) as state,
            closing(sqlite3.connect(target / FILE_NAME)) as copy,
        ):
            state.backup(copy)
            copy.execute("DELETE FROM documents WHERE key = ?", (_LEASE,))
            copy.commit()
    except _ERRORS as error:
        raise StateError(f"{source / FILE_NAME} cannot be copied: {error}.", "Check the disk and try again.") from error


class SqliteState(State):
    """The state of one store, in a file. Threads may share an object, and processes may share a folder.

    Args:
        folder: the folder of ``state.sqlite3``, created with access only for this user if it does not exist; None keeps
            the state in memory, see :meth:`in_memory`.
        busy_seconds: the maximum wait for another writing process.

    Raises:
        StateError: the file is corrupt, cannot be opened, or belongs to another program or version.
        StateBusy: another process was writing during the whole wait.
    """

    driver: SqliteDocuments

    def __init__(self, folder: Path | None, *, busy_seconds: float = BUSY_SECONDS) -> None:
        super().__init__(SqliteDocuments(folder, busy_seconds))

    @classmethod
    def in_memory(cls) -> Self:
        """Return a state in memory, which exists only as long as the object."""
        return cls(None)


class _ErrorTranslation:
    """A context that converts SQLite errors into state errors; a class, because a generator is slower."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not isinstance(error, _ERRORS):
            return
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY:
            raise StateBusy(
                f"{self._name} is being written by another process.", "Wait for that process, then try again."
            ) from error
        if code in _CORRUPT or isinstance(error, UnicodeDecodeError):
            raise StateError(f"{self._name} is corrupt: {error}.", f"Move its folder away: {LOSS}") from error
        kind = StateUnavailable if code in _FULL else StateError
        raise kind(
            f"{self._name} cannot be used: {error}.", "Check the folder's permissions and the space on its disk."
        ) from error


class SqliteDocuments:
    """The state's documents in a file; arguments and errors as of :class:`SqliteState`."""

    leaf_ids = 1024

    def __init__(self, folder: Path | None, busy_seconds: float) -> None:
        self.name = "the state in memory" if folder is None else str(folder / FILE_NAME)
        self.place = self.name if folder is None else str(folder)
        self.loose = LooseFile(folder)
        self._convert_errors = _ErrorTranslation(self.name)
        self._lock = RLock()
        if folder is not None:
            _prepare(folder)
        with self._convert_errors:
            self.connection = sqlite3.connect(
                ":memory:" if folder is None else folder / FILE_NAME,
                timeout=busy_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
        if folder is None:
            # Close a state in memory with its object: callers do not close it.
            weakref.finalize(self, self.connection.close)
        try:
            with self._convert_errors:
                self.connection.execute("PRAGMA synchronous = EXTRA")
                if is_new(self.connection, self.name):
                    with self._begin("IMMEDIATE"):
                        make_tables(self.connection, self.name)
        except StateError:
            self.connection.close()
            raise

    def close(self) -> None:
        with self._lock, self._convert_errors:
            self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Changes]:
        changes = Changes(self)
        with self._begin("IMMEDIATE"):
            yield changes
            self._write(_PUT_DOCUMENT, "DELETE FROM documents WHERE key = ?", changes.values)
            rows = {key: value and _compress(value) for key, value in changes.rows.items()}
            self._write(_PUT_ROW, "DELETE FROM history WHERE key = ?", rows)
        with suppress(StateError):
            # Remaining rows are harmless: they belong to a finished run.
            if changes.loose:
                self.loose.delete(changes.loose)

    @contextmanager
    def present(self) -> Iterator[View]:
        with self._begin("DEFERRED"):
            yield self

    def value(self, name: str) -> bytes | None:
        return self._value("SELECT value FROM documents WHERE key = ?", name)

    def names(self) -> set[str]:
        with self._lock, self._convert_errors:
            return {name for (name,) in self.connection.execute("SELECT key FROM documents WHERE key <> ?", [_LEASE])}

    def lease(self) -> bytes | None:
        return self.value(_LEASE)

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the lease if it still has the expected value."""
        with self._begin("IMMEDIATE"):
            if self.lease() != expected:
                return False
            self.connection.execute(_PUT_DOCUMENT, [_LEASE, value])
            return True

    def clock_ms(self) -> None:
        """Return None: a file has no clock."""

    @property
    def history(self) -> SqliteDocuments:
        return self

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the existing rows of history."""
        found = ((key, self._value("SELECT value FROM history WHERE key = ?", key)) for key in keys)
        return {key: _decompress(key, value) for key, value in found if value is not None}

    def scan(self, start: bytes, stop: bytes, *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows of history of ``[start, stop)`` without blocking a writer between two of them."""
        query, page = _SCAN_KEYS if keys_only else _SCAN, _FIRST_PAGE
        while True:
            with self._lock, self._convert_errors:
                rows = self.connection.execute(query, (start, stop, page)).fetchall()
            for key, value in rows:
                yield key, _decompress(key, value)
            if len(rows) < page:
                return
            start, page = rows[-1][0] + b"\x00", min(page * 4, _MAX_PAGE)

    def _value(self, query: str, key: str | bytes) -> bytes | None:
        with self._lock, self._convert_errors:
            row = self.connection.execute(query, [key]).fetchone()
        return row[0] if row else None

    def _write(self, put: str, delete: str, rows: Mapping[Any, bytes | None]) -> None:
        """Write rows, and delete rows with the value None."""
        # Sort by key, so that SQLite visits each database page once.
        keys = sorted(rows)
        self.connection.executemany(put, ((key, rows[key]) for key in keys if rows[key] is not None))
        self.connection.executemany(delete, ((key,) for key in keys if rows[key] is None))

    @contextmanager
    def _begin(self, kind: str) -> Iterator[None]:
        """Run the block in a new SQLite transaction, or in the current transaction of this thread."""
        with self._lock, self._convert_errors:
            if self.connection.in_transaction:
                yield
                return
            self.connection.execute(f"BEGIN {kind}")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                # This has no effect if SQLite has already rolled back, as on a full disk.
                self.connection.rollback()
                raise


def _compress(value: bytes) -> bytes:
    return zlib.compress(value, 1) if len(value) > _LARGE else value


def _decompress(key: bytes, value: bytes) -> bytes:
    if not value.startswith(_COMPRESSED):
        return value
    with damage_as_error(key):
        return zlib.decompress(value)


def _prepare(folder: Path) -> None:
    """Create the folder and an empty file that only this user can read.

    Do not open an existing file here: closing it would release the locks that this process holds on it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(folder / FILE_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError as error:
        if not is_present(folder / FILE_NAME):
            kind = StateUnavailable if is_full(error) else StateError
            raise kind(
                f"the state folder {folder} cannot be created: {error}.",
                "Set janitor.state to a folder that you can write.",
            ) from error
