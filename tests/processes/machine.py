"""A simulated machine, on whose processes a test steps the wall clock and limits the disk.

A small library, which is loaded first (``LD_PRELOAD``), changes the results of system calls, so that the programs,
LevelDB and SQLite run unchanged.
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
        folder: the folder for the compiled library.

    Attributes:
        environment: the environment of a process on this machine.
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
        """Set the offset of the wall clock from the real time, in milliseconds; negative: the clock is late."""
        self._set(0, ahead_ms)

    def limit_disk(self, free_bytes: int | None) -> None:
        """Limit the bytes that processes can still write; None: no limit."""
        self._set(1, _UNLIMITED if free_bytes is None else free_bytes)

    def _set(self, field: int, value: int) -> None:
        first = field * _FIELD_BYTES
        self._fields[first : first + _FIELD_BYTES] = value.to_bytes(_FIELD_BYTES, "little", signed=True)
