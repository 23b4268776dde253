"""A machine whose wall clock steps and whose disk runs full, as far as the processes started on it can see.

A small library that is loaded before all others (``LD_PRELOAD``) changes what the system calls answer, so that the
programs, LevelDB and SQLite run as they are.
"""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

from tests.support import require_tool

_UNLIMITED = -1
_FIELD_BYTES = 8


class Machine:
    """A machine for the processes that are started with its :attr:`environment`.

    Args:
        folder: where the library is built.

    Attributes:
        environment: the variables of a process on this machine.
    """

    def __init__(self, folder: Path) -> None:
        compiler = require_tool("cc", "apt-get install gcc libc6-dev")
        library, control = folder / "machine.so", folder / "machine"
        source = Path(__file__).with_name("machine.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
        control.write_bytes(bytes(2 * _FIELD_BYTES))
        with control.open("r+b") as file:
            self._fields = mmap.mmap(file.fileno(), 0)
        self.limit_disk(None)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "TMS_MACHINE": str(control)}

    def set_clock(self, ahead_ms: int) -> None:
        """Set the wall clock so far ahead of the real time; below 0: behind it."""
        self._set(0, ahead_ms)

    def limit_disk(self, room_bytes: int | None) -> None:
        """Leave room for so many bytes; None: for all."""
        self._set(1, _UNLIMITED if room_bytes is None else room_bytes)

    def _set(self, field: int, value: int) -> None:
        first = field * _FIELD_BYTES
        self._fields[first : first + _FIELD_BYTES] = value.to_bytes(_FIELD_BYTES, "little", signed=True)
