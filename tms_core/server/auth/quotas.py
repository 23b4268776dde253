"""What a principal may use of a server, and how failed attempts are slowed down.

A quota is for each principal: requests in flight, bytes per second and topics. Bytes count once they have come or gone,
so a request is never cut off; what is too much is a debt that the next requests wait for. All of it is kept in memory
and per server: of several servers each grants the whole quota.

Failed attempts (a token that is not good) are answered later the more there are from one address. Good tokens are never
slowed down, so that a stranger behind the same proxy holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tms_core.clock import Clock
from tms_core.errors import QuotaExceeded
from tms_core.settings.models import AuthQuota

#: How many principals and addresses are remembered; the one that was not seen for longest is forgotten first.
MOST_REMEMBERED = 4096
#: How many failed attempts of an address are answered at once, and after how long one less counts, in milliseconds.
FREE_ATTEMPTS, FORGIVEN_MS = 10, 6_000
#: By how much each further one is answered later, and how much later at most, in seconds.
STEP_SECONDS, MOST_SECONDS = 0.5, 10.0
#: How many of their answers wait at most: each has a connection, which others may need.
MOST_WAITING = 50
_EVERYBODY = "*"


@dataclass(slots=True)
class _Use:
    """What a principal uses; ``bytes_left`` is below 0 where it owes some."""

    requests: int
    bytes_left: float
    at_ms: int


class Quotas:
    """The quotas in force, and what is used of them. For one thread.

    Args:
        quotas: the first that names a principal is its own; ``*`` is for those that none names.
    """

    def __init__(self, quotas: Sequence[AuthQuota], clock: Clock) -> None:
        self._quotas = {quota.principal: quota for quota in reversed(quotas)}
        self._clock = clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def of(self, principal: str) -> AuthQuota | None:
        """The quota of a principal; None: it has none."""
        return self._quotas.get(principal) or self._quotas.get(_EVERYBODY)

    @contextmanager
    def request(self, principal: str) -> Iterator[None]:
        """Have a request of a principal in flight while the block runs.

        Raises:
            QuotaExceeded: it has too many, or has sent and received too much.
        """
        quota = self.of(principal)
        if quota is None:
            yield
            return
        use = self._use(principal, quota)
        if quota.requests is not None and use.requests >= quota.requests:
            raise QuotaExceeded(
                f"{principal} has {quota.requests} requests in flight, its quota.",
                "Wait for their answers, or ask the operator of this server (server.auth.quotas).",
                1.0,
            )
        if quota.bytes_per_second is not None and use.bytes_left <= 0:
            raise QuotaExceeded(
                f"{principal} is above its quota of {quota.bytes_per_second} bytes per second.",
                "Send less, or ask the operator of this server (server.auth.quotas).",
                max(1.0, -use.bytes_left / quota.bytes_per_second),
            )
        use.requests += 1
        try:
            yield
        finally:
            use.requests -= 1

    def spend(self, principal: str, size: int) -> None:
        """Count bytes that have come from a principal or gone to it."""
        quota = self.of(principal)
        if quota is not None and quota.bytes_per_second is not None:
            self._use(principal, quota).bytes_left -= size

    def require_topics(self, principal: str, present: int) -> None:
        """Let a principal make one more topic.

        Args:
            present: how many it has.

        Raises:
            QuotaExceeded: it has as many as it may.
        """
        quota = self.of(principal)
        if quota is not None and quota.topics is not None and present >= quota.topics:
            raise QuotaExceeded(
                f"{principal} may administer {quota.topics} topics, its quota, partitions included.",
                "Delete some, or ask the operator of this server (server.auth.quotas).",
                60.0,
            )

    def _use(self, principal: str, quota: AuthQuota) -> _Use:
        """What a principal uses now; a second's bytes are there at most, so a quiet minute saves nothing up."""
        now_ms, rate = self._clock.running_ms(), quota.bytes_per_second or 0
        use = self._uses.get(principal)
        if use is None:
            use = self._uses[principal] = _Use(0, rate, now_ms)
            self._forget()
        self._uses.move_to_end(principal)
        use.bytes_left = min(rate, use.bytes_left + rate * (now_ms - use.at_ms) / 1000)
        use.at_ms = now_ms
        return use

    def _forget(self) -> None:
        if len(self._uses) > MOST_REMEMBERED:
            idle = next((name for name, use in self._uses.items() if not use.requests), None)
            if idle is not None:
                del self._uses[idle]


class FailedAttempts:
    """How many attempts of each address have failed of late. For one thread.

    Args:
        most_waiting: how many of their answers wait at most; one more is given at once.
    """

    def __init__(self, clock: Clock, most_waiting: int = MOST_WAITING) -> None:
        self._clock = clock
        self._most_waiting = most_waiting
        self._waiting = 0
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def note(self, address: str) -> float:
        """Note one more failed attempt.

        Returns:
            How much later it is answered, in seconds.
        """
        now_ms = self._clock.running_ms()
        failed, at_ms = self._failed.pop(address, (0.0, now_ms))
        failed = max(0.0, failed - (now_ms - at_ms) / FORGIVEN_MS) + 1
        self._failed[address] = failed, now_ms
        if len(self._failed) > MOST_REMEMBERED:
            self._failed.popitem(last=False)
        return min(MOST_SECONDS, max(0.0, failed - FREE_ATTEMPTS) * STEP_SECONDS)

    async def wait(self, seconds: float) -> None:
        """Let an answer wait, if not too many wait already."""
        if self._waiting >= self._most_waiting:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._waiting -= 1
