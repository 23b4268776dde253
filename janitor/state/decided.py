"""Decisions that are carried out once for each text.

In a cluster, decisions are in files, and every upgrade would carry them out again. A second adoption would accept a
store that was swapped in between. Therefore the state keeps the texts, in the transaction that carries the decision
out: a process that dies leaves both, or neither.
"""

from __future__ import annotations

from janitor.state.base import State
from janitor.state.records import Note

#: Under this name the state keeps the texts, by verb; also when all that was learnt of a store is forgotten.
NOTE = Note.DECISIONS
#: How many are remembered of a verb; files do not hold more.
REMEMBERED = 1_000


def approval(patterns: tuple[str, ...], *, clock: bool) -> str:
    """Return the verb under which an approval is remembered: its releases are part of it."""
    return " ".join(("approve", *patterns, *(["--clock"] if clock else [])))


def was_done(state: State, verb: str, text: str) -> bool:
    """Return whether this was carried out before.

    Raises:
        StateError: the state could not be read.
    """
    return text in (state.note(NOTE, dict[str, list[str]]) or {}).get(verb, [])


def note_done(state: State, verb: str, text: str) -> None:
    """Remember that it was carried out; call it in the transaction that does so.

    Raises:
        StateError: the state could not be written.
    """
    known = state.note(NOTE, dict[str, list[str]]) or {}
    state.save_note(NOTE, {**known, verb: [*known.get(verb, []), text][-REMEMBERED:]})
