"""What a run's report means for the command that made it: its exit code, its log line, the next thing to type."""

from __future__ import annotations

import logging

from janitor.cli import render
from janitor.cli.context import Session
from janitor.policy import Hold, Rule
from janitor.report import Report

DONE, REFUSED, PARTLY = 0, 3, 5

logger = logging.getLogger(__name__)


def finish(current: Session, report: Report) -> int:
    """Print a run's report and return the exit code."""
    if current.as_json:
        render.print_json(report.to_json())
    else:
        render.print_report(report, _next_step(current, report))
    if report.tripped:
        return REFUSED
    return PARTLY if report.errors else DONE


def log_run(report: Report) -> None:
    """Say in the log what a run did, and what stopped it."""
    figures = {str(rule): report.total(rule) for rule in Rule}
    fields = {"run": report.id, **figures, "held": report.held_rows(), "seconds": report.duration_seconds}
    summary = ", ".join(f"{count} {rule}" for rule, count in figures.items())
    logger.info("run %s: %s, %d held", report.id, summary, report.held_rows(), extra={"fields": fields})
    for note in report.guards:
        level = logging.ERROR if note.tripped else logging.WARNING
        logger.log(level, "%s: %s", note.guard, note.message, extra={"fields": {"run": report.id}})
    for error in report.errors:
        logger.error("%s", error, extra={"fields": {"run": report.id}})


def _next_step(current: Session, report: Report) -> str:
    if any(note.guard in ("adoption", "identity") and note.tripped for note in report.guards):
        return f"janitor plan {current.arguments()}"
    held = sorted(topic for topic, hold in report.held_topics().items() if hold is Hold.FRONTIER)
    if held:
        return f"janitor approve {held[0]} {current.arguments()}   (or wait until it is let go)"
    return ""
