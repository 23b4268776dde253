"""Shrink a failing history and format it.

Delta debugging: remove a half, a quarter, an eighth, down to single operations, as long as the same invariant fails,
and repeat until nothing can be removed. An operation without its object does nothing, so every part of a history can be
played.
"""

from __future__ import annotations

from dataclasses import fields, replace

from tests.simulation.history import History, HistoryFailed, play, play_seed
from tests.simulation.operations import Operation


def find_failure(seed: int) -> HistoryFailed | None:
    """Play the random history of a seed; return its failure or None."""
    try:
        play_seed(seed)
    except HistoryFailed as failed:
        return failed
    return None


def replay_failure(history: History, like: HistoryFailed) -> HistoryFailed | None:
    """Return the failure if the history breaks the same invariant in the same phase as ``like``, else None."""
    try:
        play(history, orderly_end=like.at_end)
    except HistoryFailed as failed:
        return failed if failed.violation.invariant == like.violation.invariant else None
    return None


def shrink(failed: HistoryFailed) -> HistoryFailed:
    """Return the failure with a minimal history."""
    best = replay_failure(failed.history, failed) or failed
    while True:
        before = tuple(best.history)
        best = _reset_parameters(_remove_operations(best))
        if tuple(best.history) == before:
            return best


def _remove_operations(best: HistoryFailed) -> HistoryFailed:
    size = len(best.history) // 2
    while size:
        start = 0
        while start < len(best.history):
            rest = [*best.history[:start], *best.history[start + size :]]
            shorter = replay_failure(rest, best)
            if shorter is None:
                start += size
            else:
                best = shorter
        size //= 2
    return best


def _reset_parameters(best: HistoryFailed) -> HistoryFailed:
    """Set each parameter that the failure does not need to its default."""
    for place, operation in enumerate(best.history):
        for item in fields(operation):
            current = best.history[place] if place < len(best.history) else None
            plainer = _with_default(current, item.name, item.default)
            if plainer is not None:
                history = [*best.history[:place], plainer, *best.history[place + 1 :]]
                best = replay_failure(history, best) or best
    return best


def _with_default(operation: Operation | None, name: str, default: object) -> Operation | None:
    if operation is None or not hasattr(operation, name) or type(default) is not type(getattr(operation, name)):
        return None
    return None if getattr(operation, name) == default else replace(operation, **{name: default})


def format_failure(failed: HistoryFailed) -> str:
    """Format the history to be pasted into ``play([...])``."""
    steps = "".join(f"    {operation!r},\n" for operation in failed.history)
    return f"{failed.violation}\nafter {len(failed.history)} operations:\n[\n{steps}]"
