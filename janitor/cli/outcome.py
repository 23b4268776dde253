"""The result of a command: the report of a run, the exit code, and the next command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from janitor.cli import render
from janitor.cli.options import PARTLY, REFUSED
from janitor.cli.state import open_state
from janitor.report import Report
from janitor.rules.policy import Hold
from janitor.state.base import EVERYTHING
from tms_core.cli.outcome import BUSY, DONE
from tms_core.errors import StoreBusy, TmsError
from tms_core.logs.printable import complete, complete_command, printable
from tms_core.tables.lease import LeaseRecord
from tms_core.topic import WILDCARDS

if TYPE_CHECKING:
    from janitor.app.session import Session
    from janitor.control.api import AnyEngine


def command_line(current: Session, words: str) -> str:
    """Return a command of the janitor with the options of the current command."""
    return complete_command(f"janitor {words}", current.arguments())


def next_pass(current: Session) -> str:
    """Return the next step to delete due rows: a run, or the next sweep of the daemon that holds the store."""
    if not _is_held(current):
        return command_line(current, "run --once")
    if current.place.exclusive:
        return f"{command_line(current, 'sweep-now')}\nor wait for the next sweep of the process that holds the store"
    return f"{command_line(current, 'status')}\nthe daemon that holds the store deletes these rows with its next sweep"


def adoption(current: Session) -> str:
    """Return the command that adopts a new store: with a run, or without a run if a daemon holds the store."""
    return command_line(current, "adopt" if _is_held(current) else "run --once --adopt")


def for_held(current: Session, report: Report, holds: set[Hold]) -> str:
    """Return the commands that release held topics of a report; empty if an operator cannot release them.

    Args:
        holds: the holds of the report's topics.
    """
    topics = report.held_topics()
    if Hold.FRONTIER in holds:
        topic = min(topic for topic, hold in topics.items() if hold is Hold.FRONTIER)
        return f"{command_line(current, f'approve {topic}')}\nor wait until the hold expires"
    if Hold.PAUSED in holds:
        return command_line(current, f"resume{_paused_pattern(current)}")
    if Hold.QUARANTINED in holds:
        topic = min(topic for topic, hold in topics.items() if hold is Hold.QUARANTINED)
        return command_line(current, f"resume {topic}")
    return ""


def _paused_pattern(current: Session) -> str:
    """Return the paused pattern for ``janitor resume``; empty if everything or several patterns are paused."""
    with open_state(current) as state:
        patterns = [pause.pattern for pause in state.pauses()] if state else []
    return f" {shlex.quote(patterns[0])}" if len(patterns) == 1 and patterns[0] != EVERYTHING else ""


def _is_held(current: Session) -> bool:
    """Return whether a daemon holds the store now."""
    if current.place.exclusive:
        try:
            return current.holder() is not None
        except StoreBusy:
            return True
    with open_state(current) as state:
        lease = LeaseRecord.parse(state.lease()) if state is not None else None
        return lease is not None and lease.is_renewed(current.clock.now_ms())


#: Findings that leave part of the work to the next run.
_PARTIAL = frozenset({"interrupted", "quarantine"})


def show(current: Session, report: Report, next_step: str = "", *, summary: bool = False) -> None:
    """Print a report as JSON or as text.

    Args:
        next_step: the next command, for the text.
    """
    if current.as_json:
        render.print_json(report)
    else:
        render.print_report(report, next_step, lambda text: complete(text, current.arguments()), summary=summary)


def require_topics(current: Session, engine: AnyEngine, report: Report, patterns: tuple[str, ...]) -> None:
    """Raise an error if a report without rows has a pattern that is the name of an unknown topic."""
    if report.topics or any(report.totals.kept.values()) or report.tripped or report.errors:
        return
    for pattern in patterns:
        if WILDCARDS.isdisjoint(pattern) and not engine.inspect("metadata", (pattern,), 0).rows:
            raise click.UsageError(f"unknown topic {pattern}: list the topics: {command_line(current, 'inspect meta')}")


def skip(current: Session, error: TmsError) -> int:
    """Print that another process holds the store, and return the exit code of a skipped run."""
    click.echo(printable(f"skipped: {complete(str(error), current.arguments())}"), err=True)
    return DONE


def finish(current: Session, report: Report) -> int:
    """Print the report of a run; return the exit code."""
    show(current, report, _next_step(current, report))
    if report.tripped:
        return REFUSED
    found = {note.guard for note in report.guards}
    if "lease" in found:
        return BUSY
    return PARTLY if report.errors or found & _PARTIAL else DONE


def _next_step(current: Session, report: Report) -> str:
    if any(note.guard in ("adoption", "identity") and note.tripped for note in report.guards):
        return command_line(current, "plan")
    return for_held(current, report, set(report.held_topics().values()) - {Hold.PAUSED})
