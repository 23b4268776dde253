"""A full pass that takes more than one run.

To prove that a large table is clean takes hours, and a process may die in that time, or one salt of many may fail. So
each part of a store is evidence by itself as soon as it was covered (rule S4), and a *round* is over when every part
was. A run that goes on with a round searches the parts that are done only for what a frequent run does too.

A store in one piece is covered from its first key to its last, and what is covered is saved on the way: a run that is
killed at the same time every night gets further every night.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from janitor.rules.ranges import remainder
from janitor.state.base import State
from janitor.state.records import Note
from tms_core.tables.base import ALL_KEYS, KeyRange, Reads

#: The note that says when the round began that is under way, and which runs have covered something in it.
ROUND = Note.ROUND
#: The note that asks the next run to read everything: since when it is there, in ms.
WANTED = Note.WANTED
#: The note that says how the last claim was refuted, until another one is made.
REFUTED = Note.REFUTED
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


def gaps(parts: Sequence[Reads]) -> list[KeyRange]:
    """Where no part has keys there is nothing to search: what may still be put there is of younger transactions."""
    return remainder(ALL_KEYS, [part.span for part in parts])


def is_whole(parts: Sequence[Reads]) -> bool:
    """Return whether a store is in one piece."""
    return [part.span for part in parts] == [ALL_KEYS]


def go_on(state: State, run_id: str, now_ms: int, snapshot_ms: int) -> Round:
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
    note = state.note(ROUND)
    if note is None or not 0 <= now_ms - note["began_ms"] < ROUND_MS:
        state.save_note(ROUND, {"began_ms": now_ms, "runs": [run_id]})
        return Round(now_ms)
    known = [item for item in state.evidence() if item.run_id in note["runs"]]
    runs = sorted({item.run_id for item in known})
    state.save_note(ROUND, {**note, "runs": [*runs, run_id]})
    counting = [item for item in known if item.started_ms <= now_ms and item.snapshot_timestamp_ms <= snapshot_ms]
    done = tuple(KeyRange(item.start, item.stop) for item in counting)
    since_ms = min((item.started_ms for item in counting), default=None)
    return Round(note["began_ms"], done, since_ms, bytes.fromhex(note.get("payloads", "")))


def save_payloads(state: State, run_id: str, upto: bytes) -> None:
    """Remember up to which key the payloads of a store in one piece were gone through in this round.

    Raises:
        StateError: the state could not be read or written.
    """
    with state.transaction():
        note = state.note(ROUND)
        if note is not None and run_id in note["runs"]:
            state.save_note(ROUND, {**note, "payloads": upto.hex()})


def end(state: State) -> None:
    """Forget the round: it is complete, or what was done in it counts no more."""
    state.save_note(ROUND, None)


class Refutation(NamedTuple):
    """How a claim turned out to be false.

    Attributes:
        message: the findings, as a clause.
        at_ms: when.
        searched: whether a pass that started later has read everything.
    """

    message: str
    at_ms: int
    searched: bool = False


def refutation(state: State) -> Refutation | None:
    """Return how the last claim was refuted; None once another one was made, or when none ever was.

    Raises:
        StateError: the state could not be read.
    """
    found = state.note(REFUTED)
    return None if found is None else Refutation(**found)


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
        state.save_note(REFUTED, Refutation(message, at_ms)._asdict())
        end(state)


def searched(state: State, known: Refutation | None) -> None:
    """Remember that a pass that started with a claim refuted has read everything."""
    if known is not None:
        state.save_note(REFUTED, known._replace(searched=True)._asdict())
