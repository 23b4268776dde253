"""Whether somebody has to do something, in one word and the reasons for it.

A person on call reads one line first. It is drawn from the picture here and not in the page, so that it is tested
like anything else and every reader of the API gets the same one. Each reason says what is wrong, not how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from janitor.picture import Picture
from janitor.state.base import EVERYTHING

#: How a run ended, in words, where it did not end as it should.
_BAD_ENDS = {"failed": "failed", "lost": "was lost: it stopped showing signs of life", "partial": "is only partly done"}

#: The guard that speaks of a store nobody has adopted, which is said once.
_ADOPTION = "adoption"

#: Nobody is alarmed before so many runs are missed, and for so long in any case; a large store takes its time.
MISSED_RUNS, PATIENCE_MS = 3, 3_600_000

#: How many patterns are named before they become too many for a line.
_NAMED = 3


class Reason(NamedTuple):
    """A sentence, and the part of the status page that says more; empty for none."""

    text: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a person on call needs to know first.

    Attributes:
        level: ``well``; ``attention``: the janitor works and somebody has to look at something; ``down``: it does not.
        reasons: the gravest first; never empty.
    """

    level: Literal["well", "attention", "down"]
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "reasons": [reason._asdict() for reason in self.reasons]}


def judge(picture: Picture, alive: str = "", ready: str = "") -> Verdict:
    """The verdict on a picture.

    Args:
        picture: what is seen.
        alive: why the janitor does not live; empty when it does.
        ready: why it is not ready; empty when it is.
    """
    down, attention = tuple(_down(picture, alive)), tuple(_attention(picture))
    if ready and not down and not attention:
        attention = (Reason(ready),)
    if down:
        return Verdict("down", down + attention)
    if attention:
        return Verdict("attention", attention)
    return Verdict("well", (Reason(_well(picture)),))


def _down(picture: Picture, alive: str) -> Iterator[Reason]:
    if alive:
        yield Reason(alive)
    if picture.process == "down":
        yield Reason("No janitor is running; these are the figures its memory holds.")


def _attention(picture: Picture) -> Iterator[Reason]:
    if picture.canary.early:
        gone = _plural(picture.canary.early, "canary message")
        yield Reason(f"{gone} went before it was due: live messages may have gone, too.", "canary")
    if picture.adopted_ms is None:
        yield Reason("Nobody has adopted this store; until then nothing is deleted.", "adopt")
    for guard in picture.guards:
        if guard.tripped and (guard.guard != _ADOPTION or picture.adopted_ms is not None):
            yield Reason(f"The {guard.guard} guard stopped the last run.", "guards")
    for job, error in picture.failing.items():
        yield Reason(f"The {job} job fails: {error.rstrip('.')}.", "run")
    yield from _no_run(picture)
    yield from _last_run(picture)
    yield from _topics("is quarantined", "aside", (entry.topic for entry in picture.quarantined))
    if picture.snapshot.problem not in ("", "not_configured"):
        problem = f"The transaction snapshot is unusable ({picture.snapshot.problem})"
        yield Reason(f"{problem}: nothing is inverted, no boundary claimed.", "snapshot")
    yield from _topics("is held", "held", (held.topic for held in picture.held if _waits(picture, held.reason)))
    yield from _paused(picture)


def _waits(picture: Picture, reason: str) -> bool:
    """Whether what is held waits for somebody to look at it; the other holds are wanted, or told of already."""
    return reason == "frontier" or (reason == "first_contact" and picture.adopted_ms is not None)


def _no_run(picture: Picture) -> Iterator[Reason]:
    """A daemon in which no run ends any more."""
    if picture.process != "running" or picture.every_seconds is None or not picture.leader:
        return
    last_ms = picture.last_run.finished_ms if picture.last_run else None
    silent_ms = picture.now_ms - max((ms for ms in (picture.started_ms, last_ms) if ms), default=picture.now_ms)
    if silent_ms > MISSED_RUNS * picture.every_seconds * 1000 + PATIENCE_MS:
        yield Reason(f"No run has ended for {silent_ms // 60_000} min.", "run")


def _last_run(picture: Picture) -> Iterator[Reason]:
    last = picture.last_run
    if last is not None and last.result in _BAD_ENDS:
        error = last.error or next(iter(last.errors), "")
        yield Reason(f"The last run {_BAD_ENDS[last.result]}" + (f": {error.rstrip('.')}." if error else "."), "run")


def _topics(state: str, about: str, names: Iterable[str]) -> Iterator[Reason]:
    found = sorted(set(names))
    if len(found) == 1:
        yield Reason(f"{found[0]} {state}.", about)
    elif found:
        yield Reason(f"{len(found):,} topics {state.replace('is ', 'are ')}.", about)


def _paused(picture: Picture) -> Iterator[Reason]:
    patterns = [pattern for pattern, _ in picture.paused]
    if EVERYTHING in patterns:
        yield Reason("Everything is paused.", "aside")
    elif patterns:
        more = " and more" if len(patterns) > _NAMED else ""
        yield Reason(f"Paused: {', '.join(patterns[:_NAMED])}{more}.", "aside")


def _well(picture: Picture) -> str:
    if picture.mode == "plan_only":
        return "It only plans: nothing is deleted."
    if picture.lease_holder and not picture.leader:
        return f"On standby: {picture.lease_holder} does the work."
    if picture.running is not None:
        return "A run is under way."
    if picture.last_run is None:
        return "It has not run yet."
    return "Nothing needs you."


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
