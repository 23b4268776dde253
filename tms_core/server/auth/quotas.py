"""Quotas of principals: requests in flight, bytes per second, and topics.

Bytes count after their transfer, so a request is never interrupted; an excess is a debt that delays later requests.
Usage is kept in memory and per server: each of several servers grants the whole quota.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tms_core.clock import Clock
from tms_core.errors import QuotaExceeded
from tms_core.settings.models import AuthQuota

#: The maximum number of principals whose usage is kept; the least recently used entry is dropped first.
MAX_PRINCIPALS = 4096
_EVERYBODY = "*"


@dataclass(slots=True)
class _Usage:
    """The usage of a principal; ``bytes_remaining`` is negative if the principal has a debt."""

    requests: int
    bytes_remaining: float
    at_ms: int


class Quotas:
    """The quotas and their usage; for a single thread.

    Args:
        quotas: the first quota that names a principal applies; ``*`` applies to all others.
    """

    def __init__(self, quotas: Sequence[AuthQuota], clock: Clock) -> None:
        self._quotas = {quota.principal: quota for quota in reversed(quotas)}
        self._clock = clock
        self._uses: OrderedDict[str, _Usage] = OrderedDict()

    def of(self, principal: str) -> AuthQuota | None:
        """Return the quota of a principal; None: no limits."""
        return self._quotas.get(principal) or self._quotas.get(_EVERYBODY)

    @contextmanager
    def request(self, principal: str) -> Iterator[None]:
        """Count a request of a principal as in flight while the block runs.

        Raises:
            QuotaExceeded: the principal has too many requests in flight, or has transferred too many bytes.
        """
        quota = self.of(principal)
        if quota is None:
            yield
            return
        use = self._use(principal, quota)
        if quota.requests is not None and use.requests >= quota.requests:
            raise QuotaExceeded(
                f"{principal} has {quota.requests} requests in flight, its quota.",
                "Wait for their responses, or ask the operator of this server (server.auth.quotas).",
                1.0,
            )
        if quota.bytes_per_second is not None and use.bytes_remaining <= 0:
            raise QuotaExceeded(
                f"{principal} is above its quota of {quota.bytes_per_second} bytes per second.",
                "Send less, or ask the operator of this server (server.auth.quotas).",
                max(1.0, -use.bytes_remaining / quota.bytes_per_second),
            )
        use.requests += 1
        try:
            yield
        finally:
            use.requests -= 1

    def spend(self, principal: str, size: int) -> None:
        """Count transferred bytes of a principal."""
        quota = self.of(principal)
        if quota is not None and quota.bytes_per_second is not None:
            self._use(principal, quota).bytes_remaining -= size

    def require_topics(self, principal: str, present: int) -> None:
        """Check that a principal may create one more topic.

        Args:
            present: the number of topics that the principal may administer.

        Raises:
            QuotaExceeded: the principal has reached its quota.
        """
        quota = self.of(principal)
        if quota is not None and quota.topics is not None and present >= quota.topics:
            raise QuotaExceeded(
                f"{principal} may administer {quota.topics} topics, its quota, partitions included.",
                "Delete unused topics, or ask the operator of this server (server.auth.quotas).",
                60.0,
            )

    def _use(self, principal: str, quota: AuthQuota) -> _Usage:
        """Return the current usage of a principal. Unused bytes accumulate for at most one second."""
        now_ms, rate = self._clock.monotonic_ms(), quota.bytes_per_second or 0
        use = self._uses.get(principal)
        if use is None:
            use = self._uses[principal] = _Usage(0, rate, now_ms)
            self._drop_unused()
        self._uses.move_to_end(principal)
        use.bytes_remaining = min(rate, use.bytes_remaining + rate * (now_ms - use.at_ms) / 1000)
        use.at_ms = now_ms
        return use

    def _drop_unused(self) -> None:
        if len(self._uses) > MAX_PRINCIPALS:
            idle = next((name for name, use in self._uses.items() if not use.requests), None)
            if idle is not None:
                del self._uses[idle]
