"""What a run has come to so far, in a small file beside the state's.

A commit of the state costs several syncs, and counters shall move about once a second. So the file is written anew each
time and put in the place of the one before, without a sync: after a power failure it may be that of an earlier second,
or empty, as the deletes of that second may be undone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tms_core.errors import StateError

FILE_NAME = "booked.json"


class Booked:
    """One JSON value.

    Args:
        folder: where the file is; None keeps the value in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / FILE_NAME
        self._value: Any = None

    def write(self, value: Any) -> None:
        """Replace the value.

        Raises:
            StateError: it could not be written; the one before stays.
        """
        if self._path is None:
            self._value = value
            return
        new = self._path.with_suffix(".new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(value, file)
            new.replace(self._path)
        except OSError as error:
            raise StateError(
                f"{self._path} cannot be written: {error.strerror}.", "Check its rights and the space on its disk."
            ) from error

    def read(self) -> Any:
        """The value; None where there is none, or the file is not whole.

        Raises:
            StateError: the file could not be read.
        """
        if self._path is None:
            return self._value
        try:
            return json.loads(self._path.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise StateError(f"{self._path} cannot be read: {error.strerror}.", "Check its rights.") from error
