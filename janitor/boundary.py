"""The prune boundary: up to which transaction no positive pointer of an invalid one is left (rule S4).

Invalid ids ride on every transaction, so an operator wants to drop them, and may as soon as no row can become visible
again by it. That is a claim, and a wrong one shows aborted data to every reader, so it is built from evidence only:
a pass that covered the whole message table without an error, under a snapshot taken before it began, whose writes are
durable. It then reaches as far as the lowest of

* the snapshot's own bound (Tephra's TxUtils.getPruneUpperBound),
* the oldest transaction that could still have written when the pass began, and
* the lowest open id: one whose client might have published since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from janitor.references import Lifetime
from janitor.state.base import Claim, Evidence
from tms_core.transaction.model import TX_PER_MS


@dataclass(frozen=True, slots=True, order=True)
class Limit:
    """Something that holds the boundary back.

    Attributes:
        bound: as far as it lets the boundary go.
        reason: what it is, for people.
    """

    bound: int
    reason: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary and what holds it.

    Attributes:
        bound: the claim; None when there is none.
        limits: what holds it back, tightest first.
        obstacles: why there is no claim; empty when there is one.
    """

    bound: int | None
    limits: tuple[Limit, ...] = ()
    obstacles: tuple[str, ...] = ()

    @classmethod
    def none(cls, *obstacles: str) -> Boundary:
        return cls(None, obstacles=obstacles)


def claim(evidence: Sequence[Evidence], open_pointers: Iterable[int], lifetime: Lifetime) -> Boundary:
    """What the evidence allows to claim.

    Args:
        evidence: intervals left clean, in key order.
        open_pointers: invalid ids whose clients may still have published.
        lifetime: how long transactions may write, and how late.
    """
    gap = find_gap(evidence)
    if gap is not None:
        return Boundary.none(gap)
    limits = [limit for interval in evidence for limit in _limits(interval, lifetime)]
    lowest_open = min(open_pointers, default=None)
    if lowest_open is not None:
        limits.append(Limit(lowest_open - 1, f"invalid transaction {lowest_open} may still have been written to"))
    limits.sort()
    bound = limits[0].bound
    if bound <= 0:
        return Boundary(None, tuple(limits), (f"nothing can be claimed: {limits[0].reason}",))
    return Boundary(bound, tuple(limits))


def newest_settled(started_ms: int, lifetime: Lifetime) -> int:
    """The newest pointer under which nothing could be published any more when a pass began."""
    late_ms = max(lifetime.grace_ms, lifetime.allowance_ms)
    return (started_ms - lifetime.max_ms - late_ms) * TX_PER_MS - 1


def in_force(claim: Claim, now_ms: int, lifetime: Lifetime) -> bool:
    """Whether a claim still stands: not made by a clock set back since, nor with a lifetime raised since."""
    return claim.made_ms <= now_ms and claim.bound <= newest_settled(claim.made_ms, lifetime)


def find_gap(evidence: Sequence[Evidence]) -> str | None:
    """Where the intervals leave keys uncovered, in words; None when they cover everything."""
    if not evidence:
        return "no complete pass has covered the message table yet"
    position: bytes | None = b""
    for interval in sorted(evidence, key=lambda item: item.start):
        if position is None:
            break
        if interval.start > position:
            return f"no pass has covered the keys from {position.hex() or 'the beginning'} to {interval.start.hex()}"
        position = None if interval.stop is None else max(position, interval.stop)
    return None if position is None else f"no pass has covered the keys from {position.hex()} on"


def _limits(interval: Evidence, lifetime: Lifetime) -> list[Limit]:
    start = interval.start.hex() or "the beginning"
    stop = "the end" if interval.stop is None else interval.stop.hex()
    return [
        Limit(interval.bound, f"snapshot {interval.snapshot_timestamp_ms}, used from {start} to {stop}"),
        Limit(
            newest_settled(interval.started_ms, lifetime),
            f"younger transactions could still write when the pass from {start} to {stop} began",
        ),
    ]
