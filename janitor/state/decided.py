"""Decisions of operators that are carried out once for each text.

In a cluster, decisions are in files, and every upgrade would repeat them. A second adoption would accept a store that
was replaced in between. Therefore the state saves the text in the transaction that carries out the decision.
"""

from __future__ import annotations

from janitor.state.base import State
from janitor.state.records import Note

#: The note with the texts, by verb; it stays when the data about a store is deleted.
NOTE = Note.DECISIONS
#: The maximum number of texts for a verb; files do not contain more.
REMEMBERED = 1_000


def approval(patterns: tuple[str, ...], *, clock: bool) -> str:
    """Return the verb of an approval, which includes its arguments."""
    return " ".join(("approve", *patterns, *(["--clock"] if clock else [])))


def was_done(state: State, verb: str, text: str) -> bool:
    """Return whether a decision was carried out before.

    Raises:
        StateError: the state could not be read.
    """
    return text in (state.note(NOTE, dict[str, list[str]]) or {}).get(verb, [])


def note_done(state: State, verb: str, text: str) -> None:
    """Save that a decision was carried out; call this in the transaction that carries it out.

    Raises:
        StateError: the state could not be written.
    """
    known = state.note(NOTE, dict[str, list[str]]) or {}
    state.save_note(NOTE, {**known, verb: [*known.get(verb, []), text][-REMEMBERED:]})
