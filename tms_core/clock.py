"""Where the time comes from.

Everything that decides by time takes a ``Clock``, so that tests and plans can stand at any moment and wait without
waiting. Three readings matter: wall time (what rows are judged by), the machine's running time since boot (what wall
time is checked against, rule S7) and the boot id (whether two such readings may be compared at all).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """The clocks of one machine."""

    def now_ms(self) -> int:
        """Wall time, milliseconds since 1970-01-01 UTC."""
        ...

    def running_ms(self) -> int:
        """Milliseconds this machine has been up, sleep included; never steps."""
        ...

    def boot_id(self) -> str:
        """Names the boot that :meth:`running_ms` counts from; empty where the system has no such name."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of running time."""
        ...


class SystemClock:
    """The real clocks of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def running_ms(self) -> int:
        source = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.clock_gettime_ns(source) // 1_000_000

    def boot_id(self) -> str:
        try:
            return _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to; sleeping advances it.

    Args:
        now_ms: wall time to start at.
        running_ms: running time to start at.
        boot_id: the boot it pretends to be in.
    """

    def __init__(self, now_ms: int, *, running_ms: int = 0, boot_id: str = "manual") -> None:
        self._now_ms = now_ms
        self._running_ms = running_ms
        self._boot_id = boot_id

    def now_ms(self) -> int:
        return self._now_ms

    def running_ms(self) -> int:
        return self._running_ms

    def boot_id(self) -> str:
        return self._boot_id

    def sleep(self, seconds: float) -> None:
        self.advance(round(seconds * 1000))

    def advance(self, milliseconds: int) -> None:
        """Let honest time pass: wall time and running time move together."""
        self._now_ms += milliseconds
        self._running_ms += milliseconds

    def step(self, milliseconds: int) -> None:
        """Set the wall clock forward (or back, if negative) without time passing."""
        self._now_ms += milliseconds

    def reboot(self, boot_id: str, *, running_ms: int = 0) -> None:
        """Start another boot: running time restarts."""
        self._boot_id = boot_id
        self._running_ms = running_ms
