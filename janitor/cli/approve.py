"""``janitor approve``: release held topics, or accept the machine's clock.

The option ``--once-for`` carries out a decision once (``janitor.state.decided``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from janitor.cli import render
from janitor.cli.options import PatternType, common_options, session
from janitor.cli.outcome import command_line, next_pass
from janitor.cli.state import complete_topics
from janitor.state.base import EVERYTHING
from janitor.state.decided import approval, was_done
from tms_core.cli.help import Command
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from janitor.app.session import Session

_F = TypeVar("_F", bound=Callable[..., object])


def once_for_option(command: _F) -> _F:
    """Return the option ``--once-for``."""
    text = "Run only once for each TEXT, for example a date; the state stores it."
    return click.option("--once-for", metavar="TEXT", help=text)(command)


def is_done(current: Session, verb: str, text: str | None) -> bool:
    """Return whether this decision was carried out before; print a message if it was."""
    if text is None or not current.place.has_state():
        return False
    with current.place.state() as state:
        done = was_done(state, verb, text)
    if done:
        click.echo(f"{verb} was already done for {text}; nothing to do", err=True)
    return done


@click.command("approve", cls=Command)
@click.argument("topic", type=PatternType(), metavar="[NS:PATTERN]", required=False, shell_complete=complete_topics)
@click.option("--all", "everything", is_flag=True, help="Release all held topics.")
@click.option("--clock", is_flag=True, help="Accept this machine's clock; releases no topic.")
@once_for_option
@common_options
def command(topic: str | None, everything: bool, clock: bool, once_for: str | None) -> None:
    """Release held topics, or accept the machine's clock.

    Name one topic or pattern, or use --all. A topic is held after its ttl was shortened, after it
    was deleted or created again, and after the store was restored. The next run deletes the rows
    that the plan shows as held. --clock is a separate decision.

    \b
    Examples:
      janitor approve default:orders --config janitor.yaml
      janitor approve --all --config janitor.yaml
      janitor approve --clock --config janitor.yaml
    """
    if topic is None and not everything and not clock:
        raise click.UsageError(
            "missing topic: give a topic as in default:orders, --all for all held topics, or --clock if this machine's "
            "clock is right"
        )
    if topic is not None and everything:
        raise click.UsageError("a topic and --all cannot be combined: use one of them")
    current = session()
    patterns = (EVERYTHING,) if everything else (topic,) if topic else ()
    if is_done(current, approval(patterns, clock=clock), once_for):
        return
    with current.reading() as engine:
        topics = engine.approve(patterns, clock=clock, once_for=once_for)
    if current.as_json:
        render.print_json({"approved": [str(name) for name in topics], "clock": clock})
        return
    out = render.console()
    for line in _lines(topics, topic, named=bool(patterns), clock=clock):
        out.print(line)
    if topics:
        render.print_next(next_pass(current))
    elif clock:
        render.print_next(command_line(current, "plan"))


def _lines(topics: list[TopicId], topic: str | None, *, named: bool, clock: bool) -> Iterator[str]:
    """Yield the approvals as text."""
    if clock:
        yield "the clock is accepted"
    if topics:
        yield "approved:"
        yield from (f"  {name}" for name in topics)
    elif named:
        yield f"no rows of {topic} are held" if topic else "no rows are held"
