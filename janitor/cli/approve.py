"""``janitor approve``: let a held frontier go."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.context import session
from janitor.cli.once import is_done, once_for_option, remember
from janitor.cli.options import PatternType, common_options


@click.command("approve")
@click.argument("topic", type=PatternType(), required=False)
@once_for_option
@common_options
def command(topic: str | None, once_for: str | None) -> None:
    """Let go what is held.

    Of one topic (or pattern), or all of it and the clock with it. A frontier is held when a ttl
    was shortened, a topic deleted or created again, or a store restored. The next run then deletes
    what janitor plan shows as held.

    \b
    Examples:
      janitor approve default:orders --config janitor.yaml
      janitor approve --config janitor.yaml
    """
    current = session()
    verb = f"approve {topic or ''}".strip()
    if is_done(current, verb, once_for):
        return
    with current.reading() as engine:
        topics = engine.approve((topic,) if topic else ())
    remember(current, verb, once_for)
    if current.as_json:
        render.print_json({"approved": [str(name) for name in topics]})
    elif topics:
        names = "\n".join(f"  {name}" for name in topics)
        render.console().print(f"approved:\n{names}\nnext: janitor run --once {current.arguments()}")
    else:
        render.console().print("nothing is held" + (f" of {topic}" if topic else "; the clock is accepted"))
