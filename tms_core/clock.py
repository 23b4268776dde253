"""The clocks of a machine.

Every function that depends on time gets a ``Clock``, so that tests and plans can use any time without waiting. Three
readings matter: wall time, by which rows are judged; the monotonic clock since boot, which checks wall time (invariant
S7); and the boot id, which tells whether two monotonic readings are comparable.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

from tms_core.errors import ClockJumped

__all__ = ["Clock", "ManualClock", "SystemClock"]

#: Monotonic time, in milliseconds, in which one millisecond of an advance of wall time is forgiven.
_MS_PER_FORGIVEN_MS = 1_000
#: Longest plausible time that a machine was off, in milliseconds; a larger advance counts as a clock jump.
OFF_MS = 7 * 24 * 3600 * 1000
#: A span of time as an operator or a program writes it: ``7d``, ``1h30m``.
SPAN = r"(?:\d{1,18}(?:ms|[smhd]))+"
_AMOUNT = re.compile(r"(\d+)(ms|[smhd])")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def parse_span(text: str) -> int | None:
    """Return the milliseconds of a span such as ``1h30m``; None if the text is not a span."""
    if not re.fullmatch(SPAN, text):
        return None
    return sum(int(number) * _UNIT_MS[unit] for number, unit in _AMOUNT.findall(text))


class Clock(Protocol):
    """The clocks of one machine."""

    def now_ms(self) -> int:
        """Return wall time in milliseconds since 1970-01-01 UTC."""
        ...

    def monotonic_ms(self) -> int:
        """Return the milliseconds since boot, sleep included; this clock never steps."""
        ...

    def boot_id(self) -> str:
        """Return the identity of the boot that :meth:`monotonic_ms` counts from; empty if the system has none."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of monotonic time."""
        ...


class SystemClock:
    """The real clocks of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
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
    """A clock that only its methods advance, among them :meth:`sleep`.

    Args:
        monotonic_ms: the initial monotonic time.
        boot_id: the identity of the simulated boot.
    """

    def __init__(self, now_ms: int, *, monotonic_ms: int = 0, boot_id: str = "manual") -> None:
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self._boot_id = boot_id

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def boot_id(self) -> str:
        return self._boot_id

    def sleep(self, seconds: float) -> None:
        self.advance(round(seconds * 1000))

    def advance(self, milliseconds: int) -> None:
        """Advance wall time and monotonic time together, as on a machine with a correct clock."""
        self._now_ms += milliseconds
        self._monotonic_ms += milliseconds

    def step(self, milliseconds: int) -> None:
        """Step the wall clock, backward if negative; monotonic time stays the same."""
        self._now_ms += milliseconds

    def reboot(self, boot_id: str, *, monotonic_ms: int = 0) -> None:
        """Simulate a reboot, after which monotonic time starts at ``monotonic_ms``."""
        self._boot_id = boot_id
        self._monotonic_ms = monotonic_ms


class _Reading(NamedTuple):
    #: The time by which rows are judged.
    now_ms: int
    #: Wall time, without the jump if the clock has jumped.
    right_ms: int
    #: The advance of wall time over the time that the monotonic clock predicts.
    ahead_ms: int


#: Largest advance of wall time over monotonic time at once, and largest difference between the clocks of machines, in
#: milliseconds: far beyond any correction by NTP, and too small to matter to a TTL.
CLOCK_ALLOWANCE_MS = 300_000


class HonestClock:
    """A wall clock that is checked against the monotonic clock; threads may share it.

    It does not follow a wall clock that jumps forward (invariant S7). The monotonic clock predicts wall time from the
    last time at which the wall clock was right. Small forward steps are forgiven over time, because the daily
    correction of a drifting clock makes many of them. A backward step is adopted at once, and so is its reversal: a
    clock that returns to the time before the step was right then. Any other step beyond the allowance is a jump.

    A clock that was late when the program started, as on a machine without a battery, is adopted after its correction.
    The conditions are: the predicted time is before a time that has certainly passed (:meth:`note_past`), and the new
    time is that time or at most :data:`OFF_MS` after it.

    After any other jump, correct the clock. If the clock is correct and was wrong when the program started, restart the
    program. Also restart it after a virtual machine was paused for longer than the allowance, because the monotonic
    clock stops during a pause.

    Args:
        allowance_ms: the largest advance of wall time over the monotonic clock at once, in milliseconds. An advance is
            forgiven at a rate of 1/1000 of monotonic time, twice the error of the worst clock that can be synchronized.
    """

    def __init__(self, clock: Clock, allowance_ms: int = CLOCK_ALLOWANCE_MS) -> None:
        self._clock = clock
        self._allowance_ms = allowance_ms
        self._lock = Lock()
        self._forgiven_until_ms = clock.monotonic_ms()
        #: Wall time minus monotonic time while the wall clock is right.
        self._lead_ms = clock.now_ms() - self._forgiven_until_ms
        #: The largest value of ``_lead_ms`` so far.
        self._highest_lead_ms = self._lead_ms
        self._now_ms = 0
        #: The latest time that had passed when the program started; 0: unknown.
        self._past_ms = 0

    def note_past(self, past_ms: int) -> None:
        """Record a time that had passed before the program started, such as the publish time of a stored row."""
        with self._lock:
            self._past_ms = max(self._past_ms, past_ms)

    def now_ms(self) -> int:
        """Return the time by which rows are judged: it does not follow a jump, and never steps back."""
        return self._read().now_ms

    def publish_ms(self) -> int:
        """Return the time for publishing, which equals the time for reading.

        Raises:
            ClockJumped: the wall clock is ahead by more than the allowance.
        """
        reading = self._read()
        if reading.ahead_ms > self._allowance_ms:
            raise ClockJumped(
                f"The clock is {reading.ahead_ms / 1000:.0f} s ahead of this machine's monotonic clock.",
                "Correct the clock; if it is correct already, restart the server.",
            )
        return reading.now_ms

    def right_ms(self) -> int:
        """Return wall time, after a jump without the jump; unlike :meth:`now_ms` it steps back with the clock."""
        return self._read().right_ms

    def monotonic_ms(self) -> int:
        """Return the machine's monotonic time in milliseconds, which does not depend on wall time."""
        return self._clock.monotonic_ms()

    def _read(self) -> _Reading:
        with self._lock:
            # Read in this order: a pause between the reads then looks like an advance, which is forgiven, rather than
            # like a backward step, which would be adopted.
            monotonic_ms = self._clock.monotonic_ms()
            wall_ms = self._clock.now_ms()
            lead_ms = wall_ms - monotonic_ms
            if abs(lead_ms - self._highest_lead_ms) <= self._allowance_ms < lead_ms - self._lead_ms:
                # The clock was set back before, and is right again.
                self._lead_ms = self._highest_lead_ms
            if lead_ms - self._lead_ms > self._allowance_ms and self._has_caught_up(wall_ms, lead_ms - self._lead_ms):
                self._lead_ms = lead_ms
            ahead_ms = self._forgive(monotonic_ms, lead_ms - self._lead_ms)
            self._highest_lead_ms = max(self._highest_lead_ms, self._lead_ms)
            self._now_ms = max(self._now_ms, wall_ms - max(0, ahead_ms - self._allowance_ms))
            jumped = ahead_ms > self._allowance_ms
            return _Reading(self._now_ms, wall_ms - ahead_ms if jumped else wall_ms, ahead_ms)

    def _has_caught_up(self, wall_ms: int, ahead_ms: int) -> bool:
        """Return whether a clock that jumped has caught up with a time that had passed before the program started."""
        past_ms = self._past_ms - self._allowance_ms
        return wall_ms - ahead_ms < past_ms <= wall_ms <= self._past_ms + OFF_MS

    def _forgive(self, monotonic_ms: int, ahead_ms: int) -> int:
        """Adopt a backward step, and a part of a forward step; return the remaining advance in milliseconds."""
        due_ms, rest_ms = divmod(monotonic_ms - self._forgiven_until_ms, _MS_PER_FORGIVEN_MS)
        if ahead_ms - due_ms > self._allowance_ms:
            # A jump is not forgiven over time.
            self._forgiven_until_ms = monotonic_ms
            return ahead_ms
        forgiven_ms = min(ahead_ms, due_ms)
        self._lead_ms += forgiven_ms
        # Carry over the remainder of the division, unless the whole advance is forgiven.
        self._forgiven_until_ms = monotonic_ms if forgiven_ms == ahead_ms else monotonic_ms - rest_ms
        return ahead_ms - forgiven_ms
