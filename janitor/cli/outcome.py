"""What a run's report means for the command that made it: its exit code and the next thing to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from janitor.cli import render
from janitor.cli.hints import for_held, typed
from janitor.cli.options import PARTLY, REFUSED
from janitor.law.policy import Hold
from janitor.report import Report
from tms_core.cli.outcome import BUSY, DONE
from tms_core.logs.printable import complete

if TYPE_CHECKING:
    from janitor.app.session import Session

#: Findings that leave part of the work to the next run.
_LEFT = frozenset({"halted", "quarantine"})


def show(current: Session, report: Report, next_step: str = "", *, summary: bool = False) -> None:
    """Print a report, for a program or for people.

    Args:
        next_step: what people would type after looking at it.
    """
    if current.as_json:
        render.print_json(report.to_json())
    else:
        render.print_report(report, next_step, lambda text: complete(text, current.arguments()), summary=summary)


def finish(current: Session, report: Report) -> int:
    """Print a run's report and return the exit code."""
    show(current, report, _next_step(current, report))
    if report.tripped:
        return REFUSED
    found = {note.guard for note in report.guards}
    if "lease" in found:
        return BUSY
    return PARTLY if report.errors or found & _LEFT else DONE


def _next_step(current: Session, report: Report) -> str:
    if any(note.guard in ("adoption", "identity") and note.tripped for note in report.guards):
        return typed(current, "plan")
    return for_held(current, report, set(report.held_topics().values()) - {Hold.PAUSED})
