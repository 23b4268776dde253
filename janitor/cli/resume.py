"""``janitor resume``: the end of pauses and quarantines."""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase

import click

from janitor.cli import render
from janitor.cli.options import PatternType, common_options, session
from janitor.cli.outcome import command_line
from janitor.cli.pause import names
from janitor.cli.state import complete_topics, open_state
from janitor.state.base import EVERYTHING, Pause, State
from tms_core.cli.help import Command
from tms_core.cli.outcome import DONE, FAILED


@click.command("resume", cls=Command)
@click.argument("topic", type=PatternType(), metavar="[NS:PATTERN]", required=False, shell_complete=complete_topics)
@common_options
def command(topic: str | None) -> int:
    """Resume paused and quarantined topics.

    With a pattern, the command resumes all topics and paused patterns within it. Without a pattern,
    it resumes everything. The next run then cleans the topics. The exit code is 1 if a wider pattern
    still pauses a topic.

    \b
    Examples:
      janitor resume default:orders --config janitor.yaml
      janitor resume --config janitor.yaml
    """
    current = session()
    pattern = topic or EVERYTHING
    with open_state(current) as state:
        resumed, retried = _resume(state, pattern) if state else ([], [])
        pauses = state.pauses() if state else []
    current.refresh_status()
    wider_pauses = [pause for pause in pauses if _is_within(pattern, pause.pattern)]
    if current.as_json:
        render.print_json({"resumed": resumed, "retried": retried, "paused": pauses})
    else:
        _show(pattern, resumed, retried, pauses)
        for pause in wider_pauses:
            wider = "" if pause.pattern == EVERYTHING else f" {shlex.quote(pause.pattern)}"
            render.console().print(f"next: {command_line(current, f'resume{wider}')}")
    return FAILED if wider_pauses else DONE


def _resume(state: State, pattern: str) -> tuple[list[str], list[str]]:
    """Delete pauses within the pattern; return the deleted pauses, and the topics that the next run retries."""
    with state.transaction():
        resumed = [pause.pattern for pause in state.pauses() if _is_within(pause.pattern, pattern)]
        for paused_pattern in resumed:
            state.resume(paused_pattern)
        quarantined = [topic for topic, strikes in state.strikes().items() if strikes.quarantined_ms is not None]
        retried = [topic for topic in quarantined if topic.matches((pattern,))]
        state.save_strikes(dict.fromkeys(retried))
    return resumed, [str(topic) for topic in retried]


def _is_within(pattern: str, wider: str) -> bool:
    """Return whether one pattern equals the other or is clearly contained in it."""
    return pattern == wider or fnmatchcase(pattern, wider)


def _show(pattern: str, resumed: list[str], retried: list[str], pauses: list[Pause]) -> None:
    out = render.console()
    if resumed:
        out.print(f"resumed: {', '.join('everything' if name == EVERYTHING else name for name in resumed)}")
    if retried:
        out.print(f"retried by the next run: {', '.join(retried)}")
    if not resumed and not retried:
        out.print("nothing is paused" if not pauses else f"{pattern} was not paused under this name")
    if pauses:
        out.print(f"still paused: {names(pauses)}")
