"""A thorough pass that takes more than one run.

To prove that a large table is clean takes hours, and a process may die in that time, or one salt of many may fail. So
each part of a store is evidence by itself as soon as it was covered (rule S4), and a *round* is over when every part
was. A run that goes on with a round searches the parts that are done only for what a frequent run does too.

A store in one piece is proven clean by one run or not at all: it is small, and its files are easily put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from janitor.intervals import EVERYTHING, Interval, remainder
from janitor.state.base import State
from tms_core.tables.base import Store

#: The note that says when the round began that is under way, and which runs have covered something in it.
ROUND = "round"
#: One begins this long after the last one began, and one that has not ended by then begins anew.
ROUND_MS = 24 * 3600 * 1000


#: Told of intervals that were covered, and of the lowest invalid pointer there that has to stay; None: none was met.
Record = Callable[[Sequence[Interval], int | None], None]


@dataclass(frozen=True, slots=True)
class Round:
    """A round as one run goes on with it.

    Attributes:
        began_ms: when its first run began.
        record: called by the thread that began the walk, while others may still be walking.
        done: what earlier runs have covered.
        since_ms: from which publish time on that is searched all the same; None: not at all.
    """

    began_ms: int
    record: Record
    done: tuple[Interval, ...] = ()
    since_ms: int | None = None

    def has_done(self, part: Store) -> bool:
        """Whether an earlier run has covered this part."""
        return not remainder(Interval(*part.span), self.done)

    def record_gaps(self, parts: Sequence[Store]) -> None:
        """Where no part has keys there is nothing to search: what may still be put there is of younger transactions."""
        gaps = remainder(EVERYTHING, [Interval(*part.span) for part in parts])
        if gaps:
            self.record(gaps, None)


def is_whole(parts: Sequence[Store]) -> bool:
    """Whether a store is in one piece."""
    return [part.span for part in parts] == [EVERYTHING]


class Progress(NamedTuple):
    """How far a round has come.

    Attributes:
        began_ms: when its first run began.
        done: what its former runs have covered.
        since_ms: when the first of those began that are behind ``done``; None: nothing is done.
    """

    began_ms: int
    done: tuple[Interval, ...] = ()
    since_ms: int | None = None


def go_on(state: State, run_id: str, now_ms: int, snapshot_ms: int) -> Progress:
    """Begin a round, or go on with the one that is under way.

    Only evidence of runs of the same round counts, and none that rests on a snapshot newer than this run's.

    Args:
        run_id: the run that does, which is remembered as one of the round's.
        now_ms: when it began.
        snapshot_ms: its snapshot's timestamp.

    Raises:
        StoreError: the state could not be read or written.
    """
    note = state.note(ROUND)
    if note is None or not 0 <= now_ms - note["began_ms"] < ROUND_MS:
        state.save_note(ROUND, {"began_ms": now_ms, "runs": [run_id]})
        return Progress(now_ms)
    known = [item for item in state.evidence() if item.run_id in note["runs"]]
    runs = sorted({item.run_id for item in known})
    state.save_note(ROUND, {"began_ms": note["began_ms"], "runs": [*runs, run_id]})
    counting = [item for item in known if item.started_ms <= now_ms and item.snapshot_timestamp_ms <= snapshot_ms]
    done = tuple(Interval(item.start, item.stop) for item in counting)
    return Progress(note["began_ms"], done, min((item.started_ms for item in counting), default=None))


def end(state: State) -> None:
    """Forget the round: it is complete, or what was done in it counts no more."""
    state.save_note(ROUND, None)
