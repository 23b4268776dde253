"""Decisions that are carried out once for each text.

In a cluster, decisions are in files, and every upgrade would carry them out again. A second adoption would accept a
store that was swapped in between. Therefore the state keeps the texts, in the transaction that carries the decision
out: a process that dies leaves both, or neither.
"""

from __future__ import annotations

from janitor.state.base import State
from janitor.state.records import Note

#: The note with the texts, by verb; it also stays when the knowledge about a store is deleted.
NOTE = Note.DECISIONS
#: The most texts kept for a verb; files do not contain more.
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
    """Save that a decision was carried out; call it in the transaction that carries it out.

    Raises:
        StateError: the state could not be written.
    """
    known = state.note(NOTE, dict[str, list[str]]) or {}
    state.save_note(NOTE, {**known, verb: [*known.get(verb, []), text][-REMEMBERED:]})
