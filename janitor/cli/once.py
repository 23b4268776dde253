"""What a person decided, carried out once.

In a cluster decisions are written down in files, and whatever carries them out does so with every upgrade. Adopting a
store a second time would accept one that was swapped meanwhile, so the memory knows by their texts which decisions have
been carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from janitor.cli.context import Session

#: Under this name the memory keeps the texts, by verb.
NOTE = "decided"
#: How many are remembered of a verb; files do not hold more.
REMEMBERED = 1_000

_F = TypeVar("_F", bound=Callable[..., object])


def once_for_option(command: _F) -> _F:
    """The option ``--once-for``."""
    text = "Do this once for each TEXT, such as a date; what was done for it is remembered."
    return click.option("--once-for", metavar="TEXT", help=text)(command)


def is_done(current: Session, verb: str, text: str | None) -> bool:
    """Whether this was decided and done before; says so."""
    if text is None or not current.place.has_memory():
        return False
    with current.place.memory() as state:
        done = text in (state.note(NOTE) or {}).get(verb, [])
    if done:
        click.echo(f"{verb} was done for {text} before; nothing is done now", err=True)
    return done


def remember(current: Session, verb: str, text: str | None) -> None:
    """Write down that it is done."""
    if text is None:
        return
    with current.place.memory() as state, state.transaction():
        known = state.note(NOTE) or {}
        state.save_note(NOTE, {**known, verb: [*known.get(verb, []), text][-REMEMBERED:]})
