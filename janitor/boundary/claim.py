"""The prune boundary: up to which transaction no positive pointer of an invalid one is left (rule S4).

Invalid ids ride on every transaction, so an operator wants to drop them, and may as soon as no row can become visible
again by it. That is a claim, and a wrong one shows aborted data to every reader, so it is built from evidence only:
intervals of keys that a pass covered without an error, under a snapshot taken before it started, and whose inversions
are durable. Where they cover the whole message table, the claim reaches as far as the lowest of

* each interval's snapshot's own bound (Tephra's TxUtils.getPruneUpperBound),
* for each interval, the oldest transaction that could still have written when its pass started, and
* the lowest open id: one whose client might have published since.

Intervals are of keys as they are stored, and so start with the salt where there is one. Nothing else divides a table
for good: regions are split, merged and moved.

To prove that a large table is clean takes hours, and a process may die in that time, or one salt of many may fail. So
each part of a store is evidence by itself as soon as it was covered (rule S4), and a *round* is over when every part
was. A run that goes on with a round searches the parts that are done only for what a frequent run does too.

A store in one piece is covered from its first key to its last, and what is covered is saved on the way: a run that is
killed at the same time every night gets further every night.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from janitor.rules.ranges import Lifetime, remainder
from janitor.state.base import Claim, Evidence, State
from janitor.state.figures import KeptFigures
from janitor.state.records import Note
from tms_core.tables.base import ALL_KEYS, KeyRange, Reads
from tms_core.transaction.model import TX_PER_MS


@dataclass(frozen=True, slots=True, order=True)
class Limit:
    """Something that holds the boundary back.

    Attributes:
        bound: as far as it lets the boundary go.
        reason: a description for operators.
        start: the first key of the interval it is about, as it is stored; None for a transaction.
        region: where the store keeps that key now; empty if there is one place, or it is unknown.
    """

    bound: int
    reason: str
    start: bytes | None = field(default=None, compare=False)
    region: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary and its limits.

    Attributes:
        bound: the claim; None when there is none.
        limits: its limits, tightest first.
        obstacles: why there is no claim; empty when there is one.
    """

    bound: int | None
    limits: tuple[Limit, ...] = ()
    obstacles: tuple[str, ...] = ()

    @classmethod
    def none(cls, *obstacles: str) -> Boundary:
        return cls(None, obstacles=obstacles)


def claim(evidence: Sequence[Evidence], open_pointers: Iterable[int], lifetime: Lifetime) -> Boundary:
    """Return the prune boundary that the evidence proves.

    Args:
        evidence: intervals left clean.
        open_pointers: invalid ids whose clients may still have published.
        lifetime: how long transactions may write, and how late.
    """
    gap = find_gap(evidence)
    if gap is not None:
        return Boundary.none(gap)
    of_snapshots: dict[int, int] = {}
    for item in evidence:
        of_snapshots[item.snapshot_timestamp_ms] = max(item.bound, of_snapshots.get(item.snapshot_timestamp_ms, 0))
    limits = [
        limit
        for interval in _alike(evidence)
        for limit in _limits(interval, of_snapshots[interval.snapshot_timestamp_ms], lifetime)
    ]
    lowest_open = min(open_pointers, default=None)
    if lowest_open is not None:
        limits.append(Limit(lowest_open - 1, f"invalid transaction {lowest_open} may still have been written to"))
    limits.sort()
    bound = limits[0].bound
    if bound <= 0:
        return Boundary(None, tuple(limits), (f"nothing can be claimed: {limits[0].reason}",))
    return Boundary(bound, tuple(limits))


def newest_settled(started_ms: int, lifetime: Lifetime) -> int:
    """Return the newest pointer under which nothing could be published any more when a pass started."""
    late_ms = max(lifetime.grace_ms, lifetime.allowance_ms)
    return (started_ms - lifetime.max_ms - late_ms) * TX_PER_MS - 1


def in_force(claim: Claim, evidence: Iterable[Evidence], now_ms: int, lifetime: Lifetime) -> bool:
    """Return whether a claim still stands: not made by a clock set back since, nor with a lifetime raised since.

    Args:
        evidence: what there is now; a round of passes ends later than its claim is dated.
    """
    is_past = all(began_ms <= now_ms for began_ms in (claim.made_ms, *(item.started_ms for item in evidence)))
    return is_past and claim.bound <= newest_settled(claim.made_ms, lifetime)


def covered_since_ms(evidence: Sequence[Evidence]) -> int | None:
    """Return when the oldest pass started that the evidence rests on: all keys were covered since; None where some were
    not.
    """
    return None if find_gap(evidence) is not None else min(interval.started_ms for interval in evidence)


def with_newer(known: Iterable[Evidence], newer: Sequence[Evidence]) -> list[Evidence]:
    """Return the evidence there is once other intervals were covered, too: for each key only the newer counts."""
    covered = [_interval(item) for item in newer]
    rest = [
        replace(item, start=left.start, stop=left.stop)
        for item in known
        for left in remainder(_interval(item), covered)
    ]
    return sorted([*rest, *newer], key=lambda item: item.start)


def find_gap(evidence: Iterable[Evidence]) -> str | None:
    """Return where the intervals leave keys uncovered, in words; None when they cover everything."""
    intervals = [_interval(item) for item in evidence]
    if not intervals:
        return "no complete pass has covered the message table yet"
    gaps = remainder(ALL_KEYS, intervals)
    if not gaps:
        return None
    start, stop = gaps[0]
    if stop is None:
        return f"no pass has covered the keys from {start.hex()} on"
    return f"no pass has covered the keys {_between(start, stop)}"


def _alike(evidence: Iterable[Evidence]) -> list[Evidence]:
    """Return the intervals, with neighbours put together of which the same can be said."""
    found: list[Evidence] = []
    for item in sorted(evidence, key=lambda item: item.start):
        if found and item == replace(found[-1], start=item.start, stop=item.stop) and item.start == found[-1].stop:
            found[-1] = replace(found[-1], stop=item.stop)
        else:
            found.append(item)
    return found


def _limits(interval: Evidence, of_snapshot: int, lifetime: Lifetime) -> list[Limit]:
    """Return how far one interval allows the boundary; ``of_snapshot`` is its snapshot's own where no row had to
    stay.
    """
    between = _between(interval.start, interval.stop)
    snapshot = f"snapshot {interval.snapshot_timestamp_ms}, used {between}"
    if interval.bound < of_snapshot:
        snapshot = f"invalid transaction {interval.bound + 1} has a row that had to stay, {between}"
    writing = f"younger transactions could still write when the pass {between} began"
    return [
        Limit(interval.bound, snapshot, interval.start),
        Limit(newest_settled(interval.started_ms, lifetime), writing, interval.start),
    ]


def _between(start: bytes, stop: bytes | None) -> str:
    """Return an interval of keys, in words; where it is the keys of one salt, with the salt."""
    first, last = start.hex() or "the beginning", "the end" if stop is None else stop.hex()
    is_salt = len(start) == 1 and stop == (bytes([start[0] + 1]) if start < b"\xff" else None)
    return f"from {first} to {last}" + (f" (salt {start[0]})" if is_salt else "")


def _interval(item: Evidence) -> KeyRange:
    return KeyRange(item.start, item.stop)


# -- rounds of full passes ---------------------------------------------------------------------------------------------


#: The note that asks the next run to read everything: since when it is there, in ms.
WANTED = Note.WANTED
#: A round that has not ended so long after it began begins anew; one run every night may need several nights.
ROUND_MS = 7 * 24 * 3600 * 1000


class Round(NamedTuple):
    """A round as one run goes on with it.

    Attributes:
        began_ms: when its first run started.
        done: what earlier runs have covered.
        since_ms: from which publish time on that is searched all the same; None: not at all.
        payloads_from: in a store in one piece, the first topic whose payloads no earlier run has gone through.
    """

    began_ms: int
    done: tuple[KeyRange, ...] = ()
    since_ms: int | None = None
    payloads_from: bytes = b""

    def has_done(self, part: Reads) -> bool:
        """Return whether an earlier run has covered this part."""
        return not remainder(part.span, self.done)

    def first_undone(self, part: Reads) -> bytes:
        """Return the first key of a part that no earlier run has covered, where these have covered all before it."""
        left = remainder(part.span, self.done)
        return left[0].start if len(left) == 1 and left[0].stop == part.span.stop else part.span.start


@dataclass(frozen=True, slots=True)
class StartedRound:
    """The round under way, as the state remembers it.

    Attributes:
        runs: the runs that have covered something in it.
        payloads: the first topic whose payloads were not gone through, in hex.
    """

    began_ms: int
    runs: list[str]
    payloads: str = ""


ROUND: KeptFigures[StartedRound | None] = KeptFigures(Note.ROUND, StartedRound, None)


def gaps(parts: Sequence[Reads]) -> list[KeyRange]:
    """Where no part has keys there is nothing to search: what may still be put there is of younger transactions."""
    return remainder(ALL_KEYS, [part.span for part in parts])


def is_whole(parts: Sequence[Reads]) -> bool:
    """Return whether a store is in one piece."""
    return [part.span for part in parts] == [ALL_KEYS]


def continue_round(state: State, run_id: str, now_ms: int, snapshot_ms: int) -> Round:
    """Begin a round, or go on with the one that is under way.

    Only evidence of runs of the same round counts, and none that rests on a snapshot newer than this run's. Its
    ``since_ms`` is when the first of the runs started that have covered something; None: nothing is done.

    Args:
        run_id: the run that does, which is remembered as one of the round's.
        now_ms: when it began.
        snapshot_ms: its snapshot's timestamp.

    Raises:
        StateError: the state could not be read or written.
    """
    started = ROUND.read(state)
    if started is None or not 0 <= now_ms - started.began_ms < ROUND_MS:
        ROUND.save(state, StartedRound(now_ms, [run_id]))
        return Round(now_ms)
    known = [item for item in state.evidence() if item.run_id in started.runs]
    runs = sorted({item.run_id for item in known})
    ROUND.save(state, replace(started, runs=[*runs, run_id]))
    counting = [item for item in known if item.started_ms <= now_ms and item.snapshot_timestamp_ms <= snapshot_ms]
    done = tuple(KeyRange(item.start, item.stop) for item in counting)
    since_ms = min((item.started_ms for item in counting), default=None)
    return Round(started.began_ms, done, since_ms, bytes.fromhex(started.payloads))


def save_payloads(state: State, run_id: str, upto: bytes) -> None:
    """Remember up to which key the payloads of a store in one piece were gone through in this round.

    Raises:
        StateError: the state could not be read or written.
    """
    with state.transaction():
        started = ROUND.read(state)
        if started is not None and run_id in started.runs:
            ROUND.save(state, replace(started, payloads=upto.hex()))


def end_round(state: State) -> None:
    """Forget the round: it is complete, or what was done in it counts no more."""
    ROUND.save(state, None)


@dataclass(frozen=True, slots=True)
class Refutation:
    """How a claim turned out to be false.

    Attributes:
        message: the findings, as a clause.
        at_ms: when.
        searched: whether a pass that started later has read everything.
    """

    message: str
    at_ms: int
    searched: bool = False


#: How the last claim was refuted, until another one is made.
REFUTED: KeptFigures[Refutation | None] = KeptFigures(Note.REFUTED, Refutation, None)


def refutation(state: State) -> Refutation | None:
    """Return how the last claim was refuted; None once another one was made, or when none ever was.

    Raises:
        StateError: the state could not be read.
    """
    return REFUTED.read(state)


def refute(state: State, message: str, at_ms: int) -> None:
    """Withdraw the claim and all that it rests on, so that the next run reads everything (rule S4).

    A run under way claims nothing any more: its earlier coverage may be wrong.

    Args:
        message: the findings, as a clause.
        at_ms: what time it is.

    Raises:
        StateError: the state could not be written.
    """
    with state.transaction():
        state.save_claim(None)
        state.replace_evidence([])
        REFUTED.save(state, Refutation(message, at_ms))
        end_round(state)


def save_searched(state: State, known: Refutation | None) -> None:
    """Remember that a pass that started with a claim refuted has read everything."""
    if known is not None:
        REFUTED.save(state, replace(known, searched=True))
