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

#: In how much monotonic time one part of it is forgiven by which wall time is ahead.
_FORGIVEN_PART = 1_000
#: A machine that was off for longer than this, in milliseconds, has a jumped clock until an operator says otherwise.
OFF_MS = 7 * 24 * 3600 * 1000
#: A span of time as an operator or a program writes it: ``7d``, ``1h30m``.
SPAN = r"(?:\d{1,18}(?:ms|[smhd]))+"
_AMOUNT = re.compile(r"(\d+)(ms|[smhd])")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def parse_span(text: str) -> int | None:
    """Return the milliseconds of a span such as ``1h30m``; None: it is not one."""
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
        """Return the identity of the boot that :meth:`monotonic_ms` counts from; empty: the system has no identity."""
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
    """A clock that moves only when told to; sleeping advances it.

    Args:
        monotonic_ms: monotonic time to start at.
        boot_id: the boot it pretends to be in.
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
        """Let honest time pass: wall time and monotonic time move together."""
        self._now_ms += milliseconds
        self._monotonic_ms += milliseconds

    def step(self, milliseconds: int) -> None:
        """Set the wall clock forward (or back, if negative) without time passing."""
        self._now_ms += milliseconds

    def reboot(self, boot_id: str, *, monotonic_ms: int = 0) -> None:
        """Start another boot: monotonic time restarts."""
        self._boot_id = boot_id
        self._monotonic_ms = monotonic_ms


class _Reading(NamedTuple):
    #: The time to read by.
    now_ms: int
    #: The time that wall time would show if it were right.
    right_ms: int
    #: By how much wall time is ahead of that.
    ahead_ms: int


#: How far wall time may get ahead of monotonic time at once, and the clocks of several machines may differ, in
#: milliseconds: far beyond any correction by NTP, and not enough to matter to a ttl.
CLOCK_ALLOWANCE_MS = 300_000


class HonestClock:
    """A wall clock that is checked against the monotonic clock; threads may share it.

    It does not follow a clock that jumps forward (invariant S7). Wall time is compared with the monotonic clock since
    the wall clock was last right. Small forward steps are forgiven over time, because the daily correction of a
    drifting clock makes many of them. A backward step is believed at once, and so is the way back: a clock that shows
    the time as if it had never been set back was right before. Anything between the two is a jump.

    A clock that was behind when the program started, as on a machine without a battery, is believed once it is set. The
    conditions are: by the monotonic clock, it shows a time before the time that had certainly passed
    (:meth:`note_past`), and the jump leads to that time or to at most :data:`OFF_MS` after it.

    After any other jump, set the clock right. If the clock is right now and was wrong when the program started, restart
    the program. Restart it also after a virtual machine was paused for longer than the allowance, because its monotonic
    clock stood still.

    Args:
        allowance_ms: how far wall time may advance ahead of the monotonic clock at once, in milliseconds. The
            difference is forgiven at a rate of 1/1000 of monotonic time, twice the error of the worst clock that can be
            synchronized.
    """

    def __init__(self, clock: Clock, allowance_ms: int = CLOCK_ALLOWANCE_MS) -> None:
        self._clock = clock
        self._allowance_ms = allowance_ms
        self._lock = Lock()
        self._forgiven_until_ms = clock.monotonic_ms()
        #: By how much wall time is ahead of monotonic time while it is right.
        self._lead_ms = clock.now_ms() - self._forgiven_until_ms
        #: The most that ever was.
        self._highest_lead_ms = self._lead_ms
        self._now_ms = 0
        #: The latest time that had passed when the program started; 0: not known.
        self._past_ms = 0

    def note_past(self, past_ms: int) -> None:
        """Note a time that had passed before the program started, because rows or files of the store have it."""
        with self._lock:
            self._past_ms = max(self._past_ms, past_ms)

    def now_ms(self) -> int:
        """Return the time to read by: rows that a jumped clock makes old are not old, and expired rows stay expired."""
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
                "Set it right; if it is right now, restart the server.",
            )
        return reading.now_ms

    def right_ms(self) -> int:
        """Return wall time; after a jump, the time without the jump. It steps back with the clock."""
        return self._read().right_ms

    def monotonic_ms(self) -> int:
        """Return the machine's monotonic clock, which no wrong clock changes."""
        return self._clock.monotonic_ms()

    def _read(self) -> _Reading:
        with self._lock:
            # In this order: a thread that is paused between the two sees a clock that is ahead for once, and not one
            # that stepped back.
            monotonic_ms = self._clock.monotonic_ms()
            wall_ms = self._clock.now_ms()
            lead_ms = wall_ms - monotonic_ms
            if abs(lead_ms - self._highest_lead_ms) <= self._allowance_ms < lead_ms - self._lead_ms:
                # It was set back, and is right again.
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
        """Adopt a backward step, and a little of a forward one; return the remaining difference in milliseconds."""
        due_ms, rest_ms = divmod(monotonic_ms - self._forgiven_until_ms, _FORGIVEN_PART)
        if ahead_ms - due_ms > self._allowance_ms:
            # A jump becomes no smaller with time.
            self._forgiven_until_ms = monotonic_ms
            return ahead_ms
        forgiven_ms = min(ahead_ms, due_ms)
        self._lead_ms += forgiven_ms
        # What was too short to forgive a millisecond for still counts, but only while there is something to forgive.
        self._forgiven_until_ms = monotonic_ms if forgiven_ms == ahead_ms else monotonic_ms - rest_ms
        return ahead_ms - forgiven_ms
