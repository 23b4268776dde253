"""Failed attempts to show a token, which are answered later the more of them come from one address.

Good tokens are never slowed down, so that a stranger behind the same proxy holds up nobody. An IPv6 network of 64 bits
counts as one address, because one machine may have all of its addresses.
"""

from __future__ import annotations

import asyncio
from ipaddress import IPv6Address

from tms_core.clock import Clock
from tms_core.tables.recently_set import RecentlySet

#: How many addresses are remembered.
MOST_REMEMBERED = 4096
#: How many failed attempts of an address are answered at once, and after how long one less counts, in milliseconds.
FREE_ATTEMPTS, FORGIVEN_MS = 10, 6_000
#: By how much each further one is answered later, and how much later at most, in seconds.
STEP_SECONDS, MOST_SECONDS = 0.5, 10.0
#: How many of their answers wait at most: each has a connection, which others may need.
MOST_WAITING = 50


class FailedAttempts:
    """How many attempts of each address have failed of late. For one thread.

    Args:
        most_waiting: how many of their answers wait at most; one more is given at once.
    """

    def __init__(self, clock: Clock, most_waiting: int = MOST_WAITING) -> None:
        self._clock = clock
        self._most_waiting = most_waiting
        self._waiting = 0
        self._failed: RecentlySet[str, tuple[float, int]] = RecentlySet(MOST_REMEMBERED)

    def note(self, address: str) -> float:
        """Note one more failed attempt.

        Returns:
            How much later it is answered, in seconds.
        """
        now_ms, address = self._clock.monotonic_ms(), _network(address)
        failed, at_ms = self._failed.get(address, (0.0, now_ms))
        failed = max(0.0, failed - (now_ms - at_ms) / FORGIVEN_MS) + 1
        self._failed[address] = failed, now_ms
        return min(MOST_SECONDS, max(0.0, failed - FREE_ATTEMPTS) * STEP_SECONDS)

    async def delay(self, address: str) -> None:
        """Note one more failed attempt, and let its answer wait, if not too many wait already."""
        seconds = self.note(address)
        if not seconds or self._waiting >= self._most_waiting:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._waiting -= 1


def _network(address: str) -> str:
    """Return the network of 64 bits that an IPv6 address is in; any other address unchanged."""
    try:
        found = IPv6Address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped or int(found) >> 64)
