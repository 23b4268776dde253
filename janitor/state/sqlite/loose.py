"""Unsynced rows in a plain file next to the state: announcements, progress and heartbeats of a run.

A commit of the state costs several syncs. A sweep of a thousand topics would wait longer for them than for its
deletions. These rows need to survive only the process, because the deletions that they announce are not synced before
the run finishes and the ledger replaces them. Each row is a line appended to ``running.jsonl``, and the last line of a
key counts. A line has a checksum, because a damaged line may be valid JSON of another row. Only the running process
writes to the file.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from zlib import crc32

from tms_core.errors import StateError, StateUnavailable, is_full
from tms_core.logs.loggers import get_logger

logger = get_logger(__name__)

FILE_NAME = "running.jsonl"
#: The file is rewritten if it exceeds this size in bytes and this multiple of the size of its current rows.
_REWRITE_BYTES, _REWRITE_RATIO = 1 << 20, 4
#: The maximum number of line numbers in a warning.
_MAX_NUMBERS = 10


class LooseFile:
    """Rows of JSON text by key.

    Args:
        folder: the folder of the file; None keeps the rows in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / FILE_NAME
        self._lock = Lock()
        self._lines = b""
        self._max_bytes = _REWRITE_BYTES

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        names = {key.hex().encode() for key in keys}
        rows = self._rows(names.__contains__) if keys else {}
        return {key: rows[key] for key in keys if key in rows}

    def scan(self, start: bytes, stop: bytes, *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        # Keys in hex sort like the keys.
        first, end = start.hex().encode(), stop.hex().encode()
        rows = self._rows(lambda key: first <= key < end)
        return ((key, b"" if keys_only else rows[key]) for key in sorted(rows))

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows.

        Raises:
            StateError: they could not be written.
        """
        with self._lock:
            self._append((key, value.decode()) for key, value in rows)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete rows, and the file with its last row.

        Raises:
            StateError: they could not be deleted.
        """
        with self._lock:
            (rows, damaged), deletions = self._parsed(), set(keys)
            if damaged:
                numbers = [*map(str, islice(damaged, _MAX_NUMBERS)), *["…"] * (len(damaged) > _MAX_NUMBERS)]
                logger.warning(
                    "kept %d damaged lines of %s (lines %s): they may announce deletions of a run that died, which the "
                    "ledger lacks. Stop the janitor and delete the lines",
                    len(damaged),
                    self._path,
                    ", ".join(numbers),
                )
            if rows.keys() <= deletions and not damaged:
                self._lines = b""
                with self._convert_errors("removed"):
                    if self._path is not None:
                        self._path.unlink(missing_ok=True)
            elif rows.keys() & deletions:
                self._append((key, None) for key in sorted(rows.keys() & deletions))

    def removal(self, key: bytes) -> str:
        """Return the command that deletes the lines of a row."""
        return f"sed -i /{key.hex()}/d {shlex.quote(str(self._path))}"

    def _rows(self, is_selected: Callable[[bytes], bool]) -> dict[bytes, bytes]:
        """Return the current rows, without invalid lines; arguments as of :meth:`_parsed`."""
        return self._parsed(is_selected)[0]

    def _parsed(
        self, is_selected: Callable[[bytes], bool] | None = None
    ) -> tuple[dict[bytes, bytes], dict[int, bytes]]:
        """Return the current rows, and by number the invalid lines that no crash has truncated.

        Args:
            is_selected: selects keys, in hex; other lines are not parsed. None: all lines are parsed.
        """
        rows: dict[bytes, bytes] = {}
        damaged: dict[int, bytes] = {}
        for number, line in enumerate(self._read().split(b"\n"), 1):
            if is_selected and not is_selected(line[2 : line.find(b'"', 2)]):
                continue
            try:
                key, value = _parse(line)
                rows[key] = value
            except (ValueError, TypeError, AttributeError):
                if line.endswith(b"]"):
                    damaged[number] = line
        return {key: value for key, value in rows.items() if value}, damaged

    def _read(self) -> bytes:
        with self._convert_errors("read"):
            try:
                return self._lines if self._path is None else self._path.read_bytes()
            except FileNotFoundError:
                return b""

    def _append(self, rows: Iterable[tuple[bytes, str | None]]) -> None:
        lines = b"".join(map(_line, rows))
        if self._path is None:
            self._lines += lines
            return
        with self._convert_errors("written"):
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # Write in one call, so that a reader sees at most a truncated last line, which it ignores.
                if os.write(handle, lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                size = os.fstat(handle).st_size
            finally:
                os.close(handle)
            if size > self._max_bytes:
                self._rewrite(self._path)

    def _rewrite(self, path: Path) -> None:
        """Rewrite the file without outdated lines, and sync it, because the old file may have been on disk."""
        rows, damaged = self._parsed()
        kept = [b"%b\n" % line for line in damaged.values()]
        lines = b"".join([*kept, *(_line((key, value.decode())) for key, value in rows.items())])
        new = path.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(lines)
            file.flush()
            # Sync before the rename: otherwise a crash of the machine could leave an empty file.
            os.fsync(file.fileno())
        new.replace(path)
        self._max_bytes = max(_REWRITE_BYTES, _REWRITE_RATIO * len(lines))

    @contextmanager
    def _convert_errors(self, done: str) -> Iterator[None]:
        """Convert errors of the file into errors of the state."""
        try:
            yield
        except OSError as error:
            kind = StateUnavailable if is_full(error) else StateError
            raise kind(
                f"{self._path} cannot be {done}: {error.strerror}.", "Check its permissions and the space on its disk."
            ) from error


def _line(row: tuple[bytes, str | None]) -> bytes:
    """Return the line of a row, with the checksum of its other bytes."""
    key, value = row
    text = json.dumps([key.hex(), value]).encode().removesuffix(b"]")
    # A line break first: a crash may have truncated the last line.
    return b'\n%b, "%08x"]\n' % (text, crc32(text))


def _parse(line: bytes) -> tuple[bytes, bytes]:
    """Return the row of a line; lines of an earlier version have no checksum.

    Raises:
        ValueError, TypeError, AttributeError: the line is invalid.
    """
    text, _, checksum = line.rpartition(b', "')
    # After the checksum, damage costs nothing. With a wrong checksum, the list has three entries.
    key, value = json.loads(text + b"]" if checksum[:8] == b"%08x" % crc32(text) else line)
    return bytes.fromhex(key), b"" if value is None else value.encode()
