"""The option ``--once-for``: what a person decided, carried out once (``janitor.state.decided``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from janitor.state.decided import was_done

if TYPE_CHECKING:
    from janitor.app.session import Session

_F = TypeVar("_F", bound=Callable[..., object])


def once_for_option(command: _F) -> _F:
    """The option ``--once-for``."""
    text = "Do this once for each TEXT, such as a date; what was done for it is remembered."
    return click.option("--once-for", metavar="TEXT", help=text)(command)


def is_done(current: Session, verb: str, text: str | None) -> bool:
    """Whether this was decided and done before; says so."""
    if text is None or not current.place.has_state():
        return False
    with current.place.state() as state:
        done = was_done(state, verb, text)
    if done:
        click.echo(f"{verb} was done for {text} before; nothing is done now", err=True)
    return done
