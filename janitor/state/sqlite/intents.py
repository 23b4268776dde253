"""What a run announces before it deletes, in a plain file beside the state's.

A commit of the state costs several syncs, and a sweep of a thousand topics would wait for them longer than for its
deletes. An announcement only has to outlive the process: the deletes that follow it are not synced either until the
run's end, when the ledger takes over. So it is one line appended to ``intents.jsonl``, without a sync.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tms_core.errors import StateError

FILE_NAME = "intents.jsonl"


class Intents:
    """Rows of JSON values and bytes, appended one by one.

    Args:
        folder: where the file is; None keeps the rows in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / FILE_NAME
        self._rows: list[str] = []

    def append(self, row: Sequence[Any]) -> None:
        """Add a row.

        Raises:
            StateError: it could not be written.
        """
        line = json.dumps([{"hex": value.hex()} if isinstance(value, bytes) else value for value in row])
        if self._path is None:
            self._rows.append(line)
            return
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # On a line of its own even where the one before was cut short.
                whole = f"\n{line}\n".encode()
                if os.write(handle, whole) < len(whole):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
        except OSError as error:
            raise StateError(
                f"{self._path} cannot be written: {error.strerror}.", "Check its rights and the space on its disk."
            ) from error

    def read(self) -> list[list[Any]]:
        """All rows; a line that is no row, such as a last one cut short, is left out.

        Raises:
            StateError: the file could not be read.
        """
        rows = []
        for line in self._lines():
            try:
                values = json.loads(line)
                rows.append([bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in values])
            except (ValueError, KeyError, TypeError):
                continue
        return rows

    def clear(self) -> None:
        """Remove all rows.

        Raises:
            StateError: the file could not be removed.
        """
        self._rows.clear()
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                raise StateError(
                    f"{self._path} cannot be removed: {error.strerror}.", "Check the rights of its folder."
                ) from error

    def _lines(self) -> list[str]:
        if self._path is None:
            return list(self._rows)
        try:
            return self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"{self._path} cannot be read: {error.strerror}.", "Check its rights.") from error
