"""The prune boundary: the highest transaction up to which no row has a positive pointer of an invalid transaction (rule
S4).

Invalid ids are part of every transaction, so operators want to remove them. An id may be removed when its rows cannot
become visible; the boundary proves that. A wrong boundary shows aborted data to every reader. Therefore it follows only
from evidence: intervals of keys that a pass covered without an error, under a snapshot taken before the pass started,
and with durable inversions. If they cover the whole message table, the boundary is the minimum of

* the bound of each interval's snapshot (Tephra's TxUtils.getPruneUpperBound),
* for each interval, the oldest transaction that could still have written when its pass started, and
* the lowest open id: its client may have published since.

Intervals are ranges of stored keys, which start with the salt if the store has salts. No other division of a table is
permanent: regions are split, merged and moved.

A pass over a large table takes hours. In that time a process may die, or one of many salts may fail. Therefore each
part of a store is evidence as soon as a pass has covered it (invariant S4), and a *round* is complete when every part
was covered. A run that continues a round searches covered parts only as a frequent run does.

A store of one part is covered from its first key to its last, and runs save their progress regularly. So a run that is
killed at the same time every night gets further every night.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from janitor.rules.ranges import Lifetime, remainder
from janitor.state.base import Evidence, ProvenBoundary, State
from janitor.state.figures import KeptFigures
from janitor.state.records import Note
from tms_core.tables.base import ALL_KEYS, KeyRange, Reads
from tms_core.transaction.model import TX_PER_MS


@dataclass(frozen=True, slots=True, order=True)
class Limit:
    """A limit of the boundary.

    Attributes:
        bound: the highest boundary that it allows.
        reason: a description for operators.
        start: the first stored key of its interval; None if the limit is a transaction.
        region: the present region of that key; empty if unknown, or if the store has no regions.
    """

    bound: int
    reason: str
    start: bytes | None = field(default=None, compare=False)
    region: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary and its limits.

    Attributes:
        bound: the boundary; None if nothing is proven.
        limits: its limits, lowest first.
        obstacles: the reasons why there is no boundary; otherwise empty.
    """

    bound: int | None
    limits: tuple[Limit, ...] = ()
    obstacles: tuple[str, ...] = ()

    @classmethod
    def none(cls, *obstacles: str) -> Boundary:
        return cls(None, obstacles=obstacles)


def prove(evidence: Sequence[Evidence], open_pointers: Iterable[int], lifetime: Lifetime) -> Boundary:
    """Return the prune boundary that the evidence proves.

    Args:
        open_pointers: invalid ids whose clients may still have published.
    """
    gap = find_gap(evidence)
    if gap is not None:
        return Boundary.none(gap)
    of_snapshots: dict[int, int] = {}
    for item in evidence:
        of_snapshots[item.snapshot_timestamp_ms] = max(item.bound, of_snapshots.get(item.snapshot_timestamp_ms, 0))
    limits = [
        limit
        for interval in _merge_adjacent(evidence)
        for limit in _limits(interval, of_snapshots[interval.snapshot_timestamp_ms], lifetime)
    ]
    lowest_open = min(open_pointers, default=None)
    if lowest_open is not None:
        writing = f"the client of invalid transaction {lowest_open} may still write"
        limits.append(Limit(lowest_open - 1, f"{writing}; a full pass after its lifetime raises the boundary"))
    limits.sort()
    bound = limits[0].bound
    if bound <= 0:
        return Boundary(None, tuple(limits), (f"no boundary can be proven: {limits[0].reason}",))
    return Boundary(bound, tuple(limits))


def newest_settled(started_ms: int, lifetime: Lifetime) -> int:
    """Return the newest pointer whose transaction could no longer publish when a pass started."""
    late_ms = max(lifetime.grace_ms, lifetime.allowance_ms)
    return (started_ms - lifetime.max_ms - late_ms) * TX_PER_MS - 1


def in_force(proven: ProvenBoundary, evidence: Iterable[Evidence], now_ms: int, lifetime: Lifetime) -> bool:
    """Return whether a proven boundary is in force: its times are not in the future, and the lifetime was not raised.

    Args:
        evidence: the present evidence; it may be newer than the date of the boundary.
    """
    is_past = all(began_ms <= now_ms for began_ms in (proven.made_ms, *(item.started_ms for item in evidence)))
    return is_past and proven.bound <= newest_settled(proven.made_ms, lifetime)


def covered_since_ms(evidence: Sequence[Evidence]) -> int | None:
    """Return the start of the oldest pass in the evidence; None if some keys were not covered."""
    return None if find_gap(evidence) is not None else min(interval.started_ms for interval in evidence)


def with_newer(known: Iterable[Evidence], newer: Sequence[Evidence]) -> list[Evidence]:
    """Merge newer evidence into the known evidence; only the newest interval counts for each key."""
    covered = [_interval(item) for item in newer]
    uncovered = [
        replace(item, start=rest.start, stop=rest.stop)
        for item in known
        for rest in remainder(_interval(item), covered)
    ]
    return sorted([*uncovered, *newer], key=lambda item: item.start)


def find_gap(evidence: Iterable[Evidence]) -> str | None:
    """Return a description of the first uncovered keys; None if all keys are covered."""
    intervals = [_interval(item) for item in evidence]
    if not intervals:
        return "no complete pass has covered the message table yet"
    gaps = remainder(ALL_KEYS, intervals)
    if not gaps:
        return None
    start, stop = gaps[0]
    if stop is None:
        return f"no pass has covered the keys from {start.hex()} on"
    return f"no pass has covered the {_between(start, stop)}"


def _merge_adjacent(evidence: Iterable[Evidence]) -> list[Evidence]:
    """Return the intervals, with adjacent intervals of equal facts merged."""
    found: list[Evidence] = []
    for item in sorted(evidence, key=lambda item: item.start):
        if found and item == replace(found[-1], start=item.start, stop=item.stop) and item.start == found[-1].stop:
            found[-1] = replace(found[-1], stop=item.stop)
        else:
            found.append(item)
    return found


def _limits(interval: Evidence, of_snapshot: int, lifetime: Lifetime) -> list[Limit]:
    """Return the limits of one interval.

    Args:
        of_snapshot: the bound of its snapshot, before it was lowered for pointers that could not be negated.
    """
    between = _between(interval.start, interval.stop)
    raised = "; the next full pass raises the boundary"
    used = f"snapshot {interval.snapshot_timestamp_ms}, used for {between}"
    snapshot = f"{used}, does not show the end of later transactions{raised}"
    if interval.bound < of_snapshot:
        snapshot = f"invalid transaction {interval.bound + 1} has a row that could not be inverted, in {between}"
    writing = f"younger transactions could still write when the pass over {between} started{raised}"
    return [
        Limit(interval.bound, snapshot, interval.start),
        Limit(newest_settled(interval.started_ms, lifetime), writing, interval.start),
    ]


def _between(start: bytes, stop: bytes | None) -> str:
    """Return a description of an interval of keys, with the salt if it has exactly the keys of one salt."""
    if not start and stop is None:
        return "all keys"
    first, last = start.hex() or "the beginning", "the end" if stop is None else stop.hex()
    is_salt = len(start) == 1 and stop == (bytes([start[0] + 1]) if start < b"\xff" else None)
    return f"keys from {first} to {last}" + (f" (salt {start[0]})" if is_salt else "")


def _interval(item: Evidence) -> KeyRange:
    return KeyRange(item.start, item.stop)


# -- rounds of full passes ---------------------------------------------------------------------------------------------


#: The note that requests a full pass from the next run; its value is the time of the request in milliseconds.
FULL_REQUEST = Note.FULL_REQUEST
#: The time after which an incomplete round starts again; with one run a night, a round may need several nights.
ROUND_MS = 7 * 24 * 3600 * 1000


class Round(NamedTuple):
    """A round, as seen by the run that continues it.

    Attributes:
        began_ms: the start of its first run.
        done: the intervals that earlier runs have covered.
        since_ms: the first publish time that is still searched in these intervals; None: none is.
        payloads_from: in a store of one part, the first topic whose payloads no earlier run has read.
    """

    began_ms: int
    done: tuple[KeyRange, ...] = ()
    since_ms: int | None = None
    payloads_from: bytes = b""

    def has_done(self, part: Reads) -> bool:
        """Return whether an earlier run has covered this part."""
        return not remainder(part.span, self.done)

    def first_undone(self, part: Reads) -> bytes:
        """Return the key at which to start a part: after the keys that earlier runs covered, else its first key."""
        rest = remainder(part.span, self.done)
        return rest[0].start if len(rest) == 1 and rest[0].stop == part.span.stop else part.span.start


@dataclass(frozen=True, slots=True)
class StartedRound:
    """The current round, as the state stores it.

    Attributes:
        runs: the ids of the runs that belong to it.
        payloads: the first topic whose payloads were not read, in hex.
    """

    began_ms: int
    runs: list[str]
    payloads: str = ""


ROUND: KeptFigures[StartedRound | None] = KeptFigures(Note.ROUND, StartedRound, None)


def gaps(parts: Sequence[Reads]) -> list[KeyRange]:
    """Return the keys outside all parts, which need no search: later rows there belong to younger transactions."""
    return remainder(ALL_KEYS, [part.span for part in parts])


def is_whole(parts: Sequence[Reads]) -> bool:
    """Return whether the store has only one part."""
    return [part.span for part in parts] == [ALL_KEYS]


def continue_round(state: State, run_id: str, now_ms: int, snapshot_ms: int) -> Round:
    """Start a round, or continue the current round.

    Evidence counts only if it is of a run of the round, and if its snapshot is not newer than the snapshot of this run.
    ``since_ms`` of the result is the start of the first such run; None if nothing is covered.

    Args:
        run_id: this run, which is saved as part of the round.
        now_ms: the start of this run.
        snapshot_ms: the time of this run's snapshot.

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
    """Save the key up to which the payloads of a store of one part were read in this round.

    Raises:
        StateError: the state could not be read or written.
    """
    with state.transaction():
        started = ROUND.read(state)
        if started is not None and run_id in started.runs:
            ROUND.save(state, replace(started, payloads=upto.hex()))


def end_round(state: State) -> None:
    """Delete the round, because it is complete or its coverage no longer counts."""
    ROUND.save(state, None)


@dataclass(frozen=True, slots=True)
class Refutation:
    """The refutation of a proven boundary.

    Attributes:
        message: the finding, as a clause.
        searched: whether a later pass has read everything.
    """

    message: str
    at_ms: int
    searched: bool = False


#: The refutation of the last proven boundary, until another boundary is proven.
REFUTED: KeptFigures[Refutation | None] = KeptFigures(Note.REFUTED, Refutation, None)


def refutation(state: State) -> Refutation | None:
    """Return the refutation of the last boundary; None if it was not refuted, or another boundary was proven since.

    Raises:
        StateError: the state could not be read.
    """
    return REFUTED.read(state)


def refute(state: State, message: str, at_ms: int) -> None:
    """Withdraw the boundary and all its evidence, so that the next run reads everything (invariant S4).

    A running run then publishes no boundary, because its earlier coverage may be wrong.

    Args:
        message: the finding, as a clause.

    Raises:
        StateError: the state could not be written.
    """
    # One commit: evidence that survives the withdrawal would prove the same boundary again.
    with state.transaction():
        state.save_boundary(None)
        state.replace_evidence([])
        REFUTED.save(state, Refutation(message, at_ms))
        end_round(state)


def save_searched(state: State, known: Refutation | None) -> None:
    """Save that a pass has read everything since the refutation."""
    if known is not None:
        REFUTED.save(state, replace(known, searched=True))
