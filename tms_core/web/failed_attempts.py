"""Delays of responses to failed authentication, which grow with the number of recent failures of an address.

Requests with valid tokens are never delayed, so an attacker behind the same proxy does not affect other clients. A /64
network of IPv6 counts as one address, because one machine may have all of its addresses.
"""

from __future__ import annotations

import asyncio
from ipaddress import IPv6Address

from tms_core.clock import Clock
from tms_core.tables.recently_set import RecentlySet

#: The maximum number of addresses whose failures are counted.
MAX_ADDRESSES = 4096
#: The number of failures of an address without a delay, and the time after which one failure is forgotten, in
#: milliseconds.
FREE_ATTEMPTS, FORGIVEN_MS = 10, 6_000
#: The additional delay of each further failure, and the maximum delay, in seconds.
STEP_SECONDS, MAX_DELAY_SECONDS = 0.5, 10.0
#: The maximum number of delayed responses, because each of them uses a connection.
MAX_WAITING = 50


class FailedAttempts:
    """The number of recent failures of each address; for a single thread.

    Args:
        max_waiting: the maximum number of delayed responses; further responses are not delayed.
    """

    def __init__(self, clock: Clock, max_waiting: int = MAX_WAITING) -> None:
        self._clock = clock
        self._max_waiting = max_waiting
        self._waiting = 0
        self._failed: RecentlySet[str, tuple[float, int]] = RecentlySet(MAX_ADDRESSES)

    def note(self, address: str) -> float:
        """Count a failure, and return the delay of its response in seconds."""
        now_ms, address = self._clock.monotonic_ms(), _network(address)
        failed, at_ms = self._failed.get(address, (0.0, now_ms))
        failed = max(0.0, failed - (now_ms - at_ms) / FORGIVEN_MS) + 1
        self._failed[address] = failed, now_ms
        return min(MAX_DELAY_SECONDS, max(0.0, failed - FREE_ATTEMPTS) * STEP_SECONDS)

    async def delay(self, address: str) -> None:
        """Count a failure, and wait before its response, unless too many responses wait."""
        seconds = self.note(address)
        if not seconds or self._waiting >= self._max_waiting:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._waiting -= 1


def _network(address: str) -> str:
    """Return the /64 network of an IPv6 address, and any other address unchanged."""
    try:
        found = IPv6Address(address)
    except ValueError:
        return address
    return str(found.ipv4_mapped or int(found) >> 64)
