"""Making a failing history short, and showing it.

Delta debugging: leave out half of it, a quarter, an eighth, down to single operations, as long as the same invariant
still fails, and begin again until nothing can be left out. Operations that have lost what they worked on do nothing, so
every part of a history can be played.
"""

from __future__ import annotations

from dataclasses import fields, replace

from tests.simulation.history import Failed, History, play, play_seed
from tests.simulation.operations import Operation


def failure_of(seed: int) -> Failed | None:
    """How the random history of a seed fails; None when it does not."""
    try:
        play_seed(seed)
    except Failed as failed:
        return failed
    return None


def failure(history: History, like: Failed) -> Failed | None:
    """How a history fails the same invariant, at its end only where the other one did so; None when it does not."""
    try:
        play(history, orderly_end=like.at_end)
    except Failed as failed:
        return failed if failed.violation.invariant == like.violation.invariant else None
    return None


def shortest(failed: Failed) -> Failed:
    """The same failure with as little history as can be found."""
    best = failure(failed.history, failed) or failed
    while True:
        before = tuple(best.history)
        best = _simplified(_shortened(best))
        if tuple(best.history) == before:
            return best


def _shortened(best: Failed) -> Failed:
    size = len(best.history) // 2
    while size:
        start = 0
        while start < len(best.history):
            rest = [*best.history[:start], *best.history[start + size :]]
            shorter = failure(rest, best)
            if shorter is None:
                start += size
            else:
                best = shorter
        size //= 2
    return best


def _simplified(best: Failed) -> Failed:
    """With every parameter at its default that may be."""
    for place, operation in enumerate(best.history):
        for item in fields(operation):
            current = best.history[place] if place < len(best.history) else None
            plainer = _plainer(current, item.name, item.default)
            if plainer is not None:
                history = [*best.history[:place], plainer, *best.history[place + 1 :]]
                best = failure(history, best) or best
    return best


def _plainer(operation: Operation | None, name: str, default: object) -> Operation | None:
    if operation is None or not hasattr(operation, name) or type(default) is not type(getattr(operation, name)):
        return None
    return None if getattr(operation, name) == default else replace(operation, **{name: default})


def tell(failed: Failed) -> str:
    """The history as text that can be pasted into ``play([...])``."""
    steps = "".join(f"    {operation!r},\n" for operation in failed.history)
    return f"{failed.violation}\nafter {len(failed.history)} operations:\n[\n{steps}]"
