"""``janitor pause``: a pause of deletions and inversions, effective from the next batch."""

from __future__ import annotations

import shlex

import click

from janitor.cli import render
from janitor.cli.options import PatternType, common_options, session
from janitor.cli.outcome import command_line
from janitor.cli.state import complete_topics
from janitor.state.base import EVERYTHING, Pause
from tms_core.cli.help import Command


@click.command("pause", cls=Command)
@click.argument("topic", type=PatternType(), metavar="[NS:PATTERN]", required=False, shell_complete=complete_topics)
@common_options
def command(topic: str | None) -> None:
    """Pause deletions and inversions in topics.

    Without a pattern, the command pauses all topics. A current run stops before its next batch, and later
    runs skip the topics until janitor resume. The command works while another process holds the store.

    \b
    Examples:
      janitor pause default:orders --config janitor.yaml
      janitor pause --config janitor.yaml
    """
    current = session()
    pattern = topic or EVERYTHING
    current.place.require()  # without a store, create no state
    with current.place.state() as state:
        state.pause(pattern, current.clock.now_ms())
        pauses, known = state.pauses(), state.frontiers()
    current.refresh_status()
    if known and not any(name.matches((pattern,)) for name in known):
        click.echo(f"warning: the janitor has not seen a topic named {pattern}; the pause applies anyway", err=True)
    if current.as_json:
        render.print_json({"paused": pauses})
        return
    argument = "" if pattern == EVERYTHING else f" {shlex.quote(pattern)}"
    out = render.console()
    out.print(f"paused: {names(pauses)}; a run in progress stops there before its next batch")
    out.print(f"next: {command_line(current, f'resume{argument}')}")


def names(pauses: list[Pause]) -> str:
    """Return the paused patterns as text."""
    return ", ".join("everything" if pause.pattern == EVERYTHING else pause.pattern for pause in pauses)
